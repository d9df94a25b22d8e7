"""Scripted sequences: which prompt gets which output."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenwire.worker.engine import EngineStartError
from tokenwire.worker.sim.script import Answer, Script, ScriptEntry, read_script


def answer(entry: ScriptEntry, prompt: list[int]) -> Answer | None:
    """Return what a script of one rule says."""
    return Script([entry]).answer(prompt)


def test_a_rule_without_a_condition_matches_every_prompt() -> None:
    """It then starts at the beginning."""
    assert answer(ScriptEntry([7, 8]), [1]) == Answer([7, 8], 0, then_eos=True)


def test_the_first_rule_that_matches_wins() -> None:
    """Order is precedence."""
    script = Script([ScriptEntry([7], num_prompt_tokens=2), ScriptEntry([8])])
    first, second = script.answer([1, 1]), script.answer([1])
    assert first is not None
    assert second is not None
    assert (first.token_ids, second.token_ids) == ([7], [8])


def test_an_exact_prompt_goes_on_where_its_output_was_cut() -> None:
    """The prompt with the first scripted ids behind it is the same request, resumed."""
    entry = ScriptEntry([7, 8, 9], prompt_token_ids=[1, 2])
    starts = {size: answer(entry, [1, 2, 7, 8, 9][:size]) for size in range(2, 6)}
    assert {size: got and got.start for size, got in starts.items()} == {
        2: 0, 3: 1, 4: 2, 5: 3,
    }  # fmt: skip
    assert answer(entry, [1, 2, 8]) is None
    assert answer(entry, [1]) is None


def test_ids_in_a_row_are_found_anywhere_but_only_whole() -> None:
    """A match does not begin inside an id."""
    entry = ScriptEntry([7], contains=[0x0200, 0x0300])
    assert answer(entry, [1, 0x0200, 0x0300, 5]) is not None
    assert answer(entry, [0x0200, 1, 0x0300]) is None
    assert answer(ScriptEntry([7], contains=[1]), [0x0100, 0x0001_0000]) is None
    assert answer(ScriptEntry([7], contains=[1]), [0x0100, 1]) is not None


def test_other_rules_resume_only_if_they_say_so() -> None:
    """A prompt may end with the first scripted id by chance."""
    assert answer(ScriptEntry([7, 8]), [1, 7]) == Answer([7, 8], 0, then_eos=True)
    resuming = ScriptEntry([7, 8], resume=True)
    assert answer(resuming, [1, 7]) == Answer([7, 8], 1, then_eos=True)
    assert answer(resuming, [1, 7, 8]) == Answer([7, 8], 2, then_eos=True)


def test_a_drawn_id_matches_each_that_it_may_be() -> None:
    """Where a prompt goes on behind scripted output, and what a grammar takes."""
    exact = ScriptEntry([7, -1, 9], prompt_token_ids=[1, 2], drawn=(5, 6))
    loose = ScriptEntry([7, -1, 9], drawn=(5, 6), resume=True)
    for entry in (exact, loose):
        got = answer(entry, [1, 2, 7, 6])
        assert got is not None
        assert got.start == 2
    assert answer(exact, [1, 2, 7, 9]) is None
    fresh = answer(exact, [1, 2])
    assert fresh is not None
    assert fresh.begins_with([7, 5, 9, 1])
    assert fresh.begins_with([])
    assert not fresh.begins_with([7, 9])


def test_no_rule_no_answer() -> None:
    """The engine's own rule goes on then."""
    assert Script().answer([1]) is None
    assert not len(Script())


def test_a_file_is_a_list_of_rules(tmp_path: Path) -> None:
    """JSON, as the class says."""
    file = tmp_path / "script.json"
    file.write_text('[{"output_token_ids": [5], "then": "generate"}]')
    got = read_script(str(file)).answer([1])
    assert got == Answer([5], 0, then_eos=False)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '[{"output": [1]}]',
        '[{"output_token_ids": "x"}]',
        '[{"output_token_ids": [-1]}]',
    ],
)
def test_a_file_of_another_kind_is_named(tmp_path: Path, text: str) -> None:
    """One sentence, with the path; so is a file that is not there."""
    file = tmp_path / "script.json"
    file.write_text(text)
    with pytest.raises(EngineStartError, match=r"script\.json cannot be read"):
        read_script(str(file))
    with pytest.raises(EngineStartError, match="cannot be read"):
        read_script(str(tmp_path / "none.json"))
