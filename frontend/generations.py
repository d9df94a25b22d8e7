"""Kept generations over HTTP: follow one, look at it, cancel it, forget it.

Any frontend serves them, whichever began the generation. What is not a client's own (by
its API key) does not exist for it.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from aiohttp import web

from tokenwire.protocol.messages import Trace

from .access import grant_of, identity_of
from .config import Config
from .errors import bad_request
from .generation_answers import (
    DeletedGeneration,
    FinishReason,
    KeptGeneration,
    Status,
)
from .intake import Intake
from .journals import ENDED
from .metrics import Metrics
from .pool import Pool
from .replay import ALL, Replay, Replays, resumable_of
from .resuming import Client
from .session import Session
from .trail import CURRENT, Trail

__all__ = ["GENERATIONS", "Generations", "client_of"]

GENERATIONS = "/v1/generations/{id}"
STREAM = f"{GENERATIONS}/stream"

LAST_EVENT_ID = "Last-Event-ID"
"""What an EventSource sends when it comes back: the last ``id:`` that it has seen."""


class Generations:
    """The routes.

    Args:
        replays: Finds generations.
        pool: The workers.
        config: The operator's.
        intake: Counts what is served.
        metrics: Where it counts.
    """

    def __init__(
        self,
        replays: Replays,
        pool: Pool,
        config: Config,
        intake: Intake,
        metrics: Metrics,
    ) -> None:
        self._replays = replays
        self._pool = pool
        self._config = config
        self._intake = intake
        self._metrics = metrics

    def add_routes(self, router: web.UrlDispatcher) -> None:
        """Add the routes."""
        router.add_get(STREAM, self._stream, allow_head=False)
        router.add_get(GENERATIONS, self._look, allow_head=False)
        router.add_post(f"{GENERATIONS}/cancel", self._cancel)
        router.add_delete(GENERATIONS, self._delete)

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        generation_id = request.match_info["id"]
        with self._intake.serving(request) as visit:
            after = told_seq(generation_id, request.headers, request.query)
            trail = CURRENT.get() or Trail(Trace())
            trail.stage("resume")
            replay = await self._read(request)
            # As it was read: since it was found, it may have ended.
            if replay.kept.state == ENDED and (after or replay.is_given_up):
                told = await replay.told(after)
                if after > told.num_events:
                    msg = (
                        f"this generation has had {told.num_events} events, not {after}"
                    )
                    raise bad_request(msg, "starting_after")
                if after == told.num_events:
                    return web.Response(status=204)
            call = await replay.call(after)
            self._metrics.replayed(replay.kept.state)
            jobs = [job for job, _ in call.jobs]
            trail.prepared(STREAM, call.response_id, self._pool.model, jobs)
            trail.stage("")
            session = Session(call, self._pool, self._metrics, trail.ends.append)
            visit.runs(session)
            intake, headers = self._intake, resumable_of(call).headers
            intake.give_up[session.give_up] = None
            try:
                timeout_s = self._config.client_write_timeout_s
                return await session.streamed(
                    request, headers, timeout_s, replay.follow
                )
            finally:
                trail.num_tokens = session.num_tokens
                intake.give_up.pop(session.give_up, None)

    async def _look(self, request: web.Request) -> web.Response:
        with self._intake.serving(request):
            replay = await self._read(request)
            return _json(await self._described(replay))

    async def _cancel(self, request: web.Request) -> web.Response:
        client = client_of(request)
        with self._intake.serving(request) as visit:
            await self._intake.body(request, visit)  # which says nothing
            found = await self._replays.find(request.match_info["id"], client)
            await self._replays.journals.cancel(found)
            replay = await self._replays.read(found, client)
            return _json(await self._described(replay))

    async def _delete(self, request: web.Request) -> web.Response:
        generation_id = request.match_info["id"]
        with self._intake.serving(request):
            found = await self._replays.find(generation_id, client_of(request))
            await self._replays.journals.delete(found)
            return _json(DeletedGeneration(id=generation_id))

    async def _read(self, request: web.Request) -> Replay:
        client = client_of(request)
        found = await self._replays.find(request.match_info["id"], client)
        return await self._replays.read(found, client)

    async def _described(self, replay: Replay) -> KeptGeneration:
        told = await replay.told()
        kept, context = replay.kept, replay.context
        finish_reason: FinishReason | None = None
        status: Status = "running"
        if told.end is not None and told.end.error is None:
            finish_reason = msgspec.convert(told.end.finish_reason, FinishReason)
            status = "completed"
        elif kept.state == ENDED:
            status = "cancelled"
        return KeptGeneration(
            id=context.response_id,
            created=context.created,
            status=status,
            finish_reason=finish_reason,
            is_followed=kept.is_followed,
            on_disconnect="continue" if kept.outlives else "cancel",
            seq=told.num_events,
            prompt_tokens=context.num_prompt_tokens,
            completion_tokens=told.num_tokens,
            checkpoint=told.checkpoint,
        )


def client_of(request: web.Request) -> Client:
    """Return who asks."""
    return Client(identity_of(request, grant_of(request)))


def told_seq(
    generation_id: str, headers: Mapping[str, str], query: Mapping[str, str]
) -> int:
    """Return the number of the last event that a client has; 0: none.

    Raises:
        ApiError: 400, it is no number, or of another generation.
    """
    given, param = query.get("starting_after"), "starting_after"
    header = headers.get(LAST_EVENT_ID)
    if given is None and header is not None:
        param = LAST_EVENT_ID
        name, _, given = header.rpartition(":")
        if name != generation_id:
            msg = f"{param} {header!r:.160} is not of generation {generation_id!r:.80}"
            raise bad_request(msg, param)
    if given is None:
        return 0
    is_number = given.isascii() and given.isdigit() and len(given) <= MAX_DIGITS
    if not is_number or int(given) > ALL:
        msg = f"{param} must be the number of an event, not {given!r:.80}"
        raise bad_request(msg, param)
    return int(given)


MAX_DIGITS = 19
"""As many as ALL has; thousands are more than ``int`` takes."""


def _json(value: msgspec.Struct) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(value), content_type="application/json"
    )
