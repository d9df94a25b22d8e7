"""What must be equal where a generation goes on, and what would better be.

Laws:
- Nothing is hashed for a request that asks for nothing of this.
- A difference in the contract refuses a resume, by its field; one in the environment
  lowers what is promised, and is told.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from tokenwire.protocol.messages import Sampling

from .checkpoint import (
    Adapter,
    Contract,
    Environment,
    Grammar,
    Holder,
    SamplingParams,
    json_sha256,
)
from .continuation import is_plain
from .job import Job
from .peer import Peer
from .planning import template_kwargs
from .policy import Policy
from .resume_errors import mismatch
from .schema import ChatRequest, CommonRequest
from .tokenizer import TextModel
from .tools import template_tools

__all__ = [
    "BEST_EFFORT",
    "Terms",
    "check_contract",
    "check_sampling",
    "differences",
    "environment_of",
    "holder_of",
    "on_worker",
    "promise",
    "sampling_params",
    "text_sha256",
]

BEST_EFFORT = "best_effort"
SAME_RNG = "same_rng"

_CODES = {
    "model": "model_mismatch",
    "revision": "model_mismatch",
    "weight_version": "model_mismatch",
    "quantization": "model_mismatch",
    "tokenizer_sha256": "tokenizer_mismatch",
    "vocab_size": "tokenizer_mismatch",
    "chat_template_sha256": "chat_template_mismatch",
    "adapter": "adapter_mismatch",
    "grammar": "grammar_mismatch",
    "reasoning_parser": "parser_mismatch",
    "tool_parser": "parser_mismatch",
    "tools_sha256": "tools_mismatch",
    "template_kwargs_sha256": "chat_template_mismatch",
    "cache_salt_sha256": "prompt_mismatch",
}
"""The error's code for each field of a contract."""

_DRAWS = {"runner", "rng", "speculative"}
"""Fields of the environment that decide which random numbers there are. On the others
depend the last bits of the numbers that are drawn by; on the engine, everything."""


@dataclass(slots=True, frozen=True)
class Terms:
    """A request, as far as its contract is concerned."""

    request: CommonRequest
    job: Job
    model: TextModel
    policy: Policy
    served_model: str
    adapter_update: int = 0  # of the admin action that loaded the job's adapter

    def contract(self) -> Contract:
        """Return what the request itself says; nothing of the worker."""
        request, job, model = self.request, self.job, self.model
        structure = job.sampling.structured_output
        grammar = None
        if structure is not None:
            grammar = Grammar(structure.kind, json_sha256(structure))
        adapter = None
        if job.lora:
            adapter = Adapter(job.lora, update=self.adapter_update)
        contract = Contract(
            model=self.served_model,
            tokenizer_sha256=model.sha256 or None,
            vocab_size=model.vocab_size,
            adapter=adapter,
            grammar=grammar,
            cache_salt_sha256=text_sha256(job.cache_salt),
        )
        if isinstance(request, ChatRequest):
            contract = msgspec.structs.replace(contract, **self._of_chat(request))
        return contract

    def _of_chat(self, request: ChatRequest) -> dict[str, Any]:
        """Return what decides how a conversation is rendered, and its answer parsed."""
        parsers = self.policy.parsers
        tools: str | None = None
        if request.tools:
            tools = json_sha256(
                {
                    "tools": template_tools(request.tools),
                    "tool_choice": request.tool_choice,
                    "parallel_tool_calls": request.parallel_tool_calls,
                }
            )
        kwargs = template_kwargs(request)
        if request.include_reasoning is False:
            kwargs["include_reasoning"] = False
        template = self.model.template_source(
            request.chat_template, has_tools=bool(request.tools)
        )
        return {
            "chat_template_sha256": text_sha256(template),
            "reasoning_parser": parsers and parsers.choice.reasoning_parser,
            "tool_parser": parsers and parsers.choice.tool_call_parser,
            "tools_sha256": tools,
            "template_kwargs_sha256": json_sha256(kwargs) if kwargs else None,
        }


def on_worker(contract: Contract, peer: Peer) -> Contract:
    """Return *contract* with what a worker has."""
    card = peer.card
    if card is None:
        return contract
    return msgspec.structs.replace(
        contract, revision=card.revision or None, weight_version=peer.weight_version
    )


def environment_of(peer: Peer | None) -> Environment:
    """Return what is known of a worker's engine."""
    card = peer.card if peer is not None else None
    if card is None:
        return Environment()
    return Environment(
        engine=card.engine or None,
        engine_version=card.engine_version or None,
        dtype=card.dtype or None,
        world_size=card.world_size,
    )


def holder_of(peer: Peer | None) -> Holder | None:
    """Return who may have cached what it has computed; None: nobody has."""
    card = peer.card if peer is not None else None
    return None if card is None else Holder(card.worker_id, card.incarnation)


def sampling_params(
    sampling: Sampling, request: CommonRequest, stop: Iterable[str]
) -> SamplingParams:
    """Return what decides which tokens come, in the one form of checkpoints."""
    allowed = sampling.allowed_token_ids
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        temperature=float(sampling.temperature),
        top_p=float(sampling.top_p),
        top_k=sampling.top_k,
        min_p=float(sampling.min_p),
        seed=sampling.seed,
        presence_penalty=float(sampling.presence_penalty),
        frequency_penalty=float(sampling.frequency_penalty),
        repetition_penalty=float(sampling.repetition_penalty),
        stop=list(stop),
        stop_token_ids=sorted(set(sampling.stop_token_ids)),
        include_stop_str_in_output=bool(request.include_stop_str_in_output),
        skip_special_tokens=request.skip_special_tokens is not False,
        ignore_eos=sampling.ignore_eos,
        logit_bias={
            str(token_id): float(value)
            for token_id, value in sorted((sampling.logit_bias or {}).items())
        },
        allowed_token_ids=None if allowed is None else sorted(set(allowed)),
        bad_words=sampling.bad_words,
    )


def check_contract(theirs: Contract, ours: Contract, where: str) -> None:
    """Refuse to go on under another contract.

    Args:
        theirs: Of the output that is to be resumed.
        ours: Of this request, here.
        where: The path of *theirs* from ``nvext.resume_from``.

    Raises:
        ApiError: 409 with the first field that differs, and both values.
    """
    for field, code in _CODES.items():
        had, has = getattr(theirs, field), getattr(ours, field)
        if had != has:
            raise mismatch(code, f"{where}.{field}", _shown(had), _shown(has))


def check_sampling(theirs: SamplingParams, ours: SamplingParams, where: str) -> None:
    """Refuse to go on with other parameters.

    Raises:
        ApiError: 409 with the first that differs, and both values.
    """
    for field in SamplingParams.__struct_fields__:
        had, has = getattr(theirs, field), getattr(ours, field)
        if had != has:
            raise mismatch("sampling_mismatch", f"{where}.{field}", had, has)


def differences(theirs: Environment, ours: Environment) -> list[str]:
    """Return the fields that are known on both sides, and differ."""
    return [
        field
        for field in Environment.__struct_fields__
        if None not in (getattr(theirs, field), getattr(ours, field))
        and getattr(theirs, field) != getattr(ours, field)
    ]


def promise(sampling: Sampling, offered: str, differs: Sequence[str] = ()) -> str:
    """Return how exactly an output goes on: ``nvext.exactness``'s words.

    Args:
        sampling: Of the request.
        offered: What the worker's card says; empty: it gets P + O as a prompt.
        differs: Fields of the environment that are not what they were.
    """
    is_greedy = sampling.temperature == 0
    if "engine" in differs:
        return BEST_EFFORT
    if not is_greedy and (sampling.seed is None or _DRAWS & set(differs)):
        return BEST_EFFORT  # other draws than it would have had
    if not offered:
        return SAME_RNG if is_greedy and is_plain(sampling) else BEST_EFFORT
    return SAME_RNG if differs else offered


def text_sha256(text: str | None) -> str | None:
    """Return the hash of a text's UTF-8; None of none."""
    if text is None:
        return None
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def _shown(value: object) -> str:
    if isinstance(value, Grammar):
        return f"{value.kind} {value.sha256}"
    if isinstance(value, Adapter):
        return f"{value.id} (loaded by update {value.update})"
    return "none" if value is None else str(value)
