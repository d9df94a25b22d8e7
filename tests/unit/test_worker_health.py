"""Whether a worker is live and ready, by its states and a clock of the test's."""

from __future__ import annotations

from support.clock import MovedClock
from tokenwire.worker.health import STANDSTILL_S, Health


def test_a_worker_is_live_however_long_its_engine_loads() -> None:
    """Only the startup probe has a limit for that."""
    clock = MovedClock(lambda: 0.0)
    health = Health(clock)
    clock.by_s += 10 * STANDSTILL_S
    assert (health.is_live, health.is_ready) == (True, False)


def test_a_loop_that_stands_still_is_neither_live_nor_ready() -> None:
    """Until it turns again."""
    clock = MovedClock(lambda: 0.0)
    health = Health(clock)
    health.serving()
    assert (health.is_live, health.is_ready) == (True, True)
    clock.by_s += STANDSTILL_S
    assert (health.is_live, health.is_ready) == (False, False)
    health.beat()
    assert (health.is_live, health.is_ready) == (True, True)


def test_a_worker_that_stops_is_live_and_not_ready() -> None:
    """The engine may take its time; beats of the drain change nothing."""
    clock = MovedClock(lambda: 0.0)
    health = Health(clock)
    health.serving()
    health.stopping()
    health.beat()
    clock.by_s += 10 * STANDSTILL_S
    assert (health.is_live, health.is_ready) == (True, False)


def test_only_the_two_paths_are_probes() -> None:
    """All others are the metrics'."""
    health = Health()
    assert health.answer("/metrics") is None
    assert health.answer("/ready/") is None
    live, ready = health.answer("/live"), health.answer("/ready")
    assert live == (200, "starting")
    assert ready == (503, "starting")
