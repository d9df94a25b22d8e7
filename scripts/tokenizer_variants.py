"""A model's ``tokenizer.json`` with the parts that other models have: their rules, its vocabulary."""

from __future__ import annotations

import json
from typing import Any

from tokenwire.frontend.encoding import GPT_4_SPLIT, GPT_4O_SPLIT, QWEN_SPLIT

__all__ = ["variants"]

ODD = r"\p{N}{1,2}(?=\p{N}|\b)|(?<![a-z])[A-Z][a-z]+|\s?[^\s\p{N}]+?(?=\s|\p{N}|$)|\s+"
"""Nobody's: look-behind and reluctant matches, which no scanner was written for."""


def _split(pattern: str) -> dict[str, Any]:
    return {
        "type": "Sequence",
        "pretokenizers": [
            {
                "type": "Split",
                "pattern": {"Regex": pattern},
                "behavior": "Isolated",
                "invert": False,
            },
            {
                "type": "ByteLevel",
                "add_prefix_space": False,
                "trim_offsets": True,
                "use_regex": False,
            },
        ],
    }


def _added(token_id: int, content: str, **options: bool) -> dict[str, Any]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content, "special": True} | plain | options


def variants(source: str) -> dict[str, str]:
    """Return byte-level tokenizers by a name, made from that of *source*."""
    parts = json.loads(source)
    made: dict[str, str] = {"as it is": source}

    def vary(name: str, **changes: object) -> None:
        made[name] = json.dumps(parts | changes)

    merges = parts["model"] | {"ignore_merges": True}
    first = max(parts["model"]["vocab"].values()) + 1  # a gap: numbered anew
    options = ("lstrip", "rstrip", "single_word", "normalized")
    named = [
        _added(first + n, f"<|{name}|>", **{name: True})
        for n, name in enumerate(options)
    ]
    prefix = {
        "type": "ByteLevel",
        "add_prefix_space": True,
        "trim_offsets": True,
        "use_regex": True,
    }
    vary("GPT-4 split, ignore_merges", pre_tokenizer=_split(GPT_4_SPLIT), model=merges)
    vary(
        "Qwen split, NFC", pre_tokenizer=_split(QWEN_SPLIT), normalizer={"type": "NFC"}
    )
    vary("GPT-4o split", pre_tokenizer=_split(GPT_4O_SPLIT))
    vary("GPT-2 split, prefix space", pre_tokenizer=prefix)
    vary("a split of nobody's", pre_tokenizer=_split(ODD))
    vary("NFKC", normalizer={"type": "NFKC"})
    vary(
        "added tokens: " + ", ".join(options),
        added_tokens=parts["added_tokens"] + named,
    )
    lower = {"type": "Lowercase"}
    word = _added(first, "Hello", normalized=True)
    vary(
        "lower case, a normalized word",
        normalizer=lower,
        added_tokens=[*parts["added_tokens"], word],
    )
    return made
