"""What is kept of generations: their ids, what these were sent with, how they ended.

Laws:
- It is bounded in bytes, in number and in time. What has ended makes room first, then
  what runs and is followed (its frontend has its ids), then what runs and is not; of
  each, what has been so for longest.
- Who does not bring a generation's owner learns nothing of it, not even that it is.
- What was lost is told from what never was, for a while.
- What is kept fits into one message: it can be told.
No I/O, no clock and no event loop in here; *now* is the worker's clock, in s.
"""

from __future__ import annotations

import hmac
import math
from collections.abc import Mapping
from enum import StrEnum

from tokenwire.protocol.codec import encode
from tokenwire.protocol.errors import ProtocolError
from tokenwire.protocol.limits import MAX_CONTROL_BYTES, MAX_MESSAGE_BYTES
from tokenwire.protocol.messages import Batch, Finished, Keep, Tokens
from tokenwire.protocol.tokens import TOKEN_BYTES

from .entry import VERSION_BYTES, Entry, State, Tombstone

__all__ = [
    "MAX_KEPT",
    "MAX_LOST",
    "Journal",
    "Lost",
]

MAX_KEPT = 16_384
"""Twice what a worker takes requests. Each costs the event loop some 60 ns a second."""

MAX_LOST = 4_096
"""Of what was lost, the newest: below 1 MiB, and minutes of a busy worker."""

MAX_ENTRY_BYTES = MAX_MESSAGE_BYTES - MAX_CONTROL_BYTES
"""What one Recalled can carry."""

EXPIRY_STEP_S = 1.0
"""All that could expire is looked at, so not at each tick; lives are far longer."""


class Lost(StrEnum):
    """Why something is not kept any more."""

    BYTES = "bytes"  # others needed its room
    COUNT = "count"
    TOO_LARGE = "too_large"  # by itself
    UNFIT = "unfit"  # its logprobs or its end have no form in a message
    EXPIRED = "expired"
    FAILED = "failed"  # it ended in an error, and nobody moves it elsewhere


class Journal:
    """The generations of one worker.

    Args:
        max_bytes: What all of them may take; 0: nothing is kept.
        max_life_s: For how long one stays at most that nobody follows.
    """

    def __init__(self, max_bytes: int, max_life_s: float) -> None:
        self.max_bytes = max_bytes
        self._max_life_s = max_life_s
        self._max_entry_bytes = min(max_bytes, MAX_ENTRY_BYTES)
        self._entries: dict[str, Entry] = {}
        # The same, by state: who has been so for longest is first.
        self._by_state: dict[State, dict[str, Entry]] = {one: {} for one in State}
        self._lost: dict[str, Tombstone] = {}  # oldest first
        self._look_at = math.inf  # nothing expires before
        self._num_lost = dict.fromkeys(Lost, 0)
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def num_in(self, state: State) -> int:
        """Return how many are in *state*."""
        return len(self._by_state[state])

    @property
    def num_lost(self) -> Mapping[str, int]:
        """How many were lost since the start, by reason."""
        return {reason.value: number for reason, number in self._num_lost.items()}

    def unfollowed(self) -> list[Entry]:
        """Return what runs and nobody follows."""
        return list(self._by_state[State.UNFOLLOWED].values())

    # -- what is kept -----------------------------------------------------------------

    def takes(self, keep: Keep) -> bool:
        """Return whether *keep* is not older than what is known of its generation."""
        known = self._entries.get(keep.generation_id)
        earlier = known or self._lost.get(keep.generation_id)
        return bool(self.max_bytes) and (
            earlier is None
            or (
                hmac.compare_digest(earlier.owner, keep.owner)
                and earlier.epoch <= keep.epoch
            )
        )

    def begin(self, keep: Keep, token_ids: bytes) -> tuple[Entry | None, Entry | None]:
        """Keep a generation that begins here; ``takes`` has said yes.

        Args:
            keep: What its frontend asks for.
            token_ids: Its ids so far, packed.

        Returns:
            Its entry, None if it is too large; and the earlier one that it replaces.
        """
        earlier = self._entries.get(keep.generation_id)
        if earlier is not None:
            self.drop(earlier)
        self._lost.pop(keep.generation_id, None)
        entry = Entry(keep, token_ids, min(keep.ttl_s, self._max_life_s))
        self._entries[entry.generation_id] = entry
        self._by_state[entry.state][entry.generation_id] = entry
        self.num_bytes += entry.num_bytes
        if entry.num_bytes > self._max_entry_bytes:
            self.drop(entry, Lost.TOO_LARGE)
            return None, earlier
        return entry, earlier

    def append(self, entry: Entry, item: Tokens, weight_version: str) -> bool:
        """Keep new tokens; return False if that cannot be: *entry* is lost.

        Args:
            entry: Whose they are.
            item: What its follower is about to be sent; its index counts new tokens.
            weight_version: Of the weights that they come from.
        """
        size = len(item.token_ids)
        versions = entry.weight_versions
        if not versions or versions[-1][1] != weight_version:
            versions.append((item.index, weight_version))
            size += VERSION_BYTES + len(weight_version)
        if not item.index:
            entry.num_cached_tokens = item.num_cached_tokens
        if item.logprobs is not None or entry.logprobs is not None:
            added = entry.add_rows(item)
            if not added:
                self.drop(entry, Lost.UNFIT)
                return False
            size += added
        entry.token_ids += item.token_ids
        entry.num_new_tokens = item.index + len(item.token_ids) // TOKEN_BYTES
        entry.num_bytes += size  # as ``_grow``, once per token
        self.num_bytes += size
        return entry.num_bytes <= self._max_entry_bytes or self._grow(entry, 0)

    def end(self, entry: Entry, finished: Finished, now: float) -> bool:
        """Keep how it ended; return False if that cannot be: *entry* is lost."""
        try:
            size = len(encode(Batch([], [finished])))
        except ProtocolError:
            self.drop(entry, Lost.UNFIT)
            return False
        entry.finished = finished
        self._move(entry, State.ENDED)
        self._age(entry, now)
        return self._grow(entry, size)

    def unfollow(self, entry: Entry, now: float) -> None:
        """Take note that nobody follows it from now on."""
        self._move(entry, State.UNFOLLOWED)
        self._age(entry, now)

    def follow(self, entry: Entry) -> None:
        """Take note that somebody follows it, or somebody else."""
        self._move(entry, State.RUNNING)

    # -- what is told -----------------------------------------------------------------

    def find(self, generation_id: str, owner: bytes) -> Entry | Tombstone | None:
        """Return what is known of *owner*'s generation."""
        entry = self._entries.get(generation_id)
        known = self._lost.get(generation_id) if entry is None else entry
        if known is None or not hmac.compare_digest(known.owner, owner):
            return None
        return known

    # -- what is lost -----------------------------------------------------------------

    def drop(self, entry: Entry, reason: Lost | None = None) -> None:
        """Keep *entry* no longer; without a *reason* it is as if it had never been.

        Nothing happens if it is not kept any more.
        """
        if self._entries.get(entry.generation_id) is not entry:
            return
        del self._entries[entry.generation_id]
        del self._by_state[entry.state][entry.generation_id]
        self.num_bytes -= entry.num_bytes
        if reason is None:
            return
        self._num_lost[reason] += 1
        self._lost[entry.generation_id] = Tombstone(entry.owner, entry.epoch)
        if len(self._lost) > MAX_LOST:
            del self._lost[next(iter(self._lost))]

    def forget_lost(self, generation_id: str) -> None:
        """Tell of a lost generation no more."""
        self._lost.pop(generation_id, None)

    @property
    def is_over(self) -> bool:
        """Whether it takes more than it may."""
        return self.num_bytes > self.max_bytes or len(self._entries) > MAX_KEPT

    def make_room(self) -> list[Entry]:
        """Drop what is too much; return what of it had not ended."""
        running: list[Entry] = []
        while self.is_over:
            entry = self._first_to_go()
            if entry.finished is None:
                running.append(entry)
            is_large = self.num_bytes > self.max_bytes
            self.drop(entry, Lost.BYTES if is_large else Lost.COUNT)
        return running

    def expire(self, now: float) -> list[Entry]:
        """Drop what nobody asked for in time; return what of it had not ended."""
        if now < self._look_at:
            return []
        aging = (State.ENDED, State.UNFOLLOWED)
        entries = [one for state in aging for one in self._by_state[state].values()]
        over = [one for one in entries if one.expires_at <= now]
        for entry in over:
            self.drop(entry, Lost.EXPIRED)
        left = (one.expires_at for one in entries if one.expires_at > now)
        self._look_at = max(min(left, default=math.inf), now + EXPIRY_STEP_S)
        return [entry for entry in over if entry.finished is None]

    def _first_to_go(self) -> Entry:
        for state in (State.ENDED, State.RUNNING, State.UNFOLLOWED):
            if self._by_state[state]:
                return next(iter(self._by_state[state].values()))
        msg = "a journal without entries is above its bounds"
        raise AssertionError(msg)

    def _grow(self, entry: Entry, size: int) -> bool:
        entry.num_bytes += size
        self.num_bytes += size
        if entry.num_bytes > self._max_entry_bytes:
            self.drop(entry, Lost.TOO_LARGE)
            return False
        return True

    def _move(self, entry: Entry, state: State) -> None:
        del self._by_state[entry.state][entry.generation_id]
        entry.state = state
        self._by_state[state][entry.generation_id] = entry

    def _age(self, entry: Entry, now: float) -> None:
        entry.expires_at = now + entry.ttl_s
        self._look_at = min(self._look_at, entry.expires_at)
