"""The types of all answers, for ``/openapi.json``: nothing here is ever encoded.

``shapes.py`` writes the bytes; tests validate what it writes against these. A field
that may be ``UNSET`` is absent unless it is asked for, and never null then.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from .checkpoint import Checkpoint

__all__ = [
    "Answer",
    "ChatCompletion",
    "ChatCompletionChunk",
    "Completion",
    "CompletionChunk",
    "ErrorAnswer",
    "Health",
    "Live",
    "Model",
    "ModelList",
    "Ready",
    "Usage",
    "Version",
]

Count = Annotated[int, msgspec.Meta(ge=0)]
Number = Annotated[float, msgspec.Meta(ge=0)]  # of milliseconds
Logprob = Annotated[float, msgspec.Meta(le=0)]
TokenIds = list[Count]
FinishReason = Literal["stop", "length"]
ChatFinishReason = Literal["stop", "length", "tool_calls"]


class Answer(msgspec.Struct, forbid_unknown_fields=True):
    """An object with these keys and no others."""


# --- what both endpoints share -----------------------------------------------------------


class PromptTokensDetails(Answer):
    """Of the prompt's tokens."""

    cached_tokens: Count


class CompletionTokensDetails(Answer):
    """Of the output's tokens."""

    reasoning_tokens: Count | UnsetType = UNSET  # where a parser counts them
    resumed_prefix_tokens: Count | UnsetType = UNSET  # of earlier output, not counted


class Usage(Answer):
    """How many tokens there were."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class PromptLogprob(Answer):
    """One candidate at a place in the prompt."""

    logprob: Logprob
    rank: Count
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""Per prompt token its candidates, by id; the first, which nothing precedes, is null."""


class WorkerId(Answer):
    """Who served the request."""

    decode_worker_id: str
    prefill_worker_id: str | UnsetType = UNSET


class Timing(Answer):
    """How long it took, and what did not have to be computed."""

    total_ms: Number
    cached_tokens: Count
    queue_ms: Number | UnsetType = UNSET
    prefill_ms: Number | UnsetType = UNSET
    ttft_ms: Number | UnsetType = UNSET


class EngineData(Answer):
    """The whole sequence; both completion lists have one length."""

    prompt_token_ids: TokenIds
    completion_token_ids: TokenIds
    completion_logprobs: list[Logprob]


class KeptPrefix(Answer):
    """What became of the ids of earlier turns."""

    kept: Count
    drifted: bool  # whether tokenizing their text would have made other ids


class WeightsFrom(Answer):
    """Which weights the ids from one on are of."""

    version: str
    first_index: Count


class GenerationInfo(Answer):
    """What a resumable generation is, in its first chunk."""

    id: str
    prompt_tokens: Count
    contract: str  # sha256:...
    exactness: Literal["best_effort", "same_rng", "bitwise"]  # of a resume
    parent: str | UnsetType = UNSET  # the one that this resumes
    seed: int | UnsetType = UNSET
    seed_source: Literal["request", "frontend"] | UnsetType = UNSET


class ResumeInfo(Answer):
    """How an answer goes on from earlier output, in its first chunk."""

    prefix_tokens: Count  # of that output
    exactness: Literal["best_effort", "same_rng", "bitwise"]
    downgrades: list[str]  # what it is less exact for
    cached_tokens: Count
    recomputed_tokens: Count


class AnswerNvext(Answer):
    """What ``nvext`` of the request asked for; selected fields are in the final chunk."""

    completion_token_ids: TokenIds | UnsetType = UNSET
    prompt_token_ids: TokenIds | UnsetType = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET
    worker_id: WorkerId | UnsetType = UNSET
    timing: Timing | UnsetType = UNSET
    stop_reason: int | str | UnsetType = UNSET
    engine_data: EngineData | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    weight_version: str | UnsetType = UNSET
    weight_versions: list[WeightsFrom] | UnsetType = UNSET  # if there were several
    prefix: KeptPrefix | UnsetType = UNSET  # with any selector, if turns were given
    # of a resumable answer
    token_offset: Count | UnsetType = UNSET  # ids that the client has already
    seq: Count | UnsetType = UNSET  # of the event
    generation: GenerationInfo | UnsetType = UNSET  # in the first chunk
    checkpoint: Checkpoint | UnsetType = UNSET
    resume: ResumeInfo | UnsetType = UNSET  # in the first chunk, if it resumes


class _Generated(Answer):
    """The root of all that is generated."""

    id: str
    created: int  # Unix seconds
    model: str
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET  # vLLM's place
    nvext: AnswerNvext | UnsetType = UNSET


class _Choice(Answer):
    """What the choices of both endpoints have."""

    index: Count
    # vLLM's and SGLang's places
    token_ids: TokenIds | UnsetType = UNSET
    prompt_token_ids: TokenIds | UnsetType = UNSET


# --- chat --------------------------------------------------------------------------------


class ChatTopLogprob(Answer):
    """A likely token."""

    token: str
    logprob: Logprob
    bytes: list[int]


class ChatTokenLogprob(ChatTopLogprob):
    """An output token."""

    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(Answer):
    """One entry per output token."""

    content: list[ChatTokenLogprob]
    refusal: None


class FunctionCall(Answer):
    """Which function, with what."""

    name: str
    arguments: str  # JSON, as the model wrote it


class ToolCall(Answer):
    """One call."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(Answer):
    """What the assistant says."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    # where a parser is configured
    reasoning: str | UnsetType | None = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(_Choice, kw_only=True):
    """One output."""

    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason


class ChatCompletion(_Generated, kw_only=True):
    """A whole answer of ``/v1/chat/completions``."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    # vLLM's places
    prompt_token_ids: TokenIds | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class FunctionCallDelta(Answer):
    """A part of a call: its name comes whole, its arguments bit by bit."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(Answer):
    """A part of one call; id, type and name come with the first."""

    index: Count
    function: FunctionCallDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(Answer):
    """What a chunk adds; role comes with a choice's first chunk."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    # where a parser is configured
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(_Choice, kw_only=True):
    """A part of one output."""

    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None


class ChatCompletionChunk(_Generated, kw_only=True):
    """One event of a streamed chat; choices are empty on the usage chunk alone."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType = UNSET
    prompt_token_ids: TokenIds | UnsetType = UNSET  # vLLM's place, on the first chunk


# --- completions -------------------------------------------------------------------------


class CompletionLogprobs(Answer):
    """Four lists of one length; entries of a prompt's first token are null."""

    text_offset: list[Count]
    token_logprobs: list[Logprob | None]
    tokens: list[str]
    top_logprobs: list[dict[str, Logprob] | None]


class _CompletionChoice(_Choice, kw_only=True):
    text: str
    logprobs: CompletionLogprobs | None


class CompletionChoice(_CompletionChoice, kw_only=True):
    """One output."""

    finish_reason: FinishReason
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET  # vLLM's place


class Completion(_Generated, kw_only=True):
    """A whole answer of ``/v1/completions``."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunkChoice(_CompletionChoice, kw_only=True):
    """A part of one output."""

    finish_reason: FinishReason | None


class CompletionChunk(_Generated, kw_only=True):
    """One event of a streamed completion."""

    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
    usage: Usage | UnsetType = UNSET


# --- the rest ----------------------------------------------------------------------------


class ErrorObject(Answer):
    """What went wrong."""

    message: str
    type: Literal[
        "invalid_request_error",
        "rate_limit_error",
        "server_error",
        "service_unavailable_error",
    ]
    param: str | None  # the field at fault
    code: str | None


class Interruption(Answer):
    """What is left of a resumable generation that ended early."""

    reason: Literal["draining", "worker_lost", "deadline"]
    resumable: bool
    retry_after_ms: Count
    checkpoint: Checkpoint


class ErrorAnswer(Answer):
    """Every answer that is no success; also the event of a stream that fails."""

    error: ErrorObject
    nvext: Interruption | UnsetType = UNSET


class ModelPermission(Answer):
    """What vLLM says of every model."""

    id: str
    object: Literal["model_permission"]
    created: int  # Unix seconds
    allow_create_engine: bool
    allow_sampling: bool
    allow_logprobs: bool
    allow_search_indices: bool
    allow_view: bool
    allow_fine_tuning: bool
    organization: str
    group: None
    is_blocking: bool


class Model(Answer):
    """The served model."""

    id: str
    object: Literal["model"]
    created: int  # Unix seconds
    owned_by: str
    root: str
    parent: None
    max_model_len: int | None  # null until a worker is known
    permission: list[ModelPermission]


class ModelList(Answer):
    """All models: one."""

    object: Literal["list"]
    data: list[Model]


class Version(Answer):
    """The release."""

    version: str


class Live(Answer):
    """The process runs."""

    status: Literal["live"]


class WorkerCounts(Answer):
    """Workers that take requests."""

    prefill: Count
    decode: Count
    aggregated: Count


class Ready(Answer):
    """Whether generation can be served."""

    ready: bool
    workers: WorkerCounts


class HealthInstance(Answer):
    """A worker as this frontend sees it; what is zero or empty is absent."""

    endpoint: str
    state: Literal["connecting", "hello", "ready", "refused", "closed"]
    worker_id: str | UnsetType = UNSET
    role: Literal["prefill", "decode", "aggregated"] | UnsetType = UNSET
    reason: str | UnsetType = UNSET
    num_running: Count | UnsetType = UNSET
    num_waiting: Count | UnsetType = UNSET
    kv_usage: float | UnsetType = UNSET
    draining: bool | UnsetType = UNSET
    leaving: bool | UnsetType = UNSET
    num_open: Count | UnsetType = UNSET
    weight_version: str | UnsetType = UNSET
    exactness: str | UnsetType = UNSET  # how output goes on there
    adapters: list[str] | UnsetType = UNSET
    paused: bool | UnsetType = UNSET
    sleeping: bool | UnsetType = UNSET
    busy: str | UnsetType = UNSET  # the admin action under way


class HealthProcess(Answer):
    """One process of this frontend, as it last said within 2 s."""

    process: Count  # its number
    pid: Count
    ready: bool
    connections: Count


class Health(Answer):
    """Whether generation can be served, and by whom."""

    status: Literal["ok", "unavailable"]
    # Both for who has a key, where keys are needed.
    instances: list[HealthInstance] | UnsetType = UNSET
    processes: list[HealthProcess] | UnsetType = UNSET  # with --processes
