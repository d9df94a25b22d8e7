"""Model folders and outputs in the formats of well-known model families."""

from __future__ import annotations

import importlib.util
import json
import struct
from base64 import b64encode
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    trainers,
)

__all__ = [
    "FORMATS",
    "GPT_OSS",
    "TOOLS",
    "Case",
    "Format",
    "encode",
    "harmony_ids",
    "write_format_model",
    "write_gpt_oss_model",
    "write_harmony_vocabulary",
]

TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>\n{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}"
    "[{{ call.id }} {{ call.function.name }} {{ call.function.arguments | tojson }}]"
    "{% endfor %}\n{% endfor %}"
    "{% if reasoning_effort %}effort {{ reasoning_effort }}\n{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)
"""Shows all that a template can be given."""

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                },
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "get_time",
            "parameters": {
                "type": "object",
                "properties": {"zone": {"type": "string"}},
            },
        },
    },
]

Call = tuple[str, dict[str, Any]]  # name and arguments


@dataclass(frozen=True)
class Case:
    """One output, and the message it is."""

    name: str
    text: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True)
class Format:
    """How a model family writes calls and reasoning."""

    name: str
    tool_call_parser: str | None
    reasoning_parser: str | None
    markers: tuple[str, ...]  # single tokens of the vocabulary, not flagged special
    eos: str
    cases: tuple[Case, ...]
    special: tuple[str, ...] = ()  # those flagged special: skipped unless asked for
    model_type: str = "llama"
    call_ids: tuple[str, ...] = field(default=())  # where the format defines them


PARIS: Call = ("get_weather", {"city": "Paris"})
ZURICH: Call = ("get_weather", {"city": "Zürich 🏔", "days": 3})
TIME: Call = ("get_time", {"zone": 'C"E\\T'})


def _json(call: Call, key: str = "arguments") -> str:
    return json.dumps({"name": call[0], key: call[1]}, ensure_ascii=False)


def _hermes(*calls: Call) -> str:
    return "\n".join(f"<tool_call>\n{_json(call)}\n</tool_call>" for call in calls)


HERMES = Format(
    "hermes",
    "hermes",
    None,
    ("<tool_call>", "</tool_call>"),
    "<|im_end|>",
    (
        Case("text", "Hello, wörld 🌍! 1 < 2 {}", "Hello, wörld 🌍! 1 < 2 {}"),
        Case("one", _hermes(PARIS), calls=(PARIS,)),
        Case("two", _hermes(ZURICH, TIME), "", "", (ZURICH, TIME)),
        Case("said", "Let me look.\n" + _hermes(PARIS), "Let me look.\n", "", (PARIS,)),
    ),
)

QWEN3 = Format(
    "qwen3",
    "hermes",
    "qwen3",
    ("<tool_call>", "</tool_call>", "<think>", "</think>"),
    "<|im_end|>",
    (
        Case("thought", "<think>\nWell…\n</think>\n\nYes.", "Yes.", "Well…"),
        Case(
            "called",
            f"<think>\nI need 2 calls.\n</think>\n\n{_hermes(ZURICH, PARIS)}",
            reasoning="I need 2 calls.",
            calls=(ZURICH, PARIS),
        ),
    ),
)

QWEN3_CODER = Format(
    "qwen3-coder",
    "qwen3_coder",
    None,
    ("<tool_call>", "</tool_call>"),
    "<|im_end|>",
    (
        Case("text", "No call.", "No call."),
        Case(
            "two",
            "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
            "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n"
            "<tool_call>\n<function=get_time>\n<parameter=zone>\nCET\n</parameter>\n"
            "</function>\n</tool_call>",
            calls=(
                ("get_weather", {"city": "Paris", "days": 3}),
                ("get_time", {"zone": "CET"}),
            ),
        ),
    ),
)

LLAMA3 = Format(
    "llama3",
    "llama3_json",
    None,
    (),
    "<|eot_id|>",
    (
        Case("text", "Just text.", "Just text."),
        Case("one", _json(PARIS, "parameters"), calls=(PARIS,)),
        Case(
            "two",
            f"{_json(PARIS, 'parameters')}; {_json(TIME, 'parameters')}",
            calls=(PARIS, TIME),
        ),
        Case("tagged", f"<|python_tag|>{_json(PARIS, 'parameters')}", calls=(PARIS,)),
    ),
    special=("<|python_tag|>",),
)

MISTRAL_V11 = Format(
    "mistral-v11",
    "mistral",
    None,
    (),
    "</s>",
    (
        Case("text", "Bonjour.", "Bonjour."),
        Case("one", '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}', calls=(PARIS,)),
        Case(
            "two",
            '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}'
            '[TOOL_CALLS]get_time[ARGS]{"zone": "C\\"E\\\\T"}',
            calls=(PARIS, TIME),
        ),
    ),
    special=("[TOOL_CALLS]", "[ARGS]"),
)

MISTRAL_V3 = Format(
    "mistral-v3",
    "mistral",
    None,
    (),
    "</s>",
    (
        Case("text", "Bonjour.", "Bonjour."),
        Case(
            "two",
            f"[TOOL_CALLS] [{_json(PARIS)}, {_json(TIME)}]",
            calls=(PARIS, TIME),
        ),
    ),
    special=("[TOOL_CALLS]",),
)


def _deepseek(*calls: Call) -> str:
    parts = [
        f"<\uff5ctool\u2581call\u2581begin\uff5c>function<\uff5ctool\u2581sep\uff5c>{name}\n```json\n"
        f"{json.dumps(arguments, ensure_ascii=False)}\n```<\uff5ctool\u2581call\u2581end\uff5c>"
        for name, arguments in calls
    ]
    return f"<\uff5ctool\u2581calls\u2581begin\uff5c>{chr(10).join(parts)}<\uff5ctool\u2581calls\u2581end\uff5c>"


_DEEPSEEK_MARKERS = (
    "<\uff5ctool\u2581calls\u2581begin\uff5c>",
    "<\uff5ctool\u2581calls\u2581end\uff5c>",
    "<\uff5ctool\u2581call\u2581begin\uff5c>",
    "<\uff5ctool\u2581call\u2581end\uff5c>",
    "<\uff5ctool\u2581sep\uff5c>",
)

DEEPSEEK_V3 = Format(
    "deepseek-v3",
    "deepseek_v3",
    None,
    _DEEPSEEK_MARKERS,
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    (
        Case("text", "你好。", "你好。"),
        Case("one", _deepseek(PARIS), calls=(PARIS,)),
        Case("two", "Sure. " + _deepseek(PARIS, TIME), "Sure. ", "", (PARIS, TIME)),
    ),
)

DEEPSEEK_R1 = Format(
    "deepseek-r1",
    "deepseek_v3",
    "deepseek_r1",
    (*_DEEPSEEK_MARKERS, "<think>", "</think>"),
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    (
        Case("thought", "Hm, 1 + 1…</think>2", "2", "Hm, 1 + 1…"),
        Case("marked", "<think>Hm</think>2", "2", "Hm"),
        Case("unfinished", "Hm, and so on", "", "Hm, and so on"),
        Case(
            "called",
            f"Look it up.</think>{_deepseek(PARIS)}",
            reasoning="Look it up.",
            calls=(PARIS,),
        ),
    ),
)

GRANITE = Format(
    "granite",
    None,
    "granite",
    (),
    "<|end_of_text|>",
    (
        Case(
            "thought",
            "Here is my thought process: hm, hm. Here is my response: Yes.",
            " Yes.",
            " hm, hm. ",
        ),
        Case("text", "Nothing to think about.", "Nothing to think about."),
    ),
)

MINIMAX_M2 = Format(
    "minimax-m2",
    "minimax_m2",
    "minimax_m2",
    ("<minimax:tool_call>", "</minimax:tool_call>", "<think>", "</think>"),
    "[e~[",
    (
        Case("thought", "Hm.\n</think>\n\nYes.", "Yes.", "Hm."),
        Case(
            "called",
            "Two.</think>\n<minimax:tool_call>\n"
            '<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
            '<parameter name="days">3</parameter>\n</invoke>\n'
            '<invoke name="get_time">\n<parameter name="zone">CET</parameter>\n</invoke>\n'
            "</minimax:tool_call>",
            reasoning="Two.",
            calls=(
                ("get_weather", {"city": "Paris", "days": 3}),
                ("get_time", {"zone": "CET"}),
            ),
        ),
    ),
)

KIMI_K2 = Format(
    "kimi-k2",
    "kimi_k2",
    None,
    (
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_end|>",
        "<|tool_call_argument_begin|>",
        "<think>",
        "</think>",
    ),
    "<|im_end|>",
    (
        Case(
            "two",
            "<|tool_calls_section_begin|>"
            "<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
            '{"city": "Paris"}<|tool_call_end|>'
            "<|tool_call_begin|>functions.get_time:1<|tool_call_argument_begin|>"
            '{"zone": "CET"}<|tool_call_end|><|tool_calls_section_end|>',
            calls=(PARIS, ("get_time", {"zone": "CET"})),
        ),
    ),
    model_type="kimi_k2",
    call_ids=("functions.get_weather:0", "functions.get_time:1"),
)

_HARMONY_CALL = (
    "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}<|call|>"
)

GPT_OSS = Format(
    "gpt-oss",
    "openai",
    "openai_gptoss",
    (),
    "<|return|>",
    (
        Case(
            "thought",
            "<|channel|>analysis<|message|>Hm, wörld…<|end|>"
            "<|start|>assistant<|channel|>final<|message|>Yes 🌍.",
            "Yes 🌍.",
            "Hm, wörld…",
        ),
        Case(
            "called",
            "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant"
            + _HARMONY_CALL.format("get_weather", '{"city": "Zürich 🏔", "days": 3}'),
            "",
            "Look.",
            (ZURICH,),
        ),
        Case(
            "two",
            "<|channel|>commentary<|message|>Two calls.<|end|><|start|>assistant"
            + _HARMONY_CALL.format("get_weather", '{"city": "Paris"}')
            + "<|start|>assistant"
            + _HARMONY_CALL.format("get_time", '{"zone": "CET"}'),
            "Two calls.",
            "",
            (PARIS, ("get_time", {"zone": "CET"})),
        ),
    ),
    model_type="gpt_oss",
)

FORMATS = (
    HERMES,
    QWEN3,
    QWEN3_CODER,
    LLAMA3,
    MISTRAL_V11,
    MISTRAL_V3,
    DEEPSEEK_V3,
    DEEPSEEK_R1,
    GRANITE,
    MINIMAX_M2,
    KIMI_K2,
)
"""All whose vocabulary a test can train. gpt-oss has ids that its parser knows."""


def write_format_model(folder: Path, form: Format) -> Path:
    """Write a model of *form* to *folder*, and return it.

    The vocabulary is trained on the format's own outputs, so that tokens cross the
    borders of words, quotes and braces as they do in real ones.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True) for text in (form.eos, *form.special)]
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        show_progress=False,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    texts = [case.text for case in form.cases] * 2
    tokenizer.train_from_iterator(texts, trainer)
    cast("Any", tokenizer).add_tokens(
        [AddedToken(text, special=False, normalized=False) for text in form.markers]
    )
    _write(folder, tokenizer, form)
    return folder


def encode(folder: Path, text: str) -> list[int]:
    """Return the ids of *text* for the model in *folder*."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return tokenizer.encode(text, add_special_tokens=False).ids


def harmony_ids(text: str) -> list[int]:
    """Return gpt-oss's ids of *text*, its marks included, and how such outputs end."""
    harmony: Any = importlib.import_module("openai_harmony")
    name = harmony.HarmonyEncodingName.HARMONY_GPT_OSS
    encoding = harmony.load_harmony_encoding(name)
    ids = cast("list[int]", encoding.encode(text, allowed_special="all"))
    return ids if text.endswith("<|call|>") else [*ids, 200002]


def write_harmony_vocabulary(folder: Path) -> Path:
    """Write gpt-oss's vocabulary, as openai_harmony reads it, and return the folder.

    The package quicktok-v1 carries it in a form of its own; openai_harmony checks the
    file by its SHA-256.
    """
    ranks = _o200k()
    lines = [b64encode(piece) + b" %d\n" % rank for rank, piece in enumerate(ranks)]
    (folder / "o200k_base.tiktoken").write_bytes(b"".join(lines))
    return folder


def write_gpt_oss_model(folder: Path) -> Path:
    """Write a model with gpt-oss's own ids to *folder*, and return it."""
    letters = _char_of_byte()
    ranks = _o200k()
    vocabulary = {
        "".join(letters[byte] for byte in piece): rank
        for rank, piece in enumerate(ranks)
    }
    # No merges: prompts become single bytes, outputs are written as ids.
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = {
        199998: "<|startoftext|>",
        199999: "<|endoftext|>",
        200002: "<|return|>",
        200003: "<|constrain|>",
        200005: "<|channel|>",
        200006: "<|start|>",
        200007: "<|end|>",
        200008: "<|message|>",
        200012: "<|call|>",
    }
    cast("Any", tokenizer).add_special_tokens(
        [
            AddedToken(names.get(n, f"<|reserved_{n}|>"), special=True)
            for n in range(199998, 200019)
        ]
    )
    _write(folder, tokenizer, GPT_OSS, eos_token_id=[200002, 199999, 200012])
    return folder


def _write(
    folder: Path,
    tokenizer: Tokenizer,
    form: Format,
    eos_token_id: int | list[int] | None = None,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    eos: object = eos_token_id or tokenizer.token_to_id(form.eos)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": form.model_type,
        "vocab_size": tokenizer.get_vocab_size(with_added_tokens=True),
        "max_position_embeddings": 4096,
        "eos_token_id": eos,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    settings = {"chat_template": TEMPLATE, "eos_token": form.eos}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _o200k() -> list[bytes]:
    """Return o200k's tokens in order of their rank.

    The file: a count, then for each token its length, its bytes and its rank.
    """
    spec = importlib.util.find_spec("quicktok")  # found, not imported: native code
    assert spec is not None
    assert spec.submodule_search_locations is not None
    folder = Path(spec.submodule_search_locations[0])
    data = (folder / "data" / "o200k.vocab").read_bytes()
    (count,) = struct.unpack_from("<I", data)
    ranks = [b""] * count
    at = 4
    for _ in range(count):
        (size,) = struct.unpack_from("<H", data, at)
        at += 2 + size
        (rank,) = struct.unpack_from("<I", data, at)
        ranks[rank] = data[at - size : at]
        at += 4
    return ranks


def _char_of_byte() -> dict[int, str]:
    """Return GPT-2's printable characters for all bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    letters.update({byte: chr(256 + n) for n, byte in enumerate(others)})
    return letters
