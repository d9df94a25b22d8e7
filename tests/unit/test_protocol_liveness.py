"""When a peer is given up, and when to beat."""

from __future__ import annotations

from tokenwire.protocol.limits import HEARTBEAT_INTERVAL_S, HEARTBEAT_TIMEOUT_S
from tokenwire.protocol.liveness import Liveness


def test_a_silent_peer_is_lost_after_the_timeout() -> None:
    """At the timeout a peer still counts as alive, after it no more."""
    liveness = Liveness(100.0)
    assert not liveness.lost(100.0 + HEARTBEAT_TIMEOUT_S)
    assert liveness.lost(100.1 + HEARTBEAT_TIMEOUT_S)


def test_anything_heard_starts_anew() -> None:
    """A peer that speaks has the whole timeout again."""
    liveness = Liveness(0.0, timeout_s=4.0)
    liveness.heard(3.0)
    assert liveness.silence_s(5.0) == 2.0
    assert not liveness.lost(7.0)
    assert liveness.lost(7.5)


def test_beats_once_per_interval() -> None:
    """The first beat is due at once, the next an interval later, however often asked."""
    liveness = Liveness(0.0, interval_s=1.0)
    times = [0.0, 0.1, 0.9, 1.0, 1.5, 2.0]
    assert [now for now in times if liveness.beat_due(now)] == [0.0, 1.0, 2.0]


def test_missed_beats_are_not_made_up_for() -> None:
    """After a stall one beat is due, not one for each missed interval."""
    liveness = Liveness(0.0, interval_s=1.0)
    assert liveness.beat_due(0.0)
    assert liveness.beat_due(10.0)
    assert not liveness.beat_due(10.5)


def test_a_lost_worker_is_known_within_5_s() -> None:
    """The timeout allows three missed beats, and keeps the promise to clients."""
    assert 3 * HEARTBEAT_INTERVAL_S < HEARTBEAT_TIMEOUT_S < 5.0


def test_the_silence_of_a_process_that_slept_does_not_count() -> None:
    """After SIGCONT, or a suspended machine, every peer has its time again."""
    liveness = Liveness(0.0)
    for tick in range(1, 7):
        assert not liveness.slept(tick / 2)
    assert liveness.slept(30.0)
    assert not liveness.lost(30.0)
    assert not liveness.slept(30.5)
    assert not liveness.lost(34.0)
    assert liveness.lost(34.1)
