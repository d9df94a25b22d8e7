"""Ask a frontend for its model and for tokens by their ids; for `helm test`.

Needs Python alone. Arguments: the frontend's address, and the name of the model.
"""

from __future__ import annotations

import json
import os
import ssl
import sys
import time
import urllib.request
from typing import Any

DEADLINE_S = 120.0  # workers that have just started are found by DNS, within seconds
PROMPT = [1, 2, 3, 4, 5]
NUM_TOKENS = 8


def context() -> ssl.SSLContext:
    """Return whom to believe (SSL_CERT_FILE), and what to show who wants a certificate."""
    made = ssl.create_default_context()
    folder = os.environ.get("CLIENT_CERTIFICATE")
    if folder:
        made.load_cert_chain(f"{folder}/tls.crt", f"{folder}/tls.key")
    return made


def ask(url: str, body: object = None) -> Any:
    """Return the JSON at *url*."""
    headers = {"Content-Type": "application/json"}
    key = os.environ.get("API_KEY")
    if key:
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers)
    with urllib.request.urlopen(request, timeout=30, context=context()) as answer:
        return json.load(answer)


def flaw(address: str, model: str) -> str:
    """Return what is not as it must be; empty: nothing."""
    names = [one["id"] for one in ask(f"{address}/v1/models")["data"]]
    if model not in names:
        return f"/v1/models has {names}, not {model}"
    body = {
        "model": model,
        "prompt": PROMPT,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "nvext": {"extra_fields": ["completion_token_ids"]},
    }
    answer = ask(f"{address}/v1/completions", body)
    given, usage = answer["nvext"], answer["usage"]
    if given["prompt_token_ids"] != PROMPT:
        return f"other prompt ids came back: {given}"
    if len(given["completion_token_ids"]) != NUM_TOKENS:
        return f"{NUM_TOKENS} ids were asked for: {given}"
    if usage["completion_tokens"] != NUM_TOKENS:
        return f"the usage is another one: {usage}"
    return ""


def main(address: str, model: str) -> int:
    """Return the exit code."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            problem = flaw(address, model)
        except (OSError, KeyError) as error:
            problem = repr(error)
        if not problem:
            print(f"{address}: {model} answers, with its tokens")
            return 0
        if time.monotonic() > deadline:
            print(f"{address}: {problem}", file=sys.stderr)
            return 1
        time.sleep(1)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
