"""The start of an engine that does not come to its end; vLLM itself is not needed."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any, cast

import pytest

from tokenwire.protocol.messages import Role
from tokenwire.worker.engine import EngineStartError
from tokenwire.worker.vllm import binding, engine as module


async def test_a_start_that_is_cancelled_ends_without_a_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it fails of is that its processes were killed: nobody is told of that."""
    is_loading, is_killed = threading.Event(), threading.Event()

    class Processes:
        def kill(self) -> None:
            is_killed.set()

    def load(_progress: object) -> None:
        is_loading.set()
        assert is_killed.wait(30)
        msg = "vLLM did not start: its process was killed"
        raise EngineStartError(msg)

    complaints: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    engine = module.VllmEngine("m", "m", Role.AGGREGATED, [])
    monkeypatch.setattr(binding, "load", lambda: None)
    monkeypatch.setattr(module, "Descendants", Processes)
    monkeypatch.setattr(engine, "_load", load)
    starting = asyncio.create_task(engine.start(cast("Any", None), lambda _: None))
    assert await asyncio.to_thread(is_loading.wait, 30)

    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting

    del starting
    await asyncio.sleep(0)  # the loop's own step holds it until it is over
    gc.collect()
    assert is_killed.is_set()
    assert complaints == []
