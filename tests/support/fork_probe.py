"""Starts a process from the fork server, and says on standard output what it was."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

from tokenwire.worker.vllm import fork_server

MARK = "imported_before_the_fork"


def tell(end: Connection, code: int) -> None:
    """Say what this process has, and end with *code*."""
    end.send([MARK in sys.modules, os.environ.get("SET_LATER"), os.getppid()])
    sys.exit(code)


def started(context: Any) -> list[object]:
    """Return what a process of *context* says, and its exit code."""
    ours, its = context.Pipe()
    process = context.Process(target=tell, args=(its, 3))
    process.start()
    its.close()
    said = ours.recv()
    process.join()
    return [*said, process.exitcode]


def main() -> None:
    """Run one process of each kind."""
    sys.modules[MARK] = ModuleType(MARK)
    server = fork_server.fork_server()
    os.environ["SET_LATER"] = "yes"
    said = {
        "server": server,
        "forked": [started(fork_server.Context()) for _ in range(2)],
        "new": started(multiprocessing.get_context("spawn")),
    }
    print(json.dumps(said), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
