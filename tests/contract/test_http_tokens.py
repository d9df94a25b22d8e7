"""Text to ids and back, prompts without an answer, versions and models: vLLM's shapes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from support.stack import MODEL_NAME, Stack, stack
from tokenwire.protocol.messages import Role

CHAT = {"messages": [{"role": "user", "content": "hello wörld"}]}
RENDER = "/v1/chat/completions/render"

# Keys of vLLM 0.32, recorded.
TOKENIZED_KEYS = {"count", "max_model_len", "tokens", "token_strs"}
RENDERED_KEYS = {
    "request_id", "token_ids", "token_offsets", "features", "content_parts",
    "sampling_params", "model", "reasoning_ended", "reasoning_parser_kwargs",
    "return_token_ids", "output_mode", "stream", "stream_options", "cache_salt",
    "priority", "kv_transfer_params", "ec_transfer_params",
}  # fmt: skip
# The rest of vLLM's are its engine's own: output_kind, skip_clone, ...
PARAMS_KEYS = {
    "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature",
    "top_p", "min_p", "stop", "stop_token_ids", "max_tokens", "bad_words",
}  # fmt: skip
MODEL_KEYS = {
    "id", "object", "created", "owned_by", "root", "parent", "max_model_len",
    "permission",
}  # fmt: skip
PERMISSION_KEYS = {
    "id", "object", "created", "allow_create_engine", "allow_sampling",
    "allow_logprobs", "allow_search_indices", "allow_view", "allow_fine_tuning",
    "organization", "group", "is_blocking",
}  # fmt: skip


@pytest_asyncio.fixture
async def served(tiny_model: Path) -> AsyncIterator[Stack]:
    """A prefill and a decode worker, which no test here may trouble."""
    async with stack(tiny_model, (Role.PREFILL, Role.DECODE)) as running:
        yield running
        assert all(worker.idle for worker in running.workers)


async def test_a_text_is_tokenized(served: Stack) -> None:
    """Ids, their count and the context length; the vocabulary's entries if asked for."""
    plain = await served.post("/tokenize", {"prompt": "hello wörld"})
    named = await served.post(
        "/tokenize",
        {"model": MODEL_NAME, "prompt": "hello wörld", "return_token_strs": True},
    )

    ids = await served.model.encode("hello wörld", add_special_tokens=True)
    assert set(plain.json) == TOKENIZED_KEYS
    assert plain.json["tokens"] == ids
    assert plain.json["count"] == len(ids)
    assert plain.json["max_model_len"] == 2048
    assert plain.json["token_strs"] is None
    assert named.json["token_strs"][:2] == ["hello", "Ġw"]
    assert len(named.json["token_strs"]) == len(ids)


async def test_a_conversation_is_tokenized_as_chat_does(served: Stack) -> None:
    """The ids are those that a chat request's engine gets."""
    tokenized = await served.post("/tokenize", CHAT)
    chat = await served.post(
        "/v1/chat/completions", {**CHAT, "max_tokens": 1, "return_token_ids": True}
    )
    await served.idle()

    assert tokenized.json["tokens"] == chat.json["nvext"]["prompt_token_ids"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"),
        ({"add_generation_prompt": False}, "<|im_start|>user\nhi<|im_end|>\n"),
        ({"continue_final_message": True}, "<|im_start|>user\nhi"),
        (
            {
                "continue_final_message": True,
                "add_generation_prompt": False,
                "chat_template_kwargs": {"a": 1},
                "tools": [{"type": "function", "function": {"name": "f"}}],
            },
            "<|im_start|>user\nhi",
        ),
    ],
)
async def test_options_of_the_template_count(
    served: Stack, options: dict[str, Any], text: str
) -> None:
    """The text of the ids is what the template makes with them."""
    messages = [{"role": "user", "content": "hi"}]
    reply = await served.post("/tokenize", {"messages": messages, **options})
    back = await served.post("/detokenize", {"tokens": reply.json["tokens"]})

    assert set(back.json) == {"prompt"}
    assert back.json["prompt"] == text


@pytest.mark.parametrize(
    "text", ["", "hello", "🙂 <|im_end|>\n", "\ud7ff\x00é" * 9_000]
)
async def test_detokenize_is_the_way_back(served: Stack, text: str) -> None:
    """Any text survives, special tokens in it and very long ones too."""
    ids = (await served.post("/tokenize", {"prompt": text})).json["tokens"]
    reply = await served.post("/detokenize", {"model": MODEL_NAME, "tokens": ids})

    assert reply.json == {"prompt": text}


async def test_a_chat_is_rendered(served: Stack) -> None:
    """A whole generate request, with the parameters as they would be; no model needed."""
    reply = await served.post(RENDER, {**CHAT, "add_generation_prompt": True})

    body = reply.json
    assert set(body) == RENDERED_KEYS
    assert set(body["sampling_params"]) == PARAMS_KEYS
    assert body["token_ids"] == (await served.post("/tokenize", CHAT)).json["tokens"]
    assert body["sampling_params"]["max_tokens"] == 2048 - len(body["token_ids"])
    assert body["request_id"].startswith("chatcmpl-")
    assert body["model"] is None
    assert body["stream"] is False


async def test_what_was_asked_for_is_rendered(served: Stack) -> None:
    """Parameters beside vLLM's basic ones appear with their values, zero too."""
    asked: dict[str, Any] = {
        "temperature": 0, "seed": 0, "top_k": 5, "min_tokens": 2, "ignore_eos": True,
        "logit_bias": {"5": 1.5}, "stop": "x", "n": 2, "logprobs": True,
        "top_logprobs": 0, "skip_special_tokens": False,
        "structured_outputs": {"choice": ["a", "b"]},
    }  # fmt: skip
    reply = await served.post(
        RENDER,
        {
            **CHAT,
            **asked,
            "max_tokens": 9,
            "cache_salt": "s",
            "priority": 3,
            "stream": True,
        },
    )

    params = reply.json["sampling_params"]
    same = set(asked) - {"stop", "logprobs", "top_logprobs"}
    assert {name: params[name] for name in same} == {n: asked[n] for n in same}
    assert params["stop"] == ["x"]
    assert params["logprobs"] == 0
    assert params["max_tokens"] == 9
    assert reply.json["cache_salt"] == "s"
    assert reply.json["priority"] == 3
    assert reply.json["stream"] is True


async def test_completions_are_rendered_one_by_one(served: Stack) -> None:
    """A list, one request for each prompt, with ids of its own."""
    reply = await served.post("/v1/completions/render", {"prompt": ["hello", "he"]})

    first, second = json.loads(reply.text)
    assert set(first) == set(second) == RENDERED_KEYS
    assert len(second["token_ids"]) < len(first["token_ids"]) + 1
    assert first["sampling_params"]["max_tokens"] == 16
    base = first["request_id"].removesuffix("-0")
    assert second["request_id"] == f"{base}-1"


REFUSED: dict[str, tuple[str, Any, str | None]] = {
    # name: (path, body, param)
    "no text": ("/tokenize", {}, "prompt"),
    "text of ids": ("/tokenize", {"prompt": [1]}, "prompt"),
    "unknown": ("/tokenize", {"prompt": "a", "nonsense": 1}, "nonsense"),
    "both forms": ("/tokenize", {"prompt": "a", **CHAT}, "prompt"),
    "no messages": ("/tokenize", {"messages": []}, "messages"),
    "a template": ("/tokenize", {**CHAT, "chat_template": "x"}, "chat_template"),
    "images": ("/tokenize", {**CHAT, "mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs"),
    "two ends": (
        "/tokenize",
        {**CHAT, "add_generation_prompt": True, "continue_final_message": True},
        "continue_final_message",
    ),
    "strings": ("/tokenize", {"prompt": "a", "return_token_strs": 1}, "return_token_strs"),
    "a surrogate": ("/tokenize", b'{"prompt": "\\ud800"}', "prompt"),
    "no tokens": ("/detokenize", {}, "tokens"),
    "tokens of text": ("/detokenize", {"tokens": "abc"}, "tokens"),
    "a boolean": ("/detokenize", {"tokens": [True]}, "tokens"),
    "negative": ("/detokenize", {"tokens": [-1]}, "tokens"),
    "2**31": ("/detokenize", {"tokens": [2**31]}, "tokens"),
    "above": ("/detokenize", {"tokens": [264]}, "tokens"),
    "render: unknown": (RENDER, {**CHAT, "nonsense": 1}, "nonsense"),
    "render: parameter": (RENDER, {**CHAT, "temperature": -1}, "temperature"),
    "render: prompt": ("/v1/completions/render", {"prompt": [264]}, "prompt"),
    "render: echo": ("/v1/completions/render", {"prompt": "a", "echo": True}, "echo"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
async def test_bad_bodies_are_400s(served: Stack, case: str) -> None:
    """Errors have OpenAI's shape and name the field."""
    path, body, param = REFUSED[case]
    reply = await served.post(path, body)

    assert reply.status == 400, reply.text
    assert reply.error["param"] == param
    assert set(reply.error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", RENDER])
async def test_another_model_is_a_404(served: Stack, path: str) -> None:
    """A name that is not served is not found, on these routes too."""
    body = {"/detokenize": {"tokens": [5]}}.get(path, CHAT)
    reply = await served.post(path, {**body, "model": "other"})

    assert reply.status == 404
    assert reply.error["code"] == "model_not_found"


async def test_only_json_is_taken(served: Stack) -> None:
    """These routes ask for JSON, as the others do."""
    headers = {"Content-Type": "text/plain"}
    reply = await served.post("/tokenize", b"{}", headers=headers)

    assert reply.status == 415


async def test_without_a_worker_the_context_length_is_unknown(tiny_model: Path) -> None:
    """A 503 that may be tried again, not an answer with a made-up number."""
    async with stack(tiny_model, ()) as served:
        reply = await served.post("/tokenize", {"prompt": "a"})
        back = await served.post("/detokenize", {"tokens": [5]})

    assert reply.status == 503
    assert "Retry-After" in reply.headers
    assert back.status == 200


async def test_the_version_is_the_packages(served: Stack) -> None:
    """One key, as vLLM's route has."""
    reply = await served.get("/version")

    assert reply.json == {"version": metadata.version("tokenwire")}


async def test_models_have_vllms_keys(served: Stack) -> None:
    """The list and the model alone say the same."""
    listed = (await served.get("/v1/models")).json
    alone = (await served.get(f"/v1/models/{MODEL_NAME}")).json

    [model] = listed["data"]
    assert listed["object"] == "list"
    assert set(model) == MODEL_KEYS
    assert model == alone
    [permission] = model["permission"]
    assert set(permission) == PERMISSION_KEYS
    assert model["max_model_len"] == 2048
