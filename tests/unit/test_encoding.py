"""What encodes prompts, and that a quicker one is used only if it does the same."""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer

from tokenwire.frontend import config, encoding
from tokenwire.frontend.config import parse_config
from tokenwire.frontend.encoding import (
    GPT_4_SPLIT,
    GPT_4O_SPLIT,
    NUM_CHECKED,
    QWEN_SPLIT,
    TokenizerBackend,
    checked_texts,
    encoder,
)
from tokenwire.frontend.model import load_model

FAST = TokenizerBackend.FASTOKENS


@pytest.fixture
def tokenizer(tiny_model: Path) -> Tokenizer:
    """The tiny model's."""
    return Tokenizer.from_file(str(tiny_model / "tokenizer.json"))


class Library:
    """In place of fastokens: counts, and may do otherwise, or give up."""

    def __init__(self, tokenizer: Tokenizer, odd: str = "", fails: str = "") -> None:
        self.num_encoded = 0
        self._tokenizer = tokenizer
        self._odd, self._fails = odd, fails

    def from_json_str(self, data: str) -> Library:
        """Read nothing: it has its tokenizer."""
        assert data == self._tokenizer.to_str()
        return self

    def encode(self, text: str, add_special_tokens: bool) -> Any:
        """Encode as the real one, but for some texts."""
        if self._fails and self._fails in text:
            raise RuntimeError("too much backtracking")
        self.num_encoded += 1
        made = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        ids = [0, *made.ids] if self._odd and self._odd in text else made.ids
        return SimpleNamespace(ids=ids)


def put_in_place(monkeypatch: pytest.MonkeyPatch, library: Library) -> None:
    """Have it imported as fastokens."""
    module = SimpleNamespace(Tokenizer=library)
    monkeypatch.setattr(encoding, "import_module", {"fastokens": module}.__getitem__)


async def test_fastokens_makes_the_same_ids(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The real one, by a model that is loaded with it."""
    caplog.set_level(logging.INFO)
    exact, fast = (load_model(str(tiny_model), backend=one) for one in TokenizerBackend)

    assert f"it agrees on {NUM_CHECKED} texts" in caplog.text
    for text in ("Hello, wörld 123", "", "<|im_start|>user\nhi<|im_end|>\n"):
        for special in (False, True):
            ids = await exact.encode(text, add_special_tokens=special)
            assert await fast.encode(text, add_special_tokens=special) == ids


async def test_a_lone_surrogate_is_refused_as_before(tiny_model: Path) -> None:
    """It is no Unicode to either."""
    fast = load_model(str(tiny_model), backend=FAST)
    with pytest.raises(Exception, match="lone surrogate"):
        await fast.encode("a\ud800", add_special_tokens=False)


def test_a_library_that_agrees_is_used(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    """For every text."""
    library = Library(tokenizer)
    put_in_place(monkeypatch, library)
    encode = encoder(tokenizer, FAST)
    assert library.num_encoded == 2 * NUM_CHECKED

    encode(["a", "b"], False)

    assert library.num_encoded == 2 * NUM_CHECKED + 2


def test_a_library_that_makes_other_ids_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
    tokenizer: Tokenizer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of any text; the operator is told of which."""
    put_in_place(monkeypatch, Library(tokenizer, odd="\u216b"))
    encode = encoder(tokenizer, FAST)

    assert "fastokens makes other ids of" in caplog.text
    assert "\u216b" in caplog.text
    assert encode(["\u216b"], False) == [tokenizer.encode("\u216b").ids]


def test_a_tokenizer_that_it_cannot_read_is_not_its(
    monkeypatch: pytest.MonkeyPatch,
    tokenizer: Tokenizer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As those of kinds that it does not know."""
    library = Library(tokenizer)

    def refuse(data: str) -> Library:
        raise ValueError("unknown type")

    monkeypatch.setattr(library, "from_json_str", refuse)
    put_in_place(monkeypatch, library)
    encode = encoder(tokenizer, FAST)

    assert "fastokens cannot read this tokenizer (unknown type)" in caplog.text
    assert encode(["ab"], False) == [tokenizer.encode("ab").ids]
    assert not library.num_encoded


def split(pattern: str) -> dict[str, Any]:
    """Return how a byte-level tokenizer cuts by a pattern."""
    cut = {"pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    level = {"add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    steps = [{"type": "Split"} | cut, {"type": "ByteLevel"} | level]
    return {"type": "Sequence", "pretokenizers": steps}


@pytest.mark.parametrize("pattern", [GPT_4_SPLIT, QWEN_SPLIT, GPT_4O_SPLIT])
def test_splits_of_known_models_are_its(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture, pattern: str
) -> None:
    """The real one reads them, and agrees."""
    caplog.set_level(logging.INFO)
    parts = json.loads(tokenizer.to_str()) | {"pre_tokenizer": split(pattern)}
    encoder(Tokenizer.from_str(json.dumps(parts)), FAST)

    assert f"it agrees on {NUM_CHECKED} texts" in caplog.text


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("normalizer", {"type": "Lowercase"}),
        ("byte_fallback", True),
        ("pre_tokenizer", {"type": "Whitespace"}),
        ("pre_tokenizer", split("[a-z]+")),
    ],
)
def test_a_kind_that_was_not_compared_is_not_its(
    monkeypatch: pytest.MonkeyPatch,
    tokenizer: Tokenizer,
    caplog: pytest.LogCaptureFixture,
    part: str,
    value: object,
) -> None:
    """Some of these it reads, and makes other ids, of few texts."""
    parts = json.loads(tokenizer.to_str())
    (parts["model"] if part == "byte_fallback" else parts)[part] = value
    other = Tokenizer.from_str(json.dumps(parts))
    library = Library(other)
    put_in_place(monkeypatch, library)

    encode = encoder(other, FAST)

    assert "not compared on tokenizers of this kind" in caplog.text
    assert encode(["ab"], False) == [other.encode("ab").ids]
    assert not library.num_encoded


def test_a_text_that_it_gives_up_is_encoded_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
    tokenizer: Tokenizer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its pattern's backtracking has a bound."""
    put_in_place(monkeypatch, Library(tokenizer, fails="rare text"))
    encode = encoder(tokenizer, FAST)

    for _ in range(2):  # a client can have it fail as often as it likes
        assert encode(["a rare text"], False) == [tokenizer.encode("a rare text").ids]

    told = "fastokens gave up on a text (too much backtracking)"
    assert caplog.text.count(told) == 1


def test_the_texts_are_the_same_each_time(tokenizer: Tokenizer) -> None:
    """And have all that a chat has: special tokens, long ones, other planes."""
    texts = list(checked_texts(tokenizer))

    assert texts == list(checked_texts(tokenizer))
    assert len(texts) == NUM_CHECKED
    assert max(Counter(texts).values()) < NUM_CHECKED / 10
    added = [one.content for one in tokenizer.get_added_tokens_decoder().values()]
    assert all(any(token in text for text in texts) for token in added)
    assert any(max(text, default="") > "\uffff" for text in texts)


def test_without_the_package_the_option_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is loaded, and with what to install."""
    monkeypatch.setattr(config, "is_installed", lambda: False)
    arguments = ["--model", "m", "--worker", "tcp://127.0.0.1:1"]

    with pytest.raises(SystemExit) as ended:
        parse_config([*arguments, "--tokenizer-backend", "fastokens"])

    assert ended.value.code == 2
    assert "install tokenwire[fastokens]" in capsys.readouterr().err
    backend = parse_config(arguments).tokenizer_backend
    assert backend is TokenizerBackend.TOKENIZERS
