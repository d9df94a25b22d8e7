"""One DEALER to one worker: handshake, liveness, open requests; the only zmq here.

The socket is driven by its file descriptor, not by ``zmq.asyncio``, which costs a
task wake-up per message. The descriptor is edge-triggered: after every receive loop
and every send the socket's events must be looked at again.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import secrets
from collections.abc import Callable

import zmq
from zmq.utils.monitor import parse_monitor_message

from tokenwire.protocol.codec import decode_from_worker, encode
from tokenwire.protocol.errors import (
    Incompatible,
    ProtocolError,
    RemoteProtocolError,
    SequenceError,
)
from tokenwire.protocol.limits import (
    HEARTBEAT_INTERVAL_S,
    HEARTBEAT_TIMEOUT_S,
    MAX_ERROR_CHARS,
    MAX_MESSAGE_BYTES,
    SEND_QUEUE_MESSAGES,
)
from tokenwire.protocol.liveness import Liveness
from tokenwire.protocol.messages import (
    PROTOCOL_VERSION,
    Batch,
    Bye,
    Cancel,
    Card,
    EngineDead,
    FromFrontend,
    FromWorker,
    Hello,
    Load,
    Ping,
    Refused,
    ReleaseKV,
    Submit,
)
from tokenwire.protocol.numbering import Incoming, Outgoing

from .opened import OpenRequests
from .prefixes import CHUNK_TOKENS, MAX_CHUNKS, Prefixes
from .reply import Reply
from .stall import FIRST_TOKEN_TIMEOUT_S, STALL_TIMEOUT_S, SUSPECT_S, Stall

__all__ = ["TICK_S", "Link", "LinkState", "open_context"]

_log = logging.getLogger(__name__)

LINGER_MS = 200
"""What a closing socket may still send: the Bye, not the backlog of a dead peer."""

RECONNECT_MS = (100, 2_000)
"""First and longest pause between connection attempts; a restarted worker is seen
within 2 s."""

HELLO_AGAIN_S = 10.0
"""After a refusal; an operator may have fixed the worker behind this address."""

MAX_READS_PER_WAKE = 64
"""Messages taken before other callbacks run: keeps the loop fair under a flood."""

MAX_SOCKETS = 8_192
"""Three per worker (its DEALER and the monitor's pair): over 2,000 workers."""

_MONITORED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


def open_context() -> zmq.Context[zmq.Socket[bytes]]:
    """Return the process's ZeroMQ context; make it after any fork."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.max_sockets = MAX_SOCKETS
    return context


class LinkState(enum.Enum):
    """Where a link is in its life."""

    CONNECTING = "connecting"
    HELLO = "hello"  # sent; waiting for the card
    READY = "ready"
    REFUSED = "refused"
    CLOSED = "closed"


class Link:
    """A connection to one worker; reconnects for ever, and says when it is ready.

    Args:
        endpoint: Where the worker listens, ``tcp://host:port``.
        context: The process's ZeroMQ context.
        identity: This frontend's id and incarnation.
        accept: Checks a card; raises ``Incompatible`` with a sentence.
        heartbeat_timeout_s: Silence after which the worker is lost.
        stall_timeout_s: The least time without a token, while an output is under way,
            after which its engine counts as stalled; longer where steps are long.
        first_token_timeout_s: The same while no request has a token yet.
        on_ready: Called whenever it becomes ready.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        context: zmq.Context[zmq.Socket[bytes]],
        identity: tuple[str, str],
        accept: Callable[[Card], None],
        heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S,
        stall_timeout_s: float = STALL_TIMEOUT_S,
        first_token_timeout_s: float = FIRST_TOKEN_TIMEOUT_S,
        on_ready: Callable[[], None] | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.state = LinkState.CONNECTING
        self.card: Card | None = None
        self.load = Load("")
        self.prefixes = Prefixes()  # what its engine may have cached
        self.reason = ""  # why it is not ready, for the operator
        self.num_protocol_errors = 0
        self._context = context
        self._frontend_id, self._incarnation = identity
        self._link_id = secrets.token_hex(4)
        self._accept = accept
        self._on_ready = on_ready
        self._stall = Stall(stall_timeout_s, first_token_timeout_s)
        self._suspect_until = 0.0
        self._open = OpenRequests()
        self._watchers: dict[Callable[[str], None], None] = {}
        self._loop = asyncio.get_running_loop()
        self._timeout_s = heartbeat_timeout_s
        self._liveness = Liveness(self._loop.time(), timeout_s=heartbeat_timeout_s)
        self._next_hello = 0.0
        self._num_cards_due = 0  # Hellos of this connection without a card
        self._incoming, self._outgoing = Incoming(), Outgoing()
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._connect()

    # --- what others use -----------------------------------------------------------

    @property
    def worker_id(self) -> str:
        """The worker's own name, or its address while that is unknown."""
        return self.card.worker_id if self.card is not None else self.endpoint

    @property
    def weight_version(self) -> str | None:
        """What the worker calls its weights; None while it is unknown."""
        return self.card.weight_version if self.card is not None else None

    @property
    def num_open(self) -> int:
        """Requests of this frontend that have not ended."""
        return len(self._open)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens that wait at a prefill worker, as far as is known.

        The worker's own count includes other frontends' but is up to a second old.
        """
        return max(self._open.num_prompt_tokens, self.load.num_waiting_tokens)

    @property
    def usable(self) -> bool:
        """Whether a request may be sent here."""
        return (
            self.state is LinkState.READY
            and not self.load.draining
            and self._loop.time() >= self._suspect_until
        )

    def submit(self, message: Submit, reply: Reply) -> None:
        """Send a request; *reply* hears of its end exactly once.

        Raises:
            MessageTooLarge: The request is above the limit; nothing was sent.
            ConnectionError: The worker cannot be reached; nothing was sent.
        """
        if self.state is not LinkState.READY:
            msg = f"worker {self.worker_id} is not connected ({self.state.value})"
            raise ConnectionError(msg)
        if not self._open:
            self._stall.begin(self._loop.time())
        self._open.add(message, reply)
        try:
            sent = self._send(message)
        except ProtocolError:
            self._open.forget(message.request_id)
            raise
        if not sent:
            self._open.forget(message.request_id)
            msg = f"worker {self.worker_id} does not take messages"
            raise ConnectionError(msg)

    def cancel(self, request_id: str) -> None:
        """Ask for a request's end; it still comes to its reply."""
        if request_id in self._open:
            self._send(Cancel(request_id))

    def release_kv(self, message: ReleaseKV) -> bool:
        """Pass a release on; returns whether it was sent."""
        return self.state is LinkState.READY and self._send(message)

    def watch(self, lost: Callable[[str], None]) -> None:
        """Have *lost* called with the reason, once, if the worker is lost."""
        self._watchers[lost] = None

    def unwatch(self, lost: Callable[[str], None]) -> None:
        """Take back a ``watch``, if there is one."""
        self._watchers.pop(lost, None)

    def tick(self) -> None:
        """Do what time asks for: call every heartbeat interval."""
        now = self._loop.time()
        if self._liveness.slept(now) and self._open:
            self._stall.begin(now)
        if self.state in (LinkState.HELLO, LinkState.REFUSED):
            if now >= self._next_hello:
                self._say_hello()
        elif self.state is LinkState.READY:
            if self._liveness.lost(now):
                self._read()  # what came while this process was busy
            silence = self._liveness.silence_s(now)
            if silence > self._liveness.timeout_s:
                self._reset(f"silent for {silence:.1f} s")
            elif (stalled_s := self._stalled_s(now)) is not None:
                # It may be the one request that its engine cannot get over; whatever
                # else it has can go on elsewhere.
                self._suspect_until = now + SUSPECT_S
                self._reset(f"no token for {stalled_s:.1f} s")
            elif self._liveness.beat_due(now):
                self._send(Ping(self._incarnation))

    def _stalled_s(self, now: float) -> float | None:
        """Return for how long open requests got no token, if that is too long."""
        if not self._open or self._stall.silence_s(now, under_way=True) is None:
            return None  # so most of the time, and no request need be looked at
        return self._stall.silence_s(now, under_way=self._open.under_way)

    def close(self, reason: str) -> None:
        """Say goodbye and end every open request as lost."""
        if self.state is LinkState.CLOSED:
            return
        if self.state is LinkState.READY:
            self._send(Bye(reason))
        self._drop_socket()
        self._lose(LinkState.CLOSED, reason)

    # --- the socket ----------------------------------------------------------------

    def _connect(self) -> None:
        socket = self._context.socket(zmq.DEALER)
        # A new identity each time: a ROUTER ignores a second peer with a known one.
        socket.identity = f"{self._frontend_id}:{secrets.token_hex(4)}".encode()
        socket.linger = LINGER_MS
        socket.immediate = True  # nothing queues for a worker that is not there
        socket.sndhwm = socket.rcvhwm = SEND_QUEUE_MESSAGES
        socket.maxmsgsize = MAX_MESSAGE_BYTES
        socket.reconnect_ivl, socket.reconnect_ivl_max = RECONNECT_MS
        # ZeroMQ's own ping closes a half-open connection; not before we would.
        socket.heartbeat_ivl = int(1_000 * HEARTBEAT_INTERVAL_S)
        socket.heartbeat_timeout = int(1_000 * self._timeout_s)
        monitor = socket.get_monitor_socket(_MONITORED)
        socket.connect(self.endpoint)
        self._socket, self._monitor = socket, monitor
        self._loop.add_reader(socket.fileno(), self._read)
        self._loop.add_reader(monitor.fileno(), self._read_monitor)
        # What came before the reader was there raises no edge.
        self._loop.call_soon(self._read_monitor)

    def _drop_socket(self) -> None:
        socket, monitor = self._socket, self._monitor
        self._socket = self._monitor = None
        if socket is None or monitor is None:
            return
        self._loop.remove_reader(socket.fileno())
        self._loop.remove_reader(monitor.fileno())
        socket.disable_monitor()
        monitor.close(linger=0)
        socket.close()

    def _reset(self, reason: str) -> None:
        """Give this connection up and start a new one."""
        if self.state is LinkState.READY:
            # If it is heard, what is open there ends at once.
            self._send(Bye(reason[:MAX_ERROR_CHARS]))
        self._stall.idle()
        self._num_cards_due = 0
        self._drop_socket()
        self._lose(LinkState.CONNECTING, reason)
        self._connect()

    def _send(self, message: FromFrontend) -> bool:
        socket = self._socket
        if socket is None:
            return False
        data = encode(self._outgoing.numbered(message))
        try:
            socket.send(data, zmq.NOBLOCK)
        except zmq.Again:
            return False
        self._outgoing.sent(message)
        # A send can swallow the edge of a message that arrived meanwhile.
        if int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._loop.call_soon(self._read)
        return True

    def _read(self) -> None:
        socket = self._socket
        if socket is None:
            return
        for _ in range(MAX_READS_PER_WAKE):
            try:
                data = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            now = self._loop.time()
            self._liveness.heard(now)
            try:
                message = decode_from_worker(data)
                if type(message) is Batch:
                    self._stall.batch(now)
                self._handle(message)
            except RemoteProtocolError as error:
                self.num_protocol_errors += 1
                _log.error("worker %s broke the protocol: %s", self.worker_id, error)
                self._reset(f"broke the protocol: {error}")
                return
            except ProtocolError as error:
                self._reset(str(error))
                return
            if self._socket is not socket:
                return
        self._loop.call_soon(self._read)

    def _read_monitor(self) -> None:
        while (monitor := self._monitor) is not None:
            try:
                frames = monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            event = parse_monitor_message(frames)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._say_hello()
            elif event == zmq.EVENT_DISCONNECTED:
                self._num_cards_due = 0
                self._lose(LinkState.CONNECTING, "connection lost")

    # --- messages ------------------------------------------------------------------

    def _say_hello(self) -> None:
        now = self._loop.time()
        self._next_hello = now + HELLO_AGAIN_S
        hello = Hello(
            PROTOCOL_VERSION,
            self._frontend_id,
            self._incarnation,
            link_id=self._link_id,
        )
        if self._send(hello):
            self._liveness = Liveness(now, timeout_s=self._timeout_s)
            self._outgoing = Outgoing()
            self._num_cards_due += 1
            self._set_state(LinkState.HELLO, "waiting for the worker's card")

    def _handle(self, message: FromWorker) -> None:
        if self.state is LinkState.HELLO and isinstance(message, Load):
            self._say_hello()  # the worker knows us, but its card is lost
            return
        if isinstance(message, Batch | Load | EngineDead):
            if self.state is not LinkState.READY:
                return  # from before the connection broke
            self._incoming.check(message)
        match message:
            case Batch():
                self._open.take(message)
                if not self._open:
                    self._stall.idle()
            case Load():
                self._take_load(message)
            case Card():
                self._take_card(message)
            case Refused():
                if self.state is LinkState.READY:
                    # The worker restarted behind the same connection, or dropped us.
                    self._reset(f"the worker no longer knows us: {message.reason}")
                else:
                    self._refuse(message.reason)
            case EngineDead():
                _log.error("worker %s: engine died: %s", self.worker_id, message.reason)
                self._lose(LinkState.CONNECTING, f"engine died: {message.reason}")

    def _take_card(self, card: Card) -> None:
        if not self._num_cards_due:
            msg = "a card that was not asked for: the worker has begun anew"
            raise SequenceError(msg)
        self._num_cards_due -= 1
        self._incoming = Incoming()
        try:
            self._accept(card)
        except Incompatible as error:
            self._refuse(str(error))
            return
        self.card = card
        self.load = Load(card.incarnation)
        room = card.num_kv_blocks * card.block_size // CHUNK_TOKENS
        self.prefixes = Prefixes(min(room or MAX_CHUNKS, MAX_CHUNKS))
        self._set_state(LinkState.READY, "")
        _log.info(
            "worker %s (%s, %s %s) is ready at %s",
            card.worker_id,
            card.role.value,
            card.engine,
            card.engine_version,
            self.endpoint,
        )
        if self._on_ready is not None:
            self._on_ready()

    def _take_load(self, load: Load) -> None:
        if self.card is not None and load.incarnation != self.card.incarnation:
            self._reset("the worker was restarted")
            return
        self._stall.steps(load.num_steps, self._loop.time())
        self.load = load

    def _refuse(self, reason: str) -> None:
        if self.reason != reason:
            _log.error("%s: not used: %s", self.endpoint, reason)
        self._next_hello = self._loop.time() + HELLO_AGAIN_S
        self._set_state(LinkState.REFUSED, reason)

    def _lose(self, state: LinkState, reason: str) -> None:
        if self.state is LinkState.READY and state is not LinkState.CLOSED:
            _log.warning(
                "worker %s is lost (%s), %d requests with it",
                self.worker_id,
                reason,
                len(self._open),
            )
        worker_id = self.worker_id
        self._set_state(state, reason)
        text = f"worker {worker_id} was lost: {reason}"
        self._open.lose_all(text)
        watchers, self._watchers = self._watchers, {}
        for lost in watchers:
            lost(text)

    def _set_state(self, state: LinkState, reason: str) -> None:
        self.state = state
        self.reason = reason


TICK_S = HEARTBEAT_INTERVAL_S / 2
"""How often to call ``Link.tick``: a loss is seen at most this much late."""
