"""Read a quantized Llama from a GGUF file; write what engines and tokenizers load.

Only what llama.cpp writes for this architecture, with the quantizations in `BLOCKS` and a
tokenizer of the kind "smollm". It needs numpy, but no torch.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["ModelError", "convert", "dequantize", "read_gguf", "to_bfloat16"]

Floats = npt.NDArray[np.float32]

Fields = dict[str, Any]  # GGUF metadata: numbers, strings and lists, by dotted name


class ModelError(Exception):
    """The model cannot be built; the message says why in one sentence."""


# -- GGUF -----------------------------------------------------------------------------
# https://github.com/ggml-org/ggml/blob/master/docs/gguf.md


class Tensor(NamedTuple):
    """One tensor of a GGUF file, still quantized."""

    shape: tuple[int, ...]  # row-major, so the reverse of the order in the file
    kind: int  # ggml type number, a key of BLOCKS
    data: npt.NDArray[np.uint8]  # (num_bytes,), a view of the mapped file


# ggml type number -> (values per block, bytes per block)
F32, Q4_1, Q8_0 = 0, 3, 8
BLOCKS = {F32: (1, 4), Q4_1: (32, 20), Q8_0: (32, 34)}

# GGUF value type number -> struct code; 8 is a string, 9 an array
SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
STRING, ARRAY = 8, 9


class _Reader:
    """A cursor over the header of a GGUF file."""

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.offset = 0

    def scalar(self, code: str) -> int | float | bool:
        (value,) = struct.unpack_from(f"<{code}", self.data, self.offset)
        self.offset += struct.calcsize(f"<{code}")
        scalar: int | float | bool = value
        return scalar

    def uint32(self) -> int:
        return int(self.scalar("I"))

    def uint64(self) -> int:
        return int(self.scalar("Q"))

    def string(self) -> str:
        length = self.uint64()
        start, self.offset = self.offset, self.offset + length
        return str(self.data[start : self.offset], "utf-8")

    def value(self, kind: int) -> object:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            item, count = self.uint32(), self.uint64()
            return [self.value(item) for _ in range(count)]
        return self.scalar(SCALARS[kind])


def read_gguf(path: Path) -> tuple[Fields, dict[str, Tensor]]:
    """Return the metadata and the tensors of the GGUF file at *path*.

    Raises:
        ModelError: it is not GGUF version 3, or has a tensor type not in `BLOCKS`.
    """
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    reader = _Reader(memoryview(mapped))
    if mapped[:4] != b"GGUF" or struct.unpack_from("<I", mapped, 4) != (3,):
        raise ModelError(f"{path.name} is not a GGUF file of version 3")
    reader.offset = 8
    num_tensors, num_fields = reader.uint64(), reader.uint64()
    fields: Fields = {}
    for _ in range(num_fields):
        key = reader.string()
        fields[key] = reader.value(reader.uint32())
    heads: list[tuple[str, tuple[int, ...], int, int]] = []
    for _ in range(num_tensors):
        name, num_dims = reader.string(), reader.uint32()
        shape = tuple(reader.uint64() for _ in range(num_dims))[::-1]
        heads.append((name, shape, reader.uint32(), reader.uint64()))
    alignment = int(fields.get("general.alignment", 32))
    base = -(-reader.offset // alignment) * alignment
    tensors: dict[str, Tensor] = {}
    for name, shape, kind, offset in heads:
        if kind not in BLOCKS:
            raise ModelError(f"tensor {name} has the unknown ggml type {kind}")
        num_values, num_bytes = BLOCKS[kind]
        size = math.prod(shape) // num_values * num_bytes
        data = np.frombuffer(mapped, np.uint8, count=size, offset=base + offset)
        tensors[name] = Tensor(shape, kind, data)
    return fields, tensors


def dequantize(tensor: Tensor) -> Floats:
    """Return the values of *tensor* as float32."""
    if tensor.kind == F32:
        return tensor.data.view("<f4").reshape(tensor.shape)
    blocks = tensor.data.reshape(-1, BLOCKS[tensor.kind][1])
    scale = blocks[:, :2].copy().view("<f2").astype(np.float32)
    if tensor.kind == Q8_0:
        values = scale * blocks[:, 2:].view(np.int8)
    else:
        low, high = blocks[:, 4:] & 15, blocks[:, 4:] >> 4
        least = blocks[:, 2:4].copy().view("<f2").astype(np.float32)
        values = scale * np.concatenate([low, high], axis=1) + least
    return values.astype(np.float32, copy=False).reshape(tensor.shape)


# -- Weights --------------------------------------------------------------------------

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def weight_name(gguf_name: str) -> str:
    """Return the Hugging Face name of a Llama tensor."""
    if gguf_name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if gguf_name == "output_norm.weight":
        return "model.norm.weight"
    _, layer, name, _ = gguf_name.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[name]}.weight"


def unpermute(weight: Floats, num_heads: int) -> Floats:
    """Undo llama.cpp's order of rotary pairs: (x0, y0, x1, y1..) to (x0, x1.., y0..)."""
    half = weight.shape[0] // num_heads // 2
    pairs = weight.reshape(num_heads, half, 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def to_bfloat16(values: Floats) -> npt.NDArray[np.uint16]:
    """Return the bits of *values* (all finite) in bfloat16, rounded to nearest even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)


def write_weights(path: Path, fields: Fields, tensors: dict[str, Tensor]) -> None:
    """Write *tensors* as bfloat16 safetensors.

    The output layer is tied to the embedding, so it is not stored.
    """
    num_heads = {
        "attn_q": fields["llama.attention.head_count"],
        "attn_k": fields["llama.attention.head_count_kv"],
    }
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + 2 * math.prod(tensor.shape)
        entries[weight_name(name)] = {
            "dtype": "BF16",
            "shape": tensor.shape,
            "data_offsets": [start, end],
        }
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)  # the format wants aligned data
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for name, tensor in tensors.items():
            values = dequantize(tensor)
            kind = name.split(".")[-2]
            if kind in num_heads:
                values = unpermute(values, num_heads[kind])
            file.write(to_bfloat16(values).data)


# -- Configuration --------------------------------------------------------------------

CONTROL = 3  # GGUF token type of special tokens


def model_config(fields: Fields) -> dict[str, Any]:
    """Return `config.json`."""
    hidden, heads = (
        fields["llama.embedding_length"],
        fields["llama.attention.head_count"],
    )
    theta = fields["llama.rope.freq_base"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "dtype": "bfloat16",
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        # GGUF keeps it in single precision: 9.999999747e-06 was written as 1e-05.
        "rms_norm_eps": float(
            f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"
        ),
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        "rope_theta": theta,  # for readers older than transformers 5
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": fields["llama.vocab_size"],
    }


def generation_config(fields: Fields) -> dict[str, Any]:
    """Return `generation_config.json`."""
    return {
        f"{name}_token_id": fields[f"tokenizer.ggml.{key}_token_id"]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }


def _special_tokens(fields: Fields) -> list[dict[str, Any]]:
    tokens = zip(
        fields["tokenizer.ggml.tokens"],
        fields["tokenizer.ggml.token_type"],
        strict=True,
    )
    flags = {
        "lstrip": False,
        "normalized": False,
        "rstrip": False,
        "single_word": False,
    }
    return [
        {"id": token_id, "content": text, **flags, "special": True}
        for token_id, (text, kind) in enumerate(tokens)
        if kind == CONTROL
    ]


def tokenizer_json(fields: Fields) -> dict[str, Any]:
    """Return `tokenizer.json`: byte-level BPE that takes digits one by one.

    Raises:
        ModelError: the file asks for another kind of tokenizer.
    """
    kind = fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]
    if kind != ("gpt2", "smollm"):
        raise ModelError(f"no recipe for the tokenizer {kind}")
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    tokens = fields["tokenizer.ggml.tokens"]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _special_tokens(fields),
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                byte_level,
            ],
        },
        "post_processor": None,
        "decoder": byte_level | {"add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {text: token_id for token_id, text in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]],
        },
    }


def tokenizer_config(fields: Fields) -> dict[str, Any]:
    """Return `tokenizer_config.json`, with the chat template."""
    tokens = fields["tokenizer.ggml.tokens"]
    special = {
        f"{name}_token": tokens[fields[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in (
            ("bos", "bos"),
            ("eos", "eos"),
            ("pad", "padding"),
            ("unk", "unknown"),
        )
    }
    return {
        "added_tokens_decoder": {
            str(token["id"]): {k: v for k, v in token.items() if k != "id"}
            for token in _special_tokens(fields)
        },
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        **special,
        "chat_template": fields["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
        # Not GPT2Tokenizer, which builds its own pre-tokenizer in transformers 5 and
        # would lose the digits rule.
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def convert(gguf: Path, folder: Path, report: Callable[[str], object]) -> None:
    """Write the Llama in the file *gguf* into *folder*, which exists.

    Raises:
        ModelError: it is not such a file.
    """
    fields, tensors = read_gguf(gguf)
    report("writing configuration and tokenizer")
    for name, content in (
        ("config.json", model_config(fields)),
        ("generation_config.json", generation_config(fields)),
        ("tokenizer.json", tokenizer_json(fields)),
        ("tokenizer_config.json", tokenizer_config(fields)),
    ):
        text = json.dumps(content, indent=2, ensure_ascii=False)
        (folder / name).write_text(text + "\n", encoding="utf-8")
    report(f"writing {len(tensors)} tensors as bfloat16")
    write_weights(folder / "model.safetensors", fields, tensors)
