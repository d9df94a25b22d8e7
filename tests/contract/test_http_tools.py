"""Tool calls and reasoning over HTTP, as vLLM's parsers make them of scripted ids."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from support.format_stacks import Start, format_stacks
from support.formats import (
    DEEPSEEK_R1,
    FORMATS,
    HERMES,
    KIMI_K2,
    LLAMA3,
    MISTRAL_V11,
    QWEN3,
    TOOLS,
    Case,
    Format,
)
from support.stack import Reply
from tokenwire.frontend import answers
from tokenwire.protocol.messages import Role

OVER_HTTP = (HERMES, QWEN3, LLAMA3, MISTRAL_V11, DEEPSEEK_R1, KIMI_K2)
IDS: dict[str, Any] = {"return_token_ids": True}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
WITH_USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Starts a stack that answers a case's name with the case's output."""
    return format_stacks(tmp_path_factory)


def message_of(reply: Reply) -> dict[str, Any]:
    """Return the message of a whole response, by OpenAI's types and our document's."""
    assert reply.status == 200, reply.text
    ChatCompletion.model_validate(reply.json, strict=True)
    msgspec.convert(reply.json, answers.ChatCompletion)
    return dict(reply.json["choices"][0]["message"])


def streamed_message(reply: Reply) -> tuple[dict[str, Any], str]:
    """Return what the ``openai`` package makes of a stream, and the finish reason."""
    assert reply.status == 200, reply.text
    state: Any = ChatCompletionStreamState()
    reason = ""
    reasoning = ""
    for event in reply.events:
        if event.body is None:
            break
        assert "error" not in event.body
        msgspec.convert(event.body, answers.ChatCompletionChunk)
        chunk = ChatCompletionChunk.model_validate(event.body, strict=True)
        state.handle_chunk(chunk)
        for choice in event.body["choices"]:
            reason = choice["finish_reason"] or reason
            reasoning += choice["delta"].get("reasoning", "")
    made = state.current_completion_snapshot.choices[0].message
    message: dict[str, Any] = {"role": "assistant", "content": made.content or None}
    if reasoning:
        message["reasoning"] = reasoning
    if made.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": call.type,
                "function": {
                    "name": call.function.name,
                    "arguments": call.function.arguments,
                },
            }
            for call in made.tool_calls
        ]
    return message, reason


def said(message: dict[str, Any]) -> dict[str, Any]:
    """Return *message* without what two responses cannot share, and without nulls."""
    calls = [
        {**call, "id": "" if call["id"].startswith("chatcmpl-tool-") else call["id"]}
        for call in message.get("tool_calls", [])
    ]
    shown = {key: value for key, value in message.items() if value}
    if calls:
        shown["tool_calls"] = calls
    return shown


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return name and arguments of each call."""
    return [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message.get("tool_calls", [])
    ]


@pytest.mark.parametrize("tokens_per_step", ["1", "3", "1000"])
@pytest.mark.parametrize("form", OVER_HTTP, ids=lambda form: form.name)
async def test_streamed_and_whole_messages_are_one(
    serve: Start, form: Format, tokens_per_step: str
) -> None:
    """As the SDK adds the chunks up, whatever comes in one step of the engine."""
    async with serve(form, "--tokens-per-step", tokens_per_step) as served:
        for case in form.cases:
            body = {"tools": TOOLS} if form.tool_call_parser else {}
            whole = await served.chat(case.name, **body, **IDS)
            streamed = await served.chat(case.name, stream=True, **body, **IDS)

            message = message_of(whole)
            again, reason = streamed_message(streamed)
            if form is not MISTRAL_V11:  # its ids have no mark to know them by
                assert said(again) == said(message)
            assert calls_of(again) == calls_of(message) == list(case.calls)
            assert (message.get("reasoning") or "").strip() == case.reasoning.strip()
            assert (message["content"] or "").strip() == case.content.strip()
            expected = "tool_calls" if case.calls else "stop"
            assert whole.json["choices"][0]["finish_reason"] == reason == expected


@pytest.mark.parametrize("form", OVER_HTTP, ids=lambda form: form.name)
async def test_ids_do_not_wait_for_a_parser(serve: Start, form: Format) -> None:
    """Each step's ids go out with it; with the text parsed away, in an empty delta."""
    async with serve(form, "--step-ms", "1") as served:
        case = form.cases[-1]
        body = {"tools": TOOLS} if form.tool_call_parser else {}
        whole = await served.chat(case.name, **body, **IDS)
        streamed = await served.chat(case.name, stream=True, **body, **IDS)

        sizes = [
            len(event.nvext["completion_token_ids"])
            for event in streamed.events
            if event.nvext
        ]
        ids = [
            token_id
            for event in streamed.events
            for token_id in event.nvext.get("completion_token_ids", [])
        ]
        assert ids == whole.json["nvext"]["completion_token_ids"]
        assert len(ids) == whole.json["usage"]["completion_tokens"]
        # One at a time, as the engine made them, but for those before the headers.
        assert set(sizes[1:]) == {1}
        deltas = [
            event.body["choices"][0]["delta"]
            for event in streamed.events
            if event.body and event.body["choices"]
        ]
        assert {} in deltas


async def test_call_ids_can_be_made_again(serve: Start) -> None:
    """They follow from the response's id, and stand in each call's first chunk."""
    async with serve(HERMES) as served:
        reply = await served.chat("two", tools=TOOLS, stream=True)
        whole = await served.chat("two", tools=TOOLS, n=2)

        ids = [
            call["id"]
            for choice in whole.json["choices"]
            for call in choice["message"]["tool_calls"]
        ]
        assert len(set(ids)) == 4
        assert all(re.fullmatch("chatcmpl-tool-[0-9a-f]{32}", one) for one in ids)
        parts = [
            call
            for event in reply.events
            if event.body
            for choice in event.body["choices"]
            for call in choice["delta"].get("tool_calls", [])
        ]
        openings = [part for part in parts if "id" in part]
        assert [part["index"] for part in openings] == [0, 1]
        for part in parts:
            if "id" in part:
                assert set(part) == {"index", "id", "type", "function"}
                assert set(part["function"]) == {"name", "arguments"}
            else:
                assert set(part) == {"index", "function"}
                assert set(part["function"]) == {"arguments"}


async def test_a_format_that_defines_ids_keeps_them(serve: Start) -> None:
    """Kimi's are its own; Mistral's have nine letters or digits."""
    async with serve(KIMI_K2) as served:
        message = message_of(await served.chat("two", tools=TOOLS))
        ids = tuple(call["id"] for call in message["tool_calls"])
        assert ids == KIMI_K2.call_ids
    async with serve(MISTRAL_V11) as served:
        message = message_of(await served.chat("two", tools=TOOLS))
        for call in message["tool_calls"]:
            assert re.fullmatch("[A-Za-z0-9]{9}", call["id"])


async def test_finish_reasons(serve: Start) -> None:
    """``tool_calls`` where the model called; ``stop`` for a named tool; ``length``."""
    async with serve(HERMES) as served:
        for body, expected in (
            ({}, "tool_calls"),
            ({"tool_choice": "auto"}, "tool_calls"),
            ({"tool_choice": "required"}, "tool_calls"),
            ({"tool_choice": NAMED}, "stop"),
            ({"tool_choice": "none"}, "stop"),
            ({"max_tokens": 12}, "length"),
        ):
            whole = await served.chat("one", tools=TOOLS, **body)
            streamed = await served.chat("one", tools=TOOLS, stream=True, **body)
            assert whole.json["choices"][0]["finish_reason"] == expected
            message, reason = streamed_message(streamed)
            assert reason == expected
            assert said(message) == said(message_of(whole))


CALL = '<tool_call>\n{"name": "get_weather", "arguments": '
CUT = replace(
    HERMES,
    name="hermes-cut",
    cases=(
        Case("begun", CALL + '{"city": "Par'),
        Case(
            "second", f'{CALL}{{"city": "Paris"}}}}\n</tool_call>\n{CALL}{{"city": "Z'
        ),
        Case("whole", CALL + '{"city": "Paris"}}\n</tool_call>'),
        Case("empty", CALL + "{}}\n</tool_call>"),
    ),
)


@pytest.mark.parametrize(
    ("name", "stop", "arguments", "expected"),
    [
        ("begun", None, '{"city": "Par', "stop"),
        ("second", None, '{"city": "Z', "stop"),
        ("whole", ["ris"], '{"city": "Pa', "stop"),
        ("whole", ["\n</tool_call>"], '{"city": "Paris"}', "tool_calls"),
        ("whole", ["London"], '{"city": "Paris"}', "tool_calls"),
        ("empty", None, "{}", "tool_calls"),
    ],
)
@pytest.mark.parametrize("tokens_per_step", ["1", "1000"])
async def test_a_call_that_is_cut_off_is_no_tool_calls(
    serve: Start,
    name: str,
    stop: list[str] | None,
    arguments: str,
    expected: str,
    tokens_per_step: str,
) -> None:
    """It is shown as far as it came, and the finish reason is that of text."""
    async with serve(CUT, "--tokens-per-step", tokens_per_step) as served:
        whole = await served.chat(name, tools=TOOLS, stop=stop)
        streamed = await served.chat(name, tools=TOOLS, stop=stop, stream=True)

    message = message_of(whole)
    again, reason = streamed_message(streamed)
    assert message["tool_calls"][-1]["function"]["arguments"] == arguments
    assert said(again) == said(message)
    assert whole.json["choices"][0]["finish_reason"] == reason == expected


async def test_tool_choice_none_leaves_the_text_alone(serve: Start) -> None:
    """What looks like a call is then content."""
    async with serve(HERMES) as served:
        message = message_of(await served.chat("one", tools=TOOLS, tool_choice="none"))
        assert message["content"] == HERMES.cases[1].text
        assert "tool_calls" not in message


async def test_one_call_only(serve: Start) -> None:
    """``parallel_tool_calls: false`` lets the first call through."""
    async with serve(HERMES) as served:
        body: dict[str, Any] = {"tools": TOOLS, "parallel_tool_calls": False}
        message = message_of(await served.chat("two", **body))
        again, _ = streamed_message(await served.chat("two", stream=True, **body))
        assert calls_of(message) == calls_of(again) == list(HERMES.cases[2].calls[:1])


async def test_reasoning_is_counted_and_can_be_hidden(serve: Start) -> None:
    """Usage says how much of the output it was, also when it is not shown."""
    async with serve(QWEN3) as served:
        shown = await served.chat("thought")
        hidden = await served.chat("thought", include_reasoning=False, **IDS)
        streamed = await served.chat("thought", stream=True, **WITH_USAGE)

        details = shown.json["usage"]["completion_tokens_details"]
        assert (
            0 < details["reasoning_tokens"] < shown.json["usage"]["completion_tokens"]
        )
        assert hidden.json["usage"]["completion_tokens_details"] == details
        assert message_of(hidden)["reasoning"] is None
        assert message_of(hidden)["content"] == message_of(shown)["content"]
        ids = hidden.json["nvext"]["completion_token_ids"]
        assert len(ids) == hidden.json["usage"]["completion_tokens"]
        assert streamed.events[-2].body is not None
        usage = streamed.events[-2].body["usage"]
        assert usage["completion_tokens_details"] == details


async def test_the_keys_of_a_response_with_parsers(serve: Start) -> None:
    """``reasoning`` where there is such a parser, ``tool_calls`` where there are any."""
    async with serve(QWEN3) as served:
        keys = {"role", "content", "refusal", "reasoning"}
        assert set(message_of(await served.chat("thought"))) == keys
        called = message_of(await served.chat("called", tools=TOOLS))
        assert set(called) == {*keys, "tool_calls"}
    async with serve(HERMES) as served:
        reply = await served.chat("text")
        assert set(message_of(reply)) == {"role", "content", "refusal"}
        assert "completion_tokens_details" not in reply.json["usage"]


async def test_logprobs_stop_strings_and_choices_go_with_parsers(serve: Start) -> None:
    """Each id keeps its logprob; a stop string ends the parsed text where it stands."""
    async with serve(QWEN3, "--tokens-per-step", "3") as served:
        whole = await served.chat("called", tools=TOOLS, logprobs=True, n=2)
        for choice in whole.json["choices"]:
            assert calls_of(choice["message"]) == list(QWEN3.cases[1].calls)
            assert len(choice["logprobs"]["content"]) == (
                whole.json["usage"]["completion_tokens"] / 2
            )
        body: dict[str, Any] = {"tools": TOOLS, "stop": ["calls"]}
        stopped = await served.chat("called", **body, **IDS)
        again, reason = streamed_message(
            await served.chat("called", stream=True, **body)
        )
        message = message_of(stopped)
        assert message["reasoning"].strip() == "I need 2"
        assert message["content"] is None
        assert "tool_calls" not in message
        assert reason == stopped.json["choices"][0]["finish_reason"] == "stop"
        assert said(again) == said(message)


async def test_a_pair_of_workers_gives_the_same_message(serve: Start) -> None:
    """Parsing does not see the hand-over."""
    async with serve(HERMES, roles=(Role.PREFILL, Role.DECODE)) as served:
        message = message_of(await served.chat("two", tools=TOOLS))
        assert calls_of(message) == list(HERMES.cases[2].calls)


async def test_tools_and_past_calls_reach_the_template(serve: Start) -> None:
    """Tools in vLLM's key order, arguments as objects, reasoning under its old name."""
    messages = [
        {"role": "user", "content": "text"},
        {
            "role": "assistant",
            "content": None,
            "reasoning": "hm",
            "tool_calls": [
                {
                    "id": "a",
                    "type": "function",
                    "function": {"name": "get_time", "arguments": '{"zone":"CET"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "12:00"},
    ]
    async with serve(HERMES) as served:
        reply = await served.post(
            "/v1/chat/completions",
            {
                "messages": messages,
                "tools": TOOLS,
                "reasoning_effort": "low",
                **IDS,
            },
        )
        ids = reply.json["nvext"]["prompt_token_ids"]
        prompt = served.model.decode(ids, skip_special_tokens=False)
        time = '"name": "get_time", "description": null, "parameters": {"type": '
        assert time in prompt
        assert '(hm)[a get_time {"zone": "CET"}]' in prompt
        assert "<|tool|>12:00" in prompt
        assert "effort low" in prompt
        assert prompt.endswith("<|assistant|><think>\n")  # enable_thinking


async def test_every_route_renders_the_same_prompt(serve: Start) -> None:
    """Chat, ``/tokenize`` and render; the latter says how the engine is bound, too."""
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "one"}],
        "tools": TOOLS,
        "tool_choice": "required",
    }
    async with serve(HERMES) as served:
        chat = await served.post("/v1/chat/completions", {**body, **IDS})
        rendered = await served.post("/v1/chat/completions/render", body)
        tokens = await served.post(
            "/tokenize", {"messages": body["messages"], "tools": TOOLS}
        )
        generated = await served.post("/inference/v1/generate", rendered.json)

        prompt = chat.json["nvext"]["prompt_token_ids"]
        assert rendered.json["token_ids"] == tokens.json["tokens"] == prompt
        structure = rendered.json["sampling_params"]["structured_outputs"]
        tag = json.loads(structure["structural_tag"])
        assert tag["type"] == "structural_tag"
        assert (
            generated.json["choices"][0]["token_ids"]
            == (chat.json["nvext"]["completion_token_ids"])
        )
    async with serve(QWEN3) as served:
        body["messages"] = [{"role": "user", "content": "called"}]
        rendered = await served.post(
            "/v1/chat/completions/render", {**body, "reasoning_effort": "low"}
        )
        assert rendered.json["reasoning_ended"] is False
        kwargs = rendered.json["reasoning_parser_kwargs"]["chat_template_kwargs"]
        assert kwargs["reasoning_effort"] == "low"
        again = await served.post("/inference/v1/generate", rendered.json)
        assert again.status == 200


async def test_tools_can_be_kept_from_the_template(serve: Start) -> None:
    """With the operator's option, ``tool_choice: none`` costs no prompt."""
    async with serve(HERMES) as served:
        reply = await served.chat("text", tools=TOOLS, tool_choice="none", **IDS)
        long = len(reply.json["nvext"]["prompt_token_ids"])
    option = ("--exclude-tools-when-tool-choice-none",)
    async with serve(HERMES, arguments=option) as served:
        reply = await served.chat("text", tools=TOOLS, tool_choice="none", **IDS)
        assert len(reply.json["nvext"]["prompt_token_ids"]) < long / 3


async def test_a_slow_reader_gets_the_whole_message(serve: Start) -> None:
    """Parsed while the client does not read; nothing is lost, repeated or moved."""
    async with serve(HERMES) as served:
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": "at length"}],
            "tools": TOOLS,
            "max_tokens": 3500,
            "n": 2,
            "logprobs": True,
            "top_logprobs": 20,  # 12 MB: more than the sockets hold
        }
        path = "/v1/chat/completions"
        whole = await served.post(path, body)
        call = served.client.post(served.url + path, json={**body, "stream": True})
        async with call as answer:
            await served.idle()  # the engine is done before the client reads
            streamed = Reply(200, {}, await answer.text())

        choices = [
            choice
            for event in streamed.events
            if event.body
            for choice in event.body["choices"]
        ]
        for made in whole.json["choices"]:
            own = [choice for choice in choices if choice["index"] == made["index"]]
            content = "".join(choice["delta"].get("content", "") for choice in own)
            records = [
                record
                for choice in own
                if choice["logprobs"]
                for record in choice["logprobs"]["content"]
            ]
            assert content == made["message"]["content"]
            assert records == made["logprobs"]["content"]
            assert own[-1]["finish_reason"] == made["finish_reason"] == "length"
            assert len(own) < 3000  # what waited came as one chunk


def _with_call(**changes: Any) -> dict[str, Any]:
    call: dict[str, Any] = {"function": {"name": "f", "arguments": "{}"}}
    return {
        "messages": [
            {"role": "user", "content": "text"},
            {"role": "assistant", "tool_calls": [{**call, **changes}]},
        ]
    }


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": []}, "tools"),
    ({"tools": {}}, "tools"),
    ({"tools": [1]}, "tools[0]"),
    ({"tools": [{}]}, "tools[0]"),
    ({"tools": [{"function": {}}]}, "tools[0].function"),
    ({"tools": [{"function": {"name": 1}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "web", "function": {"name": "f"}}]}, "tools[0].type"),
    (
        {"tools": [{"function": {"name": "f", "parameters": "x"}}]},
        "tools[0].function.parameters",
    ),
    ({"tools": [{"function": {"name": "f", "x": 1}}]}, "tools[0].function"),
    ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": 3}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {}}, "tool_choice"),
    (
        {"tools": TOOLS, "tool_choice": {"function": {"name": "get_tea"}}},
        "tool_choice",
    ),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": NAMED}, "tool_choice"),
    ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"include_reasoning": 1}, "include_reasoning"),
    ({"reasoning_effort": "some"}, "reasoning_effort"),
    (
        {
            "tools": TOOLS,
            "tool_choice": NAMED,
            "structured_outputs": {"regex": "a"},
        },
        "structured_outputs",
    ),
    (
        _with_call(function={"name": "f", "arguments": ["{}"]}),
        "messages[1].tool_calls[0].function.arguments",
    ),
    (_with_call(function={}), "messages[1].tool_calls[0].function.name"),
    (_with_call(function=None), "messages[1].tool_calls[0].function"),
    (_with_call(type="web"), "messages[1].tool_calls[0].type"),
    (_with_call(id=3), "messages[1].tool_calls[0].id"),
    (
        {"messages": [{"role": "assistant", "tool_calls": 3}]},
        "messages[0].tool_calls",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [3]}]},
        "messages[0].tool_calls[0]",
    ),
    (
        {"messages": [{"role": "assistant", "reasoning": 3}]},
        "messages[0].reasoning",
    ),
    (
        {"messages": [{"role": "tool", "tool_call_id": 3, "content": "x"}]},
        "messages[0].tool_call_id",
    ),
]


@pytest.mark.parametrize("arguments", ["{", "[]", "", "[" * 100_000])
async def test_broken_arguments_of_the_history_end_no_conversation(
    serve: Start, arguments: str
) -> None:
    """What a model wrote badly reaches the template as no arguments, as in vLLM."""
    selector = {"nvext": {"extra_fields": ["prompt_token_ids"]}, "max_tokens": 1}
    async with serve(HERMES) as served:
        broken, empty = [
            await served.post(
                "/v1/chat/completions",
                {**_with_call(function={"name": "f", "arguments": given}), **selector},
            )
            for given in (arguments, "{}")
        ]

    assert broken.status == 200, broken.text
    assert broken.json["nvext"] == empty.json["nvext"]


@pytest.mark.parametrize(("body", "param"), BAD)
async def test_a_bad_field_is_refused_by_name(
    serve: Start, body: dict[str, Any], param: str
) -> None:
    """Each with its place, streaming or not, before an engine hears of it."""
    async with serve(HERMES) as served:
        messages = [{"role": "user", "content": "text"}]
        for stream in (False, True):
            reply = await served.post(
                "/v1/chat/completions",
                {"messages": messages, "stream": stream, **body},
            )
            assert reply.status == 400, reply.text
            assert reply.error["param"] == param


async def test_a_parser_that_fails_ends_nothing(
    serve: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had not told becomes content, the ids are whole, and it is counted."""
    async with serve(HERMES) as served:
        before = message_of(await served.chat("said", tools=TOOLS, **IDS))
        assert before["tool_calls"]
        from vllm.parser.abstract_parser import DelegatingParser

        parse = DelegatingParser.parse_delta

        def fails(self: Any, text: str, *rest: Any, **options: Any) -> Any:
            if "Paris" in text:
                msg = "scripted"
                raise RuntimeError(msg)
            return parse(self, text, *rest, **options)

        monkeypatch.setattr(DelegatingParser, "parse_delta", fails)
        whole = await served.chat("said", tools=TOOLS, **IDS)
        streamed = await served.chat("said", tools=TOOLS, stream=True)
        again, reason = streamed_message(streamed)

        assert whole.json["choices"][0]["finish_reason"] == reason == "stop"
        message = message_of(whole)
        assert message["content"].startswith("Let me look.\n")
        assert message["content"].endswith('Paris"}}\n</tool_call>')
        assert said(again) == said(message)
        assert (
            "tokenwire_parser_failures_total 2.0" in (await served.get("/metrics")).text
        )


async def test_a_plan_that_fails_is_logged(
    serve: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The client gets a 400, the operator a line, and the trace if there is debugging."""
    caplog.set_level(logging.DEBUG, "tokenwire.frontend.parsers")
    async with serve(HERMES) as served:
        from vllm.parser.abstract_parser import DelegatingParser

        def fails(self: Any, request: Any) -> Any:
            msg = f"scripted\nfault {self is request}"
            raise RuntimeError(msg)

        monkeypatch.setattr(DelegatingParser, "adjust_request", fails)
        reply = await served.chat("one", tools=TOOLS)

        assert (reply.status, reply.error["param"]) == (400, "tools")
    warning, debug = [
        one for one in caplog.records if one.name == "tokenwire.frontend.parsers"
    ]
    assert warning.levelname == "WARNING"
    assert "scripted fault False (RuntimeError)" in warning.getMessage()
    assert warning.exc_info is None
    assert (debug.levelname, debug.exc_info is None) == ("DEBUG", False)


def test_all_formats_over_http_are_formats() -> None:
    """None is served that the matrix of cuts does not cover."""
    assert {form.name for form in OVER_HTTP} <= {form.name for form in FORMATS}
