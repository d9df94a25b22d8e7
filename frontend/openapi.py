"""The OpenAPI document: what ``/openapi.json`` says of every route.

Made from the types that parse requests (``schema``), from those that describe answers
(``answers``), and from the tables of bounds, descriptions and refused fields, so that
a new field is in it by itself. A new route is to be listed in ``routes``.
"""

from __future__ import annotations

import copy
import re
from importlib import metadata
from typing import Any

import msgspec

from .access import OPEN_ROUTES
from .answers import ErrorAnswer
from .bounds import BOUNDS, REQUEST_ID_FORM, Bound
from .fields import ALIAS, FORMS, describe
from .generate import PARAMS, GenerateParams, GenerateRequest
from .nvext import SELECTORS, Nvext
from .routes import FAILURES, ROUTES, ListOf, Route, Struct
from .schema import ChatRequest, CompletionRequest
from .unsupported import UNSUPPORTED, Unsupported

__all__ = ["ALIASED", "openapi_document"]

Json = dict[str, Any]

ALIASED = {ChatRequest, CompletionRequest}
"""The requests whose ``return_token_ids`` is an alias, and no field of their own."""

_KEYED = {
    401: "The API key is missing, or none of this operator's.",
    429: "The API key has reached one of its limits.",
}

_REFERENCE = "#/components/schemas/{name}"


def openapi_document(
    *, ignore_unknown_fields: bool = False, needs_keys: bool = False
) -> Json:
    """Return the document.

    Args:
        ignore_unknown_fields: Whether requests may have fields that nobody knows.
        needs_keys: Whether they need an API key.
    """
    paths: dict[str, Json] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method] = _operation(route)
    if needs_keys:
        _lock(paths)
    scheme = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "tokenwire",
            "version": metadata.version("tokenwire"),
            "description": "OpenAI's API, with exact token ids.",
        },
        "paths": paths,
        "components": {
            **({"securitySchemes": scheme} if needs_keys else {}),
            "schemas": _schemas(ignore_unknown_fields=ignore_unknown_fields),
            "headers": {
                "RequestId": {
                    "description": "The request's own, if it has one.",
                    "schema": {"type": "string", "pattern": f"^{REQUEST_ID_FORM}$"},
                },
                "RetryAfter": {
                    "description": "Seconds after which to try again.",
                    "schema": {"type": "string", "pattern": "^[0-9]+$"},
                },
            },
        },
    }


def _lock(paths: dict[str, Json]) -> None:
    """Say of every route but the open ones that it needs a key, which may have limits."""
    for path in paths.keys() - OPEN_ROUTES:
        for operation in paths[path].values():
            operation["security"] = [{"key": []}]
            for status, text in _KEYED.items():
                content = {"application/json": {"schema": _of(ErrorAnswer)}}
                failure: Json = {"description": text, "content": content}
                operation["responses"].setdefault(str(status), failure)


# --- operations --------------------------------------------------------------------------


def _operation(route: Route) -> Json:
    operation: Json = {
        "summary": route.summary,
        "operationId": re.sub(r"\W+", "_", route.method + route.path).strip("_"),
        "parameters": [
            {
                "name": name,
                "in": "path",
                "required": True,
                "schema": {"type": "string", "minLength": 1},
            }
            for name in re.findall(r"{(\w+)}", route.path)
        ],
        "responses": {
            str(status): response
            for status, response in sorted(
                {**_answers(route), **_failures(route)}.items()
            )
        },
    }
    if route.follows:
        operation["parameters"] += [
            {
                "name": "starting_after",
                "in": "query",
                "required": False,
                "description": "The number of the last event that the client has.",
                "schema": {"type": "integer", "minimum": 0},
            },
            {
                "name": "Last-Event-ID",
                "in": "header",
                "required": False,
                "description": "The same as the event's id, where that is not given.",
                "schema": {"type": "string"},
            },
        ]
    if route.requests:
        operation["parameters"].append(
            {
                "name": "X-Request-Id",
                "in": "header",
                "required": False,
                "description": "Echoed; it never names anything inside.",
                "schema": {"type": "string", "pattern": f"^{REQUEST_ID_FORM}$"},
            }
        )
        if route.chunk is not None:
            operation["parameters"].append(
                {
                    "name": "X-Session-ID",
                    "in": "header",
                    "required": False,
                    "description": "Requests of one session prefer the same workers.",
                    "schema": {"type": "string"},
                }
            )
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": _any(route.requests)}},
        }
    return operation


def _answers(route: Route) -> dict[int, Json]:
    responses: dict[int, Json] = {}
    for status, answer in route.answers.items():
        content: Json = {}
        if answer == "":
            pass  # it has no body
        elif isinstance(answer, str):
            text = {"type": "object" if answer.endswith("json") else "string"}
            content[answer] = {"schema": text}
        elif isinstance(answer, ListOf):
            items = {"type": "array", "items": _of(answer.item)}
            content["application/json"] = {"schema": items}
        else:
            content["application/json"] = {"schema": _of(answer)}
        if route.chunk is not None:
            content["text/event-stream"] = {"schema": _event(route.chunk)}
        good = "Done." if status < 300 else "Not now."
        responses[status] = _response(route, good, content)
    return responses


def _event(chunk: Struct) -> Json:
    """Return the schema of a stream's events, each as an object of its fields."""
    data = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": [_of(chunk), _of(ErrorAnswer)]},
    }
    return {
        "type": "object",
        "description": f"Each event's data is a {chunk.__name__}, or an ErrorAnswer if "
        "the stream fails on the way; then comes one whose data is [DONE].",
        "properties": {
            "data": {"anyOf": [{"const": "[DONE]"}, data]},
            "id": {
                "type": "string",
                "description": "Of resumable answers: the generation's id and a number.",
            },
        },
        "required": ["data"],
    }


def _failures(route: Route) -> dict[int, Json]:
    content = {"application/json": {"schema": _of(ErrorAnswer)}}
    responses = {
        status: _response(route, FAILURES[status], content)
        for status in route.failures
        if status not in route.answers
    }
    for status in responses.keys() & {429, 503}:
        retry: Json = {"$ref": "#/components/headers/RetryAfter"}
        responses[status].setdefault("headers", {})["Retry-After"] = retry
    return responses


def _response(route: Route, description: str, content: Json) -> Json:
    response: Json = {"description": description, "content": content}
    if route.requests:
        request_id = {"$ref": "#/components/headers/RequestId"}
        response["headers"] = {"X-Request-Id": request_id}
    return response


def _any(kinds: tuple[Struct, ...]) -> Json:
    return _of(kinds[0]) if len(kinds) == 1 else {"anyOf": [_of(one) for one in kinds]}


def _of(kind: Struct) -> Json:
    return {"$ref": _REFERENCE.format(name=kind.__name__)}


# --- types -------------------------------------------------------------------------------


def _schemas(*, ignore_unknown_fields: bool) -> dict[str, Json]:
    """Return the schemas of all types, by name."""
    answers: list[Struct] = [ErrorAnswer]
    requests: list[Struct] = []
    for route in ROUTES:
        answers += [
            answer.item if isinstance(answer, ListOf) else answer
            for answer in (*route.answers.values(), route.chunk)
            if answer is not None and not isinstance(answer, str)
        ]
        requests += route.requests
    schemas = _components([*requests, GenerateParams])
    for name, schema in schemas.items():
        for field, form in schema.get("properties", {}).items():
            schema["properties"][field] = _field(name, field, form)
    for kind in requests:
        root = schemas[kind.__name__]
        if kind in ALIASED:
            alias = {"anyOf": [{"type": "boolean"}, {"type": "null"}]}
            root["properties"][ALIAS] = _field(kind.__name__, ALIAS, alias)
        for field, unsupported in UNSUPPORTED.items():
            root["properties"][field] = _refused(unsupported)
        root["additionalProperties"] = ignore_unknown_fields
    _narrow_params(schemas)
    nvext = schemas[Nvext.__name__]
    nvext["additionalProperties"] = False
    selectors = {"type": "array", "items": {"enum": sorted(SELECTORS)}}
    nvext["properties"]["extra_fields"]["anyOf"][0] = selectors
    return {**schemas, **_components(answers)}


def _narrow_params(schemas: dict[str, Json]) -> None:
    """Leave those of ``sampling_params`` that count; others are ignored there."""
    params = schemas[GenerateParams.__name__]
    params["properties"] = {name: params["properties"][name] for name in sorted(PARAMS)}
    field = schemas[GenerateRequest.__name__]["properties"]["sampling_params"]
    field |= {"$ref": _REFERENCE.format(name=GenerateParams.__name__)}
    del field["type"]


def _components(kinds: list[Struct]) -> dict[str, Json]:
    _, schemas = msgspec.json.schema_components(
        dict.fromkeys(kinds), ref_template=_REFERENCE
    )
    for schema in schemas.values():
        text = schema.get("description", "")
        schema["description"] = text.partition("\n")[0].replace("``", "")
    return schemas


def _field(struct: str, field: str, form: Json) -> Json:
    """Return the schema of a request's field: its type, bound and meaning."""
    default = form.pop("default", None)
    branches: list[Json] = form.get("anyOf", [form])
    described = FORMS.get(f"{struct}.{field}", FORMS.get(field))
    if described is not None:
        nulls = [branch for branch in branches if branch.get("type") == "null"]
        branches = [*copy.deepcopy(described), *nulls]
        form = {"anyOf": branches} if len(branches) > 1 else {**branches[0]}
    bound = BOUNDS.get(f"{struct}.{field}", BOUNDS.get(field))
    if bound is not None:
        for branch in branches:
            _bound(branch.get("additionalProperties", branch), bound)
    meaning = describe(struct, field)
    if meaning is not None:
        form = {**form, "description": meaning}
    if default is not None:  # null says "not given" everywhere
        form["default"] = default
    return form


def _bound(number: Json, bound: Bound) -> None:
    if number.get("type") not in {"integer", "number"}:
        return
    if bound.low is not None:
        number["exclusiveMinimum" if bound.above else "minimum"] = bound.low
    if bound.high is not None:
        number["maximum"] = bound.high


def _refused(unsupported: Unsupported) -> Json:
    """Return the schema of a field that may only ask for nothing."""
    values: list[object] = [None]
    for one in unsupported.neutral:
        if one not in values:  # 1 and 1.0 are one number in JSON
            values.append(one)
    return {
        "enum": values,
        "description": f"Not supported: {unsupported.reason}.",
    }
