"""The admin plane: a listener of its own, whose routes act on every worker.

Laws:
- Nothing but ``/health`` is answered without the key, where there is one.
- An action is answered when it has ended at every worker. If it failed at any, the
  answer is an error that names it and the state of each.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from tokenwire.protocol.admin import (
    Action,
    CollectiveRpc,
    Pause,
    PauseMode,
    Resume,
    Sleep,
    UpdateWeights,
    WakeUp,
    adapter_update,
)

from . import admin_answers as answers, admin_bodies as bodies
from .access import BRIEF, OPERATOR
from .admin_key import AdminKey
from .admin_settings import AdminSettings
from .errors import ApiError, bad_request, unavailable
from .expectation import go_on
from .fanout import Outcome, OwnPauses, everywhere, participants, standing
from .link import Link
from .listener import ignore_rest
from .metrics import Metrics
from .models import ModelList
from .pool import Pool
from .updates import Updates
from .workers import rl_workers

__all__ = ["MAX_BODY_BYTES", "AdminPlane"]

_log = logging.getLogger(__name__)

MAX_BODY_BYTES = 32 * 1024
"""Paths, names and the arguments of a call: they fit into one control message."""

BODY_TIMEOUT_S = 10.0
"""For one that fits into a packet or twenty."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Route = Callable[[web.Request, Sequence[Link]], Awaitable[web.Response]]

_FROM_PATH = "update_weights_from_path"
"""The method of Prime-RL's extension of vLLM's workers behind ``/update_weights``."""


class AdminPlane:
    """The routes of the admin plane.

    Args:
        settings: What the operator allows.
        key: What requests must have.
        pool: The workers.
        metrics: Where it counts.
        models: What ``/v1/models`` says.
        health: The handler of ``/health``, as on the other listener.
    """

    def __init__(
        self,
        settings: AdminSettings,
        key: AdminKey,
        pool: Pool,
        metrics: Metrics,
        models: ModelList,
        health: Handler,
    ) -> None:
        self._settings = settings
        self._key = key
        self._pool = pool
        self._metrics = metrics
        self._models = models
        self._health = health
        self._updates = Updates(pool.weights)
        self._own_pauses = OwnPauses()
        self._running: set[asyncio.Future[web.Response]] = set()

    def application(self, around: Sequence[Middleware]) -> web.Application:
        """Return the aiohttp application, with these middlewares around its own."""
        app = web.Application(
            middlewares=[*around, self._authorized], client_max_size=MAX_BODY_BYTES
        )
        posts: dict[str, Route] = {
            "/pause": self._pause,
            "/resume": self._resume,
            "/update_weights": self._update_weights,
            "/init_broadcaster": self._init_broadcaster,
            "/load_lora_adapter": partial(self._load_lora, in_place=True),
            "/v1/load_lora_adapter": partial(self._load_lora, in_place=False),
            "/unload_lora_adapter": self._unload_lora,
            "/v1/unload_lora_adapter": self._unload_lora,
            "/collective_rpc": self._collective_rpc,
            "/reset_prefix_cache": self._reset_prefix_cache,
            "/sleep": self._sleep,
            "/wake_up": self._wake_up,
        }
        gets: dict[str, Handler] = {
            "/is_paused": self._is_paused,
            "/is_sleeping": self._is_sleeping,
            "/weight_version": self._weight_version,
            "/weight_info": self._weight_version,
            "/health": self._health,
            "/v1/models": self._list_models,
        }
        for prefix in ("", "/v1/rl/workers/{worker_id}"):
            for path, route in posts.items():
                app.router.add_post(prefix + path, partial(self._act, route))
            for path, handler in gets.items():
                app.router.add_get(prefix + path, handler)
        app.router.add_get("/v1/rl/workers", self._workers)
        return app

    @web.middleware
    async def _authorized(
        self, request: web.Request, handler: Handler
    ) -> web.StreamResponse:
        is_health = request.method == "GET" and request.path == "/health"
        fits = self._key.fits(request.headers.get("Authorization"))
        request[OPERATOR] = self._key.is_set and fits
        if is_health:
            request[BRIEF] = not fits
        elif not fits:
            self._metrics.admin_called("any", "unauthorized")
            msg = "the admin plane needs its key: Authorization: Bearer KEY"
            headers = {"WWW-Authenticate": "Bearer", **ignore_rest(request)}
            raise ApiError(401, msg, code="invalid_api_key", headers=headers)
        if not self._key.is_set and "Origin" in request.headers:
            # Without a key, being on this machine is the permission; a page in a
            # browser on it has that, too, and says where it comes from.
            msg = "the admin plane without a key takes nothing from browsers"
            raise ApiError(403, msg)
        return await handler(request)

    # --- the actions ---------------------------------------------------------------

    async def _act(self, route: Route, request: web.Request) -> web.Response:
        """Have *route* act on the workers that the path names; all, if it names none."""
        goes_on = route in (self._resume, self._wake_up)
        links = (standing if goes_on else participants)(self._pool.links)
        worker_id = request.match_info.get("worker_id")
        if worker_id is not None:
            links = [link for link in links if link.worker_id == worker_id]
            if not links:
                raise ApiError(404, f"there is no worker {worker_id!r:.200} now")
        if not links:
            raise self._pool.no_worker()
        # It goes on if its client leaves: half of it done would be worse.
        task = asyncio.ensure_future(route(request, links))
        self._running.add(task)
        task.add_done_callback(self._ran)
        return await asyncio.shield(task)

    def _ran(self, task: asyncio.Future[web.Response]) -> None:
        """Forget an action; its failure may have nobody to be told to any more."""
        self._running.discard(task)
        if not task.cancelled():
            task.exception()

    async def _pause(self, request: web.Request, links: Sequence[Link]) -> web.Response:
        action = bodies.pause(request.query)
        return await self._all(links, action, {"status": "paused"})

    async def _resume(
        self, request: web.Request, links: Sequence[Link]
    ) -> web.Response:
        del request
        return await self._all(links, Resume(), {"status": "resumed"})

    async def _update_weights(
        self, request: web.Request, links: Sequence[Link]
    ) -> web.Response:
        return await self._update(links, await _body(request))

    async def _update(self, links: Sequence[Link], body: bytes) -> web.Response:
        """Update the weights, as one update for all who get the same."""
        action, mode, what = bodies.update_weights(
            body, current=max(links, key=_update).status.weight_version
        )
        with self._updates.numbered("", what, map(_update, links)) as update:
            action = msgspec.structs.replace(action, update=update)
            return await self._update_between(links, action, mode)

    async def _update_between(
        self, links: Sequence[Link], action: UpdateWeights, mode: PauseMode | None
    ) -> web.Response:
        """Update the weights; around it, pause what is not paused."""
        settings = self._settings
        left = self._own_pauses.left(self._pool.links)
        if len(links) < len(participants(self._pool.links)):
            left = [link for link in left if link in links]
        paused: list[Link] = []
        if not any(link.status.paused for link in links if link not in left):
            paused = list(dict.fromkeys([*links, *left]))
            pause = Pause(mode or settings.update_mode, clear_cache=False)
            before = await everywhere(links, lambda _: pause, settings.timeout_s)
            if not all(outcome.is_done for outcome in before):
                # Where another action is under way, a pause may be the user's.
                own = [one.link for one in before if one.done.error_kind != "busy"]
                await self._own_pauses.resume(own, settings.timeout_s)
                return self._answer("update_weights", before, {})
        outcomes = await everywhere(links, lambda _: action, settings.update_timeout_s)
        if paused:
            after = await self._own_pauses.resume(paused, settings.timeout_s)
            if all(outcome.is_done for outcome in outcomes):
                outcomes = after
        return self._answer("update_weights", outcomes, {"status": "ok"})

    async def _init_broadcaster(
        self, request: web.Request, links: Sequence[Link]
    ) -> web.Response:
        given = bodies.broadcaster(await _body(request))
        offsets: dict[Link, int] = {}
        offset = given.rank_offset
        for link in links:
            offsets[link] = offset
            offset += link.card.world_size if link.card is not None else 1

        def action(link: Link) -> Action:
            return bodies.broadcaster_action(given, offsets[link])

        outcomes = await everywhere(links, action, self._settings.timeout_s)
        return self._answer("init_broadcaster", outcomes, {"status": "ok"})

    async def _load_lora(
        self, request: web.Request, links: Sequence[Link], *, in_place: bool
    ) -> web.Response:
        action = bodies.load_lora(await _body(request), in_place=in_place)
        name, served = action.lora_name, self._pool.weights.adapters
        lacking = [link for link in links if adapter_update(link.status, name) is None]
        answer: object = {"status": "ok"}
        if not in_place:
            answer = f"Success: LoRA adapter '{name}' added successfully."
        have = [adapter_update(link.status, name) for link in links]
        with self._updates.numbered(name, action.lora_path, have) as update:
            if lacking and not action.load_inplace:
                # Sent again: who has it keeps it, the others get the same version.
                links, update = lacking, served.get(name, update)
            action = msgspec.structs.replace(action, update=update)
            return await self._all(links, action, answer)

    async def _unload_lora(
        self, request: web.Request, links: Sequence[Link]
    ) -> web.Response:
        action = bodies.unload_lora(await _body(request))
        name = action.lora_name
        # Who has been restarted since does not have it: that is what is wanted.
        loaded = [link for link in links if link.update_of(name) is not None]
        answer: object = {"status": "ok"}
        if request.path.startswith("/v1/unload"):
            answer = f"Success: LoRA adapter '{name}' removed successfully."
        return await self._all(loaded or links, action, answer)

    async def _collective_rpc(
        self, request: web.Request, links: Sequence[Link]
    ) -> web.Response:
        body = await _body(request)
        action, timeout_s = bodies.collective_rpc(body)
        if action.method == _FROM_PATH and len(action.args) == 1:
            # As Prime-RL updates the workers that it finds by ``/v1/rl/workers``.
            given = {"weight_dir": action.args[0]}
            return await self._update(links, msgspec.json.encode(given))
        if not self._settings.allow_collective_rpc and not _is_broadcaster(action):
            msg = (
                "collective_rpc calls any method of the engine: it is off, "
                "--admin-allow-collective-rpc turns it on"
            )
            raise ApiError(403, msg, code="not_allowed")
        limit_s = min(timeout_s or self._settings.timeout_s, self._settings.timeout_s)
        outcomes = await everywhere(links, lambda _: action, max(limit_s, 0.1))
        results = [
            one
            for outcome in outcomes
            for one in outcome.done.result.get("results", [])
        ]
        return self._answer("collective_rpc", outcomes, {"results": results})

    async def _reset_prefix_cache(
        self, request: web.Request, links: Sequence[Link]
    ) -> web.Response:
        action = bodies.reset_prefix_cache(request.query)
        return await self._all(links, action, {"success": True})

    async def _sleep(self, request: web.Request, links: Sequence[Link]) -> web.Response:
        action = bodies.sleep(request.query)
        answer = {"status": "sleeping", "level": action.level}
        return await self._all(links, action, answer)

    async def _wake_up(
        self, request: web.Request, links: Sequence[Link]
    ) -> web.Response:
        tags = bodies.wake_tags(request.query.getall("tags", []))
        outcomes = await everywhere(
            links, lambda _: WakeUp(tags), self._settings.timeout_s
        )
        is_awake = not any(outcome.link.status.sleep_level for outcome in outcomes)
        status = "awake" if is_awake else "sleeping"
        return self._answer("wake_up", outcomes, {"status": status, "tags": tags})

    async def _all(
        self, links: Sequence[Link], action: Action, answer: object
    ) -> web.Response:
        """Do the same at all *links*, and return *answer* if that has worked."""
        outcomes = await everywhere(links, lambda _: action, self._settings.timeout_s)
        if isinstance(action, Pause | Resume | Sleep):
            self._own_pauses.forget(outcomes)
        name = str(action.__struct_config__.tag)
        return self._answer(name, outcomes, answer)

    def _answer(
        self, name: str, outcomes: Sequence[Outcome], answer: object
    ) -> web.Response:
        how = answers.verdict(outcomes)
        self._metrics.admin_called(name, how)
        if how == "ok":
            _log.info("admin: %s done at %d workers", name, len(outcomes))
            return answers.done(answer)
        _log.error("admin: %s", answers.failure_text(name, outcomes))
        return answers.failure(name, outcomes)

    # --- what is so ----------------------------------------------------------------

    async def _is_paused(self, request: web.Request) -> web.Response:
        links = self._seen(request)
        return answers.json_answer(
            {"is_paused": any(link.status.paused for link in links)}
        )

    async def _is_sleeping(self, request: web.Request) -> web.Response:
        links = self._seen(request)
        return answers.json_answer(
            {"is_sleeping": any(link.status.sleep_level for link in links)}
        )

    async def _weight_version(self, request: web.Request) -> web.Response:
        links = self._seen(request)
        served = [link for link in links if not link.is_outdated] or links
        return answers.json_answer({"weight_version": served[0].weight_version})

    def _seen(self, request: web.Request) -> list[Link]:
        worker_id = request.match_info.get("worker_id")
        links = [
            link
            for link in participants(self._pool.links)
            if worker_id in {None, link.worker_id}
        ]
        if not links:
            raise unavailable("no worker is connected")
        return links

    async def _list_models(self, request: web.Request) -> web.Response:
        del request
        return web.Response(body=self._models.all(), content_type="application/json")

    async def _workers(self, request: web.Request) -> web.Response:
        base = f"{request.scheme}://{request.host}/v1/rl/workers"
        return answers.json_answer(rl_workers(self._pool, base))


async def _body(request: web.Request) -> bytes:
    """Return the body, which is JSON or nothing.

    Raises:
        ApiError: 415, it is something else; 408, it takes too long.
    """
    go_on(request)
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            body = await request.read()
    except TimeoutError as error:
        msg = f"the body has not arrived within {BODY_TIMEOUT_S:g} s"
        raise ApiError(408, msg, code="request_timeout") from error
    if body and request.content_type != "application/json":
        msg = f"the body must be application/json, not {request.content_type}"
        raise ApiError(415, msg)
    if not body:
        raise bad_request("the body is missing: it must be a JSON object")
    return body


def _update(link: Link) -> int:
    return link.status.update


def _is_broadcaster(action: CollectiveRpc) -> bool:
    return action.method == "init_broadcaster"
