"""What the operator reads."""

from __future__ import annotations

import json
import shlex

from tokenwire.deploy.progress import Progress, serving_text


def test_one_line_per_change() -> None:
    """A phase is said once, however often it is reported."""
    progress = Progress(["prefill-0", "decode-0"], 100.0)
    assert progress.phase("decode-0", "loading", 101.5) == (
        "[    1.5 s] decode-0   loading"
    )
    assert progress.phase("decode-0", "loading", 102.0) is None
    assert progress.up("decode-0", 103.0, " at tcp://x") == (
        "[    3.0 s] decode-0   up at tcp://x"
    )
    assert progress.up("decode-0", 104.0) is None


def test_silence_names_who_is_awaited_and_for_how_long() -> None:
    """5 s after the last line, and again 5 s later, the awaited are named."""
    progress = Progress(["prefill-0", "decode-0"], 0.0)
    progress.phase("prefill-0", "loading", 1.0)
    progress.up("decode-0", 2.0)
    assert progress.silence(6.9) is None
    line = progress.silence(7.0)
    assert line is not None
    assert line.endswith("waiting for prefill-0 (loading, 6 s)")
    assert progress.silence(11.9) is None
    assert progress.silence(12.0) is not None


def test_no_lines_once_all_is_up() -> None:
    """A stack that serves is silent."""
    progress = Progress(["prefill-0"], 0.0)
    progress.up("prefill-0", 1.0)
    assert progress.silence(1_000.0) is None


def test_the_serving_text_can_be_pasted() -> None:
    """The curl line is valid shell with valid JSON, and the Python lines compile."""
    text = serving_text(
        url="http://127.0.0.1:8000",
        model="it's",
        metrics=[("prefill-0", "http://127.0.0.1:9/metrics")],
        log_folder="/logs",
        elapsed_s=12.3,
    )
    assert "prefill-0  http://127.0.0.1:9/metrics" in text
    curl = text[text.index("curl") : text.index("  or, in Python")]
    words = shlex.split(curl)
    assert json.loads(words[-1])["model"] == "it's"
    assert json.loads(words[-1])["return_token_ids"] is True
    code = text[text.index("    from openai") : text.index("  Ctrl-C")]
    lines = [line.strip() for line in code.strip().splitlines()]
    assert len(lines) == 4
    compile("\n".join(lines), "snippet", "exec")
