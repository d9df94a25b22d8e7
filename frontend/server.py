"""The HTTP side: routes, errors in OpenAI's shape, health."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from importlib import metadata

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from tokenwire.protocol.messages import Role
from tokenwire.protocol.tracing import Tracing

from .access import BRIEF, Access, briefly, grant_of, identity_of
from .calls import Call, chat_call, completion_call
from .checks import check_request_id
from .config import Config
from .control import Kind
from .cors import Cors
from .engine_metrics import EngineMetrics
from .errors import ApiError, bad_request, internal_error
from .gauges import watch_workers
from .generate import GenerateRequest, generate_call
from .generations import Generations
from .hosts import hosts_for
from .intake import Intake, tenant_of, ticket_of
from .job import End
from .kept import owner_of
from .keys import Keys
from .ledger import Ledger
from .live import Live
from .metrics import CONTENT_TYPE, Metrics
from .models import ModelList
from .openapi import openapi_document
from .parsers import Parsers
from .policy import Policy
from .pool import Pool
from .quotas import Quotas
from .reading import parsed_body, typed_body
from .refusals import AT_ROOT, at_root, in_our_words
from .replay import CHAT, COMPLETIONS, Replays
from .resume_keys import ResumeKeys
from .resuming import Client
from .schema import (
    ChatRequest,
    CompletionRequest,
)
from .session import Session
from .share import Share
from .sse import OUTGOING, Outgoing
from .tokenizer import TextModel
from .tokens import detokenize, render_chat, render_completion, tokenize
from .trails import Trails, route_of

__all__ = ["Server"]

_log = logging.getLogger(__name__)

REQUEST_ID = "X-Request-Id"
SESSION_ID = "X-Session-ID"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Check = Callable[[int | None, int | None], None]  # of priority and n
Prepare = Callable[[Client, bytes, Check], Awaitable[Call]]
PlainAnswer = Callable[[bytes, TextModel, Pool, Policy], Awaitable[bytes]]

_PLAIN_ROUTES: dict[str, PlainAnswer] = {
    "/tokenize": tokenize,
    "/detokenize": detokenize,
    "/v1/chat/completions/render": render_chat,
    "/v1/completions/render": render_completion,
}


class Server:
    """The routes and what they share."""

    def __init__(
        self,
        config: Config,
        model: TextModel,
        pool: Pool,
        metrics: Metrics,
        started: int,  # Unix seconds
        parsers: Parsers | None = None,
        keys: Keys | None = None,
        share: Share | None = None,
        *,
        ledger: Ledger | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self._trails = Trails(config.observability, tracing)
        self._config = config
        self._share = share
        self._policy = replace(
            config.policy,
            parsers=parsers,
            parser_failed=metrics.parser_failed,
            resume_keys=keys.resume if keys is not None else ResumeKeys(),
            checkpoint_life_s=config.resume.checkpoint_life_s,
        )
        self._model = model
        self._pool = pool
        self._metrics = metrics
        self.models = ModelList(pool, started)
        self._openapi_json: bytes | None = None  # made when first asked for
        self.intake = Intake(config, pool, metrics)
        self._replays = Replays(pool, model, self._policy)
        self._generations = Generations(
            self._replays, pool, config, self.intake, metrics
        )
        self._engine_metrics = EngineMetrics(lambda: pool.links, metrics)
        watch_workers(metrics, pool)
        self._access: Access | None = None
        if keys is not None and keys.api is not None:
            quotas = Quotas(
                ledger or Ledger.create(), metrics.key_used, metrics.key_tokens
            )
            self._access = Access(keys.api, quotas, metrics)
        self.live = Live(config, pool, self.intake, metrics, share)

    def application(self) -> web.Application:
        """Return the aiohttp application."""
        config = self._config
        has_guard = self._access is not None or config.access.tls is not None
        app = web.Application(
            middlewares=self.around(config.host, has_guard=has_guard),
            client_max_size=config.max_body_bytes,
        )
        if config.access.cors_origins:
            cors = Cors(config.access.cors_origins)
            app.middlewares.append(cors.preflight)
            app.on_response_prepare.append(cors.allow)
        if self._access is not None:
            app.middlewares.append(self._access.guard)
            app.on_response_prepare.append(self._access.tell_limits)
        app[OUTGOING] = Outgoing()
        app[AT_ROOT] = at_root(has_page=config.ui)
        app.router.add_post(CHAT, self._chat)
        app.router.add_post(COMPLETIONS, self._completions)
        app.router.add_post("/inference/v1/generate", self._tokens_out)
        for path, answer in _PLAIN_ROUTES.items():
            app.router.add_post(path, partial(self._plain, answer))
        self._generations.add_routes(app.router)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{model:.+}", self._one_model)
        self._add_probes(app.router)
        app.router.add_get("/version", self._version)
        app.router.add_get("/openapi.json", self._openapi)
        if config.ui:
            self.live.add_to(app)
        return app

    def probes(self) -> web.Application:
        """Return what ``--metrics-listen`` serves, without a key."""
        host, _ = self._config.access.metrics_listen or ("", 0)
        app = web.Application(middlewares=self.around(host, has_guard=False))
        if self._access is not None:
            app.middlewares.append(briefly)
        self._add_probes(app.router)
        return app

    def around(self, host: str, *, has_guard: bool) -> list[Middleware]:
        """Return what is around the routes of each listener, outermost first.

        Args:
            host: Where it listens.
            has_guard: Whether it asks for a key, or has a certificate: a page whose name
                points here has neither.
        """
        hosts = (
            None if has_guard else hosts_for(host, self._config.access.allowed_hosts)
        )
        guards = [] if hosts is None else [hosts.guard]
        return [self._trails.leave, self.errors, *guards]

    def _add_probes(self, router: web.UrlDispatcher) -> None:
        router.add_get("/health", self.health)
        router.add_get("/live", self._live)
        router.add_get("/ready", self._ready)
        router.add_get("/metrics", self._serve_metrics)

    # --- generation ----------------------------------------------------------------

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, self._chat_call)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, self._completion_call)

    async def _chat_call(self, client: Client, body: bytes, check: Check) -> Call:
        parsed = await parsed_body(body, ChatRequest, self._model, self._policy)
        check(parsed.request.priority, parsed.request.n)
        known = await self._replays.known(parsed.request, client)
        call = await chat_call(
            parsed, self._model, self._pool, self._policy, client, known
        )
        call.keep(CHAT, body, owner_of(client.authorization))
        return call

    async def _completion_call(self, client: Client, body: bytes, check: Check) -> Call:
        parsed = await parsed_body(body, CompletionRequest, self._model, self._policy)
        check(parsed.request.priority, parsed.request.n)
        known = await self._replays.known(parsed.request, client)
        call = await completion_call(
            parsed, self._model, self._pool, self._policy, client, known
        )
        call.keep(COMPLETIONS, body, owner_of(client.authorization))
        return call

    async def _tokens_out(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, self._tokens_call)

    async def _tokens_call(self, client: Client, body: bytes, check: Check) -> Call:
        del client
        parsed = await typed_body(body, GenerateRequest, self._model, self._policy)
        check(parsed.priority, None)
        return await generate_call(parsed, self._model, self._pool)

    async def _generate(
        self, request: web.Request, prepare: Prepare
    ) -> web.StreamResponse:
        intake = self.intake
        with intake.serving(request) as visit:
            grant = grant_of(request)
            identity = identity_of(request, grant)
            client = Client(identity)
            tenant = tenant_of(request, identity)
            session_id = request.headers.get(SESSION_ID)
            headers = _echoed(request)
            trail = self._trails.of(request)
            body = await intake.body(request, visit)
            trail.stage("tokenize")

            def check(priority: int | None, num_choices: int | None) -> None:
                if grant is not None:
                    grant.check_priority(priority or 0)
                intake.check(tenant, priority, num_choices)

            async with intake.large.preparing(len(body)):
                call = await prepare(client, body, check)
                await call.look_ahead(self._pool, self._model.threads)
            jobs = [job for job, _ in call.jobs]
            trail.prepared(route_of(request), call.response_id, self._pool.model, jobs)
            self._trails.asked(trail, body)
            del body
            intake.parsed(visit)
            if grant is not None:
                grant.prompt(call.num_prompt_tokens)
            if session_id:
                call.of_session(session_id)
            ticket = ticket_of(tenant, call)

            def on_end(end: End) -> None:
                trail.ends.append(end)
                intake.ended(ticket, well=end.error is None)

            session = Session(call, self._pool, self._metrics, on_end, visit.began_at)
            visit.runs(session, ticket)
            if call.client_request_id is not None:
                headers.setdefault(REQUEST_ID, call.client_request_id)
            if call.resumable is not None:
                headers |= call.resumable.headers
            try:
                await intake.turn(ticket)
                trail.stage("")
                intake.give_up[session.give_up] = None
                self._metrics.prompt_tokens.inc(call.num_prompt_tokens)
                if not call.stream:
                    return await session.whole(headers)
                timeout_s = self._config.client_write_timeout_s
                return await session.streamed(request, headers, timeout_s)
            finally:
                intake.give_up.pop(session.give_up, None)
                session.close()
                trail.num_tokens = session.num_tokens
                intake.leave(ticket, session.num_tokens)
                if grant is not None and ticket.admitted_at:
                    grant.output(
                        call.num_prompt_tokens, session.num_made, session.num_let_go
                    )
                elif grant is not None:  # it had no turn
                    grant.give_back(call.num_prompt_tokens)

    async def _plain(self, answer: PlainAnswer, request: web.Request) -> web.Response:
        """Answer what no worker is asked about."""
        with self.intake.serving(request) as visit:
            body = await self.intake.body(request, visit)
            async with self.intake.large.preparing(len(body)):
                body = await answer(body, self._model, self._pool, self._policy)
            return web.Response(
                body=body, content_type="application/json", headers=_echoed(request)
            )

    # --- the rest ------------------------------------------------------------------

    async def _models(self, request: web.Request) -> web.Response:
        del request
        return web.Response(body=self.models.all(), content_type="application/json")

    async def _one_model(self, request: web.Request) -> web.Response:
        body = self.models.one(request.match_info["model"])
        return web.Response(body=body, content_type="application/json")

    async def _version(self, request: web.Request) -> web.Response:
        del request
        return _json({"version": metadata.version("tokenwire")})

    async def _live(self, request: web.Request) -> web.Response:
        del request
        return _json({"status": "live"})

    def is_ready(self) -> bool:
        """Return whether this process can serve a request."""
        return self._pool.ready and not self.intake.draining

    def _any_is_ready(self) -> bool:
        """The same of this frontend: where one process cannot, connections go to others."""
        return self.is_ready() or (self._share is not None and self._share.is_ready())

    async def _ready(self, request: web.Request) -> web.Response:
        del request
        ready = self._any_is_ready()
        workers = {role.value: len(self._pool.usable(role)) for role in Role}
        return _json({"ready": ready, "workers": workers}, 200 if ready else 503)

    async def health(self, request: web.Request) -> web.Response:
        """Answer ``/health``: whether it can serve, and each worker's state."""
        ready = self._any_is_ready()
        body: dict[str, object] = {"status": "ok" if ready else "unavailable"}
        if not request.get(BRIEF):
            body["instances"] = self._pool.instances()
            if self._share is not None:
                body["processes"] = self._share.seats()
        return _json(body, 200 if ready else 503)

    async def _serve_metrics(self, request: web.Request) -> web.Response:
        del request
        # First the workers': how their answers came is counted.
        engines = await self._engine_metrics.page()
        share = self._share
        own = self._metrics.exposition() if share is None else await share.page()
        return web.Response(body=own + engines, headers={"Content-Type": CONTENT_TYPE})

    def own_page(self, kind: Kind) -> bytes:
        """Return what this process has of a kind, for the page of all."""
        return self.live.own() if kind == "live" else self._metrics.exposition()

    async def _openapi(self, request: web.Request) -> web.Response:
        del request
        if self._openapi_json is None:
            document = openapi_document(
                ignore_unknown_fields=self._policy.ignore_unknown_fields,
                needs_keys=self._access is not None,
            )
            self._openapi_json = msgspec.json.encode(document)
        return web.Response(body=self._openapi_json, content_type="application/json")

    @web.middleware
    async def errors(
        self, request: web.Request, handler: Handler
    ) -> web.StreamResponse:
        """Answer every failure in OpenAI's shape, and count every response."""
        response: web.StreamResponse
        try:
            response = await handler(request)
        except (ApiError, web.HTTPException) as error:
            # Its frames know who keeps it: else a cycle, with all that was asked for.
            error.__traceback__ = None
            if isinstance(error, web.HTTPException):
                limit = self._config.max_body_bytes
                response = self._failure(request, in_our_words(error, request, limit))
            else:
                response = self._failure(request, error)
        except web.RequestPayloadError as error:
            failed = bad_request(f"the body cannot be read: {error}")
            response = self._failure(request, failed)
        except ConnectionError:
            raise  # the client left; aiohttp takes it from here
        except Exception:  # noqa: BLE001 - the one place where a bug becomes a 500
            _log.exception("%s %s failed", request.method, request.path)
            response = self._failure(request, internal_error())
        self._metrics.responded(route_of(request), response.status)
        return response

    def _failure(self, request: web.Request, error: ApiError) -> web.Response:
        self._metrics.failed(error.code or error.kind)
        self._trails.of(request).failed(error)
        response = web.Response(
            status=error.status,
            body=error.body(),
            content_type="application/json",
            headers={**error.headers, **_echoed(request, check=False)},
        )
        if error.status == HTTPStatus.REQUEST_TIMEOUT:
            response.force_close()  # the rest of the body is not waited for
        return response


def _echoed(request: web.Request, *, check: bool = True) -> dict[str, str]:
    """Return the headers that repeat the client's request id.

    Raises:
        ApiError: 400, the id has another form, and *check*.
    """
    value = request.headers.get(REQUEST_ID)
    if value is None:
        return {}
    try:
        check_request_id(value, REQUEST_ID)
    except ApiError:
        if check:
            raise
        return {}
    return {REQUEST_ID: value}


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(
        status=status,
        body=msgspec.json.encode(value),
        content_type="application/json",
    )
