"""Requests of the shapes that people record, made by seed: chats, system prompts, agents.

Lengths are log-normal, with medians as in public traces of chats (a few hundred tokens a
turn) and of agents (thousands, most of them shared). Ids are random, so two prompts share
what the workload has them share, and nothing else. What an answer is does not depend on
who gives it: a workload is the same for all policies.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from math import log
from random import Random

__all__ = ["WORKLOADS", "Turn", "Workload", "chat"]

VOCABULARY = 32_000


@dataclass(slots=True, eq=False)
class Turn:
    """One request: what it adds to the one before it, and what comes behind its end."""

    packed: bytes  # of the whole prompt, (num_tokens,)
    num_output: int
    answer: bytes  # (num_output,) packed: its next turn's prompt goes on behind it
    session: int
    after_s: float = 0.0  # behind the end of the turn before, or the beginning of all
    children: list[Turn] = field(default_factory=list["Turn"])


@dataclass(slots=True)
class Workload:
    """Requests whose predecessors have none, by the time they arrive at."""

    name: str
    text: str
    roots: list[Turn]

    def turns(self) -> list[Turn]:
        """Return every request."""
        found: list[Turn] = []
        todo = list(self.roots)
        while todo:
            turn = todo.pop()
            found.append(turn)
            todo += turn.children
        return found


class _Maker:
    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)

    def ids(self, number: int) -> bytes:
        """Return random ids, packed."""
        return array("I", self.rng.choices(range(VOCABULARY), k=number)).tobytes()

    def length(self, median: int, sigma: float, most: int) -> int:
        """Return a log-normal length."""
        return max(1, min(most, round(self.rng.lognormvariate(log(median), sigma))))

    def turn(
        self, prompt: bytes, num_output: int, session: int, after_s: float
    ) -> Turn:
        """Return a request."""
        return Turn(prompt, num_output, self.ids(num_output), session, after_s)

    def arrivals(self, number: int, rate: float) -> list[float]:
        """Return the times of a Poisson process."""
        now, times = 0.0, list[float]()
        for _ in range(number):
            now += self.rng.expovariate(rate)
            times.append(now)
        return times


def chat(
    seed: int,
    size: float = 1.0,
    *,
    rate: float = 3.2,
    num_turns: float = 6,
    num_output: int = 180,
    pause_s: float = 10.0,
) -> Workload:
    """Multi-turn chats: every turn has the whole conversation before it.

    Args:
        seed: Of the random numbers.
        size: 1: as many chats as are told.
        rate: Chats that begin in a second.
        num_turns: Of a chat, in the mean.
        num_output: Tokens of an answer, the median.
        pause_s: From an answer to the next question, in the mean.
    """
    make = _Maker(seed)
    systems = [make.ids(make.length(250, 0.5, 1_000)) for _ in range(4)]
    roots: list[Turn] = []
    for number, at in enumerate(make.arrivals(round(600 * size), rate)):
        prompt = make.rng.choice(systems) + make.ids(make.length(60, 1.0, 2_000))
        more = min(19, int(make.rng.expovariate(1 / (num_turns - 1))))
        turn = make.turn(prompt, make.length(num_output, 0.8, 800), number, at)
        roots.append(turn)
        for _ in range(more):
            prompt = turn.packed + turn.answer + make.ids(make.length(60, 1.0, 2_000))
            pause = make.rng.expovariate(1 / pause_s)
            num = make.length(num_output, 0.8, 800)
            following = make.turn(prompt, num, number, pause)
            turn.children.append(following)
            turn = following
    text = "600 chats, 6 turns in the mean, 10 s between them, 4 system prompts"
    return Workload("chat", text, roots)


def system(seed: int, size: float = 1.0) -> Workload:
    """Single requests behind long system prompts, a few of which are much in use."""
    make = _Maker(seed)
    systems = [make.ids(make.length(1_500, 0.6, 6_000)) for _ in range(48)]
    shares = [1 / (rank + 1) for rank in range(len(systems))]
    roots: list[Turn] = []
    for number, at in enumerate(make.arrivals(round(2_500 * size), 22.0)):
        [prompt] = make.rng.choices(systems, shares)
        prompt += make.ids(make.length(120, 0.9, 2_000))
        roots.append(make.turn(prompt, make.length(120, 0.7, 500), number, at))
    text = "2,500 requests, 48 system prompts of 1,500 tokens (median), by Zipf's law"
    return Workload("system", text, roots)


def agents(seed: int, size: float = 1.0) -> Workload:
    """Agents: a long common prefix, tool results behind it, branches that run at once."""
    make = _Maker(seed)
    tools = [make.ids(make.length(3_500, 0.3, 8_000)) for _ in range(3)]
    roots: list[Turn] = []
    for number, at in enumerate(make.arrivals(round(130 * size), 0.9)):
        prompt = make.rng.choice(tools) + make.ids(make.length(300, 0.6, 2_000))
        root = make.turn(prompt, make.length(70, 0.6, 300), number, at)
        roots.append(root)
        tips, num_left = [root], 4 + int(make.rng.expovariate(1 / 12))
        while num_left > 0 and tips:
            turn = tips.pop(0)
            # One in six steps tries several things at once; some branches end.
            width = make.rng.choice((2, 3, 4)) if make.rng.random() < 1 / 6 else 1
            for _ in range(min(width, num_left)):
                more = make.ids(make.length(400, 0.9, 4_000))
                pause = make.rng.expovariate(1 / 1.5)
                child = make.turn(
                    turn.packed + turn.answer + more,
                    make.length(70, 0.6, 300),
                    number,
                    pause,
                )
                turn.children.append(child)
                tips.append(child)
                num_left -= 1
    text = "130 agents, 16 steps in the mean, branching, 3 tool prompts of 3,500 tokens"
    return Workload("agents", text, roots)


WORKLOADS: dict[str, Callable[[int, float], Workload]] = {
    "chat": chat,
    "system": system,
    "agents": agents,
}
