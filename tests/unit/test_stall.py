"""When a worker that beats but brings no tokens counts as stalled."""

from __future__ import annotations

from tokenwire.frontend.stall import STALL_GAPS, STALL_TIMEOUT_S, Stall


def after_batches(gap_s: float, number: int = 1_000) -> tuple[Stall, float]:
    """Return a stall that saw batches at a steady pace, and the last one's time."""
    stall = Stall()
    for step in range(number):
        stall.batch(step * gap_s)
    return stall, (number - 1) * gap_s


def test_before_a_batch_nothing_is_late() -> None:
    """There is no pace yet."""
    assert Stall().silence_s(1e9) is None


def test_fast_steps_have_the_least_bound() -> None:
    """A step of 10 ms does not make a second suspicious."""
    stall, last = after_batches(0.01)

    assert stall.silence_s(last + STALL_TIMEOUT_S - 0.1) is None
    assert stall.silence_s(last + STALL_TIMEOUT_S + 0.1) is not None


def test_slow_steps_have_a_longer_bound() -> None:
    """Where a step takes a second, the bound is many of them."""
    stall, last = after_batches(1.0)

    assert stall.silence_s(last + STALL_GAPS - 1) is None
    assert stall.silence_s(last + STALL_GAPS + 1) is not None


def test_a_night_without_requests_does_not_blind_it() -> None:
    """One long gap counts as the least bound, not as hours."""
    stall, last = after_batches(0.01)
    stall.batch(last + 1e6)

    bound = STALL_GAPS * 0.06 * STALL_TIMEOUT_S  # one gap weighs 1/20
    assert stall.silence_s(last + 1e6 + bound) is not None


def test_a_reset_forgets_the_last_batch() -> None:
    """Another connection begins without one."""
    stall, last = after_batches(0.01)
    stall.reset()

    assert stall.silence_s(last + 1e6) is None
