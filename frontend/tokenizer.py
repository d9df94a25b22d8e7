"""A model's text: encode, decode, template."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from concurrent.futures import Executor
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import msgspec
from tokenizers import AddedToken, Tokenizer

from .detokenize import (
    ByteDetokenizer,
    ByteTable,
    Detokenizer,
    PieceDetokenizer,
    StreamDetokenizer,
)
from .encoding import TokenizerBackend, encoder
from .errors import bad_request
from .large import MAX_TOKENS, check_length
from .pieces import byte_pieces, sentence_pieces
from .segments import Segments, cuts
from .template import ChatTemplate
from .threads import LONG_CHARS, LONG_IDS, Threads

__all__ = ["SamplingDefaults", "SpecialTokens", "TextModel", "read_tokenizer"]

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Texts are encoded one by one, and the library divides none among its threads: to hand
# one over to them and wait costs more than a short text.

MAX_TEMPLATES = 32
"""Compiled templates that requests brought, kept: as many as vLLM keeps."""


class SamplingDefaults(msgspec.Struct):
    """What ``generation_config.json`` sets where a request says nothing, as in vLLM."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


class SpecialTokens(msgspec.Struct, frozen=True):
    """What ``tokenizer_config.json`` says about tokens beside the tokenizer itself."""

    names: dict[str, str] = {}
    """``bos_token`` and its like, which templates may name."""
    added: list[dict[str, Any]] = []
    """Tokens of ``added_tokens_decoder``, in the order of their ids."""
    extra: list[str] = []
    """Further special tokens, without a name."""


class TextModel:
    """Everything about a model's text: encode, decode, template."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        sha256: str = "",
        vocab_size: int,
        chat_template: str | None,
        special_tokens: dict[str, str],
        sampling_defaults: SamplingDefaults,
        end_ids: frozenset[int] = frozenset(),
        executor: Executor | None = None,
        tool_template: str | None = None,
        folder: Path = Path(),
        backend: TokenizerBackend = TokenizerBackend.TOKENIZERS,
    ) -> None:
        """Take the parts of a model.

        Raises:
            ValueError: A template is none.
        """
        self.sha256 = sha256
        self.folder = folder
        """Where the model's files are."""
        self.vocab_size = vocab_size
        self.sampling_defaults = sampling_defaults
        self.end_ids = end_ids
        """Ids that end an answer."""
        self.threads = Threads(executor)
        self._tokenizer = tokenizer
        self._encoded = encoder(tokenizer, backend)

        @lru_cache(MAX_TEMPLATES)
        def compiled(source: str) -> ChatTemplate:
            return ChatTemplate(source, special_tokens)

        self._compiled = compiled
        self._template = None if chat_template is None else compiled(chat_template)
        self._tool_template = None if tool_template is None else compiled(tool_template)
        self.special_ids = frozenset(
            token_id
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        )
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        parts = json.loads(tokenizer.to_str())
        decoder = parts["decoder"]
        self._bytes = byte_pieces(vocabulary, decoder)
        self._table: ByteTable | None = None
        self._shown_table: ByteTable | None = None  # without special tokens
        if self._bytes is not None:
            self._table = ByteTable(self._bytes)
            self._shown_table = self._table.without(self.special_ids)
        self.segments = self._made_segments(parts["pre_tokenizer"])
        self._pieces = sentence_pieces(vocabulary, decoder)
        self._unknown = frozenset[int]()  # padding rows of the model's embedding
        if self._bytes is None and self._pieces is None:
            every_id = frozenset(range(vocab_size))
            self._unknown = every_id.difference(vocabulary.values())

    def _made_segments(self, pre_tokenizer: object) -> Segments | None:
        """Return what keeps parts of chats; None: not of this model.

        Only where a part's ids do not depend on its place: SentencePiece may mark the
        first one.
        """
        if self._bytes is None or "Metaspace" in json.dumps(pre_tokenizer):
            return None
        sources = [one.source for one in (self._template, self._tool_template) if one]
        tokens = self._tokenizer.get_added_tokens_decoder().items()
        at = cuts(tokens, "".join(sources))
        if not at:
            return None
        return Segments(lambda texts: self._encoded(texts, False), at)

    async def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool,
        shared: bool = False,
        max_model_len: int | None = None,
    ) -> list[int]:
        """Return the ids of *text*; long texts do not hold the event loop.

        Args:
            text: A prompt.
            add_special_tokens: Let the tokenizer add its own.
            shared: Parts of it may be kept for others, and taken from others: how long
                it takes may then tell somebody that they have come before.
            max_model_len: See ``check_length``.

        Raises:
            ApiError: 400, it is no Unicode, or far too long.
        """
        return await self.threads.run(
            len(text) > LONG_CHARS,
            lambda: self._encode(text, add_special_tokens, shared, max_model_len),
        )

    def _encode(
        self,
        text: str,
        add_special_tokens: bool,
        shared: bool,
        max_model_len: int | None,
    ) -> list[int]:
        try:
            check_length(text, max_model_len, self._num_tokens)
            if shared and self.segments is not None and not add_special_tokens:
                return self.segments.encode(text)
            return self._encoded([text], add_special_tokens)[0]
        except (TypeError, UnicodeEncodeError) as error:
            msg = "the text holds a lone surrogate, which is not valid Unicode"
            raise bad_request(msg) from error

    def _num_tokens(self, text: str) -> int:
        [ids] = self._encoded([text], False)
        return len(ids)

    async def checked_ids(
        self, token_ids: Sequence[Any], field: str, *, empty: bool = False
    ) -> list[int]:
        """Return *token_ids* if all are ids of the vocabulary; *empty*: or none.

        Raises:
            ApiError: 400 with *field*, naming the first that is not.
        """
        if not token_ids and not empty:
            msg = f"{field} must not be empty"
            raise bad_request(msg, field)
        return await self.threads.run(
            len(token_ids) > LONG_IDS, lambda: self._checked_ids(token_ids, field)
        )

    def _checked_ids(self, token_ids: Sequence[Any], field: str) -> list[int]:
        last = self.vocab_size - 1
        for start in range(0, len(token_ids), LONG_IDS):
            some = token_ids[start : start + LONG_IDS]
            # A boolean is an int, but no id; -0.0 and 5.0 are no ids either.
            if set(map(type, some)) == {int} and min(some) >= 0 and max(some) <= last:
                continue
            bad = next(
                one for one in some if type(one) is not int or not 0 <= one <= last
            )
            msg = f"{field}: {shown(bad)} is not a token id"
            if type(bad) is int:
                msg = f"Token id {shown(bad)} is out of vocabulary (0..{last})"
            raise bad_request(msg, field)
        return list(token_ids)

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        template_kwargs: dict[str, Any],
        documents: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> str:
        """Return the conversation as the model's prompt text.

        Args:
            messages: The conversation, not empty; contents are null, texts, or lists of
                text parts.
            add_generation_prompt: End with the beginning of an answer.
            continue_final_message: End inside the last message.
            template_kwargs: What the template may name beside.
            documents: What the template may quote.
            chat_template: Used in place of the model's.
            tools: What the template is to tell about tools.

        Raises:
            ApiError: 400: no template, a wrong one, or it refuses the messages.
        """
        template = self._template
        if chat_template is not None:
            try:
                template = self._compiled(chat_template)
            except ValueError as error:
                raise bad_request(str(error), "chat_template") from error
        elif tools and self._tool_template is not None:
            template = self._tool_template
        if template is None:
            msg = "this model has no chat template; use /v1/completions"
            raise bad_request(msg, "messages")
        return template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs,
            tools=tools,
            documents=documents,
        )

    def template_source(
        self, chat_template: str | None, *, has_tools: bool
    ) -> str | None:
        """Return the template that ``render_chat`` takes; None: there is none."""
        if chat_template is not None:
            return chat_template
        tool_template = self._tool_template if has_tools else None
        template = tool_template or self._template
        return None if template is None else template.source

    def detokenizer(
        self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool
    ) -> Detokenizer:
        """Return a fresh detokenizer for the output that follows a prompt."""
        table = self._shown_table if skip_special_tokens else self._table
        if table is not None:
            return ByteDetokenizer(table)
        skip = self.special_ids if skip_special_tokens else frozenset[int]()
        if self._pieces is not None:
            return PieceDetokenizer(self._pieces, skip, prompt_token_ids)
        return StreamDetokenizer(
            lambda ids: self.decode(ids, skip_special_tokens=skip_special_tokens),
            skip | self._unknown,
            prompt_token_ids,
        )

    def token_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes of one token, as in the ``bytes`` of logprobs."""
        if self._bytes is not None:
            return self._bytes[token_id] if token_id < len(self._bytes) else b""
        if self._pieces is not None:
            byte = self._pieces.byte_of.get(token_id)
            if byte is not None:
                return bytes([byte])
            return (self._pieces.text(token_id) or "").encode()
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()

    def is_blank(self, token_id: int) -> bool:
        """Return whether a token is white space, or nothing."""
        return not self.token_bytes(token_id).strip()

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """Return the vocabulary's entries; empty for an id that it has no entry for."""
        piece = self._tokenizer.id_to_token
        return [piece(token_id) or "" for token_id in token_ids]

    async def decode_any(self, token_ids: list[int]) -> str:
        """Return the text of *token_ids*, special tokens too.

        Many ids do not hold the event loop.

        Raises:
            ApiError: 400, they are far too many.
        """
        if len(token_ids) > MAX_TOKENS:
            msg = f"tokens must have at most {MAX_TOKENS} ids, not {len(token_ids)}"
            raise bad_request(msg, "tokens")

        def decode() -> str:
            # ``decode`` holds the GIL, this does not.
            [text] = self._tokenizer.decode_batch(
                [token_ids], skip_special_tokens=False
            )
            return text

        if len(token_ids) <= LONG_CHARS:
            return self.decode(token_ids, skip_special_tokens=False)
        return await self.threads.run(True, decode)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of *token_ids*, as the tokenizer's library decodes it."""
        return self._tokenizer.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens
        )


def shown(value: object) -> str:
    """Return *value* for a message: short, however large it is."""
    if isinstance(value, int) and abs(value) >= 10**18:
        return "a number of more than 18 digits"
    return f"{value!r:.40}"


# --- the tokenizer's parts -------------------------------------------------------------


def read_tokenizer(data: str, special: SpecialTokens) -> Tokenizer:
    """Return the tokenizer of a ``tokenizer.json``, with what its folder adds to it.

    As transformers reads it, so that vLLM has the same ids for the same text. Whether
    a text begins with BOS is said by ``tokenizer.json``; ``add_bos_token`` beside it is
    for tokenizers without one.

    Raises:
        Exception: It cannot be read; the library has no type of its own for it.
    """
    tokenizer = Tokenizer.from_str(data)
    # Left there by some training run: a prompt is neither cut nor filled up.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    missing: list[AddedToken] = []
    for fields in special.added:
        options = {
            name: fields[name]
            for name in ("single_word", "lstrip", "rstrip", "normalized", "special")
            if name in fields
        }
        missing.append(AddedToken(fields["content"], **options))
    contents = {token.content for token in missing}
    for content in (*special.names.values(), *special.extra):
        if content not in contents:
            missing.append(AddedToken(content, special=True, normalized=False))
            contents.add(content)
    cast("Any", tokenizer).add_tokens(
        [token for token in missing if token.content not in known]
    )
    return tokenizer
