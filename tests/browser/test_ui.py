"""The live page in a browser, before a simulated pair: seen, used, and left."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Route

from browser.page import Watched, chromium, opened
from support.keyed import Keyed
from support.stack import Reply, Stack, eventually, stack
from tokenwire.protocol.messages import Role

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

PAIR = (Role.PREFILL, Role.DECODE)
OPTIONS = ("--step-ms", "15", "--prefill-tokens-per-s", "0", "--output-draws")
TEXT = "Why is the sky blue?"
MARKUP = "<img src=x onerror=alert(1)>"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    """One browser for all."""
    async with chromium() as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tiny_model: Path) -> AsyncIterator[Stack]:
    """One pair for all."""
    async with stack(tiny_model, PAIR, OPTIONS) as running:
        yield running
        await eventually(lambda: not running.live.num_watchers, "pages have left")


async def asked(served: Stack, max_tokens: int) -> Reply:
    """Return what the API answers."""
    return await served.chat(
        TEXT, max_tokens=max_tokens, temperature=0, return_token_ids=True
    )


def events(*bodies: dict[str, Any]) -> str:
    """Return a resumable stream of these chunks."""
    lines = [
        f"id: g:{number}\ndata: {json.dumps(body)}\n\n"
        for number, body in enumerate(bodies, 1)
    ]
    return "".join(lines) + f"id: g:{len(bodies) + 1}\ndata: [DONE]\n\n"


def chunk(offset: int, token_ids: list[int], **choice: Any) -> dict[str, Any]:
    """Return one chunk."""
    nvext = {"completion_token_ids": token_ids, "token_offset": offset}
    return {
        "choices": [{"index": 0, "delta": {}, "finish_reason": None, **choice}],
        "nvext": {**nvext, "prompt_token_ids": [1]},
    }


def streamed(*bodies: dict[str, Any]) -> Callable[[Route], Any]:
    """Return an answer in the frontend's place."""

    async def answer(route: Route) -> None:
        headers = {"X-Generation-Id": "g", "Content-Type": "text/event-stream"}
        await route.fulfill(status=200, headers=headers, body=events(*bodies))

    return answer


# --- seen --------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", ["narrow", "wide"])
async def test_the_page_is_clean(
    browser: Browser, served: Stack, size: str, scheme: str
) -> None:
    """No error, nothing from elsewhere, nothing that axe objects to, nothing cut off."""
    async with opened(browser, served.url, size, scheme) as shown:
        await shown.is_live()
        drawing = shown.page.locator(".drawing")
        for worker in ("prefill-0", "decode-1"):
            await drawing.get_by_text(worker, exact=True).wait_for()
        name = await drawing.locator("title").first.text_content()
        assert name == "Frontend with workers: 1 decode, 1 prefill; all ready"
        assert "default-src 'none'" in shown.headers["content-security-policy"]

        await shown.send(TEXT, max_tokens="12", break_after="5")
        await shown.has_verdict("warn")
        await shown.at("resume").click()
        await shown.has_verdict("good")
        for details in ("worker-details", "prompt-details", "kv-details"):
            await shown.page.locator(f"#{details} summary").click()
        await shown.at("workers").get_by_text("prefill-0").wait_for()
        await shown.page.locator("#tokens .chip").first.click()

        assert await shown.violations() == []
        assert await shown.overflow() == 0


async def test_the_theme_can_be_chosen_and_stays(
    browser: Browser, served: Stack
) -> None:
    """Against the system's, over a reload."""
    async with opened(browser, served.url, scheme="dark") as shown:
        await shown.is_live()
        ground = "getComputedStyle(document.body).backgroundColor"
        dark = await shown.page.evaluate(ground)
        await shown.at("theme").click()
        assert await shown.at("theme").inner_text() == "Theme: light"
        light = await shown.page.evaluate(ground)
        assert light != dark
        await shown.page.reload()
        assert await shown.page.evaluate(ground) == light
        assert await shown.at("theme").inner_text() == "Theme: light"


async def test_a_request_comes_and_goes(browser: Browser, served: Stack) -> None:
    """With its stage, workers and tokens, and without its text."""
    async with opened(browser, served.url, motion="reduce") as shown:
        await shown.is_live()
        await shown.at("no-requests").wait_for()
        body = {
            "messages": [{"role": "user", "content": "xylophone"}],
            "max_tokens": 1500,
            "stream": True,
        }
        url = f"{served.url}/v1/chat/completions"
        async with served.client.post(url, json=body) as answer:
            line = await answer.content.readline()
            short = json.loads(line.removeprefix(b"data: "))["id"][:17]
            row = shown.page.locator("#rows tr:not(.leaves)")
            await row.get_by_text(short, exact=True).wait_for()
            await row.get_by_text("Decode", exact=True).wait_for()
            await row.locator("td.route", has_text="prefill-0 → decode-1").wait_for()
            await shown.page.locator(
                ".stage[data-stage=decode][data-any] .count", has_text="1"
            ).wait_for()
            assert "xylophone" not in await shown.page.content()
            # Who wants no motion has none.
            assert await shown.page.locator(".pulse").count() == 0
        await row.wait_for(state="detached")
        await shown.at("no-requests").wait_for()


async def test_what_happens_moves(browser: Browser, served: Stack) -> None:
    """A hand-over runs along its wire."""
    async with opened(browser, served.url) as shown:
        await shown.is_live()
        seen = asyncio.create_task(
            shown.page.locator(".pulse.kv").first.wait_for(state="attached")
        )
        while not seen.done():
            await asked(served, 2)
        await seen


async def test_a_page_that_is_paused_watches_nothing(
    browser: Browser, served: Stack
) -> None:
    """Nor does one that is closed."""
    async with opened(browser, served.url) as shown:
        await shown.is_live()
        assert served.live.num_watchers == 1
        await shown.at("pause").click()
        await eventually(lambda: not served.live.num_watchers, "it watches no more")
        assert await shown.at("status").inner_text() == "Paused"
        await shown.at("pause").click()
        await shown.is_live()
    await eventually(lambda: not served.live.num_watchers, "it has left")


# --- used --------------------------------------------------------------------------------


async def test_the_playground_shows_what_the_api_says(
    browser: Browser, served: Stack
) -> None:
    """Ids and texts of output and prompt, workers, and its own request among others."""
    whole = await asked(served, 40)
    expected = whole.json["nvext"]["completion_token_ids"]
    async with opened(browser, served.url) as shown:
        await shown.is_live()
        await shown.send(TEXT, max_tokens="40")
        await shown.page.locator("#rows .own .mine").wait_for()
        assert "40 tokens" in await shown.has_verdict("done")

        assert await shown.chip_ids() == expected
        content = whole.json["choices"][0]["message"]["content"]
        shows = shown.page.locator("[data-part=content] .part-text")
        assert await shows.text_content() == content
        prompt = await served.post(
            "/tokenize",
            {"messages": [{"role": "user", "content": TEXT}]},
        )
        assert await shown.chip_ids("prompt") == prompt.json["tokens"]
        facts = await shown.at("facts").inner_text()
        assert "prefill-0 → decode-1" in facts

        await shown.at("compare").click()
        assert "All 40 ids equal" in await shown.has_verdict("good")


TOLD = {
    "ids": "nvext.resume_from: ",
    "checkpoint": "nvext.resume_from: its checkpoint",
    "replay": "Reads on behind event",
}


@pytest.mark.parametrize("how", TOLD)
async def test_a_broken_stream_goes_on(
    browser: Browser, served: Stack, how: str
) -> None:
    """And the ids are those of an unbroken run."""
    whole = await asked(served, 60)
    expected = whole.json["nvext"]["completion_token_ids"]
    async with opened(browser, served.url) as shown:
        await shown.send(TEXT, max_tokens="60", break_after="21", on_break=how)
        assert "Broken after" in await shown.has_verdict("warn")
        assert len(await shown.chip_ids()) < 60
        await shown.at("resume").click()
        await shown.has_verdict("busy")
        assert "All 60 ids equal" in await shown.has_verdict("good")

        assert await shown.chip_ids() == expected
        assert await shown.page.locator("#tokens .gap").count() == 1
        told = await shown.at("story").inner_text()
        assert TOLD[how] in told
        assert ("Goes back to its checkpoint, of 16 ids" in told) is (
            how == "checkpoint"
        )
        text = await shown.page.locator("[data-part=content] .part-text").text_content()
        assert text == whole.json["choices"][0]["message"]["content"]
        assert "60 of 60 ids are equal" in told


async def test_another_output_is_seen_to_be_another(
    browser: Browser, served: Stack
) -> None:
    """The comparison can fail."""

    async def other(route: Route) -> None:
        if route.request.post_data_json["stream"]:
            await route.fallback()
            return
        body = {"nvext": {"completion_token_ids": [5, 6]}}
        await route.fulfill(json=body)

    routes = {"**/v1/chat/completions": other}
    async with opened(browser, served.url, routes=routes) as shown:
        await shown.send(TEXT, max_tokens="4")
        await shown.has_verdict("done")
        await shown.at("compare").click()
        assert "differs" in await shown.has_verdict("bad")
        assert await shown.page.locator("#tokens [data-differs]").count() > 0


async def test_reasoning_and_tool_calls_are_told_apart(
    browser: Browser, served: Stack
) -> None:
    """Joined of deltas; and whatever they say stays text."""
    call = {"index": 0, "id": "c1", "function": {"name": MARKUP, "arguments": '{"a'}}
    rest = {"index": 0, "function": {"arguments": '": 1}'}}
    end = chunk(4, [], finish_reason="tool_calls")
    end["nvext"] |= {"kv_transfer_params": {"hidden_states_path": MARKUP}}
    said = {"content": [{"token": MARKUP, "logprob": -0.1, "bytes": [60]}]}
    routes = {
        "**/v1/chat/completions": streamed(
            chunk(0, [11], delta={"reasoning": MARKUP}, logprobs=said),
            chunk(1, [12], delta={"content": f"so {MARKUP}"}),
            chunk(2, [13], delta={"tool_calls": [call]}),
            chunk(3, [14], delta={"tool_calls": [rest]}),
            end,
        )
    }
    async with opened(browser, served.url, routes=routes) as shown:
        await shown.send(TEXT)
        await shown.has_verdict("done")
        parts = {
            part: await shown.page.locator(f"[data-part={part}] > *").all_inner_texts()
            for part in ("reasoning", "content", "call-0")
        }
        assert parts == {
            "reasoning": ["Reasoning", MARKUP],
            "content": ["Content", f"so {MARKUP}"],
            "call-0": [f"Tool call: {MARKUP} (c1)", '{"a": 1}'],
        }
        assert await shown.chip_ids() == [11, 12, 13, 14]
        kv = json.loads(str(await shown.at("kv").text_content()))
        assert kv == {"hidden_states_path": MARKUP}
        assert await shown.page.locator("main img").count() == 0


async def test_a_gap_in_a_stream_is_no_output(browser: Browser, served: Stack) -> None:
    """An event that is not the next one is told, and nothing behind it is taken."""
    routes = {
        "**/v1/chat/completions": streamed(chunk(0, [11]), chunk(2, [13])),
    }
    async with opened(browser, served.url, routes=routes) as shown:
        await shown.send(TEXT)
        assert "ids from 2 on, where 1 have come" in await shown.has_verdict("bad")
        assert await shown.chip_ids() == [11]


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("max_tokens", "0", "Max tokens"),
        ("temperature", "", "Temperature"),
        ("toolbox", "{", "Tools are no JSON"),
    ],
)
async def test_a_form_that_is_wrong_says_where(
    browser: Browser, served: Stack, field: str, value: str, says: str
) -> None:
    """And nothing is sent."""
    async with opened(browser, served.url) as shown:
        await shown.page.locator("#form summary").click()
        await shown.send(TEXT, **{field: value})
        assert says in await shown.has_verdict("bad")
        wrong = shown.page.locator("[aria-invalid=true]")
        assert await wrong.get_attribute("id") == field.replace("_", "-")
        assert not await shown.chip_ids()


async def test_what_the_frontend_refuses_is_told(
    browser: Browser, served: Stack
) -> None:
    """In its own words."""
    async with opened(browser, served.url) as shown:
        await shown.send("many words " * 2000)
        told = await shown.has_verdict("bad")
        assert "context length" in told
        # The console says of any 4xx that it was one.
        shown.faults = [one for one in shown.faults if "status of 400" not in one]


async def focused(shown: Watched) -> str:
    """Return the id of what has the focus, and see that this can be seen."""
    style = "getComputedStyle(document.activeElement).outlineStyle"
    assert await shown.page.evaluate(style) != "none"
    return str(await shown.page.evaluate("document.activeElement.id"))


async def test_all_of_it_works_by_keyboard(browser: Browser, served: Stack) -> None:
    """Skip to the playground, send, break, resume, and go along the tokens."""
    async with opened(browser, served.url) as shown:
        await shown.is_live()
        press = shown.page.keyboard.press
        await press("Tab")
        assert await shown.page.locator(".skip").evaluate(
            "one => one === document.activeElement && getComputedStyle(one).clipPath"
        ) == ("none")
        await press("Enter")
        await press("Tab")
        assert await focused(shown) == "message"
        await shown.page.keyboard.type("! ")
        for field, value in (("max-tokens", "30"), ("temperature", "0")):
            await press("Tab")
            assert await focused(shown) == field
            await press("Control+a")
            await shown.page.keyboard.type(value)
        await press("Tab")
        await press("Control+a")
        await shown.page.keyboard.type("6")
        await press("Enter")  # in a field, that sends
        await shown.has_verdict("warn")
        while await focused(shown) != "resume":
            await press("Tab")
        await press("Enter")
        assert "All 30 ids equal" in await shown.has_verdict("good")
        assert await focused(shown) == "resume"  # though it is of no use any more

        while await focused(shown) != "tokens":
            await press("Tab")
        await press("ArrowRight")
        await press("ArrowRight")
        chosen = shown.page.locator("#tokens [aria-selected=true]")
        assert await chosen.get_attribute("id") == "tokens-1"
        assert "1, id " in await shown.at("token").inner_text()
        await press("End")
        assert await chosen.get_attribute("id") == "tokens-29"


async def test_a_key_is_asked_for_and_kept_in_the_tab(
    browser: Browser, tiny_model: Path, tmp_path: Path
) -> None:
    """Where there are keys, the data needs one; it goes out with every call from then on."""
    keys = Keyed(tmp_path / "keys", ["alice"])
    sent: list[str | None] = []

    async def noted(route: Route) -> None:
        sent.append(route.request.headers.get("authorization"))
        await route.fallback()

    routes = {"**/ui/events": noted, "**/v1/**": noted, "**/tokenize": noted}
    async with (
        stack(tiny_model, PAIR, OPTIONS, keys.arguments) as running,
        opened(browser, running.url, routes=routes) as shown,
    ):
        dialog = shown.at("key-dialog")
        await dialog.wait_for()
        assert await shown.violations() == []
        await shown.at("key-value").fill("wrong")
        await shown.page.keyboard.press("Enter")
        await shown.at("status", data_state="key").wait_for()
        await dialog.wait_for()
        await shown.at("key-value").fill("key-of-alice")
        await shown.page.keyboard.press("Enter")
        await dialog.wait_for(state="hidden")
        await shown.is_live()
        await shown.send(TEXT, max_tokens="12", break_after="4")
        await shown.has_verdict("warn")
        await shown.at("resume").click()
        assert "All 12 ids equal" in await shown.has_verdict("good")
        assert sent[:2] == [None, "Bearer wrong"]
        assert set(sent[2:]) == {"Bearer key-of-alice"}
        assert await shown.page.evaluate("localStorage.length") == 0
        await shown.page.reload()
        await shown.is_live()
        shown.faults = [one for one in shown.faults if "status of 401" not in one]


async def test_a_frontend_that_is_gone_is_said_to_be(
    browser: Browser, served: Stack
) -> None:
    """And is watched again when it is back."""
    gone = True

    async def cut(route: Route) -> None:
        await (route.abort() if gone else route.fallback())

    async with opened(browser, served.url, routes={"**/ui/events": cut}) as shown:
        await shown.at("status", data_state="lost").wait_for()
        gone = False
        await shown.is_live()
        shown.faults = [one for one in shown.faults if "ERR_FAILED" not in one]


async def test_a_worker_that_is_lost_is_seen(
    browser: Browser, tiny_model: Path
) -> None:
    """Its card says so, and so does the summary; what runs goes on elsewhere."""
    roles = (Role.AGGREGATED, Role.AGGREGATED)
    async with (
        stack(tiny_model, roles, OPTIONS) as running,
        opened(browser, running.url) as shown,
    ):
        await shown.is_live()
        await running.workers[1].die()
        card = shown.page.locator(".card[data-tone=bad]")
        await card.get_by_text("connecting", exact=True).wait_for()
        summary = await shown.at("topology-summary").inner_text()
        assert summary == "2 aggregated; 1 not ready"
