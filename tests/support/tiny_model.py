"""A model folder for tests that need text but no weights: byte-level, 264 ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

VOCAB_SIZE = 264
EOS, IM_START = 2, 1
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def tiny_tokenizer() -> Tokenizer:
    """Return a tokenizer with three special ids, the 256 bytes, and a few merges."""
    vocabulary = {piece: n for n, piece in enumerate(_SPECIAL)}
    for char in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[char] = len(vocabulary)
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    cast("Any", tokenizer).add_special_tokens(
        [AddedToken(piece, special=True) for piece in _SPECIAL]
    )
    return tokenizer


def write_tiny_model(folder: Path) -> Path:
    """Write the model's text files to *folder*, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 2048,
        "eos_token_id": EOS,
        "bos_token_id": IM_START,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    settings = {"chat_template": CHAT_TEMPLATE, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
