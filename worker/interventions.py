"""What frontends' Admins do here: to the engine, and by it to open requests.

Law: a Status reaches every frontend behind all that came before it.
No socket, no clock and no event loop in here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from tokenwire.protocol.errors import ProtocolError
from tokenwire.protocol.limits import MAX_ERROR_CHARS
from tokenwire.protocol.messages import STATUS, Admin, AdminDone, Card, Submit
from tokenwire.worker.engine import Engine

from .administration import Administration
from .delivery import Delivery
from .frontends import EndedBy, Frontend
from .requests import Requests

__all__ = ["Interventions"]


class Interventions:
    """An ``administration.Owner``, and the way there and back.

    Args:
        card: What the worker was when it started.
        engine: What does it.
        requests: What is open.
        frontends: Who is told, by identity.
        delivery: The way to them.
    """

    def __init__(
        self,
        card: Card,
        engine: Engine,
        requests: Requests,
        frontends: Mapping[bytes, Frontend],
        delivery: Delivery,
    ) -> None:
        self._requests = requests
        self._frontends = frontends
        self._delivery = delivery
        self._administration = Administration(
            engine, self, model=card.model, weight_version=card.weight_version
        )

    @property
    def fault(self) -> str:
        """Why this worker cannot serve; empty: it can."""
        return self._administration.status.fault

    def weight_version(self) -> str:
        """Return what the weights are called now."""
        return self._administration.status.weight_version

    def update_of(self, lora: str) -> int | None:
        """Return the update that a request's weights are of; None: no such adapter."""
        return self._administration.update_of(lora)

    def begin(self, frontend: Frontend, message: Admin) -> None:
        """Do what *message* asks for; its frontend gets the one answer."""
        self._administration.begin(message, partial(self._done, frontend))

    def send_status(self, frontend: Frontend) -> None:
        """Tell *frontend*, if it takes a Status."""
        if STATUS in frontend.hello.capabilities:
            self._delivery.send(frontend, self._administration.status)

    def _done(self, frontend: Frontend, done: AdminDone) -> None:
        try:
            self._delivery.send(frontend, done)
        except ProtocolError as error:  # a result that no message can carry
            text = f"it is done, but its result cannot be sent: {error}"
            instead = AdminDone(done.request_id, text[:MAX_ERROR_CHARS], "failed")
            self._delivery.send(frontend, instead)

    # -- what the administration needs --------------------------------------------------

    def status_changed(self) -> None:
        """Tell the frontends, behind all that came before."""
        self._delivery.flush()
        for frontend in list(self._frontends.values()):
            self.send_status(frontend)

    def abort_all(self) -> None:
        """End what runs, on purpose: what an output has by now is the answer."""
        self._requests.end_by_admin(EndedBy.PAUSE, self._requests)

    def kv_is_old(self, concerns: Callable[[Submit], bool]) -> None:
        """Have sent again what may use KV of before now, and has brought nothing.

        vLLM decides when a request is added which blocks it will find. What waits there
        would find those that running requests keep.
        """
        self._requests.end_by_admin(
            EndedBy.OLD_KV,
            [
                request
                for request in self._requests
                if not request.exchange.num_tokens and concerns(request.submit)
            ],
        )

    def adapter_leaves(self, lora: str) -> None:
        """End what runs on it: a step of such a request would load it again."""
        self._requests.end_by_admin(
            EndedBy.UNLOAD,
            [request for request in self._requests if request.submit.lora == lora],
        )

    def give_up_all(self) -> None:
        """Let what runs go on elsewhere."""
        self._requests.evict_all()
