"""KV that a prefill worker holds for nobody is freed, through any decode worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.stack import eventually, stack
from tokenwire.protocol.messages import JsonObject, Role


async def test_a_release_waits_for_a_decode_worker(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only one was lost with the request: the KV stayed held until its lease ended."""
    async with stack(tiny_model, (Role.PREFILL, Role.DECODE)) as served:
        prefill, decode = served.workers
        released: list[tuple[str, JsonObject]] = []

        def release_kv(request_id: str, handover: JsonObject) -> None:
            released.append((request_id, handover))

        monkeypatch.setattr(decode.engine, "release_kv", release_kv)
        served.pool.set_endpoints([prefill.link.endpoint])
        assert not served.pool.release_kv("r", {"remote_engine_id": "e"})
        served.pool.set_endpoints([one.link.endpoint for one in served.workers])
        await eventually(lambda: bool(released), "the release")

        assert released == [("r", {"remote_engine_id": "e"})]
