"""Counters of the event loop: shown as the Prometheus library shows its own."""

from __future__ import annotations

from prometheus_client import (
    CollectorRegistry,
    Counter,
    disable_created_metrics,
    generate_latest,
)

from tokenwire.frontend.metrics import Counters
from tokenwire.frontend.tallies import Tally


def test_a_tally_is_shown_as_the_librarys_counter() -> None:
    """Byte by byte: without a count yet, without labels, with texts to be escaped."""
    disable_created_metrics()  # type: ignore[no-untyped-call]
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    for name, labels in (("a", ()), ("b", ()), ("c", ("x", "y")), ("d", ("x",))):
        counter = Counter(name, f"What {name} is.", labels, registry=theirs)
        tally = Tally(name, f"What {name} is.", labels)
        ours.register(Counters(tally))
        if name == "b":
            counter.inc(2.5)
            tally.inc(2.5)
        if name == "c":
            for values in (("1", 'a"\n\\b'), ("1", ""), ("0", "zero"), ("1", "")):
                counter.labels(*values).inc()
                tally.labels(*values).inc()
            counter.labels("later", "never")
            tally.labels("later", "never")

    assert generate_latest(ours) == generate_latest(theirs)
