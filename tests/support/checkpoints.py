"""A checkpoint to change in tests."""

from __future__ import annotations

from tokenwire.frontend.checkpoint import (
    Checkpoint,
    Contract,
    Environment,
    Identity,
    Output,
    Prompt,
    Rng,
    SamplingParams,
    State,
    ids_sha256,
)

__all__ = ["a_checkpoint"]


def a_checkpoint(
    prompt: tuple[int, ...] = (1, 2), output: tuple[int, ...] = (70_000, 4, 5)
) -> Checkpoint:
    """Return a whole one, not signed."""
    return Checkpoint(
        identity=Identity(
            id="chatcmpl-1", seq=7, created=1_000, expires=2_000, root="chatcmpl-1"
        ),
        contract=Contract(model="m", vocab_size=80_000),
        environment=Environment(engine="sim", engine_version="1"),
        sampling=SamplingParams(
            max_tokens=16,
            min_tokens=0,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            seed=3,
            presence_penalty=0.0,
            frequency_penalty=0.5,
            repetition_penalty=1.0,
            stop=["é\n"],
            stop_token_ids=[],
            include_stop_str_in_output=False,
            skip_special_tokens=True,
            ignore_eos=False,
            logit_bias={"10": 1.0, "9": -0.25},
            allowed_token_ids=None,
            bad_words=[],
        ),
        state=State(
            prompt=Prompt(len(prompt), ids_sha256(prompt), list(prompt)),
            output=Output(len(output), ids_sha256(output), list(output)),
            rng=Rng(kind="seeded", seed=3, seed_source="request", draws=len(output)),
        ),
    )
