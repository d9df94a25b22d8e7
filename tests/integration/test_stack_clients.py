"""Other people's clients, unmodified, against the real engines: exact to the token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion
from prometheus_client.parser import text_string_to_metric_families

from support.clients import client_tokenizer, run_client, run_snippet
from support.pages import programs
from support.real_stack import NAME, prompt_of
from support.up import Up
from support.vllm_engine import MODEL

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
session = pytest.mark.asyncio(loop_scope="session")

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
EOS = 2
BLOCK = 128  # tokens of a KV block on a CPU
NEAR = 1e-3  # log probabilities of one token in two batches, in fp32


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that clients read the tokenizer from."""
    return client_tokenizer(str(MODEL), tmp_path_factory.mktemp("tokenizer"))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def renderers(pair: Up, tokenizer: Path) -> dict[str, Any]:
    """What the renderers program said."""
    program = "renderers_rollout.py"
    return dict(await run_client(program, pair.url, NAME, str(tokenizer)))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def verifiers(pair: Up, tokenizer: Path) -> dict[str, Any]:
    """What the verifiers program said."""
    program = "verifiers_rollout.py"
    return dict(await run_client(program, pair.url, NAME, str(tokenizer)))


async def greedy(pair: Up, prompt: list[int], num_tokens: int) -> dict[str, Any]:
    """Return what ``/v1/completions`` makes of the same ids."""
    body = {
        "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "logprobs": 0,
        "return_token_ids": True,
    }  # fmt: skip
    async with (
        aiohttp.ClientSession() as http,
        http.post(pair.url + "/v1/completions", json=body) as answer,
    ):
        return dict(await answer.json())


async def check_turn(
    pair: Up, prompt: list[int], ids: list[int], logprobs: list[float]
) -> None:
    """Check that the other route brings the same ids and log probabilities."""
    other = await greedy(pair, prompt, len(ids))

    assert other["nvext"]["completion_token_ids"] == ids
    expected = other["choices"][0]["logprobs"]["token_logprobs"]
    assert logprobs == pytest.approx(expected, abs=NEAR)


# --- renderers -----------------------------------------------------------------------


@session
@pytest.mark.parametrize("rollout", ["whole", "cut_off"])
async def test_renderers_rolls_out_turn_by_turn(
    pair: Up, renderers: dict[str, Any], rollout: str
) -> None:
    """Every turn's prompt begins with the ids of the turns before, and each is exact."""
    history: list[int] = []
    for turn in renderers[rollout]:
        prompt, ids = turn["prompt_ids"], turn["completion_ids"]
        assert prompt[: len(history)] == history
        assert turn["usage"]["prompt_tokens"] == len(prompt)
        assert turn["usage"]["completion_tokens"] == len(ids)
        assert turn["finish_reason"] == ("stop" if ids[-1] == EOS else "length")
        await check_turn(pair, prompt, ids, turn["completion_logprobs"])
        history = prompt + ids
    ends = [turn["finish_reason"] for turn in renderers[rollout]]
    assert ends[0] == ("length" if rollout == "cut_off" else "stop")


@session
async def test_renderers_reads_the_answer(renderers: dict[str, Any]) -> None:
    """Its own parser finds the text in the ids."""
    assert "Paris" in renderers["whole"][0]["content"]


@session
async def test_renderers_in_parallel_is_renderers_alone(
    renderers: dict[str, Any],
) -> None:
    """Rollouts at once get the ids that each gets alone."""
    assert renderers["together"] == renderers["alone"]
    assert all(renderers["alone"])


@session
async def test_renderers_hears_why_it_was_refused(renderers: dict[str, Any]) -> None:
    """The context length is found in ``/v1/models``; errors are the SDK's, by field."""
    assert renderers["failures"] == {
        "overlong": {"type": "OverlongPromptError", "param": None},
        "overlong, not asked before": {
            "type": "BadRequestError",
            "param": "token_ids",
        },
        "temperature": {
            "type": "BadRequestError",
            "param": "sampling_params.temperature",
        },
    }


@session
async def test_the_snippets_of_the_document_run(pair: Up, tokenizer: Path) -> None:
    """Those of docs/clients.md that are about these two libraries."""
    text = programs(PAGE)["Prime-RL, verifiers, renderers"]
    text = text.replace("http://127.0.0.1:8000", pair.url)
    assert pair.url in text

    await run_snippet(text, {"MODEL": str(tokenizer)})


# --- verifiers -----------------------------------------------------------------------


@session
@pytest.mark.parametrize("client", ["eval", "train"])
async def test_verifiers_rewards_its_rollouts(
    verifiers: dict[str, Any], client: str
) -> None:
    """Rollouts side by side are all right, and each gets its reward."""
    for trace in verifiers[client]["once"]:
        assert trace["ok"], trace["errors"]
        assert trace["reward"] == 1.0
        assert "Paris" in trace["reply"]
        assert trace["num_turns"] == 1
        assert trace["usage"]["completion_tokens"] > 0


@session
@pytest.mark.parametrize("client", ["eval", "train"])
async def test_verifiers_goes_on_for_turns(
    verifiers: dict[str, Any], client: str
) -> None:
    """Three turns are one conversation, not three."""
    trace = verifiers[client]["turns"]

    assert trace["ok"], trace["errors"]
    assert trace["num_turns"] == 3
    assert len(trace["branches"]) == 1


@session
async def test_verifiers_trains_on_exact_ids(
    pair: Up, verifiers: dict[str, Any]
) -> None:
    """Each id that the trace calls sampled is what the engine samples after its prefix."""
    [branch] = verifiers["train"]["turns"]["branches"]
    ids, sampled = branch["token_ids"], branch["sampled"]
    assert len(sampled) == len(branch["logprobs"]) == len(ids)
    starts = [n for n, one in enumerate(sampled) if one and not sampled[n - 1]]
    assert len(starts) == 3
    for start in starts:
        end = next((n for n in range(start, len(ids)) if not sampled[n]), len(ids))
        logprobs = branch["logprobs"][start:end]
        await check_turn(pair, ids[:start], ids[start:end], logprobs)


@session
@pytest.mark.parametrize("client", ["eval", "train"])
async def test_verifiers_hears_why_it_was_refused(
    verifiers: dict[str, Any], client: str
) -> None:
    """A model that is not served is the provider's 404, with our sentence."""
    [(kind, message)] = verifiers[client]["failed"]["errors"]

    assert kind == "ProviderError"
    assert "404" in message
    assert "'no-such-model' does not exist" in message


# --- what trainers build on ----------------------------------------------------------


async def num_cached(pair: Up, prompt: list[int], salt: str) -> int:
    """Return how many of the prompt's tokens a rollout of this policy finds cached."""
    params = {"max_tokens": 2, "temperature": 0, "no_such_parameter": 1}
    body = {"token_ids": prompt, "sampling_params": params, "cache_salt": salt}
    async with (
        aiohttp.ClientSession() as http,
        http.post(
            pair.url + "/inference/v1/generate",
            json=body,
            headers={"X-Session-ID": "rollout-2"},
        ) as answer,
    ):
        usage = (await answer.json())["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


@session
async def test_a_new_policy_finds_no_old_cache(pair: Up) -> None:
    """The salt is its version: what older weights have computed is not read."""
    prompt = prompt_of(2 * BLOCK + 50)

    assert await num_cached(pair, prompt, "policy-1") == 0
    assert await num_cached(pair, prompt, "policy-1") == 2 * BLOCK
    assert await num_cached(pair, prompt, "policy-2") == 0


@session
@pytest.mark.parametrize("stream", [False, True])
async def test_engine_data_is_what_the_engine_did(pair: Up, stream: bool) -> None:
    """NeMo-RL's way in and out: exact ids, and their log probabilities."""
    prompt = prompt_of(70)
    body = {
        "messages": [{"role": "user", "content": ""}], "max_tokens": 12,
        "temperature": 0, "stream": stream,
        "nvext": {"extra_fields": ["engine_data"], "token_data": prompt},
    }  # fmt: skip
    async with (
        aiohttp.ClientSession() as http,
        http.post(pair.url + "/v1/chat/completions", json=body) as answer,
    ):
        text = await answer.text()
    if stream:
        *_, last, done = text.strip().split("\n\n")
        assert done == "data: [DONE]"
        text = last.removeprefix("data: ")
    data = json.loads(text)["nvext"]["engine_data"]

    assert data["prompt_token_ids"] == prompt
    await check_turn(
        pair, prompt, data["completion_token_ids"], data["completion_logprobs"]
    )


@session
async def test_the_page_has_both_engines(pair: Up) -> None:
    """VLLM's own families of each, with a label that tells them apart."""
    await greedy(pair, prompt_of(40), 4)
    async with (
        aiohttp.ClientSession() as http,
        http.get(pair.url + "/metrics") as answer,
    ):
        text = await answer.text()
    values: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("vllm:") and "le" not in sample.labels:
                by_engine = values.setdefault(sample.name, {})
                by_engine[sample.labels["engine"]] = sample.value

    engines = {"prefill-0:0", "decode-0:0"}
    for name in ("prompt_tokens_total", "generation_tokens_total"):
        assert set(values[f"vllm:{name}"]) == engines
        assert all(value > 0 for value in values[f"vllm:{name}"].values())
    for name in (
        "num_requests_running",
        "kv_cache_usage_perc",
        "prefix_cache_hits_total",
        "num_preemptions_total",  # of the dashboard and the alerts, as the next
        "nixl_num_kv_expired_reqs_total",
    ):
        assert set(values[f"vllm:{name}"]) == engines


# --- openai --------------------------------------------------------------------------


@session
async def test_the_openai_client_validates_strictly(pair: Up) -> None:
    """With real logprobs and a real stop: every field is as the client's types say."""
    request: dict[str, Any] = {
        "model": NAME, "max_tokens": 60, "temperature": 0, "logprobs": True,
        "top_logprobs": 2,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
    }  # fmt: skip
    async with AsyncOpenAI(
        base_url=pair.url + "/v1",
        api_key="none",
        max_retries=0,
        _strict_response_validation=True,
    ) as strict:
        whole = cast("ChatCompletion", await strict.chat.completions.create(**request))
        text = ""
        async for chunk in await strict.chat.completions.create(stream=True, **request):
            text += chunk.choices[0].delta.content or ""
        [model] = [one async for one in strict.models.list()]
        completion = await strict.completions.create(
            model=NAME, prompt="Hello", max_tokens=4, logprobs=1
        )

    assert whole.choices[0].finish_reason == "stop"
    assert text == whole.choices[0].message.content
    assert model.id == NAME
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 4


@session
async def test_a_chat_keeps_its_turns_exact(pair: Up, client: AsyncOpenAI) -> None:
    """Ids sent back as NeMo Gym does: the prompt begins with them, and they are cached.

    A model that writes at random writes tokens that no tokenizer would have made.
    """
    del pair
    question = {"role": "user", "content": "Tell me a long story about a lighthouse."}
    request: dict[str, Any] = {
        "model": NAME, "max_tokens": 100, "temperature": 1.3, "seed": 11,
        "extra_body": {"return_token_ids": True},
    }  # fmt: skip
    messages: list[Any] = [question]
    history: list[int] = []
    drifted: list[bool] = []
    num_computed = 0
    for _ in range(3):
        create = client.chat.completions.create
        reply = cast("ChatCompletion", await create(messages=messages, **request))
        nvext = (reply.model_extra or {})["nvext"]
        prompt, ids = nvext["prompt_token_ids"], nvext["completion_token_ids"]
        if history:
            assert prompt[: len(history)] == history
            assert nvext["prefix"]["kept"] == len(history)
            drifted.append(nvext["prefix"]["drifted"])
            assert reply.usage is not None
            assert reply.usage.prompt_tokens_details is not None
            cached = reply.usage.prompt_tokens_details.cached_tokens or 0
            # What the prefill worker computed before: the last prompt, in whole blocks.
            assert cached >= num_computed // BLOCK * BLOCK
        num_computed = len(prompt)
        history = [*prompt, *ids]
        said: dict[str, Any] = {
            "role": "assistant",
            "content": reply.choices[0].message.content,
            "prompt_token_ids": prompt,
            "generation_token_ids": ids,
        }
        messages += [said, {"role": "user", "content": "Go on."}]
    assert any(drifted)
