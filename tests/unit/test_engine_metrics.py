"""Pages of several workers become one that Prometheus takes."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tokenwire.frontend.engine_metrics import Page, merged

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_running{engine="1",model_name="m"} 3.0
# HELP vllm:prompt_tokens_total Number of prefill tokens processed.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="m"} 1.2e+06
# HELP vllm:prompt_tokens_created Number of prefill tokens processed.
# TYPE vllm:prompt_tokens_created gauge
vllm:prompt_tokens_created{engine="0",model_name="m"} 1.7e+09
# HELP vllm:iteration_tokens_total Tokens per step.
# TYPE vllm:iteration_tokens_total histogram
vllm:iteration_tokens_total_bucket{engine="0",le="1.0",model_name="m"} 4.0
vllm:iteration_tokens_total_bucket{engine="0",le="+Inf",model_name="m"} 5.0
vllm:iteration_tokens_total_count{engine="0",model_name="m"} 5.0
vllm:iteration_tokens_total_sum{engine="0",model_name="m"} 9.5
"""


def samples(pages: Iterable[Page]) -> dict[tuple[str, str], float]:
    """Return the values of the page that *pages* make, by name and engine."""
    text = merged(pages)
    values: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = sample.name, sample.labels["engine"]
            assert key not in values or "le" in sample.labels
            values[key] = sample.value
    return values


def test_engines_of_several_workers_are_told_apart() -> None:
    """Every core of every worker is an engine of its own; families stand together."""
    pages = [Page("prefill-0", "prefill", VLLM), Page("decode-0", "decode", VLLM)]
    values = samples(pages)
    text = merged(pages)

    for worker in ("prefill-0", "decode-0"):
        assert values["vllm:num_requests_running", f"{worker}:0"] == 2.0
        assert values["vllm:num_requests_running", f"{worker}:1"] == 3.0
        assert values["vllm:prompt_tokens_total", f"{worker}:0"] == 1.2e6
        assert values["vllm:iteration_tokens_total_sum", f"{worker}:0"] == 9.5
    assert text.count("# TYPE vllm:num_requests_running gauge\n") == 1
    assert 'worker_id="decode-0",role="decode"' in text
    assert "_created" not in text


@pytest.mark.parametrize(
    "line",
    [
        "tokenwire_workers_ready 9.0",
        "vllm:other{} 1.0",
        "vllm:a_ratio 1.0",
        "vllm:a 1.0 extra",
        "vllm:a one",
        "vllm:a 1.2.3",
        'vllm:a{x="1} 1.0',
        'vllm:a{x="1"y="2"} 1.0',
        "vllm:a{x=1} 1.0",
        'vllm:a{x="1",,} 1.0',
        "garbage",
        "",
        "# no help",
    ],
)
def test_what_is_no_sample_of_its_family_is_left_out(line: str) -> None:
    """One worker's nonsense must not spoil the page, nor speak for others."""
    text = f"# HELP vllm:a A.\n# TYPE vllm:a gauge\n{line}\nvllm:a 1.0\n"

    assert samples([Page("w", "decode", text)]) == {("vllm:a", "w:0"): 1.0}


@pytest.mark.parametrize(
    "head",
    [
        "# TYPE tokenwire_workers_ready gauge",
        "# TYPE vllm:a thing",
        "# HELP vllm:a A gauge without a type.",
        "# TYPE",
    ],
)
def test_samples_without_a_family_of_vllms_are_left_out(head: str) -> None:
    """Also those that would belong to the family before."""
    text = f"# TYPE vllm:b gauge\nvllm:b 2.0\n{head}\nvllm:a 1.0\nvllm:b 3.0\n"

    values = samples([Page("w", "decode", text)])
    assert values == {("vllm:b", "w:0"): 2.0}


def test_a_type_that_differs_is_left_out() -> None:
    """Two releases side by side: the first one's word counts."""
    gauge = "# TYPE vllm:a gauge\nvllm:a 1.0\n"
    counter = "# TYPE vllm:a counter\nvllm:a 2.0\n"
    pages = [Page("new", "decode", gauge), Page("old", "decode", counter)]

    assert samples(pages) == {("vllm:a", "new:0"): 1.0}


def test_names_and_values_of_labels_are_kept_as_they_are() -> None:
    """Quotes, commas, braces and other scripts; a worker's own worker_id is ours."""
    labels = (
        r'engine="0",model_name="a\"b,engine=\"7\"} c\\",worker_id="x",z="日\u2028"'
    )
    text = f"# TYPE vllm:a gauge\nvllm:a{{{labels}}} NaN\n"
    [family] = text_string_to_metric_families(merged([Page('w"\\\n', "decode", text)]))
    [sample] = family.samples

    assert sample.labels == {
        "engine": 'w"\\\n:0',
        "worker_id": 'w"\\\n',
        "role": "decode",
        "model_name": 'a"b,engine="7"} c\\',
        "z": "日\\u2028",
    }


def test_a_page_of_nothing_is_nothing() -> None:
    """No workers, or none with anything to say."""
    assert merged([]) == ""
    assert merged([Page("w", "decode", "")]) == ""
