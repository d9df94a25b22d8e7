"""What the simulated engine takes from a model's folder: sizes, EOS, printable ids."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from tokenwire.worker.engine import EngineStartError

__all__ = ["SimModel", "read_model"]

T = TypeVar("T")

DEFAULT_VOCAB_SIZE = 32_000
"""Of a model that is no folder: Llama 2's, as good as any."""

DEFAULT_MAX_MODEL_LEN = 8_192
"""Of a model that is no folder: the demo model's."""

FIRST_PRINTABLE = 512
"""Without a tokenizer to look into: special and byte tokens come first in the common
vocabularies (3 + 256 in Llama's, 17 + 256 in SmolLM2's)."""

_WORD = re.compile(r"[Ġ▁]?[A-Za-z]+")
"""A whole ASCII word in a byte-level (``Ġ``) or a SentencePiece (``▁``) vocabulary: its
text never ends inside a character, so it prints whatever stands beside it."""

_MIN_WORDS = 16
"""Fewer than this and the vocabulary is of some other kind: use the range instead."""


@dataclass(slots=True, frozen=True)
class SimModel:
    """The facts of a model that show in its ids."""

    vocab_size: int
    max_model_len: int
    eos_token_id: int | None
    extra_stop_ids: frozenset[int]  # further EOS ids of generation_config.json
    printable: tuple[int, ...]  # ids the rule chooses from, ascending
    dtype: str = ""


class _Config(msgspec.Struct):
    vocab_size: int | None = None
    max_position_embeddings: int | None = None
    eos_token_id: int | list[int] | None = None
    dtype: str | None = None
    text_config: _Config | None = None  # of a multi-modal model


class _Vocabulary(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]] = msgspec.field(
        default_factory=dict[str, int]
    )


class _AddedToken(msgspec.Struct):
    id: int


class _Tokenizer(msgspec.Struct):
    model: _Vocabulary
    added_tokens: list[_AddedToken] = []


def read_model(model: str) -> SimModel:
    """Return the facts of the model in the folder *model*.

    Anything else than a folder is a name: it gets usual sizes and no EOS.

    Raises:
        EngineStartError: A file of the folder cannot be read.
    """
    folder = Path(model)
    if not folder.is_dir():
        return SimModel(
            vocab_size=DEFAULT_VOCAB_SIZE,
            max_model_len=DEFAULT_MAX_MODEL_LEN,
            eos_token_id=None,
            extra_stop_ids=frozenset(),
            printable=tuple(range(FIRST_PRINTABLE, DEFAULT_VOCAB_SIZE)),
        )
    config = _read(folder / "config.json", _Config) or _Config()
    generation = _read(folder / "generation_config.json", _Config) or _Config()
    tokenizer = _read(folder / "tokenizer.json", _Tokenizer)
    text = config.text_config or config
    vocab_size = text.vocab_size or DEFAULT_VOCAB_SIZE
    eos_ids: list[int] = []
    for value in (generation.eos_token_id, config.eos_token_id, text.eos_token_id):
        if value is not None:
            eos_ids = [value] if isinstance(value, int) else value
            break
    return SimModel(
        vocab_size=vocab_size,
        max_model_len=text.max_position_embeddings or DEFAULT_MAX_MODEL_LEN,
        eos_token_id=eos_ids[0] if eos_ids else None,
        extra_stop_ids=frozenset(eos_ids[1:]),
        printable=_printable(tokenizer, vocab_size, frozenset(eos_ids)),
        dtype=config.dtype or text.dtype or "",
    )


def _printable(
    tokenizer: _Tokenizer | None, vocab_size: int, eos_ids: frozenset[int]
) -> tuple[int, ...]:
    if tokenizer is not None:
        vocab = tokenizer.model.vocab
        pairs = (
            vocab.items()
            if isinstance(vocab, dict)
            else ((text, index) for index, (text, _score) in enumerate(vocab))
        )
        special = {token.id for token in tokenizer.added_tokens}
        words = sorted(
            token_id
            for text, token_id in pairs
            if token_id < vocab_size
            and token_id not in special
            and _WORD.fullmatch(text)
        )
        if len(words) >= _MIN_WORDS:
            return tuple(words)
    first = FIRST_PRINTABLE if vocab_size > 2 * FIRST_PRINTABLE else vocab_size // 2
    return tuple(i for i in range(first, vocab_size) if i not in eos_ids)


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        msg = f"{path} cannot be read: {error}"
        raise EngineStartError(msg) from error
