"""What is wrong with an answer, and what a frontend must have let go of in the end."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from typing import Any, cast

from api_document import ApiDocument
from fuzz_http import DEADLINE_S, Answer, Case, send

__all__ = ["answer_faults", "fetch", "leaks", "plain_tokens", "reproduction"]

HONEST = {429, 503}
"""Server errors that say the truth: too much at once, or nobody to serve."""

SETTLE_S = 10.0
"""What ran must have ended by then: aborts take milliseconds, heartbeats one second."""


def answer_faults(document: ApiDocument, case: Case, answer: Answer) -> list[str]:
    """Return what is wrong with the answer to a case; best nothing."""
    if answer.seconds > DEADLINE_S:
        return [f"it took {answer.seconds:.1f} s"]
    if not answer.status:
        return [f"no answer: {answer.failure}"] if case.is_whole else []
    if answer.failure:
        return [f"the answer broke off: {answer.failure}"]
    if answer.status >= 500 and answer.status not in HONEST:
        return [f"status {answer.status}: {answer.text:.300}"]
    if case.method == "HEAD":
        return []
    kind = answer.headers.get("content-type", "")
    faults = document.answer_faults(
        case.method, case.path, answer.status, kind, answer.text
    )
    if not faults and answer.status == 200 and kind.startswith("application/json"):
        faults = _count_faults(answer.text)
    return faults


def _count_faults(text: str) -> list[str]:
    """Return what is inconsistent in a whole answer: ids, logprobs and usage agree."""
    body: dict[str, Any] | list[Any] = json.loads(text)
    if isinstance(body, list):  # of rendered requests, which have no output
        return []
    nvext: dict[str, Any] = body.get("nvext", {})
    usage: dict[str, Any] | None = body.get("usage")
    counts: dict[str, int] = {}
    if "completion_token_ids" in nvext:
        counts["completion_token_ids"] = len(nvext["completion_token_ids"])
    if "engine_data" in nvext:
        data = nvext["engine_data"]
        counts["engine_data ids"] = len(data["completion_token_ids"])
        counts["engine_data logprobs"] = len(data["completion_logprobs"])
    if counts and usage is not None:
        counts["usage"] = usage["completion_tokens"]
    return [] if len(set(counts.values())) <= 1 else [f"counts differ: {counts}"]


def plain_tokens(port: int, document: ApiDocument) -> list[int]:
    """Return the ids that a plain request gets; they are always the same.

    Raises:
        AssertionError: It gets none.
    """
    body = {"prompt": [5, 6, 7, 8], "max_tokens": 24, "return_token_ids": True}
    headers = (("Content-Type", "application/json"),)
    case = Case("POST", "/v1/completions", json.dumps(body).encode(), headers)
    answer = send(port, case)
    faults = answer_faults(document, case, answer)
    if faults or answer.status != 200:
        msg = f"a plain request gets {answer.status} {answer.text:.300} {faults}"
        raise AssertionError(msg)
    return cast("list[int]", json.loads(answer.text)["nvext"]["completion_token_ids"])


def leaks(port: int, settle_s: float = SETTLE_S) -> list[str]:
    """Return what is still held when nothing runs any more; best nothing."""
    deadline = time.monotonic() + settle_s
    while True:
        held = _held(port)
        if not held or time.monotonic() > deadline:
            return held
        time.sleep(0.1)


def _held(port: int) -> list[str]:
    held: list[str] = []
    health = json.loads(fetch(port, "/health"))
    if health["status"] != "ok":
        held.append(f"not healthy: {health}")
    for instance in health["instances"]:
        held += [
            f"{instance['worker_id']}: {key} is {instance[key]}"
            for key in ("num_running", "num_waiting", "kv_usage", "num_open")
            if instance.get(key)
        ]
    for line in fetch(port, "/metrics").splitlines():
        name, _, value = line.rpartition(" ")
        if name == "tokenwire_requests_inflight" and float(value):
            held.append(f"{name} is {value}")
    return held


def fetch(port: int, path: str) -> str:
    """Return what the frontend answers to a GET, whatever its status."""
    url = f"http://127.0.0.1:{port}{path}"
    try:
        with urllib.request.urlopen(url, timeout=DEADLINE_S) as answer:
            return cast("str", answer.read().decode())
    except urllib.error.HTTPError as error:
        return error.read().decode()


def reproduction(case: Case, answer: Answer) -> str:
    """Return how to send the same again, and what came back."""
    return (
        f"    from fuzz_http import Case, send\n    send(PORT, {case!r})\n"
        f"    -> {answer.status} {answer.headers.get('content-type', '')} "
        f"{answer.text[:500]!r} {answer.failure}"
    )
