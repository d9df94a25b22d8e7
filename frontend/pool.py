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
from tokenwire.protocol.handshake import check_card, check_layers
from tokenwire.protocol.limits import HEARTBEAT_TIMEOUT_S
from tokenwire.protocol.messages import (
    JOURNAL,
    Card,
    JsonObject,
    OrphanedKV,
    ReleaseKV,
    Role,
)

from .chooser import MANY, Chooser
from .continuation import meets
from .dealer import open_context
from .disaggregation import RemotePrefill
from .errors import ApiError, no_such_model, unavailable
from .flows import Flows
from .keyring import LOOPBACK_ONLY, Keyring
from .kv_index import KvIndex
from .link import TICK_S, Link, LinkState
from .router import Router
from .routing_settings import RoutingSettings
from .stall import FIRST_TOKEN_TIMEOUT_S, STALL_TIMEOUT_S
from .weights import Weights

__all__ = ["WORKER_WAIT_S", "Instance", "Pool"]

WORKER_WAIT_S = 10.0
"""How long a request that was accepted waits for a worker when all have failed: a
restart behind a supervisor takes seconds where weights are cached; longer, and its
client had better hear of it."""

MAX_WORKERS = 2_048
"""Each takes three ZeroMQ sockets, and 0.3 ms a second for its heartbeats."""

LOOK_S = 0.02
"""Between two looks at all of many workers: a look at a thousand takes milliseconds."""

MAX_UNRELEASED = 4_096
"""Releases that wait for a decode worker: as many as requests are served at once; the
oldest go first, since their lease is over first."""

_log = logging.getLogger(__name__)


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
    exactness: str = ""
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
        routing: RoutingSettings | None = None,
        keyring: Keyring = LOOPBACK_ONLY,
    ) -> None:
        self.model = model
        self.frontend_id = frontend_id
        self.incarnation = secrets.token_hex(4)
        self._tokenizer_sha256 = tokenizer_sha256
        self.wait_s = wait_s
        self._keyring = keyring
        self._stall_timeout_s = stall_timeout_s
        self._first_token_timeout_s = first_token_timeout_s
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._unreleased = _no_releases()  # for want of a decode worker
        self._waiting: dict[Callable[[], None], None] = {}  # in order of arrival
        self._context = open_context()
        self._links: dict[str, Link] = {}
        self._usable: dict[Role, list[Link]] = {}  # by role, when it was last looked at
        self._looked_at = 0.0
        self.weights = Weights()
        """Which weights count, and the adapters that are served."""
        routing = routing or RoutingSettings()
        self._policy = routing.policy
        self.index = KvIndex(routing.max_index_blocks)
        """Which blocks they have cached."""
        self.flows: Flows | None = None
        """Counts what goes where, while somebody watches."""
        self.is_paused = False
        """Whether a worker is paused: then nothing new is begun at any of them."""
        self.router = Router(
            usable=self.usable,
            check_adapter=self.check_adapter,
            no_worker=self.no_worker,
            weights=self.weights,
            index=self.index,
            chooser=Chooser(routing.policy, routing.weights),
            remote_prefill=remote_prefill or RemotePrefill(),
        )

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
                    index=self.index,
                    policy=self._policy,
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
            self.index.expire(asyncio.get_running_loop().time())
            self.index.sweep()
            await asyncio.sleep(TICK_S)

    def close(self) -> None:
        """Leave every worker."""
        for link in self._links.values():
            link.close("the frontend stops")
        self._links.clear()
        self._context.term()

    def usable(self, role: Role) -> list[Link]:
        """Return the workers of *role* that take requests; not to be changed."""
        if len(self._links) <= MANY:
            return self._usable_now(role)
        # One that is gone since refuses what it is sent, and the next is tried.
        now = asyncio.get_running_loop().time()
        if now - self._looked_at > LOOK_S:
            self._looked_at, self._usable = now, {}
        found = self._usable.get(role)
        if found is None:
            found = self._usable[role] = self._usable_now(role)
        return found

    def _usable_now(self, role: Role) -> list[Link]:
        return [
            link
            for link in self._links.values()
            if link.card is not None and link.card.role is role and link.usable
        ]

    @property
    def ready(self) -> bool:
        """Whether a request could be served now."""
        return bool(self.usable(Role.AGGREGATED) or self.usable(Role.DECODE))

    def offers(self, exactness: str) -> bool:
        """Return whether some worker that is known, if not now, is as exact."""
        return not exactness or any(
            meets(link.exactness, exactness)
            for link in self._links.values()
            if link.card is not None and link.card.role is not Role.PREFILL
        )

    @property
    def max_model_len(self) -> int | None:
        """The smallest context length in use; None without a worker."""
        lengths = [
            link.card.max_model_len
            for link in self._links.values()
            if link.state is LinkState.READY and link.card is not None
        ]
        return min(lengths, default=None)

    @property
    def block_sizes(self) -> set[int]:
        """Ids in a block, of the workers that tell of their blocks."""
        return {
            link.card.block_size
            for link in self._links.values()
            if link.blocks is not None and link.card is not None
        }

    @property
    def keeps(self) -> bool:
        """Whether a worker of outputs keeps what it generates, unless there is none.

        That is a matter of now, and told as such to who needs one.
        """
        roles = (Role.AGGREGATED, Role.DECODE)
        links = [link for role in roles for link in self.usable(role)]
        return not links or any(link.can(JOURNAL) for link in links)

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
                exactness=link.exactness,
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
