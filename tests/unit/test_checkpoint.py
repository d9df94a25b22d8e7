"""The checkpoint: its hashes, its one JSON, and what is no checkpoint."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import jsonschema_rs
import msgspec
import pytest
from checkpoint_schema import PATH, rendered

from support.checkpoints import a_checkpoint
from tokenwire.frontend.checkpoint import (
    canonical_json,
    check_hashes,
    ids_sha256,
    json_sha256,
    read_checkpoint,
)
from tokenwire.frontend.errors import ApiError


def body() -> dict[str, Any]:
    """Return a checkpoint as a client has it."""
    return dict(json.loads(msgspec.json.encode(a_checkpoint())))


def test_ids_are_hashed_as_little_endian_u32() -> None:
    """So that any language can do it; the known digest is of these eight bytes."""
    data = bytes([1, 0, 0, 0, 0x70, 0x11, 0x01, 0x00])

    assert ids_sha256([1, 70_000]) == hashlib.sha256(data).hexdigest()
    assert ids_sha256([]) == hashlib.sha256().hexdigest()


def test_canonical_json_is_one_for_one_value() -> None:
    """Keys in order, no spaces, UTF-8, nulls written."""
    value = {"b": [1, 2.5, None], "a": {"é": True}}

    assert canonical_json(value) == '{"a":{"é":true},"b":[1,2.5,null]}'.encode()
    assert json_sha256({"a": 1, "b": 2}) == json_sha256({"b": 2, "a": 1})
    assert json_sha256({"a": 1}) != json_sha256({"a": 2})
    assert b'"integrity":null' in canonical_json(a_checkpoint())


def test_a_client_may_write_it_in_its_own_way() -> None:
    """Order, spaces, escapes and numbers as other languages write them."""
    given = body()
    given["sampling"]["temperature"] = 1  # JavaScript knows no 1.0
    text = json.dumps(dict(reversed(given.items())), indent=2)

    again = read_checkpoint(json.loads(text))

    assert again == a_checkpoint()
    assert canonical_json(again) == canonical_json(a_checkpoint())


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("object", "generation"),
        ("version", 2),
        ("scope", "agent"),
        ("identity.id", "../x"),
        ("identity.root", "a" * 129),
        ("identity.more", 1),
        ("contract.model", None),
        ("contract.tokenizer_sha256", "AB" * 32),
        ("state.output.ids.0", -1),
        ("state.output.ids.1", 2**32),
        ("state.output.ids.2", True),
        ("state.output.len", 1.5),
        ("state.rng.kind", "dice"),
        ("sampling.temperature", "hot"),
    ],
)
def test_what_is_no_checkpoint_is_refused_by_its_field(path: str, value: Any) -> None:
    """400, with the path as ``param``."""
    given: Any = body()
    *parents, name = path.split(".")
    inner = given
    for one in parents:
        inner = inner[one]
    inner[int(name) if name.isdecimal() else name] = value

    with pytest.raises(ApiError) as caught:
        read_checkpoint(given)

    error = caught.value
    assert (error.status, error.code) == (400, "invalid_resume")
    assert error.param is not None
    assert error.param.startswith("nvext.resume_from.checkpoint")
    assert parents[0] in error.param if parents else True


@pytest.mark.parametrize("given", [None, 1, "x", [], {}])
def test_other_json_is_refused(given: Any) -> None:
    """Of any kind."""
    with pytest.raises(ApiError) as caught:
        read_checkpoint(given)

    assert caught.value.code == "invalid_resume"


def test_ids_must_have_their_hash() -> None:
    """412 for the output, 409 for the prompt; one changed id is enough."""
    whole = a_checkpoint()
    check_hashes(whole.state)
    output, prompt = whole.state.output, whole.state.prompt
    replace = msgspec.structs.replace

    for bad in (
        replace(output, ids=[70_000, 4, 6]),
        replace(output, ids=[70_000, 4]),
        replace(output, len=2),
    ):
        with pytest.raises(ApiError) as caught:
            check_hashes(replace(whole.state, output=bad))
        assert (caught.value.status, caught.value.code) == (412, "output_hash_mismatch")
    for other in (replace(prompt, ids=[1, 3]), replace(prompt, len=3)):
        with pytest.raises(ApiError) as caught:
            check_hashes(replace(whole.state, prompt=other))
        assert (caught.value.status, caught.value.code) == (409, "prompt_mismatch")
    check_hashes(replace(whole.state, prompt=replace(prompt, ids=None)))


def test_the_schema_is_fresh_and_fits() -> None:
    """It is what `make docs` makes of the types, and accepts what they write."""
    assert PATH.read_text() == rendered(), "run `make docs`"
    validator = jsonschema_rs.validator_for(json.loads(PATH.read_text()))

    assert validator.is_valid(body())
    for path in ("integrity", "state", "more"):
        assert not validator.is_valid({**body(), path: {}})
