"""The check of tokenizer libraries: its texts, its kinds, and what it says of a wrong one."""

from __future__ import annotations

from bench_tokenizer import cell, differences
from hard_texts import hard_texts
from tokenizer_libraries import LIBRARIES, Encode
from tokenizer_variants import variants
from tokenizers import Tokenizer

from support.tokenizer_kinds import tokenizer_of

ADDED = ["<|endoftext|>", "<|im_end|>"]


class TestTexts:
    """They come again for a seed, and are text."""

    def test_a_seed_says_which(self) -> None:
        """The same seed gives the same texts, another others."""
        assert list(hard_texts(1, 50, ADDED)) == list(hard_texts(1, 50, ADDED))
        assert list(hard_texts(1, 50, ADDED)) != list(hard_texts(2, 50, ADDED))

    def test_they_are_text_with_added_tokens(self) -> None:
        """None has a surrogate; some have a special token in them."""
        whole = "".join(hard_texts(1, 300, ADDED))
        whole.encode()
        assert ADDED[0] in whole

    def test_without_added_tokens(self) -> None:
        """A vocabulary without any has texts as well."""
        assert len(list(hard_texts(1, 20, []))) == 20


class TestVariants:
    """Each is a tokenizer, and another one."""

    def test_each_reads_some_text_in_its_own_way(self) -> None:
        """No two variants agree on all texts."""
        made = variants(tokenizer_of("byte_level").to_str())
        named = (
            "Hello <|lstrip|> <|rstrip|> <|single_word|>x CamelCase 1234 \u216b e\u0301"
        )
        seen: dict[str, str] = {}
        for name, source in made.items():
            read = Tokenizer.from_str(source)
            text = read.normalizer.normalize_str(named) if read.normalizer else named
            pieces = read.pre_tokenizer.pre_tokenize_str(text)
            seen[str((pieces, read.encode(named).ids))] = name
        assert sorted(seen.values()) == sorted(made)


class TestDifferences:
    """A wrong library is found out."""

    source = tokenizer_of("byte_level").to_str()

    def test_the_same_library_is_exact(self) -> None:
        """It agrees with itself."""
        load = LIBRARIES["tokenizers"]
        assert differences(self.source, load, 50) == "0 wrong, 0 refused"

    def test_a_wrong_one_is_counted_with_its_shortest_text(self) -> None:
        """One that leaves away the last id is wrong on each text."""

        def load(source: str) -> Encode:
            exact = LIBRARIES["tokenizers"](source)
            return lambda text: exact(text)[:-1]

        shortest = min(hard_texts(1, 50, ADDED), key=len)
        said = differences(self.source, load, 50)
        assert said == f"50 wrong, 0 refused: `{cell(ascii(shortest), 32)}`"

    def test_one_that_raises_has_refused(self) -> None:
        """An error is told apart from other ids."""

        def refuse(_: str) -> list[int]:
            raise ValueError

        said = differences(self.source, lambda _: refuse, 10)
        assert said == "0 wrong, 10 refused"

    def test_one_that_cannot_read_the_file_says_so(self) -> None:
        """Its message is cut, and breaks no table."""

        def load(_: str) -> Encode:
            msg = "no type | of mine\nat line 1"
            raise ValueError(msg)

        assert differences(self.source, load, 1) == r"does not load: no type \| of mine"
