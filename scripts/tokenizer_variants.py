"""A model's ``tokenizer.json`` with the parts that other models have: their rules, its vocabulary."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["variants"]

GPT_4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Of Llama 3; Qwen takes one digit where it takes up to three."""

GPT_4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
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
    qwen = GPT_4.replace("{1,3}", "")
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
    vary("GPT-4 split, ignore_merges", pre_tokenizer=_split(GPT_4), model=merges)
    vary("Qwen split, NFC", pre_tokenizer=_split(qwen), normalizer={"type": "NFC"})
    vary("GPT-4o split", pre_tokenizer=_split(GPT_4O))
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
