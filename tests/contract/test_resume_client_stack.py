"""The client of resumable generations on a stack that breaks under it: nothing differs."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from pathlib import Path
from typing import Any

import pytest
from resume_client import Patience, Progress, Refused, ResumableStream

from support.resumable import PATHS, texts_after_each_id
from support.stack import eventually
from support.two_frontends import LIVES, STRIKES, as_promised, same, struck, two

BYTES = list(range(3, 259))  # each a byte: mostly no character by itself
ASKS: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "hello"}]},
    "completions": {"prompt": "hello"},
}
SAMPLED: dict[str, Any] = {
    "max_tokens": 200,
    "temperature": 0.8,
    "seed": 7,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.2,
    "stream_options": {"include_usage": True},
}


@pytest.mark.parametrize("route", PATHS)
@pytest.mark.parametrize("name", STRIKES)
@pytest.mark.parametrize("life", LIVES)
async def test_a_text_is_the_same_whatever_breaks(
    tiny_model: Path, life: str, route: str, name: str
) -> None:
    """Ids, text, the end, usage: cut behind half a character too."""
    body = {**ASKS[route], **SAMPLED, "allowed_token_ids": BYTES}
    body["nvext"] = {"resumable": {"on_disconnect": life}}
    async with two(tiny_model) as stack:
        async with ResumableStream(stack.urls, PATHS[route], body) as stream:
            calm = await stream.complete()
        ids, model = calm.token_ids, stack.frontends[0].model
        texts = texts_after_each_id(model, ids)
        half = next(
            k
            for k in range(60, len(ids))
            if b"".join(map(model.token_bytes, ids[:k])).decode(errors="replace")
            != texts[k]
        )

        outcome, _ = await struck(stack, PATHS[route], body, half, STRIKES[name])

    same(outcome, calm)
    as_promised(outcome, name, life)


async def test_with_a_signed_checkpoint_its_client_goes_on(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Behind an interruption, once a worker is there again; another client is refused."""
    keys = tmp_path / "keys"
    keys.write_text(secrets.token_hex(32))
    keys.chmod(0o600)
    arguments = ("--resume-key-file", str(keys), "--worker-wait-s", "0.1")
    route, body = PATHS["completions"], {"prompt": "hello", **SAMPLED}
    patience = Patience(max_attempts=1_000, first_s=0.01, longest_s=0.05)
    async with two(tiny_model, arguments=arguments) as stack:
        async with ResumableStream(stack.urls, route, body, "alice") as stream:
            calm = await stream.complete()
        async with ResumableStream(
            stack.urls, route, body, "alice", patience=patience
        ) as stream:
            async for _ in stream:
                if len(stream.progress.token_ids) == 40:
                    break
            prefill, *decode = stack.workers
            for worker in decode:
                await worker.die()
            going_on = asyncio.create_task(stream.complete())
            await eventually(lambda: stream.progress.is_gone, "interrupted")
            stored = Progress.of(dataclasses.asdict(stream.progress))
            async with stack.another_worker("new") as worker:
                for one in stack.frontends:
                    await one.know([prefill, worker])
                async with ResumableStream(
                    stack.urls, route, body, "bob", progress=stored
                ) as theirs:
                    with pytest.raises(Refused) as caught:
                        await theirs.complete()
                outcome = await going_on

    assert (caught.value.status, caught.value.code) == (403, "checkpoint_forbidden")
    same(outcome, calm)
    assert outcome.num_resumes == 1
    assert "by checkpoint" in outcome.log[-1]
