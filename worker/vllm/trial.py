"""What an engine has to show before it serves: a token, and that it goes on exactly."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from tokenwire.protocol.messages import Sampling, StructuredOutput
from tokenwire.worker.engine import EngineRequest, EngineStartError

from .arguments import first_sentence
from .binding import Vllm
from .logprobs import pack
from .sampling import sampling_params

__all__ = ["exactness", "give_token"]

logger = logging.getLogger(__name__)

TRIAL_WAIT_S = 120.0
"""For the first token, and for each later attempt: the first one compiles and pages in
what was lazy; each grammar's backend does so again."""

PROMPT = list(range(1, 9))
CUTS = (4, 2, 7)
"""Where an output of ``NUM_TOKENS`` is cut, an attempt each. One that is as it was never
cut is enough: on a GPU a token's probability can differ in its last bits when it is
computed again, and the draw with it, but an engine that goes on wrongly has other ids
each time."""
NUM_TOKENS = 10
FLOAT_BYTES = 4

GRAMMAR = StructuredOutput(
    "json", '{"type": "array", "items": {"type": "integer"}, "minItems": 99}'
)
"""It binds from the first token on, and does not end within ``NUM_TOKENS``."""


async def give_token(vllm: Vllm, llm: Any) -> None:  # vLLM's AsyncLLM
    """Generate one token: "ready" is a fact, and vLLM's output task has begun.

    Raises:
        EngineStartError: There is none.
    """
    try:
        await _run(vllm, llm, [0], Sampling(max_tokens=1, temperature=0.0))
    except Exception as error:  # any failure is a failed start
        msg = f"vLLM started, but gives no token: {first_sentence(error)}"
        raise EngineStartError(msg) from error


async def exactness(vllm: Vllm, llm: Any, *, bitwise: bool) -> str:
    """Return how exactly the engine goes on behind output, as ``Card.exactness``.

    A seed, penalties and a grammar at once: each of them leads elsewhere if it is lost.

    Args:
        vllm: The names of vLLM.
        llm: vLLM's AsyncLLM.
        bitwise: Whether its numbers depend on nothing but the ids, as it says itself.

    Raises:
        EngineStartError: It has died of the attempt.
    """
    for cut in CUTS:
        sampling = Sampling(
            max_tokens=NUM_TOKENS,
            temperature=1.0,
            seed=cut,
            frequency_penalty=0.5,
            presence_penalty=0.5,
            repetition_penalty=1.1,
            logprobs=0,
            structured_output=GRAMMAR,
        )
        try:
            ids, rows = await _run(vllm, llm, PROMPT, sampling)
            rest, again = await _run(vllm, llm, PROMPT + ids[:cut], sampling, cut)
        except vllm.EngineDeadError as error:
            msg = "vLLM died of going on behind output: start it with --no-exact-resume"
            raise EngineStartError(msg) from error
        except Exception as error:  # noqa: BLE001 - whatever it is, it does not go on
            logger.warning("going on behind output failed: %s", first_sentence(error))
            return ""
        if len(ids) == NUM_TOKENS and rest == ids[cut:]:
            is_bitwise = bitwise and again == rows[cut * FLOAT_BYTES :]
            return "bitwise" if is_bitwise else "same_rng"
        logger.warning("behind %s came %s, and then %s", ids[:cut], ids[cut:], rest)
    return ""


async def _run(
    vllm: Vllm, llm: Any, prompt: list[int], sampling: Sampling, num_prior: int = 0
) -> tuple[list[int], bytes]:
    """Return the ids of a request, and their logprobs, packed, if it asks for them."""
    name = f"trial-{num_prior}"
    request = EngineRequest(name, prompt, sampling, num_prior=num_prior)
    ids: list[int] = []
    rows = b""
    async with asyncio.timeout(TRIAL_WAIT_S):
        async for output in llm.generate(
            # A salt of its own: nothing is found in the cache of the run before.
            vllm.tokens_input(prompt, cache_salt=name),
            sampling_params(vllm, request),
            name,
            reasoning_ended=True,  # the grammar binds whatever the parser
        ):
            completion = output.outputs[0]
            ids += completion.token_ids
            if sampling.logprobs is not None and completion.logprobs is not None:
                packed = pack(completion.logprobs, sampling.logprobs)
                rows += packed.logprobs if packed is not None else b""
            if completion.finish_reason == "error":
                msg = f"it ended with an error ({completion.stop_reason})"
                raise RuntimeError(msg)
    return ids, rows
