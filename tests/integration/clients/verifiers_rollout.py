"""Runs a toy environment of `verifiers`, for evaluation and for training; prints JSON.

    python verifiers_rollout.py URL MODEL TOKENIZER_FOLDER

Runs in the environment of `make setup-clients`; nothing of ours is imported.
"""

from __future__ import annotations

import asyncio
import json
import sys

import verifiers.v1 as vf
from openai import AsyncOpenAI
from renderers.configs import PrimeQwen3RendererConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.null.harness import NullHarness, NullHarnessConfig

QUESTIONS = ("What is the capital of France?", "And of Italy?", "Thank you. Bye!")
NUM_PARALLEL = 4


class ChatLoop(NullHarness):
    """The null harness, but in this process: its own installs packages as it starts."""

    async def setup(self, runtime):
        """Install nothing."""

    async def launch(
        self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **unused
    ):
        """Ask the model once, through the interception server, as any harness does."""
        _, prompt = self.resolve_prompt(data)
        messages = [{"role": "user", "content": prompt}]
        if not isinstance(prompt, str):
            messages = [message_to_wire(message) for message in prompt]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            reply = await client.chat.completions.create(
                model=ctx.model, messages=messages
            )
        return vf.ProgramResult(0, reply.choices[0].message.content or "", "")


class Capital(vf.Task[vf.TaskData, vf.State]):
    """A question whose answer has one word in it."""

    @vf.reward
    async def knows(self, trace: vf.Trace) -> float:
        """Return 1 for the right city."""
        return float("Paris" in trace.last_reply)


POLICY = {
    "top_k": -1, "min_p": 0.0, "return_token_ids": True, "cache_salt": "policy-3",
}  # fmt: skip
"""What Prime-RL puts beside the usual parameters; the salt is the policy's version."""


def agent_of(client, model, *, max_tokens=40):
    """Return an agent that answers greedily."""
    agent = vf.make_agent(
        vf.AgentConfig(
            harness=NullHarnessConfig(id="null"),
            runtime=vf.SubprocessConfig(),
            model=model,
            client=client,
            sampling={"temperature": 0, "max_tokens": max_tokens, "extra_body": POLICY},
        )
    )
    agent.harness = ChatLoop(agent.harness.config)
    return agent


def told(trace):
    """Return what the test looks at."""
    branches = [
        {
            "token_ids": branch.token_ids,
            "sampled": branch.sampled_mask,
            "logprobs": branch.logprobs,
        }
        for branch in trace.branches
    ]
    return {
        "ok": trace.ok,
        "errors": [(error.type, error.message) for error in trace.errors],
        "reward": trace.reward,
        "num_turns": trace.num_turns,
        "reply": trace.last_reply,
        "usage": json.loads(trace.usage.model_dump_json()) if trace.usage else None,
        "branches": branches,
    }


async def main(url: str, model: str, folder: str) -> None:
    """Run all rollouts, then print one JSON object."""
    endpoint = {"base_url": url + "/v1", "api_key_var": "TOKENWIRE_NO_KEY"}
    clients = {
        "eval": vf.EvalClientConfig(**endpoint),
        "train": vf.TrainClientConfig(
            **endpoint,
            renderer=PrimeQwen3RendererConfig(),
            renderer_model_name=folder,
        ),
    }
    result = {}
    for name, client in clients.items():
        async with agent_of(client, model) as agent:
            once = await asyncio.gather(
                *(
                    agent.run(Capital(vf.TaskData(prompt=QUESTIONS[0])))
                    for _ in range(NUM_PARALLEL)
                )
            )
            async with agent.interaction(Capital(vf.TaskData())) as interaction:
                for question in QUESTIONS:
                    await interaction.turn(question)
        async with agent_of(client, "no-such-model") as agent:
            failed = await agent.run(Capital(vf.TaskData(prompt="a")))
        result[name] = {
            "once": [told(trace) for trace in once],
            "turns": told(interaction.trace),
            "failed": told(failed),
        }
    print(json.dumps(result, default=str))


asyncio.run(main(*sys.argv[1:]))
