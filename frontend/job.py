"""One sequence as asked for, how it ends, and who takes its tokens."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import msgspec

from tokenwire.protocol.messages import FinishReason, JsonObject, Logprobs, Sampling

from .errors import ApiError
from .kept import Keeping
from .prefixes import Ahead

__all__ = ["Cached", "End", "Job", "Nobody", "Reasoning", "Sink"]


class Reasoning(msgspec.Struct, frozen=True):
    """What an engine must know of reasoning to apply a grammar behind it."""

    ended: bool | None = None  # None: it looks at the prompt with its own parser
    parser_kwargs: JsonObject | None = None  # for that parser


class Cached(msgspec.Struct, frozen=True):
    """Where the beginning of a sequence was computed: it may still be cached there."""

    worker_id: str
    incarnation: str  # of the worker: a restart empties its cache
    num_tokens: int


class Job(msgspec.Struct, frozen=True):
    """What to generate: one sequence."""

    prompt_token_ids: list[int]  # (num_prompt_tokens,)
    sampling: Sampling
    echo_prompt: bool = False  # bring the ids back as the engine saw them
    priority: int = 0
    cache_salt: str | None = None
    prompt_only: bool = False  # what is generated is not wanted
    migratable: bool = True  # may go on at another worker
    exactness: str = ""  # only as exactly, see ``Card``; empty: as may be
    reasoning: Reasoning = Reasoning()
    session_id: str | None = None  # whose workers are preferred, see ``affinity``
    capture: bool = False  # the client can see where hidden states are saved
    lora: str = ""  # name of the adapter; empty: the model itself
    output_token_ids: list[int] = []
    """What it has had before: it goes on behind them, (num_output_tokens,)."""
    end_ids: Collection[int] = frozenset()
    """Those that end an answer, unless the parameters ignore them."""
    cached: Cached | None = None  # where these were generated; None: nobody has said
    comes_back: bool = False  # its client gets ids, and may want to go on behind them
    keeping: Keeping | None = None  # how its worker is to keep what it brings
    ahead: Ahead | None = None  # of a long prompt

    @property
    def repeatable(self) -> bool:
        """Whether two workers draw the same first token."""
        return self.sampling.temperature == 0 or self.sampling.seed is not None


class End(msgspec.Struct):
    """How a sequence ended, and all that is known then."""

    reason: FinishReason
    error: ApiError | None = None
    stop_reason: int | str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    prompt_token_ids: list[int] | None = None
    kv_transfer_params: JsonObject | None = None
    prompt_logprobs: Logprobs | None = None  # (num_prompt_tokens - 1) rows
    weight_version: str | None = None  # of the last id
    # (index of the first id, version), ascending, where ids are of several
    weight_versions: list[tuple[int, str]] = []
    called_tools: bool = False  # a parser found calls, and the output stopped
    worker_ids: dict[str, str] = {}
    timing: dict[str, float] = {}  # in ms

    @property
    def finish_reason(self) -> str:
        """What the response says."""
        return "tool_calls" if self.called_tools else self.reason.value

    @property
    def by_token(self) -> bool:
        """Whether the last id ended the output, as EOS or a stop token does.

        A string names another cause: a stop string, or vLLM's repetition detection.
        """
        return self.reason is FinishReason.STOP and not isinstance(
            self.stop_reason, str
        )

    def cut(self, num_tokens: int) -> None:
        """Let it be of *num_tokens* ids: a stop string was found in those before more.

        The engine may have gone on with other weights than any id was delivered of.
        """
        within = [
            one for one in self.weight_versions if not one[0] or one[0] < num_tokens
        ]
        if len(within) < len(self.weight_versions):
            self.weight_versions = within
            self.weight_version = within[-1][1] if within else None


class Sink(Protocol):
    """Who takes a sequence's tokens; called on the event loop, must not block."""

    def tokens(
        self, token_ids: list[int], logprobs: Logprobs | None, end: End | None
    ) -> None:
        """Take new ids, and the end if it is known with them."""

    def ended(self, end: End) -> None:
        """Take an end that came alone."""


class Nobody:
    """The sink of a sequence that goes on without a client."""

    def tokens(
        self, token_ids: list[int], logprobs: Logprobs | None, end: End | None
    ) -> None:
        """Take new ids, and forget them."""

    def ended(self, end: End) -> None:
        """Take an end, and forget it."""
