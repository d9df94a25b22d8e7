"""A small tokenizer of every kind that models come with, trained here and now."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import msgspec
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from tokenwire.frontend.tokenizer import SamplingDefaults, TextModel

__all__ = ["CORPUS", "KINDS", "PADDING", "model_of", "tokenizer_of"]

PADDING = 9
"""Rows of the model's embedding above the tokenizer's ids."""

CORPUS = [
    "Hello there, general! How are you today? I'm fine, thanks.",
    "def fold(ids):\n    return ''.join(ids)  # no cut\n\n\tpass",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "いろはにほへと ちりぬるを 我が世誰ぞ",
    "12345 + 67890 = 80235; it isn't 3.14 🙂🙃 naïve café",
    "the end of the story is the end of the story",
] * 4
VOCAB_SIZE = 700

BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
SPECIAL = ["<unk>", "<s>", "</s>"]

LLAMA_3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Written by tiktoken's users for GPT-4 and taken over by Llama 3 and Qwen."""


def _trained(tokenizer: Tokenizer, trainer: object) -> Tokenizer:
    cast("Any", tokenizer).train_from_iterator(CORPUS, trainer)
    return tokenizer


def _special(tokenizer: Tokenizer, *tokens: str) -> Tokenizer:
    cast("Any", tokenizer).add_special_tokens([AddedToken(t) for t in tokens])
    return tokenizer


def _begins_with(tokenizer: Tokenizer, bos: str) -> Tokenizer:
    cast("Any", tokenizer).post_processor = processors.TemplateProcessing(
        single=f"{bos} $A",
        pair=f"{bos} $A $B",
        special_tokens=[(bos, tokenizer.token_to_id(bos) or 0)],
    )
    return tokenizer


def byte_level() -> Tokenizer:
    """GPT-2, SmolLM: byte-level BPE."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|endoftext|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    return _trained(tokenizer, trainer)


def tiktoken_like() -> Tokenizer:
    """Llama 3, Qwen: tiktoken's vocabulary in a ``tokenizer.json``, and BOS in front."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA_3_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bos = "<|begin_of_text|>"  # behind the vocabulary, as there
    return _begins_with(_special(_trained(tokenizer, trainer), bos, "<|eot_id|>"), bos)


def _with_bytes(tokenizer: Tokenizer) -> Tokenizer:
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[*SPECIAL, *BYTE_TOKENS],
        limit_alphabet=60,  # the rest is spelled in bytes
        show_progress=False,
    )
    _trained(tokenizer, trainer)
    # The trainer made the bytes special; they are plain pieces of the vocabulary.
    state = _json(tokenizer)
    state["added_tokens"] = [
        token for token in state["added_tokens"] if token["content"] in SPECIAL
    ]
    return Tokenizer.from_str(_dumps(state))


def llama_2() -> Tokenizer:
    """Llama 2, Mistral: SentencePiece BPE with bytes; the first space goes."""
    tokenizer = Tokenizer(models.BPE(unk_token=SPECIAL[0], byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return _begins_with(_with_bytes(tokenizer), "<s>")


def mistral() -> Tokenizer:
    """Mistral, Llama 2 as newer tools write it: the space by a pre-tokenizer."""
    tokenizer = Tokenizer(models.BPE(unk_token=SPECIAL[0], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        prepend_scheme="first", split=False
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return _begins_with(_with_bytes(tokenizer), "<s>")


def gemma() -> Tokenizer:
    """Gemma: SentencePiece BPE with bytes; no space is added, and none goes."""
    tokenizer = Tokenizer(models.BPE(unk_token=SPECIAL[0], byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return _begins_with(_with_bytes(tokenizer), "<s>")


def _unigram(*, bytes_too: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=VOCAB_SIZE // 2,
        special_tokens=SPECIAL,
        unk_token=SPECIAL[0],
        show_progress=False,
    )
    _trained(tokenizer, trainer)
    if not bytes_too:
        return tokenizer
    vocabulary = [tuple(one) for one in _json(tokenizer)["model"]["vocab"]]
    vocabulary += [(token, -20.0) for token in BYTE_TOKENS]
    tokenizer.model = models.Unigram(vocabulary, 0, byte_fallback=True)
    return tokenizer


def unigram() -> Tokenizer:
    """T5, XLM-R: SentencePiece Unigram, without bytes."""
    tokenizer = _unigram(bytes_too=False)
    tokenizer.decoder = decoders.Metaspace()
    cast("Any", tokenizer).post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A $B </s>", special_tokens=[("</s>", 2)]
    )
    return tokenizer


def unigram_bytes() -> Tokenizer:
    """XGen, DeBERTa's kin: SentencePiece Unigram with bytes."""
    tokenizer = _unigram(bytes_too=True)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return tokenizer


def word_piece() -> Tokenizer:
    """BERT: pieces that go on are marked, and punctuation is tidied up."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["[UNK]", "[CLS]", "[SEP]"],
        show_progress=False,
    )
    return _begins_with(_trained(tokenizer, trainer), "[CLS]")


def end_of_word() -> Tokenizer:
    """GPT-1, CLIP: a word's last piece is marked."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<unk>"],
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    return _trained(tokenizer, trainer)


def words() -> Tokenizer:
    """Whole words, and no decoder: a space stands between any two."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=["[UNK]"], show_progress=False)
    return _trained(tokenizer, trainer)


KINDS: dict[str, Callable[[], Tokenizer]] = {
    kind.__name__: kind
    for kind in (
        byte_level,
        tiktoken_like,
        llama_2,
        mistral,
        gemma,
        unigram,
        unigram_bytes,
        word_piece,
        end_of_word,
        words,
    )
}


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    """Return the tokenizer of a kind, trained once."""
    return KINDS[kind]()


@cache
def model_of(kind: str) -> TextModel:
    """Return the text model of a kind, made once."""
    tokenizer = tokenizer_of(kind)
    return TextModel(
        tokenizer,
        vocab_size=tokenizer.get_vocab_size() + PADDING,
        chat_template=None,
        special_tokens={},
        sampling_defaults=SamplingDefaults(),
    )


def _json(tokenizer: Tokenizer) -> dict[str, Any]:
    return msgspec.json.decode(tokenizer.to_str().encode(), type=dict[str, Any])


def _dumps(state: dict[str, Any]) -> str:
    return msgspec.json.encode(state).decode()
