"""Scripted sequences: which prompts get which output ids, from a JSON file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from tokenwire.protocol.messages import JsonObject
from tokenwire.protocol.tokens import TOKEN_BYTES, pack_ids
from tokenwire.worker.engine import EngineStartError

__all__ = ["DRAWN", "Answer", "Script", "ScriptEntry", "read_script"]

MAX_SCRIPT_BYTES = 64 * 1024 * 1024
"""A script is read whole; a bigger file is a mistake."""

DRAWN = -1
"""Stands in an output for an id that is drawn."""


class ScriptEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rule. Without a condition it matches every prompt; the first match wins."""

    output_token_ids: list[int]
    prompt_token_ids: list[int] | None = None  # the whole prompt
    contains: list[int] | None = None  # these ids in a row, anywhere in it
    num_prompt_tokens: int | None = None
    then: Literal["eos", "generate"] = "eos"  # after the last scripted id
    kv_transfer_params: JsonObject | None = None  # at the end of a full leg
    resume: bool = False
    """Whether a prompt that ends with the first scripted ids goes on behind them. A
    rule with ``prompt_token_ids`` always does: there it cannot be by chance."""
    drawn: tuple[int, ...] = ()
    """What a ``-1`` in the output stands for: one of these, by the engine's rule, so
    that seeds and penalties decide on it. A grammar that leaves some choice."""
    hold_at: int | None = None
    """The output stands still when it is so long; the engine's steps go on. Whoever
    tests what a lost worker leaves behind can lose it at exactly this token."""


@dataclass(slots=True, frozen=True)
class Answer:
    """The scripted ids for one prompt, from *start* on."""

    token_ids: Sequence[int]
    start: int
    then_eos: bool
    kv_transfer_params: JsonObject | None = None
    drawn: Sequence[int] = ()
    hold_at: int | None = None

    def begins_with(self, token_ids: Sequence[int]) -> bool:
        """Return whether output of this answer can begin with *token_ids*."""
        scripted = self.token_ids[self.start :][: len(token_ids)]
        return _fits(scripted, token_ids[: len(scripted)], self.drawn)


class Script:
    """The rules, in order."""

    def __init__(self, entries: Sequence[ScriptEntry] = ()) -> None:
        self._entries = tuple(entries)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def has_manifests(self) -> bool:
        """Whether any rule speaks for a connector."""
        return any(entry.kv_transfer_params is not None for entry in self._entries)

    def answer(self, prompt: Sequence[int]) -> Answer | None:
        """Return what the first rule that matches *prompt* says, or None."""
        for entry in self._entries:
            start = _match(entry, prompt)
            if start is not None:
                return Answer(
                    entry.output_token_ids,
                    start,
                    entry.then == "eos",
                    entry.kv_transfer_params,
                    entry.drawn,
                    entry.hold_at,
                )
        return None


def read_script(path: str) -> Script:
    """Return the script in the file *path*: a JSON list of rules.

    Raises:
        EngineStartError: It cannot be read, or is not such a list.
    """
    file = Path(path)
    try:
        if file.stat().st_size > MAX_SCRIPT_BYTES:
            msg = f"script {path} is above {MAX_SCRIPT_BYTES} bytes"
            raise EngineStartError(msg)
        entries = msgspec.json.decode(file.read_bytes(), type=list[ScriptEntry])
    except (OSError, msgspec.DecodeError) as error:
        msg = f"script {path} cannot be read: {error}"
        raise EngineStartError(msg) from error
    for entry in entries:
        if DRAWN in entry.output_token_ids and not entry.drawn:
            msg = f"script {path} cannot be read: {DRAWN} in an output without `drawn`"
            raise EngineStartError(msg)
    return Script(entries)


def _match(entry: ScriptEntry, prompt: Sequence[int]) -> int | None:
    """Return where in the output to start, or None if *prompt* does not match."""
    output = entry.output_token_ids
    whole = entry.prompt_token_ids
    if whole is not None:
        rest = list(prompt[len(whole) :])
        if list(prompt[: len(whole)]) != whole:
            return None
        if not _fits(output[: len(rest)], rest, entry.drawn):
            return None
        return len(rest)
    if entry.contains is not None and not _contains(prompt, entry.contains):
        return None
    if entry.num_prompt_tokens not in {None, len(prompt)}:
        return None
    if entry.resume:
        for size in range(min(len(output), len(prompt)), 0, -1):
            if _fits(output[:size], prompt[-size:], entry.drawn):
                return size
    return 0


def _fits(
    scripted: Sequence[int], token_ids: Sequence[int], drawn: Sequence[int]
) -> bool:
    """Return whether *token_ids* can be what is *scripted*, as many ids."""
    if len(scripted) != len(token_ids):
        return False
    return all(
        want == found or (want == DRAWN and found in drawn)
        for want, found in zip(scripted, token_ids, strict=True)
    )


def _contains(prompt: Sequence[int], part: Sequence[int]) -> bool:
    haystack, needle = pack_ids(prompt), pack_ids(part)
    at = haystack.find(needle)
    while at % TOKEN_BYTES and at >= 0:  # a match across the border of two ids
        at = haystack.find(needle, at + 1)
    return at >= 0
