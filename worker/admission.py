"""Whether a Submit is taken: its form, the worker's role, and what there is room for."""

from __future__ import annotations

from dataclasses import dataclass

from tokenwire.protocol.messages import Card, ErrorKind, Leg, Role, Submit
from tokenwire.protocol.tokens import TOKEN_BYTES

__all__ = ["Admission", "Bounds", "Refusal"]

_LEGS = {
    Role.PREFILL: frozenset({Leg.PREFILL, Leg.FULL}),
    Role.DECODE: frozenset({Leg.DECODE, Leg.FULL}),
    Role.AGGREGATED: frozenset({Leg.FULL}),
}
"""A prefill worker also runs what needs no decode worker (one token), and a decode
worker what is not worth a hand-over."""


@dataclass(slots=True, frozen=True)
class Bounds:
    """What a worker takes at most, and for how long it waits."""

    max_requests: int
    max_queued_tokens: int  # prompt tokens of requests without an output token
    heartbeat_interval_s: float
    heartbeat_timeout_s: float


@dataclass(slots=True, frozen=True)
class Refusal:
    """Why a Submit is not taken."""

    kind: ErrorKind
    error: str


class Admission:
    """The counts that decide, kept by the service, and the rules."""

    def __init__(self, card: Card, bounds: Bounds) -> None:
        self._card = card
        self._bounds = bounds
        self.num_requests = 0
        self.num_queued_tokens = 0
        self.is_draining = False

    def refusal(
        self, submit: Submit, *, is_open: bool, update: int | None = 0, fault: str = ""
    ) -> Refusal | None:
        """Return why *submit* is not taken, or None.

        Args:
            submit: What a frontend asks.
            is_open: Whether that frontend has a request of this id already.
            update: Which update its weights are of here; None: they are not here.
            fault: Why this worker cannot serve; empty: it can.
        """
        if is_open:
            error = f"request {submit.request_id} is open already"
            return Refusal(ErrorKind.INVALID, error)
        return (
            self._misfit(submit)
            or self._wrong_weights(submit, update, fault)
            or self._no_room(submit)
        )

    def _wrong_weights(
        self, submit: Submit, update: int | None, fault: str
    ) -> Refusal | None:
        who = f"worker {self._card.worker_id}"
        if fault:
            return Refusal(ErrorKind.DRAINING, f"{who} cannot serve: {fault}")
        if update is None:
            # Another worker may have it: what is known of this one was older.
            error = f"{who} has no adapter {submit.lora!r:.140}"
            return Refusal(ErrorKind.DRAINING, error)
        if submit.handover_update not in {None, update}:
            error = f"the KV is of weights that {who} does not have"
            return Refusal(ErrorKind.HANDOVER, error)
        return None

    def _misfit(self, submit: Submit) -> Refusal | None:
        card = self._card
        num_ids = len(submit.token_ids) // TOKEN_BYTES
        num_prior = submit.num_prior
        num_prompt = num_ids - num_prior
        max_tokens = submit.sampling.max_tokens
        if submit.leg not in _LEGS[card.role]:
            error = f"a {card.role.value} worker runs no {submit.leg.value} leg"
            return Refusal(ErrorKind.INVALID, error)
        if submit.leg is Leg.DECODE and submit.handover is None:
            error = "a decode leg without the hand-over of its prefill leg"
            return Refusal(ErrorKind.HANDOVER, error)
        if not num_ids:
            return Refusal(ErrorKind.INVALID, "The prompt is empty")
        if max_tokens < 1:
            error = f"max_tokens must be at least 1, got {max_tokens}"
            return Refusal(ErrorKind.INVALID, error)
        if error := self._wrong_prior(submit, num_prompt):
            return Refusal(ErrorKind.INVALID, error)
        if submit.leg is Leg.PREFILL:
            max_tokens = num_prior + 1  # whatever the whole request may have
        total = num_prompt + max_tokens
        if total > card.max_model_len:
            error = (
                f"This model's maximum context length is {card.max_model_len} tokens. "
                f"However, you requested {max_tokens} output tokens and your prompt "
                f"contains {num_prompt} input tokens, for a total of {total} tokens."
            )
            return Refusal(ErrorKind.INVALID, error)
        return None

    def _wrong_prior(self, submit: Submit, num_prompt: int) -> str:
        """Return why the output before this Submit cannot be that; empty: it can."""
        num_prior = submit.num_prior
        if not num_prior:
            return ""
        if num_prior < 0 or num_prompt < 1:
            num_ids = num_prompt + num_prior
            return f"num_prior is {num_prior} of {num_ids} ids: a prompt must be left"
        if submit.sampling.max_tokens <= num_prior:
            max_tokens = submit.sampling.max_tokens
            return f"{num_prior} of {max_tokens} output tokens (max_tokens) are there"
        if not self._card.exactness:
            return f"worker {self._card.worker_id} goes on behind no earlier output"
        return ""

    def _no_room(self, submit: Submit) -> Refusal | None:
        who = f"worker {self._card.worker_id}"
        if self.is_draining:
            return Refusal(ErrorKind.DRAINING, f"{who} takes nothing new")
        if self.num_requests >= self._bounds.max_requests:
            error = f"{who} has {self.num_requests} requests, its bound"
            return Refusal(ErrorKind.BUSY, error)
        queued = self.num_queued_tokens
        total = queued + len(submit.token_ids) // TOKEN_BYTES
        # A prompt above the bound is taken when nothing else waits: else it never is.
        if queued and total > self._bounds.max_queued_tokens:
            error = f"{who} has {queued} prompt tokens waiting, near its bound"
            return Refusal(ErrorKind.BUSY, error)
        return None
