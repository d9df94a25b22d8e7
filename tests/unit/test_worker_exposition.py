"""The text of the engine's metrics: made in a thread, once for all who ask."""

from __future__ import annotations

import asyncio
import logging
import threading
from functools import partial

import pytest

from support.awake import STANDSTILL_S
from tokenwire.worker.exposition import FRESH_S, MAX_TEXT_BYTES, Exposition

WAIT_S = 10.0 + STANDSTILL_S


class Maker:
    """A source of texts that can be held back."""

    def __init__(self, *texts: str) -> None:
        self.texts = list(texts)
        self.num_made = 0
        self.threads: set[int] = set()
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def __call__(self) -> str:
        """Return the next text; the last one stays."""
        self.threads.add(threading.get_ident())
        assert self.may_go_on.wait(WAIT_S)
        text = self.texts[min(self.num_made, len(self.texts) - 1)]
        self.num_made += 1
        return text


async def ask(exposition: Exposition, who: bytes = b"a") -> str:
    """Return the text that *who* gets."""
    answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    exposition.ask(who, answer.set_result)
    return await asyncio.wait_for(answer, WAIT_S)


async def test_it_is_made_beside_the_event_loop() -> None:
    """In another thread, while the loop goes on."""
    make = Maker("vllm:a 1.0\n")

    assert await ask(Exposition(make)) == "vllm:a 1.0\n"
    assert threading.get_ident() not in make.threads


async def test_all_who_ask_at_once_get_one_text() -> None:
    """A question of a peer that asks again replaces the one before."""
    make = Maker("first", "second")
    make.may_go_on.clear()
    exposition = Exposition(make)
    taken: list[tuple[str, str]] = []

    def note(who: str, text: str) -> None:
        taken.append((who, text))

    for who in ("a", "b", "a"):
        exposition.ask(who.encode(), partial(note, who))
    make.may_go_on.set()
    await ask(exposition, b"c")

    assert sorted(taken) == [("a", "first"), ("b", "first")]
    assert make.num_made == 1


async def test_nobody_hears_what_is_ready_after_the_end() -> None:
    """The link is closed by then."""
    make = Maker("vllm:a 1.0\n")
    make.may_go_on.clear()
    exposition = Exposition(make)
    taken: list[str] = []
    exposition.ask(b"a", taken.append)
    exposition.close()
    make.may_go_on.set()
    await ask(exposition, b"b")

    assert not taken


async def test_a_text_is_given_again_until_it_is_old(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Asking as often as one likes makes it once a second."""
    loop = asyncio.get_running_loop()
    now = loop.time()
    monkeypatch.setattr(loop, "time", lambda: now)
    exposition = Exposition(Maker("first", "second"))

    assert [await ask(exposition) for _ in range(5)] == ["first"] * 5
    now += FRESH_S
    assert await ask(exposition) == "second"


async def test_a_text_that_is_too_long_is_not_passed_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An error in the worker's log, and nothing that would break the link."""
    exposition = Exposition(Maker("x" * (MAX_TEXT_BYTES + 1)))

    assert await ask(exposition) == ""
    assert f"have {MAX_TEXT_BYTES + 1} bytes" in caplog.text


async def test_a_collector_that_fails_ends_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its traceback is in the log; who asked gets an empty text."""

    def fail() -> str:
        msg = "no such gauge"
        raise RuntimeError(msg)

    caplog.set_level(logging.ERROR)
    assert await ask(Exposition(fail)) == ""
    assert "no such gauge" in caplog.text
