"""docs/troubleshooting.md explains every message of the source, and messages.md lists it."""

from __future__ import annotations

from pathlib import Path

import alert_docs
from messages import Message, collected, literals
from messages_docs import INDEX, PAGE, place_of, rendered, rows

ROWS = list(rows(PAGE.read_text()))
MESSAGES = collected()

SOURCE = '''
CONSTANT = "it is {what} that is constant"

def refuse(name: str) -> ApiError:
    return ApiError(400, f"{name!r} cannot be taken", param="a field of ours")

def work(parser, number) -> None:
    """No message: a docstring."""
    if number == 1:
        raise bad_request("a number is bad")
    msg = f"a number {number} is " "worse"
    raise ValueError(msg)

def say(number) -> None:
    _log.info("all is well here")
    _log.warning("%d of %s are gone: %.3f %%", 1, "a", 2.0)
    sys.exit(f"command: {number} ends it")
    parser.error("two options " + "contradict")
    link._refuse("one way" if number else "another way")
    end(ErrorKind.BUSY, "no room is left")
    raise unavailable(CONSTANT.format(what=1), code="not a message")

def obstacle() -> str | None:
    how, why = "it stands in the way", 1
    return how

def fine() -> int:
    return len("nobody reads this")
'''


def test_every_message_is_explained() -> None:
    """A message without a row is one that nobody can look up at night.

    Add it to a row whose meaning it shares, or write one, then run `make docs`.
    """
    unexplained = [one.text for one in MESSAGES if place_of(one, ROWS) is None]

    assert unexplained == []


def test_every_row_is_of_a_message() -> None:
    """What the source does not say any more is not explained."""
    texts = literals()
    dead = [
        row.pattern
        for row in ROWS
        if not any(map(row.fits, MESSAGES))
        and (row.is_module or not any(map(row.is_like, texts)))
    ]

    assert dead == []


def test_every_row_says_what_to_do() -> None:
    """What it means, and what to do: the last two columns."""
    lines = PAGE.read_text().partition("\n## An alert fires\n")[2].splitlines()
    cells = [line.split("|")[1:-1] for line in lines if line.startswith("| `")]
    silent = [row[0] for row in cells if not all(map(str.strip, row[-2:]))]

    assert len(cells) > 100
    assert silent == []


def test_no_row_fits_everything() -> None:
    """Each has words of its own."""
    strange = Message("qqq qqq", "answer", "frontend/none.py")

    assert len(ROWS) > 300
    assert not any(row.fits(strange) for row in ROWS)


def test_the_index_is_fresh() -> None:
    """It is what `make docs` makes of the source as it is."""
    assert INDEX.read_text() == rendered(), "run `make docs`"


def test_the_alerts_are_fresh() -> None:
    """They are what the rules say of themselves."""
    assert PAGE.read_text() == alert_docs.rendered(), "run `make docs`"
    assert len(alert_docs.alerts()) > 10


def test_messages_are_found_in_every_form(tmp_path: Path) -> None:
    """In calls, variables, constants and reasons; not in what nobody is told."""
    (tmp_path / "frontend").mkdir()
    (tmp_path / "frontend" / "example.py").write_text(SOURCE)

    assert {one.text for one in collected(tmp_path)} == {
        "… cannot be taken",
        "a number is bad",
        "a number … is worse",
        "… of … are gone: … %",
        "command: … ends it",
        "two options contradict",
        "one way",
        "another way",
        "no room is left",
        "it is … that is constant",
        "it stands in the way",
    }


def test_patterns_say_most_of_what_they_fit() -> None:
    """Of several rows that of the most letters counts; wide ones are of answers alone."""
    page = """
## Clients get 400
| message | means |
|---|---|
| `… must be …`<br>`x must be even` | |

## Else
<!-- covers: frontend/other.py -->
| where | |
| `no message` | |
"""
    wide, narrow, module = rows(page)

    assert place_of(Message("x must be even", "answer", "a.py"), rows(page)) == narrow
    assert place_of(Message("y must be odd", "answer", "a.py"), rows(page)) == wide
    assert place_of(Message("y must be odd", "log", "a.py"), rows(page)) is None
    assert place_of(Message("x", "log", "frontend/other.py"), rows(page)) == module
