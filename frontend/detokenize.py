"""Token ids to text, one at a time: never half a character, never the prompt's text."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Container, Sequence
from typing import Protocol

import msgspec

from .pieces import Pieces

__all__ = [
    "ByteDetokenizer",
    "ByteTable",
    "Detokenizer",
    "PieceDetokenizer",
    "StreamDetokenizer",
]

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer(Protocol):
    """Folds the output's ids into text."""

    def feed(self, token_id: int) -> str:
        """Return the text that *token_id* completes; empty inside a character."""
        ...

    def flush(self) -> str:
        """Return what is left at the end: U+FFFD for bytes that stayed incomplete."""
        ...


class ByteTable:
    """The bytes of each id, and what whole characters read as, wherever they stand.

    Made once for a model, in 0.5 us an id, and shared by all its detokenizers.

    Args:
        pieces: The bytes; none for ids that are not to be shown.
    """

    __slots__ = ("pieces", "quoted", "texts")

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces
        self.quoted = [_quoted(piece) for piece in pieces]
        """By id, in JSON; None where that is no text of its own, or an empty one."""
        self.texts: list[str | None] = [None] * len(pieces)
        """By id; filled in where it is used."""

    def without(self, ids: Container[int]) -> ByteTable:
        """Return a table in which *ids* are not to be shown."""
        table = ByteTable(())
        kept = range(len(self.pieces))
        table.pieces = [b"" if n in ids else self.pieces[n] for n in kept]
        table.quoted = [None if n in ids else self.quoted[n] for n in kept]
        table.texts = [None] * len(self.pieces)
        return table


def _quoted(piece: bytes) -> bytes | None:
    try:
        return msgspec.json.encode(piece.decode()) if piece else None
    except UnicodeDecodeError:
        return None


class ByteDetokenizer:
    """Byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM …): a token is a run of bytes.

    The text is the UTF-8 reading of all bytes in order, so how the tokens were
    batched cannot matter, and no window has to be decoded again: 0.2 us a token
    against 1 us of the library's ``DecodeStream``, and a third of that for a token
    of whole characters that was seen before.
    """

    __slots__ = ("_pieces", "_texts", "quoted", "rest")

    def __init__(self, table: ByteTable) -> None:
        self._pieces = table.pieces
        self._texts = table.texts
        self.quoted = table.quoted
        self.rest = b""
        """Bytes of a character that is not whole."""

    def feed(self, token_id: int) -> str:
        """Return the text that *token_id* completes."""
        try:
            text = self._texts[token_id]
        except IndexError:
            # Above the tokenizer's own ids lie padding rows of the model's embedding.
            return ""
        if text is None or self.rest:
            return self._read(token_id)
        return text

    def flush(self) -> str:
        """Return U+FFFD if the last character stayed incomplete."""
        rest, self.rest = self.rest, b""
        return rest.decode("utf-8", "replace")

    def _read(self, token_id: int) -> str:
        before = self.rest
        data = before + self._pieces[token_id]
        text, num_read = codecs.utf_8_decode(data, "replace", False)
        self.rest = data[num_read:]
        if not before and not self.rest:
            self._texts[token_id] = text
        return text


class PieceDetokenizer:
    """SentencePiece (Llama 2, Mistral, Gemma, T5 …): a token is a text, or one byte.

    Bytes wait until they are a character. Those that become none come out as U+FFFD,
    one for each byte as in the tokenizers library; unlike there, whole characters
    before them stay what they are, because they have been shown.
    """

    __slots__ = ("_at_start", "_bytes", "_pieces", "_skip")

    def __init__(
        self, pieces: Pieces, skip: Container[int], prompt_token_ids: Sequence[int]
    ) -> None:
        self._pieces = pieces
        self._skip = skip
        self._bytes = b""  # of a character that is not whole
        # Any piece of the prompt is a beginning, ids that show nothing are none.
        self._at_start = not any(
            token_id not in skip and pieces.text(token_id) is not None
            for token_id in prompt_token_ids
        )

    def feed(self, token_id: int) -> str:
        """Return the text that *token_id* completes."""
        if token_id in self._skip:
            return ""
        text = self._pieces.text(token_id)
        if text is None:
            return ""
        byte = self._pieces.byte_of.get(token_id)
        if byte is not None:
            text = self._with_byte(byte)
        elif self._bytes:
            text = self.flush() + text
        if self._at_start and (text or not self._bytes):
            self._at_start = False
            return self._pieces.first(token_id, text)
        return text

    def flush(self) -> str:
        """Return U+FFFD for each byte that stayed without its character."""
        rest = REPLACEMENT * len(self._bytes)
        self._bytes = b""
        return rest

    def _with_byte(self, byte: int) -> str:
        self._bytes += bytes([byte])
        try:
            text = self._bytes.decode()
        except UnicodeDecodeError as error:
            if (
                error.end == len(self._bytes)
                and error.reason == "unexpected end of data"
            ):
                return ""
            return self.flush()
        self._bytes = b""
        return text


class StreamDetokenizer:
    """Any tokenizer: each id is decoded behind the ids before it, whose text is known.

    Primed with the end of the prompt, so that a first piece keeps its leading space;
    not primed where the prompt ends inside a character, which would leak its text.
    The library's ``DecodeStream`` is not used: it fails on bytes that are no UTF-8,
    which a model may well produce.
    """

    __slots__ = ("_decode", "_known", "_known_text", "_new", "_silent")

    _PRIME_TOKENS = 6  # more than the bytes of any character
    _CHARACTER_BYTES = 4  # so many at most; ids that stay unreadable for longer are not

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        silent: Container[int],
        prompt_token_ids: Sequence[int],
    ) -> None:
        """Begin behind a prompt.

        Args:
            decode: Gives the text of ids, as the tokenizer's library decodes them.
            silent: Ids that it leaves out: special ones, if they are skipped.
            prompt_token_ids: What stands before the output.
        """
        self._decode = decode
        self._silent = silent
        self._known: list[int] = []
        self._known_text = ""
        self._new: list[int] = []  # inside a character
        for more in range(self._CHARACTER_BYTES):  # one of them cuts no character
            prime = list(prompt_token_ids[-self._PRIME_TOKENS - more :])
            text = decode(prime)
            if not text.endswith(REPLACEMENT):
                self._known, self._known_text = prime, text
                break

    def feed(self, token_id: int) -> str:
        """Return the text that *token_id* completes."""
        if token_id in self._silent:
            return ""
        self._new.append(token_id)
        text = self._text_of_new()
        if text.endswith(REPLACEMENT) and len(self._new) < self._CHARACTER_BYTES:
            return ""
        if text:
            self._known, self._new = self._new, []
        else:
            # No text, but it may be what makes the next one no beginning.
            self._known = [*self._known, *self._new][-self._PRIME_TOKENS :]
            self._new = []
        self._known_text = self._decode(self._known)
        return text

    def flush(self) -> str:
        """Return the text of bytes that no later token completed."""
        return self._text_of_new() if self._new else ""

    def _text_of_new(self) -> str:
        text = self._decode(self._known + self._new)
        if text.startswith(self._known_text):
            return text[len(self._known_text) :]
        return self._decode(self._new)  # new bytes that change how the known ones read
