"""Long inputs: taken whole, prepared beside the event loop, and never waited for."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import pytest
import pytest_asyncio

from support.awake import STANDSTILL_S
from support.stack import WAIT_S, Stack, eventually, stack
from support.tiny_model import write_tiny_model
from tokenwire.frontend import prompts, reading
from tokenwire.frontend.threads import (
    LONG_BODY_BYTES,
    LONG_CHARS,
    LONG_IDS,
    is_long_conversation,
)
from tokenwire.frontend.tokenizer import TextModel
from tokenwire.protocol.messages import Role

P = ParamSpec("P")
T = TypeVar("T")
MIB = 1024 * 1024
VOCAB_SIZE = 200_000
MAX_MODEL_LEN = 3_000_000
OPTIONS = (
    *("--step-ms", "0", "--prefill-tokens-per-s", "0"),
    *("--max-model-len", str(MAX_MODEL_LEN), "--num-blocks", "200000"),
    *("--max-num-batched-tokens", str(MAX_MODEL_LEN)),
)


class Held(Executor):
    """An executor whose work begins when the test says so."""

    def __init__(self) -> None:
        self.num_waiting = 0
        self._go = threading.Event()
        self._pool = ThreadPoolExecutor(2)

    def submit(
        self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]:
        """Run *fn* once it may."""
        self.num_waiting += 1

        def work() -> T:
            assert self._go.wait(WAIT_S + STANDSTILL_S)
            return fn(*args, **kwargs)

        return self._pool.submit(work)

    def release(self) -> None:
        """Let the work begin, all that is to come included."""
        self._go.set()

    def close(self) -> None:
        """End the threads."""
        self.release()
        self._pool.shutdown()


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with ids of six digits."""
    folder = write_tiny_model(tmp_path_factory.mktemp("wide") / "tiny")
    config = json.loads((folder / "config.json").read_text())
    config |= {"vocab_size": VOCAB_SIZE}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest_asyncio.fixture
async def wide(wide_model: Path) -> AsyncIterator[Stack]:
    """A pair of workers that take very long prompts."""
    roles = (Role.PREFILL, Role.DECODE)
    async with stack(wide_model, roles, OPTIONS) as running:
        yield running
        await running.idle()


@pytest.mark.pitfall(31)
async def test_eight_mebibytes_of_ids_are_a_prompt(wide: Stack) -> None:
    """They reach the engine to the id, and come back so."""
    ids = [VOCAB_SIZE - 1 - n % 90_000 for n in range(1_050_000)]
    body = json.dumps({"prompt": ids, "max_tokens": 1, "return_token_ids": True})
    assert len(body) > 8 * MIB

    reply = await wide.post("/v1/completions", body.encode())

    assert reply.status == 200, reply.text[:300]
    assert reply.json["nvext"]["prompt_token_ids"] == ids
    assert reply.json["usage"]["prompt_tokens"] == len(ids)


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
async def test_a_mebibyte_of_text_is_a_prompt(wide: Stack, endpoint: str) -> None:
    """It is tokenized whole."""
    text = "hello wörld 🙂\n" * (MIB // 17)
    assert len(text.encode()) > MIB
    options: dict[str, Any] = {"max_tokens": 1, "return_token_ids": True}

    if endpoint == "chat":
        reply = await wide.chat(text, **options)
    else:
        reply = await wide.complete(prompt=text, **options)

    assert reply.status == 200, reply.text[:300]
    ids = reply.json["nvext"]["prompt_token_ids"]
    assert text in wide.model.decode(ids, skip_special_tokens=True)


def body_of(case: str) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of a long request."""
    fields: dict[str, Any] = {"max_tokens": 1}
    message = {"role": "user", "content": "a"}
    match case:
        case "ids":
            return "/v1/completions", {**fields, "prompt": [5] * 100_000}
        case "text":
            return "/v1/completions", {**fields, "prompt": "hello " * 40_000}
        case "messages":
            return "/v1/chat/completions", {**fields, "messages": [message] * 20_000}
        case "parts":
            parts = [{"type": "text", "text": "a"}] * 20_000
            messages = [{"role": "user", "content": parts}]
            return "/v1/chat/completions", {**fields, "messages": messages}
        case _:
            nvext = {"token_data": [5] * 100_000}
            return "/v1/chat/completions", {
                **fields, "messages": [message], "nvext": nvext,
            }  # fmt: skip


CASES = ["ids", "text", "messages", "parts", "token_data"]


@pytest.mark.pitfall(28)
@pytest.mark.parametrize("case", CASES)
async def test_others_are_served_while_a_long_request_is_prepared(
    wide_model: Path, case: str
) -> None:
    """However long its preparation takes, a short request does not wait for it."""
    path, body = body_of(case)
    held = Held()
    try:
        async with stack(
            wide_model, (Role.AGGREGATED,), OPTIONS, executor=held
        ) as running:
            long = asyncio.create_task(running.post(path, body))
            await eventually(lambda: held.num_waiting > 0, "the long request is held")

            short = await running.complete(prompt="hello", max_tokens=2)
            streamed = await running.chat("hello", max_tokens=2, stream=True)

            assert (short.status, streamed.status) == (200, 200)
            assert not long.done()
            held.release()
            assert (await long).status == 200
    finally:
        held.close()


@pytest.mark.pitfall(28)
@pytest.mark.parametrize("case", CASES)
async def test_every_long_step_is_beside_the_loop(
    wide: Stack, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parsing, checking, rendering and tokenizing: none of it in the loop's thread."""
    ran: dict[str, bool] = {}  # step: in the loop's thread

    def watched(name: str, step: Callable[P, T]) -> Callable[P, T]:
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            here = threading.current_thread() is threading.main_thread()
            ran[name] = ran.get(name, False) or here
            return step(*args, **kwargs)

        return run

    for owner, name in (
        (reading, "parse_body"),
        (prompts, "_message"),
        (TextModel, "_encode"),
        (TextModel, "_checked_ids"),
        (TextModel, "render_chat"),
    ):
        monkeypatch.setattr(owner, name, watched(name, getattr(owner, name)))
    path, body = body_of(case)

    reply = await wide.post(path, body)
    long_steps = dict(ran)
    ran.clear()
    await wide.complete(prompt="hello", max_tokens=1)

    assert reply.status == 200, reply.text[:300]
    assert "parse_body" in long_steps
    assert len(long_steps) >= 2
    assert not any(long_steps.values()), long_steps
    assert ran == {"parse_body": True, "_encode": True}  # a thread would cost more


@pytest.mark.pitfall(31)
async def test_a_body_above_the_limit_is_a_413_that_names_it(wide_model: Path) -> None:
    """The limit is a setting; at it a body passes."""
    arguments = ("--max-body-bytes", "2000")
    async with stack(wide_model, arguments=arguments) as running:
        small = b'{"prompt": "a", "max_tokens": 1}'
        fits = await running.post("/v1/completions", small.ljust(2000))
        above = await running.post("/v1/completions", small.ljust(2001))

    assert fits.status == 200
    assert above.status == 413
    assert "2000 bytes" in above.error["message"]


CONVERSATIONS: list[tuple[list[Any], bool]] = [
    ([{"role": "user", "content": "a" * 4000}], False),
    ([{"role": "user", "content": "a" * 5000}], True),
    ([{"role": "user", "content": [{"type": "text", "text": "a" * 5000}]}], True),
    ([{"role": "tool", "content": "", "tool_calls": [{"a": "a" * 5000}]}], True),
    ([{"role": "user", "content": [{}] * 5000}], True),
    ([{"role": "user", "content": "a"}] * 65, True),
    ([{"role": "user", "content": 5}, 7, None], False),
    ([json.loads("[" * 900 + "]" * 900)], True),
]


@pytest.mark.parametrize(("messages", "long"), CONVERSATIONS)
def test_a_conversation_is_long_by_whatever_is_in_it(
    messages: list[Any], long: bool
) -> None:
    """Many messages, long texts, many parts: in any field, also of a wrong type."""
    assert is_long_conversation(messages) is long


def test_what_is_long_is_longer_than_any_usual_request() -> None:
    """Chats of a few thousand tokens stay on the loop, where they wait for no thread."""
    assert min(LONG_CHARS, LONG_IDS, LONG_BODY_BYTES) >= 4096
