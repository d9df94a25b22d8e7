"""What the ids of a vocabulary stand for: bytes, or texts; read off its decoder.

A decoder is the object of that name in ``tokenizer.json``. Those of the two large
families are known here, so that their ids become text by a table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Pieces", "byte_pieces", "bytes_of_piece", "sentence_pieces"]

Decoder = Mapping[str, Any] | None

SPACE = "▁"
"""U+2581: a space, in the pieces of SentencePiece."""

_SPACES = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
_BYTES = [{"type": "ByteFallback"}, {"type": "Fuse"}]
_STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


@dataclass(slots=True, frozen=True)
class Pieces:
    """What each id of a SentencePiece vocabulary stands for: a text, or one byte."""

    texts: list[str | None]  # (num_ids,); None: an id that the tokenizer does not know
    byte_of: dict[int, int]  # ids of byte fallback; their text is not used
    first: Callable[[int, str], str]
    """What becomes of an id's text at the beginning, where a word's space goes."""

    def text(self, token_id: int) -> str | None:
        """Return the text of an id; None if it has none."""
        return self.texts[token_id] if token_id < len(self.texts) else None


def _byte_of_char() -> dict[str, int]:
    """Return GPT-2's map of 256 printable characters to the bytes they stand for."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    mapping = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    mapping.update({chr(256 + n): byte for n, byte in enumerate(others)})
    return mapping


_BYTE_OF_CHAR = _byte_of_char()


def bytes_of_piece(piece: str) -> bytes:
    """Return the bytes of a vocabulary entry of a byte-level tokenizer.

    An entry with a character outside the map (an added token with a space) is its
    own UTF-8, as in the ``ByteLevel`` decoder of the tokenizers library.
    """
    try:
        return bytes(_BYTE_OF_CHAR[char] for char in piece)
    except KeyError:
        return piece.encode()


def byte_pieces(vocabulary: Mapping[str, int], decoder: Decoder) -> list[bytes] | None:
    """Return the bytes of each id of a byte-level tokenizer; None: it is another."""
    if [step["type"] for step in _steps(decoder)] != ["ByteLevel"]:
        return None
    pieces = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for piece, token_id in vocabulary.items():
        pieces[token_id] = bytes_of_piece(piece)
    return pieces


def sentence_pieces(vocabulary: Mapping[str, int], decoder: Decoder) -> Pieces | None:
    """Return the pieces of a SentencePiece tokenizer; None: it is another."""
    steps = _steps(decoder)
    if [step["type"] for step in steps] == ["Metaspace"]:
        return _metaspace(vocabulary, steps[0])
    if steps in ([_SPACES, *_BYTES], [_SPACES, *_BYTES, _STRIP]):
        return _byte_fallback(vocabulary, strip=_STRIP in steps)
    return None


def _metaspace(vocabulary: Mapping[str, int], step: Mapping[str, Any]) -> Pieces:
    """Return the pieces of a model without bytes, as T5 has it."""
    space: str = step["replacement"]
    drop = step.get("prepend_scheme", "always") != "never"
    raw = {token_id: piece for piece, token_id in vocabulary.items()}
    texts = _texts(vocabulary, space)

    def first(token_id: int, text: str) -> str:
        return raw[token_id].replace(space, "") if drop else text

    return Pieces(texts, {}, first)


def _byte_fallback(vocabulary: Mapping[str, int], *, strip: bool) -> Pieces:
    """Return the pieces of a model that spells rare characters in bytes, as Llama 2."""
    spelled = {token_id: _byte(piece) for piece, token_id in vocabulary.items()}
    byte_of = {token_id: byte for token_id, byte in spelled.items() if byte is not None}

    def first(token_id: int, text: str) -> str:
        del token_id
        return text.removeprefix(" ") if strip else text

    return Pieces(_texts(vocabulary, SPACE), byte_of, first)


def _texts(vocabulary: Mapping[str, int], space: str) -> list[str | None]:
    texts: list[str | None] = [None] * (max(vocabulary.values(), default=-1) + 1)
    for piece, token_id in vocabulary.items():
        texts[token_id] = piece.replace(space, " ")
    return texts


def _byte(piece: str) -> int | None:
    """Return the byte of a piece like ``<0x0A>``."""
    if len(piece) != len("<0x0A>") or not piece.startswith("<0x") or piece[-1] != ">":
        return None
    try:
        return int(piece[3:5], 16)
    except ValueError:
        return None


def _steps(decoder: Decoder) -> list[Mapping[str, Any]]:
    """Return the decoders that *decoder* is made of."""
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for one in decoder["decoders"] for step in _steps(one)]
    return [decoder]
