"""The alias and the selectors of ``nvext``."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import asdict

from tokenwire.frontend.errors import ApiError
from tokenwire.frontend.nvext import (
    SELECTOR,
    Nvext,
    Placement,
    Selection,
    fold_alias,
    select,
)
from tokenwire.frontend.schema import ChatRequest, CompletionRequest, parse_body

MINIMAL = b'{"prompt":"a"%s}'


def folded(body: dict[str, Any]) -> dict[str, Any]:
    """Return *body* after its alias was folded."""
    fold_alias(body)
    return body


def test_true_becomes_the_selector() -> None:
    """``return_token_ids: true`` is dropped and selects the trio."""
    assert folded({"return_token_ids": True}) == {"nvext": {"extra_fields": [SELECTOR]}}


def test_the_selector_is_there_once() -> None:
    """Alias and selector together select it once, and keep the others."""
    body = {
        "return_token_ids": True,
        "nvext": {"extra_fields": ["timing", SELECTOR], "token_data": [1]},
    }

    assert folded(body) == {
        "nvext": {"extra_fields": ["timing", SELECTOR], "token_data": [1]}
    }


@pytest.mark.parametrize("value", [False, None])
def test_false_and_null_do_nothing(value: object) -> None:
    """The key goes, and nothing is selected."""
    assert folded({"return_token_ids": value}) == {}


@pytest.mark.parametrize("value", ["true", 1, 0, [], {}, 1.0])
def test_other_types_are_refused(value: object) -> None:
    """Only a boolean or null is one; the error names the field."""
    with pytest.raises(ApiError) as caught:
        fold_alias({"return_token_ids": value})

    assert caught.value.status == 400
    assert caught.value.param == "return_token_ids"


def test_the_trio() -> None:
    """The selector brings ids, prompt ids and kv_transfer_params."""
    assert select(Nvext([SELECTOR])) == Selection(
        completion_token_ids=True, prompt_token_ids=True, kv_transfer_params=True
    )


@pytest.mark.parametrize(
    "field",
    [
        "prompt_token_ids",
        "kv_transfer_params",
        "worker_id",
        "timing",
        "stop_reason",
        "engine_data",
        "prompt_logprobs",
        "weight_version",
    ],
)
def test_single_selectors(field: str) -> None:
    """Each of the others selects only itself."""
    selection = select(Nvext([field]))

    chosen = {name for name, value in asdict(selection).items() if value}
    assert chosen == {field}
    assert selection.any_final


@pytest.mark.parametrize(
    ("placement", "by_alias", "native"),
    [
        (Placement.AUTO, True, Placement.VLLM),
        (Placement.AUTO, False, None),
        (Placement.NVEXT, True, None),
        (Placement.VLLM, False, Placement.VLLM),
        (Placement.SGLANG, True, Placement.SGLANG),
    ],
)
def test_native_places(
    placement: Placement, by_alias: bool, native: Placement | None
) -> None:
    """The operator decides; ``auto`` looks at how the ids were asked for."""
    nvext = Nvext([SELECTOR])

    assert select(nvext, placement, by_alias=by_alias).native is native
    assert select(None, placement) == Selection()


@pytest.mark.pitfall(13)
def test_unknown_selectors_are_refused_by_name() -> None:
    """The error names the unknown one and the known ones."""
    with pytest.raises(ApiError, match=r"banana.*completion_token_ids") as caught:
        select(Nvext(["banana", SELECTOR]))

    assert caught.value.param == "nvext.extra_fields"


def test_unknown_keys_are_refused_by_name() -> None:
    """A key of nvext that nothing would honour is a 400."""
    with pytest.raises(ApiError, match=r"banana.*extra_fields"):
        parse_body(MINIMAL % b',"nvext":{"banana":1}', CompletionRequest)


def test_unknown_root_fields_are_all_named() -> None:
    """A field is honoured or refused, never dropped in silence."""
    with pytest.raises(ApiError, match="another, banana"):
        parse_body(MINIMAL % b',"banana":1,"another":2', CompletionRequest)


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        (b',"max_tokens":"7"', "max_tokens"),
        (b',"max_tokens":true', "max_tokens"),
        (b',"temperature":"hot"', "temperature"),
        (b',"nvext":7', "nvext"),
        (b',"nvext":{"extra_fields":"x"}', "nvext.extra_fields"),
        (b',"stop":[1]', "stop[0]"),
        (b',"stream":"yes"', "stream"),
    ],
)
def test_wrong_types_name_their_field(extra: bytes, param: str) -> None:
    """A wrong type anywhere is a 400 whose param is the field."""
    with pytest.raises(ApiError) as caught:
        parse_body(MINIMAL % extra, CompletionRequest)

    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'"x"', b'{"prompt":"\xff"}', b'{"a":' * 5000, b"NaN"],
)
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    """Broken, deep, or other JSON is a 400."""
    with pytest.raises(ApiError) as caught:
        parse_body(body, CompletionRequest)

    assert caught.value.status == 400


def test_a_missing_field_is_named() -> None:
    """Chat without messages says so."""
    with pytest.raises(ApiError) as caught:
        parse_body(b"{}", ChatRequest)

    assert caught.value.param == "messages"
