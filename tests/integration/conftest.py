"""The pair of real engines, loaded once for all modules that use it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from support.real_stack import LOAD_S, NAME, PAIR, gauge_pages
from support.up import Up, until, up
from support.vllm_engine import MODEL

LAST = "test_stack_admin.py"
"""It updates the weights of the pair. A worker that is restarted behind that, as other
tests restart one, is kept out until the next update, which nobody sends."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run ``LAST`` behind all others of this folder, whatever the order was."""
    folder = Path(__file__).parent
    last = [item for item in items if item.path == folder / LAST]
    rest = [item for item in items if item.path != folder / LAST]
    at = max(
        (n for n, one in enumerate(rest, 1) if folder in one.path.parents), default=0
    )
    items[:] = [*rest[:at], *last, *rest[at:]]


# Of the folder, not of the session: the tests of other folders want the machine.
@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Up]:
    """A prefill and a decode worker over NIXL, in fp32."""
    async with up(
        MODEL,
        tmp_path_factory.mktemp("pair"),
        engine="vllm",
        workers=PAIR,
        timeout_s=LOAD_S,
        engine_arguments=(
            *("--dtype", "float32", "--max-model-len", "2048"),
            # Short steps: an abort takes effect between two of them.
            *("--max-num-batched-tokens", "256"),
            *("--enable-lora", "--max-lora-rank", "8"),
        ),
        name=NAME,
        settings={
            # A killed worker is missed until its engine has loaded again.
            "TOKENWIRE_WORKER_WAIT_S": str(LOAD_S),
            "TOKENWIRE_ADMIN_PORT": "0",
        },
    ) as running:
        # It serves a moment before it says where the workers' gauges are.
        workers = ("prefill-0", "decode-0")
        await until(
            lambda: all(gauge_pages(running, worker) for worker in workers),
            60,
            "announced",
        )
        yield running


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def client(pair: Up) -> AsyncIterator[AsyncOpenAI]:
    """The official client."""
    async with AsyncOpenAI(
        base_url=pair.url + "/v1", api_key="none", max_retries=0, timeout=120
    ) as made:
        yield made
