"""The kinds of output in the resume report, and the model that speaks them.

The real engine is bound by grammars to most of them. The simulated one follows scripts
with holes (``{}``), which its draws fill: so seeds and penalties decide on a part of
every output, and a script that begins again shows what a grammar would do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

__all__ = [
    "KINDS",
    "NO_THOUGHT",
    "PARSERS",
    "SAMPLINGS",
    "Kind",
    "Sampling",
    "Text",
    "report_model",
]

PARSERS = ("hermes", "qwen3")
"""Of tool calls and of reasoning: ChatML's own, as most open models have them."""

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n<tools>{{ tools | tojson }}</tools><|im_end|>\n"
    "{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n"
    "{% endif %}{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

RENAMED = {
    "<issue_start>": "<think>",
    "<issue_closed>": "</think>",
    "<jupyter_start>": "<tool_call>",
    "<jupyter_output>": "</tool_call>",
}
"""Tokens of the demo model that it does not use by itself, and parsers know by name."""

NO_THOUGHT: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}
_CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 60}},
    "required": ["city"],
    "additionalProperties": False,
}
_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"The {name.removeprefix('get_')} of a city",
            "strict": True,
            "parameters": _CITY,
        },
    }
    for name in ("get_weather", "get_population")
]
_SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 60},
        "days": {"type": "array", "items": {"type": "string"}, "minItems": 3},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
_HOLES = "{}{}{}"


def _call(name: str) -> str:
    arguments = f'{{"city": "Zürich 🏔{_HOLES}"}}'
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@dataclass(frozen=True)
class Kind:
    """One kind of output."""

    name: str
    asks: str  # the user's words
    body: Mapping[str, Any]  # beside messages and sampling
    said: str  # by the simulated engine
    has_grammar: bool = False  # which begins anew where output is a prompt
    has_calls: bool = False
    has_thought: bool = False


@dataclass(frozen=True)
class Sampling:
    """One way to choose tokens."""

    name: str
    fields: Mapping[str, Any]
    is_seeded: bool = True  # or greedy: a request of its own says the same again


KINDS = (
    Kind(
        "plain",
        "Tell me about the mountains around Zürich.",
        NO_THOUGHT,
        f"Zürich 🏔{_HOLES} lies{_HOLES} at the é{_HOLES} lake 🌊{_HOLES}, and{_HOLES}.",
    ),
    Kind(
        "reasoning",
        "Which lake is that? Think first.",
        {},
        f"<think>\nWell…{_HOLES} 🤔{_HOLES} it{_HOLES} is é{_HOLES}\n</think>\n\n"
        f"The lake 🌊{_HOLES} of{_HOLES}.",
        has_thought=True,
    ),
    Kind(
        "one tool",
        "What is the weather like in Zürich?",
        {**NO_THOUGHT, "tools": _TOOLS, "tool_choice": "required"},
        _call("get_weather"),
        has_grammar=True,
        has_calls=True,
    ),
    Kind(
        "two tools",
        "The weather in Zürich, and how many live there?",
        {**NO_THOUGHT, "tools": _TOOLS},
        f"{_call('get_weather')}\n{_call('get_population')}",
        has_calls=True,
    ),
    Kind(
        "JSON schema",
        "The weather in Zürich for the next days, as JSON.",
        {
            **NO_THOUGHT,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "weather", "schema": _SCHEMA, "strict": True},
            },
        },
        f'{{"city": "Zürich 🏔{_HOLES}", "days": ["{_HOLES}", "{_HOLES}é", "{_HOLES}"]}}',
        has_grammar=True,
    ),
    Kind(
        "regex",
        "Some words about Zürich.",
        {**NO_THOUGHT, "structured_outputs": {"regex": "([a-zé🏔]{2,9} ){24}"}},
        f"é 🏔 {_HOLES}{_HOLES} é {_HOLES} 🏔 {_HOLES} é {_HOLES}",
        has_grammar=True,
    ),
)

SAMPLINGS = (
    Sampling("T=0", {"temperature": 0}),
    Sampling("0.8 seeded", {"temperature": 0.8, "seed": 11}),
    Sampling("0.8 unseeded", {"temperature": 0.8}, is_seeded=False),
    Sampling("1.2 seeded", {"temperature": 1.2, "seed": 12}),
)


class Text:
    """The model's tokenizer: what ids say, and ids for what is to be said."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        vocabulary = self._tokenizer.get_vocab()
        words = (id_ for piece, id_ in vocabulary.items() if _is_word(piece))
        self.words = sorted(words)[:97]  # prime: no draw favours some of them

    def ids(self, text: str) -> list[int]:
        """Return a text's ids, as they stand in a prompt."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def says(self, ids: list[int]) -> str:
        """Return what ids say, special ones too."""
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def script(self, said: str) -> list[int]:
        """Return ids of a text whose holes are -1."""
        first, *others = said.split("{}") if "{}" in said else [said]
        ids = self.ids(first)
        for part in others:
            ids += [-1, *self.ids(part)]
        return ids


def _is_word(piece: str) -> bool:
    """Return whether a token is a word of small letters, which no grammar minds."""
    word = piece.removeprefix("Ġ")
    return word.isascii() and word.isalpha() and word.islower()


def report_model(source: Path, folder: Path) -> Path:
    """Make a model that speaks all kinds of *source*; return its folder.

    Only names of tokens and the chat template are others.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.suffix != ".json":
            (folder / file.name).symlink_to(file.resolve())
            continue
        text = file.read_text()
        for old, new in RENAMED.items():
            text = text.replace(f'"{old}"', f'"{new}"')
        (folder / file.name).write_text(text)
    settings_file = folder / "tokenizer_config.json"
    settings = json.loads(settings_file.read_text())
    settings_file.write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    tokenizer_file = folder / "tokenizer.json"
    tokenizer = json.loads(tokenizer_file.read_text())
    for token in tokenizer["added_tokens"]:
        if token["content"] in RENAMED.values():
            token["special"] = False  # a parser sees it
    tokenizer_file.write_text(json.dumps(tokenizer))
    return folder
