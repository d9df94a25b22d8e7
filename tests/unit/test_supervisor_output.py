"""What a child's lines mean: phases, warnings, tracebacks, chatter."""

from __future__ import annotations

import pytest

from tokenwire.deploy.output import (
    MAX_LINE_CHARS,
    MAX_SHOWN,
    SHOWN_PERIOD_S,
    Kind,
    LineSplitter,
    OutputReader,
)


def kinds(*lines: str) -> list[Kind | None]:
    """Return what one reader makes of *lines*."""
    reader = OutputReader()
    seen = [reader.line(line, 0.0) for line in lines]
    return [s.kind if s else None for s in seen]


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("INFO 11-29 17:30:12 [core.py:12] WARNING is a word here", Kind.QUIET),
        ("(EngineCore pid=7) INFO 11-29 17:30:12 [core.py:12] loaded", Kind.QUIET),
        ("(EngineCore pid=7) (Worker pid=8) ERROR 11-29 no memory", Kind.SHOW),
        ("WARNING 11-29 17:30:12 [cpu.py:3] slow", Kind.SHOW),
        ("/a/b.py:3: UserWarning: old", Kind.SHOW),
        ("Loading safetensors checkpoint shards: 100% 1/1", Kind.QUIET),
        (
            "(EngineCore pid=7) WARNING 12-01 [vllm.py:1] Enforce eager set, disabling torch.compile, CUDAGraphs",
            Kind.QUIET,
        ),
        (
            "WARNING 12-01 [scheduler.py:2] Using custom scheduler class tokenwire.worker.S.",
            Kind.QUIET,
        ),
        (
            "WARNING 12-01 [scheduler.py:2] Using custom scheduler class theirs.S.",
            Kind.SHOW,
        ),
        (
            '{"time":"t","level":"warning","logger":"vllm","message":"Triton is not installed. triton-cpu is expected"}',
            Kind.QUIET,
        ),
        ("x" * 200 + " ERROR", Kind.QUIET),
        ("", Kind.QUIET),
    ],
)
def test_levels(line: str, kind: Kind) -> None:
    """Warnings and errors are shown; information and bars are not."""
    assert kinds(line) == [kind]


def test_phases_are_ours_alone() -> None:
    """Only a line that begins with the name of a command of ours is a phase."""
    reader = OutputReader()
    seen = reader.line("tokenwire-worker: loading weights (3.1 s)", 0.0)
    assert seen is not None
    assert (seen.kind, seen.text) == (Kind.PHASE, "loading weights")
    assert kinds("INFO tokenwire-worker: loading") == [Kind.QUIET]


def test_a_traceback_is_shown_to_its_last_line() -> None:
    """From "Traceback" to the exception all is shown; what follows is judged anew."""
    lines = [
        "Traceback (most recent call last):",
        '  File "a.py", line 1, in f',
        "    1 / 0",
        "ZeroDivisionError: division by zero",
        "bye",
    ]
    assert kinds(*lines) == [Kind.SHOW] * 4 + [Kind.QUIET]


def test_a_flood_of_warnings_is_muted_for_a_period() -> None:
    """After the bound one line says so, then there is silence until the next period."""
    reader = OutputReader()
    seen = [reader.line("ERROR x", 0.0) for _ in range(MAX_SHOWN + 3)]
    assert [s and s.kind for s in seen[MAX_SHOWN - 1 :]] == [
        Kind.SHOW,
        Kind.MUTED,
        None,
        None,
    ]
    later = reader.line("ERROR x", SHOWN_PERIOD_S)
    assert later is not None
    assert later.kind is Kind.SHOW


def test_lines_over_any_cut() -> None:
    """However the bytes are cut, the same lines come out, UTF-8 included."""
    data = "é one\ntwo\r\n\nbar 1%\rbar 2%\rlast".encode()
    for cut in range(len(data)):
        splitter = LineSplitter()
        lines = splitter.feed(data[:cut]) + splitter.feed(data[cut:]) + splitter.end()
        assert lines == ["é one", "two", "bar 1%", "bar 2%", "last"]


def test_long_lines_are_bounded() -> None:
    """A line without end is cut, and does not grow in memory."""
    splitter = LineSplitter()
    lines = [line for _ in range(50) for line in splitter.feed(b"x" * 1_000)]
    lines += splitter.end()
    assert lines
    assert max(map(len, lines)) <= MAX_LINE_CHARS


def test_colours_and_bad_bytes_do_not_reach_the_terminal() -> None:
    """Escape sequences are removed and bytes that are no text are replaced."""
    assert LineSplitter().feed(b"\x1b[31mred\x1b[0m \xff\n") == ["red \ufffd"]
