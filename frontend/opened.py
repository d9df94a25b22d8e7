"""A worker's open requests, as this frontend knows them: who hears what comes."""

from __future__ import annotations

from tokenwire.protocol.exchange import Exchange
from tokenwire.protocol.messages import Batch, Finished, JsonObject, Submit
from tokenwire.protocol.tokens import TOKEN_BYTES

from .reply import Reply

__all__ = ["OpenRequests"]


_MAX_SENT = 262_144
"""Prompt tokens behind which what was sent before counts half: some hundred requests."""


class _Open(Exchange):
    """An open request: its reply, and the order of what it got."""

    __slots__ = (
        "handover",
        "num_prompt_tokens",
        "num_seen",
        "num_uncached_tokens",
        "reply",
        "seen_at",
    )

    def __init__(
        self,
        reply: Reply,
        num_prompt_tokens: int,
        num_uncached_tokens: int,
        handover: JsonObject | None,
    ) -> None:
        super().__init__()
        self.reply = reply
        self.handover = handover
        self.num_prompt_tokens = num_prompt_tokens  # 0 once it has begun
        self.num_uncached_tokens = num_uncached_tokens  # of them, to be computed
        self.num_seen = 0  # tokens at the last look
        self.seen_at = 0.0  # when a look first found so many


class OpenRequests:
    """Requests that were sent to one worker and have not ended."""

    __slots__ = (
        "_num_sent",
        "_num_sent_uncached",
        "_open",
        "num_prompt_tokens",
        "num_uncached_tokens",
    )

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}
        self.num_prompt_tokens = 0  # of those that have not begun
        self.num_uncached_tokens = 0  # of these, what the worker has to compute
        self._num_sent = 0  # prompt tokens of late
        self._num_sent_uncached = 0  # of these, what it had to compute

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    @property
    def under_way(self) -> bool:
        """Whether one of them has a token already."""
        return any(one.num_tokens for one in self._open.values())

    @property
    def reads_any(self) -> bool:
        """Whether one of them still has to read KV."""
        return any(
            one.handover is not None and not one.num_tokens
            for one in self._open.values()
        )

    def reads(self, handover: JsonObject) -> bool:
        """Return whether one of them still has to read this KV."""
        return any(
            one.handover == handover and not one.num_tokens
            for one in self._open.values()
        )

    def add(self, message: Submit, reply: Reply, num_cached_tokens: int = 0) -> None:
        """Add a request; *reply* hears of its end exactly once.

        Args:
            message: What was asked for.
            reply: Who hears what comes.
            num_cached_tokens: Of its ids, what the worker should have cached.
        """
        num_tokens = len(message.token_ids) // TOKEN_BYTES
        num_uncached = max(0, num_tokens - num_cached_tokens)
        entry = _Open(reply, num_tokens, num_uncached, message.handover)
        self._open[message.request_id] = entry
        self.num_prompt_tokens += num_tokens
        self.num_uncached_tokens += num_uncached
        self._num_sent += num_tokens
        self._num_sent_uncached += num_uncached
        if self._num_sent > _MAX_SENT:
            self._num_sent //= 2
            self._num_sent_uncached //= 2

    @property
    def uncached_share(self) -> float:
        """How much of the prompts that were sent there of late it had to compute."""
        return self._num_sent_uncached / self._num_sent if self._num_sent else 1.0

    def began(self, request_id: str) -> None:
        """Take note that a request has its first token: its prompt is computed."""
        entry = self._open.get(request_id)
        if entry is not None:
            self._uncount(entry)

    def _uncount(self, entry: _Open) -> None:
        self.num_prompt_tokens -= entry.num_prompt_tokens
        self.num_uncached_tokens -= entry.num_uncached_tokens
        entry.num_prompt_tokens = entry.num_uncached_tokens = 0

    def follow(self, request_id: str, reply: Reply, num_tokens: int) -> None:
        """Add a request that runs already and has brought *num_tokens* ids."""
        entry = self._open[request_id] = _Open(reply, 0, 0, None)
        entry.num_tokens = num_tokens

    def redirect(self, request_id: str, reply: Reply) -> None:
        """Have *reply* hear what comes of a request from now on, if it is open."""
        entry = self._open.get(request_id)
        if entry is not None:
            entry.reply = reply

    def forget(self, request_id: str) -> None:
        """Drop a request; its reply hears nothing."""
        self._uncount(self._open.pop(request_id))

    def take(self, batch: Batch) -> None:
        """Pass on what the worker sent.

        Raises:
            SequenceError: Tokens repeat, leave a gap, or follow their end.
        """
        ends: dict[str, Finished] = {}
        if batch.finished:
            ends = {end.request_id: end for end in batch.finished}
        for item in batch.tokens:
            entry = self._open.get(item.request_id)
            if entry is None:
                continue  # ended here by a loss; the worker has not heard yet
            entry.tokens(item)
            end = ends.get(item.request_id) if ends else None
            if end is not None:
                # Two steps of one request may be in a Batch: the end is the last one's.
                if end.num_output_tokens == entry.num_tokens:
                    entry.finished(end)
                    self.forget(item.request_id)
                    del ends[item.request_id]
                else:
                    end = None
            entry.reply.tokens(item, end)
        if not ends:
            return
        for end in ends.values():
            entry = self._open.get(end.request_id)
            if entry is not None:
                entry.finished(end)
                self.forget(end.request_id)
                entry.reply.finished(end)

    def take_stuck(self, now: float, timeout_s: float) -> dict[str, Reply]:
        """Return those under way that got nothing for so long; they are dropped.

        An engine may forget one of its requests and go on with the others. Those without
        a token are not looked at: they may wait in its queue.
        """
        stuck: dict[str, Reply] = {}
        for request_id, entry in self._open.items():
            num_tokens = entry.num_tokens
            if num_tokens != entry.num_seen:
                entry.num_seen, entry.seen_at = num_tokens, now
            elif num_tokens and now - entry.seen_at > timeout_s:
                stuck[request_id] = entry.reply
        for request_id in stuck:
            self.forget(request_id)
        return stuck

    def look_anew(self, now: float) -> None:
        """Let the time before *now* not count: nobody has listened."""
        for entry in self._open.values():
            entry.seen_at = now

    def lose_all(self, reason: str) -> None:
        """End all as lost; a reply may open a request elsewhere at once."""
        opened, self._open = self._open, {}
        self.num_prompt_tokens = self.num_uncached_tokens = 0
        for entry in opened.values():
            entry.reply.lost(reason)
