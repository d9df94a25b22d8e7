"""Bodies: the JSON that they are, in steps where they are long."""

from __future__ import annotations

import json
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given, strategies as st

from tokenwire.frontend import body as module
from tokenwire.frontend.body import MAX_STEP_DEPTH, STEP_BYTES, decode_object
from tokenwire.frontend.errors import ApiError

numbers = st.integers(-(2**60), 2**60) | st.floats(
    allow_nan=False, allow_infinity=False
)
scalars = st.none() | st.booleans() | numbers | st.text(max_size=5)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=6)
        | st.lists(numbers, max_size=20)
        | st.dictionaries(st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=20,
)


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take everything apart, however short it is."""
    monkeypatch.setattr(module, "STEP_BYTES", 3)


@given(
    content=st.dictionaries(st.text(max_size=3), values, max_size=4),
    indent=st.none() | st.integers(0, 2),
    step=st.integers(1, 30),
)
def test_steps_give_what_one_step_gives(
    content: dict[str, Any], indent: int | None, step: int
) -> None:
    """Whatever is in a body, and wherever it is cut, it is the same JSON."""
    data = json.dumps(content, indent=indent).encode()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "STEP_BYTES", step)
        assert decode_object(data) == content


@given(data=st.text('{}[]",: 1a\\', max_size=12).map(lambda text: text.encode()))
def test_steps_refuse_what_one_step_refuses(data: bytes) -> None:
    """Broken JSON is refused in whatever step it is seen."""
    data = b'{"a":' + data

    def outcome(step: int) -> object:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "STEP_BYTES", step)
            try:
                return decode_object(data)
            except ApiError as error:
                return error.status

    assert outcome(2) == outcome(STEP_BYTES)


@pytest.mark.parametrize(
    "data", [b"[1, 2, 3]", b'"text text"', b"17171717", b"null     "]
)
@pytest.mark.usefixtures("small_steps")
def test_only_objects_are_bodies(data: bytes) -> None:
    """Anything else is a 400 that says so, in one step or several."""
    with pytest.raises(ApiError, match="must be a JSON object"):
        decode_object(data)


@pytest.mark.parametrize("size", [1, 100_000])
def test_the_last_of_equal_keys_counts(size: int) -> None:
    """As in every client's own parser."""
    data = b'{"a": 1, "pad": "%s", "a": 2}' % (b"x" * size)

    assert decode_object(data)["a"] == 2


@pytest.mark.parametrize("opening", [b'{"a":', b"["])
@pytest.mark.parametrize("depth", [200_000, 2_000_000])
def test_a_deep_nest_is_a_400(opening: bytes, depth: int) -> None:
    """Neither the parser's stack nor a step for each level is to be had."""
    with pytest.raises(ApiError, match=r"not valid JSON|opens more than") as caught:
        decode_object(b'{"a":' + opening * depth)

    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("bound", "limit", "element"),
    [("MAX_CONTAINERS", 1_000, "{}"), ("MAX_QUOTES", 2_000, '""')],
)
def test_few_bytes_do_not_become_many_objects(
    bound: str, limit: int, element: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The smallest values take a hundred times their bytes: their number is bounded."""
    monkeypatch.setattr(module, "MAX_CONTAINERS", 1_000)
    monkeypatch.setattr(module, bound, limit)
    some = ",".join([element] * 900)

    fits = decode_object(f'{{"a":[{some}]}}'.encode())
    assert len(cast("list[object]", fits["a"])) == 900
    with pytest.raises(ApiError, match=f"more than {limit}") as caught:
        decode_object(f'{{"a":[{some}],"b":[{some}]}}'.encode())

    assert caught.value.status == 400


LONG: dict[str, Any] = {
    "ids": {"prompt": list(range(100_000, 400_000))},
    "nested ids": {"nvext": {"token_data": list(range(100_000, 400_000))}},
    "prompts": {"prompt": [list(range(100_000, 120_000))] * 20},
    "messages": {"messages": [{"role": "user", "content": "abc"}] * 50_000},
    "parts": {
        "messages": [{"content": [{"type": "text", "text": "abc"}] * 50_000}],
    },
}


@pytest.mark.parametrize("case", LONG)
def test_no_step_is_long(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the scans for parts see more than a step at once, one for each level."""
    steps: list[int] = []
    decode = msgspec.json.decode

    def recorded(data: Any, **options: Any) -> Any:
        if not options:
            steps.append(len(data))
        return decode(data, **options)

    data = json.dumps(LONG[case]).encode()
    monkeypatch.setattr(msgspec.json, "decode", recorded)

    assert decode_object(data) == LONG[case]
    assert len(data) > 20 * STEP_BYTES
    assert max(steps) < 2 * STEP_BYTES
    assert len(LONG[case]) <= MAX_STEP_DEPTH


@pytest.mark.parametrize("pad", [0, STEP_BYTES])
@pytest.mark.parametrize(
    "value",
    [
        b'"\\ud800"',
        b'"\xff"',
        b"1" + b"0" * 5000,
        b"1e999",
        b"[NaN]",
        b'[{"a": "\xff"}]',
    ],
)
def test_a_value_that_is_none_is_named(value: bytes, pad: int) -> None:
    """A text that is no Unicode and a number that is none are told by their field."""
    data = b'{"pad": "%s", "a": 1, "b": %s, "c": 2}' % (b"x" * pad, value)

    with pytest.raises(ApiError, match="not valid JSON") as caught:
        decode_object(data)

    assert caught.value.param == "b"
