"""Ask two releases' frontends the same, and compare their answers byte by byte.

    python scripts/same_bytes.py CHECKOUT [--model FOLDER]

What asks for nothing new must get the same as before. Each frontend stands in front of
a simulated worker of its own; all parameters of the text routes, streamed and not. Ids
and times of responses are put aside. Where steps fall into one chunk depends on the
machine: an answer that differs is asked for again, a few times.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench_processes import MODEL_NAME, stack

STEP_MS = "4"  # far above what a frontend needs to pass a step on
TRIES = 6
MAX_SHOWN = 8

CHAT = {"messages": [{"role": "user", "content": "hello there"}]}
TEXT = {"prompt": "hello there"}
USAGE: list[dict[str, Any]] = [
    {"include_usage": True},
    {"include_usage": True, "continuous_usage_stats": True},
]
FIELDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"temperature": -1},
    {"seed": 7},
    {"seed": 1, "frequency_penalty": 0.5},
    {"n": 3},
    {"return_token_ids": True},
    {"return_tokens_as_token_ids": True},
    {"nvext": {}},
    {"nvext": {"extra_fields": ["completion_token_ids", "stop_reason"]}},
    {"nvext": {"extra_fields": ["engine_data"]}},
    {"stop": ["a", "e"]},
    {"stop_token_ids": [77], "include_stop_str_in_output": True},
    {"logit_bias": {"5": 1}},
    {"min_tokens": 5},
    {"max_tokens": 0},
    {"cache_salt": "s"},
    {"session_id": "a"},
    {"user": "x"},
    {"no_such_field": 1},
]
OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": [[5, 6, 7], [8, 9]], "max_tokens": 9}),
    ("/v1/completions", {**TEXT, "echo": True}),
    ("/v1/chat/completions", {**CHAT, "response_format": {"type": "json_object"}}),
    ("/v1/chat/completions", {"messages": []}),
    (
        "/inference/v1/generate",
        {"token_ids": [5, 6], "sampling_params": {"seed": 1, "max_tokens": 40}},
    ),
    ("/tokenize", {"prompt": "hi"}),
    ("/detokenize", {"tokens": [5, 6]}),
]
OWN = [
    (rb"(chatcmpl|cmpl)-[0-9a-f]{8,}", b"ID"),
    (rb'"created": ?\d+', b'"created":0'),
    (rb'"request_id": ?"[^"]*"', b'"request_id":""'),
]
"""What no two answers have in common."""

OWN_HEADERS = {"date", "x-request-id", "content-length"}


def requests() -> Iterator[tuple[str, dict[str, Any]]]:
    """Return routes and bodies."""
    yield from OTHERS
    plain: list[dict[str, Any]] = [{}]
    streams = [
        {"stream": True},
        *({"stream": True, "stream_options": u} for u in USAGE),
    ]
    for how, fields in itertools.product([*plain, *streams], FIELDS):
        common = {"max_tokens": 8, **how, **fields}
        for more in ({}, {"logprobs": True, "top_logprobs": 2}):
            yield "/v1/chat/completions", {**CHAT, **common, **more}
        for more in ({}, {"logprobs": 2}):
            yield "/v1/completions", {**TEXT, **common, **more}


def answer(port: int, path: str, body: dict[str, Any]) -> tuple[int, Any, bytes]:
    """Return a status, headers and a body, without what is the answer's own."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        json.dumps({"model": MODEL_NAME, **body}).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            status, headers, data = reply.status, reply.headers, reply.read()
    except urllib.error.HTTPError as error:
        status, headers, data = error.code, error.headers, error.read()
    for pattern, shown in OWN:
        data = re.sub(pattern, shown, data)
    told = {k: v for k, v in headers.items() if k.lower() not in OWN_HEADERS}
    return status, told, data


def compared(
    ports: tuple[int, int], path: str, body: dict[str, Any]
) -> tuple[int, int, str]:
    """Return how many bytes an answer has, how often it was asked for, what differs."""
    ours = theirs = (0, None, b"")
    for attempt in range(TRIES):
        ours, theirs = (answer(port, path, body) for port in ports)
        if ours == theirs:
            return len(ours[2]), attempt + 1, ""
    text = f"{path} {body}\n  now    {ours}\n  before {theirs}"
    return len(ours[2]), TRIES, text


def main() -> None:
    """Compare; exit with 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path, help="of the other release")
    parser.add_argument("--model", default=os.environ.get("TOKENWIRE_DEMO_MODEL"))
    given = parser.parse_args()
    if not given.model:
        parser.error("--model is required")
    cores = sorted(os.sched_getaffinity(0))
    with (
        tempfile.TemporaryDirectory(prefix="tokenwire-same-") as folder,
        stack(given.model, STEP_MS, cores, Path(folder)) as now,
        stack(given.model, STEP_MS, cores, Path(folder), given.checkout) as then,
    ):
        found = [compared((now.port, then.port), *one) for one in requests()]
    differing = [text for _, _, text in found if text]
    print("\n".join(differing[:MAX_SHOWN]))
    print(
        f"same: {len(found)} requests, {sum(size for size, _, _ in found)} bytes, "
        f"{len(differing)} differ, {sum(n > 1 for _, n, _ in found)} asked again"
    )
    sys.exit(bool(differing))


if __name__ == "__main__":
    main()
