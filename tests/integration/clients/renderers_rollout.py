"""Rolls out through `renderers`, as a trainer does, and prints what came as JSON.

    python renderers_rollout.py URL MODEL TOKENIZER_FOLDER

Runs in the environment of `make setup-clients`; nothing of ours is imported.
"""

from __future__ import annotations

import asyncio
import json
import sys

from openai import APIStatusError, AsyncOpenAI
from renderers import create_renderer
from renderers.base import load_tokenizer
from renderers.client import OverlongPromptError, generate
from renderers.configs import PrimeQwen3RendererConfig

QUESTIONS = ("What is the capital of France?", "And of Italy?", "Thank you. Bye!")
NUM_PARALLEL = 4


async def main(url: str, model: str, folder: str) -> None:
    """Run all rollouts, then print one JSON object."""
    renderer = create_renderer(load_tokenizer(folder), PrimeQwen3RendererConfig())

    async with AsyncOpenAI(
        base_url=url + "/v1", api_key="none", max_retries=0
    ) as client:

        async def ask(**request):
            sampling = {"temperature": 0, "top_k": -1, "min_p": 0.0}
            sampling |= request.pop("sampling_params", {})
            return await generate(
                client=client,
                renderer=renderer,
                model=model,
                sampling_params=sampling,
                **request,
            )

        async def rollout(questions, max_tokens):
            """Return every turn; each prompt goes on from the ids of the one before."""
            turns = []
            for question in questions:
                said = [{"role": "user", "content": question}]
                prompt = None
                if turns:
                    last = turns[-1]
                    prompt = renderer.bridge_to_next_turn(
                        last["prompt_ids"], last["completion_ids"], said
                    )
                turn = await ask(
                    messages=said,
                    prompt_ids=prompt.token_ids if prompt is not None else None,
                    sampling_params={
                        "max_tokens": max_tokens,
                        "return_token_ids": True,
                        "cache_salt": "0",
                    },
                    cache_salt="weights-0",
                    priority=0,
                    extra_headers={"X-Session-ID": "rollout-1"},
                )
                turn.pop("prompt_attribution")
                turns.append(turn)
            return turns

        async def failure(**request):
            try:
                await ask(messages=[{"role": "user", "content": "a"}], **request)
            except (APIStatusError, OverlongPromptError) as error:
                body = getattr(error, "body", None) or {}
                return {"type": type(error).__name__, "param": body.get("param")}

        whole = await rollout(QUESTIONS, 40)
        cut_off = await rollout(QUESTIONS[:2], 5)
        pairs = [(f"Count from {n}.",) for n in range(NUM_PARALLEL)]
        together = await asyncio.gather(*(rollout(pair, 12) for pair in pairs))
        alone = [await rollout(pair, 12) for pair in pairs]
        failures = {
            "overlong": await failure(prompt_ids=[5] * 5_000),
            "overlong, not asked before": await failure(
                prompt_ids=[5] * 5_000, max_prompt_len=10_000
            ),
            "temperature": await failure(sampling_params={"temperature": -1}),
        }

    print(
        json.dumps(
            {
                "whole": whole,
                "cut_off": cut_off,
                "together": [turns[0]["completion_ids"] for turns in together],
                "alone": [turns[0]["completion_ids"] for turns in alone],
                "failures": failures,
            },
            default=str,
        )
    )


asyncio.run(main(*sys.argv[1:]))
