"""A soak in which workers are killed, stopped and restarted all the time.

`make soak-faults MINUTES=10` (SEED=1). Under ``tokenwire-up``: two prefill and three
decode workers with the simulated engine, at 80 % of the capacity that is measured first.
A worker that is away takes a third of that capacity with it: what is refused meanwhile,
with ``Retry-After``, is asked again and counted. It fails if a request is lost, a token is
wrong, anything is held in the end, or memory grows:

- a process that lives through the run: after the first third, the largest size in the
  last quarter of the rest is at most 3 % above that in its first quarter;
- a worker that was started again: from its first minute on, the largest size in its last
  quarter is at most 5 % above that in its first quarter.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from bench_processes import rss_mib
from faults_client import Answer, ask, body_of, compare
from faults_parts import Ask
from faults_processes import left_behind

from support.tiny_model import write_tiny_model
from support.up import Up, alive, children, until, up

WORKERS = {"prefill": 2, "decode": 3}
VICTIMS = ("decode-0", "decode-1", "decode-2", "prefill-0", "prefill-1")
ENGINE = (
    *("--step-ms", "20", "--max-num-seqs", "12", "--kv-lease-s", "10"),
    *("--num-blocks", "1024"),
)
"""Few blocks, so that what a frontend remembers of prefixes soon reaches its bound."""

LOAD = 0.8
CAPACITY_S = 15.0
CAPACITY_CLIENTS = 72  # twice the sequences that the decode workers run at once
BURST = 300
"""At once, before anything is measured: while a worker is away requests pile up, and each
connection that was ever open at the same time has made the frontend a little larger."""

NUM_KINDS = 60  # different requests; each is also asked of a calm stack
REQUEST_S = 60.0
PAUSE_S = (4.0, 14.0)  # between the end of one fault and the next
STOP_S = (0.5, 8.0)
RETRY_S = 1.0
LOOK_S = 5.0
READY_S = 60.0
IDLE_S = 15.0
WARM_AGE_S = 60.0
GROWTH, GROWTH_BY_AGE = 0.03, 0.05


@dataclass
class Tally:
    """What the run came to."""

    num_done: int = 0
    num_refused: int = 0
    faults: Counter[str] = field(default_factory=Counter[str])
    failures: list[str] = field(default_factory=list[str])
    sizes: dict[int, list[tuple[float, float]]] = field(
        default_factory=dict[int, list[tuple[float, float]]]
    )  # by process: age, MiB
    names: dict[int, str] = field(default_factory=dict[int, str])
    worst_pause_s: float = 0.0


def kinds(rng: random.Random) -> list[tuple[Ask, dict[str, Any]]]:
    """Return the requests, each with its body."""
    made: list[tuple[Ask, dict[str, Any]]] = []
    for number in range(NUM_KINDS):
        one = Ask(
            chat=rng.random() < 0.5,
            stream=rng.random() < 0.8,
            num_prompt=rng.choice((10, 60, 200)),
            max_tokens=rng.randint(20, 120),
            sampling=rng.choice(("greedy", "seeded")),
            seed=number,
            logprobs=rng.random() < 0.2,
        )
        prompt = [rng.randint(5, 250) for _ in range(one.num_prompt)]
        made.append((one, body_of(one, prompt, "calm")))
    return made


class Soak:
    """The clients of one run."""

    def __init__(self, running: Up, session: aiohttp.ClientSession, seed: int) -> None:
        self.running = running
        self.tally = Tally()
        self._session = session
        self._rng = random.Random(seed)
        self._kinds = kinds(random.Random(seed))
        self._calm: list[Answer] = []
        self._num_asked = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def prepare(self) -> None:
        """Ask each kind of request once, undisturbed."""
        for one, body in self._kinds:
            answer = await ask(self._session, self.running.url, one, body)
            if not answer.done:
                sys.exit(f"soak: no calm answer: {answer.status} {answer.error}")
            self._calm.append(answer)

    async def one(self) -> None:
        """Send a request and judge its answer."""
        kind = self._rng.randrange(NUM_KINDS)
        self._num_asked += 1
        one, body = self._kinds[kind]
        salt = f"{self._num_asked}" if self._num_asked % 2 else "shared"
        tally = self.tally
        try:
            async with asyncio.timeout(REQUEST_S):
                url, sent = self.running.url, {**body, "cache_salt": salt}
                while _is_refusal(answer := await ask(self._session, url, one, sent)):
                    tally.num_refused += 1
                    await asyncio.sleep(RETRY_S)
        except TimeoutError:
            tally.failures.append(f"request {self._num_asked}: no end")
            return
        tally.num_done += 1
        if not answer.done:
            tally.failures.append(
                f"request {self._num_asked}: {answer.status} {answer.error}"
            )
        elif found := compare(answer, self._calm[kind]):
            tally.failures.append(f"request {self._num_asked}: {found}")
        elif one.stream:
            tally.worst_pause_s = max(tally.worst_pause_s, answer.longest_pause_s)

    async def capacity(self) -> float:
        """Return the requests per second of as many clients as fill it."""
        until_s = time.monotonic() + CAPACITY_S
        before = self.tally.num_done

        async def client() -> None:
            while time.monotonic() < until_s:
                await self.one()

        began = time.monotonic()
        await asyncio.gather(*(client() for _ in range(CAPACITY_CLIENTS)))
        return (self.tally.num_done - before) / (time.monotonic() - began)

    async def load(self, per_s: float, until_s: float) -> None:
        """Send requests at this rate, whatever becomes of them."""
        due = time.monotonic()
        while due < until_s:
            due += self._rng.expovariate(per_s)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            task = asyncio.create_task(self.one())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        await asyncio.gather(*self._tasks)

    async def hurt(self, until_s: float, rng: random.Random) -> None:
        """Kill, stop or restart a worker, wait until all serve, and again."""
        while True:
            await asyncio.sleep(rng.uniform(*PAUSE_S))
            if time.monotonic() > until_s - READY_S / 2:
                return
            name, what = rng.choice(VICTIMS), rng.choice(("kill", "stop", "restart"))
            seconds = rng.uniform(*STOP_S)
            self.tally.faults[what] += 1
            if what == "stop":
                pid = self.running.kill(name, signal.SIGSTOP)
                await asyncio.sleep(seconds)
                os.kill(pid, signal.SIGCONT)
            else:
                number = signal.SIGKILL if what == "kill" else signal.SIGTERM
                pid = self.running.kill(name, number)
                await until(lambda pid=pid: not alive(pid), READY_S, f"{name} is gone")
            await until(lambda: self.running.ready(**WORKERS), READY_S, "all are back")

    async def look(self, until_s: float) -> None:
        """Note the size of every process."""
        born: dict[int, float] = {}
        while (now := time.monotonic()) < until_s:
            for pid in (self.running.process.pid, *children(self.running.process.pid)):
                try:
                    size, name = rss_mib(pid), _name(pid)
                except OSError:
                    continue
                age = now - born.setdefault(pid, now)
                self.tally.names[pid] = name
                self.tally.sizes.setdefault(pid, []).append((age, size))
            await asyncio.sleep(LOOK_S)


def _is_refusal(answer: Answer) -> bool:
    return answer.status in {429, 503} and answer.retry_after


def _name(pid: int) -> str:
    command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    words = [word.decode(errors="replace") for word in command]
    if any(word.endswith("guard.py") for word in words):
        return "guard"
    if "--worker-id" in words:
        return words[words.index("--worker-id") + 1]
    named = [word for word in words if word.startswith("tokenwire.")]
    return named[0] if named else words[0]


def growth(tally: Tally, seconds: float) -> list[str]:
    """Print each process's size, and return those that have grown."""
    grown: list[str] = []
    for pid, samples in sorted(
        tally.sizes.items(), key=lambda item: tally.names[item[0]]
    ):
        lived_s = samples[-1][0]
        whole = lived_s > seconds - 4 * LOOK_S
        warm_s = seconds / 3 if whole else WARM_AGE_S
        warm = [size for age, size in samples if age >= warm_s]
        if len(warm) < 4:
            continue
        quarter = max(1, len(warm) // 4)
        before, after = max(warm[:quarter]), max(warm[-quarter:])
        bound = GROWTH if whole else GROWTH_BY_AGE
        line = (
            f"{tally.names[pid]}, {lived_s:.0f} s{' (whole run)' if whole else ''}: "
            f"{before:.1f} MiB, then {after:.1f} MiB"
        )
        print(line)
        if whole and "frontend" in line:
            print("  every minute:", [round(size, 1) for _, size in samples[::12]])
        if after > before * (1 + bound):
            grown.append(line)
    return grown


async def soak(minutes: float, seed: int, folder: Path) -> list[str]:
    """Run it, and return what was wrong."""
    model = write_tiny_model(folder / "tiny")
    async with (
        up(
            model,
            folder,
            engine="sim",
            workers=WORKERS,
            timeout_s=READY_S,
            engine_arguments=ENGINE,
        ) as running,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
    ):
        one = Soak(running, session, seed)
        await one.prepare()
        capacity = await one.capacity()
        await asyncio.gather(*(one.one() for _ in range(BURST)))
        print(
            f"capacity {capacity:.1f} requests/s; load {LOAD * capacity:.1f}",
            flush=True,
        )
        began = time.monotonic()
        until_s = began + minutes * 60
        before = one.tally.num_done
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(one.load(LOAD * capacity, until_s))
            tasks.create_task(one.hurt(until_s, random.Random(f"{seed}/faults")))
            tasks.create_task(one.look(until_s))
        tally = one.tally
        left = await left_behind(running, IDLE_S)
        faults = ", ".join(
            f"{count} {what}" for what, count in sorted(tally.faults.items())
        )
        print(
            f"{tally.num_done - before} requests under faults ({faults}); "
            f"{tally.num_refused} refusals; "
            f"{len(tally.failures)} lost or wrong; longest pause {tally.worst_pause_s:.1f} s"
        )
        grown = growth(tally, time.monotonic() - began)
    wrong = [*tally.failures, *(f"grown: {line}" for line in grown)]
    return [*wrong, f"left behind: {left}"] if left else wrong


def main() -> int:
    """Return 0 if nothing was lost, wrong, held or growing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wrong = asyncio.run(soak(given.minutes, given.seed, Path(folder)))
    for line in wrong[:50]:
        print(f"FAILED {line}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
