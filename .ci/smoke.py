"""Use `make run` as its user does: wait until it serves, ask, press Ctrl-C.

It ends with exit code 0 when both endpoints gave exact token ids, streaming and not,
and Ctrl-C left no process behind.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from openai import OpenAI

ROOT = Path(__file__).parents[1]
READY_S = {
    "sim": 120.0,
    "vllm": 480.0,
}  # engines share two cores with their own loading
STOP_S = 60.0  # requests may finish, then processes are killed one after another
ANSWER_S = 120.0

MARK = "TOKENWIRE_SMOKE"  # in the environment of all that we start
IDS = {"return_token_ids": True}
QUESTION = "What is the opposite of hot?"
"""Whose answer the model is sure of: bfloat16 is rounded otherwise by another processor, and
the capital of France is a tenth of a logit from a line of the Marseillaise."""


def check(condition: object, what: str) -> None:
    """End the program with *what* unless *condition* holds."""
    if not condition:
        sys.exit(f"smoke: FAILED: {what}")
    print(f"smoke: {what}", flush=True)


def free_port() -> int:
    """Return a port that nothing listens on now."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port: int = listener.getsockname()[1]
        return port


class Started:
    """The processes that were started with a mark, and all in their sessions.

    vLLM's processes write a title over the environment that they were started with: they
    are known by the session of the worker that started them.
    """

    def __init__(self, mark: str) -> None:
        self._mark = f"{MARK}={mark}".encode()
        self._sessions: set[int] = set()

    def left(self) -> list[str]:
        """Return the command lines of those that live; called before they end, too."""
        folders = list(Path("/proc").glob("[0-9]*"))
        for folder in folders:
            with suppress(OSError):  # ended meanwhile
                if self._mark in (folder / "environ").read_bytes():
                    self._sessions.add(os.getsid(int(folder.name)))
        found: list[str] = []
        for folder in folders:
            with suppress(OSError):
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                # A zombie has none.
                if command and os.getsid(int(folder.name)) in self._sessions:
                    found.append(f"{folder.name}: {command.decode(errors='replace')}")
        return found


def is_ready(port: int) -> bool:
    """Return whether a prefill and a decode worker serve behind *port*."""
    try:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{port}/ready", timeout=5
        ) as reply:
            workers = json.loads(reply.read())["workers"]
    except OSError:  # refused, or 503
        return False
    return bool(workers["prefill"] and workers["decode"])


@contextmanager
def running(
    engine: str, port: int, mark: str, started: Started, log: Path
) -> Iterator[subprocess.Popen[Any]]:
    """Run `make run` in a session of its own; kill what is left at the end."""
    environment = os.environ | {MARK: mark}
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["make", "--no-print-directory", "run", f"ENGINE={engine}", f"PORT={port}"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    except BaseException:
        print(log.read_text(errors="replace")[-10_000:], flush=True)
        raise
    finally:
        for line in started.left():
            os.kill(int(line.split(":")[0]), signal.SIGKILL)
        process.wait()


def wait_until_ready(
    process: subprocess.Popen[Any], port: int, limit_s: float
) -> float:
    """Return how long it took until the stack serves."""
    start = time.monotonic()
    while not is_ready(port):
        check_alive = process.poll()
        if check_alive is not None:
            sys.exit(f"smoke: FAILED: make run ended with {check_alive}")
        if time.monotonic() - start > limit_s:
            sys.exit(f"smoke: FAILED: not ready in {limit_s:.0f} s")
        time.sleep(0.2)
    return time.monotonic() - start


def nvext(part: Any) -> dict[str, Any]:
    """Return the extension of a response or chunk, empty when it has none."""
    return (part.model_extra or {}).get("nvext") or {}


def joined(chunks: Iterable[Any]) -> tuple[list[int], dict[str, Any], int | None]:
    """Return the ids of a stream, the last extension, and the completion tokens."""
    token_ids: list[int] = []
    last: dict[str, Any] = {}
    count = None
    for chunk in chunks:
        extension = nvext(chunk)
        token_ids += extension.get("completion_token_ids", [])
        if chunk.choices and chunk.choices[0].finish_reason:
            last = extension
        if chunk.usage:
            count = chunk.usage.completion_tokens
    return token_ids, last, count


def ask(port: int, engine: str) -> None:
    """Check chat and completions, streaming and not."""
    client = OpenAI(
        base_url=f"http://127.0.0.1:{port}/v1",
        api_key="none",
        timeout=ANSWER_S,
        max_retries=0,
    )
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": QUESTION}]}
    text: dict[str, Any] = {"prompt": "The capital of France is"}
    for name, create, arguments in (
        ("chat", client.chat.completions.create, chat),
        ("completions", client.completions.create, text),
    ):
        same = {
            **arguments,
            "model": "smollm2",
            "max_tokens": 24,
            "temperature": 0,
            "seed": 1,
            "extra_body": IDS,
        }
        start = time.monotonic()
        whole: Any = create(**same)
        took = time.monotonic() - start
        found = nvext(whole)
        ids = found.get("completion_token_ids", [])
        check(
            ids and len(ids) == whole.usage.completion_tokens,
            f"{name}: {len(ids)} completion ids as in usage, in {took:.2f} s",
        )
        prompt_ids = found.get("prompt_token_ids", [])
        check(
            prompt_ids and len(prompt_ids) == whole.usage.prompt_tokens,
            f"{name}: {len(prompt_ids)} prompt ids as in usage",
        )
        stream: Any = create(
            **same, stream=True, stream_options={"include_usage": True}
        )
        streamed, last, count = joined(stream)
        check(count == len(streamed), f"{name}: the stream has an id for every token")
        check(
            last.get("prompt_token_ids") == prompt_ids,
            f"{name}: the last chunk has the same prompt ids",
        )
        check(
            not (last.get("kv_transfer_params") or {}).keys()
            & {"remote_host", "remote_port"},
            f"{name}: hand-over handles stay inside",
        )
        if engine == "vllm" and name == "chat":
            content = whole.choices[0].message.content
            check("cold" in content, f"chat: the model answers {content!r}")


def main() -> int:
    """Run the check; return the exit code."""
    parser = argparse.ArgumentParser(description="Check `make run` as its user has it.")
    parser.add_argument("--engine", choices=["sim", "vllm"], default="vllm")
    engine = parser.parse_args().engine
    port, mark = free_port(), secrets.token_hex(8)
    started = Started(mark)
    with tempfile.TemporaryDirectory(prefix="tokenwire-smoke-") as name:
        log = Path(name) / "log"
        with running(engine, port, mark, started, log) as process:
            took = wait_until_ready(process, port, READY_S[engine])
            print(f"smoke: ready after {took:.1f} s", flush=True)
            ask(port, engine)
            num_processes = len(started.left())
            check(num_processes > 3, f"{num_processes} processes serve")
            os.killpg(process.pid, signal.SIGINT)
            start = time.monotonic()
            try:
                code = process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                sys.exit(f"smoke: FAILED: still running {STOP_S:.0f} s after Ctrl-C")
            took = time.monotonic() - start
            # make itself dies of the signal; it would say so if its command had failed.
            output = log.read_text(errors="replace")
            check(
                code in {0, -signal.SIGINT, 130} and "***" not in output,
                f"Ctrl-C ended it cleanly in {took:.1f} s",
            )
            check(not started.left(), "no process is left behind")
            check("Traceback" not in output, "no traceback in the output")
    return 0


if __name__ == "__main__":
    sys.exit(main())
