"""The OpenAPI document: valid, complete, and made of the types that parse requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from tokenwire.frontend.answers import ErrorObject
from tokenwire.frontend.bounds import BOUNDS
from tokenwire.frontend.fields import ALIAS, DESCRIPTIONS, FORMS
from tokenwire.frontend.generate import PARAMS, GenerateParams
from tokenwire.frontend.nvext import SELECTORS
from tokenwire.frontend.openapi import ALIASED, openapi_document
from tokenwire.frontend.routes import ROUTES
from tokenwire.frontend.unsupported import UNSUPPORTED

DOCUMENT = openapi_document()
SCHEMAS: dict[str, Any] = DOCUMENT["components"]["schemas"]


def request_types() -> Iterator[tuple[str, str]]:
    """Yield the name of every type inside of requests, and each of its own fields."""
    requests = {request for route in ROUTES for request in route.requests}
    _, schemas = msgspec.json.schema_components({*requests, GenerateParams})
    for name, schema in schemas.items():
        for field in schema.get("properties", {}):
            if name != "GenerateParams" or field in PARAMS:
                yield name, field
    for request in requests & ALIASED:
        yield request.__name__, ALIAS


def known_to(table: dict[str, Any]) -> set[str]:
    """Return the keys of *table* that some type's field goes by."""
    found: set[str] = set()
    for struct, field in request_types():
        found |= {key for key in (f"{struct}.{field}", field) if key in table}
    return found


def test_the_document_is_valid() -> None:
    """By the rules of OpenAPI 3.1, all references included."""
    errors = [
        error.message for error in OpenAPIV31SpecValidator(DOCUMENT).iter_errors()
    ]

    assert errors == []


def test_every_request_field_is_described() -> None:
    """A field without its line in fields.py would be a name without a meaning."""
    missing = [
        f"{struct}.{field}"
        for struct, field in request_types()
        if field not in DESCRIPTIONS and f"{struct}.{field}" not in DESCRIPTIONS
    ]

    assert missing == [], "describe these in frontend/fields.py"
    for struct, field in request_types():
        assert SCHEMAS[struct]["properties"][field]["description"].endswith(".")


@pytest.mark.parametrize(
    "table", [DESCRIPTIONS, FORMS, BOUNDS], ids=["DESCRIPTIONS", "FORMS", "BOUNDS"]
)
def test_no_table_names_a_field_that_is_gone(table: dict[str, Any]) -> None:
    """What is described, formed or bounded is a field of a request."""
    assert set(table) - known_to(table) == set()


@pytest.mark.parametrize("field", BOUNDS)
def test_bounds_are_in_the_document(field: str) -> None:
    """Wherever the field is a number, its schema has the bound that is checked."""
    bound = BOUNDS[field]
    low = "exclusiveMinimum" if bound.above else "minimum"
    numbers = [
        branch.get("additionalProperties", branch)
        for struct, name in request_types()
        if field == f"{struct}.{name}"
        or (field == name and f"{struct}.{name}" not in BOUNDS)
        for branch in SCHEMAS[struct]["properties"][name]["anyOf"]
    ]
    bounded = [
        number for number in numbers if number.get("type") in {"integer", "number"}
    ]

    assert bounded
    for number in bounded:
        assert (number.get(low), number.get("maximum")) == (bound.low, bound.high)


@pytest.mark.parametrize("name", ["ChatRequest", "CompletionRequest"])
def test_refused_fields_are_in_the_document(name: str) -> None:
    """With the values that ask for nothing, and the reason."""
    for field, unsupported in UNSUPPORTED.items():
        schema = SCHEMAS[name]["properties"][field]
        assert unsupported.reason in schema["description"]
        assert all(value in schema["enum"] for value in unsupported.neutral)


def test_selectors_are_in_the_document() -> None:
    """``extra_fields`` lists them, and the answer's ``nvext`` has one key for each."""
    [items] = [
        branch["items"]
        for branch in SCHEMAS["Nvext"]["properties"]["extra_fields"]["anyOf"]
        if "items" in branch
    ]

    assert set(items["enum"]) == SELECTORS
    # What became of given turns is there with any of them; several versions with one.
    others = {"prefix", "weight_versions"}
    others |= {
        "token_offset",
        "seq",
        "generation",
        "checkpoint",
        "resume",
    }  # if it is resumable
    assert set(SCHEMAS["AnswerNvext"]["properties"]) == SELECTORS | others


def test_unknown_fields_are_forbidden_as_the_operator_says() -> None:
    """Request roots are closed unless unknown fields are to be ignored."""
    open_schemas = openapi_document(ignore_unknown_fields=True)["components"]["schemas"]

    for name in ("ChatRequest", "CompletionRequest"):
        assert SCHEMAS[name]["additionalProperties"] is False
        assert open_schemas[name]["additionalProperties"] is True


def test_every_failure_has_the_error_object() -> None:
    """All 4xx and 5xx but the probes' own 503; Retry-After where it is sent."""
    for path, operations in DOCUMENT["paths"].items():
        for operation in operations.values():
            for status, response in operation["responses"].items():
                if int(status) < 400 or (status == "503" and path in PROBES):
                    continue
                schema = response["content"]["application/json"]["schema"]
                assert schema == {"$ref": "#/components/schemas/ErrorAnswer"}
                retries = status in {"429", "503"}
                assert ("Retry-After" in response.get("headers", {})) is retries


PROBES = {"/health", "/ready"}


def test_the_error_object_has_openais_four_keys() -> None:
    """All of them, always."""
    assert set(ErrorObject.__struct_fields__) == {"message", "type", "param", "code"}
    assert set(SCHEMAS["ErrorObject"]["required"]) == set(ErrorObject.__struct_fields__)
