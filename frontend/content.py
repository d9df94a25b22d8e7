"""The content of a message: a text, or OpenAI's list of parts, as far as it is text."""

from __future__ import annotations

from typing import Any, cast

from .errors import bad_request

__all__ = ["Content", "checked_content", "text_of"]

Content = str | list[dict[str, Any]] | None
"""As templates take it: each part is ``{"type": "text", "text": ...}``."""

_TEXT_KEYS = {
    "text": "text",
    "input_text": "text",  # of the Responses API, as vLLM takes them
    "output_text": "text",
    "refusal": "refusal",
}
"""Types of parts that are text, and the key that has it."""


def checked_content(content: object, where: str) -> Content:
    """Return a message's content, its parts as plain text parts.

    Args:
        content: As it came.
        where: The message's place in the body, for ``param``.

    Raises:
        ApiError: 400: neither a string nor a list, or a part that is no text.
    """
    if content is None or isinstance(content, str):
        return content
    param = f"{where}.content"
    if not isinstance(content, list):
        msg = f"{param} must be a string or a list of parts"
        raise bad_request(msg, param)
    return [_part(part, param) for part in cast("list[object]", content)]


def text_of(content: Content) -> str:
    """Return a content as one text, its parts on lines of their own, as in vLLM."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part["text"] for part in content)


def _part(part: object, param: str) -> dict[str, Any]:
    text: object = part  # a bare string is a text, too
    if isinstance(part, dict):
        fields = cast("dict[str, object]", part)
        kind = fields.get("type", "text")
        key = _TEXT_KEYS.get(kind) if isinstance(kind, str) else None
        text = None if key is None else fields.get(key)
    if not isinstance(text, str):
        msg = f"{param}: only text parts are supported"
        raise bad_request(msg, param)
    return {"type": "text", "text": text}
