"""Texts into ids: by the tokenizers library, or by fastokens, which is quicker.

A prompt's ids must be those that the engine's own tokenizer would make. tokenizers is
what vLLM uses. fastokens reads the same files and takes an eighth of the time for a long
text, but is another program: so it is asked for by an option, has only tokenizers of
kinds that were compared with it (`make bench-tokenizer`), and first has to
agree on some two thousand texts made of the model's own vocabulary.
"""

from __future__ import annotations

import enum
import json
import logging
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from random import Random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = [
    "GPT_4O_SPLIT",
    "GPT_4_SPLIT",
    "MISSING",
    "QWEN_SPLIT",
    "Encode",
    "TokenizerBackend",
    "encoder",
    "is_installed",
]

_log = logging.getLogger(__name__)

Encode = Callable[[list[str], bool], list[list[int]]]
"""Returns the ids of each text; with the tokenizer's own special tokens, or without.

Raises:
    TypeError, UnicodeEncodeError: A text is no Unicode.
"""


class TokenizerBackend(enum.Enum):
    """What encodes texts."""

    TOKENIZERS = "tokenizers"
    FASTOKENS = "fastokens"


MISSING = (
    "--tokenizer-backend fastokens needs that package, which is not installed: "
    "install tokenwire[fastokens], or leave the option away"
)

GPT_4_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How GPT-4's tokenizer cuts a text, and Llama 3's."""

QWEN_SPLIT = GPT_4_SPLIT.replace("{1,3}", "")

GPT_4O_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)

COMPARED: tuple[dict[str, str], ...] = tuple(
    {"Regex": one} for one in (GPT_4_SPLIT, QWEN_SPLIT, GPT_4O_SPLIT)
)
"""Splits of the models on whose rules the two were compared; GPT-2's is built in."""

NUM_CHECKED = 2_000
"""Texts of each kind of special tokens, with and without: half a second at the start."""

MAX_PIECES = 40
"""Entries of the vocabulary in one text: up to some 200 characters."""

HARD = (
    "",
    "  \n\n \t\r\n x",
    "\u00a0\u3000\u2028 a",
    " " * 100,
    "\n" * 100,
    "a" * 300,
    "It's I'LL we'Ve 'S ''s \u02bcs don\u2019t",
    "a1b22c333d4444e55555 3.14159 1,000,000",
    "say <0x0A> now",
    "\u180e <x",
    "\u0663\u0664\u0665 \u0967\u0968 \u00bd \u2460",
    "e\u0301 \u00e9 \ufb01 \u216b \u3392 \u0130\u0131 \u1e9e",
    "\u0301\u0301\u200d\ufeff\x00\x7f",
    "\u4f60\u597d\u30c7\u30fc\u30bf \ud55c\uad6d\uc5b4",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \U0010ffff",
    "def f(x):\n    return {'a': [x != 0, x<<2]}  # \\u0041\t\n",
)
"""Texts on which tokenizers are known to differ: white space, digits, marks, scripts."""


def is_installed() -> bool:
    """Return whether fastokens is."""
    return find_spec("fastokens") is not None


def encoder(tokenizer: Tokenizer, backend: TokenizerBackend) -> Encode:
    """Return what encodes as *tokenizer* does: by it, if *backend* does not."""
    if backend is TokenizerBackend.TOKENIZERS:
        return _by_tokenizers(tokenizer)
    return _by_fastokens(tokenizer)


def _by_tokenizers(tokenizer: Tokenizer) -> Encode:
    def encode(texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        # ``encode`` holds the GIL and makes offsets, which nobody asks for.
        made = tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [one.ids for one in made]

    return encode


def _by_fastokens(tokenizer: Tokenizer) -> Encode:
    """Return fastokens' encoder, or tokenizers' where it does otherwise."""
    exact = _by_tokenizers(tokenizer)
    data = tokenizer.to_str()
    if not _is_known_kind(json.loads(data)):
        _log.warning("fastokens was not compared on tokenizers of this kind: not used")
        return exact
    try:
        fast: Any = import_module("fastokens").Tokenizer.from_json_str(data)
    except Exception as error:  # noqa: BLE001 - it names no types of its own
        _log.warning("fastokens cannot read this tokenizer (%s): not used", error)
        return exact
    has_failed = False

    def encode(texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        nonlocal has_failed
        try:
            return [fast.encode(text, add_special_tokens).ids for text in texts]
        except (TypeError, UnicodeEncodeError):
            raise
        except Exception as error:  # noqa: BLE001 - bytes that are no tokens, a bound
            if not has_failed:  # once: a client could fill the log
                has_failed = True
                _log.warning("fastokens gave up on a text (%s): tokenizers does", error)
            return exact(texts, add_special_tokens)

    for text in checked_texts(tokenizer):
        for add_special_tokens in (False, True):
            [ids] = exact([text], add_special_tokens)
            if [ids] != encode([text], add_special_tokens):
                _log.warning(
                    "fastokens makes other ids of %r than tokenizers: not used", text
                )
                return exact
    _log.info("fastokens encodes prompts: it agrees on %d texts", NUM_CHECKED)
    return encode


def _is_known_kind(parts: dict[str, Any]) -> bool:
    """Return whether a tokenizer is byte-level BPE that cuts a text as a known model does.

    With bytes to fall back on, with others of its normalizers or with any split,
    fastokens 0.3.5 makes other ids without a word, of few texts.
    """
    model, normalizer = parts["model"], parts["normalizer"]
    cuts: dict[str, Any] = parts["pre_tokenizer"] or {}
    steps: list[dict[str, Any]] = cuts.get("pretokenizers", [cuts])
    is_compared = all(
        step.get("type") in {"ByteLevel", "Digits"} or step.get("pattern") in COMPARED
        for step in steps
    )
    is_byte_level = any(step.get("type") == "ByteLevel" for step in steps)
    is_plain = normalizer is None or normalizer["type"] == "NFC"
    is_bpe = model["type"] == "BPE" and not model.get("byte_fallback")
    return is_plain and is_compared and is_byte_level and is_bpe


def checked_texts(tokenizer: Tokenizer) -> Iterator[str]:
    """Yield texts that a tokenizer may read wrongly: each time the same ``NUM_CHECKED``."""
    yield from HARD
    random = Random(0)  # noqa: S311 - no secret
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    decoded = tokenizer.decode_batch(
        [[n] for n in random.sample(range(size), min(size, NUM_CHECKED))],
        skip_special_tokens=False,
    )
    added = [one.content for one in tokenizer.get_added_tokens_decoder().values()]
    pieces = [text for text in (*decoded, *added) if text] or ["a"]
    for number in range(NUM_CHECKED - len(HARD)):
        several = random.choices(pieces, k=random.randint(1, MAX_PIECES))
        if number % 4 == 0:
            several += random.choices(added or pieces, k=3)
        if number % 4 == 1:
            several += [chr(_character(random)) for _ in range(len(several))]
        random.shuffle(several)
        yield random.choice(("", "", " ")).join(several)


def _character(random: Random) -> int:
    """Return any character of Unicode but a surrogate; half are of the first plane."""
    number = random.randrange(0x10000 if random.random() < 0.5 else 0x110000)
    return number if not 0xD800 <= number < 0xE000 else number - 0x800
