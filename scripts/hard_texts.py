"""Texts that tokenizers disagree about: seeded, so that a counterexample comes again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random

__all__ = ["hard_texts"]

PLANES = (
    (0x00, 0x80),
    (0x80, 0x300),
    (0x300, 0x370),  # combining marks, often alone
    (0x370, 0x1100),
    (0x1100, 0x3000),
    (0x3000, 0xD800),
    (0xE000, 0x1_0000),  # private use, presentation forms; surrogates are no text
    (0x1_0000, 0x2_0000),
    (0x2_0000, 0x11_0000),
)

_WORDS = (
    r"the of and hello GPU's don't I'LL we'Ve na\u00efve cafe\u0301 Stra\u00dfe \u0130 "
    r"\u0131 \ufb00 \ufdfa \u338f \u00bd \u2167 \u0663\u0664\u0665 \u0967\u0968 123 "
    r"4567 3.14159 1,000,000 x=y+z; foo(): a_b CamelCase HTTPServer https://e.org/?q=%20 "
    r"\u4f60\u597d\u4e16\u754c \u3044\u308d\u306f \ud55c\uad6d\uc5b4 "
    r"\u043f\u0440\u0438\u0432\u0435\u0442 \u0645\u0631\u062d\u0628\u0627 "
    r"\u0939\u093f\u0928\u094d\u0926\u0940 \u0e44\u0e17\u0e22 \U0001f642 "
    r"\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea "
    r"\U0001f44d\U0001f3fd \u0300 \u200d \ufeff \u00a0 \u3000 \u2028 \x00 \x7f \x85 "
    r"\x1c \u180e \u017f '\u017f 'S 's '' -- ... </s> <|im_ <0x0A> \u2581 "
    r"\u2581\u2581a \u0120a \u010a ##ing"
)
WORDS = _WORDS.encode().decode("unicode_escape").split(" ")
"""Contractions, digits, scripts, emoji, white space of all kinds, other models' marks."""

GAPS = ("", "", " ", " ", "  ", "\n", "\r\n", "\t", " \n", "\n\n ", "    ", "\u00a0")
RUNS = (
    " ",
    "\n",
    "\t",
    "\r\n",
    " \n",
    "a",
    "0",
    "'",
    ".",
    "-",
    "\u0301",
    "\u4e2d",
    "\U0001f642",
)
CODE = (
    "\tif (x[i] != '\\n' && y->z >= 0x1F) {\n\t\treturn f\"{a!r:>10}\";  // ok\n\t}\n"
)
ASCII = "".join(map(chr, range(0x20, 0x7F))) + "\n\t"


def hard_texts(seed: int, number: int, added: Sequence[str]) -> Iterator[str]:
    """Yield *number* texts.

    Args:
        seed: The same texts for the same seed.
        number: How many.
        added: Tokens that were added to the vocabulary: they come whole, cut, and
            without a space beside them.
    """
    rng = Random(seed)
    known = [*added] or ["<s>"]

    def planes() -> str:
        some = rng.sample(PLANES, rng.randint(1, 3))
        return "".join(
            chr(rng.randrange(*rng.choice(some))) for _ in range(rng.randint(1, 60))
        )

    def raw_bytes() -> str:
        return rng.randbytes(rng.randint(1, 90)).decode(errors="replace")

    def words() -> str:
        return "".join(
            rng.choice(WORDS) + rng.choice(GAPS) for _ in range(rng.randint(1, 40))
        )

    def runs() -> str:
        return "".join(
            rng.choice(RUNS) * rng.choice((1, 2, 3, 7, 40, 300)) + rng.choice(WORDS)
            for _ in range(rng.randint(1, 4))
        )

    def tokens() -> str:
        parts = [rng.choice(known) for _ in range(rng.randint(1, 6))]
        cut = rng.choice(known)
        parts += [cut[: rng.randint(0, len(cut))], rng.choice(WORDS)]
        rng.shuffle(parts)
        return rng.choice(GAPS).join(parts)

    def printable() -> str:
        return "".join(rng.choices(ASCII, k=rng.randint(1, 400)))

    def code() -> str:
        start = rng.randrange(len(CODE))
        return CODE[start:] + rng.choice(WORDS) + CODE * rng.randint(0, 4)

    kinds: list[Callable[[], str]] = [
        planes,
        raw_bytes,
        words,
        runs,
        tokens,
        printable,
        code,
    ]
    for _ in range(number):
        text = rng.choice(kinds)()
        if rng.random() < 0.2:
            text += rng.choice(kinds)()
        yield text
