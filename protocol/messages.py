"""The messages between frontend and worker: one tagged union per direction.

Laws:
- A request id is chosen by the frontend, is unique among that frontend's open
  requests, and is never a client's string.
- Every Submit is answered by exactly one Finished, whatever happens to the request.
- Evolution: new fields go last and have a default; no field changes its type, its
  meaning or its default (defaults are not sent); an unknown field is ignored; an
  unknown message or enum member is a protocol error, so a new one needs a capability
  in Hello or Card first. Hello, Card and Refused stay readable across
  ``PROTOCOL_VERSION``s: they carry the sentence that names the mismatch.
- ``seq`` numbers a link's messages (see ``numbering``); the link sets it.
- ``token_ids`` and ``logprobs`` are packed (see ``tokens``); shapes stand beside them.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from .words import (
    ADMIN,
    AGAIN,
    BY_PAUSE,
    CANCELLED,
    CAPTURE,
    CAPTURE_TOLD,
    GOES_ON,
    GRAMMAR_REJECTS_PREFIX,
    JOURNAL,
    KV_EVENTS,
    METRICS,
    ORPHANED_KV,
    STATUS,
    ErrorKind,
    FinishReason,
    Leg,
    Role,
)

__all__ = [
    "ADMIN",
    "AGAIN",
    "BY_PAUSE",
    "CANCELLED",
    "CAPTURE",
    "CAPTURE_TOLD",
    "GOES_ON",
    "GRAMMAR_REJECTS_PREFIX",
    "JOURNAL",
    "KV_EVENTS",
    "METRICS",
    "ORPHANED_KV",
    "PROTOCOL_VERSION",
    "STATUS",
    "Adapter",
    "Admin",
    "AdminDone",
    "Batch",
    "Bye",
    "Cancel",
    "Card",
    "Discard",
    "EngineDead",
    "ErrorKind",
    "FinishReason",
    "Finished",
    "FromFrontend",
    "FromWorker",
    "Hello",
    "JsonObject",
    "KVBlocks",
    "Keep",
    "Leg",
    "LetGo",
    "Load",
    "Logprobs",
    "MetricsText",
    "NumberedFromFrontend",
    "NumberedFromWorker",
    "OrphanedKV",
    "Ping",
    "Recall",
    "Recalled",
    "Refused",
    "ReleaseKV",
    "Role",
    "Sampling",
    "ScrapeMetrics",
    "Settled",
    "Status",
    "StructuredOutput",
    "Submit",
    "Tokens",
    "Told",
    "Trace",
    "WatchKV",
]

PROTOCOL_VERSION = 1
"""Peers with another number refuse each other; additions do not change it."""

JsonObject = dict[str, Any]
"""A connector's own object, passed through without a look inside."""

Seq = int | msgspec.UnsetType
"""1, 2, ... on its link and in its direction; an older peer sends none."""


# --- frontend to worker ------------------------------------------------------------


class Hello(msgspec.Struct, tag="hello", frozen=True, omit_defaults=True):
    """First message on a link; answered by Card or Refused."""

    protocol_version: int
    frontend_id: str
    incarnation: str  # new with every start of the process
    capabilities: list[str] = []
    link_id: str = ""  # of this frontend's links; stays when the link connects anew


class StructuredOutput(msgspec.Struct, frozen=True, omit_defaults=True):
    """A grammar for the output; exactly one of ``kind`` with its text.

    ``kind`` is an open word: a worker refuses the request of one that it does not know
    (``ErrorKind.INVALID``), so a new kind needs no capability.
    """

    # "json" | "json_object" | "regex" | "choice" | "grammar" | "structural_tag"
    kind: str
    spec: str = ""  # JSON schema, regex, list of choices, EBNF, or xgrammar's tag
    whitespace_pattern: str | None = None


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sampling parameters, in vLLM's words and with vLLM's meanings."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    logprobs: int | None = None  # alternatives beside the sampled token
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = []
    structured_output: StructuredOutput | None = None


class Logprobs(msgspec.Struct, array_like=True, frozen=True):
    """Log probabilities of some tokens: *width* candidates each, the sampled first."""

    width: int
    token_ids: bytes  # (num_new_tokens * width,) packed u32
    logprobs: bytes  # (num_new_tokens * width,) packed f32
    ranks: bytes  # (num_new_tokens * width,) packed u32, 1-based


class Keep(msgspec.Struct, frozen=True, omit_defaults=True):
    """Have a sequence's ids kept by its worker, so that any frontend can tell them again.

    They are kept from the first on, each before it is sent.
    """

    generation_id: str  # a frontend's word, unique; never a client's
    owner: bytes  # only who brings the same is told of it
    context: bytes  # opaque to the worker: what a frontend needs to tell it again
    ttl_s: float  # for how long behind its end, and while nobody follows it
    outlives: bool = False  # it goes on while nobody follows it
    epoch: int = (
        0  # counts the generation's Submits: the largest is the one that counts
    )
    # Of the last ids of Submit.token_ids that are output: what they were sent with.
    logprobs: Logprobs | None = None


class Trace(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a Submit is part of: for lines of logs and for traces, and for nothing else.

    The headers are W3C's (Trace Context), as the worker hands them to its engine; whoever
    reads them checks their form.
    """

    request_id: str = ""  # of the response, as its client is told it
    traceparent: str = ""  # the span that this is part of; empty: there is none
    tracestate: str = ""


class Submit(msgspec.Struct, tag="submit", frozen=True, omit_defaults=True):
    """Run one sequence. Answered by Tokens (any number) and one Finished."""

    request_id: str
    token_ids: bytes  # (num_prompt_tokens,) packed
    sampling: Sampling
    leg: Leg = Leg.FULL
    handover: JsonObject | None = None  # a prefill leg's, on Leg.DECODE
    kv_transfer_params: JsonObject | None = None  # a client's own, where allowed
    priority: int = 0
    cache_salt: str | None = None
    echo_prompt: bool = False  # send the prompt ids back on Finished
    # Where a grammar begins to bind. None: the engine's reasoning parser looks at the
    # prompt; its arguments are the other field's.
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: JsonObject | None = None
    seq: Seq = msgspec.UNSET
    # Of the prompt, from its start: whose hidden states are saved. 0: none.
    capture_tokens: int = 0
    lora: str = ""  # name of the adapter; empty: the model itself
    # On Leg.DECODE: of which weights the KV is, as Status counts them. A worker that
    # has others refuses the request (``ErrorKind.HANDOVER``).
    handover_update: int | None = None
    # Of ``token_ids``, the last so many are output that this sequence has already had:
    # it goes on behind them as if it had never stopped. ``sampling`` is then the whole
    # request's (its original max_tokens and min_tokens, not what is left of them), and
    # the answers count the new ids alone. Only to workers with ``Card.exactness``.
    num_prior: int = 0
    keep: Keep | None = None  # only to workers with the capability ``JOURNAL``
    trace: Trace | None = None  # older workers do without


class Cancel(msgspec.Struct, tag="cancel", frozen=True):
    """Stop a request; its Finished still comes.

    Unknown ids are ignored: the end and the cancel may cross.
    """

    request_id: str
    seq: Seq = msgspec.UNSET


class LetGo(msgspec.Struct, tag="let_go", frozen=True):
    """Nobody follows a request any more, and its generation goes on (``Keep.outlives``).

    Answered by its Finished, ABORT with ``GOES_ON``, unless it has ended. Only to workers
    with the capability ``JOURNAL``.
    """

    request_id: str
    seq: Seq = msgspec.UNSET


class Recall(msgspec.Struct, tag="recall", frozen=True, omit_defaults=True):
    """Say what is kept of a generation. Answered by exactly one Recalled.

    ``action``, an open word: ``look``, what it is; ``read``, with its ids; ``follow``,
    with its ids, and if it runs, those that come are this request's from now on, and so
    is its Finished (who followed it before is told ``GOES_ON``); ``cancel``, end it, what
    it has stays kept; ``delete``, end and forget it. Only to workers with the capability
    ``JOURNAL``.
    """

    request_id: str  # of the call, and of what comes of it
    generation_id: str
    owner: bytes
    action: str
    seq: Seq = msgspec.UNSET
    epoch: int = 0  # ``delete`` it only if that is its Keep's; 0: in any case


class ReleaseKV(msgspec.Struct, tag="release_kv", frozen=True):
    """Free KV that a prefill worker holds for a decode leg that will not come.

    Sent to any decode worker: it makes the empty read that frees the blocks.
    """

    request_id: str  # the prefill leg's
    handover: JsonObject
    seq: Seq = msgspec.UNSET


class Settled(msgspec.Struct, tag="settled", frozen=True):
    """What a prefill worker holds for this request is in other hands, or free.

    A hand-over has been passed on to a decode leg or released; or an OrphanedKV is seen
    to. Only to workers with the capability ``ORPHANED_KV``.
    """

    request_id: str  # the prefill leg's, or the OrphanedKV's
    seq: Seq = msgspec.UNSET


class Discard(msgspec.Struct, tag="discard", frozen=True):
    """Delete what was saved for a request whose client will not hear of it.

    Only to workers with the capability ``CAPTURE``.
    """

    hidden_states_path: str  # of its Finished
    seq: Seq = msgspec.UNSET


class Told(msgspec.Struct, tag="told", frozen=True):
    """A client knows of what was saved for its request: it may take it from now on.

    Until then, or Discard, the file is not too old, however long the output takes. Only
    to workers with the capability ``CAPTURE_TOLD``.
    """

    hidden_states_path: str  # of its Finished
    seq: Seq = msgspec.UNSET


class ScrapeMetrics(msgspec.Struct, tag="scrape_metrics", frozen=True):
    """Say what the engine measures; answered by MetricsText.

    Only to workers with the capability ``METRICS``.
    """

    seq: Seq = msgspec.UNSET


class Admin(msgspec.Struct, tag="admin", frozen=True, omit_defaults=True):
    """Do something to the engine itself. Answered by exactly one AdminDone.

    ``action`` is an open word (see ``admin``): a worker that does not know it says so in
    its answer, so a new one needs no capability. Only to workers with ``ADMIN``.
    """

    request_id: str
    action: str
    arguments: JsonObject = {}
    timeout_s: float = 0.0  # after which the worker gives up; 0: never
    seq: Seq = msgspec.UNSET


class WatchKV(msgspec.Struct, tag="watch_kv", frozen=True):
    """Say which blocks of KV are cached, all of them anew, and what changes from then on.

    Answered by KVBlocks: one with ``reset`` first, then the rest of what is there in as
    many as it takes, mixed with changes. Sent again, it begins anew. Only to workers with
    the capability ``KV_EVENTS``.
    """

    seq: Seq = msgspec.UNSET


class Ping(msgspec.Struct, tag="ping", frozen=True):
    """The frontend is alive; every ``HEARTBEAT_INTERVAL_S``."""

    incarnation: str
    seq: Seq = msgspec.UNSET


class Bye(msgspec.Struct, tag="bye", frozen=True):
    """The frontend leaves: whatever it still runs is aborted."""

    reason: str = ""
    seq: Seq = msgspec.UNSET


NumberedFromFrontend = (
    Submit
    | Cancel
    | ReleaseKV
    | Settled
    | Discard
    | Told
    | Ping
    | Bye
    | ScrapeMetrics
    | Admin
    | LetGo
    | Recall
    | WatchKV
)
"""All that has a ``seq``; to add a message is to add it here, or below."""

FromFrontend = Hello | NumberedFromFrontend


# --- worker to frontend ------------------------------------------------------------


class Card(msgspec.Struct, tag="card", frozen=True, omit_defaults=True):
    """Who a worker is and what it serves; the answer to Hello."""

    protocol_version: int
    worker_id: str
    incarnation: str  # new with every start of the process
    role: Role
    model: str  # the served name
    max_model_len: int
    vocab_size: int
    block_size: int
    engine: str  # "vllm" | "sim"
    engine_version: str
    tokenizer_sha256: str = ""  # of tokenizer.json; empty: unknown
    revision: str = ""
    dtype: str = ""
    connector: str = ""  # KV connector's name; empty: none
    connector_compatibility: str = ""  # equal on both sides of a hand-over
    max_num_seqs: int = 0
    num_kv_blocks: int = 0
    capabilities: list[str] = []
    weight_version: str = "default"  # vLLM's name for the weights it started with
    # Whose hidden states the engine keeps beside the KV; equal on both sides of a
    # hand-over, ascending.
    hidden_state_layers: list[int] = []
    world_size: int = 1  # devices of its engine, of all ranks
    # How a sequence goes on here behind output of another worker (``Submit.num_prior``).
    # "": it does not, prompt and output are a plain prompt to it. "same_rng": with the
    # same draws, penalties and grammar. "bitwise": also with the very same numbers.
    exactness: str = ""


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """This Hello is not accepted; *reason* is one sentence for the operator."""

    reason: str


class Tokens(msgspec.Struct, array_like=True, frozen=True):
    """New tokens of one request."""

    request_id: str
    index: int  # of the first id among what this Submit brings
    token_ids: bytes  # (num_new_tokens,) packed
    logprobs: Logprobs | None = None
    # Of Submit's ids; with the first token alone.
    num_cached_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0


class Finished(msgspec.Struct, frozen=True, omit_defaults=True):
    """The one end of one request; nothing follows it."""

    request_id: str
    reason: FinishReason
    num_output_tokens: int  # as many ids as Tokens carried
    num_prompt_tokens: int = 0  # without ``Submit.num_prior``
    num_cached_tokens: int = 0  # of Submit's ids, with them
    # The stop token that matched; BY_PAUSE, AGAIN, GRAMMAR_REJECTS_PREFIX.
    stop_reason: int | str | None = None
    error_kind: ErrorKind | None = None
    error: str = ""
    prompt_token_ids: bytes | None = None  # as the engine saw them; if echo_prompt
    handover: JsonObject | None = None  # of Leg.PREFILL; opaque, for the decode leg
    kv_transfer_params: JsonObject | None = None  # what a client may see
    prompt_logprobs: Logprobs | None = None  # (num_prompt_tokens - 1) rows
    queue_s: float = 0.0  # waiting in the worker and its engine
    prefill_s: float = 0.0


class Batch(msgspec.Struct, tag="batch", frozen=True):
    """All that one engine step has for one frontend; the ends follow the tokens."""

    tokens: list[Tokens] = []
    finished: list[Finished] = []
    seq: Seq = msgspec.UNSET


class Load(msgspec.Struct, tag="load", frozen=True, omit_defaults=True):
    """The worker is alive, and how busy; every ``HEARTBEAT_INTERVAL_S``."""

    incarnation: str
    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0  # used share of the KV blocks, 0..1
    num_waiting_tokens: int = 0  # prompt tokens not yet prefilled
    draining: bool = False
    num_requests: int = 0  # open in the worker, for all frontends
    num_steps: int | None = None  # that its engine has made; None: it does not count
    seq: Seq = msgspec.UNSET
    num_frontends: int = 0  # that are connected; 0: an older worker does not say


class Adapter(msgspec.Struct, array_like=True, frozen=True):
    """A LoRA adapter that a worker has loaded."""

    name: str
    update: int  # of the Admin that loaded it


class Status(msgspec.Struct, tag="status", frozen=True, omit_defaults=True):
    """What Admins have made of a worker: after Card, and whenever it changes.

    Tokens of old weights precede the Status that tells of new ones, and tokens of new
    weights follow it: so a frontend knows which weights each id is of. Only to frontends with the capability ``STATUS``.
    """

    weight_version: str = "default"
    # Which update brought the weights; of two workers, the one with the larger number
    # has the newer ones. 0: those it started with.
    update: int = 0
    adapters: list[Adapter] = []
    paused: bool = False  # nothing is computed until it is resumed
    sleep_level: int = 0  # 0: awake
    busy: str = ""  # the action under way: no steps are made meanwhile
    cache_epoch: int = 0  # how often the prefix cache was emptied
    fault: str = ""  # why it cannot serve until an update succeeds; empty: it can
    seq: Seq = msgspec.UNSET


class AdminDone(msgspec.Struct, tag="admin_done", frozen=True, omit_defaults=True):
    """The one answer to an Admin; a Status that it led to precedes it."""

    request_id: str
    error: str = ""  # empty: it is done
    # "invalid" | "not_found" | "unsupported" | "busy" | "timeout" | "failed"
    error_kind: str = ""
    result: JsonObject = {}
    seq: Seq = msgspec.UNSET


class Recalled(msgspec.Struct, tag="recalled", frozen=True, omit_defaults=True):
    """The one answer to a Recall: the generation as it was when that was read."""

    request_id: str
    # "unknown", also if it is another's; "running"; "ended"; "lost": it was kept here, and
    # had to make room, or nobody asked for it in time. "invalid": another action.
    state: str
    epoch: int = 0
    is_followed: bool = False  # by a frontend, before this Recall
    outlives: bool = False
    # From here on by ``read`` and ``follow`` alone.
    context: bytes = b""  # of the Keep
    token_ids: bytes = b""  # (num_tokens,) packed: Submit's, then the new ones
    num_new_tokens: int = 0  # of these, that came by Tokens; the next one's index
    logprobs: Logprobs | None = None  # of the last tokens; Keep's, then the new ones
    num_cached_tokens: int = 0  # of Submit's ids, as its first Tokens said
    # (index among the new tokens, version), ascending, where the weights changed
    weight_versions: list[tuple[int, str]] = []
    finished: Finished | None = None  # as its last request's; with "ended"
    seq: Seq = msgspec.UNSET


class EngineDead(msgspec.Struct, tag="engine_dead", frozen=True):
    """The engine died; Finished of every open request precedes it. The worker exits."""

    reason: str
    seq: Seq = msgspec.UNSET


class OrphanedKV(msgspec.Struct, tag="orphaned_kv", frozen=True):
    """KV is held for a frontend that is gone: have it released, as by ReleaseKV.

    Answered by Settled; else sent again. Only to frontends with the capability
    ``ORPHANED_KV``.
    """

    request_id: str  # the worker's
    handover: JsonObject
    seq: Seq = msgspec.UNSET


class MetricsText(msgspec.Struct, tag="metrics_text", frozen=True, omit_defaults=True):
    """What the engine measures: vLLM's families (``vllm:*``) and nothing else."""

    text: str = ""  # in Prometheus' text format; empty: nothing to say
    seq: Seq = msgspec.UNSET


class KVBlocks(msgspec.Struct, tag="kv_blocks", frozen=True, omit_defaults=True):
    """Full blocks of KV that a worker has cached, or has no more, by hash (``blocks``).

    A set: what is stored may have been known, what is removed may have been unknown, and
    no hash is in both. Blocks have ``Card.block_size`` ids. It tells what was so a moment ago:
    a hint for routing. Only to frontends that have sent WatchKV.
    """

    reset: bool = False  # first of all: what was known before counts no more
    stored: bytes = b""  # (num_stored,) packed u64
    removed: bytes = b""  # (num_removed,) packed u64
    seq: Seq = msgspec.UNSET


BetweenBatches = (
    Load
    | OrphanedKV
    | EngineDead
    | MetricsText
    | Status
    | AdminDone
    | Recalled
    | KVBlocks
)
"""All that has a ``seq`` but Batch, which comes far more often."""

NumberedFromWorker = Batch | BetweenBatches

FromWorker = Card | Refused | NumberedFromWorker
