"""An end waits for its file: news from another process, in any order, or none."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from support.stack import eventually
from tokenwire.protocol.messages import ErrorKind, FinishReason, Leg, Role, Sampling
from tokenwire.worker.capture_files import Access
from tokenwire.worker.captures import CaptureError, Captures, CaptureSettings
from tokenwire.worker.engine import EngineFinished, EngineRequest, EngineTokens
from tokenwire.worker.vllm import capturing as module
from tokenwire.worker.vllm.capture import WRITE_WAIT_S, Notifier
from tokenwire.worker.vllm.capturing import Capturing
from tokenwire.worker.vllm.engine import VllmEngine
from tokenwire.worker.vllm.request import OpenRequest

HANDLES = {"remote_host": "h"}
NEW = EngineTokens("r", [7])


class Desk:
    """A capturing engine's end of it, and what it has delivered."""

    def __init__(self, folder: Path) -> None:
        settings = CaptureSettings(str(folder), (2, 30), Access(0o640, 5), 60.0, 1_000)
        self.captures = Captures(settings)
        self.capturing = Capturing(settings.layers, self.captures)
        self.capturing.open()
        arguments = self.capturing.arguments
        assert arguments is not None
        self.arguments = arguments
        self.notifier = Notifier(arguments.notify)
        self.delivered: list[tuple[EngineTokens | None, EngineFinished]] = []

    def begin(self, num_tokens: int = 3) -> tuple[OpenRequest, str]:
        """Return an open request and the path of its file."""
        request = EngineRequest("r", [1, 2, 3], Sampling(1), capture_tokens=num_tokens)
        state = OpenRequest(request)
        wish = self.capturing.begin(state)
        assert wish is not None
        assert wish["num_tokens"] == num_tokens
        return state, str(wish["path"])

    def end(self, state: OpenRequest, path: str, leg: Leg = Leg.FULL) -> bool:
        """Let the engine end it; return whether that waits."""
        end = EngineFinished(
            "r",
            FinishReason.LENGTH,
            handover=HANDLES if leg is Leg.PREFILL else None,
            kv_transfer_params={"hidden_states_path": path},
        )
        return self.capturing.holds(state, NEW, end, self.deliver)

    def deliver(
        self, state: OpenRequest, new: EngineTokens | None, end: EngineFinished
    ) -> None:
        """Take an end, as the engine does."""
        self.capturing.ended(state)
        self.delivered.append((new, end))

    def discards(self) -> int:
        """Return how many files are to be deleted."""
        return self.captures.usage.num_discarded


@pytest_asyncio.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    """A desk that listens."""
    desk = Desk(tmp_path)
    yield desk
    desk.capturing.close()
    desk.notifier.close()


async def test_an_end_waits_for_its_file(desk: Desk) -> None:
    """And has its tokens and its path then."""
    state, path = desk.begin()
    assert desk.end(state, path)
    assert desk.delivered == []

    desk.notifier.tell(path, 100)
    await eventually(lambda: bool(desk.delivered))

    [(new, end)] = desk.delivered
    assert new is NEW
    assert (end.reason, end.error) == (FinishReason.LENGTH, "")
    assert end.kv_transfer_params == {"hidden_states_path": path}
    assert desk.discards() == 0
    assert (desk.captures.usage.num_written, desk.captures.usage.num_bytes) == (1, 100)


async def test_news_may_come_first(desk: Desk) -> None:
    """The two ways from the engine are not in step."""
    state, path = desk.begin()
    desk.notifier.tell(path, 100)
    await eventually(lambda: desk.captures.usage.num_written == 1)
    assert desk.end(state, path)
    assert [end.reason for _, end in desk.delivered] == [FinishReason.LENGTH]
    assert desk.discards() == 0


async def test_an_engine_that_waits_for_a_file_makes_progress(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker would be taken for stalled; without an end that waits it may be."""
    engine = VllmEngine("m", "m", Role.AGGREGATED, [])
    monkeypatch.setattr(engine, "_capturing", desk.capturing)

    def is_still() -> bool:
        return engine.load().num_steps == engine.load().num_steps

    state, path = desk.begin()
    assert is_still()
    desk.end(state, path)
    assert not is_still()
    assert not is_still()
    desk.notifier.tell(path, 100)
    await eventually(lambda: bool(desk.delivered))
    assert is_still()


async def test_a_file_that_failed_is_its_request_s_failure(desk: Desk) -> None:
    """With a sentence that names folder and cause; its KV is named, to be released."""
    state, path = desk.begin()
    desk.end(state, path, Leg.PREFILL)
    desk.notifier.tell(path, 0, "No space left on device")
    await eventually(lambda: bool(desk.delivered))

    [(new, end)] = desk.delivered
    folder = desk.captures.settings.folder
    assert new is None
    assert (end.reason, end.error_kind) == (FinishReason.ERROR, ErrorKind.CAPTURE)
    assert end.error == (
        f"hidden states cannot be saved in {folder}: No space left on device"
    )
    assert (end.kv_transfer_params, end.handover) == (None, HANDLES)
    assert desk.captures.usage.num_failed == 1


async def test_a_file_that_never_comes_is_given_up(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a while; should it come after all, it is deleted."""
    monkeypatch.setattr(module, "WRITE_WAIT_S", 0.0)
    state, path = desk.begin()
    desk.end(state, path)
    await eventually(lambda: bool(desk.delivered))
    assert "takes longer than" in desk.delivered[0][1].error

    desk.notifier.tell(path, 100)
    await eventually(lambda: desk.discards() == 1)
    assert len(desk.delivered) == 1


def test_the_wait_leaves_a_decode_worker_time_for_its_kv() -> None:
    """NIXL frees it 30 s behind the end of the prefill."""
    nixl_lease_s = 30.0
    assert nixl_lease_s - WRITE_WAIT_S >= 10.0


async def test_an_abort_while_it_waits_leaves_nothing(desk: Desk) -> None:
    """It ends as aborted, its file is deleted, its KV stays named."""
    state, path = desk.begin()
    desk.end(state, path, Leg.PREFILL)
    state.aborted = True
    desk.notifier.tell(path, 100)
    await eventually(lambda: bool(desk.delivered))

    end = desk.delivered[0][1]
    assert (end.reason, end.kv_transfer_params) == (FinishReason.ABORT, None)
    assert end.handover == HANDLES
    assert desk.discards() == 1


async def test_a_request_that_ended_otherwise_leaves_nothing(desk: Desk) -> None:
    """The engine has died or stopped meanwhile."""
    state, path = desk.begin()
    desk.end(state, path)
    desk.capturing.ended(state)
    desk.notifier.tell(path, 100)
    await eventually(lambda: desk.discards() == 1)
    assert desk.delivered == []


async def test_an_end_without_a_file_does_not_wait(desk: Desk) -> None:
    """The engine aborted it, or it has asked for nothing."""
    state, _ = desk.begin()
    aborted = EngineFinished("r", FinishReason.ABORT)
    assert not desk.capturing.holds(state, None, aborted, desk.deliver)

    plain = OpenRequest(EngineRequest("r", [1], Sampling(1)))
    assert desk.capturing.begin(plain) is None
    other = EngineFinished(
        "r", FinishReason.STOP, kv_transfer_params={"hidden_states_path": "/x"}
    )
    assert not desk.capturing.holds(plain, None, other, desk.deliver)


async def test_a_full_folder_refuses(desk: Desk) -> None:
    """Before the engine has computed anything."""
    desk.captures.written(1_000)
    with pytest.raises(CaptureError, match="the limit is 1000"):
        desk.begin()


async def test_nonsense_is_no_news(desk: Desk) -> None:
    """What does not look so is ignored, and a path of another kind is not touched."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as anyone:
        for data in (b"", b"x", b"\n\n", b"5", b"-1\n/x\n", b"\xff\n/x\n"):
            anyone.sendto(data, f"\0{desk.arguments.notify}")
        anyone.sendto(b"1\n/etc/passwd\n", f"\0{desk.arguments.notify}")
    state, path = desk.begin()
    desk.end(state, path)
    desk.notifier.tell(path, 1)
    await eventually(lambda: bool(desk.delivered))
    assert desk.captures.usage.num_written == 1
    assert desk.discards() == 0


async def test_news_of_another_user_is_ignored(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel says who has sent it."""
    state, path = desk.begin()
    desk.end(state, path)
    asked: list[int] = []
    me = os.getuid()

    def another() -> int:
        asked.append(me)
        return me + 1

    monkeypatch.setattr(os, "getuid", another)
    desk.notifier.tell(path, 1, "forged")
    await eventually(lambda: bool(asked))
    assert desk.delivered == []
    monkeypatch.undo()
    desk.notifier.tell(path, 1)
    await eventually(lambda: bool(desk.delivered))
    assert desk.delivered[0][1].error == ""


async def test_what_the_engine_is_told(desk: Desk) -> None:
    """Layers, folder, access; a decode worker gets the layers alone."""
    arguments = desk.arguments
    assert arguments.layers == (2, 30)
    assert arguments.access == Access(0o640, 5)
    alone = Capturing((2,), None)
    alone.open()
    assert alone.arguments is not None
    assert (alone.arguments.layers, alone.arguments.folder) == ((2,), "")
    assert (
        alone.begin(OpenRequest(EngineRequest("r", [1], Sampling(1), capture_tokens=1)))
        is None
    )
    alone.close()
    assert Capturing((), None).arguments is None
