"""When a process is started again, and when it is given up."""

from __future__ import annotations

import pytest

from tokenwire.protocol.restart import (
    Again,
    GiveUp,
    RestartPolicy,
    Restarts,
    status_text,
)


def test_backs_off_and_stays_bounded() -> None:
    """The delay doubles from 1 s and never passes 30 s, however long it goes on."""
    restarts = Restarts(RestartPolicy())
    restarts.up(0.0)
    verdicts = [restarts.ended(1.0, -9) for _ in range(2_000)]
    assert verdicts[:6] == [Again(d) for d in (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)]
    assert verdicts[-1] == Again(30.0)


def test_gives_up_what_never_came_up() -> None:
    """Three failed starts in a row end it."""
    restarts = Restarts(RestartPolicy())
    assert restarts.ended(1.0, 1) == Again(1.0)
    assert restarts.ended(2.0, 1) == Again(2.0)
    assert restarts.ended(3.0, 1) == GiveUp("did not come up, 3 times in a row")


def test_a_bad_setting_is_not_tried_again() -> None:
    """Exit code 2 before the first time up ends it at once."""
    assert isinstance(Restarts(RestartPolicy()).ended(1.0, 2), GiveUp)


def test_exit_code_2_after_being_up_is_a_crash() -> None:
    """What has served with these settings is started again whatever it exits with."""
    restarts = Restarts(RestartPolicy())
    restarts.up(0.0)
    assert restarts.ended(1.0, 2) == Again(1.0)


@pytest.mark.parametrize(("up_for_s", "delay_s"), [(59.9, 2.0), (60.0, 1.0)])
def test_a_stable_time_forgives(up_for_s: float, delay_s: float) -> None:
    """Up for 60 s, a process starts over with the first delay; a shorter time not."""
    restarts = Restarts(RestartPolicy())
    restarts.up(0.0)
    restarts.ended(1.0, 1)
    restarts.up(100.0)
    assert restarts.ended(100.0 + up_for_s, 1) == Again(delay_s)


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (0, "exit code 0"),
        (3, "exit code 3"),
        (-9, "signal 9 (SIGKILL)"),
        (-40, "signal 40"),
    ],
)
def test_status_text(status: int, text: str) -> None:
    """An exit status is told as an exit code or as a signal with its name."""
    assert status_text(status) == text
