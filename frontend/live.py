"""The live page and its data: ``/ui``, ``/ui/state`` and ``/ui/events``.

Laws:
- A moment is looked at only while somebody asks, and once for all who watch.
- Watchers are bounded, and one that has left, or reads nothing, costs nothing.
- The page is a few fixed files: no path of a client's is ever opened.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from importlib import metadata

import msgspec
from aiohttp import web

from .access import key_name_of
from .config import Config
from .errors import ApiError, overloaded
from .events import first_of
from .flows import Flows
from .intake import Intake
from .live_files import add_files
from .metrics import Metrics
from .pool import Pool
from .share import Share
from .snapshot import Frontend, Process, process_view, snapshot_of
from .sse import EventStream

__all__ = ["MAX_WATCHERS", "TICK_S", "Live"]

TICK_S = 0.25
"""Between two moments: what moves looks alive, and a look at thousands of requests takes
a few milliseconds."""

MAX_WATCHERS = 16
"""Of one process. Each costs some tens of kB a second; a wall of screens has fewer."""

MAX_WATCHERS_OF_KEY = 4
"""Of one API key: it could else keep all others' pages, and the operator's, dark."""

SHARE = 20
"""Looking takes one part in so many of this process's time at most: where a look at very
many requests takes long, moments are further apart."""

FLOWS_LIFE_S = 3.0
"""For so long after the last look what goes where is still counted: a page that is loaded
anew, or another process's, goes on with the same counts."""

_processes = msgspec.json.Decoder(list[Process])


class Live:
    """What the page shows of this frontend.

    Args:
        config: The frontend's settings.
        pool: The workers.
        intake: What is being served.
        metrics: Its own.
        share: The other processes; None: there are none.
    """

    def __init__(
        self,
        config: Config,
        pool: Pool,
        intake: Intake,
        metrics: Metrics,
        share: Share | None,
    ) -> None:
        self._pool = pool
        self._intake = intake
        self._metrics = metrics
        self._share = share
        self._write_timeout_s = config.client_write_timeout_s
        self._about = Frontend(
            version=metadata.version("tokenwire"),
            model=config.served_model_name,
            frontend=config.frontend_id,
            process=0 if share is None else share.process,
            num_processes=1 if share is None else share.num_processes,
            ttft_bounds=metrics.time_to_first_token.bounds,
            itl_bounds=metrics.inter_token_latency.bounds,
        )
        self._watching = Counter[str | None]()  # by the name of their API key
        self._closing = asyncio.Event()
        self._moment: tuple[float, bytes] = (float("-inf"), b"")
        self._looking = asyncio.Lock()  # by one at a time, for all who wait
        self._looked_at = 0.0
        self._took_s = 0.0  # the last look, without what the others took
        self._forgetting: asyncio.TimerHandle | None = None

    def add_to(self, app: web.Application) -> None:
        """Add the routes to the frontend's *app*."""
        add_files(app.router)
        app.router.add_get("/ui/state", self._state, allow_head=False)
        app.router.add_get("/ui/events", self._events, allow_head=False)
        app.on_shutdown.append(self._close)

    def own(self) -> bytes:
        """Return what this process has for itself, as JSON, for another one's page."""
        return msgspec.json.encode(self._own())

    @property
    def num_watchers(self) -> int:
        """Pages that are watched in this process."""
        return self._watching.total()

    async def _state(self, request: web.Request) -> web.Response:
        del request
        return web.Response(
            body=await self._now(),
            content_type="application/json",
            headers={"Cache-Control": "no-store"},
        )

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """Stream moments, until the client has left or we stop."""
        if self.num_watchers >= MAX_WATCHERS:
            msg = f"{MAX_WATCHERS} pages are watched here already"
            raise overloaded(msg, "too_many_watchers")
        key = key_name_of(request)
        if key is not None and self._watching[key] >= MAX_WATCHERS_OF_KEY:
            msg = f"{MAX_WATCHERS_OF_KEY} pages are watched with the key {key} already"
            raise overloaded(msg, "too_many_watchers")
        self._watching[key] += 1
        try:
            headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
            stream = EventStream(request, headers)
            await stream.open(_event(await self._now()))
            try:
                while not self._closing.is_set():
                    pause_s = max(TICK_S, SHARE * self._took_s)
                    await first_of(self._closing, timeout_s=pause_s)
                    stream.send(_event(await self._now()))
                    # Who reads slowly misses moments, and has no pile of them.
                    await stream.drained(self._write_timeout_s)
                return await stream.close(self._write_timeout_s)
            except TimeoutError:
                return stream.abort()
        finally:
            self._watching[key] -= 1
            self._watching += Counter()  # keeps what is above 0

    async def _close(self, app: web.Application) -> None:
        """Let watchers go: they would hold up the end of this process."""
        del app
        self._closing.set()
        if self._forgetting is not None:
            self._forgetting.cancel()

    async def _now(self) -> bytes:
        """Return this moment, or the last one if that has just been made."""
        async with self._looking:
            made_at, body = self._moment
            if time.monotonic() - made_at < TICK_S / 2:
                return body
            others = await self._others()
            begun_at = time.monotonic()
            processes = [*others, self._own()]
            moment = snapshot_of(
                self._about, processes, list(self._pool.links), round(time.time(), 3)
            )
            body = msgspec.json.encode(moment)
            made_at = time.monotonic()
            self._moment, self._took_s = (made_at, body), made_at - begun_at
            return body

    async def _others(self) -> list[Process]:
        """Return what the other processes have told.

        Those that cannot be asked are not among them, and the page says so.
        """
        if self._share is None:
            return []
        try:
            told = _processes.decode(await self._share.page("live"))
        except ApiError:
            return []
        return [one for one in told if one.process != self._about.process]

    def _own(self) -> Process:
        now = self._looked_at = time.monotonic()
        if self._pool.flows is None:
            self._pool.flows = Flows()
        if self._forgetting is None:
            self._forget_later(FLOWS_LIFE_S)
        return process_view(
            self._about.process,
            self._intake.visits,
            self._intake.gate,
            self._pool.links,
            self._metrics,
            self._pool.flows,
            now,
            ready=self._pool.ready and not self._intake.draining,
            draining=self._intake.draining,
        )

    def _forget_later(self, delay_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._forgetting = loop.call_later(delay_s, self._forget)

    def _forget(self) -> None:
        """Count no more where nobody has looked for a while."""
        self._forgetting = None
        left_s = self._looked_at + FLOWS_LIFE_S - time.monotonic()
        if left_s > 0:
            self._forget_later(left_s)
        else:
            self._pool.flows = None
            self._moment = (float("-inf"), b"")


def _event(body: bytes) -> bytes:
    return b"data: %s\n\n" % body
