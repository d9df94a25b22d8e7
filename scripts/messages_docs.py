"""Write docs/messages.md: every message of the source, and where it is explained.

`make docs` runs this. The explanations are the tables of docs/troubleshooting.md whose first
column is `message`: patterns, in which ``…`` stands for anything. A comment
`<!-- covers: frontend/x.py -->` stands for all messages of a module.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from messages import PACKAGES, VARIES, Message, collected
from table import replaced

__all__ = ["INDEX", "PAGE", "Row", "place_of", "rendered", "rows"]

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"
INDEX = ROOT / "docs" / "messages.md"

OF_CLIENTS = {"Clients get 400", "Clients get another 4xx"}
"""Headings whose patterns are wide, since a field's name varies: of answers alone."""


@dataclass(frozen=True, slots=True)
class Row:
    """What the page says of messages: a pattern of theirs, or a module with all of its."""

    pattern: str
    heading: str
    is_module: bool = False

    @property
    def weight(self) -> int:
        """How much it says of a message: its letters; a module's row, as a few words."""
        return 12 if self.is_module else len(self.pattern.replace(VARIES, ""))

    def fits(self, message: Message) -> bool:
        """Return whether it is about *message*."""
        if self.is_module:
            return message.module == self.pattern
        if message.how in {"log", "exit"} and self.heading in OF_CLIENTS:
            return False
        return self.is_like(message.text)

    def is_like(self, text: str) -> bool:
        """Return whether the pattern is that of *text*."""
        return bool(_form(self.pattern).fullmatch(text))


@cache
def _form(pattern: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, pattern.split(VARIES))), re.DOTALL)


def rows(page: str) -> Iterator[Row]:
    """Yield what *page* explains, by the headings under which it does."""
    heading = ""
    is_of_messages = False
    for line in page.splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        elif line.startswith("<!-- covers: "):
            for module in line.split()[2:-1]:
                yield Row(module, heading, is_module=True)
        elif line.startswith("| `") and is_of_messages:
            cell = line.split(" | ")[0].removeprefix("| ")
            for pattern in cell.split("<br>"):
                yield Row(pattern.strip("`"), heading)
        elif line.startswith("| message |"):
            is_of_messages = True
        elif not line.startswith("|"):
            is_of_messages = False


def place_of(message: Message, known: Iterable[Row]) -> Row | None:
    """Return the row about *message* that says most of it; None: there is none."""
    fitting = [row for row in known if row.fits(message)]
    return max(fitting, default=None, key=lambda row: row.weight)


def rendered() -> str:
    """Return the index as it should be."""
    known = list(rows(PAGE.read_text()))
    lines = ["| message | said by | see |", "| --- | --- | --- |"]
    for message in collected():
        row = place_of(message, known)
        speaker = PACKAGES[message.module.partition("/")[0]]
        see = (
            f"[{row.heading}](troubleshooting.md#{_anchor(row.heading)})" if row else ""
        )
        text = message.text.replace("|", "\\|").replace("\n", " ")
        quote = "``" if "`" in text else "`"
        lines.append(f"| {quote}{text}{quote} | {speaker} | {see} |")
    return replaced(INDEX.read_text(), "messages", "\n".join(lines))


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def main() -> None:
    """Write the index."""
    INDEX.write_text(rendered())


if __name__ == "__main__":
    main()
