"""Kill what serves a streamed tool call, in its middle; its client gets it all the same.

``python scripts/kill_demo.py`` streams one, undisturbed, from two frontends, a prefill and
two decode workers. Then again, and the decode worker, the frontend or both get SIGKILL
when half of the arguments are there; ``resume_client`` goes on. A row each says what
differs; the exit code is 1 if anything does. With ``--engine vllm`` on the real engine,
where a grammar binds the arguments, and a seed, a temperature and penalties choose them.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kill_stack import KillStack
from resume_client import Outcome, ResumableStream
from tokenizers import Tokenizer

SAMPLED = {
    "temperature": 0.8,
    "seed": 7,
    "frequency_penalty": 0.3,
    "presence_penalty": 0.2,
}
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "minLength": 20, "maxLength": 60},
        "text": {"type": "string", "minLength": 200, "maxLength": 300},
    },
    "required": ["title", "text"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "save", "strict": True, "parameters": PARAMETERS},
}
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Save a story about a mountain."}],
    "tools": [TOOL],
    "tool_choice": {"type": "function", "function": {"name": "save"}},
    "max_tokens": 400,
    "stream_options": {"include_usage": True},
    **SAMPLED,
}
SCRIPTED = {
    "title": 'Zürich 🏔, naïve 🙂: „half a character" is cut, too',
    "text": "Δ: " + "; ".join(f'line {n} of "30"' for n in range(1, 13)),
}
"""What the simulated engine says, which knows no grammar."""

ARGUMENTS = {
    "sim": ("--step-ms", "15", "--output-draws"),
    "vllm": ("--dtype", "float32", "--max-model-len", "2048"),
}
HEAD = (
    "| killed | ids | lost | repeated | arguments | call id | finish | usage | went on by "
    "| longest pause |\n|---|---|---|---|---|---|---|---|---|---|"
)


@dataclass
class Seen:
    """What a client was told, chunk by chunk."""

    generation_id: str = ""  # of the first generation
    ids: dict[int, int] = field(default_factory=dict[int, int])  # by their offset
    num_repeated: int = 0
    arguments: str = ""
    num_arguments: list[int] = field(default_factory=lambda: [0])  # after no id, ...
    longest_pause_s: float = 0.0  # between two chunks
    outcome: Outcome | None = None

    def take(self, chunk: dict[str, Any]) -> None:
        """Take a chunk, on its own: apart from what the client makes of it."""
        nvext: dict[str, Any] = chunk.get("nvext") or {}
        for offset, token_id in enumerate(
            nvext.get("completion_token_ids", ()), nvext.get("token_offset", 0)
        ):
            self.num_repeated += offset in self.ids
            self.ids[offset] = token_id
        for choice in chunk["choices"]:
            for part in choice["delta"].get("tool_calls", ()):
                self.arguments += part["function"].get("arguments", "")
        self.num_arguments += [len(self.arguments)] * (
            len(self.ids) + 1 - len(self.num_arguments)
        )


async def stream(
    urls: list[str],
    body: dict[str, Any],
    at: int = -1,
    strike: Callable[[str], Awaitable[None]] | None = None,
) -> Seen:
    """Stream the tool call; *strike* when *at* ids have come, by who serves it."""
    seen = Seen()
    async with ResumableStream(urls, "/v1/chat/completions", body) as client:
        last: float | None = None
        async for chunk in client:
            now = time.monotonic()
            seen.longest_pause_s = max(seen.longest_pause_s, now - (last or now))
            last = now
            seen.generation_id = seen.generation_id or client.progress.generation_id
            seen.take(chunk)
            if strike is not None and len(seen.ids) >= at:
                assert client.progress.finish_reason is None
                await strike(client.url)
                strike = None
        seen.outcome = await client.complete()
    return seen


def usage_of(outcome: Outcome) -> tuple[int, int]:
    """Return the tokens of the prompt and of the whole output."""
    usage = outcome.usage or {}
    details: dict[str, Any] = usage.get("completion_tokens_details") or {}
    num_earlier = int(details.get("resumed_prefix_tokens", 0))
    num_completion = int(usage.get("completion_tokens", 0)) + num_earlier
    return int(usage.get("prompt_tokens", 0)), num_completion


def row(name: str, seen: Seen, calm: Seen) -> tuple[str, bool]:
    """Return a line of the table, and whether nothing differs."""
    got, expected = seen.outcome, calm.outcome
    assert got is not None
    assert expected is not None
    num_lost = sum(seen.ids.get(n) != one for n, one in calm.ids.items())
    [call], [one] = got.message.tool_calls, expected.message.tool_calls
    digest = hashlib.sha256(f"{seen.generation_id}/0/0".encode()).hexdigest()
    same = {
        "ids": got.token_ids == expected.token_ids and seen.ids == calm.ids,
        "arguments": call["function"] == one["function"]
        and seen.arguments == calm.arguments
        and got.text == expected.text,
        "id": call["id"] == f"chatcmpl-tool-{digest[:32]}",
        "finish": got.finish_reason == expected.finish_reason,
        "usage": usage_of(got) == usage_of(expected),
    }
    said = {key: "same" if value else "DIFFERS" for key, value in same.items()}
    how = ["replay"] * got.num_reconnects + ["resume"] * got.num_resumes
    cells = [
        name,
        f"{len(got.token_ids)}, {said['ids']}",
        str(num_lost),
        str(seen.num_repeated),
        said["arguments"],
        said["id"],
        f"{got.finish_reason}, {said['finish']}",
        said["usage"],
        " and ".join(how) or ("" if seen is calm else "the frontend"),
        f"{seen.longest_pause_s:.1f} s",
    ]
    good = all(same.values()) and not num_lost and not seen.num_repeated
    return f"| {' | '.join(cells)} |", good


async def demo(stack: KillStack, body: dict[str, Any], names: list[str]) -> bool:
    """Run scenarios and print their rows; return whether nothing differed."""
    calm = await stream(stack.urls, body)
    if not calm.arguments:
        sys.exit(f"the model makes no tool call: {calm.outcome}")
    line, good = row("nothing", calm, calm)
    print(line, flush=True)
    total = calm.num_arguments[-1]
    at = next(n for n, length in enumerate(calm.num_arguments) if length > total / 2)
    for name in names:
        await stack.whole()

        async def strike(url: str, name: str = name) -> None:
            victims = [stack.frontend_at(url)] if name != "worker" else []
            if name != "frontend":
                victims.append(await stack.decoding(url))
            print(f"  SIGKILL {' and '.join(victims)} at id {at}", file=sys.stderr)
            await stack.kill(*victims)

        seen = await stream(stack.urls, body, at, strike)
        line, same = row(name, seen, calm)
        print(line, flush=True)
        assert seen.outcome is not None
        print(*(f"  {one}" for one in seen.outcome.log), sep="\n", file=sys.stderr)
        good &= same
    print(f"\n{calm.arguments}", file=sys.stderr)
    return good


def script(model: str, folder: Path) -> list[str]:
    """Return the options that have the simulated engine say a tool call."""
    tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
    call = {"name": "save", "arguments": SCRIPTED}
    text = f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    file = folder / "script.json"
    file.write_text(json.dumps([{"output_token_ids": ids}]))
    return ["--script", str(file)]


async def main() -> int:
    """Return 0 if nothing differed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("sim", "vllm"), default="sim")
    parser.add_argument("--model", default=os.environ.get("TOKENWIRE_DEMO_MODEL"))
    kills = ("worker", "frontend", "both")
    parser.add_argument("--kill", action="append", choices=kills)
    parser.add_argument(
        "--on-disconnect", choices=("cancel", "continue"), default="continue"
    )
    parser.add_argument("--logs", type=Path, help="a folder for logs (a new one)")
    given = parser.parse_args()
    if given.model is None:
        parser.error("give --model or TOKENWIRE_DEMO_MODEL")
    folder = given.logs or Path(tempfile.mkdtemp(prefix="kill-demo-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"logs in {folder}", file=sys.stderr)
    arguments = list(ARGUMENTS[given.engine])
    if given.engine == "sim":
        arguments += script(given.model, folder)
    body = {**BODY, "nvext": {"resumable": {"on_disconnect": given.on_disconnect}}}
    async with KillStack(given.engine, given.model, folder, arguments) as stack:
        print(HEAD)
        return 0 if await demo(stack, body, given.kill or list(kills)) else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
