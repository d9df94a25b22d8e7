"""The door to an engine: token ids in, token ids out, one end per request.

Laws, kept by every engine and tested on each by the same contract tests:
- After ``submit`` returns, exactly one ``EngineFinished`` comes for that request,
  also after ``abort`` and when the engine dies.
- Outputs of one request come in order; nothing follows its end.
- ``submit`` and ``abort`` never block the event loop.
- A request with ``num_prior`` brings the ids that one would have brought which was never
  cut, behind those that it names, and none of these again; as ``EngineInfo.exactness``
  says. An engine without exactness is given none.
- An engine that tells of blocks keeps its ``CachedBlocks`` as its prefix cache is, or was
  a moment ago: what it names is under the request's own cache salt and adapter. What an
  action has emptied is gone from there before its ``done``.
- After ``administer`` returns, exactly one call of ``done`` comes. Tokens of old weights
  have reached the sink before it, and those of new weights come after it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from tokenwire.protocol.admin import Action
from tokenwire.protocol.messages import (
    ErrorKind,
    FinishReason,
    JsonObject,
    Leg,
    Logprobs,
    Sampling,
    Trace,
)

__all__ = [
    "GRAMMAR_REFUSAL",
    "AdminOutcome",
    "Engine",
    "EngineFinished",
    "EngineInfo",
    "EngineLoad",
    "EngineRequest",
    "EngineSink",
    "EngineStartError",
    "EngineTokens",
    "Progress",
]


GRAMMAR_REFUSAL = (
    "the output so far does not fit the structured output that is asked for"
)
"""The error beside the stop reason ``GRAMMAR_REJECTS_PREFIX``."""


@dataclass(slots=True, frozen=True)
class EngineRequest:
    """One sequence to run."""

    request_id: str  # ours, unique within the engine
    token_ids: list[int]  # (num_prompt_tokens + num_prior,)
    sampling: Sampling
    leg: Leg = Leg.FULL
    handover: JsonObject | None = None  # a prefill leg's, for Leg.DECODE
    kv_transfer_params: JsonObject | None = None
    priority: int = 0
    cache_salt: str | None = None
    reasoning_ended: bool | None = None  # None: the engine looks at the prompt
    reasoning_parser_kwargs: JsonObject | None = None
    capture_tokens: int = 0  # of the prompt, whose hidden states are saved
    lora: str = ""  # a loaded adapter; empty: the model itself
    # Of ``token_ids``, the last ones: output that the sequence has had. See ``Submit``.
    num_prior: int = 0
    trace: Trace | None = None  # what the engine's own spans hang below; checked

    @property
    def num_prompt_tokens(self) -> int:
        """The length of the prompt alone."""
        return len(self.token_ids) - self.num_prior

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt alone; the ids themselves where that is all of them."""
        if not self.num_prior:
            return self.token_ids
        return self.token_ids[: self.num_prompt_tokens]


@dataclass(slots=True)  # not frozen: one per token, and frozen ones cost 4x to make
class EngineTokens:
    """New tokens of one request, in order; never empty."""

    request_id: str
    token_ids: list[int]  # (num_new_tokens,)
    logprobs: Logprobs | None = None
    num_cached_tokens: int = 0  # of the request's ids; with the first token alone


@dataclass(slots=True, frozen=True)
class EngineFinished:
    """The end of one request."""

    request_id: str
    reason: FinishReason
    num_prompt_tokens: int = 0  # without output that it had before
    num_cached_tokens: int = 0  # of the request's ids, with that output
    stop_reason: int | str | None = None
    error_kind: ErrorKind | None = None
    error: str = ""
    prompt_token_ids: list[int] = field(
        default_factory=list[int]
    )  # as the engine saw them
    handover: JsonObject | None = None  # of Leg.PREFILL, if KV is held
    kv_transfer_params: JsonObject | None = None  # what a client may see
    prompt_logprobs: Logprobs | None = None
    queue_s: float = 0.0  # waiting inside the engine
    prefill_s: float = 0.0


@dataclass(slots=True, frozen=True)
class EngineInfo:
    """What an engine serves, known once it has started."""

    engine: str  # "vllm" | "sim"
    version: str
    max_model_len: int
    vocab_size: int
    block_size: int
    num_kv_blocks: int
    max_num_seqs: int
    dtype: str
    connector: str = ""
    connector_compatibility: str = ""
    world_size: int = 1  # devices, of all ranks
    exactness: str = ""  # of requests with ``num_prior``; see ``Card``
    tells_blocks: bool = False  # keeps the ``CachedBlocks`` that it was given


@dataclass(slots=True, frozen=True)
class AdminOutcome:
    """How an action ended."""

    error: str = ""  # one sentence; empty: it is done
    kind: str = ""  # see ``AdminDone.error_kind``
    result: JsonObject = field(default_factory=dict[str, Any])
    is_broken: bool = False  # the weights are neither the old nor the new ones
    is_stuck: bool = False  # it failed, and the engine does not go on
    is_awake: bool = True  # of WakeUp: all memory is there again


@dataclass(slots=True, frozen=True)
class EngineLoad:
    """How busy an engine is at this moment."""

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0  # used share of the KV blocks, 0..1
    num_steps: int | None = None  # made since the start; None: it does not count
    num_kv_expired: int = 0  # hand-overs left to their lease; of a simulated engine


class EngineSink(Protocol):
    """Who takes an engine's outputs; called on the event loop, must not block."""

    def outputs(
        self, tokens: list[EngineTokens], finished: list[EngineFinished]
    ) -> None:
        """Take what one step, or one wake-up, brought; the ends follow the tokens."""

    def died(self, reason: str) -> None:
        """Take note that the engine is gone; every open request has ended before."""


Progress = Callable[[str], None]
"""Told in a few words which phase of the start has begun."""


class Engine(Protocol):
    """An engine behind a worker."""

    async def start(self, sink: EngineSink, progress: Progress) -> EngineInfo:
        """Load, and return what is served.

        Raises:
            EngineStartError: It cannot start; one sentence for the operator.
        """
        ...

    def submit(self, request: EngineRequest) -> None:
        """Take a request; whatever is wrong with it arrives as its end."""

    def abort(self, request_id: str) -> None:
        """End a request soon, with reason ``abort``; unknown ids are ignored."""

    def release_kv(self, request_id: str, handover: JsonObject) -> None:
        """On a decode engine: let the prefill engine free what it holds."""

    def unable(self, action: Action) -> str:
        """Return why *action* can never be done here; empty: it may be tried.

        Asked before anything is ended for its sake.
        """
        ...

    def administer(
        self, action: Action, timeout_s: float, done: Callable[[AdminOutcome], None]
    ) -> None:
        """Do *action*, one at a time; only a Resume may cross a Pause, and ends it.

        Args:
            action: What to do. The caller ends requests itself where a mode says
                ``abort``.
            timeout_s: After which the engine gives up; 0: never.
            done: Called once, on the event loop, not before this returns.
        """

    def load(self) -> EngineLoad:
        """Return how busy the engine is."""
        ...

    async def stop(self) -> None:
        """Abort what runs, free everything, leave no process behind."""


class EngineStartError(Exception):
    """The engine could not start; the text is one sentence for the operator."""
