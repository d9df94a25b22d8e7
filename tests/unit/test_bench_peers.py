"""The benchmark beside the peers: what it makes of bytes, values and processes."""

from __future__ import annotations

import os
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from peers_backend import ANSWER, END, STREAM_HEAD, answer, asked, event
from peers_client import Connection
from peers_control import Control, Pace
from peers_figures import quantile, quantile_with_zeros
from peers_plot import bars
from peers_proc import cpu_s, family, parents, rss_mib
from peers_table import FIGURES, losses, page, paired_ratio, ratio, with_added

RESULTS = {
    "tokenwire": {"sat_us": [10.0, 12.0, 11.0], "requests_per_s": [1_000.0]},
    "dynamo": {"sat_us": [10.0], "requests_per_s": [2_000.0], "ttft_ms": [1.5, 1.7]},
    "vllm-serve": {"sat_us": [44.0]},
    "direct": {"ttft_ms": [0.5], "sat_rate": [100.0]},
}


class TestTable:
    """Ratios are of medians, and none where we lose is left out."""

    def test_ratio_is_ours_by_theirs(self) -> None:
        """Medians are compared."""
        assert ratio(RESULTS, FIGURES[0], "dynamo") == pytest.approx(1.1)
        assert ratio(RESULTS, FIGURES[0], "vllm-serve") == pytest.approx(0.25)

    def test_a_missing_value_has_no_ratio(self) -> None:
        """An arm that failed is compared with nothing."""
        assert ratio(RESULTS, FIGURES[1], "dynamo") is None
        assert ratio(RESULTS, FIGURES[0], "sglang-router") is None

    def test_losses_name_both_directions(self) -> None:
        """More CPU is a loss, and so are fewer requests/s; the rest is not."""
        assert losses(RESULTS) == [
            (
                "- **dynamo**: CPU per streamed token, 48 streams, saturated 1.10; "
                "requests/s, max_tokens=1, 32 at once 0.50."
            ),
            "- **vllm-serve**: nowhere.",
        ]

    def test_added_latency_is_over_the_direct_arm(self) -> None:
        """The client's own round trip is taken off."""
        added = with_added(RESULTS)["dynamo"]["added_ttft_ms"]
        assert added == pytest.approx([1.0, 1.2])
        assert "added_ttft_ms" not in RESULTS["dynamo"]

    def test_page_shows_losses_and_failures(self) -> None:
        """Losses are bold, spreads stand beside medians, and a failed arm is told."""
        text = page(
            RESULTS, {"dynamo": "theirs"}, {"dynamo": ["requests: 500"]}, "x", {}
        )
        assert "| 11.00 (10.00 to 12.00) | 10.00 |" in text
        assert "| **1.10** | 0.25 |" in text
        assert "- **dynamo**: requests: 500" in text

    def test_windows_of_one_repeat_are_compared(self) -> None:
        """What slows both in one repeat is in neither ratio, and a repeat that one lacks is left out."""
        values = {
            "tokenwire": {"near_us": [10.0, 12.0, 30.0, 9.0]},
            "dynamo": {"near_us": [20.0, 24.0, 20.0, 60.0]},
        }
        repeats = {
            "tokenwire": {"near_us": [0, 0, 2, 1]},
            "dynamo": {"near_us": [0, 0, 1, 2]},
        }
        found = paired_ratio(values, repeats, "near_us", "dynamo")
        assert found == pytest.approx(0.5)
        text = page(values, {}, {}, "", repeats)
        assert "with ids): dynamo 0.50, 0.00, 0.00, 0.00." in text
        assert "with ids): dynamo" not in page(values, {}, {}, "", {})

    def test_page_says_when_the_client_is_the_limit(self) -> None:
        """A direct arm below twice the fastest is not passed over."""
        values = {
            "tokenwire": {"sat_rate": [60.0], "sat_busy": [0.5]},
            "direct": {"sat_rate": [100.0]},
        }
        text = page(values, {}, {}, "", {})
        assert "**less than twice" in text
        assert "tokenwire 0.50." in text
        values["direct"]["sat_rate"] = [120.0]
        assert "**less than twice" not in page(values, {}, {}, "", {})


class TestProcesses:
    """What the kernel says of processes."""

    def test_parents_with_brackets_in_a_name(self) -> None:
        """The name's own brackets and spaces do not shift the fields."""
        assert parents(["7 (a) b) S 3 7", "8 (c) S 7 7"]) == {7: 3, 8: 7}

    def test_this_process(self) -> None:
        """It has a parent, memory, and CPU time that grows."""
        pid = os.getpid()
        before = cpu_s([pid])
        sum(range(100_000))
        assert cpu_s([pid]) > before > 0
        assert rss_mib([pid]) > 1
        assert pid in family(os.getppid())


class TestClient:
    """Answers as they arrive."""

    @pytest.fixture
    def connection(self) -> Connection:
        """A connection without a socket."""
        made = Connection.__new__(Connection)
        made.fresh, made.num_events, made.length = True, 0, -1
        made.tail, made.failed = b"", ""
        return made

    @pytest.mark.parametrize("size", range(1, 40))
    def test_a_stream_in_pieces(self, connection: Connection, size: int) -> None:
        """Wherever they part, its end is seen, and each event counted once."""
        rest = event(b'{"a":1}') * 8 + END
        connection.take(STREAM_HEAD, 1.0)
        taken = [
            connection.take(rest[at : at + size], 2.0)
            for at in range(0, len(rest), size)
        ]
        assert sum(number for number, _ in taken) == 9
        assert [ended for _, ended in taken] == [False] * (len(taken) - 1) + [True]

    def test_an_answer_of_known_length(self, connection: Connection) -> None:
        """It ends with its last byte."""
        whole = answer(ANSWER)
        assert connection.take(whole[:-1], 1.0) == (0, False)
        assert connection.take(whole[-1:], 2.0) == (0, True)
        assert connection.first_at == 1.0

    def test_an_error_is_told(self, connection: Connection) -> None:
        """Any status but 200 is a failure."""
        connection.take(b"HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n", 1.0)
        assert connection.failed.startswith("HTTP/1.1 503")


def test_quantiles_count_tokens_that_come_together() -> None:
    """A token in the same read as the one before came 0 ms after it."""
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile_with_zeros([10.0], 99, 0.5) == 0.0
    assert quantile_with_zeros([10.0] * 50, 50, 0.99) == 10.0
    with pytest.raises(RuntimeError):
        quantile([], 0.5)


def test_what_a_request_asks() -> None:
    """Routers write bodies anew: fields are read, not searched for."""
    assert asked(b'{"max_tokens": 7, "stream": true}') == (True, 7, False)
    wanted = b'{"max_completion_tokens":3,"return_token_ids":true}'
    assert asked(wanted) == (False, 3, True)
    assert asked(b"nothing") == (False, 1, False)


class TestPace:
    """A simulated engine stays near what the client has seen."""

    @pytest.fixture
    def control(self, tmp_path: Path) -> Control:
        """A shared file."""
        return Control(tmp_path / "control")

    def test_saturated_it_runs_two_steps_ahead(self, control: Control) -> None:
        """The third step waits until a first token has arrived."""
        pace = Pace(control, lambda: 5.0)
        control.begin(0)
        for _ in range(2):
            assert pace.wait_s(1) == 0
            pace.stepped(1)
        assert pace.wait_s(1) > 0
        control.arrived(1)
        assert pace.wait_s(1) == 0

    def test_paced_it_waits_for_its_time(self, control: Control) -> None:
        """The step after a step is a step later, whoever has seen what."""
        pace = Pace(control, lambda: 5.0)
        control.begin(10.0)
        assert pace.wait_s(1) == 0
        pace.stepped(1)
        assert pace.wait_s(1) == 10


def test_a_picture_is_xml_and_small() -> None:
    """Titles are escaped; bars are as long as their medians."""
    picture = bars("a < b", "us", 1, {"tokenwire": [1.0, 3.0, 2.0], "dynamo": [4.0]})
    assert len(picture) < 4_000
    root = ET.fromstring(picture)  # noqa: S314 -- ours
    widths = [float(one.get("width", 0)) for one in root if one.tag.endswith("rect")]
    assert widths[1] == pytest.approx(2 * widths[0], rel=0.01)
