"""The resume report on the simulated engine: the whole matrix.

A worker that holds each output at its cut is killed, or drained, under all of them at
once; another one goes on. So every cut is exactly where it is said to be.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from report_cuts import CUTS, Cut, cuts_of
from report_kinds import KINDS, PARSERS, SAMPLINGS, Kind, Text, report_model
from report_stack import Stack, Worker

__all__ = ["PATHS", "run_simulated"]

PATHS = ("client resume", "replay", "migration", "drain")
BLOCK_SIZE = 16
MAX_TOKENS = 96  # more than any script says
READY_S = 240.0  # two frontends import vLLM for its parsers
OPTIONS = (
    *("--step-ms", "1", "--prefill-tokens-per-s", "0", "--output-draws"),
    *("--block-size", str(BLOCK_SIZE), "--max-num-seqs", "2048"),
    *("--num-blocks", "65536"),
)
Report = Callable[[str], object]


@dataclass(frozen=True)
class Planned:
    """A case, its uninterrupted run, and where it is cut."""

    case: Case
    whole: Answer
    cut: Cut


async def run_simulated(
    source: Path,
    report: Report,
    *,
    kinds: Sequence[Kind] = KINDS,
    paths: Sequence[str] = PATHS,
    cuts: Sequence[str] = CUTS,
    options: Sequence[str] = (),
    parsed: bool = True,
) -> list[Outcome]:
    """Return all cases of the simulated engine.

    Args:
        source: The demo model.
        report: Told what is done now.
        kinds: Of outputs.
        paths: How they are broken.
        cuts: Where.
        options: More of the engine's.
        parsed: Whether the frontends have parsers, which take vLLM.
    """
    with tempfile.TemporaryDirectory(prefix="tokenwire-resume-") as name:
        folder = Path(name)
        model = report_model(source, folder / "model")
        async with (
            Stack(
                model,
                "sim",
                folder,
                parsers=PARSERS if parsed else None,
                ready_s=READY_S,
            ) as stack,
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http,
        ):
            part = _Simulated(stack, http, Text(model), folder, report, tuple(options))
            return await part.run(kinds, paths, cuts)


class _Simulated:
    def __init__(
        self,
        stack: Stack,
        http: aiohttp.ClientSession,
        text: Text,
        folder: Path,
        report: Report,
        options: tuple[str, ...],
    ) -> None:
        self._stack = stack
        self._http = http
        self._text = text
        self._folder = folder
        self._report = report
        self._options = (*OPTIONS, *options)

    async def run(
        self, kinds: Sequence[Kind], paths: Sequence[str], cuts: Sequence[str]
    ) -> list[Outcome]:
        """Return the outcomes of these kinds."""
        calm = await self._start("calm", self._rules(kinds))
        await self._stack.start_frontends(2)
        await self._stack.serve_by(self._http, [calm])
        planned = await self._plan(kinds, cuts)
        outcomes: list[Outcome] = []
        url, text = self._stack.urls[0], self._text
        if "client resume" in paths:
            self._report(f"{len(planned)} client resumes")
            outcomes += await each(
                client_resume(
                    self._http, self._stack.urls, one.case, one.whole, one.cut
                )
                for one in planned
            )
            compared = [
                (method, one)
                for method, one in itertools.product(BASELINES, planned)
                if one.case.sampling.is_seeded and one.cut.k < len(one.whole.ids)
            ]
            self._report(f"{len(compared)} baselines")
            outcomes += await each(
                baseline(self._http, url, method, one.case, one.whole, one.cut, text)
                for method, one in compared
            )
        if "replay" in paths:
            self._report(f"{len(planned)} replays")
            outcomes += await each(
                replay(self._http, self._stack.urls, one.case, one.whole, one.cut)
                for one in planned
            )
        for path, strike in (("migration", Worker.kill), ("drain", Worker.drain)):
            if path in paths:
                self._report(f"{len(planned)} outputs of one worker: {path}")
                outcomes += await self._strike(path, strike, planned, kinds, calm)
        return outcomes

    async def _start(self, name: str, rules: list[dict[str, Any]]) -> Worker:
        script = self._folder / f"{name}-script.json"
        script.write_text(json.dumps(rules))
        return await self._stack.start_worker(
            name, (*self._options, "--script", str(script))
        )

    def _rules(self, kinds: Sequence[Kind]) -> list[dict[str, Any]]:
        """Return what is said, whatever the prompt is beside the kind's words."""
        return [
            {
                "contains": self._text.ids(kind.asks),
                "output_token_ids": self._text.script(kind.said),
                "drawn": self._text.words,
                "resume": not kind.has_grammar,
            }
            for kind in kinds
        ]

    async def _plan(self, kinds: Sequence[Kind], cuts: Sequence[str]) -> list[Planned]:
        """Return cases with their uninterrupted runs: each cut is a case of its own."""
        cases = [
            Case(kind, sampling, penalized, f"[{cut}]", MAX_TOKENS)
            for kind, sampling, penalized, cut in itertools.product(
                kinds, SAMPLINGS, (False, True), cuts
            )
        ]
        self._report(f"{len(cases)} uninterrupted runs")
        url = self._stack.urls[0]
        wholes = await each(refer(self._http, url, case) for case in cases)
        return [
            Planned(case, whole, cut)
            for case, whole in zip(cases, wholes, strict=True)
            for cut in cuts_of(case.kind, whole, self._text, BLOCK_SIZE)
            if case.tag == f"[{cut.name}]"
        ]

    async def _strike(
        self,
        path: str,
        strike: Callable[[Worker], None],
        planned: Sequence[Planned],
        kinds: Sequence[Kind],
        calm: Worker,
    ) -> list[Outcome]:
        """Break all outputs at once, each at its cut; return what their clients had."""
        stack = self._stack
        holding = [
            {
                "prompt_token_ids": one.whole.prompt_ids,
                "output_token_ids": self._text.script(one.case.kind.said),
                "drawn": self._text.words,
                "hold_at": one.cut.k,
            }
            for one in planned
        ]
        worker = await self._start(path, holding + self._rules(kinds))
        await stack.serve_by(self._http, [worker])
        answers = [Answer() for _ in planned]
        streams = [
            asyncio.create_task(
                read(self._http, Request(url, one.case.body(), None), answer)
            )
            for one, answer, url in zip(
                planned, answers, itertools.cycle(stack.urls), strict=False
            )
        ]
        for one, answer in zip(planned, answers, strict=True):
            await answer.has(one.cut.k)
        await stack.has_open(self._http, worker, len(planned))  # those at 0, too
        await stack.serve_by(self._http, [worker, calm])
        struck_at = time.perf_counter()
        strike(worker)
        await asyncio.gather(*streams)
        await stack.serve_by(self._http, [calm])
        http, url = self._http, stack.urls[0]
        return await each(
            judge(http, url, one.case, one.whole, one.cut, path, answer, struck_at)
            for one, answer in zip(planned, answers, strict=True)
        )
