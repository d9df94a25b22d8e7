"""When a worker that beats but brings no tokens counts as stalled."""

from __future__ import annotations

import pytest

from tokenwire.frontend.stall import (
    FIRST_TOKEN_TIMEOUT_S,
    STALL_GAPS,
    STALL_TIMEOUT_S,
    STILL_STEPS,
    Stall,
)


def after_batches(gap_s: float, number: int = 1_000) -> tuple[Stall, float]:
    """Return a stall that saw batches at a steady pace, and the last one's time."""
    stall = Stall()
    stall.begin(0.0)
    for step in range(number):
        stall.batch(step * gap_s)
    return stall, (number - 1) * gap_s


def test_without_a_request_nothing_is_late() -> None:
    """Nobody waits."""
    stall = Stall()
    assert stall.silence_s(1e9, under_way=False) is None

    stall.begin(5.0)
    stall.batch(6.0)
    stall.idle()
    assert stall.silence_s(1e9, under_way=False) is None


def test_fast_steps_have_the_least_bound() -> None:
    """A step of 10 ms does not make a second suspicious."""
    stall, last = after_batches(0.01)

    soon, late = last + STALL_TIMEOUT_S - 0.1, last + STALL_TIMEOUT_S + 0.1
    assert stall.silence_s(soon, under_way=True) is None
    assert stall.silence_s(late, under_way=True) == pytest.approx(late - last)


def test_slow_steps_have_a_longer_bound() -> None:
    """Where a step takes a second, the bound is many of them."""
    stall, last = after_batches(1.0)

    assert stall.silence_s(last + STALL_GAPS - 1, under_way=True) is None
    assert stall.silence_s(last + STALL_GAPS + 1, under_way=True) is not None


@pytest.mark.parametrize("brought", [False, True], ids=["never", "before"])
def test_waiting_for_a_first_token_may_take_longer(brought: bool) -> None:
    """Whether or not the worker has brought a batch for others before."""
    stall = Stall()
    stall.begin(100.0)
    if brought:
        stall.batch(100.0)

    soon, late = 99.0 + FIRST_TOKEN_TIMEOUT_S, 101.0 + FIRST_TOKEN_TIMEOUT_S
    assert stall.silence_s(soon, under_way=False) is None
    assert stall.silence_s(late, under_way=False) is not None


def test_idle_times_leave_the_bound_as_it_is() -> None:
    """A lightly loaded worker is found out as soon as a busy one."""
    stall, last = after_batches(0.01)
    for request in range(1, 50):
        stall.idle()
        begins = last + request * 60.0
        stall.begin(begins)
        for step in range(10):
            stall.batch(begins + 1.0 + step * 0.01)
        now = begins + 1.1 + STALL_TIMEOUT_S
        assert stall.silence_s(now, under_way=True) is not None


@pytest.mark.parametrize("under_way", [True, False])
def test_an_engine_that_makes_steps_works(*, under_way: bool) -> None:
    """On what others asked for, or on one long prompt; but not for ever."""
    stall = Stall()
    stall.begin(0.0)
    for second in range(1, int(FIRST_TOKEN_TIMEOUT_S)):
        stall.steps(second, float(second))
        assert stall.silence_s(second + 0.9, under_way=under_way) is None

    late = FIRST_TOKEN_TIMEOUT_S + 1.0
    stall.steps(1_000, late)
    assert stall.silence_s(late, under_way=under_way) == late


@pytest.mark.parametrize(
    ("under_way", "bound"),
    [(True, STALL_TIMEOUT_S), (False, STILL_STEPS * STALL_TIMEOUT_S)],
)
def test_an_engine_that_stands_still_is_found_out(
    *, under_way: bool, bound: float
) -> None:
    """Before a first token, too, and long before a queue would be suspicious."""
    stall = Stall()
    stall.steps(7, 0.0)
    stall.begin(100.0)
    stall.steps(8, 101.0)
    stall.steps(8, 102.0)

    assert bound < FIRST_TOKEN_TIMEOUT_S
    assert stall.silence_s(100.9 + bound, under_way=under_way) is None
    assert stall.silence_s(101.1 + bound, under_way=under_way) is not None
