"""Measure the Python from a worker's message to the finished chunk, without sockets.

    python scripts/bench_path.py --baseline CHECKOUT [--repeats 5]

What a streamed token costs the frontend in sockets and in the kernel varies by more than
a release changes. This runs decoding, order, detokenizing and the chunk alone, of this
release and of another, in turns, each time in a process of its own: the least time
that one takes hardly varies.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench_processes import importable

STREAMS = 48
STEPS = 150
WARM_STEPS = 10
ROUNDS = 12
IDS = {"nvext": {"extra_fields": ["completion_token_ids"]}}
ARMS = {"default": {}, "with token ids": IDS}
"""Fields of the requests."""


class Nobody:
    """A worker and a pool in one: takes requests, and is whatever it is asked for."""

    worker_id = "w"
    weight_version = "default"
    exactness = "same_rng"
    captures = keeps = False
    flows = None
    card = None
    incarnation = "x"
    model = "m"
    wait_s = 1.0
    max_model_len = 8_192
    weights = SimpleNamespace(adapters={})

    def __init__(self, opened: Any, route: Any, prefixes: Any) -> None:
        self.opened, self.prefixes, self.router = opened, prefixes, self
        self._route = route
        self.last = ""

    def route(self, *_: object, **__: object) -> Any:
        """Return the way to itself."""
        return self._route(self)

    def submit(self, message: Any, reply: Any, *_: object) -> None:
        """Open a request."""
        self.opened.add(message, reply)
        self.last = message.request_id

    def began(self, _: str) -> None:
        """Take note of nothing."""

    def redirect(self, request_id: str, reply: Any) -> None:
        """Have another hear what comes."""
        self.opened.redirect(request_id, reply)

    def promised(self, *_: object) -> None:
        """Take note of nothing."""

    def update_of(self, _: str) -> None:
        """Return that nothing was updated."""

    def can(self, _: str) -> bool:
        """Return that it has no capability."""
        return False

    def offers(self, _: str) -> bool:
        """Return that it is exact."""
        return True


def named(module: str, name: str) -> Any:
    """Return what a module of the measured release has."""
    return getattr(import_module(f"tokenwire.{module}"), name)


async def measure(model_folder: str, fields: dict[str, Any]) -> float:
    """Return the least us a token of some rounds."""
    parse, request = (
        named("frontend.schema", n) for n in ("parse_body", "ChatRequest")
    )
    model = named("frontend.model", "load_model")(model_folder)
    metrics = named("frontend.metrics", "Metrics")()
    try:
        route = named("frontend.router", "Route")
    except ImportError:  # before it had a module of its own
        route = named("frontend.pool", "Route")
    opened_kind = named("frontend.opened", "OpenRequests")
    prefixes = named("frontend.prefixes", "Prefixes")()
    pool = Nobody(opened_kind(), route, prefixes)
    policy = named("frontend.policy", "Policy")()
    codec = import_module("tokenwire.protocol.codec")
    batch, tokens = (named("protocol.messages", n) for n in ("Batch", "Tokens"))
    pack = named("protocol.tokens", "pack_ids")
    chat_call = named("frontend.calls", "chat_call")
    choice_kind = named("frontend.choice", "Choice")
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": STEPS + 1,
            "stream": True,
            **fields,
        }
    ).encode()
    least = float("inf")
    num_bytes = [0]

    class Events:
        """A stream that counts what it is to send."""

        def send(self, data: bytes) -> None:
            """Count an event."""
            num_bytes[0] += len(data)

    events = Events()
    for _ in range(ROUNDS):
        names: list[str] = []
        num_bytes[0] = 0
        for _ in range(STREAMS):
            call = await chat_call(parse(body, request), model, pool, policy)
            [(job, fold)] = call.jobs
            choice = choice_kind(
                0,
                job,
                fold,
                pool=pool,
                metrics=metrics,
                clock=time.monotonic,
                deliver=ignore,
                on_end=ignore,
                broke=fail,
            )

            def plain(one: Any, text: str, ids: list[int], of: Any = call) -> None:
                num_bytes[0] += len(of.shape.plain_chunk(one.index, text, ids))

            choice.generation.start()
            names.append(pool.last)
            choice.deliver_plain = plain
            choice.release()
            if hasattr(choice, "straighten"):  # of older releases the way before it
                choice.straighten(call.shape.around(0), events)
        steps = [
            codec.encode(
                batch(
                    [
                        tokens(name, at, pack([1_000 + (at * 7_919 + n) % 40_000]))
                        for n, name in enumerate(names)
                    ],
                    [],
                    seq=at + 1,
                )
            )
            for at in range(STEPS)
        ]
        for step in steps[:WARM_STEPS]:
            pool.opened.take(codec.decode_from_worker(step))
        gc.collect()
        gc.disable()
        began = time.process_time_ns()
        for step in steps[WARM_STEPS:]:
            pool.opened.take(codec.decode_from_worker(step))
        spent_us = (time.process_time_ns() - began) / 1_000
        gc.enable()
        if num_bytes[0] < 100 * STREAMS * STEPS:
            sys.exit("bench: no chunks were made")
        least = min(least, spent_us / STREAMS / (STEPS - WARM_STEPS))
        pool.opened = opened_kind()
    return least


def ignore(*_: object) -> None:
    """Take what is not measured."""


def fail(error: Exception) -> None:
    """End the measurement: it measures nothing."""
    raise SystemExit(str(error)) from error


def main() -> None:
    """Measure both, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=os.environ.get("TOKENWIRE_DEMO_MODEL"))
    parser.add_argument("--baseline", type=Path, metavar="CHECKOUT")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not given.model:
        parser.error("--model is required")
    if given.arm is not None:  # the process of a measurement
        print(asyncio.run(measure(given.model, ARMS[given.arm])))
        return
    if given.baseline is None:
        parser.error("--baseline is required")
    values: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="tokenwire-path-") as folder:
        sources: dict[str, Path] = {}
        for name, checkout in (
            ("now", Path(__file__).parents[1]),
            ("baseline", given.baseline),
        ):
            place = Path(folder) / name
            place.mkdir()
            sources[name] = importable(checkout, place)
        for _, arm, name in itertools.product(range(given.repeats), ARMS, sources):
            command = [sys.executable, __file__, "--model", given.model, "--arm", arm]
            environment = os.environ | {"PYTHONPATH": str(sources[name])}
            out = subprocess.check_output(command, env=environment, text=True)
            values.setdefault((arm, name), []).append(float(out))
    print("| Python per token, us | Now | Baseline | Ratio |\n|---|---|---|---|")
    for arm in ARMS:
        now, before = (statistics.median(values[arm, name]) for name in sources)
        print(f"| {arm} | {now:.3f} | {before:.3f} | {now / before:.3f} |")


if __name__ == "__main__":
    main()
