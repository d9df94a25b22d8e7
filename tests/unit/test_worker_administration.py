"""One action at a time, its answer, and what the frontends are told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from support.worker_fakes import FakeEngine
from tokenwire.protocol.admin import LoadLora, Pause, Resume, UpdateWeights
from tokenwire.protocol.limits import MAX_ADAPTERS
from tokenwire.protocol.messages import (
    Adapter,
    Admin,
    AdminDone,
    Leg,
    Sampling,
    Status,
    Submit,
)
from tokenwire.worker.administration import Administration
from tokenwire.worker.engine import AdminOutcome


class Desk:
    """An administration with a fake engine; it records what is said, in order."""

    def __init__(self) -> None:
        self.engine = FakeEngine()
        self.said: list[Any] = []
        self.administration = Administration(
            self.engine, self, model="m", weight_version="default"
        )

    def ask(self, action: str, **arguments: Any) -> None:
        """Send an Admin."""
        self.administration.begin(Admin("a", action, arguments), self._answered)

    def _answered(self, message: AdminDone) -> None:
        self.said.append(message)

    def done(self, outcome: AdminOutcome | None = None, number: int = -1) -> None:
        """End an action at the engine; the last one."""
        self.engine.administered[number][1](outcome or AdminOutcome())

    def take(self) -> list[Any]:
        """Return what was said since."""
        said, self.said = self.said, []
        return said

    # What the service is told:

    def status_changed(self) -> None:
        """Record the status."""
        self.said.append(self.administration.status)

    def abort_all(self) -> None:
        """Record it."""
        self.said.append("abort_all")

    def kv_is_old(self, concerns: Callable[[Submit], bool]) -> None:
        """Record whom it concerns."""
        self.said.append("".join(n for n, one in SUBMITS.items() if concerns(one)))

    def adapter_leaves(self, lora: str) -> None:
        """Record it."""
        self.said.append(f"{lora} leaves")

    def give_up_all(self) -> None:
        """Record it."""
        self.said.append("give_up_all")


DONE = AdminDone("a")
SUBMITS = {
    "f": Submit("f", b"", Sampling(1)),
    "d": Submit("d", b"", Sampling(1), leg=Leg.DECODE),
    "l": Submit("l", b"", Sampling(1), lora="l"),
}


def test_a_pause_is_told_before_it_is_made() -> None:
    """Else frontends would take a worker for stalled that stands on purpose."""
    desk = Desk()
    desk.ask("pause", mode="keep", clear_cache=False)
    assert desk.take() == [Status(paused=True, busy="pause")]
    assert desk.engine.administered[0][0] == Pause("keep", clear_cache=False)
    desk.done()
    assert desk.take() == [Status(paused=True), DONE]
    desk.ask("resume")
    desk.done()
    assert desk.take()[-2:] == [Status(), DONE]


def test_a_pause_that_fails_is_taken_back() -> None:
    """Unless there was one before."""
    desk = Desk()
    failed = AdminOutcome("no", "failed")
    desk.ask("pause")
    desk.done(failed)
    assert desk.take()[-2:] == [Status(), AdminDone("a", "no", "failed")]
    desk.ask("pause", clear_cache=False)
    desk.done()
    desk.ask("pause")
    desk.done(failed)
    assert desk.administration.status.paused


def test_a_mode_that_aborts_ends_requests_behind_the_status() -> None:
    """So no frontend sends others into their place."""
    desk = Desk()
    desk.ask("pause")
    assert desk.take() == [Status(paused=True, busy="pause"), "abort_all"]


def test_one_action_at_a_time() -> None:
    """The second is refused; but a resume ends a pause that waits."""
    desk = Desk()
    desk.ask("pause", mode="wait", clear_cache=False)
    desk.take()
    desk.ask("reset_prefix_cache")
    assert desk.take() == [
        AdminDone("a", "pause is under way: one action at a time", "busy")
    ]
    desk.ask("resume")
    assert isinstance(desk.engine.administered[-1][0], Resume)
    desk.done(AdminOutcome("it was resumed", "failed"), 0)
    desk.done()
    assert not desk.administration.status.paused
    assert desk.take()[-1] == DONE


def test_an_update_is_told_when_the_old_weights_have_ended() -> None:
    """First what reads their KV ends, then the status, then the answer."""
    desk = Desk()
    desk.ask("update_weights", weight_version="v", update=7, weight_dir="/w")
    assert desk.take() == [Status(busy="update_weights")]
    assert desk.engine.administered[0][0] == UpdateWeights("v", 7, "/w")
    desk.done()
    assert desk.take() == ["fdl", Status("v", 7, cache_epoch=1), DONE]
    desk.ask("update_weights", weight_version="v", update=7, weight_dir="/w")
    desk.ask("update_weights", weight_version="v" * 257, update=8, weight_dir="/w")
    assert [one.error_kind for one in desk.take()] == ["invalid", "invalid"]


@pytest.mark.parametrize(
    ("action", "arguments", "concerned"),
    [
        ("reset_prefix_cache", {}, ["fdl"]),
        (
            "update_weights",
            {"weight_version": "v", "update": 7, "reset_prefix_cache": False},
            ["d"],
        ),
        (
            "load_lora_adapter",
            {"lora_name": "l", "lora_path": "/l", "update": 3, "load_inplace": True},
            ["l"],
        ),
        ("resume", {}, []),
    ],
)
def test_kv_of_before_is_forgotten_where_that_is_asked(
    action: str, arguments: dict[str, Any], concerned: list[str]
) -> None:
    """By what has not begun: before the status; and not where the action failed."""
    desk = Desk()
    desk.ask(action, **arguments)
    desk.done(AdminOutcome("no", "failed"))
    assert [one for one in desk.take() if isinstance(one, str)] == []
    desk.ask(action, **arguments)
    desk.take()
    desk.done()
    assert desk.take()[: len(concerned)] == concerned


def test_who_runs_on_an_adapter_ends_before_it_is_unloaded() -> None:
    """And none begins on it meanwhile; if that fails, it is there as before."""
    desk = Desk()
    desk.ask("load_lora_adapter", lora_name="l", lora_path="/l", update=3)
    desk.done()
    desk.ask("load_lora_adapter", lora_name="k", lora_path="/k", update=4)
    desk.done()
    desk.take()
    desk.ask("unload_lora_adapter", lora_name="l")
    adapters = [Adapter("l", 3), Adapter("k", 4)]
    busy = Status(adapters=adapters, busy="unload_lora_adapter")
    assert desk.take() == [busy, "l leaves"]
    updates = [desk.administration.update_of(name) for name in ("l", "k", "")]
    assert updates == [None, 4, 0]
    desk.done(AdminOutcome("no", "failed"))
    assert desk.administration.update_of("l") == 3
    desk.ask("unload_lora_adapter", lora_name="l")
    desk.done()
    assert desk.administration.status == Status(adapters=adapters[1:])


def test_weights_that_were_loaded_in_part_serve_nobody() -> None:
    """What runs goes on elsewhere; the next good update heals it."""
    desk = Desk()
    arguments = {"weight_version": "v", "weight_dir": "/w"}
    desk.ask("update_weights", update=7, **arguments)
    desk.done(AdminOutcome("half", "failed", is_broken=True))
    assert desk.take()[1:] == [
        Status(fault="half"),
        "give_up_all",
        AdminDone("a", "half", "failed"),
    ]
    desk.ask("update_weights", update=8, **arguments)
    desk.done()
    assert desk.administration.status.fault == ""


def test_adapters() -> None:
    """Loaded, known by their update, loaded anew in place alone, unloaded."""
    desk = Desk()
    desk.ask("load_lora_adapter", lora_name="x", lora_path="/x", update=3)
    desk.done()
    assert desk.take()[-2:] == [Status(adapters=[Adapter("x", 3)]), DONE]
    assert desk.administration.update_of("x") == 3
    assert desk.administration.update_of("y") is None
    desk.ask("load_lora_adapter", lora_name="x", lora_path="/x", update=4)
    assert desk.take()[0].error_kind == "invalid"
    desk.ask(
        "load_lora_adapter", lora_name="x", lora_path="/y", update=5, load_inplace=True
    )
    assert desk.engine.administered[-1][0] == LoadLora("x", "/y", 5, load_inplace=True)
    desk.done()
    assert desk.administration.update_of("x") == 5
    desk.ask("unload_lora_adapter", lora_name="y")
    assert desk.take()[-1].error_kind == "not_found"
    desk.ask("unload_lora_adapter", lora_name="x")
    desk.done()
    assert desk.administration.status.adapters == []


def test_adapters_are_bounded() -> None:
    """Their names must fit into one Status."""
    desk = Desk()
    for number in range(MAX_ADAPTERS + 1):
        desk.ask("load_lora_adapter", lora_name=f"a{number}", lora_path="/", update=1)
        if number < MAX_ADAPTERS:
            desk.done()
    assert desk.take()[-1].error == "256 adapters are loaded, the limit"


@pytest.mark.parametrize(
    ("action", "arguments"),
    [("fly", {}), ("pause", {"mode": "x"}), ("sleep", {"level": "1"}), ("", {})],
)
def test_what_it_does_not_know_it_says(action: str, arguments: dict[str, Any]) -> None:
    """A newer frontend's action is refused by one answer; the engine is not asked."""
    desk = Desk()
    desk.ask(action, **arguments)
    assert [one.error_kind for one in desk.take()] == ["unsupported"]
    assert not desk.engine.administered


def test_what_the_engine_cannot_do_ends_no_request() -> None:
    """A sleep that ends what runs, where there is no sleep mode: it is refused before."""
    desk = Desk()
    desk.engine.refusal = "there is no sleep mode"
    desk.ask("sleep", level=1, mode="abort")
    (refused,) = desk.take()
    assert (refused.error_kind, refused.error) == ("unsupported", desk.engine.refusal)
    assert not desk.engine.administered
    assert not desk.administration.status.paused
    desk.engine.refusal = ""
    desk.ask("sleep", level=1, mode="abort")
    assert "abort_all" in desk.take()


def test_an_engine_that_does_not_go_on_serves_nobody() -> None:
    """What runs goes on elsewhere; a resume that is answered takes it back."""
    desk = Desk()
    desk.ask("pause", mode="wait")
    desk.take()
    desk.done(AdminOutcome("late", "timeout", is_stuck=True))
    assert desk.take() == [
        Status(fault="it stands still: late"),
        "give_up_all",
        AdminDone("a", "late", "timeout"),
    ]
    desk.ask("reset_prefix_cache")
    desk.done()
    assert desk.administration.status.fault
    desk.ask("resume")
    desk.done()
    assert desk.administration.status.fault == ""
