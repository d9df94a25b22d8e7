"""The tokenizer and the chat template: the only door to their libraries.

Loads ``tokenizer.json`` without torch (55 MB and 1.3 s against 400 MB and 6 s for
``AutoTokenizer`` in an environment that has torch; transformers 5.19).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, cast

import msgspec
from tokenizers import Tokenizer

from .detokenize import ByteDetokenizer, Detokenizer, bytes_of_piece
from .errors import bad_request

# transformers says at import that there is no torch; there need not be.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

from transformers.utils import chat_template_utils

__all__ = ["ModelError", "SamplingDefaults", "TextModel", "load_model"]

INLINE_CHARS = 4_096
"""Texts up to this length are tokenized on the event loop: about 1 ms. Longer ones go
to a thread."""


class ModelError(Exception):
    """A model folder cannot be used; one sentence for the operator."""


class SamplingDefaults(msgspec.Struct):
    """What ``generation_config.json`` sets where a request says nothing, as in vLLM."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


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
    ) -> None:
        self.sha256 = sha256
        self.vocab_size = vocab_size
        self.sampling_defaults = sampling_defaults
        self.end_ids = end_ids
        """Ids that end an answer."""
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._special_tokens = special_tokens
        self._executor = executor
        self.special_ids = frozenset(
            token_id
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        )
        self._pieces = _byte_pieces(tokenizer) if _is_byte_level(tokenizer) else None

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the ids of *text*; long texts do not hold the event loop."""
        if len(text) <= INLINE_CHARS:
            return self._encode(text, add_special_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._executor, self._encode, text, add_special_tokens
        )

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            if len(text) <= INLINE_CHARS:
                encoding = self._tokenizer.encode(
                    text, add_special_tokens=add_special_tokens
                )
            else:
                # ``encode`` holds the GIL. This does not, and leaves out the offsets,
                # but wakes a pool of threads, which costs a short text a millisecond.
                [encoding] = self._tokenizer.encode_batch_fast(
                    [text], add_special_tokens=add_special_tokens
                )
        except (TypeError, UnicodeEncodeError) as error:
            msg = "the text holds a lone surrogate, which is not valid Unicode"
            raise bad_request(msg) from error
        return encoding.ids

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
            messages: The conversation.
            add_generation_prompt: End with the beginning of an answer.
            continue_final_message: End inside the last message.
            template_kwargs: What the template may name beside.
            documents: What the template may quote.
            chat_template: Used in place of the model's.
            tools: What the model may call.

        Raises:
            ApiError: 400: no template, or the template refuses the messages.
        """
        template = chat_template or self._chat_template
        if template is None:
            msg = "this model has no chat template; use /v1/completions"
            raise bad_request(msg, "messages")
        try:
            rendered, _ = cast("Any", chat_template_utils).render_jinja_template(
                conversations=[list(messages)],
                chat_template=template,
                documents=documents,
                tools=list(tools) if tools else None,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **{**self._special_tokens, **template_kwargs},
            )
        except Exception as error:
            # A template is the model's own code: what it meets in a message that it
            # was not written for may end in any error.
            msg = f"the chat template refused the messages: {error}"
            raise bad_request(msg, "messages") from error
        return cast("str", rendered[0])

    def detokenizer(
        self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool
    ) -> Detokenizer:
        """Return a fresh detokenizer for the output that follows a prompt."""
        if self._pieces is not None:
            skip = self.special_ids if skip_special_tokens else frozenset[int]()
            return ByteDetokenizer(self._pieces, skip)
        return StreamDetokenizer(
            self._tokenizer, prompt_token_ids, skip_special_tokens=skip_special_tokens
        )

    def token_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes of one token, as in the ``bytes`` of logprobs."""
        if self._pieces is not None:
            return self._pieces[token_id] if token_id < len(self._pieces) else b""
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()

    def is_blank(self, token_id: int) -> bool:
        """Return whether a token is white space, or nothing."""
        return not self.token_bytes(token_id).strip()

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """Return the vocabulary's entries; empty for an id that it has no entry for."""
        piece = self._tokenizer.id_to_token
        return [piece(token_id) or "" for token_id in token_ids]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of *token_ids*, as the tokenizer's library decodes it."""
        return self._tokenizer.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens
        )

    async def decode_any(self, token_ids: list[int]) -> str:
        """Return the text of *token_ids*, special tokens too.

        Many ids do not hold the event loop.
        """
        if len(token_ids) <= INLINE_CHARS:
            return self.decode(token_ids, skip_special_tokens=False)
        loop = asyncio.get_running_loop()
        [text] = await loop.run_in_executor(
            self._executor,
            # ``decode`` holds the GIL, this does not.
            lambda: self._tokenizer.decode_batch(
                [token_ids], skip_special_tokens=False
            ),
        )
        return text


class StreamDetokenizer:
    """Any tokenizer: each id is decoded behind the ids before it, whose text is known.

    Primed with the end of the prompt, so that a first piece keeps its leading space;
    not primed where the prompt ends inside a character, which would leak its text.
    The library's ``DecodeStream`` is not used: it fails on bytes that are no UTF-8,
    which a model may well produce.
    """

    __slots__ = ("_known", "_known_text", "_new", "_skip", "_tokenizer")

    _PRIME_TOKENS = 6  # more than the bytes of any character
    _CHARACTER_BYTES = 4  # so many at most; ids that stay unreadable for longer are not

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._known: list[int] = []
        self._known_text = ""
        self._new: list[int] = []  # inside a character
        for more in range(self._CHARACTER_BYTES):  # one of them cuts no character
            prime = list(prompt_token_ids[-self._PRIME_TOKENS - more :])
            text = self._decode(prime)
            if not text.endswith("\N{REPLACEMENT CHARACTER}"):
                self._known, self._known_text = prime, text
                break

    def feed(self, token_id: int) -> str:
        """Return the text that *token_id* completes."""
        self._new.append(token_id)
        text = self._text_of_new()
        if not text:
            self._new.pop()  # a special token; what follows must not grow behind it
            return ""
        unreadable = text.endswith("\N{REPLACEMENT CHARACTER}")
        if unreadable and len(self._new) < self._CHARACTER_BYTES:
            return ""
        self._known, self._new = self._new, []
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

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)


def load_model(path: str, executor: Executor | None = None) -> TextModel:
    """Return the text side of the model in folder *path*.

    Raises:
        ModelError: The folder lacks a file, or one cannot be read.
    """
    folder = Path(path)
    if not folder.is_dir():
        folder = _download(path)
    file = folder / "tokenizer.json"
    try:
        data = file.read_bytes()
        tokenizer = Tokenizer.from_str(data.decode())
        # Left there by some training run: a prompt is neither cut nor filled up.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        config = _read_json(folder / "config.json")
        generation = _read_json(folder / "generation_config.json", missing={})
        settings = _read_json(folder / "tokenizer_config.json", missing={})
        vocab_size = int(config.get("text_config", config)["vocab_size"])
        special_tokens = _special_tokens(settings)
        return TextModel(
            tokenizer,
            sha256=hashlib.sha256(data).hexdigest(),
            vocab_size=vocab_size,
            chat_template=_chat_template(folder, settings),
            special_tokens=special_tokens,
            sampling_defaults=msgspec.convert(generation, SamplingDefaults),
            end_ids=_end_ids(tokenizer, special_tokens, config, generation),
            executor=executor,
        )
    except OSError as error:
        msg = f"model {path}: cannot read {error.filename}: {error.strerror}"
        raise ModelError(msg) from error
    except KeyError as error:
        msg = f"model {path}: config.json lacks {error}"
        raise ModelError(msg) from error
    except Exception as error:
        # tokenizers raises a bare Exception for a file it cannot parse.
        msg = f"model {path}: {error}"
        raise ModelError(msg) from error


def _download(name: str) -> Path:
    """Return the local folder of a hub model's tokenizer files."""
    import huggingface_hub  # half a second, rarely needed
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    hub = cast("Any", huggingface_hub)

    patterns = ["*.json", "*.jinja"]
    try:
        return Path(hub.snapshot_download(name, allow_patterns=patterns))
    except (OSError, HfHubHTTPError, HFValidationError, ValueError) as error:
        msg = (
            f"model {name} is neither a folder nor a hub model that can be had: {error}"
        )
        raise ModelError(msg) from error


def _read_json(file: Path, missing: dict[str, Any] | None = None) -> dict[str, Any]:
    if missing is not None and not file.exists():
        return missing
    return cast("dict[str, Any]", json.loads(file.read_text()))


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text()
    template = settings.get("chat_template")
    if isinstance(template, list):  # named templates; "default" is the one for chat
        entries = cast("list[dict[str, str]]", template)
        named = {entry["name"]: entry["template"] for entry in entries}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """Return what templates may name: ``bos_token`` and its like, as strings."""
    tokens: dict[str, str] = {}
    for key, value in settings.items():
        if key.endswith("_token"):
            text = value
            if isinstance(value, dict):
                text = cast("dict[str, Any]", value).get("content")
            if isinstance(text, str):
                tokens[key] = text
    return tokens


def _end_ids(
    tokenizer: Tokenizer, special_tokens: dict[str, str], *settings: dict[str, Any]
) -> frozenset[int]:
    """Return every id that ends an answer, whoever says so."""
    ends = {tokenizer.token_to_id(special_tokens.get("eos_token", ""))}
    for file in settings:
        given = file.get("eos_token_id")
        ends |= set(cast("list[int]", given)) if isinstance(given, list) else {given}
    return frozenset(one for one in ends if isinstance(one, int))


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    """Return whether every token is a run of bytes, whatever stands around it."""
    decoder = json.loads(tokenizer.to_str())["decoder"]
    return decoder is not None and decoder["type"] == "ByteLevel"


def _byte_pieces(tokenizer: Tokenizer) -> list[bytes]:
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    pieces = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for piece, token_id in vocabulary.items():
        pieces[token_id] = bytes_of_piece(piece)
    return pieces
