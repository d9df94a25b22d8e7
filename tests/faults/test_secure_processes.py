"""``--processes 2`` with API keys, over TLS that asks for certificates, as it is run."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import trustme

from support.awake import within
from support.certificates import Certificates
from support.frontend_process import started
from support.keyed import Keyed, with_key
from support.stack import MODEL_NAME, SimWorker
from support.worker_process import WAIT_S
from tokenwire.protocol.messages import Role

BODY: dict[str, Any] = {"prompt": [5] * 9, "max_tokens": 40, "temperature": 0}
LIMIT = 20
"""Requests of one key. The processes share them: N times as many would be let in else."""


class Asking:
    """Requests, each on a connection of its own: either process may have it."""

    def __init__(self, url: str, context: ssl.SSLContext) -> None:
        self.url = url
        self._context = context

    async def post(self, key: str, **body: Any) -> tuple[int, str]:
        """Complete; return status and text."""
        connector = aiohttp.TCPConnector(ssl=self._context, force_close=True)
        async with (
            aiohttp.ClientSession(connector=connector) as client,
            client.post(
                f"{self.url}/v1/completions",
                json={**BODY, **body},
                headers=with_key(key),
            ) as answer,
        ):
            return answer.status, await answer.text()


async def page_of_both(url: str) -> str:
    """Return what ``--metrics-listen`` says, once both processes answer."""
    async with aiohttp.ClientSession() as client, within(WAIT_S):
        while True:
            async with client.get(f"{url}/metrics") as answer:
                page = await answer.text()
            if "tokenwire_frontend_processes_answering 2" in page:
                return page
            await asyncio.sleep(0.05)


async def is_let_in(asking: Asking) -> bool:
    """Return whether TLS lets a client in."""
    try:
        return (await asking.post("key-of-free"))[0] == 200
    except (aiohttp.ClientError, ConnectionError, ssl.SSLError):
        return False


async def test_keys_and_certificates_count_in_every_process(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Streams are whole, limits are shared, files are read again, strangers stay out."""
    files = Certificates(tmp_path)
    keys = Keyed(tmp_path / "keys", ["free"])
    keys.add("few", requests_per_minute=LIMIT)
    worker = SimWorker(tiny_model, Role.AGGREGATED, "w", ("--step-ms", "1"))
    await worker.start()
    parent = await started(
        *("--model", str(tiny_model), "--served-model-name", MODEL_NAME),
        *("--port", "0", "--worker", worker.link.endpoint),
        *(*files.mutual, *keys.arguments, "--metrics-listen", "127.0.0.1:0"),
    )
    try:
        await parent.until_line("metrics on ")
        log = "\n".join(parent.lines)
        [url] = re.findall("listening on (https://.*)", log)
        [probes] = re.findall("metrics on (http://.*)", log)
        await page_of_both(probes)

        ours = Asking(url, files.client(files.clients))
        answers = await asyncio.gather(
            *(ours.post("key-of-few", stream=True) for _ in range(2 * LIMIT))
        )
        counted = Counter(status for status, _ in answers)
        # One more is earned every three seconds: never as many as two limits allow.
        assert LIMIT <= counted[200] < 2 * LIMIT, counted
        assert counted[200] + counted[429] == 2 * LIMIT
        good = [text for status, text in answers if status == 200]
        assert all(text.endswith("data: [DONE]\n\n") for text in good)
        assert (await ours.post("key-of-nobody"))[0] == 401
        for stranger in (files.client(), files.client(trustme.CA())):
            assert not await is_let_in(Asking(url, stranger))

        before = ours
        files.issue(trustme.CA())
        files.trust(trustme.CA())
        ours = Asking(url, files.client(files.clients))
        num_let_in = 0
        async with within(WAIT_S):
            while num_let_in < 4:  # one after the other: both processes have read it
                num_let_in = num_let_in + 1 if await is_let_in(ours) else 0
                await asyncio.sleep(0.05)
        assert not await is_let_in(before)

        page = await page_of_both(probes)
        name = 'tokenwire_api_key_requests_total{key="few",outcome="ok"}'
        assert f"{name} {counted[200]}.0\n" in page
        assert 'tokenwire_connections_refused_total{reason="tls"}' in page
    finally:
        parent.process.terminate()
        assert await parent.exit_code() == 0
        await worker.stop()
