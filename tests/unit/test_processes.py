"""The parent of a frontend's processes, without any."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import cast

import msgspec
import pytest

from support.awake import STANDSTILL_S
from tokenwire.frontend import processes
from tokenwire.frontend.child import watch_parent
from tokenwire.frontend.config import parse_config
from tokenwire.frontend.control import (
    MAX_FRAME_BYTES,
    Ask,
    FromParent,
    Kind,
    Page,
    framed,
    read,
)
from tokenwire.frontend.processes import Processes
from tokenwire.frontend.spawned import Spawned

OPTIONS = ["--model", "m", "--worker", "tcp://127.0.0.1:1"]


class Fake:
    """A process that tells its page, or never does."""

    is_up = True

    def __init__(self, parent: Processes, number: int, *, answers: bool = True) -> None:
        self.number = number
        self.num_asked = 0
        self._parent = parent
        self._answers = answers
        self._answer: asyncio.Future[None] | None = None

    def ask(self, kind: Kind) -> asyncio.Future[None]:
        """Answer soon."""
        self.num_asked += 1
        answer = asyncio.get_running_loop().create_future()
        if self._answers:
            asyncio.get_running_loop().call_soon(self._tell, answer, kind)
        return answer

    def _tell(self, answer: asyncio.Future[None], kind: Kind) -> None:
        page = f"# HELP c_total C.\n# TYPE c_total counter\nc_total {self.num_asked}\n"
        page += (
            "# HELP tokenwire_frontend_processes_answering A.\n"
            "# TYPE tokenwire_frontend_processes_answering gauge\n"
            "tokenwire_frontend_processes_answering 1\n"
        )
        if kind == "live":
            page = f'{{"process":{self.number}}}'
        self._parent.told(cast("Spawned", self), page, kind)
        answer.set_result(None)


def parent_of(*answers: bool) -> tuple[Processes, list[Fake]]:
    """Return a parent of processes that answer or do not."""
    parent = Processes(parse_config([*OPTIONS, "--processes", str(len(answers))]), [])
    fakes = [Fake(parent, n, answers=one) for n, one in enumerate(answers)]
    for fake in fakes:
        parent._running[fake.number] = cast("Spawned", fake)  # pyright: ignore[reportPrivateUsage]
    return parent, fakes


async def test_a_process_that_does_not_answer_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a bounded wait the page is there, and says so."""
    monkeypatch.setattr(processes, "WAIT_S", 0.01)
    parent, _ = parent_of(True, False, True)
    lines = (await parent.page("metrics")).splitlines()
    assert "tokenwire_frontend_processes_answering 2.0" in lines
    assert "c_total 2.0" in lines
    assert await parent.page("live") == '[{"process":0},{"process":2}]'


async def test_a_process_that_ends_while_others_are_waited_for_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its page went with it: the others' are told, and the parent goes on."""
    monkeypatch.setattr(processes, "WAIT_S", 0.01)
    parent, fakes = parent_of(True, False, True)
    first, *_ = fakes

    async def end_once_told() -> None:
        while not parent._moments.pop(first.number, None):  # pyright: ignore[reportPrivateUsage]
            await asyncio.sleep(0)
        del parent._running[first.number]  # pyright: ignore[reportPrivateUsage]

    page, _ = await asyncio.gather(parent.page("live"), end_once_told())
    assert page == '[{"process":2}]'


async def test_who_asks_meanwhile_waits_for_the_next_round() -> None:
    """A page is never older than the question, and two rounds serve any number."""
    parent, fakes = parent_of(True, True)
    first = asyncio.create_task(parent.page("metrics"))
    while not fakes[0].num_asked:
        await asyncio.sleep(0)
    later = [asyncio.create_task(parent.page("metrics")) for _ in range(50)]
    assert "c_total 2.0" in await first
    assert all("c_total 4.0" in page for page in await asyncio.gather(*later))
    assert [fake.num_asked for fake in fakes] == [2, 2]


@pytest.mark.parametrize("text", ["-1", "65", "many", "1.5", ""])
def test_numbers_of_processes_are_bounded(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is no number from 0 to 64, or auto, stops the start with a sentence."""
    with pytest.raises(SystemExit):
        parse_config([*OPTIONS, f"--processes={text}"])
    assert "--processes" in capsys.readouterr().err


def test_auto_is_at_least_one() -> None:
    """0 is another way to write it."""
    numbers = [
        parse_config([*OPTIONS, "--processes", text]).processes
        for text in ("auto", "0")
    ]
    assert numbers[0] == numbers[1] >= 1
    assert parse_config(OPTIONS).processes == 1


async def test_frames_come_whole_or_not_at_all() -> None:
    """One that is cut, or that is too long, is the end of what the other side says."""
    decoder = msgspec.msgpack.Decoder(FromParent)
    reader = asyncio.StreamReader()
    reader.feed_data(framed(Ask(7)) + framed(Page(8, "text")) + framed(Ask(9))[:-1])
    reader.feed_eof()
    assert await read(reader, decoder) == Ask(7)
    assert await read(reader, decoder) == Page(8, "text")
    assert await read(reader, decoder) is None

    reader = asyncio.StreamReader()
    reader.feed_data((MAX_FRAME_BYTES + 1).to_bytes(4, "big") + framed(Ask(1)))
    assert await read(reader, decoder) is None


def test_a_process_that_hangs_ends_with_its_parent() -> None:
    """It need not come to its event loop for that; what a parent says is not touched."""
    ours, theirs = socket.socketpair()
    gone = threading.Event()
    thread = watch_parent(theirs, gone.set, grace_s=0.0)
    ours.send(b"said")
    assert thread.is_alive()
    assert theirs.recv(4) == b"said"
    assert not gone.is_set()
    ours.close()
    assert gone.wait(STANDSTILL_S)
    thread.join()
    theirs.close()
