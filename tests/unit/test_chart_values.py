"""The chart's values: the table in its README, their schema, and their comments agree."""

from __future__ import annotations

from chart_values import Value, read_values, rendered, table_problems

VALUES = """
# A header.

# -- A name.
name: ""
group:
  # -- A list, of
  # several lines | parts.
  list: [1]
  # A group below.
  below:
    # -- A map.
    map: {a: 1}
    plain: 2
"""


def test_the_table_is_that_of_the_values() -> None:
    """And the schema has each of their keys, and no other."""
    assert list(table_problems()) == []


def test_values_are_read_with_their_comments() -> None:
    """A comment of a group is no value's; a blank line ends one."""
    values = list(read_values(VALUES))
    assert values == [
        Value("name", "A name.", ""),
        Value("group", "", {"list": [1], "below": {"map": {"a": 1}, "plain": 2}}),
        Value("group.list", "A list, of several lines | parts.", [1]),
        Value("group.below", "", {"map": {"a": 1}, "plain": 2}),
        Value("group.below.map", "A map.", {"a": 1}),
        Value("group.below.plain", "", 2),
    ]
    assert rendered(iter(values)).splitlines()[2:] == [
        '| `name` | `""` | A name. |',
        r"| `group.list` | `[1]` | A list, of several lines \| parts. |",
        '| `group.below.map` | `{"a": 1}` | A map. |',
    ]
