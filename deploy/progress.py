"""The lines that tell an operator what happens; plain, for terminals and logs alike.

One line per change; while something is not up yet and nothing changes, one more
every ``SILENCE_S``, so that a slow load can be told from a hang.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

__all__ = ["SILENCE_S", "Progress", "serving_text"]

SILENCE_S = 5.0

_UP = "up"


class Progress:
    """Who is in which phase. *now* is the caller's monotonic clock, in seconds."""

    def __init__(
        self, names: Sequence[str], now: float, silence_s: float = SILENCE_S
    ) -> None:
        self._silence_s = silence_s
        self._started_at = now
        self._said_at = now
        self._width = max((len(name) for name in names), default=0)
        self._phases: dict[str, tuple[str, float]] = dict.fromkeys(
            names, ("not started", now)
        )

    def line(self, name: str, text: str, now: float) -> str:
        """Return *text*, said by or about *name*, as a line."""
        self._said_at = now
        return f"[{now - self._started_at:7.1f} s] {name:<{self._width}}  {text}"

    def phase(self, name: str, phase: str, now: float) -> str | None:
        """Note the phase of *name*; return its line if that is a change."""
        if self._phases.get(name, ("", 0.0))[0] == phase:
            return None
        self._phases[name] = (phase, now)
        return self.line(name, phase, now)

    def up(self, name: str, now: float, detail: str = "") -> str | None:
        """Note that *name* is ready; return the line for it if that is new."""
        if self._phases.get(name, ("", 0.0))[0] == _UP:
            return None
        self._phases[name] = (_UP, now)
        return self.line(name, f"up{detail}", now)

    def silence(self, now: float) -> str | None:
        """Return a line on who is still awaited, if nothing was said for a while."""
        if now - self._said_at < self._silence_s:
            return None
        awaited = [
            f"{name} ({phase}, {now - since:.0f} s)"
            for name, (phase, since) in self._phases.items()
            if phase != _UP
        ]
        return (
            self.line("", f"waiting for {', '.join(awaited)}", now) if awaited else None
        )

    def elapsed_s(self, now: float) -> float:
        """Return for how long all this has been running."""
        return now - self._started_at


def serving_text(
    *,
    url: str,
    model: str,
    metrics: Sequence[tuple[str, str]],
    log_folder: str,
    elapsed_s: float,
) -> str:
    """Return what to say once requests are answered: where, and how to try it."""
    body = json.dumps(
        {
            "model": model,
            "messages": [{"role": "user", "content": "Name three colours."}],
            "max_tokens": 32,
            "return_token_ids": True,
        }
    )
    call = (
        f'model={json.dumps(model)}, max_tokens=32, extra_body={{"return_token_ids": True}}'
        ', messages=[{"role": "user", "content": "Name three colours."}]'
    )
    width = max((len(name) for name, _ in metrics), default=0)
    addresses = [f"    {name:<{width}}  {address}" for name, address in metrics]
    return "\n".join(
        [
            "",
            f"tokenwire serves {model} at {url} (after {elapsed_s:.0f} s)",
            f"  Live page: {url}/ui",
            "  Metrics:",
            *addresses,
            f"  Logs: {log_folder}",
            "  Try it:",
            f"    curl -s {url}/v1/chat/completions -H 'Content-Type: application/json' \\",
            f"      -d {_quoted(body)}",
            "  or, in Python:",
            "    from openai import OpenAI",
            f'    client = OpenAI(base_url="{url}/v1", api_key="none")',
            f"    reply = client.chat.completions.create({call})",
            '    print(reply.choices[0].message.content, reply.nvext["completion_token_ids"])',
            "  Ctrl-C stops everything.",
            "",
        ]
    )


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
