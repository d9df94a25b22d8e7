"""A worker's service with everything around it faked, and a clock turned by hand."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from support.worker_fakes import FakeEngine, FakeTimers, RecordingSender
from tokenwire.protocol.messages import (
    PROTOCOL_VERSION,
    Card,
    Finished,
    FinishReason,
    FromFrontend,
    Hello,
    Leg,
    Role,
    Sampling,
    Submit,
)
from tokenwire.protocol.tokens import pack_ids
from tokenwire.worker.admission import Bounds
from tokenwire.worker.captures import Captures
from tokenwire.worker.engine import EngineFinished, EngineTokens
from tokenwire.worker.journal import Journal
from tokenwire.worker.kv_blocks import CachedBlocks
from tokenwire.worker.metrics import Metrics
from tokenwire.worker.service import Service

__all__ = ["A", "B", "Desk", "submit"]

A, B = b"frontend-a", b"frontend-b"


def submit(
    request_id: str = "r",
    size: int = 3,
    leg: Leg = Leg.FULL,
    handover: dict[str, object] | None = None,
    max_tokens: int = 8,
    *,
    echo_prompt: bool = False,
) -> Submit:
    """Return a Submit of a prompt of *size* ids."""
    return Submit(
        request_id,
        pack_ids(list(range(size))),
        Sampling(max_tokens=max_tokens),
        leg=leg,
        handover=handover,
        echo_prompt=echo_prompt,
    )


class Desk:
    """A service with everything around it faked; *hello* peers have said hello."""

    def __init__(
        self,
        *hello: bytes,
        role: Role = Role.AGGREGATED,
        max_requests: int = 100,
        max_queued_tokens: int = 1000,
        captures: Captures | None = None,
        exactness: str = "",
        journal: Journal | None = None,
        blocks: CachedBlocks | None = None,
    ) -> None:
        self.engine = FakeEngine()
        self.sender = RecordingSender()
        self.timers = FakeTimers()
        self.registry = CollectorRegistry()
        self.card = Card(
            protocol_version=PROTOCOL_VERSION,
            worker_id="w",
            incarnation="w1",
            role=role,
            model="m",
            max_model_len=100,
            vocab_size=1000,
            block_size=16,
            engine="sim",
            engine_version="1",
            exactness=exactness,
        )
        self.service = Service(
            card=self.card,
            engine=self.engine,
            sender=self.sender,
            timers=self.timers,
            metrics=Metrics("m", self.registry),
            bounds=Bounds(max_requests, max_queued_tokens, 1.0, 4.0),
            captures=captures,
            journal=journal,
            blocks=blocks,
        )
        for peer in hello:
            self.say(peer, Hello(PROTOCOL_VERSION, peer.decode(), "1"))
            self.sender.take(peer)

    def say(self, peer: bytes, *messages: FromFrontend) -> None:
        """Receive messages from *peer*."""
        for message in messages:
            self.service.received(peer, message)

    def submit(self, request_id: str = "r", peer: bytes = A, size: int = 3) -> str:
        """Submit a request; return the engine's id of it."""
        self.say(peer, submit(request_id, size))
        return self.engine.submitted[-1].request_id

    def tokens(self, *new: tuple[str, list[int]]) -> None:
        """Bring tokens, as one step."""
        self.service.outputs([EngineTokens(name, ids) for name, ids in new], [])

    def end(self, engine_id: str, reason: FinishReason = FinishReason.LENGTH) -> None:
        """Bring an end."""
        self.service.outputs([], [EngineFinished(engine_id, reason)])

    def ends(self, peer: bytes = A) -> list[Finished]:
        """Let the iteration end; return the ends that were sent to *peer*."""
        self.timers.settle()
        return self.sender.items(peer)[1]

    def metric(self, name: str, **labels: str) -> float:
        """Return a sample's value."""
        full = f"tokenwire_worker_{name}"
        value = self.registry.get_sample_value(full, {"model_name": "m", **labels})
        return value or 0.0
