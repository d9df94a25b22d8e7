"""Packed ids and floats."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings, strategies as st

from tokenwire.protocol.errors import MalformedMessage
from tokenwire.protocol.tokens import (
    pack_floats,
    pack_ids,
    unpack_floats,
    unpack_ids,
)


def test_ids_are_little_endian_u32() -> None:
    """The byte order is fixed, whatever the machine."""
    assert pack_ids([1, 0x01020304, 2**32 - 1]) == bytes.fromhex(
        "01000000 04030201 ffffffff"
    )


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1)))
def test_ids_round_trip(token_ids: list[int]) -> None:
    """Every list of u32 comes back as it was."""
    assert unpack_ids(pack_ids(token_ids)) == token_ids


@settings(derandomize=True, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False)))
def test_floats_round_trip(values: list[float]) -> None:
    """Every list of f32 comes back as it was, infinities included."""
    assert unpack_floats(pack_floats(values)) == values


def test_floats_beyond_f32_become_infinite() -> None:
    """A logprob below f32's range is minus infinity, not an error."""
    assert unpack_floats(pack_floats([-1e300, 1e300])) == [-math.inf, math.inf]
    assert math.isnan(unpack_floats(pack_floats([math.nan]))[0])


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_ids_out_of_range_are_refused(token_id: int) -> None:
    """An id that is no u32 is not wrapped around."""
    with pytest.raises(OverflowError):
        pack_ids([token_id])


@pytest.mark.parametrize("num_bytes", [1, 2, 3, 5])
def test_half_items_are_malformed(num_bytes: int) -> None:
    """Bytes that are not whole items are refused, not cut."""
    with pytest.raises(MalformedMessage, match="whole number"):
        unpack_ids(b"x" * num_bytes)
    with pytest.raises(MalformedMessage, match="whole number"):
        unpack_floats(b"x" * num_bytes)
