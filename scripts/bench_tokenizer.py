"""Measure the way from messages to ids, and try quicker tokenizer libraries on hard texts.

    python scripts/bench_tokenizer.py --model FOLDER [--texts 2000] [--write]

Libraries are tried if they are installed. Each text is new to a library, but its words
are not: that is what a server sees. CPU time of the process, least disturbed: medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from hard_texts import hard_texts
from table import write
from tokenizer_libraries import LIBRARIES, Encode, release
from tokenizer_variants import variants

from tokenwire.frontend.model import load_model
from tokenwire.frontend.policy import Policy
from tokenwire.frontend.prompts import chat_prompt
from tokenwire.frontend.schema import ChatRequest
from tokenwire.frontend.tokenizer import TextModel

DOCS = Path(__file__).parent.parent / "docs"
SIZES = {"200": 800, "20,000": 76_000, "100,000": 380_000}
"""Characters of so many tokens of these documents, about."""

REPEATS = 5
TICK_S = 0.0005
NUM_ADDED = 20
"""Added tokens that hard texts have; some models have hundreds that are alike."""


def reading(number: int, size: int) -> str:
    """Return text of the documents, another for each *number*."""
    whole = "\n".join(page.read_text() for page in sorted(DOCS.glob("*.md")))
    start = number * 997 % len(whole)
    return f"{number}: " + (whole[start:] + whole * (1 + size // len(whole)))[:size]


def in_turns(arms: dict[str, Callable[[int], object]], calls: int) -> dict[str, float]:
    """Return the CPU time of a call of each arm in us, the median of all turns."""
    taken: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(REPEATS):
        for name, arm in arms.items():
            began = time.process_time()
            for call in range(calls):
                arm(turn * calls + call)
            taken[name].append((time.process_time() - began) / calls * 1e6)
    return {name: statistics.median(some) for name, some in taken.items()}


def longest_wait_ms(encode: Encode, text: str) -> float:
    """Return how long a second thread stands still while *text* is encoded."""
    done = threading.Event()

    def work() -> None:
        encode(text)
        done.set()

    worker = threading.Thread(target=work)
    worst, last = 0.0, time.perf_counter()
    worker.start()
    while not done.is_set():
        time.sleep(TICK_S)
        now = time.perf_counter()
        worst, last = max(worst, now - last - TICK_S), now
    worker.join()
    return worst * 1e3


def _of(encode: Encode, texts: list[str], many: int = 1) -> Callable[[int], object]:
    """Return what encodes the next *many* of *texts*, one by one."""

    def arm(number: int) -> object:
        return [encode(one) for one in texts[number * many : (number + 1) * many]]

    return arm


def path_rows(model: TextModel) -> list[str]:
    """Return the frontend's own way: template, cache, threads."""
    rows: list[str] = []
    loop = asyncio.new_event_loop()
    for name, size in list(SIZES.items())[:2]:
        texts = [reading(n, size) for n in range(REPEATS * 20)]

        def chat(n: int, texts: list[str] = texts) -> ChatRequest:
            return ChatRequest(
                model="m",
                messages=[
                    {"role": "system", "content": "Be brief."},
                    {"role": "user", "content": texts[n]},
                ],
            )

        def turn(n: int, texts: list[str] = texts, *, shared: bool) -> object:
            messages = [*chat(0, texts).messages]
            messages += [
                {"role": "assistant", "content": "Yes."},
                {"role": "user", "content": f"Go on with {n}."},
            ]
            request = ChatRequest(model="m", messages=messages)
            return loop.run_until_complete(
                chat_prompt(request, model, Policy(), shared=shared)
            )

        def prompt(n: int, chat: Callable[[int], ChatRequest] = chat) -> object:
            return loop.run_until_complete(
                chat_prompt(chat(n), model, Policy(), shared=False)
            )

        def render(n: int, chat: Callable[[int], ChatRequest] = chat) -> object:
            return model.render_chat(
                chat(n).messages,
                add_generation_prompt=True,
                continue_final_message=False,
                template_kwargs={},
            )

        found = in_turns(
            {
                "template alone": render,
                "template and ids": prompt,
                "next turn, nothing kept": partial(turn, shared=False),
                "next turn, its parts kept": partial(turn, shared=True),
            },
            20 if size < 10_000 else 4,
        )
        rows += [f"| {name} | {arm} | {us:,.0f} |" for arm, us in found.items()]
    hop = in_turns(
        {
            "here": lambda _: loop.run_until_complete(model.threads.run(False, int)),
            "in a thread": lambda _: loop.run_until_complete(
                model.threads.run(True, int)
            ),
        },
        200,
    )
    rows.append(
        f"| | to a thread and back, for any text above 4,096 characters | "
        f"{hop['in a thread'] - hop['here']:,.0f} |"
    )
    loop.close()
    return rows


def library_rows(source: str) -> list[str]:
    """Return what each library takes, and how long it holds the GIL."""
    loaded: dict[str, Encode] = {}
    for name, load in LIBRARIES.items():
        if find_spec(name.split("-", maxsplit=1)[0]) is None:
            continue
        try:
            loaded[name] = load(source)
        except Exception as error:  # noqa: BLE001 - each has its own
            sys.stderr.write(f"{name}: {error}\n")
    columns: list[dict[str, float]] = []
    for size in SIZES.values():
        texts = [reading(n, size) for n in range(REPEATS * 20)]
        arms = {name: _of(encode, texts) for name, encode in loaded.items()}
        columns.append(in_turns(arms, 20 if size < 10_000 else 1))
    short = [reading(n, 120) for n in range(REPEATS * 32)]
    batch = {name: _of(encode, short, 32) for name, encode in loaded.items()}
    columns.append(in_turns(batch, 1))
    text = reading(1, SIZES["100,000"])
    rows: list[str] = []
    for name, encode in loaded.items():
        waits = statistics.median(longest_wait_ms(encode, text) for _ in range(REPEATS))
        cells = " | ".join(f"{column[name]:,.0f}" for column in columns)
        rows.append(f"| {release(name)} | {cells} | {waits:.1f} |")
    return rows


def differences(source: str, load: Callable[[str], Encode], number: int) -> str:
    """Return on how many of *number* hard texts a library is not as tokenizers are."""
    try:
        encode = load(source)
    except Exception as error:  # noqa: BLE001 - each has its own
        return f"does not load: {cell(str(error).splitlines()[0], 40)}"
    exact = LIBRARIES["tokenizers"](source)
    added = [one["content"] for one in json.loads(source)["added_tokens"]]
    shortest: str | None = None
    wrong = refused = 0
    for text in hard_texts(1, number, added[-NUM_ADDED:]):
        try:
            ids = encode(text)
        except Exception:  # noqa: BLE001 - each has its own
            refused += 1
            continue
        if ids != exact(text):
            wrong += 1
            shortest = min(shortest or text, text, key=len)
    said = f"{wrong} wrong, {refused} refused"
    return said if shortest is None else f"{said}: `{cell(ascii(shortest), 32)}`"


def cell(text: str, size: int) -> str:
    """Return at most *size* characters of *text* for a cell of a table."""
    return text[:size].replace("|", "\\|")


def main() -> None:
    """Measure, and print or write the tables."""
    parser = argparse.ArgumentParser(description="Measure messages to ids.")
    parser.add_argument("--model", required=True, help="a folder with a tokenizer.json")
    parser.add_argument("--texts", type=int, default=2_000, help="hard texts a variant")
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks.md")
    given = parser.parse_args()
    source = (Path(given.model) / "tokenizer.json").read_text()
    lines = [
        "Written by `make bench-tokenizer`: CPU time, us, medians of 5, in turns.",
        "",
        "| Tokens | The frontend's way | us |",
        "|---|---|---|",
        *path_rows(load_model(given.model)),
        "",
        "| Library | 200 | 20,000 | 100,000 | 32 of 30 | Another thread waits, ms |",
        "|---|---|---|---|---|---|",
        *library_rows(source),
    ]
    others = [name for name in LIBRARIES if find_spec(name.split("-")[0])][1:]
    if others:
        lines += [
            "",
            f"| {given.texts:,} hard texts | {' | '.join(others)} |",
            f"|---{'|---' * len(others)}|",
        ]
    for kind, made in variants(source).items() if others else ():
        cells = [differences(made, LIBRARIES[name], given.texts) for name in others]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    text = "\n".join(lines)
    sys.stdout.write(text + "\n")
    if given.write:
        write(DOCS / "benchmarks.md", "tokenizer", text)


if __name__ == "__main__":
    main()
