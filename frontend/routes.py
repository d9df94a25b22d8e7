"""What every route takes and answers, for ``/openapi.json`` and docs/api.md.

``server.py`` serves them; a test compares its router with this table.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from .answers import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
    Health,
    Live,
    Model,
    ModelList,
    Ready,
    Version,
)
from .generate import GenerateRequest
from .generation_answers import DeletedGeneration, KeptGeneration
from .schema import ChatRequest, CompletionRequest
from .token_answers import Detokenized, Generated, GeneratedChunk, Rendered, Tokenized
from .tokens import Detokenize, TokenizeChat, TokenizeText

__all__ = ["FAILURES", "ROUTES", "ListOf", "Route", "Struct"]

Struct = type[msgspec.Struct]

FAILURES = {
    400: "The request is wrong; param names the field.",
    403: "The checkpoint to go on from is not this client's, or altered.",
    404: "There is no such model, or nothing of this client's by that id.",
    408: "The body did not arrive in time.",
    409: "What is to be gone on with was begun otherwise; param names the difference.",
    410: "What was kept of a generation had to make room, or its time is over.",
    412: "Its ids are not those of the checkpoint.",
    413: "The body is above the operator's limit.",
    415: "The body is not application/json.",
    422: "It cannot be gone on with.",
    429: "This frontend serves, or lets wait, as many requests as it may.",
    500: "A bug; the log has it.",
    502: "A worker failed.",
    503: "No worker can take the request now, or soon.",
}
"""What an error's status says, in every answer that may have it."""

_RESUMING = (
    403,
    409,
    410,
    412,
    422,
)  # only with ``nvext.resume_from``, or ``resumable``
_RESUMABLE = tuple(FAILURES)
_GENERATING = tuple(status for status in FAILURES if status not in _RESUMING)
_KEPT = (400, 404, 409, 410, 429, 500, 503)
_COMPUTING = tuple(status for status in _GENERATING if status != 502)  # asks no worker


class ListOf(NamedTuple):
    """A list of one type."""

    item: Struct


class Route(NamedTuple):
    """One method of one path."""

    method: str
    path: str
    summary: str
    answers: dict[
        int, Struct | ListOf | str
    ]  # by status; a string is a media type, or empty
    failures: tuple[int, ...] = (500,)  # answered by an ``ErrorAnswer``
    requests: tuple[Struct, ...] = ()  # the body is one of these
    chunk: Struct | None = None  # of each event, when streamed
    follows: bool = False  # from a place in a stream on


ROUTES = (
    Route(
        "post",
        "/v1/chat/completions",
        "Go on with a conversation",
        {200: ChatCompletion},
        _RESUMABLE,
        (ChatRequest,),
        ChatCompletionChunk,
    ),
    Route(
        "post",
        "/v1/completions",
        "Go on with a text, or with token ids",
        {200: Completion},
        _RESUMABLE,
        (CompletionRequest,),
        CompletionChunk,
    ),
    Route(
        "get",
        "/v1/generations/{id}/stream",
        "Follow a generation that is kept, from behind the events that one has",
        {200: "text/event-stream", 204: ""},
        _KEPT,
        follows=True,
    ),
    Route(
        "get",
        "/v1/generations/{id}",
        "Describe it, with a checkpoint",
        {200: KeptGeneration},
        _KEPT,
    ),
    Route(
        "post",
        "/v1/generations/{id}/cancel",
        "End it; what it has stays kept",
        {200: KeptGeneration},
        _KEPT,
    ),
    Route(
        "delete",
        "/v1/generations/{id}",
        "End it, and have it forgotten",
        {200: DeletedGeneration},
        _KEPT,
    ),
    Route(
        "post",
        "/inference/v1/generate",
        "Go on with token ids, and return token ids",
        {200: Generated},
        _GENERATING,
        (GenerateRequest,),
        GeneratedChunk,
    ),
    Route(
        "post",
        "/v1/chat/completions/render",
        "Return what a chat request would ask of /inference/v1/generate",
        {200: Rendered},
        _COMPUTING,
        (ChatRequest,),
    ),
    Route(
        "post",
        "/v1/completions/render",
        "Return what a completion request would ask of /inference/v1/generate, by prompt",
        {200: ListOf(Rendered)},
        _COMPUTING,
        (CompletionRequest,),
    ),
    Route(
        "post",
        "/tokenize",
        "Return the ids of a text or a conversation",
        {200: Tokenized},
        _COMPUTING,
        (TokenizeText, TokenizeChat),
    ),
    Route(
        "post",
        "/detokenize",
        "Return the text of ids",
        {200: Detokenized},
        _COMPUTING,
        (Detokenize,),
    ),
    Route("get", "/v1/models", "List the served model", {200: ModelList}),
    Route("get", "/v1/models/{model}", "Describe it", {200: Model}, (404, 500)),
    Route(
        "get",
        "/health",
        "Tell whether generation can be served, and by whom",
        {200: Health, 503: Health},
    ),
    Route("get", "/live", "Tell that the process runs", {200: Live}),
    Route(
        "get",
        "/ready",
        "Tell whether generation can be served, with counts",
        {200: Ready, 503: Ready},
    ),
    Route("get", "/version", "Tell the release", {200: Version}),
    Route("get", "/metrics", "Return metrics for Prometheus", {200: "text/plain"}),
    Route("get", "/openapi.json", "Return this", {200: "application/json"}),
)
