"""Our sampling parameters as vLLM's, for each leg of a request."""

from __future__ import annotations

import json
from typing import Any

from tokenwire.protocol.messages import JsonObject, Leg, Sampling, StructuredOutput
from tokenwire.worker.engine import EngineRequest

from .binding import Vllm
from .capture import CAPTURE_KEY
from .resume import NUM_PROMPT_KEY

__all__ = ["sampling_params"]

KEEP_KV: JsonObject = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What makes a prefill engine hold its KV blocks (vLLM 0.32, NIXL connector)."""


def sampling_params(
    vllm: Vllm, request: EngineRequest, capture: JsonObject | None = None
) -> Any:  # vLLM's SamplingParams, untyped here
    """Return vLLM's sampling parameters for *request*.

    Args:
        vllm: The names of vLLM.
        request: What to run.
        capture: What our connector is to save of it, if anything.

    Raises:
        ValueError: A parameter is out of its range; vLLM's sentence.
    """
    sampling = request.sampling
    max_tokens = sampling.max_tokens
    min_tokens = sampling.min_tokens
    prompt_logprobs = sampling.prompt_logprobs
    transfer = request.kv_transfer_params
    match request.leg:
        case Leg.PREFILL:
            max_tokens = request.num_prior + 1
            min_tokens = min(min_tokens, max_tokens)  # else vLLM refuses the request
            transfer = KEEP_KV
        case Leg.DECODE:
            # The prefill leg has answered them. Here they would make the scheduler
            # load nothing and compute the whole prompt again.
            prompt_logprobs = None
            transfer = request.handover
        case Leg.FULL:
            pass
    transfer = {k: v for k, v in (transfer or {}).items() if k != CAPTURE_KEY}
    if capture is not None:
        transfer[CAPTURE_KEY] = capture
    extra: JsonObject = {"kv_transfer_params": transfer} if transfer else {}
    if request.num_prior:
        extra[NUM_PROMPT_KEY] = request.num_prompt_tokens
    return vllm.SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        logprobs=sampling.logprobs,
        prompt_logprobs=prompt_logprobs,
        logit_bias=sampling.logit_bias,
        allowed_token_ids=sampling.allowed_token_ids,
        bad_words=list(sampling.bad_words),
        structured_outputs=_structured(vllm, sampling),
        detokenize=False,  # text lives in the frontend
        output_kind=vllm.RequestOutputKind.DELTA,
        # Plain lists instead of an object per candidate: cheaper, and ready to pack.
        flat_logprobs=True,
        extra_args=extra or None,
        skip_clone=True,  # this object is the request's own
    )


def _structured(
    vllm: Vllm, sampling: Sampling
) -> Any:  # vLLM's StructuredOutputsParams
    output = sampling.structured_output
    if output is None:
        return None
    return vllm.StructuredOutputsParams(
        **_constraint(output), whitespace_pattern=output.whitespace_pattern
    )


def _constraint(output: StructuredOutput) -> dict[str, object]:
    match output.kind:
        case "json" | "regex" | "grammar" | "structural_tag":
            return {output.kind: output.spec}
        case "json_object":
            return {"json_object": True}
        case "choice":
            return {"choice": json.loads(output.spec)}
        case _:
            msg = f"unknown kind of structured output: {output.kind!r}"
            raise ValueError(msg)
