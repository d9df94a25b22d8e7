"""Token ids on the wire: packed little-endian u32, four bytes an id."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Sequence
from struct import Struct

from .errors import MalformedMessage

__all__ = [
    "TOKEN_BYTES",
    "pack_floats",
    "pack_ids",
    "unpack_floats",
    "unpack_id",
    "unpack_ids",
]

TOKEN_BYTES = 4
"""Bytes of one packed id. Vocabularies are below 2**32; vLLM's ids are int32."""

_SWAP = sys.byteorder != "little"

unpack_id: Callable[[bytes], tuple[int]] = Struct("<I").unpack
"""Returns the one id in ``TOKEN_BYTES`` of a ``pack_ids`` result."""


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """Return *token_ids* as packed little-endian u32.

    Raises:
        OverflowError: An id is negative or not below 2**32.
    """
    packed = array("I", token_ids)
    if _SWAP:
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(packed: bytes) -> list[int]:
    """Return the ids of a ``pack_ids`` result.

    Raises:
        MalformedMessage: The length is not a whole number of ids.
    """
    if len(packed) == TOKEN_BYTES:  # one token of a stream: half the time
        return list(unpack_id(packed))
    _check_whole(packed)
    values = array("I")
    values.frombytes(packed)
    if _SWAP:
        values.byteswap()
    return values.tolist()


def pack_floats(values: Sequence[float]) -> bytes:
    """Return *values* as packed little-endian f32; logprobs are f32 in the engine.

    A number beyond f32 becomes an infinity of its sign.
    """
    packed = array("f", values)
    if _SWAP:
        packed.byteswap()
    return packed.tobytes()


def unpack_floats(packed: bytes) -> list[float]:
    """Return the numbers of a ``pack_floats`` result.

    Raises:
        MalformedMessage: The length is not a whole number of f32.
    """
    _check_whole(packed)
    values = array("f")
    values.frombytes(packed)
    if _SWAP:
        values.byteswap()
    return values.tolist()


def _check_whole(packed: bytes) -> None:
    if len(packed) % TOKEN_BYTES:
        msg = f"{len(packed)} bytes are not a whole number of 4-byte items"
        raise MalformedMessage(msg)
