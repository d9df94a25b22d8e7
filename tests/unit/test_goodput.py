"""Which outputs count as goodput."""

from __future__ import annotations

import pytest

from tokenwire.frontend.config import parse_config
from tokenwire.frontend.goodput import Objectives, Outcome
from tokenwire.frontend.metrics import Metrics


@pytest.mark.parametrize(
    ("ttft_s", "decode_s", "num_tokens", "outcome"),
    [
        (1.0, 0.9, 10, Outcome.MET),  # at both bounds
        (1.1, 0.0, 10, Outcome.TTFT),
        (1.1, 9.0, 10, Outcome.TTFT),  # the first that was missed
        (0.5, 1.0, 10, Outcome.TPOT),
        (0.5, 0.0, 1, Outcome.MET),  # nothing behind the first token
        (0.5, 0.0, 0, Outcome.MET),  # a prompt that was only scored
    ],
)
def test_the_first_objective_that_is_missed_counts(
    ttft_s: float, decode_s: float, num_tokens: int, outcome: Outcome
) -> None:
    """The tokens' is a mean of those behind the first."""
    assert Objectives(1.0, 0.1).outcome(ttft_s, decode_s, num_tokens) is outcome


def test_objectives_are_options() -> None:
    """They reach the counter."""
    given = ["--model", "m", "--worker", "tcp://127.0.0.1:1", "--goodput-ttft-s", "3"]
    config = parse_config([*given, "--goodput-tpot-s", "0.5"])
    metrics = Metrics("m", config.objectives)
    metrics.ended_well(2.9, 0.4, 2)
    metrics.ended_well(3.1, 0.4, 2)
    metrics.ended_badly()

    page = metrics.exposition().decode()
    assert config.objectives == Objectives(3.0, 0.5)
    for outcome, number in {"met": 1, "ttft": 1, "tpot": 0, "failed": 1}.items():
        assert f'tokenwire_goodput_total{{outcome="{outcome}"}} {number}.0' in page
