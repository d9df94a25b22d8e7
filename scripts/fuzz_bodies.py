"""Bodies that are right, or almost: hypothesis strategies, made from the document."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple, cast

from api_document import ApiDocument
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

__all__ = ["MODEL_NAME", "bodies", "cut"]

MODEL_NAME = "tiny"
"""Under which what is fuzzed must be served."""

Json = Any


class Raw:
    """JSON, or what looks like it, to be written as it is."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return f"Raw({self.text[:40]!r})"


ODD: list[Json] = [
    *(None, True, False, 0, -1, 1, 3, 20, 21, 128, 129),
    *(2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64, -(2**63) - 1),
    *(10**400, -0.0, 0.5, 1.0, 1.5, 1e-320, 1e308),
    *(
        Raw("NaN"),
        Raw("Infinity"),
        Raw("-Infinity"),
        Raw("1e999"),
        Raw("-0"),
        Raw("01"),
    ),
    *(
        "",
        "a",
        "0",
        "true",
        "\x00",
        "\ud800",
        "\udc80a",
        "\u2028",
        "\U0001f600",
        "x" * 999,
    ),
    *([], {}, [None], [[]], [{}], [True], [1.5], ["a", 1], [[1], "a"], {"": None}),
    *([0] * 50, ["a"] * 17, {"a": {"a": {"a": []}}}, {"type": "object"}),
    *(Raw("[" * 500 + "]" * 500), Raw('{"a":' * 2000 + "1" + "}" * 2000)),
    *(Raw("[" * 50_000), Raw('"\\ud800"'), Raw('"\\u"'), Raw("'a'"), Raw("")),
    *([2**31], [-1], [263], [10**6], [2**64], ["\ud800"], {"\ud800": 1}),
]
"""What breaks parsers, checks and encoders, and values beside a field's bounds."""

TEXTS = st.text(max_size=20) | st.sampled_from(
    ["hello", "a b", "é", "\U0001f600 x", ""]
)
IDS = st.lists(st.integers(0, 263), min_size=1, max_size=40)

FUNCTION: dict[str, SearchStrategy[Json]] = {
    "name": st.sampled_from(["f", "g", ""]),
    "description": TEXTS,
    "parameters": st.just({"type": "object"}),
}
TOOL: dict[str, SearchStrategy[Json]] = {
    "type": st.just("function"),
    "function": st.fixed_dictionaries({}, optional=FUNCTION),
}
NAMED_TOOL = {"type": "function", "function": {"name": "f"}}

PLAUSIBLE: dict[str, SearchStrategy[Json]] = {
    "prompt": TEXTS
    | IDS
    | st.lists(TEXTS, min_size=1, max_size=3)
    | st.lists(IDS, max_size=3),
    "messages": st.lists(
        st.fixed_dictionaries(
            {
                "role": st.sampled_from(["user", "system", "assistant", "tool", "x"]),
                "content": TEXTS
                | st.none()
                | st.lists(
                    st.fixed_dictionaries({"type": st.just("text"), "text": TEXTS}),
                    max_size=3,
                ),
            }
        ),
        max_size=4,
    ),
    "max_tokens": st.integers(0, 40),
    "max_completion_tokens": st.integers(1, 40),
    "temperature": st.sampled_from([0, 0.0, 0.7, 1, 2]),
    "top_p": st.sampled_from([0.1, 0.9, 1]),
    "top_k": st.sampled_from([-1, 0, 1, 50]),
    "min_p": st.sampled_from([0, 0.1, 1]),
    "n": st.integers(1, 4),
    "best_of": st.integers(1, 4),
    "seed": st.integers(-1, 2**63 - 1),
    "stop": TEXTS | st.lists(TEXTS, max_size=4),
    "stop_token_ids": IDS,
    "logprobs": st.booleans() | st.integers(0, 20),
    "top_logprobs": st.integers(0, 20),
    "prompt_logprobs": st.integers(0, 20),
    "logit_bias": st.dictionaries(st.integers(0, 263).map(str), st.floats(-100, 100)),
    "allowed_token_ids": IDS,
    "bad_words": st.lists(TEXTS, max_size=3),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries(
        {},
        optional={
            "include_usage": st.booleans(),
            "continuous_usage_stats": st.booleans(),
        },
    ),
    "response_format": st.sampled_from(
        [
            {"type": "text"},
            {"type": "json_object"},
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}},
        ]
    ),
    "structured_outputs": st.sampled_from(
        [{"regex": "a+"}, {"choice": ["a"]}, {"json": {}}, {"json_object": True}]
    ),
    "min_tokens": st.integers(0, 10),
    "priority": st.integers(-5, 5),
    "cache_salt": TEXTS,
    "request_id": st.sampled_from(["a", "a b", "..", "x" * 128]),
    "model": st.sampled_from([MODEL_NAME, MODEL_NAME, "other", ""]),
    "chat_template_kwargs": st.dictionaries(TEXTS, TEXTS, max_size=2),
    "metadata": st.dictionaries(TEXTS, TEXTS, max_size=2),
    "tools": st.lists(st.fixed_dictionaries(TOOL), max_size=2),
    "tool_choice": st.sampled_from(["none", "auto", "required", "x", NAMED_TOOL]),
    "required_prefix_token_ids": IDS,
    "truncate_prompt_tokens": st.integers(-1, 40),
    "truncation_side": st.sampled_from(["left", "right"]),
    "token_ids": IDS,
    "tokens": IDS,
}
PLAUSIBLE["sampling_params"] = st.fixed_dictionaries(
    {"max_tokens": st.integers(0, 40)},
    optional={
        name: PLAUSIBLE[name]
        for name in (
            "temperature",
            "top_p",
            "n",
            "seed",
            "stop",
            "logprobs",
            "min_tokens",
        )
    },
)
"""Values that are mostly right, by field; those of other fields are made by their schema."""

NUMBERS = st.sampled_from([one for one in ODD if isinstance(one, int | float | Raw)])

ANY = st.sampled_from(ODD) | st.booleans() | st.integers() | TEXTS

BASES: dict[str, dict[str, Json]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    "/v1/completions": {"prompt": [5, 6, 7]},
    "/v1/chat/completions/render": {"messages": [{"role": "user", "content": "hello"}]},
    "/v1/completions/render": {"prompt": [5, 6, 7]},
    "/inference/v1/generate": {"token_ids": [5, 6, 7]},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [70, 71]},
}


class Values(NamedTuple):
    """What is put into a field."""

    right: SearchStrategy[Json]
    odd: SearchStrategy[Json]


def bodies(document: ApiDocument, path: str) -> SearchStrategy[bytes]:
    """Return JSON bodies of a route: right ones, and right ones with something wrong."""
    schemas: dict[str, dict[str, Any]] = document.document["components"]["schemas"]
    operation = document.document["paths"][path]["post"]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    selectors = _branches(schemas["Nvext"]["properties"]["extra_fields"])[0]["items"]
    nvext: dict[str, SearchStrategy[Json]] = {
        "extra_fields": st.lists(st.sampled_from(selectors["enum"]), max_size=4),
        "token_data": IDS,
    }
    plausible = {**PLAUSIBLE, "nvext": st.fixed_dictionaries({}, optional=nvext)}
    fields: dict[str, Values] = {}
    for name in _names(schema):
        for field, form in schemas[name]["properties"].items():
            kinds = {branch.get("type") for branch in _branches(form)}
            fields[field] = Values(
                plausible[field] if field in plausible else _by_schema(form),
                NUMBERS if kinds & {"integer", "number"} else ANY,
            )
    return _body(BASES.get(path, {}), fields)


def _by_schema(form: dict[str, Any]) -> SearchStrategy[Json]:
    """Return simple values of a field that no strategy is made for."""
    branch = _branches(form)[0]
    if "enum" in branch:
        return st.sampled_from(branch["enum"])
    match branch.get("type"):
        case "boolean":
            return st.booleans()
        case "integer" | "number":
            return st.integers(0, 50)
        case "string":
            return TEXTS
        case _:
            return ANY


def _branches(form: dict[str, Any]) -> list[dict[str, Any]]:
    branches: list[dict[str, Any]] = form.get("anyOf", [form])
    return branches


def _names(schema: dict[str, Any]) -> list[str]:
    return [branch["$ref"].rpartition("/")[2] for branch in _branches(schema)]


@st.composite
def _body(draw: DrawFn, base: dict[str, Json], fields: dict[str, Values]) -> bytes:
    body = {**base}
    if "max_tokens" in fields:
        body["max_tokens"] = 5
    if "sampling_params" in fields:
        body["sampling_params"] = draw(fields["sampling_params"].right)
    for name in draw(st.lists(st.sampled_from(sorted(fields)), max_size=5)):
        is_odd = draw(st.sampled_from([False, False, False, True]))
        body[name] = draw(fields[name].odd if is_odd else fields[name].right)
    for _ in range(draw(st.sampled_from([0, 0, 0, 0, 1, 1, 2]))):
        body = _swapped(draw, body)
    text = _encoded(body)
    wrong = draw(st.sampled_from([*[None] * 15, *BYTE_FAULTS]))
    return text if wrong is None else wrong(draw, text)


def _swapped(draw: DrawFn, value: Json) -> Json:
    """Return *value* with something at one place in it exchanged."""
    deeper = draw(st.booleans())
    if isinstance(value, dict) and value:
        fields = cast("dict[str, Json]", value)
        key = draw(st.sampled_from(sorted(fields)))
        if deeper and isinstance(fields[key], dict | list):
            return {**fields, key: _swapped(draw, fields[key])}
        match draw(st.sampled_from(["swap", "swap", "swap", "drop", "rename"])):
            case "drop":
                return {name: fields[name] for name in fields if name != key}
            case "rename":
                return {**fields, draw(TEXTS): fields[key]}
            case _:
                return {**fields, key: draw(ANY)}
    if isinstance(value, list) and value:
        items = cast("list[object]", value)
        place = draw(st.integers(0, len(items) - 1))
        inner = _swapped(draw, items[place]) if deeper else draw(ANY)
        return [*items[:place], inner, *items[place + 1 :]]
    return draw(ANY)


def _encoded(value: Json) -> bytes:
    raws: dict[str, str] = {}

    def mark(one: Json) -> str:
        if not isinstance(one, Raw):
            msg = f"not JSON: {one!r}"
            raise TypeError(msg)
        raws[f"raw-{len(raws)}-"] = one.text
        return f"raw-{len(raws) - 1}-"

    text = json.dumps(value, default=mark)
    for key, raw in raws.items():
        text = text.replace(f'"{key}"', raw)
    return text.encode()


def cut(draw: DrawFn, text: bytes) -> bytes:
    """Return the beginning of *text*."""
    return text[: draw(st.integers(0, len(text)))]


def _repeated_key(draw: DrawFn, text: bytes) -> bytes:
    key = draw(
        st.sampled_from(["stream", "prompt", "messages", "n", "nvext", "max_tokens"])
    )
    return b"{" + _encoded(key) + b":" + _encoded(draw(ANY)) + b"," + text[1:]


def _other_bytes(draw: DrawFn, text: bytes) -> bytes:
    place = draw(st.integers(0, len(text)))
    return text[:place] + draw(st.binary(min_size=1, max_size=4)) + text[place:]


def _framed(draw: DrawFn, text: bytes) -> bytes:
    before, behind = draw(
        st.sampled_from(
            [(b"\xef\xbb\xbf", b""), (b" " * 5000, b"\n"), (b"", b"{}"), (b"[", b"]")]
        )
    )
    return before + text + behind


def _utf16(draw: DrawFn, text: bytes) -> bytes:
    return text.decode().encode(
        draw(st.sampled_from(["utf-16", "utf-32", "utf-16-le"]))
    )


ByteFault = Callable[[DrawFn, bytes], bytes]
BYTE_FAULTS: list[ByteFault] = [cut, _repeated_key, _other_bytes, _framed, _utf16]
