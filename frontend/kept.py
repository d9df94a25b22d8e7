"""What a frontend has a worker keep of a generation, so that any frontend tells it again.

Laws:
- A worker keeps it as bytes, and looks at none of it.
- With the ids that are kept beside it, it is all that it takes to make the same events.
"""

from __future__ import annotations

import hashlib

import msgspec

from tokenwire.protocol.messages import Finished, JsonObject, Keep, Logprobs

from .checkpoint import Checkpoint, Holder, SeedSource

__all__ = [
    "FORM",
    "MAX_BODY_BYTES",
    "NOTHING",
    "Context",
    "History",
    "Keeping",
    "Known",
    "owner_of",
    "read_context",
]

FORM = 1
"""Of a Context; a frontend that reads another cannot tell the generation again."""

MAX_BODY_BYTES = 16 * 1024 * 1024
"""A longer request is not kept: four times the text of the longest context in use."""


class History(msgspec.Struct, frozen=True, omit_defaults=True):
    """What other workers have brought a sequence, before it came to the one that keeps it."""

    num_cached_tokens: int | None = None  # where the output began; None: it has not
    origin: Finished | None = None  # of the prompt alone
    saved: JsonObject | None = None  # the client's ``kv_transfer_params``
    moved: bool = False  # the output has gone on at another worker
    prefill_worker_id: str = ""
    # (index of the first id, version), ascending
    weight_versions: list[tuple[int, str]] = []
    holders: list[tuple[int, Holder]] = []  # the same, of who has computed them


class Context(msgspec.Struct, frozen=True, omit_defaults=True):
    """A generation's request, and what its answer has that the request does not say."""

    form: int
    route: str  # of the request
    body: bytes
    response_id: str
    created: int  # Unix seconds
    expires: int
    max_tokens: int
    num_prompt_tokens: int
    num_earlier_tokens: int = 0  # of the output, from a generation before
    seed: int | None = None
    seed_source: SeedSource | None = None
    adapter_update: int = 0  # which loaded its adapter
    resumed: Checkpoint | None = None  # where the request names a generation alone
    history: History = History()


class Known(msgspec.Struct, frozen=True):
    """What a frontend knows of a request that its body does not say."""

    context: Context | None = None  # of the generation that it is told again
    checkpoint: Checkpoint | None = None  # of the one that it names to go on from


NOTHING = Known()


class Keeping(msgspec.Struct, frozen=True):
    """Has a sequence kept, at each of its workers."""

    owner: bytes
    ttl_s: float
    outlives: bool  # it goes on while nobody follows it
    context: Context

    def keep(self, epoch: int, history: History, logprobs: Logprobs | None) -> Keep:
        """Return what its next worker is told.

        Args:
            epoch: Larger than at the workers before.
            history: What these have brought.
            logprobs: Of the output so far, (num_new_tokens) rows.
        """
        context = msgspec.structs.replace(self.context, history=history)
        return Keep(
            generation_id=context.response_id,
            owner=self.owner,
            context=msgspec.msgpack.encode(context),
            ttl_s=self.ttl_s,
            outlives=self.outlives,
            epoch=epoch,
            logprobs=logprobs,
        )


def read_context(data: bytes) -> Context | None:
    """Return what a worker has kept; None: another release of the frontend wrote it."""
    try:
        context = msgspec.msgpack.decode(data, type=Context)
    except msgspec.DecodeError:
        return None
    return context if context.form == FORM else None


def owner_of(authorization: str | None) -> bytes:
    """Return whose a generation is: an API key's hash, the same at every frontend."""
    if authorization is None:
        return b""
    data = b"owner\0" + authorization.encode(errors="surrogateescape")
    return hashlib.sha256(data).digest()
