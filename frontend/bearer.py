"""The key in an ``Authorization`` header (RFC 6750)."""

from __future__ import annotations

__all__ = ["bearer", "bearer_or_not"]

_SCHEME = "bearer"


def bearer_or_not(authorization: str | None) -> tuple[str, bool]:
    """Return what the header *authorization* gives, and whether as a key for its bearer.

    For who compares whatever is given, so that time tells nothing.
    """
    scheme, _, given = (authorization or "").partition(" ")
    return given.strip(), scheme.lower() == _SCHEME


def bearer(authorization: str | None) -> str:
    """Return the key in the header *authorization*, right or wrong; empty: none."""
    given, is_bearer = bearer_or_not(authorization)
    return given if is_bearer else ""
