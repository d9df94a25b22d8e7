"""From a request's ``nvext`` to a generation that can be resumed."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import msgspec

from tokenwire.protocol.messages import Sampling

from .bounds import within
from .checkpoint import Checkpoint, SeedSource, canonical_json
from .contract import Terms, sampling_params
from .errors import bad_request
from .kept import Context
from .nvext import CheckpointOptions, Nvext, ResumableOptions
from .pool import Pool
from .resumable import Origin, Resumable
from .resume import Resume
from .resume_errors import not_resumable

__all__ = ["ANYONE", "Client", "begin", "check_resumable", "pinned", "root_id"]

SEED_BITS = 53
"""Of a seed that is chosen here: JavaScript's numbers hold it."""


class Client(msgspec.Struct, frozen=True):
    """Who asks."""

    # ``access.identity_of``: the name of its API key; without keys, the header
    authorization: str | None = None


ANYONE = Client()
"""A client without an API key."""


def check_resumable(
    nvext: Nvext | None,
    keeps: Callable[[], bool],
    *,
    streams: bool,
    prompt_only: bool = False,
) -> None:
    """Refuse what cannot be resumed, or asks for what is not there.

    Args:
        nvext: The request's.
        keeps: Returns whether workers keep what they generate; asks all of them.
        streams: The answer is streamed.
        prompt_only: Nothing is to be generated.

    Raises:
        ApiError: 400 or 422.
    """
    if nvext is None:
        return
    if nvext.resumable is False and nvext.resume_from is not None:
        msg = "what is resumed can be resumed again: resumable is true, not false"
        raise bad_request(msg, "nvext.resumable")
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
            _check_outlives(keeps, streams=streams)
        if options.ttl_s is not None:
            within("ttl_s", options.ttl_s)
    checkpoint = nvext.checkpoint
    if checkpoint is not None and checkpoint.every_tokens is not None:
        within("every_tokens", checkpoint.every_tokens)


def _check_outlives(keeps: Callable[[], bool], *, streams: bool) -> None:
    param = "nvext.resumable.on_disconnect"
    if not streams:
        msg = (
            'on_disconnect: "continue" needs stream: true; only streams can be followed'
        )
        raise bad_request(msg, param)
    if not keeps():
        msg = (
            'on_disconnect: "continue" is not available: no worker keeps what it '
            "generates (--journal-bytes)"
        )
        raise bad_request(msg, param)


def pinned(
    sampling: Sampling,
    nvext: Nvext | None,
    pool: Pool,
    resume: Resume | None,
    context: Context | None,
) -> tuple[Sampling, SeedSource | None]:
    """Return the parameters with a seed, where exactness needs one; and whose it is.

    Only where it was asked for and a worker can make use of it: an engine may have a
    slower sampler for seeded requests. What is resumed has the seed that it had, and what
    is told again also the bound.

    Raises:
        ApiError: 400, a checkpoint's seed is none.
    """
    if context is not None:
        had = msgspec.structs.replace(
            sampling, seed=context.seed, max_tokens=context.max_tokens
        )
        return had, context.seed_source
    if sampling.seed is not None:
        return sampling, "request"
    seed = resume.frontends_seed if resume is not None else None
    if seed is not None:
        seed = within("seed", seed)
        return msgspec.structs.replace(sampling, seed=seed), "frontend"
    wanted = nvext is not None and bool(nvext.least_exactness)
    if sampling.temperature == 0 or not wanted or not pool.offers("same_rng"):
        return sampling, None
    seed = secrets.randbits(SEED_BITS)
    return msgspec.structs.replace(sampling, seed=seed), "frontend"


def begin(
    terms: Terms,
    pool: Pool,
    stop: tuple[str, ...],
    response_id: str,
    created: int,
    seed_source: SeedSource | None,
    client: Client,
    resume: Resume | None,
    context: Context | None,
) -> Resumable:
    """Return what a resumable generation says of itself, and goes on from.

    Args:
        terms: The request.
        pool: Its workers.
        stop: Its stop strings.
        response_id: Its id, which is the generation's too.
        created: Unix seconds.
        seed_source: Whose its seed is.
        client: For whom checkpoints are signed.
        resume: What it goes on from.
        context: Of what it was when it was first told.

    Raises:
        ApiError: 400, a text in it is no Unicode; others: it may not go on from that.
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
    before = resume and resume.checkpoint and resume.checkpoint.identity
    origin = Origin(
        id=response_id,
        root=root_id(resume) or response_id,
        created=created,
        expires=context.expires if context else created + round(life_s),
        parent=before.id if before else None,
        seed_source=seed_source,
        cumulative_logprob=resume.cumulative_logprob if resume is not None else 0.0,
    )
    options = nvext.checkpoint or CheckpointOptions()
    made = Resumable(terms, params, origin, options, _signer(terms, client), resume)
    if resume is not None and context is None:
        resume.check(terms.job, made.request_contract, params, pool)
    return made


def root_id(resume: Resume | None) -> str | None:
    """Return the first of the generations that are resumed; None: there is none."""
    checkpoint = resume.checkpoint if resume is not None else None
    return None if checkpoint is None else checkpoint.identity.root


def _signer(terms: Terms, client: Client) -> Callable[[Checkpoint], Checkpoint]:
    keys = terms.policy.resume_keys

    def sign(checkpoint: Checkpoint) -> Checkpoint:
        return keys.signed(checkpoint, client.authorization)

    return sign
