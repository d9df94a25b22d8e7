"""The table of the chart's values, from the comments of its values.yaml.

`make docs` writes it into the chart's README. A comment that begins with `# --` is of the key
below it; keys without one are groups. Values, comments and schema must name the same keys.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import yaml
from chart_manifests import CHART, Json

__all__ = ["Value", "read_values", "rendered", "table_problems"]

VALUES = CHART / "values.yaml"
SCHEMA = CHART / "values.schema.json"
PAGE = CHART / "README.md"
BEGIN = "<!-- values: written by make docs -->"
END = "<!-- end of values -->"

_KEY = re.compile(r"^( *)([A-Za-z][A-Za-z0-9-]*):(?: .*)?$")
_COMMENT = re.compile(r"^ *# ?(.*)$")


@dataclass(slots=True, frozen=True)
class Value:
    """One value of the chart."""

    path: str  # dotted
    text: str  # what it is for; empty: a group
    default: Any


def read_values(text: str) -> Iterator[Value]:
    """Yield all values in *text*, in their order."""
    whole = cast("Json", yaml.safe_load(text))
    above: list[tuple[int, str]] = []  # indentation and key, from the root down
    comment: list[str] = []
    for line in text.splitlines():
        if match := _COMMENT.match(line):
            comment.append(match[1])
            continue
        if match := _KEY.match(line):
            indent, key = len(match[1]), match[2]
            while above and above[-1][0] >= indent:
                above.pop()
            above.append((indent, key))
            path = [one for _, one in above]
            said = " ".join(comment)
            about = said.partition("-- ")[2] if "-- " in said else ""
            if path[0] != "models" or len(path) == 1:
                yield Value(".".join(path), about, _at(whole, path))
        comment = []


def _at(whole: Any, path: list[str]) -> Any:
    for key in path:
        if not isinstance(whole, dict) or key not in whole:
            return None  # inside of a described value
        whole = cast("Json", whole)[key]
    return whole


def rendered(values: Iterator[Value]) -> str:
    """Return the table, in Markdown."""
    lines = ["| value | default | |", "|---|---|---|"]
    described = ""
    for value in values:
        if described and value.path.startswith(f"{described}."):
            continue  # its own lines are in the default
        if not value.text:
            continue
        described = value.path
        default = json.dumps(value.default)
        text = value.text.replace("|", r"\|")
        lines.append(f"| `{value.path}` | `{default}` | {text} |")
    return "\n".join(lines)


def table_problems() -> Iterator[str]:
    """Yield what disagrees: the table, the values, the schema."""
    text = VALUES.read_text()
    page = PAGE.read_text()
    if _with_table(page, rendered(read_values(text))) != page:
        yield f"{PAGE.name}: its table is not that of values.yaml: make docs"
    values = list(read_values(text))
    described = [value.path for value in values if value.text]
    for value in values:
        is_leaf = not isinstance(value.default, dict)
        inside = any(value.path.startswith(f"{path}.") for path in described)
        if is_leaf and not value.text and not inside and value.default is not None:
            yield f"values.yaml: {value.path} has no comment"
    schema = cast("Json", json.loads(SCHEMA.read_text()))
    yield from _schema_problems(schema, schema, yaml.safe_load(text), "")


def _schema_problems(
    schema: Json, root: Json, values: Json, where: str
) -> Iterator[str]:
    """Compare the keys of a closed object with those in the values."""
    schema = _resolved(schema, root)
    keys: Json = schema.get("properties", {})
    if schema.get("additionalProperties") is not False or where == "models.":
        return
    for key in sorted(keys.keys() - values.keys() - {"global"}):
        # Pools have what `worker` has, and say what differs.
        if not where.startswith("defaults.pools."):
            yield f"values.yaml has no {where}{key}"
    for key in sorted(values.keys() - keys.keys()):
        yield f"values.schema.json has no {where}{key}"
    for key, value in values.items():
        if isinstance(value, dict) and key in keys:
            below = cast("Json", value)
            yield from _schema_problems(keys[key], root, below, f"{where}{key}.")


def _resolved(schema: Json, root: Json) -> Json:
    reference = schema.get("$ref")
    if reference is None:
        return schema
    return cast("Json", root["definitions"][str(reference).rpartition("/")[2]])


def _with_table(page: str, table: str) -> str:
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"


def main() -> int:
    """Write the table into the README."""
    page = PAGE.read_text()
    table = rendered(read_values(VALUES.read_text()))
    PAGE.write_text(_with_table(page, table))
    return 0


if __name__ == "__main__":
    sys.exit(main())
