"""What a child's output means: a phase, a warning, or chatter for the log file only."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import Enum

__all__ = ["Kind", "LineSplitter", "OutputReader", "Seen"]

MAX_LINE_CHARS = 8_192
"""Longer lines are cut: engines print whole configurations on one line (3 kB), and
a line is held in memory until its end comes."""

MAX_SHOWN = 40
"""Warnings shown per process and period: a start of vLLM has about 15."""

SHOWN_PERIOD_S = 10.0

_PHASE = re.compile(r"tokenwire-(?:worker|frontend): (.+?)(?: \(\d+\.\d s\))?$")
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# "(EngineCore pid=1) WARNING 11-29 ...", "WARNING:root:...", "x.py:3: UserWarning: ..."
_TROUBLE = re.compile(r"\b(?:WARN|WARNING|ERROR|CRITICAL|FATAL)\b|\w+Warning: ")
_LEVEL_WITHIN_CHARS = 100  # a level further in is part of somebody's text
_CHATTER = re.compile(r"(?:\([^)]*\) )*\[?(?:INFO|DEBUG|TRACE)\b")
# What vLLM always warns of where a worker of ours runs on a CPU: nothing to be done.
_USUAL = re.compile(
    r"\bEnforce eager set, disabling torch\.compile"
    r"|\bInductor compilation was disabled by user settings"
    r"|\bTriton is not installed\. triton-cpu is expected"
    r"|\bReset SSM cache type to float32"
    r"|\bModel Runner V2 requires Triton"
    r"|\bInitializing KVConnectorBase_V1\. This API is experimental"
    r"|\bUsing kv_role='kv_both' with NixlConnector is deprecated"
    r"|\bUsing custom scheduler class tokenwire\."
    r"|\bFutureWarning: `torch\.distributed\.reduce_op` is deprecated"
)
_TRACEBACK = re.compile(r"\s*(?:\([^)]*\) )*Traceback \(most recent call last\)")


class Kind(Enum):
    """What to do with a line."""

    PHASE = "phase"  # progress of ours
    SHOW = "show"  # a warning, an error, a traceback
    QUIET = "quiet"  # only in the log file
    MUTED = "muted"  # as SHOW, but the first one too many


@dataclass(slots=True, frozen=True)
class Seen:
    """One line, understood."""

    kind: Kind
    text: str


class LineSplitter:
    """Cuts a stream of bytes into lines, of bounded length."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that *data* completes; a bar's carriage returns end one."""
        *lines, self._rest = re.split(rb"\r\n|[\r\n]", self._rest + data)
        if len(self._rest) > MAX_LINE_CHARS:
            lines.append(self._rest)
            self._rest = b""
        return [_text(line) for line in lines if line]

    def end(self) -> list[str]:
        """Return what is left when the stream ends."""
        rest, self._rest = self._rest, b""
        return [_text(rest)] if rest else []


class OutputReader:
    """Understands one process's lines, in order. *now* is any monotonic clock, in s."""

    def __init__(self) -> None:
        self._in_traceback = False
        self._is_indented = False
        self._period_ends = 0.0
        self._num_shown = 0

    def line(self, text: str, now: float) -> Seen | None:
        """Return what *text* is; None for a warning that is one too many."""
        logged = _logged(text)
        if logged is not None:
            self._in_traceback = False
            if logged.kind is not Kind.SHOW:
                return logged
            text = logged.text
            if _is_usual(text):
                return Seen(Kind.QUIET, text)
        elif phase := _PHASE.match(text):
            self._in_traceback = False
            return Seen(Kind.PHASE, phase[1])
        elif not self._is_trouble(text):
            return Seen(Kind.QUIET, text)
        if now >= self._period_ends:
            self._period_ends = now + SHOWN_PERIOD_S
            self._num_shown = 0
        self._num_shown += 1
        if self._num_shown <= MAX_SHOWN:
            return Seen(Kind.SHOW, text)
        return Seen(Kind.MUTED, text) if self._num_shown == MAX_SHOWN + 1 else None

    def _is_trouble(self, text: str) -> bool:
        if _TRACEBACK.match(text):
            self._in_traceback = True
            self._is_indented = text.startswith(" ")  # behind a line of our log
            return True
        if self._in_traceback:
            # Indented lines belong to it, and the first that is not ends it: the error's
            # own, unless that was indented too.
            self._in_traceback = text.startswith((" ", "\t"))
            if self._in_traceback or not self._is_indented:
                return True
        if _CHATTER.match(text) or _is_usual(text):
            return False
        return bool(_TROUBLE.search(text, 0, _LEVEL_WITHIN_CHARS))


def _is_usual(text: str) -> bool:
    return bool(_USUAL.search(text, 0, 2 * _LEVEL_WITHIN_CHARS))


def _logged(text: str) -> Seen | None:
    """Return what a line of ``--log-format json`` is; None: *text* is no such line."""
    if not text.startswith('{"time":'):
        return None
    try:
        line = json.loads(text)
    except ValueError:
        return None
    if "phase" in line:
        return Seen(Kind.PHASE, str(line["phase"]))
    level = str(line.get("level")).upper()
    if level not in {"WARNING", "ERROR", "CRITICAL"}:
        return Seen(Kind.QUIET, text)
    error = str(line.get("exception", "")).rpartition("\n")[2]
    message = str(line.get("message")).partition("\n")[0]
    shown = f"{level} {line.get('logger')}: {message} {error}"
    return Seen(Kind.SHOW, shown.rstrip())


def _text(line: bytes) -> str:
    return _ANSI.sub("", line[:MAX_LINE_CHARS].decode(errors="replace")).rstrip()
