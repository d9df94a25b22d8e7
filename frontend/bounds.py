"""Bounds of request fields: checked here, and told to clients by ``/openapi.json``."""

from __future__ import annotations

from typing import NamedTuple, TypeVar, cast

from .errors import bad_request

__all__ = [
    "BOUNDS",
    "INT_BOUND",
    "MAX_BAD_WORDS_BYTES",
    "MAX_CHOICES",
    "MAX_GRAMMAR_BYTES",
    "MAX_LOGPROBS",
    "MAX_SALT_CHARS",
    "MAX_SCHEMA_DEPTH",
    "MAX_STOP_CHARS",
    "MAX_STOP_STRINGS",
    "REQUEST_ID_FORM",
    "SESSION_ID_FORM",
    "Bound",
    "check_depth",
    "check_size",
    "within",
]

MAX_CHOICES = 128
"""Choices of one request: OpenAI's limit of ``n``; also prompts times ``n``."""

MIN_CHECKPOINT_TOKENS = 16
"""Between checkpoints in a stream: the KV block that a resume can begin with. Each has
all ids so far, so that more of them would cost more than the tokens do."""

MAX_SCHEMA_DEPTH = 128
"""Levels of a JSON schema's text, two for each of its own. xgrammar (0.2.8) takes them to
the third power: 0.06 s here, 16 s for 800, in which a worker hears nothing and is lost."""

MAX_BAD_WORDS_BYTES = 8 * 1024
"""Of all ``bad_words``: vLLM takes 128 of them, and tokenizes each twice where its worker
hears nothing meanwhile: 0.1 s here, a minute for 8 MiB, in which that is lost."""

MAX_GRAMMAR_BYTES = 256 * 1024
"""Of a schema, regex, grammar or list of choices, and of all tools' parameters. An engine
compiles it in one of few threads, which no client's leaving frees: 3 s of CPU for so long
an enumeration or regex (xgrammar 0.2.8), and with the length to the second power."""

MAX_LOGPROBS = 20
"""OpenAI's limit of ``top_logprobs``, and vLLM's default ``max_logprobs``."""

MAX_SALT_CHARS = 1_024
"""A ``cache_salt``: as in vLLM; 43 are enough for 256 bits."""

MAX_STOP_STRINGS = 16
"""OpenAI takes 4; vLLM any number. Each costs a scan per token."""

MAX_STOP_CHARS = 1_000
"""One stop string: as much text may be held back from the client."""

INT_BOUND = 2**63
"""Numbers travel as signed 64-bit integers; vLLM's seed is one."""

REQUEST_ID_FORM = r"[A-Za-z0-9._-]{1,128}"
"""A client's request id: it is repeated in a header and written into logs."""

SESSION_ID_FORM = r"[!-~]{1,256}"
"""A session's id, which is hashed and kept nowhere: what a header may hold, without
spaces; clients send UUIDs and trace ids."""

N = TypeVar("N", int, float)


class Bound(NamedTuple):
    """What a number may be."""

    low: int | None = None
    high: int | None = None
    above: bool = False  # greater than ``low``, not equal to it

    def __str__(self) -> str:
        parts: list[str] = []
        if self.low is not None:
            parts.append(f"{'above' if self.above else 'at least'} {self.low}")
        if self.high is not None:
            parts.append(f"at most {self.high}")
        return " and ".join(parts)


BOUNDS = {  # a field's name, or ``Struct.name``, as in ``fields``
    "every_tokens": Bound(MIN_CHECKPOINT_TOKENS),
    "frequency_penalty": Bound(-2, 2),
    "logit_bias": Bound(-100, 100),  # of each value
    "logprobs": Bound(0, MAX_LOGPROBS),
    "max_completion_tokens": Bound(1),
    "max_tokens": Bound(1),
    "CompletionRequest.max_tokens": Bound(0),  # 0 with ``echo`` alone
    "min_p": Bound(0, 1),
    "min_tokens": Bound(0),
    "n": Bound(1, MAX_CHOICES),
    "presence_penalty": Bound(-2, 2),
    "priority": Bound(-INT_BOUND, INT_BOUND - 1),
    "prompt_logprobs": Bound(0, MAX_LOGPROBS),
    "repetition_penalty": Bound(0, above=True),
    "seed": Bound(-INT_BOUND, INT_BOUND - 1),
    "temperature": Bound(0, 100),
    "top_k": Bound(-1, INT_BOUND - 1),
    "top_logprobs": Bound(0, MAX_LOGPROBS),
    "top_p": Bound(0, 1, above=True),
    "ttl_s": Bound(1, INT_BOUND - 1),
}


def within(field: str, value: N) -> N:
    """Return *value* if it is within the bound of *field*.

    Raises:
        ApiError: 400 with *field* as ``param``.
    """
    low, high, above = bound = BOUNDS[field]
    too_low = low is not None and (value <= low if above else value < low)
    if too_low or (high is not None and value > high):
        msg = f"{field} must be {bound}, not {value!s:.40}"
        raise bad_request(msg, field)
    return value


def check_depth(field: str, schema: object) -> None:
    """Refuse a schema whose levels are too many.

    Raises:
        ApiError: 400 with *field* as ``param``.
    """
    level = [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        inside: list[object] = []
        for one in level:
            if isinstance(one, dict):
                inside += cast("dict[str, object]", one).values()
            elif isinstance(one, list):
                inside += cast("list[object]", one)
        if not inside:
            return
        level = inside
    msg = f"{field} has more than {MAX_SCHEMA_DEPTH} levels"
    raise bad_request(msg, field)


def check_size(field: str, num_bytes: int) -> None:
    """Refuse a grammar that is too long to compile for everybody's patience.

    Raises:
        ApiError: 400 with *field* as ``param``.
    """
    if num_bytes > MAX_GRAMMAR_BYTES:
        msg = (
            f"{field} has {num_bytes} bytes, a grammar has at most {MAX_GRAMMAR_BYTES}"
        )
        raise bad_request(msg, field)
