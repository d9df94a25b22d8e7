"""The resume report on the real engine: the essential axes, and what a resume costs.

Two workers in fp32, since in bf16 greedy ties flip between batch shapes. One of them is
killed under outputs that are under way, a third one takes its place, then the second one
is drained.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
from report_cases import (
    BASELINES,
    Case,
    Outcome,
    baseline,
    client_resume,
    each,
    judge,
    refer,
    replay,
)
from report_client import Answer, Request, read
from report_cuts import UNDER_WAY, Cut, cuts_of
from report_kinds import (
    KINDS,
    NO_THOUGHT,
    PARSERS,
    SAMPLINGS,
    Kind,
    Text,
    report_model,
)
from report_stack import MODEL_NAME, Stack, Worker

__all__ = ["Reuse", "run_real"]

BLOCK_SIZE = 128  # vLLM's on a CPU
MAX_TOKENS = 72
BORDER_AT = 20  # output tokens that fill a block, with prompts made so long
AT_ONCE = 8  # streams under way: two cores bring as many tokens with more
READY_S = 600.0
HAVE = 5  # ids of each output, at least, when its worker is lost
CUTS_OF_EACH = 3
"""Cuts of an output, in the order of how much can go wrong there."""
PREFERRED = (
    "inside <think>", "inside a character", "in a tool name", "in tool arguments",
    "block", "before EOS", "after EOS", "block+1", "1",
)  # fmt: skip

ENGINE_ARGUMENTS = (
    *("--dtype", "float32", "--max-model-len", "4096", "--max-num-seqs", "32"),
    *("--reasoning-parser", PARSERS[1]),
)
LONG_PROMPT, LONG_OUTPUT = 1_900, 100  # tokens that a resume finds computed
ROUNDS = 5

Report = Callable[[str], object]

_CITY = "^[A-Z][a-z]{5,9} 🏔[a-z]{4,7}$"
_PLACE: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "pattern": _CITY}},
    "required": ["city"],
    "additionalProperties": False,
}
_TWO = "\\n".join(
    f'<tool_call>\\n\\{{"name": "{name}", "arguments": '
    '\\{"city": "[A-Z][a-z]{4,7} 🏔[a-z]{2,4}"\\}\\}\\n</tool_call>'
    for name in ("get_weather", "get_population")
)


@dataclass(frozen=True)
class Reuse:
    """What a resume of a long output costs where its KV is, and where it is not."""

    num_tokens: int  # of prompt and output
    recomputed_tokens: list[int]  # of each resume at the same worker
    warm_ms: list[float]  # to the first token
    cold_ms: list[float]

    @property
    def is_bounded(self) -> bool:
        """Whether less than a block and the tail was computed again."""
        return max(self.recomputed_tokens) <= BLOCK_SIZE

    def __str__(self) -> str:
        """Return a sentence."""
        warm, cold = statistics.median(self.warm_ms), statistics.median(self.cold_ms)
        return (
            f"A resume behind {self.num_tokens} tokens of prompt and output, at the worker "
            f"that has them: {max(self.recomputed_tokens)} tokens are computed again, of "
            f"blocks of {BLOCK_SIZE}; its first token comes after {warm:.0f} ms, where "
            f"nothing is cached after {cold:.0f} ms ({cold / warm:.1f} times as long; "
            f"medians of {len(self.warm_ms)}, in turn)."
        )


def _tools(parameters: dict[str, Any], *, strict: bool) -> list[dict[str, Any]]:
    return [
        {
            "type": "function",
            "function": {"name": name, "strict": strict, "parameters": parameters},
        }
        for name in ("get_weather", "get_population")
    ]


def _real(kind: Kind) -> Kind:
    """Return what the engine is asked: a small model says such things only if it must."""
    schema: dict[str, Any] = {
        **_PLACE,
        "properties": {
            **_PLACE["properties"],
            "days": {
                "type": "array",
                "items": {"type": "string", "pattern": "^[a-zé]{2,5}$"},
                "minItems": 2,
                "maxItems": 3,
            },
        },
        "required": ["city", "days"],
    }
    form = {"name": "weather", "schema": schema, "strict": True}
    bodies: dict[str, dict[str, Any]] = {
        "reasoning": {"structured_outputs": {"regex": "[a-z]{3,9} 🏔[0-9 ]{8,12}"}},
        "one tool": {
            **NO_THOUGHT,
            "tools": _tools(_PLACE, strict=True),
            "tool_choice": "required",
        },
        "two tools": {
            **NO_THOUGHT,
            "tools": _tools({"type": "object"}, strict=False),
            "structured_outputs": {"regex": _TWO},
        },
        "JSON schema": {
            **NO_THOUGHT,
            "response_format": {"type": "json_schema", "json_schema": form},
        },
        "regex": {
            **NO_THOUGHT,
            "structured_outputs": {"regex": "([a-z]{3,7} 🏔 [a-zé]{3,7} ){4}"},
        },
    }
    return replace(kind, body=bodies.get(kind.name, kind.body))


async def run_real(source: Path, report: Report) -> tuple[list[Outcome], Reuse]:
    """Return the cases of the real engine, and what a resume costs.

    Args:
        source: The demo model.
        report: Told what is done now.
    """
    with tempfile.TemporaryDirectory(prefix="tokenwire-resume-") as name:
        folder = Path(name)
        model = report_model(source, folder / "model")
        async with (
            Stack(model, "vllm", folder, parsers=PARSERS, ready_s=READY_S) as stack,
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http,
        ):
            return await _Real(stack, http, Text(model), report).run()


class _Real:
    def __init__(
        self, stack: Stack, http: aiohttp.ClientSession, text: Text, report: Report
    ) -> None:
        self._stack = stack
        self._http = http
        self._text = text
        self._report = report

    async def run(self) -> tuple[list[Outcome], Reuse]:
        """Return all of it."""
        stack, http = self._stack, self._http
        self._report("starting two engines and two frontends")
        await stack.start_frontends(2)
        first, second = await asyncio.gather(
            self._start("first"), self._start("second")
        )
        await stack.serve_by(http, [first, second])
        cases = await self._cases()
        self._report(f"{len(cases)} uninterrupted runs")
        wholes = await each(
            (refer(http, stack.urls[n % 2], case) for n, case in enumerate(cases)),
            AT_ONCE,
        )
        outcomes = await self._strike(
            "migration", Worker.kill, cases, wholes, first, second
        )
        # It starts beside what follows, which takes longer.
        starting = asyncio.create_task(self._start("third"))
        try:
            outcomes += await self._resume(cases, wholes)
            third = await starting
        finally:
            starting.cancel()
        outcomes += await self._strike(
            "drain", Worker.drain, cases, wholes, second, third
        )
        self._report(f"{ROUNDS} resumes of a long output, and {ROUNDS} cold ones")
        return outcomes, await self._reuse()

    async def _start(self, name: str) -> Worker:
        threads = max(1, len(os.sched_getaffinity(0)) // 2)
        settings = {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(threads),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        return await self._stack.start_worker(name, ENGINE_ARGUMENTS, settings=settings)

    async def _cases(self) -> list[Case]:
        """Return the cases: their prompts end where output soon fills a block."""
        kinds = [_real(kind) for kind in KINDS]
        greedy, seeded, unseeded, hot = SAMPLINGS
        url = self._stack.urls[0]
        probes = [Case(kind, greedy, False, "so", 1) for kind in kinds]
        prompts = await each((refer(self._http, url, one) for one in probes), AT_ONCE)
        cases: list[Case] = []
        for kind, probe in zip(kinds, prompts, strict=True):
            missing = (BLOCK_SIZE - BORDER_AT - len(probe.prompt_ids)) % BLOCK_SIZE
            tag = " ".join(["so"] * (missing + 1))
            cases += [
                Case(kind, greedy, False, tag, MAX_TOKENS),
                Case(kind, seeded, True, tag, MAX_TOKENS),
                Case(kind, hot, False, tag, MAX_TOKENS),
            ]
            if kind.name == "plain":
                cases.append(Case(kind, unseeded, False, tag, MAX_TOKENS))
        return [
            await self._ending(one) if one.kind.has_thought else one for one in cases
        ]

    async def _ending(self, case: Case) -> Case:
        """Return a case whose reasoning ends: the first bias at which it does in time."""
        [end] = self._text.ids("</think>")
        tried = [
            replace(case, more={"logit_bias": {str(end): bias}})
            for bias in (12, 13, 14, 15, 16, 17, 18)
        ]
        url = self._stack.urls[0]
        wholes = await each((refer(self._http, url, one) for one in tried), AT_ONCE)
        for one, whole in zip(tried, wholes, strict=True):
            if end in whole.ids[6 : MAX_TOKENS - 20]:
                return one
        return tried[0]  # then all of it is reasoning

    async def _strike(
        self,
        path: str,
        strike: Callable[[Worker], None],
        cases: Sequence[Case],
        wholes: Sequence[Answer],
        here: Worker,
        there: Worker,
    ) -> list[Outcome]:
        """Lose the worker of all cases at once; another one has them then."""
        stack, http = self._stack, self._http
        self._report(f"{len(cases)} outputs of one worker: {path}")
        await stack.serve_by(http, [here])
        answers = [Answer() for _ in cases]
        streams = [
            asyncio.create_task(
                read(
                    http,
                    Request(stack.urls[n % 2], {**case.body(), "cache_salt": path}),
                    answer,
                )
            )
            for n, (case, answer) in enumerate(zip(cases, answers, strict=True))
        ]
        for answer in answers:
            await answer.has(1)
        await stack.serve_by(http, [here, there])
        for answer in answers:
            await answer.has(HAVE)
        struck_at = time.perf_counter()
        cuts = [Cut(UNDER_WAY, len(answer.ids)) for answer in answers]
        running = [answer.finish_reason is None for answer in answers]
        strike(here)
        await asyncio.gather(*streams)
        await stack.serve_by(http, [there])
        return await each(
            (
                judge(http, stack.urls[0], case, whole, cut, path, answer, struck_at)
                for case, whole, cut, answer, ran in zip(
                    cases, wholes, cuts, answers, running, strict=True
                )
                if ran
            ),
            AT_ONCE,
        )

    async def _resume(
        self, cases: Sequence[Case], wholes: Sequence[Answer]
    ) -> list[Outcome]:
        """Return what clients do, and the baselines."""
        http, urls, text = self._http, self._stack.urls, self._text
        planned = [
            (case, whole, cut)
            for case, whole in zip(cases, wholes, strict=True)
            for cut in _chosen(cuts_of(case.kind, whole, text, BLOCK_SIZE))
        ]
        self._report(f"{len(planned)} client resumes")
        outcomes = await each(
            (client_resume(http, urls, *one) for one in planned), AT_ONCE
        )
        firsts = [planned[at] for at in range(0, len(planned), CUTS_OF_EACH)]
        self._report(f"{len(firsts)} replays")
        outcomes += await each((replay(http, urls, *one) for one in firsts), AT_ONCE)
        compared = [
            (method, *one)
            for method in BASELINES
            for one in planned
            if one[0].sampling.is_seeded and one[2].k < len(one[1].ids)
        ]
        self._report(f"{len(compared)} baselines")
        outcomes += await each(
            (baseline(http, urls[0], *one, text) for one in compared), AT_ONCE
        )
        return outcomes

    async def _reuse(self) -> Reuse:
        """Resume a long output where it is cached, and where nothing is, in turn."""
        url = self._stack.urls[0]
        words = " ".join(["The lake lies at the foot of the mountain."] * 400)
        prompt = self._text.ids(words)[:LONG_PROMPT]

        def body(salt: str, max_tokens: int, **nvext: Any) -> dict[str, Any]:
            return {
                "model": MODEL_NAME,
                "messages": [{"role": "user", "content": "-"}],
                "max_tokens": max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "cache_salt": salt,
                "nvext": {"resumable": True, "token_data": prompt, **nvext},
            }

        whole = await read(self._http, Request(url, body("warm", LONG_OUTPUT + 20)))
        ids = whole.ids[:LONG_OUTPUT]
        reuse = Reuse(len(whole.prompt_ids) + len(ids), [], [], [])
        for number in range(ROUNDS):
            for salt, times in (("warm", reuse.warm_ms), (f"{number}", reuse.cold_ms)):
                asked = body(
                    salt, LONG_OUTPUT + 4, resume_from={"output_token_ids": ids}
                )
                rest = await read(
                    self._http, Request(url, asked), Answer(num_before=len(ids))
                )
                if rest.error:
                    raise RuntimeError(str(rest.error))
                times.append(rest.first_id_s * 1000)
                if salt == "warm":
                    reuse.recomputed_tokens.append(rest.resume["recomputed_tokens"])
        return reuse


def _chosen(cuts: Sequence[Cut]) -> list[Cut]:
    by_name = {cut.name: cut for cut in cuts}
    found = [by_name[name] for name in PREFERRED if name in by_name]
    return found[:CUTS_OF_EACH]
