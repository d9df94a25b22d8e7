"""From a request's ``nvext`` to a generation that can be resumed."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import msgspec

from tokenwire.protocol.messages import Sampling

from .bounds import within
from .checkpoint import Checkpoint, canonical_json
from .contract import Terms, sampling_params
from .errors import bad_request
from .nvext import CheckpointOptions, Nvext, ResumableOptions
from .pool import Pool
from .resumable import Origin, Resumable
from .resume_errors import not_resumable

__all__ = ["ANYONE", "Client", "begin", "check_resumable", "pinned"]

SEED_BITS = 53
"""Of a seed that is chosen here: JavaScript's numbers hold it."""

SeedSource = Literal["request", "frontend"]


@dataclass(slots=True, frozen=True)
class Client:
    """Who asks."""

    authorization: str | None = None  # the header, whole


ANYONE = Client()
"""A client without an API key."""


def check_resumable(nvext: Nvext | None, *, prompt_only: bool = False) -> None:
    """Refuse what cannot be resumed, or asks for what is not there.

    Raises:
        ApiError: 400 or 422.
    """
    if nvext is None:
        return
    if not nvext.is_resumable:
        if nvext.checkpoint is not None:
            msg = "nvext.checkpoint needs nvext.resumable"
            raise bad_request(msg, "nvext.checkpoint")
        return
    if prompt_only:
        msg = "max_tokens=0 generates nothing that could be resumed"
        raise not_resumable(msg, "max_tokens")
    options = nvext.resumable
    if isinstance(options, ResumableOptions):
        if options.on_disconnect == "continue":
            msg = (
                'nvext.resumable.on_disconnect: "continue" is not available: a '
                "generation that nobody reads is cancelled; resume from a checkpoint"
            )
            raise bad_request(msg, "nvext.resumable.on_disconnect")
        if options.ttl_s is not None:
            within("ttl_s", options.ttl_s)
    checkpoint = nvext.checkpoint
    if checkpoint is not None and checkpoint.every_tokens is not None:
        within("every_tokens", checkpoint.every_tokens)


def pinned(
    sampling: Sampling, nvext: Nvext | None, pool: Pool
) -> tuple[Sampling, SeedSource | None]:
    """Return the parameters with a seed, where exactness needs one; and whose it is.

    Only where it was asked for and a worker can make use of it: an engine may have a
    slower sampler for seeded requests.
    """
    if sampling.seed is not None:
        return sampling, "request"
    wanted = nvext is not None and nvext.exactness not in (None, "best_effort")
    if sampling.temperature == 0 or not wanted or not pool.offers("same_rng"):
        return sampling, None
    seed = secrets.randbits(SEED_BITS)
    return msgspec.structs.replace(sampling, seed=seed), "frontend"


def begin(
    terms: Terms,
    stop: tuple[str, ...],
    response_id: str,
    created: int,
    seed_source: SeedSource | None,
    client: Client,
) -> Resumable:
    """Return what a resumable generation says of itself.

    Args:
        terms: The request.
        stop: Its stop strings.
        response_id: Its id, which is the generation's too.
        created: Unix seconds.
        seed_source: Whose its seed is.
        client: For whom checkpoints are signed.

    Raises:
        ApiError: 400, a text in it is no Unicode.
    """
    request, policy = terms.request, terms.policy
    nvext = request.nvext or Nvext()
    policy.resume_keys.refresh()
    params = sampling_params(terms.job.sampling, request, stop)
    try:
        canonical_json(params)
    except UnicodeEncodeError as error:
        msg = "a text holds a lone surrogate, which is not valid Unicode"
        raise bad_request(msg, "stop") from error
    life_s = policy.checkpoint_life_s
    if isinstance(nvext.resumable, ResumableOptions) and nvext.resumable.ttl_s:
        life_s = min(life_s, nvext.resumable.ttl_s)
    origin = Origin(
        id=response_id,
        root=response_id,
        created=created,
        expires=created + round(life_s),
        seed_source=seed_source,
    )
    options = nvext.checkpoint or CheckpointOptions()
    return Resumable(terms, params, origin, options, _signer(terms, client))


def _signer(terms: Terms, client: Client) -> Callable[[Checkpoint], Checkpoint]:
    keys = terms.policy.resume_keys

    def sign(checkpoint: Checkpoint) -> Checkpoint:
        return keys.signed(checkpoint, client.authorization)

    return sign
