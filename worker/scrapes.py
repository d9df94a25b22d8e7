"""Answers to frontends that ask what the engine measures."""

from __future__ import annotations

from tokenwire.protocol.messages import MetricsText

from .delivery import Delivery
from .exposition import Exposition
from .frontends import Frontend
from .timers import Timers

__all__ = ["MIN_SCRAPE_S", "Scrapes"]

MIN_SCRAPE_S = 0.5
"""A frontend that asks for metrics more often is not answered: its question is a few
bytes, the answer some 60 KB. Frontends of this release leave 1 s between two."""


class Scrapes:
    """Answers each ScrapeMetrics that does not come too soon.

    Args:
        exposition: What makes the text; None: there is nothing to say.
        delivery: The way to the frontends.
        timers: The clock.
    """

    def __init__(
        self, exposition: Exposition | None, delivery: Delivery, timers: Timers
    ) -> None:
        self.exposition = exposition
        self._delivery = delivery
        self._timers = timers

    def answer(self, frontend: Frontend) -> None:
        """Tell *frontend*, now or soon."""
        now = self._timers.time()
        if now - frontend.scraped_at < MIN_SCRAPE_S:
            return
        frontend.scraped_at = now

        def tell(text: str) -> None:
            self._delivery.send(frontend, MetricsText(text))

        if self.exposition is None:
            tell("")
        else:
            self.exposition.ask(frontend.identity, tell)
