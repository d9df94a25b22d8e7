"""What can happen to a stack under load, the same for every stack; and what came of it.

A scenario acts on events (all streams have begun, no request is left), never on a guess
of how long something takes. It judges by a calm run of the same requests before it.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from survive_client import Answer, Client

__all__ = [
    "KV_FREE_S",
    "Outcome",
    "Scenarios",
    "Stack",
    "until",
]

NUM_STREAMS = 30
NUM_LEAVING = 100
NUM_ROLLING = 4
"""Streams at once while workers are exchanged: enough for each worker to have some, few
enough that a new engine loads beside them on two cores."""

AGAIN_S = 0.25
"""After a failure a client tries again, but does not hammer."""

LOOK_S = 0.02
KV_FREE_S = 2.0
"""KV that nobody will read is free again by then."""

GIVE_UP_S = 300.0
"""For anything that must happen at all; an engine loads in half a minute or several."""

SETTLE_S = 60.0
"""For a stack to become empty: what is still held then is held by a leak or a lease."""


class Stack(Protocol):
    """A running stack, and the hands on its processes."""

    url: str
    model: str
    selector: Mapping[str, Any]
    """How a request asks for token ids."""
    repeatable: bool
    """Whether the same request gets the same tokens."""
    shows_counts: bool
    """Whether ``counts`` can be asked."""
    remarks: list[str]
    """What had to be done to have it whole again."""

    def workers(self, role: str) -> Sequence[str]:
        """Return the names of the workers that are ``prefill`` or ``decode``."""
        ...

    def signal(self, name: str, number: signal.Signals, part: str = "all") -> None:
        """Send a signal to a worker's processes: ``all``, its ``server``, its ``engine``."""

    async def whole(self, *but: str) -> None:
        """Wait until every worker serves, save those named."""

    async def restart(self, name: str) -> None:
        """End a worker as an operator would, and wait until its replacement serves."""

    def counts(self, name: str) -> Mapping[str, float]:
        """Return ``running``, ``waiting``, ``kv`` and ``ended``, what it has now and had.

        Raises:
            OSError: It does not answer.
        """
        ...


@dataclass
class Outcome:
    """What came of a scenario."""

    name: str
    num_requests: int = 0
    num_failed: int = 0
    num_wrong: int = 0  # ended well, with other ids or another text
    num_wrong_usage: int = 0
    longest_pause_s: float = 0.0
    kv_peak: float = 0.0  # the largest share that was held for requests given up
    kv_held: float = 0.0  # the largest share in use KV_FREE_S after the last request
    took_s: float = 0.0  # until nothing ran, waited or was held any more
    remark: str = ""
    errors: list[str] = field(default_factory=list[str])

    def judge(
        self,
        answers: Sequence[Answer],
        calm: Mapping[int, Answer],
        *,
        repeatable: bool,
    ) -> None:
        """Count *answers* that are not those of a calm run."""
        for one in answers:
            self.num_requests += 1
            self.longest_pause_s = max(self.longest_pause_s, one.longest_pause_s)
            reference = calm[one.number]
            if one.failed:
                self.num_failed += 1
                self.errors.append(one.error or "it just ended")
            elif not one.same_as(reference, repeatable=repeatable):
                self.num_wrong += 1
            elif one.counts != reference.counts:
                self.num_wrong_usage += 1


async def until(
    condition: Callable[[], bool],
    what: str,
    timeout_s: float = GIVE_UP_S,
    clock: Callable[[], float] = time.monotonic,
) -> float:
    """Return how long, by *clock*, it took until *condition* held.

    Raises:
        TimeoutError: It did not, within *timeout_s*.
    """
    began = clock()
    while not await asyncio.to_thread(condition):
        if clock() - began > timeout_s:
            msg = f"not within {timeout_s:.0f} s: {what}"
            raise TimeoutError(msg)
        await asyncio.sleep(LOOK_S)
    return clock() - began


class Scenarios:
    """The scenarios, on one stack; they may follow each other in any order.

    Args:
        stack: Who serves.
        max_tokens: Of each output.
        clock: In seconds, for pauses and how long something takes.
    """

    def __init__(
        self,
        stack: Stack,
        max_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stack = stack
        self._clock = clock
        self.client = Client(stack.url, stack.model, max_tokens, stack.selector, clock)
        self.calm: dict[int, Answer] = {}
        self.undisturbed: list[Outcome] = []

    async def run_calm(self) -> Outcome:
        """Run all streams undisturbed, twice: what they get is what they must get."""
        if not self.calm:  # this run also shakes hands
            self.calm = {one.number: one for one in await self._ask_all()}
        return await self._outcome("calm", await self._ask_all())

    async def kill(self, name: str) -> Outcome:
        """Kill all processes of a worker when all streams have begun."""
        answers = await self._ask_all(lambda: self.stack.signal(name, signal.SIGKILL))
        return await self._outcome(f"kill -9 {name}", answers, absent=[name])

    async def freeze(self, name: str, part: str = "all") -> Outcome:
        """Stop a worker when all streams have begun, and let it go on after the last."""
        answers = await self._ask_all(
            lambda: self.stack.signal(name, signal.SIGSTOP, part)
        )
        self.stack.signal(name, signal.SIGCONT, part)
        await self.stack.whole()
        outcome = await self._outcome(f"SIGSTOP {name} ({part})", answers)
        again = await self._ask_all()  # it serves again, beside the others
        self._judge(outcome, again)
        return outcome

    async def roll(
        self,
        names: Sequence[str],
        num_streams: int = NUM_ROLLING,
        think_s: float = 0.0,
    ) -> Outcome:
        """Restart workers one by one under load that does not end.

        Args:
            names: Which, in which order.
            num_streams: How many at once.
            think_s: Pause of each between two requests: engines that load share the
                cores with those that decode.
        """
        over = False
        answers: list[Answer] = []

        async def load(first: int) -> None:
            for turn in itertools.count():
                if over:
                    return
                number = (first + turn * num_streams) % NUM_STREAMS
                answer = await self.client.ask(Answer(number))
                answers.append(answer)
                await asyncio.sleep(AGAIN_S if answer.failed else think_s)

        tasks = [asyncio.create_task(load(first)) for first in range(num_streams)]
        failed: list[str] = []
        for name in names:
            begin = len(answers)
            await self.stack.restart(name)
            num_failed = sum(one.failed for one in answers[begin:])
            if num_failed:
                failed.append(f"{num_failed} failed while {name} was restarted")
        over = True
        await asyncio.gather(*tasks)
        self.stack.remarks += failed
        return await self._outcome("rolling restart", answers)

    async def leave_between(self) -> Outcome:
        """Leave many requests between prefill and decode: no engine decodes meanwhile."""
        prefill, decode = self.stack.workers("prefill"), self.stack.workers("decode")
        before = {name: self.stack.counts(name) for name in prefill}

        def all_prefilled() -> bool:
            now = [self.stack.counts(name) for name in prefill]
            ended = sum(one["ended"] for one in now)
            return ended >= NUM_LEAVING + sum(one["ended"] for one in before.values())

        for name in decode:
            self.stack.signal(name, signal.SIGSTOP, "engine")
        calls = [
            asyncio.create_task(self.client.ask(Answer(1_000 + number)))
            for number in range(NUM_LEAVING)
        ]
        await until(all_prefilled, "all prompts are computed")
        outcome = Outcome("left between prefill and decode", num_requests=NUM_LEAVING)
        outcome.kv_peak = max(self.stack.counts(name)["kv"] for name in prefill)
        await _leave(calls)
        for name in decode:
            self.stack.signal(name, signal.SIGCONT, "engine")
        outcome.took_s, outcome.kv_held = await self._empty(prefill)
        return outcome

    async def leave_in_prefill(self, num_requests: int, num_tokens: int) -> Outcome:
        """Leave long prompts while the first of them is being computed."""
        prefill = self.stack.workers("prefill")
        calls = [
            asyncio.create_task(
                self.client.ask(
                    Answer(2_000 + number),
                    prompt=[5 + number + n % 900 for n in range(num_tokens)],
                )
            )
            for number in range(num_requests)
        ]
        await until(
            lambda: any(self.stack.counts(name)["running"] for name in prefill),
            "a prompt is being computed",
        )
        await _leave(calls)
        outcome = Outcome("left during prefill", num_requests=num_requests)
        outcome.took_s, outcome.kv_held = await self._empty(
            [*prefill, *self.stack.workers("decode")]
        )
        return outcome

    async def kill_holding(self, name: str, decode: Sequence[str]) -> Outcome:
        """Kill a prefill worker while half of the streams wait to read their KV from it.

        Args:
            name: The prefill worker.
            decode: The decode workers that are there.
        """
        half = [Answer(number) for number in range(NUM_STREAMS // 2)]
        rest = [Answer(number) for number in range(NUM_STREAMS // 2, NUM_STREAMS)]
        started = asyncio.Event()
        begun = asyncio.create_task(self._ask(half, started.set))
        await started.wait()
        ended = self.stack.counts(name)["ended"] + len(rest)
        for one in decode:
            self.stack.signal(one, signal.SIGSTOP, "engine")
        waiting = asyncio.create_task(self._ask(rest))
        await until(
            lambda: self.stack.counts(name)["ended"] >= ended, "prompts are computed"
        )
        self.stack.signal(name, signal.SIGKILL)
        for one in decode:
            self.stack.signal(one, signal.SIGCONT, "engine")
        await asyncio.gather(begun, waiting)
        absent = {name, *self.stack.workers("decode")} - {*decode}
        return await self._outcome(
            f"kill -9 {name}, its KV unread", [*half, *rest], absent=absent
        )

    # --- parts ---------------------------------------------------------------------

    async def _ask_all(
        self, when_begun: Callable[[], None] | None = None
    ) -> list[Answer]:
        answers = [Answer(number) for number in range(NUM_STREAMS)]
        await self._ask(answers, when_begun)
        return answers

    async def _ask(
        self, answers: Sequence[Answer], when_begun: Callable[[], None] | None = None
    ) -> None:
        """Ask for all; call *when_begun* once each has brought something."""
        acted = False

        def look() -> None:
            nonlocal acted
            if not acted and all(one.times or one.error for one in answers):
                acted = True
                if when_begun is not None:
                    when_begun()

        await asyncio.gather(*(self.client.ask(one, on_output=look) for one in answers))

    async def _outcome(
        self, name: str, answers: Sequence[Answer], *, absent: Collection[str] = ()
    ) -> Outcome:
        outcome = Outcome(name, remark="; ".join(self.stack.remarks))
        self.stack.remarks.clear()
        self._judge(outcome, answers)
        names = [*self.stack.workers("prefill"), *self.stack.workers("decode")]
        outcome.took_s, outcome.kv_held = await self._empty(
            [one for one in names if one not in absent]
        )
        return outcome

    def _judge(self, outcome: Outcome, answers: Sequence[Answer]) -> None:
        outcome.judge(answers, self.calm, repeatable=self.stack.repeatable)

    async def _empty(self, names: Sequence[str]) -> tuple[float, float]:
        """Return when the workers were empty, and what they held at KV_FREE_S."""

        def busy(what: tuple[str, ...]) -> float:
            counts: list[Mapping[str, Any]] = [self.stack.counts(one) for one in names]
            return max(float(one[kind]) for one in counts for kind in what)

        everything = ("running", "waiting", "kv")
        if not self.stack.shows_counts:
            return float("nan"), 0.0
        began, clock = self._clock(), self._clock
        try:
            took_s = await until(
                lambda: not busy(everything), "empty", KV_FREE_S, clock
            )
        except TimeoutError:
            held = await asyncio.to_thread(busy, ("kv",))
        else:
            return took_s, 0.0
        try:
            await until(lambda: not busy(everything), "empty", SETTLE_S, clock)
        except TimeoutError:
            return float("inf"), held
        return clock() - began, held


async def _leave(calls: Sequence[asyncio.Task[Answer]]) -> None:
    """Close the connections of requests that are under way."""
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
