"""Which workers a sequence goes to: who can serve it, then where it costs least."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from tokenwire.protocol.errors import Incompatible
from tokenwire.protocol.handshake import check_pair
from tokenwire.protocol.messages import Role

from .cached import Holdings
from .chooser import Chooser
from .continuation import meets
from .disaggregation import PrefillPlace, RemotePrefill
from .errors import ApiError
from .job import Cached
from .kv_index import KvIndex
from .link import Link
from .prefixes import Chain
from .weights import Weights

__all__ = ["Needs", "Route", "Router"]

_log = logging.getLogger(__name__)


class Route(msgspec.Struct, frozen=True):
    """Where a sequence goes: through ``prefill`` first, unless there is none."""

    decode: Link  # a decode worker, or an aggregated one
    prefill: Link | None = None
    place: PrefillPlace = PrefillPlace.REMOTE
    num_cached: int = 0  # tokens that who computes the prompt should have cached


class Needs(msgspec.Struct, frozen=True):
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
        index: Who has which blocks cached.
        chooser: How to choose among those that can.
        remote_prefill: When a prefill worker is worth its hand-over.
    """

    def __init__(
        self,
        *,
        usable: Callable[[Role], list[Link]],
        check_adapter: Callable[[str], None],
        no_worker: Callable[[], ApiError],
        weights: Weights,
        index: KvIndex,
        chooser: Chooser,
        remote_prefill: RemotePrefill,
    ) -> None:
        self._usable = usable
        self._check_adapter = check_adapter
        self._no_worker = no_worker
        self._weights = weights
        self._index = index
        self._chooser = chooser
        self._remote_prefill = remote_prefill

    def route(
        self, packed: bytes, chain: Chain, exclude: frozenset[Link], needs: Needs
    ) -> Route:
        """Return where to send a sequence.

        Args:
            packed: Its ids so far, (num_tokens,) packed.
            chain: The same as hashes; extended here if they are needed.
            exclude: Who must not get it.
            needs: What it asks of them.

        Raises:
            ApiError: 503: no worker can take it; 404: the adapter was unloaded.
        """
        if needs.lora:
            self._check_adapter(needs.lora)
        held = self._holdings(packed, chain, needs)
        if needs.captures:
            route = self._capturing(exclude, needs, held)
            if route is not None:
                return route
            if exclude and self._capturing(frozenset(), needs, held):
                # Who saves them has failed: an answer without them would hide that.
                raise self._no_worker()
        outputs = self._outputs(exclude, needs)
        decode = self._chooser.output(outputs, held, needs.session_id)
        if decode is None:
            raise self._no_worker()
        num_cached = held.num_cached(decode)
        if decode.card is not None and decode.card.role is Role.AGGREGATED:
            return Route(decode, None, PrefillPlace.AGGREGATED, num_cached)
        prefill = self._prefill(
            [link for link in self._prefillers(exclude) if _fit(link, decode)],
            needs,
            held,
        )
        place = self._remote_prefill.place(
            num_tokens=held.num_tokens,
            num_cached_tokens=num_cached,
            num_queued_tokens=None if prefill is None else prefill.num_queued_tokens,
        )
        if prefill is None or place is not PrefillPlace.REMOTE:
            return Route(decode, None, place, num_cached)
        return Route(decode, prefill, place, held.num_cached(prefill))

    def decode_for(
        self,
        prefill: Link,
        packed: bytes,
        chain: Chain,
        exclude: frozenset[Link],
        needs: Needs,
    ) -> Link | None:
        """Return who goes on with what *prefill* has computed; None: nobody can.

        Asked when the prefill leg has ended: what was the least busy worker when it
        began has got other hand-overs since. The arguments are ``route``'s.
        """
        decoders = [one for one in self._decoders(exclude) if _fit(prefill, one)]
        able = self._fit_for(needs, decoders)
        held = self._holdings(packed, chain, needs)
        return self._chooser.output(able, held, needs.session_id)

    def _holdings(self, packed: bytes, chain: Chain, needs: Needs) -> Holdings:
        return Holdings(
            self._index, packed, chain, needs.cached, has_output=needs.has_output
        )

    def _capturing(
        self, exclude: frozenset[Link], needs: Needs, held: Holdings
    ) -> Route | None:
        """Return a route by which the prompt's hidden states are saved, if any."""
        outputs = [link for link in self._outputs(exclude, needs) if link.captures]
        decode = self._chooser.output(outputs, held, needs.session_id)
        if decode is not None:
            num_cached = held.num_cached(decode)
            return Route(decode, None, PrefillPlace.AGGREGATED, num_cached)
        decoders = self._fit_for(needs, self._decoders(exclude))
        prefill = self._prefill(
            [
                link
                for link in self._prefillers(exclude)
                if link.captures and any(_fit(link, one) for one in decoders)
            ],
            needs,
            held,
        )
        if prefill is None:
            return None
        fitting = [one for one in decoders if _fit(prefill, one)]
        decode = self._chooser.output(fitting, held, needs.session_id)
        if decode is None:
            return None
        return Route(decode, prefill, num_cached=held.num_cached(prefill))

    def _prefill(
        self, candidates: list[Link], needs: Needs, held: Holdings
    ) -> Link | None:
        able = self._able(needs, candidates)
        most = self._remote_prefill.max_queued_tokens
        return self._chooser.prefill(able, held, needs.session_id, most)

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


def _fit(prefill: Link, decode: Link) -> bool:
    if prefill.card is None or decode.card is None:
        return False
    try:
        check_pair(prefill.card, decode.card)
    except Incompatible as error:
        _log.debug("%s", error)
        return False
    return True
