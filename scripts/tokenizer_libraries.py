"""Libraries that read a ``tokenizer.json`` and say that they are faster, as one function each."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

__all__ = ["LIBRARIES", "Encode", "release"]

Encode = Callable[[str], list[int]]
"""Returns the ids of a text, none added."""


def _tokenizers(source: str) -> Encode:
    made = Tokenizer.from_str(source)
    return lambda text: made.encode_batch_fast([text], add_special_tokens=False)[0].ids


def _same_calls(name: str) -> Callable[[str], Encode]:
    """Return the loader of a library with the calls of fastokens."""

    def load(source: str) -> Encode:
        made: Any = import_module(name).Tokenizer.from_json_str(source)
        return lambda text: list(made.encode(text, add_special_tokens=False).ids)

    return load


def _from_file(source: str, load: Callable[[str], Any]) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        path.write_text(source)
        return load(str(path))


def _kitoken(source: str) -> Encode:
    made: Any = import_module("kitoken").Kitoken.from_tokenizers(source.encode())
    return lambda text: list(made.encode(text, True))


def _tokie(source: str) -> Encode:
    made = _from_file(source, import_module("tokie").Tokenizer.from_json)
    return lambda text: list(made.encode(text, False).ids)


def _iree(source: str) -> Encode:
    made: Any = import_module("iree.tokenizer").Tokenizer.from_str(source)
    return lambda text: list(made.encode(text))


def _gigatoken(source: str) -> Encode:
    made = _from_file(source, import_module("gigatoken").Tokenizer)
    return lambda text: [int(one) for one in made.encode(text)]


LIBRARIES: dict[str, Callable[[str], Encode]] = {
    "tokenizers": _tokenizers,
    "fastokens": _same_calls("fastokens"),
    "snaptokens": _same_calls("snaptokens"),
    "kitoken": _kitoken,
    "tokie": _tokie,
    "iree-tokenizer": _iree,
    "gigatoken": _gigatoken,
}
"""What each makes of a ``tokenizer.json``; the first is the measure of the others."""


def release(name: str) -> str:
    """Return a library's name and release."""
    return f"{name} {version(name)}"
