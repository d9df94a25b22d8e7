"""Request fields beyond the basics: honoured as they say, or refused by name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from support.stack import Stack, stack
from tokenwire.frontend.schema import ChatRequest, CompletionRequest
from tokenwire.frontend.unsupported import UNSUPPORTED

IDS: dict[str, Any] = {"return_token_ids": True}
PROMPT = [70, 71, 72, 73]


def selected(*fields: str) -> dict[str, Any]:
    """Return the request field that selects *fields*."""
    return {"nvext": {"extra_fields": list(fields)}}


# --- echo ----------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["ab cd", PROMPT])
@pytest.mark.pitfall(13)
async def test_echo_repeats_the_prompt(served: Stack, prompt: str | list[int]) -> None:
    """The text begins with the prompt's, streamed or not; the ids are the output's."""
    plain = await served.complete(prompt=prompt, max_tokens=4, **IDS)
    echoed = await served.complete(prompt=prompt, max_tokens=4, echo=True, **IDS)
    streamed = await served.complete(
        prompt=prompt, max_tokens=4, echo=True, stream=True, **IDS
    )

    text = prompt
    if not isinstance(text, str):
        text = served.model.decode(text, skip_special_tokens=False)
    want = text + plain.json["choices"][0]["text"]
    assert echoed.json["choices"][0]["text"] == want
    assert echoed.json["nvext"] == plain.json["nvext"]
    assert echoed.json["usage"]["completion_tokens"] == 4
    chunks = [event.body["choices"][0] for event in streamed.events if event.body]
    assert "".join(chunk["text"] for chunk in chunks) == want
    assert chunks[0]["text"] == text


async def test_echo_repeats_each_choices_own_prompt(served: Stack) -> None:
    """With several prompts and n=2 each choice begins with its own."""
    reply = await served.complete(prompt=["ab", "cd"], n=2, max_tokens=2, echo=True)

    texts = [choice["text"] for choice in reply.json["choices"]]
    assert [text[:2] for text in texts] == ["ab", "ab", "cd", "cd"]


async def test_echo_with_logprobs_covers_prompt_and_output(served: Stack) -> None:
    """One entry per token of both; nothing precedes the first, so its entry is null."""
    reply = await served.complete(prompt=PROMPT, max_tokens=3, echo=True, logprobs=2)

    [choice] = reply.json["choices"]
    logprobs = choice["logprobs"]
    assert {len(values) for values in logprobs.values()} == {4 + 3}
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    assert all(math.isfinite(value) for value in logprobs["token_logprobs"][1:])
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert "prompt_logprobs" not in choice
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(token)


async def test_echo_has_each_prompt_token_among_the_best(served: Stack) -> None:
    """``logprobs: 0`` scores a prompt: each top list is its own token alone."""
    reply = await served.complete(prompt=PROMPT, max_tokens=0, echo=True, logprobs=0)

    logprobs = reply.json["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [
        None,
        *(
            {token: value}
            for token, value in zip(
                logprobs["tokens"][1:], logprobs["token_logprobs"][1:], strict=True
            )
        ),
    ]


async def test_a_prompt_is_scored_without_output(served: Stack) -> None:
    """``max_tokens: 0`` with echo gives the prompt's logprobs alone."""
    body: dict[str, Any] = {"prompt": PROMPT, "echo": True}
    scored = (await served.complete(max_tokens=0, logprobs=1, **body)).json
    longer = (await served.complete(max_tokens=1, logprobs=1, **body)).json

    [choice] = scored["choices"]
    assert choice["text"] == served.model.decode(PROMPT, skip_special_tokens=False)
    assert choice["finish_reason"] == "length"
    assert scored["usage"]["completion_tokens"] == 0
    whole = longer["choices"][0]["logprobs"]
    assert choice["logprobs"] == {name: all_[:4] for name, all_ in whole.items()}


async def test_a_prompt_is_streamed_without_output(served: Stack) -> None:
    """The prompt, then the end; no token of the output."""
    reply = await served.complete(
        prompt="abc", max_tokens=0, echo=True, stream=True, **IDS
    )

    first, final = [event.body for event in reply.events if event.body]
    assert first["choices"][0]["text"] == "abc"
    assert final["choices"][0]["finish_reason"] == "length"
    assert final["nvext"]["completion_token_ids"] == []


async def test_echo_on_chat_repeats_the_message_that_goes_on(served: Stack) -> None:
    """Only with a last message of the assistant's, streamed or not."""
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "Well, "},
    ]
    fields: dict[str, Any] = {
        "messages": messages,
        "continue_final_message": True,
        "max_tokens": 3,
    }
    plain = await served.post("/v1/chat/completions", fields)
    echoed = await served.post("/v1/chat/completions", {**fields, "echo": True})
    streamed = await served.post(
        "/v1/chat/completions", {**fields, "echo": True, "stream": True}
    )
    other = await served.chat(max_tokens=3, echo=True)

    text = plain.json["choices"][0]["message"]["content"]
    assert echoed.json["choices"][0]["message"]["content"] == "Well, " + text
    deltas = [
        event.body["choices"][0]["delta"]
        for event in streamed.events[:-1]
        if event.body
    ]
    assert "".join(delta.get("content", "") for delta in deltas) == "Well, " + text
    assert not other.json["choices"][0]["message"]["content"].startswith("hello")


# --- prompt_logprobs -----------------------------------------------------------------


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
async def test_prompt_logprobs_stand_in_vllms_places(
    served: Stack, endpoint: str
) -> None:
    """A list with null first, then candidates by id, the prompt's own among them."""
    if endpoint == "chat":
        nvext = {"token_data": PROMPT}
        body = (await served.chat(max_tokens=2, prompt_logprobs=1, nvext=nvext)).json
        entries = body["prompt_logprobs"]
    else:
        body = (
            await served.complete(prompt=PROMPT, max_tokens=2, prompt_logprobs=1)
        ).json
        assert "prompt_logprobs" not in body
        entries = body["choices"][0]["prompt_logprobs"]

    assert entries[0] is None
    assert len(entries) == len(PROMPT)
    for token_id, candidates in zip(PROMPT[1:], entries[1:], strict=True):
        own = candidates[str(token_id)]
        assert set(own) == {"logprob", "rank", "decoded_token"}
        assert own["decoded_token"] == served.model.token_bytes(token_id).decode()


async def test_prompt_logprobs_of_each_prompt(served: Stack) -> None:
    """In a batch each choice has its own prompt's."""
    reply = await served.complete(prompt=[[70, 71], [72, 73, 74]], prompt_logprobs=0)

    lengths = [len(choice["prompt_logprobs"]) for choice in reply.json["choices"]]
    assert lengths == [2, 3]


async def test_the_selector_brings_prompt_logprobs_under_nvext(served: Stack) -> None:
    """On the final chunk alone when streaming; without a number, each token's own."""
    fields = selected("prompt_logprobs")
    whole = (await served.complete(prompt=PROMPT, max_tokens=3, **fields)).json
    streamed = await served.complete(prompt=PROMPT, max_tokens=3, stream=True, **fields)

    entries = whole["nvext"]["prompt_logprobs"]
    assert [set(entry or {}) for entry in entries] == [set(), {"71"}, {"72"}, {"73"}]
    assert "prompt_logprobs" not in whole["choices"][0]
    *chunks, final, _ = streamed.events
    assert final.nvext == {"prompt_logprobs": entries}
    assert all(not event.nvext for event in chunks)


# --- the other selectors -------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_engine_data_is_the_whole_sequence(served: Stack, stream: bool) -> None:
    """Ids and logprobs of equal length, on the final chunk; no logprobs elsewhere."""
    fields = selected("engine_data", "completion_token_ids")
    reply = await served.complete(prompt=PROMPT, max_tokens=5, stream=stream, **fields)
    shown = await served.complete(prompt=PROMPT, max_tokens=5, logprobs=0)

    if stream:
        events = [event for event in reply.events if event.body]
        data = events[-1].nvext["engine_data"]
        ids = [i for e in events for i in e.nvext.get("completion_token_ids", [])]
        assert all("engine_data" not in event.nvext for event in events[:-1])
        choices = [event.body["choices"][0] for event in events if event.body]
    else:
        data = reply.json["nvext"]["engine_data"]
        ids = reply.json["nvext"]["completion_token_ids"]
        choices = reply.json["choices"]
    assert all(choice["logprobs"] is None for choice in choices)
    assert data == {
        "prompt_token_ids": PROMPT,
        "completion_token_ids": ids,
        "completion_logprobs": shown.json["choices"][0]["logprobs"]["token_logprobs"],
    }


async def test_engine_data_beside_logprobs(served: Stack) -> None:
    """A request that asks for logprobs gets them in both places."""
    reply = await served.chat(
        max_tokens=3, logprobs=True, top_logprobs=2, **selected("engine_data")
    )

    content = reply.json["choices"][0]["logprobs"]["content"]
    data = reply.json["nvext"]["engine_data"]
    assert [entry["logprob"] for entry in content] == data["completion_logprobs"]


async def test_the_weight_version_is_the_workers(served: Stack) -> None:
    """What the decode worker calls its weights, with the end."""
    whole = await served.complete(
        prompt="a", max_tokens=3, **selected("weight_version")
    )
    streamed = await served.complete(
        prompt="a", max_tokens=3, stream=True, **selected("weight_version")
    )

    assert whole.json["nvext"] == {"weight_version": "default"}
    assert streamed.events[-2].nvext == {"weight_version": "default"}


@pytest.mark.parametrize(
    "selector", ["engine_data", "prompt_logprobs", "weight_version", "timing"]
)
async def test_selectors_need_one_choice(served: Stack, selector: str) -> None:
    """With n=2 or two prompts there is no choice that they could belong to."""
    fields = selected(selector)
    several = await served.complete(prompt="a", n=2, **fields)
    batch = await served.complete(prompt=["a", "b"], **fields)

    assert (several.status, several.error["param"]) == (400, "n")
    assert (batch.status, batch.error["param"]) == (400, "prompt")


# --- unknown and unsupported ---------------------------------------------------------


@pytest.mark.pitfall(13)
async def test_unknown_fields_are_named_all_at_once(served: Stack) -> None:
    """One message names every one of them."""
    reply = await served.complete(prompt="a", banana=1, apple=None)

    assert reply.status == 400
    assert "apple, banana" in reply.error["message"]


async def test_unknown_fields_are_ignored_where_the_operator_says_so(
    tiny_model: Path,
) -> None:
    """Unsupported ones, whose meaning is known, stay refused."""
    arguments = ("--unknown-fields", "ignore")
    async with stack(tiny_model, arguments=arguments) as served:
        ignored = await served.complete(prompt="a", max_tokens=1, banana=1)
        refused = await served.complete(prompt="a", max_tokens=1, suffix="x")

    assert ignored.status == 200
    assert (refused.status, refused.error["param"]) == (400, "suffix")


@pytest.mark.parametrize("name", UNSUPPORTED)
@pytest.mark.pitfall(13)
async def test_unsupported_fields_are_refused_by_name(served: Stack, name: str) -> None:
    """Neutral values pass, since they ask for nothing; any other is a 400."""
    for value in (None, *UNSUPPORTED[name].neutral):
        fine = await served.complete(prompt="a", max_tokens=1, **{name: value})
        assert fine.status == 200, (name, value, fine.text)
    refused = await served.complete(prompt="a", max_tokens=1, **{name: {"x": 1}})

    assert (refused.status, refused.error["param"]) == (400, name)
    assert UNSUPPORTED[name].reason in refused.error["message"]


def test_no_field_is_both_honoured_and_refused() -> None:
    """A field that became supported has left the table."""
    honoured = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}

    assert not honoured & UNSUPPORTED.keys()


@pytest.mark.parametrize("value", [True, 0])
async def test_neutral_values_are_of_their_type(served: Stack, value: object) -> None:
    """``store: 0`` is not ``store: false``, nor is ``length_penalty: true`` 1."""
    field = "length_penalty" if value is True else "store"
    reply = await served.complete(prompt="a", max_tokens=1, **{field: value})

    assert (reply.status, reply.error["param"]) == (400, field)


# --- structured output ---------------------------------------------------------------

BAD_STRUCTURES: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({}, ""),
    "two": ({"regex": "a", "choice": ["b"]}, ""),
    "unknown": ({"regex": "a", "banana": 1}, ".banana"),
    "regex": ({"regex": 1}, ".regex"),
    "grammar": ({"grammar": []}, ".grammar"),
    "choice": ({"choice": "a"}, ".choice"),
    "no choice": ({"choice": []}, ".choice"),
    "choices": ({"choice": ["a", 1]}, ".choice"),
    "json": ({"json": 3}, ".json"),
    "json text": ({"json": "{"}, ".json"),
    "json list": ({"json": "[]"}, ".json"),
    "json_object": ({"json_object": False}, ".json_object"),
    "whitespace_pattern": (
        {"json": {}, "whitespace_pattern": 1},
        ".whitespace_pattern",
    ),
}


@pytest.mark.parametrize("case", BAD_STRUCTURES)
async def test_a_structure_is_checked_before_the_engine(
    served: Stack, case: str
) -> None:
    """Each mistake is a 400 with the path of what is wrong."""
    given, path = BAD_STRUCTURES[case]
    reply = await served.complete(prompt="a", max_tokens=1, structured_outputs=given)

    assert reply.status == 400
    assert reply.error["param"] == f"structured_outputs{path}"


# --- the rest ------------------------------------------------------------------------


async def test_a_request_id_in_the_body_is_echoed(served: Stack) -> None:
    """In the header, as the one of the header, which goes first; a bad one is a 400."""
    mine = await served.complete(prompt="a", max_tokens=1, request_id="mine-1")
    both = await served.post(
        "/v1/completions",
        {"prompt": "a", "max_tokens": 1, "request_id": "body"},
        {"X-Request-Id": "header"},
    )
    bad = await served.complete(prompt="a", max_tokens=1, request_id="a/../b")

    assert mine.headers["X-Request-Id"] == "mine-1"
    assert "mine-1" not in mine.text
    assert both.headers["X-Request-Id"] == "header"
    assert (bad.status, bad.error["param"]) == (400, "request_id")


async def test_a_chat_template_needs_the_operators_trust(
    served: Stack, tiny_model: Path
) -> None:
    """Refused by default; with the option, it is what renders the messages."""
    fields = {"chat_template": "X{{ messages[0].content }}", "max_tokens": 1, **IDS}
    refused = await served.chat("ab", **fields)
    arguments = ("--trust-request-chat-template",)
    async with stack(tiny_model, arguments=arguments) as trusting:
        honoured = await trusting.chat("ab", **fields)

    assert (refused.status, refused.error["param"]) == (400, "chat_template")
    ids = honoured.json["nvext"]["prompt_token_ids"]
    assert served.model.decode(ids, skip_special_tokens=False) == "Xab"


async def test_a_whole_number_may_have_a_point(served: Stack) -> None:
    """``3.0`` is 3, as in JSON Schema; ``3.5`` and infinity are none."""
    whole = await served.complete(prompt="a", max_tokens=3.0, seed=1e3)
    broken = await served.complete(prompt="a", max_tokens=3.5)
    huge = await served.post("/v1/completions", b'{"prompt":"a","max_tokens":1e300}')

    assert whole.json["usage"]["completion_tokens"] == 3
    assert (broken.status, broken.error["param"]) == (400, "max_tokens")
    assert (huge.status, huge.error["param"]) == (400, "max_tokens")


@pytest.mark.parametrize("name", ["token_data", "required_prefix_token_ids"])
@pytest.mark.parametrize("value", [[], [5, 6]])
async def test_what_belongs_to_chat_is_refused_on_completions(
    served: Stack, name: str, value: list[int]
) -> None:
    """Not dropped: the prompt would be another than asked for."""
    reply = await served.complete(prompt="a", max_tokens=1, nvext={name: value})

    assert (reply.status, reply.error["param"]) == (400, f"nvext.{name}")


async def test_labels_change_nothing(served: Stack) -> None:
    """OpenAI's labels are accepted and have no effect."""
    plain = await served.complete(prompt="a", max_tokens=4)
    labelled = await served.complete(
        prompt="a",
        max_tokens=4,
        user="u",
        metadata={"a": "b"},
        safety_identifier="s",
        prompt_cache_key="k",
    )

    assert labelled.json["choices"] == plain.json["choices"]
