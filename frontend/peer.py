"""One worker as it has described itself: its Card, its Loads, its Status; no I/O."""

from __future__ import annotations

from tokenwire.protocol.admin import update_of
from tokenwire.protocol.blocks import unpack_hashes
from tokenwire.protocol.messages import (
    CAPTURE,
    KV_EVENTS,
    STATUS,
    Card,
    KVBlocks,
    Load,
    Role,
    Status,
)

from .kv_index import KvIndex, Member
from .prefixes import CHUNK_TOKENS, MAX_CHUNKS, Chain, Prefixes
from .routing import Policy

__all__ = ["Peer"]


class Peer:
    """What is known of the worker at *endpoint*.

    Args:
        endpoint: Where it listens, ``tcp://host:port``.
        index: Where it is noted what it has cached; None: nowhere.
        policy: How workers are chosen: only where that asks what is cached, or the
            place of the prefill depends on it, the worker is asked, too.
    """

    def __init__(
        self,
        endpoint: str,
        index: KvIndex | None = None,
        policy: Policy = Policy.KV,
    ) -> None:
        self.endpoint = endpoint
        self._index = index
        self._policy = policy
        self.card: Card | None = None
        self.load = Load("")
        self.status = Status()  # what Admins have made of it
        self.awaits_status = False  # which follows the card
        self.is_outdated = False  # others have newer weights
        self.is_leaving = False  # has left the list; what it runs may end
        self.blocks: Member | None = None  # what it has told of its cache
        self.prefixes: Prefixes | None = None  # what may be there, if it tells nothing
        self.num_open_at_load = 0  # requests of this frontend when it came
        self._num_tokens_at_load = 0  # of their prompts
        self.weight_version: str | None = None  # of its weights, once it is known

    @property
    def worker_id(self) -> str:
        """The worker's own name, or its address while that is unknown."""
        return self.card.worker_id if self.card is not None else self.endpoint

    @property
    def stands(self) -> bool:
        """Whether its engine makes no steps, on purpose."""
        return self.status.paused or bool(self.status.busy)

    @property
    def objection(self) -> str:
        """Why it should get nothing new, for the operator; empty: nothing is known."""
        if self.is_leaving:
            return "has left the list"
        if self.load.draining:
            return "is stopping"
        if self.status.fault:
            return f"serves nobody: {self.status.fault}"
        if self.is_outdated:
            return (
                f"has the weights {self.status.weight_version!r}, which are older than "
                "others': update the weights again"
            )
        return ""

    @property
    def captures(self) -> bool:
        """Whether the worker saves hidden states."""
        return self.can(CAPTURE)

    @property
    def exactness(self) -> str:
        """How output goes on there, see ``Card``; empty: as a plain prompt."""
        return self.card.exactness if self.card is not None else ""

    @property
    def num_others_tokens(self) -> int:
        """Prompt tokens of other frontends that waited there when its Load came."""
        return max(0, self.load.num_waiting_tokens - self._num_tokens_at_load)

    def can(self, capability: str) -> bool:
        """Return whether its card names *capability*."""
        return self.card is not None and capability in self.card.capabilities

    def update_of(self, lora: str) -> int | None:
        """Return which update a request's weights would be of; None: of none here."""
        return update_of(self.status, lora)

    def told_card(self, card: Card) -> None:
        """Take a card, with which all else begins anew."""
        known, self.card = self.card, card
        self.load = Load(card.incarnation)
        # A blank Status would take its adapters away, and its pause, for a moment.
        self.awaits_status = STATUS in card.capabilities
        if known is None or known.incarnation != card.incarnation:
            self.status = Status(card.weight_version)
        self.forget_blocks()
        # By what a decode worker has, every policy decides where the prompt is computed.
        matters = self._policy is Policy.KV or card.role is Role.DECODE
        # Blocks of nothing are no prefix's.
        tells = KV_EVENTS in card.capabilities and card.block_size > 0
        if self._index is not None and matters and tells:
            self.blocks = self._index.join()
        self.weight_version = self.status.weight_version
        room = card.num_kv_blocks * card.block_size // CHUNK_TOKENS
        num_chunks = min(room or MAX_CHUNKS, MAX_CHUNKS)
        self.prefixes = Prefixes(num_chunks) if matters else None
        self.num_open_at_load = self._num_tokens_at_load = 0

    def forget_blocks(self) -> None:
        """Let nothing that it has told of its cache count any more."""
        if self.blocks is not None:
            self.blocks.leave()
            self.blocks = None

    def told_blocks(self, message: KVBlocks) -> None:
        """Take what has changed in its cache."""
        if self.blocks is None:
            return
        if message.reset:
            self.blocks.cleared()
        if message.removed:
            self.blocks.removed(unpack_hashes(message.removed))
        if message.stored:
            self.blocks.stored(unpack_hashes(message.stored))

    def promised(self, chain: Chain, packed: bytes, now: float) -> None:
        """Take note that it was sent a sequence: it counts before the worker tells.

        Args:
            chain: Its hashes.
            packed: Its ids.
            now: This process's clock, in s.
        """
        if self.blocks is not None and self.card is not None:
            self.blocks.promised(chain.blocks(self.card.block_size, packed), now)

    def told_status(self, status: Status) -> None:
        """Take a Status."""
        self.awaits_status = False
        is_emptied = status.cache_epoch != self.status.cache_epoch
        if is_emptied and self.prefixes is not None:
            self.prefixes.forget()
        self.status = status
        self.weight_version = status.weight_version

    def told_load(self, load: Load, num_open: int, num_prompt_tokens: int) -> None:
        """Take a Load.

        Args:
            load: Of the card's incarnation.
            num_open: Requests of this frontend there.
            num_prompt_tokens: Of those that have no token yet.
        """
        self.load = load
        self.num_open_at_load = num_open
        self._num_tokens_at_load = num_prompt_tokens
