"""A body's bytes to a typed request; a long one does not hold the event loop."""

from __future__ import annotations

from .body import decode_object
from .policy import Policy
from .schema import Parsed, R, S, parse_body, typed
from .tokenizer import TextModel

__all__ = ["parsed_body", "typed_body"]


async def parsed_body(
    body: bytes, kind: type[R], model: TextModel, policy: Policy
) -> Parsed[R]:
    """Return the request of a text route, its alias folded.

    Raises:
        ApiError: 400, whatever is wrong with the body.
    """
    ignore_unknown = policy.ignore_unknown_fields
    return await model.threads.of_body(
        body, lambda: parse_body(body, kind, ignore_unknown=ignore_unknown)
    )


async def typed_body(body: bytes, kind: type[S], model: TextModel, policy: Policy) -> S:
    """Return the request of a token route.

    Raises:
        ApiError: 400, whatever is wrong with the body.
    """
    ignore_unknown = policy.ignore_unknown_fields
    return await model.threads.of_body(
        body, lambda: typed(decode_object(body), kind, ignore_unknown=ignore_unknown)
    )
