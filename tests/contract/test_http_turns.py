"""Chat turns whose earlier ids stay exact, and prompts that are cut or salted."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from support.stack import Reply, Stack, stack
from tokenwire.protocol.messages import Role

IDS = {"return_token_ids": True}
FIRST = [{"role": "user", "content": "hello"}]
NEXT = {"role": "user", "content": "and then?"}
CHAT = "/v1/chat/completions"


@pytest_asyncio.fixture
async def served(tiny_model: Path) -> AsyncIterator[Stack]:
    """A prefill and a decode worker."""
    async with stack(tiny_model, (Role.PREFILL, Role.DECODE)) as running:
        yield running
        await running.idle()


async def turn(served: Stack, messages: list[dict[str, Any]], **body: Any) -> Reply:
    """POST a chat of *messages*."""
    reply = await served.post(CHAT, {"messages": messages, "max_tokens": 20, **body})
    assert reply.status == 200, reply.text
    return reply


def ids_of(reply: Reply) -> tuple[list[int], list[int]]:
    """Return the prompt's and the output's ids."""
    nvext = reply.json["nvext"]
    return nvext["prompt_token_ids"], nvext["completion_token_ids"]


async def ids_of_text(served: Stack, text: str) -> list[int]:
    """Return a text's ids."""
    return await served.model.encode(text, add_special_tokens=False)


async def second_turn(served: Stack) -> tuple[list[int], list[dict[str, Any]]]:
    """Return the exact ids of a first turn, and the messages after it without them.

    The model writes "h" and "e" one by one, which a tokenizer would take together.
    """
    letters = [*await ids_of_text(served, "h"), *await ids_of_text(served, "e")]
    reply = await turn(served, FIRST, allowed_token_ids=letters, **IDS)
    prompt, output = ids_of(reply)
    answer = reply.json["choices"][0]["message"]["content"]
    said = {"role": "assistant", "content": answer}
    return [*prompt, *output], [*FIRST, said, NEXT]


def carried(exact: list[int], messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return *messages* with the ids on the assistant's, as NeMo Gym sends them."""
    user, said, more = messages
    ids = {
        "prompt_token_ids": exact[:-20],
        "generation_token_ids": exact[-20:],
        "generation_log_probs": [0.0] * 20,
    }
    return [user, {**said, **ids}, more]


@pytest.mark.parametrize("place", ["root", "nvext", "messages"])
async def test_the_prompt_starts_with_the_exact_ids(served: Stack, place: str) -> None:
    """Wherever the ids stand; what follows them is the template's."""
    exact, messages = await second_turn(served)
    body: dict[str, Any] = dict(IDS)
    if place == "messages":
        messages = carried(exact, messages)
    elif place == "root":
        body["required_prefix_token_ids"] = exact
    else:
        body = {
            "nvext": {
                "extra_fields": ["completion_token_ids"],
                "required_prefix_token_ids": exact,
            }
        }
    reply = await turn(served, messages, **body)

    prompt, _ = ids_of(reply)
    rest = served.model.decode(prompt[len(exact) :], skip_special_tokens=False)
    assert prompt[: len(exact)] == exact
    assert (
        rest
        == "<|im_end|>\n<|im_start|>user\nand then?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert reply.json["usage"]["prompt_tokens"] == len(prompt)
    assert reply.json["nvext"]["prefix"] == {"kept": len(exact), "drifted": True}


@pytest.mark.parametrize("place", ["root", "messages"])
async def test_a_turn_that_was_cut_off_goes_on_from_its_ids(
    served: Stack, place: str
) -> None:
    """Continued, the prompt is the ids: the rest is what the model would have said."""
    options: dict[str, Any] = {"temperature": 0, **IDS}
    prompt, whole = ids_of(await turn(served, FIRST, max_tokens=20, **options))
    begun = await turn(served, FIRST, max_tokens=8, **options)
    said = begun.json["choices"][0]["message"]
    exact = [*prompt, *whole[:8]]
    if place == "messages":
        said |= {"prompt_token_ids": prompt, "generation_token_ids": whole[:8]}
    else:
        options["required_prefix_token_ids"] = exact

    reply = await turn(
        served, [*FIRST, said], max_tokens=12, continue_final_message=True, **options
    )

    assert ids_of(reply) == (exact, whole[8:])
    assert reply.json["nvext"]["prefix"]["kept"] == len(exact)


async def test_ids_before_a_continued_message_are_kept(served: Stack) -> None:
    """The template's rest follows them, to the end of the last message."""
    exact, messages = await second_turn(served)
    messages = [*carried(exact, messages), {"role": "assistant", "content": "hello"}]
    reply = await turn(served, messages, continue_final_message=True, **IDS)

    prompt, _ = ids_of(reply)
    rest = served.model.decode(prompt[len(exact) :], skip_special_tokens=False)
    assert prompt[: len(exact)] == exact
    assert rest.endswith("and then?<|im_end|>\n<|im_start|>assistant\nhello")


async def test_without_the_ids_the_tokens_drift(served: Stack) -> None:
    """The negative control of the test above: the text alone gives other ids."""
    exact, messages = await second_turn(served)
    reply = await turn(served, messages, **IDS)

    prompt, _ = ids_of(reply)
    assert prompt[: len(exact)] != exact
    assert "prefix" not in reply.json["nvext"]


async def test_ids_without_drift_say_so(served: Stack) -> None:
    """Ids that the tokenizer would have made are kept all the same."""
    said = [*FIRST, {"role": "assistant", "content": "he w"}]
    exact = (
        await served.post(
            "/tokenize", {"messages": said, "add_generation_prompt": False}
        )
    ).json["tokens"]
    reply = await turn(
        served, [*said, NEXT], required_prefix_token_ids=exact[:-1], **IDS
    )

    assert reply.json["nvext"]["prefix"] == {"kept": len(exact) - 1, "drifted": False}


async def test_a_stream_tells_on_its_last_chunk(served: Stack) -> None:
    """Once, beside the prompt's ids."""
    exact, messages = await second_turn(served)
    reply = await turn(served, carried(exact, messages), stream=True, **IDS)

    *chunks, final, _ = reply.events
    assert all("prefix" not in event.nvext for event in chunks)
    assert final.nvext["prefix"]["kept"] == len(exact)
    assert final.nvext["prompt_token_ids"][: len(exact)] == exact


async def test_without_a_selector_there_is_no_nvext(served: Stack) -> None:
    """The ids count, and the answer has OpenAI's keys alone."""
    exact, messages = await second_turn(served)
    with_ids = await turn(served, carried(exact, messages))
    without = await turn(served, messages)

    assert set(with_ids.json) == set(without.json)
    assert "nvext" not in with_ids.json
    text = [r.json["choices"][0]["message"]["content"] for r in (with_ids, without)]
    assert text[0] != text[1]


async def test_kept_turns_hit_the_prefix_cache(served: Stack) -> None:
    """That is what exact ids are for: the earlier turn's KV is used again."""
    long = [{"role": "user", "content": "hello " * 40}]
    first = await turn(served, long, **IDS)
    prompt, output = ids_of(first)
    said = {
        "role": "assistant", "content": "x",
        "prompt_token_ids": prompt, "generation_token_ids": output,
    }  # fmt: skip
    reply = await turn(served, [*long, said, NEXT], **IDS)

    details = reply.json["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] >= len(prompt) // 16 * 16


@pytest.mark.parametrize("path", [CHAT + "/render", "/tokenize"])
async def test_rendering_keeps_the_ids_too(served: Stack, path: str) -> None:
    """What is rendered is what would be run."""
    exact, messages = await second_turn(served)
    reply = await served.post(path, {"messages": carried(exact, messages)})

    ids = reply.json["tokens" if path == "/tokenize" else "token_ids"]
    assert ids[: len(exact)] == exact


A: dict[str, Any] = {"role": "assistant", "content": "x"}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no assistant": ({"messages": FIRST, "required_prefix_token_ids": [5]}, "required_prefix_token_ids"),
    "empty": ({"required_prefix_token_ids": []}, "required_prefix_token_ids"),
    "vocabulary": ({"required_prefix_token_ids": [264]}, "required_prefix_token_ids"),
    "boolean": ({"required_prefix_token_ids": [True]}, "required_prefix_token_ids[0]"),
    "negative": ({"required_prefix_token_ids": [-1]}, "required_prefix_token_ids"),
    "2**31": ({"required_prefix_token_ids": [2**31]}, "required_prefix_token_ids"),
    "text": ({"required_prefix_token_ids": "5"}, "required_prefix_token_ids"),
    "two places": (
        {"required_prefix_token_ids": [5], "nvext": {"required_prefix_token_ids": [6]}},
        "required_prefix_token_ids",
    ),
    "two prompts": (
        {"required_prefix_token_ids": [5], "nvext": {"token_data": [6]}},
        "required_prefix_token_ids",
    ),
    "on the message": (
        {"messages": [*FIRST, {**A, "prompt_token_ids": [5], "generation_token_ids": [264]}, NEXT]},
        "messages[1]",
    ),
    "half": ({"messages": [*FIRST, {**A, "prompt_token_ids": [5]}, NEXT]}, "messages[1].generation_token_ids"),
    "on a user": ({"messages": [{**FIRST[0], "prompt_token_ids": [5]}]}, "messages[0].prompt_token_ids"),
    "cut": ({"required_prefix_token_ids": [5] * 9, "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    "salt": ({"cache_salt": ""}, "cache_salt"),
    "long salt": ({"nvext": {"cache_salt": "x" * 1025}}, "cache_salt"),
    "two salts": ({"cache_salt": "a", "nvext": {"cache_salt": "b"}}, "cache_salt"),
    "cut to nothing": ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    "cut below": ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    "cut above": ({"truncate_prompt_tokens": 2049}, "truncate_prompt_tokens"),
    "two cuts": ({"truncate_prompt_tokens": 5, "nvext": {"truncate_prompt_tokens": 6}}, "truncate_prompt_tokens"),
    "side": ({"truncate_prompt_tokens": 5, "truncation_side": "top"}, "truncation_side"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
async def test_bad_turns_are_400s(served: Stack, case: str) -> None:
    """The field, or the message, is named; no worker hears of it."""
    body, param = REFUSED[case]
    reply = await served.post(CHAT, {"messages": [*FIRST, A, NEXT], **body})

    assert reply.status == 400, reply.text
    assert reply.error["param"] == param
    assert all(worker.idle for worker in served.workers)


@pytest.mark.parametrize("place", ["root", "nvext"])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"truncate_prompt_tokens": 3}, [9, 10, 11]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, [9, 10, 11]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, [5, 6, 7]),
        ({"truncate_prompt_tokens": 7}, [5, 6, 7, 8, 9, 10, 11]),
        ({"truncate_prompt_tokens": 2048}, [5, 6, 7, 8, 9, 10, 11]),
    ],
)
async def test_a_prompt_is_cut(
    served: Stack, place: str, options: dict[str, Any], expected: list[int]
) -> None:
    """The last ids stay, as in vLLM, or the first if asked for."""
    body: dict[str, Any] = {**options, **IDS}
    if place == "nvext":
        body["nvext"] = {"truncate_prompt_tokens": body.pop("truncate_prompt_tokens")}
    reply = await served.complete(prompt=list(range(5, 12)), max_tokens=2, **body)

    assert ids_of(reply)[0] == expected
    assert reply.json["usage"]["prompt_tokens"] == len(expected)


async def test_minus_one_cuts_to_what_fits(served: Stack) -> None:
    """A prompt beyond the context length leaves room for one token of output."""
    reply = await served.complete(
        prompt=[5] * 5000, max_tokens=1, truncate_prompt_tokens=-1, **IDS
    )

    assert len(ids_of(reply)[0]) == 2047


@pytest.mark.parametrize("place", ["root", "nvext"])
async def test_a_salt_keeps_prefixes_apart(served: Stack, place: str) -> None:
    """Nothing is cached across salts, and all of it with the same one."""

    async def cached(salt: str | None) -> int:
        body: dict[str, Any] = {"cache_salt": salt}
        if place == "nvext":
            body = {"nvext": body}
        reply = await served.complete(prompt=[7] * 64, max_tokens=2, **body)
        details = reply.json["usage"]["prompt_tokens_details"]
        return int(details["cached_tokens"])

    assert [await cached(salt) for salt in ("a", "b", None)] == [0, 0, 0]
    assert await cached("a") > 0
