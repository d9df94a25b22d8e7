"""Fuzz a frontend with a prefill and a decode worker on the simulated engine.

Two sources of requests: Schemathesis reads /openapi.json and sends what is right and
what is wrong by it; strategies of our own bend requests, bytes and connections. No
answer may be a server error (but an honest 429 or 503), be late, or differ from the
document; in the end nothing may run, wait or be held, and a plain request must get
the tokens that it got before.

`make fuzz` runs it for FUZZ_SECONDS (600). The seeds are printed: `--seed S --rounds 1`
repeats a round. It ends with 1 after any finding.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path

from api_document import ApiDocument
from bench_processes import is_ready, rss_mib, wait_for
from fuzz_bodies import MODEL_NAME
from fuzz_cases import cases
from fuzz_checks import answer_faults, fetch, leaks, plain_tokens, reproduction
from fuzz_http import DEADLINE_S, Answer, Case, send
from hypothesis import HealthCheck, Phase, given, seed as seeded, settings
from hypothesis.errors import HypothesisWarning
from ports import free_port

__all__ = ["Findings", "check_end", "fuzz_cases", "fuzz_schema"]

EXAMPLES = 400
"""Cases of a round: half a minute, so that seeds are soon repeated."""

SHARE_OF_SCHEMA = 0.4
"""Of the time, for Schemathesis; it begins, since it says what the document lacks."""

CHECKS = ",".join(
    (
        "status_code_conformance",
        "content_type_conformance",
        "response_headers_conformance",
        "response_schema_conformance",
        "negative_data_rejection",
        "unsupported_method",
        "allow_header_conformance",
    )
)
"""Not ``not_a_server_error``, since a 503 may be honest, and no other 5xx is in the
answers' list of statuses but 500 and 502, which ``fuzz_schema`` looks for; nor
``positive_data_acceptance``, since no schema knows the vocabulary or which fields
exclude each other."""


PHASES = "examples,fuzzing"
"""Its phase ``coverage`` ends in a SystemError of Python 3.11.7's parser, by which
Hypothesis describes functions; bounds are tested one by one in test_http_openapi.py."""


class FoundError(AssertionError):
    """A case whose answer is wrong."""


@dataclass
class Findings:
    """What has been found, for the report at the end."""

    texts: list[str] = field(default_factory=list[str])
    num_cases: int = 0
    num_500: int = 0  # counted by the frontend
    statuses: Counter[int] = field(default_factory=Counter[int])  # 0: no answer owed

    def add(self, text: str) -> None:
        """Print a finding and keep it."""
        print(f"\nFOUND: {text}\n", flush=True)
        self.texts.append(text)


def fuzz_cases(
    port: int, document: ApiDocument, findings: Findings, *, seed: int, examples: int
) -> None:
    """Send *examples* cases of *seed*; shrink the first that is answered wrongly."""
    last: dict[str, tuple[Case, Answer]] = {}

    warnings.simplefilter("ignore", HypothesisWarning)  # long bodies in its reports

    @seeded(seed)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        derandomize=False,
        print_blob=False,
        report_multiple_bugs=False,
        suppress_health_check=[
            HealthCheck.too_slow,
            HealthCheck.data_too_large,
            HealthCheck.filter_too_much,
        ],
        phases=[Phase.generate, Phase.shrink],
    )
    @given(cases(document))
    def check(case: Case) -> None:
        answer = send(port, case)
        findings.num_cases += 1
        findings.statuses[answer.status] += 1
        faults = answer_faults(document, case, answer)
        if faults:
            last["found"] = case, answer
            raise FoundError(*faults)

    try:
        check()
    except Exception as error:  # noqa: BLE001 - Hypothesis has errors of its own, too
        text = f"seed {seed}: {type(error).__name__}: {error}"
        if "found" in last:
            text += "\n" + reproduction(*last["found"])
        findings.add(text)


def fuzz_schema(
    port: int,
    findings: Findings,
    *,
    seed: int,
    examples: int,
    max_time_s: float | None = None,
) -> None:
    """Let Schemathesis send what is right and wrong by the document.

    Args:
        port: The frontend's.
        findings: Where its report goes if it fails.
        seed: Of its cases.
        examples: Cases of one operation, per mode.
        max_time_s: Repeat until then.
    """
    url = f"http://127.0.0.1:{port}/openapi.json"
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "schemathesis.cli", "run", url),
            *("--checks", CHECKS, "--phases", PHASES),
            *("--seed", str(seed), "--max-examples", str(examples), "--workers", "2"),
            *("--request-timeout", str(DEADLINE_S), "--warnings", "off", "--no-color"),
            *("--report", "ndjson", "--report-ndjson-path", f"{folder}/events"),
        ]
        if max_time_s is not None:
            command += ["--max-time", str(max(1, int(max_time_s)))]
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=False
        )
        if done.returncode:
            output = done.stdout[-20_000:] + done.stderr[-2_000:]
            findings.add(f"Schemathesis, seed {seed}:\n{output}")


def check_end(
    port: int, document: ApiDocument, findings: Findings, tokens: list[int]
) -> None:
    """Look for what is still held, and for tokens that have become others."""
    for leak in leaks(port):
        findings.add(f"left behind: {leak}")
    now = plain_tokens(port, document)
    if now != tokens:
        findings.add(f"a plain request gets {now}, and got {tokens} before")
    # Those of clients that left before they could read theirs, too.
    lines = fetch(port, "/metrics").splitlines()
    num_500 = sum(
        int(float(line.rpartition(" ")[2])) for line in lines if 'status="500"' in line
    )
    if num_500 > findings.num_500:
        findings.num_500 = num_500
        findings.add("the frontend has counted a 500; its log has the traceback")


@contextlib.contextmanager
def stack(model: str, folder: Path) -> Generator[tuple[int, int]]:
    """Run tokenwire-up with a pair of workers; yield the port and its process."""
    port = free_port()
    command = [
        *(sys.executable, "-m", "tokenwire.deploy.up", "--engine", "sim"),
        *("--model", model, "--served-model-name", MODEL_NAME, "--port", str(port)),
        *("--prefill", "1", "--decode", "1", "--log-dir", str(folder / "logs")),
        *("--", "--step-ms", "1", "--prefill-tokens-per-s", "0"),
        *("--mean-output-tokens", "60", "--max-model-len", "1024"),
    ]
    with (folder / "up.log").open("wb") as log:
        environment = os.environ | {"TOKENWIRE_CLIENT_READ_TIMEOUT_S": "3"}
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            wait_for(lambda: is_ready(port), process)
            yield port, process.pid
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


def frontend_rss_mib(up_pid: int) -> float:
    """Return the resident memory of the frontend below tokenwire-up."""
    parents = {
        int(path.name): int(
            path.joinpath("stat").read_text().rpartition(")")[2].split()[1]
        )
        for path in Path("/proc").iterdir()
        if path.name.isdecimal() and path.joinpath("stat").exists()
    }
    below = [up_pid]
    for pid in below:
        below += [child for child, parent in parents.items() if parent == pid]
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"tokenwire.frontend" in words and not any(
            b"guard" in word for word in words
        ):
            return rss_mib(pid)
    return 0.0


def run(arguments: argparse.Namespace, folder: Path) -> Findings:
    """Fuzz until the time is spent."""
    findings = Findings()
    ends = time.monotonic() + arguments.seconds
    with stack(arguments.model, folder) as (port, up_pid):
        document = ApiDocument(json.loads(fetch(port, "/openapi.json")))
        tokens = plain_tokens(port, document)
        before = frontend_rss_mib(up_pid)
        if not arguments.rounds:
            print(f"schemathesis: seed {arguments.seed}", flush=True)
            fuzz_schema(
                port,
                findings,
                seed=arguments.seed,
                examples=100,
                max_time_s=SHARE_OF_SCHEMA * arguments.seconds,
            )
        number = 0
        while number < arguments.rounds or (
            not arguments.rounds and time.monotonic() < ends
        ):
            seed = arguments.seed + number
            began = time.monotonic()
            fuzz_cases(port, document, findings, seed=seed, examples=EXAMPLES)
            check_end(port, document, findings, tokens)
            print(
                f"cases: seed {seed}, {time.monotonic() - began:.1f} s, frontend "
                f"{frontend_rss_mib(up_pid):.0f} MiB",
                flush=True,
            )
            number += 1
        check_end(port, document, findings, tokens)
        print(f"frontend: {before:.0f} MiB, then {frontend_rss_mib(up_pid):.0f} MiB")
    return findings


def main() -> int:
    """Run; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--model", required=True, help="a model folder, for its tokenizer")
    add("--seconds", type=float, default=float(os.environ.get("FUZZ_SECONDS", "600")))
    add("--seed", type=int, default=random.randrange(10**6))
    add(
        "--rounds", type=int, default=0, help="so many rounds of own cases, and no more"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        findings = run(arguments, Path(folder))
        logs = "".join(
            path.read_text() for path in sorted(Path(folder).rglob("*front*.log"))
        )
    tracebacks = logs.count("Traceback (most recent call last)")
    if tracebacks:
        place = logs.index("Traceback (most recent call last)")
        findings.add(
            f"{tracebacks} tracebacks in the frontend's log; {logs[place:][:3000]}"
        )
    statuses = ", ".join(f"{n} x {code}" for code, n in findings.statuses.most_common())
    print(f"{findings.num_cases} own cases: {statuses}; {len(findings.texts)} findings")
    return 1 if findings.texts else 0


if __name__ == "__main__":
    sys.exit(main())
