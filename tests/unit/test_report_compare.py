"""The resume report's own measures: each of them can tell."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from report_cases import Case, Outcome
from report_client import Answer, View
from report_compare import Metrics, compare, first_divergence
from report_cuts import Cut
from report_kinds import KINDS, SAMPLINGS
from report_table import COLUMNS, cells, failures, tables

PROMPT, IDS = [1, 2, 3], [10, 11, 12, 13, 14]
VIEW = View("", "abcde")


def whole() -> Answer:
    """Return an uninterrupted run."""
    return Answer(view=VIEW, ids=IDS, prompt_ids=PROMPT, finish_reason="stop")


def measured(k: int = 2, **changed: Any) -> Metrics:
    """Return the metrics of a case that is exact but for what is changed."""
    rest = Answer(view=VIEW, num_before=k, finish_reason="stop")
    for name in [name for name in changed if hasattr(rest, name) and name != "ids"]:
        setattr(rest, name, changed.pop(name))
    given: dict[str, Any] = {
        "prefix": [*PROMPT, *IDS[:k]],
        "ids": IDS,
        "num_sampled": len(IDS) - k,
        "usage_ok": True,
        "claim": "same_rng",
    }
    return compare(whole(), k, rest, **(given | changed))


def test_what_is_as_if_nothing_had_happened_passes() -> None:
    """With all ids at once, too."""
    for k in (0, 2, 5):
        made = measured(k)
        assert made.passed
        assert made.first_divergence is None


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ({"ids": [10, 11, 12, 9, 14]}, {"post_resume_exact", "claim_ok"}),
        ({"ids": [10, 11, 12, 9, 14], "claim": "best_effort"}, {"post_resume_exact"}),
        ({"ids": IDS[:4]}, {"post_resume_exact", "claim_ok", "lost_tokens"}),
        ({"ids": [*IDS, 2]}, {"post_resume_exact", "claim_ok"}),
        ({"prefix": [*PROMPT, 10]}, {"prefix_exact"}),
        ({"view": View("", "abcd")}, {"text_exact", "parsed_exact"}),
        ({"view": View("abcde", "")}, {"text_exact", "parsed_exact"}),
        ({"finish_reason": "length"}, {"parsed_exact"}),
        ({"num_lost": 1}, {"lost_tokens"}),
        ({"num_dup": 1}, {"dup_tokens"}),
        ({"num_sampled": 4}, {"repeated_decode_tokens"}),
        ({"usage_ok": False}, {"usage_ok"}),
    ],
)
def test_each_measure_can_fail(changed: dict[str, Any], names: set[str]) -> None:
    """And no other does with it."""
    made, good = measured(**changed), measured()
    skipped = {"first_divergence", "claim"}
    differ = {
        name
        for name in Metrics.__dataclass_fields__
        if getattr(made, name) != getattr(good, name)
    }
    assert differ - skipped == names
    assert not made.passed


def test_outputs_part_at_their_first_other_id() -> None:
    """An end is another one, too."""
    assert first_divergence(IDS, IDS) is None
    assert first_divergence([10, 9], [10, 11]) == 1
    assert first_divergence([10], [10, 11]) == 1
    assert first_divergence([10, 11, 12], [10, 11]) == 2


def test_offsets_tell_of_lost_and_repeated_ids() -> None:
    """Against what the client has, earlier ids included."""
    answer = Answer(num_before=3)

    def hear(offset: int, *ids: int) -> None:
        nvext = {"token_offset": offset, "completion_token_ids": list(ids)}
        answer.hear({"choices": [{"delta": {"content": "x"}}], "nvext": nvext})

    hear(3, 10)
    assert (answer.num_lost, answer.num_dup) == (0, 0)
    hear(6, 11)
    assert (answer.num_lost, answer.num_dup) == (2, 0)
    hear(4, 11)
    assert (answer.num_lost, answer.num_dup) == (2, 1)
    assert answer.views[6].content == "xxx"
    assert answer.view_at(5).content == "xx"


def test_calls_grow_in_their_places() -> None:
    """By their index, names and arguments each."""
    view = View()
    for index, function in (
        (0, {"name": "a", "arguments": ""}),
        (0, {"arguments": "{"}),
        (1, {"name": "b", "arguments": "["}),
        (1, {"arguments": "]"}),
    ):
        view = view.plus({"tool_calls": [{"index": index, "function": function}]})
    assert view.calls == (("a", "{"), ("b", "[]"))


def outcome(metrics: Metrics, method: str = "raw ids") -> Outcome:
    """Return a case that came out so."""
    case = Case(KINDS[0], SAMPLINGS[0], False, "", 9)
    return Outcome(method, "migration", case, Cut("1", 1), metrics)


def test_a_table_is_round_only_where_all_are() -> None:
    """One of a thousand is no 100 %, and is named; baselines may fail."""
    good, bad = measured(), measured(ids=IDS[:4])
    many = [outcome(good)] * 999
    assert failures([*many, outcome(bad, "naive P + O")]) == []
    assert "| 100 % |" in tables(many)
    [failed] = failures([*many, outcome(bad)])
    assert failed.startswith("migration, plain, T=0, without penalties, cut 1 (1)")
    shown = tables([*many, outcome(replace(bad, lost_tokens=7))])
    assert "| 1000 | 100 % | 99 % |" in shown
    assert "| 7 | 0 | 0 |" in shown
    [cell] = cells(many)
    assert len(cell) == len(COLUMNS)
