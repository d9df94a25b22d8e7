"""What vLLM's model runner V2 would die of is refused before."""

from __future__ import annotations

from typing import Any

import pytest

from tokenwire.protocol.messages import Sampling
from tokenwire.worker.vllm.tables import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_TOKENS,
    MAX_LOGIT_BIASES,
    MAX_STOP_TOKEN_IDS,
    check_tables,
)

# Two for each: behind a space too. Each has one byte, and a space may be a token.
WORDS = MAX_BAD_WORD_TOKENS // 4

FIT: dict[str, dict[str, Any]] = {
    "nothing": {},
    "allowed": {"allowed_token_ids": [5] * MAX_ALLOWED_TOKEN_IDS},
    "biases": {"logit_bias": dict.fromkeys(range(MAX_LOGIT_BIASES), 1.0)},
    "stops": {"min_tokens": 1, "stop_token_ids": list(range(MAX_STOP_TOKEN_IDS))},
    "one stop, often": {"min_tokens": 1, "stop_token_ids": [5] * 1_000},
    "stops without min_tokens": {"stop_token_ids": list(range(5_000))},
    "bad words": {"bad_words": ["x"] * WORDS},
}
TOO_MUCH: dict[str, tuple[dict[str, Any], str]] = {
    "allowed": (
        {"allowed_token_ids": [5] * (MAX_ALLOWED_TOKEN_IDS + 1)},
        "allowed_token_ids has 1025 entries, this engine takes 1024",
    ),
    "biases": (
        {"logit_bias": dict.fromkeys(range(MAX_LOGIT_BIASES + 1), 1.0)},
        "logit_bias has 1025 entries",
    ),
    "stops": (
        {"min_tokens": 1, "stop_token_ids": list(range(MAX_STOP_TOKEN_IDS + 1))},
        "stop_token_ids beside min_tokens has 113 entries",
    ),
    "bad words": ({"bad_words": ["x"] * (WORDS + 1)}, "bad_words has 514 bytes"),
    "a bad word that grows in NFC": (
        {"bad_words": ["\U0001d160" * 127]},
        "bad_words has 1525 bytes",
    ),
    "a bad word that grows in NFKC": (
        {"bad_words": ["\ufdfa" * 20]},
        "bad_words has 661 bytes",
    ),
    "a long bad word": ({"bad_words": ["é" * 256]}, "bad_words has 769 bytes"),
}


@pytest.mark.parametrize("case", FIT)
def test_what_fits_passes(case: str) -> None:
    """Up to the width of each table."""
    check_tables(Sampling(9, **FIT[case]))


@pytest.mark.parametrize("case", TOO_MUCH)
def test_what_does_not_fit_is_the_callers_fault(case: str) -> None:
    """A sentence with the field, its length and the limit."""
    fields, text = TOO_MUCH[case]
    with pytest.raises(ValueError, match=text):
        check_tables(Sampling(9, **fields))
