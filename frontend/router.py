"""Which workers a sequence goes to: who can serve it, then who has the least to do."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from tokenwire.protocol.errors import Incompatible
from tokenwire.protocol.handshake import check_pair
from tokenwire.protocol.messages import Role
from tokenwire.protocol.tokens import TOKEN_BYTES

from .affinity import choose, choose_prefill
from .continuation import meets
from .disaggregation import PrefillPlace, RemotePrefill
from .errors import ApiError
from .job import Cached
from .link import Link
from .prefixes import CHUNK_TOKENS, Chain
from .weights import Weights

__all__ = ["Needs", "Route", "Router"]

_log = logging.getLogger(__name__)


class Route(msgspec.Struct, frozen=True):
    """Where a sequence goes: through ``prefill`` first, unless there is none."""

    decode: Link  # a decode worker, or an aggregated one
    prefill: Link | None = None
    place: PrefillPlace = PrefillPlace.REMOTE


@dataclass(slots=True, frozen=True)
class Needs:
    """What a sequence asks of its workers."""

    session_id: str | None = None  # whose earlier requests' workers are preferred
    lora: str = ""  # the adapter; empty: the model itself
    captures: bool = False  # hidden states are to be saved, if that is anywhere
    exactness: str = ""  # it goes on behind output: only as exactly, see ``Card``
    prefers_exact: bool = False  # the same, where a worker is exact at all
    has_output: bool = False  # somebody has computed what it goes on behind
    cached: tuple[Cached, ...] = ()  # who, as far as that was said


class Router:
    """Chooses among the links that can be used now.

    Args:
        usable: Returns the workers of a role that take requests.
        check_adapter: Raises if nobody has an adapter.
        no_worker: Returns the error that says what is wrong with each worker.
        weights: Who has which adapter.
        remote_prefill: When a prefill worker is worth its hand-over.
    """

    def __init__(
        self,
        *,
        usable: Callable[[Role], list[Link]],
        check_adapter: Callable[[str], None],
        no_worker: Callable[[], ApiError],
        weights: Weights,
        remote_prefill: RemotePrefill,
    ) -> None:
        self._usable = usable
        self._check_adapter = check_adapter
        self._no_worker = no_worker
        self._weights = weights
        self._remote_prefill = remote_prefill

    def route(
        self, packed: bytes, chain: Chain, exclude: frozenset[Link], needs: Needs
    ) -> Route:
        """Return where to send a sequence.

        Args:
            packed: Its ids so far, (num_tokens,) packed.
            chain: The same as prefixes; extended here if they are needed.
            exclude: Who must not get it.
            needs: What it asks of them.

        Raises:
            ApiError: 503: no worker can take it; 404: the adapter was unloaded.
        """
        if needs.lora:
            self._check_adapter(needs.lora)
        num_tokens = len(packed) // TOKEN_BYTES
        if needs.captures:
            route = self._capturing(exclude, needs, num_tokens)
            if route is not None:
                return route
            if exclude and self._capturing(frozenset(), needs, num_tokens):
                # Who saves them has failed: an answer without them would hide that.
                raise self._no_worker()
        outputs = self._outputs(exclude, needs)
        if needs.has_output:
            chain.extend(packed)
        holder, num_held = _holder(outputs, needs, num_tokens, chain)
        decode = choose(outputs, needs.session_id, holder)
        if decode is None:
            raise self._no_worker()
        if decode.card is not None and decode.card.role is Role.AGGREGATED:
            return Route(decode, place=PrefillPlace.AGGREGATED)
        prefill = self._prefill(
            [link for link in self._prefillers(exclude) if _fit(link, decode)],
            needs,
            num_tokens,
        )
        chain.extend(packed)
        num_cached = decode.prefixes.num_cached_tokens(chain)
        place = self._remote_prefill.place(
            num_tokens=num_tokens,
            num_cached_tokens=num_held if decode is holder else num_cached,
            num_queued_tokens=None if prefill is None else prefill.num_queued_tokens,
        )
        is_remote = place is PrefillPlace.REMOTE
        return Route(decode, prefill if is_remote else None, place)

    def decode_for(
        self, prefill: Link, exclude: frozenset[Link], needs: Needs
    ) -> Link | None:
        """Return who goes on with what *prefill* has computed; None: nobody can.

        Asked when the prefill leg has ended: what was the least busy worker when it
        began has got other hand-overs since.
        """
        decoders = [one for one in self._decoders(exclude) if _fit(prefill, one)]
        able = self._fit_for(needs, decoders)
        return choose(able, needs.session_id, _named(able, needs)[0])

    def _capturing(
        self, exclude: frozenset[Link], needs: Needs, num_tokens: int
    ) -> Route | None:
        """Return a route by which the prompt's hidden states are saved, if any."""
        outputs = [link for link in self._outputs(exclude, needs) if link.captures]
        decode = choose(outputs, needs.session_id)
        if decode is not None:
            return Route(decode, place=PrefillPlace.AGGREGATED)
        decoders = self._fit_for(needs, self._decoders(exclude))
        prefill = self._prefill(
            [
                link
                for link in self._prefillers(exclude)
                if link.captures and any(_fit(link, one) for one in decoders)
            ],
            needs,
            num_tokens,
        )
        if prefill is None:
            return None
        fitting = [one for one in decoders if _fit(prefill, one)]
        decode = choose(fitting, needs.session_id)
        return None if decode is None else Route(decode, prefill)

    def _prefill(
        self, candidates: list[Link], needs: Needs, num_tokens: int
    ) -> Link | None:
        able = self._able(needs, candidates)
        return choose_prefill(
            able,
            needs.session_id,
            num_tokens,
            self._remote_prefill.max_queued_tokens,
            *_named(able, needs),
        )

    def _outputs(self, exclude: frozenset[Link], needs: Needs) -> list[Link]:
        aggregated = self._usable(Role.AGGREGATED)
        everyone = (*aggregated, *self._usable(Role.DECODE))
        return self._fit_for(needs, [one for one in everyone if one not in exclude])

    def _decoders(self, exclude: frozenset[Link]) -> list[Link]:
        return [one for one in self._usable(Role.DECODE) if one not in exclude]

    def _prefillers(self, exclude: frozenset[Link]) -> list[Link]:
        return [one for one in self._usable(Role.PREFILL) if one not in exclude]

    def _fit_for(self, needs: Needs, links: list[Link]) -> list[Link]:
        """Return who may bring the output."""
        able = self._able(needs, links)
        if needs.exactness:
            return [link for link in able if meets(link.exactness, needs.exactness)]
        exact = [link for link in able if link.exactness] if needs.prefers_exact else []
        return exact or able

    def _able(self, needs: Needs, links: list[Link]) -> list[Link]:
        """Return who has the adapter; those that make steps, if any does."""
        able = [link for link in links if self._weights.has(link, needs.lora)]
        return [link for link in able if not link.stands] or able


def _holder(
    links: list[Link], needs: Needs, num_tokens: int, chain: Chain
) -> tuple[Link | None, int]:
    """Return who has most of what a sequence goes on behind, and how many tokens.

    Who was named has all that was said. Of the others it is known by whole chunks: who
    has all of these has the rest of the sequence, too, or nearly.
    """
    link, num_held = _named(links, needs)
    if link is not None or not needs.has_output:
        return link, num_held
    for one in links:
        num_cached = one.prefixes.num_cached_tokens(chain)
        if num_cached > num_held:
            link, num_held = one, num_cached
    is_all = num_held and num_tokens - num_held < CHUNK_TOKENS
    return link, num_tokens if is_all else num_held


def _named(links: list[Link], needs: Needs) -> tuple[Link | None, int]:
    """Return who is said to have the beginning of a sequence, and how many tokens."""
    for cached in needs.cached:
        for link in links:
            card = link.card
            if card is not None and (card.worker_id, card.incarnation) == (
                cached.worker_id,
                cached.incarnation,
            ):
                return link, cached.num_tokens
    return None, 0


def _fit(prefill: Link, decode: Link) -> bool:
    if prefill.card is None or decode.card is None:
        return False
    try:
        check_pair(prefill.card, decode.card)
    except Incompatible as error:
        _log.debug("%s", error)
        return False
    return True
