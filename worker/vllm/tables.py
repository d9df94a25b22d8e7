"""What vLLM's GPU model runner has room for in its tables of token ids.

Model runner V2 (the default with Triton, so on GPUs) gives each request rows of a fixed
width. It finds out that one is too narrow in the middle of a step, and raises there: the
engine dies with all its requests, and so would the next one that is given the same
request. vLLM 0.32 checks before only how many bad words there are. So it is checked here.

Read from vLLM 0.32's ``v1/worker/gpu/sample``; not run on a GPU.
"""

from __future__ import annotations

import unicodedata
from typing import Literal

from tokenwire.protocol.messages import Sampling

__all__ = ["check_tables"]

MAX_ALLOWED_TOKEN_IDS = 1_024
MAX_LOGIT_BIASES = 1_024
MAX_STOP_TOKEN_IDS = 112
"""Of 128: the model's own end tokens are in the same row, a few of them."""

MAX_BAD_WORD_TOKENS = 1_024
"""``VLLM_MAX_BAD_WORDS_TOTAL_TOKENS``, which an operator may only raise."""

_FORMS: tuple[Literal["NFC", "NFD", "NFKC", "NFKD"], ...] = (
    "NFC", "NFD", "NFKC", "NFKD"
)  # fmt: skip


def check_tables(sampling: Sampling) -> None:
    """Refuse what does not fit.

    Raises:
        ValueError: A list is too long; one sentence for the client.
    """
    counts = {
        "allowed_token_ids": (
            len(sampling.allowed_token_ids or ()),
            MAX_ALLOWED_TOKEN_IDS,
        ),
        "logit_bias": (len(sampling.logit_bias or ()), MAX_LOGIT_BIASES),
    }
    if sampling.min_tokens:  # else they are looked for outside of the sampler
        stops = len(set(sampling.stop_token_ids))
        counts["stop_token_ids beside min_tokens"] = (stops, MAX_STOP_TOKEN_IDS)
    for name, (count, limit) in counts.items():
        if count > limit:
            msg = f"{name} has {count} entries, this engine takes {limit}"
            raise ValueError(msg)
    # A token has at least one byte, and each word is also taken behind a space.
    num_bytes = sum(_num_bytes(word) + 1 for word in sampling.bad_words)
    if 2 * num_bytes > MAX_BAD_WORD_TOKENS:
        limit = MAX_BAD_WORD_TOKENS // 2
        msg = f"bad_words has {num_bytes} bytes in all, this engine takes {limit}"
        raise ValueError(msg)


def _num_bytes(word: str) -> int:
    """Return the most bytes that a tokenizer may make of *word*, which it normalizes."""
    forms = [word, *(unicodedata.normalize(form, word) for form in _FORMS)]
    return max(len(form.encode()) for form in forms)
