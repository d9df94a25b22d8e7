"""Stop strings: none reaches the client early, however the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from tokenwire.frontend.fold import Fold
from tokenwire.frontend.stop import StopStrings


class Letters:
    """A detokenizer whose ids are code points."""

    def feed(self, token_id: int) -> str:
        """Return the character."""
        return chr(token_id)

    def flush(self) -> str:
        """Return nothing: characters are whole."""
        return ""


def run(
    text: str, stops: list[str], *, include: bool = False
) -> tuple[str, str | None]:
    """Feed *text* one character at a time; return the output and the match."""
    stop = StopStrings(stops, include=include)
    out = ""
    for char in text:
        out += stop.feed(char)
        if stop.matched is not None:
            return out, stop.matched
    return out + stop.flush(), None


def test_the_match_is_cut_off() -> None:
    """Text up to the stop string comes out, and nothing of the string."""
    assert run("one END two", ["END"]) == ("one ", "END")


def test_the_match_can_be_included() -> None:
    """With ``include`` the string is part of the text."""
    assert run("one END two", ["END"], include=True) == ("one END", "END")


@pytest.mark.pitfall(7)
def test_the_beginning_is_held_back_until_it_is_decided() -> None:
    """A possible beginning waits, and comes out whole when it was none."""
    stop = StopStrings(["END"], include=False)

    assert stop.feed("a EN") == "a "
    assert stop.feed("T") == "ENT"


def test_what_is_held_at_the_end_comes_out() -> None:
    """An output that ends inside a possible match loses no text."""
    assert run("the EN", ["END"]) == ("the EN", None)


def test_the_first_of_several_matches_wins() -> None:
    """The match that begins first ends the text, whatever the order of the list."""
    assert run("abcd", ["cd", "bc"]) == ("a", "bc")


letters = st.text("ab", max_size=12)


@given(letters, st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
@pytest.mark.pitfall(7)
def test_never_shows_a_stop_string(text: str, stops: list[str]) -> None:
    """The output is the text up to the first completed match, or all of it."""
    out, matched = run(text, stops)

    ends = [
        (end, string)
        for end in range(len(text) + 1)
        for string in stops
        if text[:end].endswith(string)
    ]
    if not ends:
        assert (out, matched) == (text, None)
    else:
        first = min(end for end, _ in ends)
        candidates = {
            text[: first - len(string)] for end, string in ends if end == first
        }
        assert out in candidates
        assert matched is not None


@given(letters, st.integers(1, 12))
def test_batches_do_not_matter(text: str, size: int) -> None:
    """Ids in one batch, or cut anywhere, give the same text and the same count."""
    ids = [ord(char) for char in text]

    def outcome(batches: list[list[int]]) -> tuple[str, int, str | None]:
        fold = Fold(Letters(), StopStrings(["aba", "bb"], include=False))
        out = ""
        for batch in batches:
            part, _ = fold.feed(batch)
            out += part
            if fold.matched is not None:
                break
        return out + fold.finish(), fold.num_tokens, fold.matched

    cut = [ids[n : n + size] for n in range(0, len(ids), size)]
    assert outcome([ids]) == outcome(cut)


@pytest.mark.pitfall(1)
def test_ids_end_with_the_one_that_completes_the_match() -> None:
    """Ids behind a match do not count; the one that completes it does."""
    fold = Fold(Letters(), StopStrings(["b"], include=False))

    text, used = fold.feed([ord(char) for char in "abc"])

    assert (text, used, fold.num_tokens) == ("a", 2, 2)


def test_min_tokens_come_before_any_stop_string() -> None:
    """A stop string inside the first ``min_tokens`` does not end the output."""
    fold = Fold(Letters(), StopStrings(["b"], include=False), min_tokens=2)

    text, used = fold.feed([ord(char) for char in "abab"])

    assert (text, used, fold.matched) == ("aba", 4, "b")


def test_the_first_that_is_complete_wins() -> None:
    """Within one piece of text the match that ends first counts, as in vLLM."""
    stop = StopStrings(["abcd", "bc"], include=False)

    assert (stop.feed("xabcd"), stop.matched) == ("xa", "bc")


def test_a_stop_string_may_begin_within_min_tokens() -> None:
    """What counts is where it ends, as in vLLM; nothing of it is shown meanwhile."""
    fold = Fold(Letters(), StopStrings(["END"], include=False), min_tokens=3)

    text, used = fold.feed([ord(char) for char in "aEND"])

    assert (text, used, fold.matched) == ("a", 4, "END")


def test_a_match_within_min_tokens_is_not_found_later() -> None:
    """Held text that holds a whole stop string does not stop the output afterwards."""
    fold = Fold(Letters(), StopStrings(["xab!", "ab"], include=False), min_tokens=3)

    text, _ = fold.feed([ord(char) for char in "xabc"])

    assert (text + fold.finish(), fold.matched) == ("xabc", None)
