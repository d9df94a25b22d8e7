"""Fields of vLLM's and OpenAI's requests that are known here but not honoured.

Each may be sent with a value that asks for nothing; anything else is refused by the
field's name. No field is accepted and dropped.
"""

from __future__ import annotations

from typing import NamedTuple

from .errors import bad_request

__all__ = ["UNSUPPORTED", "Unsupported", "drop_neutral"]


class Unsupported(NamedTuple):
    """A field that is refused, and why."""

    reason: str
    neutral: tuple[object, ...] = ()  # values beside null that ask for nothing


UNSUPPORTED: dict[str, Unsupported] = {
    # OpenAI's
    "audio": Unsupported("there is no audio output"),
    "function_call": Unsupported("use tool_choice", ("none",)),
    "functions": Unsupported("use tools", ([],)),
    "modalities": Unsupported("the output is text", (["text"],)),
    "moderation": Unsupported("nothing is moderated here"),
    "prediction": Unsupported("there are no predicted outputs"),
    "prompt_cache_options": Unsupported("the prefix cache works by itself"),
    "prompt_cache_retention": Unsupported(
        "the prefix cache lives in memory", ("in_memory",)
    ),
    "service_tier": Unsupported("there is one tier", ("auto", "default")),
    "store": Unsupported("nothing is stored", (False,)),
    "suffix": Unsupported("there is no insertion", ("",)),
    "verbosity": Unsupported("put it into the messages", ("medium",)),
    "web_search_options": Unsupported("nothing is searched here"),
    # vLLM's
    "ec_transfer_params": Unsupported("there is no encoder to disaggregate"),
    "kv_transfer_params": Unsupported("the KV transfer is not the client's to steer"),
    "length_penalty": Unsupported("it belongs to beam search", (1, 1.0)),
    "logprob_token_ids": Unsupported("use logprobs"),
    "media_io_kwargs": Unsupported("the input is text", ({},)),
    "mm_payload": Unsupported("the input is text", ("tensors", "none")),
    "mm_processor_kwargs": Unsupported("the input is text", ({},)),
    "prompt_embeds": Unsupported("a prompt is text or token ids"),
    "repetition_detection": Unsupported("not passed to the engine"),
    "return_mm_kwargs": Unsupported("the input is text", (False,)),
    "return_prompt_text": Unsupported("use /detokenize", (False,)),
    "return_token_offsets": Unsupported("use /tokenize", (False,)),
    "routed_experts_prompt_start": Unsupported("experts are not reported", (0,)),
    "spaces_between_special_tokens": Unsupported(
        "tokens are joined as they are", (True,)
    ),
    "stream_interval": Unsupported("each token has its chunk", (1,)),
    "thinking_token_budget": Unsupported("not passed to the engine"),
    "use_beam_search": Unsupported("there is no beam search", (False,)),
    "vllm_xargs": Unsupported("a client may not reach into the engine", ({},)),
    "watermarking": Unsupported("not passed to the engine", (False,)),
}


def drop_neutral(body: dict[str, object]) -> None:
    """Take the unsupported fields that ask for nothing out of *body*.

    Raises:
        ApiError: 400, naming the first that asks for something.
    """
    for name in sorted(body.keys() & UNSUPPORTED.keys()):
        value = body.pop(name)
        reason, neutral = UNSUPPORTED[name]
        if value is None or any(
            value == one and isinstance(value, bool) is isinstance(one, bool)
            for one in neutral
        ):
            continue
        allowed = ", ".join(["null", *map(repr, neutral)])
        msg = f"{name} is not supported: {reason} (allowed: {allowed})"
        raise bad_request(msg, name)
