"""The workers this frontend knows, kept in step with what discovery finds."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

import msgspec

from tokenwire.protocol.errors import Incompatible
from tokenwire.protocol.handshake import check_card, check_layers, check_pair
from tokenwire.protocol.limits import HEARTBEAT_TIMEOUT_S
from tokenwire.protocol.messages import Card, JsonObject, OrphanedKV, ReleaseKV, Role
from tokenwire.protocol.tokens import TOKEN_BYTES

from .affinity import choose, choose_prefill
from .dealer import open_context
from .disaggregation import PrefillPlace, RemotePrefill
from .errors import ApiError, no_such_model, unavailable
from .keyring import LOOPBACK_ONLY, Keyring
from .link import TICK_S, Link, LinkState
from .prefixes import Chain
from .stall import FIRST_TOKEN_TIMEOUT_S, STALL_TIMEOUT_S
from .weights import Weights

__all__ = ["WORKER_WAIT_S", "Instance", "Pool", "Route"]

WORKER_WAIT_S = 10.0
"""How long a request that was accepted waits for a worker when all have failed: a
restart behind a supervisor takes seconds where weights are cached; longer, and its
client had better hear of it."""

MAX_WORKERS = 2_048
"""Each takes three ZeroMQ sockets, and 0.3 ms a second for its heartbeats."""

MAX_UNRELEASED = 4_096
"""Releases that wait for a decode worker: as many as requests are served at once; the
oldest go first, since their lease is over first."""

_log = logging.getLogger(__name__)


class Route(msgspec.Struct, frozen=True):
    """Where a request goes: through ``prefill`` first, unless there is none."""

    decode: Link  # a decode worker, or an aggregated one
    prefill: Link | None = None
    place: PrefillPlace = PrefillPlace.REMOTE


class Instance(msgspec.Struct, omit_defaults=True):
    """One worker as ``/health`` shows it."""

    endpoint: str
    state: str
    worker_id: str = ""
    role: str = ""
    reason: str = ""
    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    draining: bool = False
    leaving: bool = False
    num_open: int = 0
    weight_version: str = ""
    adapters: list[str] = []
    paused: bool = False
    sleeping: bool = False
    busy: str = ""  # the admin action under way


class Pool:
    """Links to all workers, and the choice among them."""

    def __init__(
        self,
        *,
        model: str,
        tokenizer_sha256: str,
        frontend_id: str,
        heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S,
        stall_timeout_s: float = STALL_TIMEOUT_S,
        first_token_timeout_s: float = FIRST_TOKEN_TIMEOUT_S,
        wait_s: float = WORKER_WAIT_S,
        remote_prefill: RemotePrefill | None = None,
        keyring: Keyring = LOOPBACK_ONLY,
    ) -> None:
        self.model = model
        self.frontend_id = frontend_id
        self.incarnation = secrets.token_hex(4)
        self._tokenizer_sha256 = tokenizer_sha256
        self.wait_s = wait_s
        self._remote_prefill = remote_prefill or RemotePrefill()
        self._keyring = keyring
        self._stall_timeout_s = stall_timeout_s
        self._first_token_timeout_s = first_token_timeout_s
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._unreleased = _no_releases()  # for want of a decode worker
        self._waiting: dict[Callable[[], None], None] = {}  # in order of arrival
        self._context = open_context()
        self._links: dict[str, Link] = {}
        self.weights = Weights()
        """Which weights count, and the adapters that are served."""
        self.is_paused = False
        """Whether a worker is paused: then nothing new is begun at any of them."""

    @property
    def links(self) -> Iterable[Link]:
        """Every link, usable or not."""
        return self._links.values()

    def set_endpoints(self, endpoints: Iterable[str]) -> None:
        """Connect to what is new; give what is gone nothing more to do.

        A worker that has left the list may still run requests: a pod that is being
        stopped leaves its service's name first, and then drains.
        """
        wanted = dict.fromkeys(endpoints)
        if len(wanted) > MAX_WORKERS:
            _log.error("%d workers, of which %d are used", len(wanted), MAX_WORKERS)
            wanted = dict.fromkeys(list(wanted)[:MAX_WORKERS])
        for endpoint, link in self._links.items():
            is_leaving = endpoint not in wanted
            if link.is_leaving is not is_leaving:
                link.is_leaving = is_leaving
                text = "has left the list" if is_leaving else "is in the list again"
                _log.info("worker at %s %s", endpoint, text)
        self._drop_left()
        self._take_stock()
        for endpoint in wanted:
            if endpoint not in self._links:
                self._links[endpoint] = Link(
                    endpoint,
                    context=self._context,
                    identity=(self.frontend_id, self.incarnation),
                    accept=partial(self._accept, endpoint),
                    keyring=self._keyring,
                    heartbeat_timeout_s=self._heartbeat_timeout_s,
                    stall_timeout_s=self._stall_timeout_s,
                    first_token_timeout_s=self._first_token_timeout_s,
                    on_ready=self._wake,
                    on_lost=self._lost,
                    on_status=self._take_stock,
                    on_orphan=self._adopt,
                )

    async def run(self) -> None:
        """Keep the links alive; runs until cancelled."""
        while True:
            for link in list(self._links.values()):
                link.tick()
            self._drop_left()
            await asyncio.sleep(TICK_S)

    def close(self) -> None:
        """Leave every worker."""
        for link in self._links.values():
            link.close("the frontend stops")
        self._links.clear()
        self._context.term()

    def usable(self, role: Role) -> list[Link]:
        """Return the workers of *role* that take requests."""
        return [
            link
            for link in self._links.values()
            if link.usable and link.card is not None and link.card.role is role
        ]

    @property
    def ready(self) -> bool:
        """Whether a request could be served now."""
        return bool(self.usable(Role.AGGREGATED) or self.usable(Role.DECODE))

    @property
    def max_model_len(self) -> int | None:
        """The smallest context length in use; None without a worker."""
        lengths = [
            link.card.max_model_len
            for link in self._links.values()
            if link.state is LinkState.READY and link.card is not None
        ]
        return min(lengths, default=None)

    def route(
        self,
        packed: bytes,
        chain: Chain,
        exclude: frozenset[Link],
        session_id: str | None = None,
        lora: str = "",
        *,
        captures: bool = False,
    ) -> Route:
        """Return where to send a request.

        Args:
            packed: The prompt's ids, (num_tokens,) packed.
            chain: The same as prefixes; extended here if they are needed.
            exclude: Who must not get it.
            session_id: Whose earlier requests' workers are preferred.
            lora: The adapter that it is for; empty: the model itself.
            captures: The prompt is to be computed where its hidden states are saved,
                if that is anywhere.

        Raises:
            ApiError: 503: no worker can take it; 404: the adapter was unloaded.
        """
        if lora:
            self.check_adapter(lora)
        num_tokens = len(packed) // TOKEN_BYTES
        if captures:
            route = self._capturing(exclude, session_id, lora, num_tokens)
            if route is not None:
                return route
            if exclude and self._capturing(frozenset(), session_id, lora, num_tokens):
                # Who saves them has failed: an answer without them would hide that.
                raise self.no_worker()
        decode = choose(self._fit_for(lora, self._outputs(exclude)), session_id)
        if decode is None:
            raise self.no_worker()
        if decode.card is not None and decode.card.role is Role.AGGREGATED:
            return Route(decode, place=PrefillPlace.AGGREGATED)
        prefill = choose_prefill(
            self._fit_for(
                lora,
                [
                    link
                    for link in self.usable(Role.PREFILL)
                    if link not in exclude and _fit(link, decode)
                ],
            ),
            session_id,
            num_tokens,
            self._remote_prefill.max_queued_tokens,
        )
        chain.extend(packed)
        place = self._remote_prefill.place(
            num_tokens=num_tokens,
            num_cached_tokens=decode.prefixes.num_cached_tokens(chain),
            num_queued_tokens=None if prefill is None else prefill.num_queued_tokens,
        )
        is_remote = place is PrefillPlace.REMOTE
        return Route(decode, prefill if is_remote else None, place)

    def check_adapter(self, lora: str) -> None:
        """Refuse an adapter that nobody has.

        Raises:
            ApiError: 404; 503 while a listed worker that had it is not connected.
        """
        if lora in self.weights.adapters:
            return
        for link in self._links.values():
            is_away = not link.is_ready and not link.is_leaving
            if is_away and link.update_of(lora) is not None:
                raise self.no_worker()
        raise no_such_model(lora, [self.model, *self.weights.adapters])

    def _capturing(
        self,
        exclude: frozenset[Link],
        session_id: str | None,
        lora: str,
        num_tokens: int,
    ) -> Route | None:
        """Return a route by which the prompt's hidden states are saved, if any."""
        outputs = [link for link in self._outputs(exclude) if link.captures]
        decode = choose(self._fit_for(lora, outputs), session_id)
        if decode is not None:
            return Route(decode, place=PrefillPlace.AGGREGATED)
        decoders = self._fit_for(
            lora, [one for one in self.usable(Role.DECODE) if one not in exclude]
        )
        prefill = choose_prefill(
            self._fit_for(
                lora,
                [
                    link
                    for link in self.usable(Role.PREFILL)
                    if link not in exclude
                    and link.captures
                    and any(_fit(link, one) for one in decoders)
                ],
            ),
            session_id,
            num_tokens,
            self._remote_prefill.max_queued_tokens,
        )
        if prefill is None:
            return None
        fitting = [one for one in decoders if _fit(prefill, one)]
        decode = choose(fitting, session_id)
        return None if decode is None else Route(decode, prefill)

    def decode_for(
        self,
        prefill: Link,
        exclude: frozenset[Link],
        session_id: str | None = None,
        lora: str = "",
    ) -> Link | None:
        """Return who goes on with what *prefill* has computed; None: nobody can.

        Asked when the prefill leg has ended: what was the least busy worker when it
        began has got other hand-overs since.
        """
        decoders = self.usable(Role.DECODE)
        fitting = [one for one in decoders if one not in exclude and _fit(prefill, one)]
        return choose(self._fit_for(lora, fitting), session_id)

    def _fit_for(self, lora: str, links: list[Link]) -> list[Link]:
        """Return who has the adapter; those that make steps, if any does."""
        fitting = [link for link in links if self.weights.has(link, lora)]
        return [link for link in fitting if not link.stands] or fitting

    def _outputs(self, exclude: frozenset[Link]) -> list[Link]:
        return [
            link
            for link in (*self.usable(Role.AGGREGATED), *self.usable(Role.DECODE))
            if link not in exclude
        ]

    def wait(self, resume: Callable[[], None]) -> None:
        """Have *resume* called once, when a worker that can serve becomes ready."""
        self._waiting[resume] = None

    def forget(self, resume: Callable[[], None]) -> None:
        """Take back a ``wait``."""
        self._waiting.pop(resume, None)

    def release_kv(self, request_id: str, handover: JsonObject) -> bool:
        """Have some decode worker free what a prefill worker holds."""
        message = ReleaseKV(request_id, handover)
        sent = self._send_release(message)
        if not sent:
            self._unreleased.append(message)
            _log.warning(
                "request %s: no decode worker to release its KV through; it waits for "
                "one, or for the end of the prefill worker's lease",
                request_id,
            )
        return sent

    def _send_release(self, message: ReleaseKV) -> bool:
        # One that takes no requests any more can still release.
        decoders = [
            link
            for link in self._links.values()
            if link.card is not None and link.card.role is Role.DECODE
        ]
        decoders.sort(key=lambda link: not link.usable)
        return any(link.release_kv(message) for link in decoders)

    def _adopt(self, orphan: OrphanedKV) -> bool:
        """Have KV released whose frontend is gone; return whether that is seen to."""
        if any(link.reads(orphan.handover) for link in self._links.values()):
            return True  # ours after all, and a decode leg is about to read it
        return self._send_release(ReleaseKV(orphan.request_id, orphan.handover))

    def instances(self) -> list[Instance]:
        """Return every worker, for the operator."""
        return [
            Instance(
                endpoint=link.endpoint,
                state=link.state.value,
                worker_id=link.card.worker_id if link.card else "",
                role=link.card.role.value if link.card else "",
                reason=link.obstacle,
                num_running=link.load.num_running,
                num_waiting=link.load.num_waiting,
                kv_usage=link.load.kv_usage,
                draining=link.load.draining,
                leaving=link.is_leaving,
                num_open=link.num_open,
                weight_version=link.weight_version or "",
                adapters=[adapter.name for adapter in link.status.adapters],
                paused=link.status.paused,
                sleeping=bool(link.status.sleep_level),
                busy=link.status.busy,
            )
            for link in self._links.values()
        ]

    def _wake(self) -> None:
        unreleased, self._unreleased = self._unreleased, _no_releases()
        for message in unreleased:
            self.release_kv(message.request_id, message.handover)
        if not self.ready:
            return
        waiting, self._waiting = self._waiting, {}
        for resume in waiting:
            resume()

    def _drop_left(self) -> None:
        """Close what has left the list, once nothing runs there."""
        for endpoint, link in list(self._links.items()):
            is_needed = link.state is LinkState.READY and link.num_open
            if link.is_leaving and not is_needed:
                del self._links[endpoint]
                link.close("the worker left the list")

    def _take_stock(self) -> None:
        """Judge all workers anew: one has other weights, or none any more."""
        self.weights.look(self._links.values())
        self.is_paused = any(
            link.is_ready
            and not link.is_leaving
            and not link.load.draining
            and link.status.paused
            for link in self._links.values()
        )
        self._wake()

    def _lost(self) -> None:
        """A name may be free, now that a worker is gone."""
        self._take_stock()
        for link in self._links.values():
            link.try_again()

    def _accept(self, endpoint: str, card: Card) -> None:
        check_card(card, model=self.model, tokenizer_sha256=self._tokenizer_sha256)
        for other in self._links.values():
            known = other.card
            if other.endpoint == endpoint or known is None:
                continue
            is_going = other.is_leaving or other.load.draining
            if other.state is not LinkState.READY or is_going:
                continue
            if known.worker_id == card.worker_id:
                raise Incompatible(_taken(card, known, other.endpoint))
            for prefill, decode in ((card, known), (known, card)):
                if prefill.role is Role.PREFILL and decode.role is Role.DECODE:
                    check_layers(prefill, decode)

    def no_worker(self) -> ApiError:
        """Return a 503 that says what is wrong with each worker."""
        reasons = [
            f"{link.worker_id}: {link.obstacle}"
            for link in self._links.values()
            if not link.usable
        ]
        if not self._links:
            reasons = ["none known"]
        elif not self.ready and self.usable(Role.PREFILL):
            reasons.insert(0, "only prefill workers are ready")
        elif self.ready:
            reasons.insert(0, "those that are ready have just failed this one")
        return unavailable(f"no worker can take requests now ({'; '.join(reasons)})")


def _taken(card: Card, known: Card, endpoint: str) -> str:
    """Return why a worker is not used besides the one that has its name."""
    if known.incarnation == card.incarnation:
        return f"worker {card.worker_id} is used already, by its address {endpoint}"
    return (
        f"another worker at {endpoint} has the name {card.worker_id} too: give each its "
        "own --worker-id"
    )


def _no_releases() -> deque[ReleaseKV]:
    return deque(maxlen=MAX_UNRELEASED)


def _fit(prefill: Link, decode: Link) -> bool:
    if prefill.card is None or decode.card is None:
        return False
    try:
        check_pair(prefill.card, decode.card)
    except Incompatible as error:
        _log.debug("%s", error)
        return False
    return True
