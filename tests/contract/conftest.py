"""The stack that most tests of the HTTP surface run on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from support.stack import Stack, eventually, stack
from tokenwire.protocol.messages import Role

TOPOLOGIES = {"aggregated": (Role.AGGREGATED,), "pair": (Role.PREFILL, Role.DECODE)}


@pytest_asyncio.fixture(params=TOPOLOGIES)
async def served(
    request: pytest.FixtureRequest, tiny_model: Path
) -> AsyncIterator[Stack]:
    """A stack of each topology; nothing may be left in it."""
    async with stack(tiny_model, TOPOLOGIES[request.param]) as running:
        yield running
        await running.idle()
        links = list(running.pool.links)
        await eventually(lambda: not any(link.num_open for link in links), "no leg")
