"""The live page in a real browser, watched: what it logs, and what it asks for where."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from axe_playwright_python.base import AXE_FILE_PATH
from playwright.async_api import (
    Browser,
    Locator,
    Page,
    Request,
    Response,
    Route,
    async_playwright,
)

__all__ = ["Watched", "chromium", "opened"]

WAIT_MS = 30_000
"""Any one condition of a page; far above what it takes."""

SIZES = {"narrow": (390, 844), "wide": (1600, 1000)}


@asynccontextmanager
async def chromium() -> AsyncGenerator[Browser]:
    """Run the system's Chromium."""
    path = shutil.which(os.environ.get("TOKENWIRE_CHROMIUM", "chromium"))
    assert path, "there is no chromium: `make check-ui` says what to do"
    # Its sandbox does not start for root, or in most containers.
    arguments = ["--no-sandbox", "--disable-dev-shm-usage"]
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=arguments)
        try:
            yield browser
        finally:
            await browser.close()


@dataclass
class Watched:
    """An open page, and what went wrong in it."""

    page: Page
    url: str
    faults: list[str] = field(default_factory=list[str])
    headers: dict[str, str] = field(
        default_factory=dict[str, str]
    )  # of the page itself

    def at(self, element: str, **state: str) -> Locator:
        """Return the element of an id, with data or attributes as given."""
        attributes = "".join(
            f"[{name.replace('_', '-')}='{value}']" for name, value in state.items()
        )
        return self.page.locator(f"#{element}{attributes}")

    async def is_live(self) -> None:
        """Return when moments come."""
        await self.at("status", data_state="live").wait_for()

    async def send(self, text: str, **fields: str) -> None:
        """Fill the playground's form, and send it."""
        for name, value in {"message": text, **fields}.items():
            element = self.at(name.replace("_", "-"))
            if name == "on_break":
                await element.select_option(value)
            else:
                await element.fill(value)
        await self.at("send").click()

    async def has_verdict(self, *states: str) -> str:
        """Wait for one of these; return what it says."""
        either = ", ".join(f"#verdict[data-state='{state}']" for state in states)
        await self.page.locator(either).wait_for()
        return str(await self.at("verdict").inner_text())

    async def chip_ids(self, box: str = "tokens") -> list[int]:
        """Return the ids that are shown."""
        texts = await self.page.locator(f"#{box} .chip-id").all_text_contents()
        return [int(text) for text in texts]

    async def violations(self) -> list[str]:
        """Return what axe-core objects to, in words."""
        await self.page.evaluate(AXE_FILE_PATH.read_text() + "; 0")
        found: dict[str, Any] = await self.page.evaluate("axe.run()")
        assert len(found["passes"]) > 20  # it has looked
        return [
            f"{one['id']}: {node['html'][:120]} {node['failureSummary']}"
            for one in found["violations"]
            for node in one["nodes"]
        ]

    async def overflow(self) -> int:
        """Return by how many pixels the page is wider than its window."""
        root = "document.documentElement"
        return int(await self.page.evaluate(f"{root}.scrollWidth - {root}.clientWidth"))


@asynccontextmanager
async def opened(
    browser: Browser,
    url: str,
    size: str = "wide",
    scheme: Any = "light",
    motion: Any = "no-preference",
    routes: dict[str, Any] | None = None,
) -> AsyncGenerator[Watched]:
    """Open the page of the frontend at *url*; in the end nothing may have gone wrong.

    Args:
        browser: The browser.
        url: Of the frontend.
        size: ``narrow`` or ``wide``.
        scheme: The system's colours.
        motion: What the system says of it.
        routes: Answers of others than the frontend, by a glob of URLs.
    """
    width, height = SIZES[size]
    context = await browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme=scheme,
        reduced_motion=motion,
    )
    context.set_default_timeout(WAIT_MS)
    page = await context.new_page()
    watched = Watched(page, url)

    async def check(route: Route, request: Request) -> None:
        if request.url.startswith(f"{url}/"):
            await route.fallback()
        else:
            watched.faults.append(f"asks for {request.url}")
            await route.abort()

    for pattern, answer in (routes or {}).items():
        await page.route(pattern, answer)
    await page.route("**/*", check)
    page.on(
        "console",
        lambda said: (
            watched.faults.append(said.text)
            if said.type in {"error", "warning"}
            else None
        ),
    )
    page.on("pageerror", lambda error: watched.faults.append(str(error)))
    try:
        shown: Response | None = await page.goto(f"{url}/ui")
        assert shown is not None
        watched.headers = await shown.all_headers()
        yield watched
        assert not watched.faults
    finally:
        await context.close()
