"""A frontend's OpenAPI document, and what of its answers does not agree with it."""

from __future__ import annotations

import json
import re
from typing import Any, cast

import jsonschema_rs

__all__ = ["ApiDocument"]

Json = dict[str, Any]

ANYWHERE = {400, 404, 405, 417}
"""Statuses that come before any operation: this is no HTTP, no such path, not with this
method, not with these expectations. The document cannot list them; their form is the
same."""


def _named(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


ERROR = _named("ErrorAnswer")


class ApiDocument:
    """The document, ready to validate answers."""

    def __init__(self, document: Json) -> None:
        self.document = document
        self._validators: dict[str, jsonschema_rs.Validator] = {}
        self._paths = {
            re.compile(re.sub(r"\\\{.*?\\\}", ".+", re.escape(path))): path
            for path in document["paths"]
        }

    def answer_faults(
        self, method: str, path: str, status: int, content_type: str, text: str
    ) -> list[str]:
        """Return in what an answer differs from the document; best nothing."""
        response = self._response(method.lower(), path, status)
        if response is None:
            if status in ANYWHERE:
                return self._body_faults(ERROR, text)
            return [f"{method} {path}: status {status} is not in the document"]
        kind = content_type.partition(";")[0].strip()
        if kind not in response["content"]:
            return [f"{method} {path}: {status} has the type {content_type!r}"]
        if kind == "text/event-stream":
            return self._stream_faults(response["content"][kind], text)
        schema = response["content"][kind]["schema"]
        if kind == "application/json":
            return self._body_faults(schema, text)
        return []

    def request_faults(self, schema_name: str, body: object) -> list[str]:
        """Return in what a request's body differs from its type."""
        return self._faults(_named(schema_name), body)

    def _response(self, method: str, path: str, status: int) -> Json | None:
        path = path.partition("?")[0]
        name = path if path in self.document["paths"] else None
        for pattern, template in self._paths.items():
            if name is None and pattern.fullmatch(path):
                name = template
        operation = self.document["paths"].get(name, {}).get(method)
        if operation is None:
            return None
        return cast("Json | None", operation["responses"].get(str(status)))

    def _faults(self, schema: Json, value: object) -> list[str]:
        key = json.dumps(schema)
        validator = self._validators.get(key)
        if validator is None:
            validator = jsonschema_rs.Draft202012Validator(
                {**schema, "components": self.document["components"]}
            )
            self._validators[key] = validator
        return [
            f"{schema.get('$ref', 'list')} at {error.instance_path}: "
            f"{error.message:.300}"
            for error in validator.iter_errors(value)
        ]

    def _body_faults(self, schema: Json, text: str) -> list[str]:
        try:
            body = json.loads(text, parse_constant=_no_constant)
        except ValueError as error:
            return [f"{schema}: {error} in {text!r:.200}"]
        return self._faults(schema, body)

    def _stream_faults(self, content: Json, text: str) -> list[str]:
        data = content["schema"]["properties"]["data"]["anyOf"][1]["contentSchema"]
        chunk = data["anyOf"][0]
        *blocks, rest = re.sub(r"(?m)^(id|retry): .*\n", "", text).split("\n\n")
        if rest or not blocks or blocks[-1] != "data: [DONE]":
            return [f"the stream does not end with [DONE] but with {text[-200:]!r}"]
        faults: list[str] = []
        ended: dict[int, bool] = {}
        failed = False
        for block in blocks[:-1]:
            if failed or not block.startswith("data: "):
                faults.append(
                    f"this is no event, or one behind an error: {block!r:.200}"
                )
                continue
            data = block.removeprefix("data: ")
            failed = data.startswith('{"error"')
            faults += self._body_faults(ERROR if failed else chunk, data)
            if failed or faults:
                continue
            for choice in json.loads(data)["choices"]:
                if ended.get(choice["index"]):
                    faults.append(f"choice {choice['index']} goes on after its end")
                ended[choice["index"]] = choice["finish_reason"] is not None
        if not failed and not faults and not (ended and all(ended.values())):
            faults.append(f"choices without a finish_reason: {ended}")
        return faults


def _no_constant(name: str) -> None:
    msg = f"{name} is not JSON"
    raise ValueError(msg)
