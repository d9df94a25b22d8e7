"""What NeMo Gym and NeMo-RL send, and what they read, on simulated workers.

Neither is on PyPI. Their rules are written down here: what Gym's vLLM model server asks
for, from where it takes ids and log probabilities, and what it refuses; and what
NeMo-RL's wrapper makes of that for a server that takes tokens.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import pytest_asyncio

from support.stack import MODEL_NAME, Reply, Stack, stack
from tokenwire.protocol.messages import Role

CHAT = "/v1/chat/completions"
CAPTURE = {"logprobs": True, "top_logprobs": 0, "return_tokens_as_token_ids": True}
"""On every request of Gym's while it trains."""

SAMPLING = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 12}
QUESTIONS = ("hello", "and then?", "why?")

ENDS: dict[str, dict[str, Any]] = {
    "length": {},
    "one token": {"max_tokens": 1},
    "stop token": {"stop_token_ids": list(range(60, 200))},
    "stop string": {"stop": ["a", "e", "i", "o"], "max_tokens": 60},
    "stop string shown": {
        "stop": ["a", "e", "i", "o"],
        "include_stop_str_in_output": True,
        "max_tokens": 60,
    },
}


@pytest_asyncio.fixture(params=["pair", "aggregated"])
async def served(
    request: pytest.FixtureRequest, tiny_model: Path
) -> AsyncIterator[Stack]:
    """A pair, then a worker that does both."""
    roles = [Role.PREFILL, Role.DECODE]
    if request.param == "aggregated":
        roles = [Role.AGGREGATED]
    async with stack(tiny_model, roles) as running:
        yield running
        await running.idle()


class Bundle(NamedTuple):
    """What Gym keeps on an assistant message."""

    prompt_token_ids: list[int]
    generation_token_ids: list[int]
    generation_log_probs: list[float]


def read_logprobs(choice: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Return ids and log probabilities as Gym takes them from a choice."""
    ids: list[int] = []
    values: list[float] = []
    for entry in choice["logprobs"]["content"]:
        name, _, number = entry["token"].partition(":")
        assert name == "token_id"
        assert isinstance(entry["logprob"], float)
        ids.append(int(number))
        values.append(entry["logprob"])
    return ids, values


async def gym_turn(
    served: Stack, messages: list[dict[str, Any]], **more: Any
) -> Bundle:
    """Ask as Gym does, and read by its rules: what is there twice must agree."""
    body: dict[str, Any] = {
        "model": MODEL_NAME, "messages": messages, "metadata": {}, **CAPTURE,
        **SAMPLING, **more,
    }  # fmt: skip
    reply = await served.post(CHAT, body)
    assert reply.status == 200, reply.text
    answer = reply.json
    choice = answer["choices"][0]
    ids, values = read_logprobs(choice)
    prompt = answer.get("prompt_token_ids")
    assert (prompt is None) == ("token_ids" not in choice)
    if prompt is not None:
        assert choice["token_ids"] == ids
    else:
        asked = ("model", "messages", "tools", "required_prefix_token_ids")
        tokenized = await served.post(
            "/tokenize", {name: body[name] for name in asked if name in body}
        )
        prompt = tokenized.json["tokens"]
    required = body.get("required_prefix_token_ids")
    if required is not None:
        assert prompt[: len(required)] == required
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    assert answer["usage"]["completion_tokens"] == len(ids)
    content = choice["message"]["content"] or None
    messages.append({"role": "assistant", "content": content, "tool_calls": []})
    return Bundle(prompt, ids, values)


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("inline", [False, True])
async def test_a_gym_conversation_is_exact(
    served: Stack, inline: bool, ends: str
) -> None:
    """Each prompt begins with all ids before it, whether they come inline or not.

    The bundle stands on the assistant's message in the next request.
    """
    more: dict[str, Any] = dict(ENDS[ends])
    if inline:  # Gym's ``request_prompt_and_generation_token_ids``
        more["return_token_ids"] = True
    messages: list[dict[str, Any]] = []
    history: list[int] = []
    for seed, question in enumerate(QUESTIONS):
        messages.append({"role": "user", "content": question})
        bundle = await gym_turn(served, messages, seed=seed, **more)
        assert bundle.prompt_token_ids[: len(history)] == history
        history = [*bundle.prompt_token_ids, *bundle.generation_token_ids]
        messages[-1] |= bundle._asdict()


async def test_gym_may_supply_the_prefix(served: Stack) -> None:
    """``required_prefix_token_ids`` beside messages without ids, and on /tokenize.

    The model writes "h" and "e" one by one, which a tokenizer would take together.
    """
    encode = partial(served.model.encode, add_special_tokens=False)
    letters = [*await encode("h"), *await encode("e")]
    messages: list[dict[str, Any]] = [{"role": "user", "content": QUESTIONS[0]}]
    first = await gym_turn(
        served, messages, return_token_ids=True, allowed_token_ids=letters
    )
    history = [*first.prompt_token_ids, *first.generation_token_ids]
    messages.append({"role": "user", "content": QUESTIONS[1]})
    prefix = {"required_prefix_token_ids": history}
    inline = await gym_turn(served, list(messages), return_token_ids=True, **prefix)
    apart = await gym_turn(served, list(messages), **prefix)

    without = await served.post("/tokenize", {"messages": messages})

    assert without.json["tokens"][: len(history)] != history
    assert inline.prompt_token_ids == apart.prompt_token_ids
    assert inline.prompt_token_ids[: len(history)] == history


async def test_gym_hears_that_a_prompt_is_too_long(served: Stack) -> None:
    """A 400 with "context length" in it, which ends the rollout and nothing else."""
    body = {"messages": [{"role": "user", "content": "a " * 3000}], **CAPTURE}
    reply = await served.post(CHAT, body)

    assert reply.status == 400
    assert "context length" in reply.error["message"]


# --- NeMo-RL ---------------------------------------------------------------------------


def engine_data_of(reply: Reply, *, stream: bool) -> dict[str, Any]:
    """Return ``nvext.engine_data``, from the final chunk of a stream."""
    assert reply.status == 200, reply.text
    if not stream:
        return dict(reply.json["nvext"]["engine_data"])
    holders = [event.nvext for event in reply.events if "engine_data" in event.nvext]
    [holder] = holders
    finals = [
        e for e in reply.events if e.body and e.body["choices"][0]["finish_reason"]
    ]
    assert finals[-1].nvext == holder
    return dict(holder["engine_data"])


def check(data: dict[str, Any]) -> None:
    """Check that ids and log probabilities belong together."""
    assert set(data) == {
        "prompt_token_ids", "completion_token_ids", "completion_logprobs"
    }  # fmt: skip
    assert len(data["completion_token_ids"]) == len(data["completion_logprobs"])
    assert all(isinstance(value, float) for value in data["completion_logprobs"])
    assert data["prompt_token_ids"]
    assert data["completion_token_ids"]


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("stream", [False, True])
async def test_nemo_rl_gives_tokens_and_reads_engine_data(
    served: Stack, stream: bool, ends: str
) -> None:
    """The prompt is exactly ``token_data``; the same as the choice's log probabilities."""
    prompt = list(range(40, 90))
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "hello"}], "seed": 5, **CAPTURE,
        **SAMPLING, **ENDS[ends], "stream": stream,
        "nvext": {"extra_fields": ["engine_data"], "token_data": prompt},
    }  # fmt: skip
    reply = await served.post(CHAT, body)
    data = engine_data_of(reply, stream=stream)

    check(data)
    assert data["prompt_token_ids"] == prompt
    bodies = [event.body for event in reply.events] if stream else [reply.json]
    choices = [choice for one in bodies if one for choice in one["choices"]]
    read = [read_logprobs(choice) for choice in choices if choice["logprobs"]]
    assert [one for ids, _ in read for one in ids] == data["completion_token_ids"]
    assert [one for _, values in read for one in values] == data["completion_logprobs"]


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("stream", [False, True])
async def test_engine_data_of_a_completion(
    served: Stack, stream: bool, ends: str
) -> None:
    """Also without ``logprobs``; as many as the usage says."""
    body: dict[str, Any] = {
        "prompt": list(range(40, 90)), "seed": 5, **SAMPLING, **ENDS[ends],
        "stream": stream, "nvext": {"extra_fields": ["engine_data"]},
    }  # fmt: skip
    data = engine_data_of(await served.post("/v1/completions", body), stream=stream)
    whole = await served.post("/v1/completions", {**body, "stream": False})

    check(data)
    assert data == whole.json["nvext"]["engine_data"]
    assert whole.json["usage"]["completion_tokens"] == len(data["completion_token_ids"])


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_are_named_by_id_in_completions(
    served: Stack, stream: bool
) -> None:
    """``return_tokens_as_token_ids`` with ``logprobs: 0``: the sampled tokens alone."""
    body = {
        "prompt": [40] * 20, "max_tokens": 6, "logprobs": 0, "stream": stream,
        "return_tokens_as_token_ids": True, "return_token_ids": True,
    }  # fmt: skip
    reply = await served.post("/v1/completions", body)
    bodies = [event.body for event in reply.events] if stream else [reply.json]
    choices = [choice for one in bodies if one for choice in one["choices"]]

    for choice in choices:
        logprobs = choice["logprobs"]
        names = [f"token_id:{one}" for one in choice["token_ids"]]
        assert logprobs["tokens"] == names
        assert len(logprobs["token_logprobs"]) == len(names)
        assert [list(one) for one in logprobs["top_logprobs"]] == [[n] for n in names]
    assert sum(len(choice["token_ids"]) for choice in choices) == 6
