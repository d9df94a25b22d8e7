"""Waiting for servers that a script has started: looked at again and again, up to a bound."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence

__all__ = ["comes_true", "status"]

LOOK_S = 0.05


def comes_true(
    condition: Callable[[], bool],
    timeout_s: float,
    processes: Sequence[subprocess.Popen[bytes]] = (),
    look_s: float = LOOK_S,
) -> bool:
    """Return whether *condition* holds within *timeout_s*, and before a process ends.

    Args:
        condition: Asked at least once.
        timeout_s: For how long it is asked again.
        processes: Without all of these it cannot come true.
        look_s: Between two looks.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline or any(
            process.poll() is not None for process in processes
        ):
            return False
        time.sleep(look_s)
    return True


def status(url: str, body: object = None, timeout_s: float = 10.0) -> int:
    """Return the status of an answer; 0: nobody answers.

    Args:
        url: What is asked.
        body: Sent as JSON, by POST; None: a GET.
        timeout_s: For the answer's head.
    """
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0
