"""The checkpoint: all that another process must know to go on with a generation exactly.

Laws:
- Output is ids, never text: text does not tell which ids it was.
- What it says can be checked by itself: ids with their hash, the whole with a signature
  (``resume_keys``) where the operator has set a key.
- It is read into these types and written anew to be checked, so that a client may
  reformat it, but not add to it.

It is about the sequence of tokens alone. Which tools were run, what they have changed,
and whose budget pays is the client's to know: that is what ``scope`` says.

docs/checkpoint.schema.json is made of these types.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from tokenwire.protocol.tokens import pack_ids

from .resume_errors import PARAM, invalid_resume, mismatch, output_hash_mismatch

__all__ = [
    "MAX_LIFE_S",
    "OBJECT",
    "Adapter",
    "Checkpoint",
    "Contract",
    "Environment",
    "Grammar",
    "Holder",
    "Identity",
    "Integrity",
    "Output",
    "Prompt",
    "Rng",
    "SamplingParams",
    "SeedSource",
    "State",
    "canonical_json",
    "check_hashes",
    "ids_sha256",
    "json_sha256",
    "read_checkpoint",
]

OBJECT: Literal["generation.checkpoint"] = "generation.checkpoint"

MAX_LIFE_S = 24 * 60 * 60
"""How long a checkpoint may be resumed, unless the operator says otherwise: through a
night, and short enough for signing keys to be changed within days."""

ID_FORM = r"^[A-Za-z0-9._:-]{1,128}$"
"""A generation's id: ours, but in an unsigned checkpoint it is a client's string."""

Sha256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
Id = Annotated[str, msgspec.Meta(pattern=ID_FORM)]
Name = Annotated[str, msgspec.Meta(max_length=1_024)]
Count = Annotated[int, msgspec.Meta(ge=0)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
UnixSeconds = Annotated[int, msgspec.Meta(ge=0)]
SeedSource = Literal["request", "frontend"]


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An object with these keys and no others; null where something is not known."""


class Identity(_Part, frozen=True, kw_only=True):
    """Which generation this is of, and where in its stream it stands."""

    id: Id
    choice: Count = 0
    seq: Count  # of the last event that the client has
    created: UnixSeconds
    expires: UnixSeconds
    parent: Id | None = None  # the generation that this one has resumed
    root: Id  # the first of that line; ids of tool calls derive from it


class Adapter(_Part, frozen=True):
    """A LoRA adapter."""

    id: Name
    sha256: Sha256 | None = None  # null: nobody has hashed its files
    update: Count = 0  # of the admin action that loaded it, which is unique


class Grammar(_Part, frozen=True):
    """What held the output to a form."""

    kind: Name
    sha256: Sha256  # of the effective constraint, that of tools included


class Contract(_Part, frozen=True, kw_only=True):
    """What must be equal where the generation goes on; a difference is a 409."""

    model: Name
    revision: Name | None = None
    weight_version: Name | None = None  # of the last id
    quantization: Name | None = None
    tokenizer_sha256: Sha256 | None = None
    vocab_size: Count
    chat_template_sha256: Sha256 | None = None
    adapter: Adapter | None = None
    grammar: Grammar | None = None
    reasoning_parser: Name | None = None
    tool_parser: Name | None = None
    tools_sha256: Sha256 | None = None
    template_kwargs_sha256: Sha256 | None = None
    cache_salt_sha256: Sha256 | None = None


class Environment(_Part, frozen=True):
    """What should be equal; a difference lowers the exactness that can be promised."""

    engine: Name | None = None
    engine_version: Name | None = None
    runner: Name | None = None
    rng: Name | None = None
    dtype: Name | None = None
    attention_backend: Name | None = None
    world_size: Count | None = None  # devices of the engine, of all ranks
    speculative: Name | None = None
    device: Name | None = None


class Holder(_Part, frozen=True):
    """The worker that has computed this. It may still have it cached: no more than a hint."""

    worker_id: Name
    incarnation: Name  # new with every start: its cache is empty then


class SamplingParams(_Part, frozen=True):
    """What decides which tokens come, with defaults filled in.

    ``max_tokens`` and ``min_tokens`` are of the whole output, as it was first asked for.
    """

    max_tokens: Count
    min_tokens: Count
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    stop: list[str]
    stop_token_ids: list[TokenId]  # ascending
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    ignore_eos: bool
    logit_bias: dict[str, float]  # by token id
    allowed_token_ids: list[TokenId] | None  # ascending
    bad_words: list[str]


class Prompt(_Part, frozen=True):
    """P: what the model was given."""

    len: Count
    sha256: Sha256
    ids: list[TokenId] | None = None  # (len,); null: only the hash was asked for


class Output(_Part, frozen=True):
    """O: what it has said, as the client has it."""

    len: Count
    sha256: Sha256
    ids: list[TokenId]  # (len,)


class Rng(_Part, frozen=True, kw_only=True):
    """Where the random numbers stand."""

    kind: Literal["greedy", "seeded", "unseeded"]
    seed: int | None = None
    seed_source: SeedSource | None = None
    draws: Count  # made so far: one a token, none where greedy


class State(_Part, frozen=True, kw_only=True):
    """How far it has come."""

    prompt: Prompt
    output: Output
    cumulative_logprob: float | None = None  # null: logprobs were not asked for
    rng: Rng


class Integrity(_Part, frozen=True, kw_only=True):
    """The signature, over the canonical JSON of the checkpoint with an empty ``mac``."""

    alg: Literal["HMAC-SHA256"] = "HMAC-SHA256"
    key_id: Name
    tenant: Sha256 | None = None  # whose it is; null: a client without an API key
    mac: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{64})?$")] = ""


class Checkpoint(_Part, frozen=True, kw_only=True):
    """Where a generation stands, and what it takes to go on with it."""

    object: Literal["generation.checkpoint"] = OBJECT
    version: Literal[1] = 1
    scope: Literal["token_sequence"] = "token_sequence"  # tools and budgets: no
    identity: Identity
    contract: Contract
    environment: Environment
    sampling: SamplingParams
    state: State
    holder: Holder | None = None  # null: nobody, or it is not known
    integrity: Integrity | None = None  # null: the operator has set no key


def canonical_json(value: object) -> bytes:
    """Return *value* as the one JSON that hashes and signatures are made of.

    UTF-8, without spaces, keys in order; every key is there, also where null.
    """
    return msgspec.json.encode(value, order="sorted")


def json_sha256(value: object) -> str:
    """Return the hash of a value's canonical JSON, as hex."""
    try:
        data = canonical_json(value)
    except UnicodeEncodeError:  # half a surrogate pair, which JSON can only escape
        data = json.dumps(msgspec.to_builtins(value), sort_keys=True).encode()
    return hashlib.sha256(data).hexdigest()


def ids_sha256(token_ids: Sequence[int]) -> str:
    """Return the hash of ids as little-endian u32, as hex."""
    return hashlib.sha256(pack_ids(token_ids)).hexdigest()


def read_checkpoint(given: object) -> Checkpoint:
    """Return a request's ``nvext.resume_from.checkpoint``.

    Raises:
        ApiError: 400, it is none of this version.
    """
    try:
        return msgspec.convert(given, Checkpoint)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$")
        param = f"{PARAM}.checkpoint{path.rstrip('`')}"
        msg = f"this is no {OBJECT} of version 1: {text} (at {param})"
        raise invalid_resume(msg, param) from error


def check_hashes(state: State) -> None:
    """Refuse ids that are not those which were hashed.

    Raises:
        ApiError: 412 for the output, 409 for the prompt.
    """
    output, prompt = state.output, state.prompt
    if len(output.ids) != output.len:
        msg = f"the checkpoint is of {output.len} output ids, and has {len(output.ids)}"
        raise output_hash_mismatch(msg)
    found = ids_sha256(output.ids)
    if found != output.sha256:
        msg = (
            f"the output ids have the hash {found}, the checkpoint says {output.sha256}"
        )
        raise output_hash_mismatch(msg)
    if prompt.ids is not None:
        found = ids_sha256(prompt.ids)
        if len(prompt.ids) != prompt.len or found != prompt.sha256:
            field = "checkpoint.state.prompt"
            raise mismatch("prompt_mismatch", field, prompt.sha256, found)
