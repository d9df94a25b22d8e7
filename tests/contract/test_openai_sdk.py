"""The official client, with strict validation: OpenAI's types fit, errors are its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from support.stack import MODEL_NAME, Stack, eventually, stack
from tokenwire.protocol.messages import Role

EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "alias": {"return_token_ids": True},
    "selector": {"nvext": {"extra_fields": ["completion_token_ids", "engine_data"]}},
}
WAIT = ("--worker-wait-s", "0.2")  # for another worker: there is none
MESSAGES: Any = [{"role": "user", "content": "hello"}]


@pytest_asyncio.fixture
async def served(tiny_model: Path) -> AsyncIterator[Stack]:
    """A prefill and a decode worker."""
    async with stack(tiny_model, (Role.PREFILL, Role.DECODE)) as running:
        yield running
        await running.idle()


@pytest_asyncio.fixture
async def client(served: Stack) -> AsyncIterator[AsyncOpenAI]:
    """The client, which then checks every field of an answer against its types."""
    async with AsyncOpenAI(
        base_url=served.url + "/v1",
        api_key="none",
        max_retries=0,
        _strict_response_validation=True,
    ) as made:
        yield made


@pytest.mark.parametrize("extra", EXTRAS)
async def test_chats_are_valid(client: AsyncOpenAI, extra: str) -> None:
    """Whole and streamed answers parse, and say the same."""
    request: dict[str, Any] = {
        "model": MODEL_NAME, "messages": MESSAGES, "max_tokens": 12, "logprobs": True,
        "top_logprobs": 2, "extra_body": EXTRAS[extra],
    }  # fmt: skip
    whole = cast("ChatCompletion", await client.chat.completions.create(**request))
    chunks: list[ChatCompletionChunk] = [
        chunk
        async for chunk in await client.chat.completions.create(
            stream=True, stream_options={"include_usage": True}, **request
        )
    ]

    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert whole.choices[0].logprobs is not None
    assert len(whole.choices[0].logprobs.content or []) == 12


@pytest.mark.parametrize("extra", EXTRAS)
async def test_completions_are_valid(
    served: Stack, client: AsyncOpenAI, extra: str
) -> None:
    """Whole and streamed answers parse, and say the same.

    Chunks are not checked strictly: the client has no type for them, and that of whole
    answers knows no ``finish_reason`` of null, which OpenAI's own server streams.
    """
    request: dict[str, Any] = {
        "model": MODEL_NAME, "prompt": [5, 6, 7], "max_tokens": 12, "logprobs": 1,
        "extra_body": EXTRAS[extra],
    }  # fmt: skip
    whole = cast("Completion", await client.completions.create(**request))
    async with AsyncOpenAI(base_url=served.url + "/v1", api_key="none") as lenient:
        stream = await lenient.completions.create(stream=True, **request)
        chunks: list[Completion] = [chunk async for chunk in stream]

    assert "".join(c.choices[0].text for c in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "length"


async def test_models_are_valid(client: AsyncOpenAI) -> None:
    """The list and one model parse; vLLM's keys stand beside OpenAI's."""
    [listed] = [model async for model in client.models.list()]
    alone = await client.models.retrieve(MODEL_NAME)

    assert listed == alone
    assert (alone.model_extra or {})["max_model_len"] == 2048


ERRORS: dict[
    str, tuple[type[openai.APIStatusError], dict[str, Any], str, str | None]
] = {
    # name: (exception, request, param, code)
    "bad value": (openai.BadRequestError, {"temperature": -1}, "temperature", None),
    "too long": (
        openai.BadRequestError,
        {"max_tokens": 5000},
        "max_tokens",
        "context_length_exceeded",
    ),
    "unknown field": (
        openai.BadRequestError,
        {"extra_body": {"nonsense": 1}},
        "nonsense",
        None,
    ),
    "unknown model": (
        openai.NotFoundError,
        {"model": "other"},
        "model",
        "model_not_found",
    ),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", ERRORS)
async def test_errors_are_the_clients_own(
    client: AsyncOpenAI, case: str, stream: bool
) -> None:
    """The exception of the status, with ``param``, ``code`` and ``type``."""
    kind, request, param, code = ERRORS[case]
    whole: dict[str, Any] = {"model": MODEL_NAME, "messages": MESSAGES, **request}
    with pytest.raises(openai.APIStatusError) as caught:
        await client.chat.completions.create(stream=stream, **whole)

    assert type(caught.value) is kind
    assert caught.value.param == param
    assert caught.value.code == code
    assert caught.value.type == "invalid_request_error"


async def test_busy_frontends_are_retryable(tiny_model: Path) -> None:
    """Nobody to serve, and too many at once: exceptions that the client retries."""
    options, arguments = ("--step-ms", "50"), ("--max-inflight-requests", "1")
    async with (
        stack(tiny_model, (Role.AGGREGATED,), options, arguments) as served,
        AsyncOpenAI(base_url=served.url + "/v1", api_key="x", max_retries=0) as client,
    ):
        request: dict[str, Any] = {"model": MODEL_NAME, "prompt": "a"}
        going = await client.completions.create(stream=True, max_tokens=500, **request)
        with pytest.raises(openai.RateLimitError) as busy:
            await client.completions.create(**request)
        await going.close()
        await served.idle()
        await served.workers[0].stop()
        await eventually(lambda: not served.pool.ready, "no worker")
        with pytest.raises(openai.InternalServerError) as nobody:
            await client.completions.create(**request)

    assert busy.value.code == "overloaded"
    assert nobody.value.status_code == 503
    assert nobody.value.code == "no_worker"


async def test_an_error_in_a_stream_is_an_exception(tiny_model: Path) -> None:
    """A worker that dies amid a stream is an APIError, never a short answer."""
    async with (
        stack(tiny_model, (Role.AGGREGATED,), ("--step-ms", "5"), WAIT) as served,
        AsyncOpenAI(base_url=served.url + "/v1", api_key="x", max_retries=0) as client,
    ):
        chunks = await client.completions.create(
            model=MODEL_NAME, prompt="a", max_tokens=1000, stream=True
        )
        first = await anext(aiter(chunks))
        await served.workers[0].stop()
        with pytest.raises(openai.APIError) as caught:
            [chunk async for chunk in chunks]

        assert first.choices[0].text
        assert caught.value.code == "worker_failed"
