"""Token-exact turns: the ids of earlier turns stay as the model saw and produced them.

Rendering a conversation anew and tokenizing its text drifts: a model may have written
"hello" in two tokens where the tokenizer takes one. That ruins training data and the
prefix cache. So a client sends the ids back, and they take the place of what their
messages would become.

The given ids end where the model stopped, mostly with the token that ended its answer.
A template closes the message in its own way, often with text behind that token (ChatML:
``<|im_end|>`` and a line feed). What follows the given ids is therefore the rendering
of the whole conversation from the closing token of that message on: without the token
if the given ids have an end of their own, with it if they were cut off (``length``, a
stop string). The prompt starts with the given ids to the token in either case.

Where the message of the given ids is the last, and to be continued, nothing follows:
the prompt is these ids.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, cast

from .errors import bad_request

__all__ = [
    "TURN_FIELDS",
    "Given",
    "Prefix",
    "closing",
    "given_by_fields",
    "given_by_messages",
    "given_by_request",
    "spliced",
]

PROMPT, GENERATION = "prompt_token_ids", "generation_token_ids"
"""On an assistant message: the prompt it answered, and the ids of the answer."""

TURN_FIELDS = frozenset({PROMPT, GENERATION, "generation_log_probs"})
"""What NeMo Gym leaves on messages; no template shall see it."""


@dataclass(slots=True, frozen=True)
class Given:
    """The ids of a conversation up to the end of one message."""

    token_ids: list[Any]  # (num_given,), not checked against the vocabulary yet
    message: int  # the index of that message
    field: str  # where they stood


@dataclass(slots=True, frozen=True)
class Prefix:
    """What became of the given ids; ``nvext.prefix`` of a response."""

    kept: int  # ids that the prompt starts with
    drifted: bool  # whether tokenizing anew would have made other ids


def given_by_messages(messages: Sequence[dict[str, Any]]) -> Given | None:
    """Return the ids that the last message with ids brings; None if none does.

    Raises:
        ApiError: 400: a message that is no assistant's has ids, or only half of them.
    """
    given: Given | None = None
    for number, message in enumerate(messages):
        parts = [message.get(PROMPT), message.get(GENERATION)]
        if parts == [None, None]:
            continue
        where = f"messages[{number}]"
        if message.get("role") != "assistant":
            present = PROMPT if parts[0] is not None else GENERATION
            msg = f"{where}.{present}: only an assistant message has ids"
            raise bad_request(msg, f"{where}.{present}")
        for name, part in zip((PROMPT, GENERATION), parts, strict=True):
            if not isinstance(part, list):
                msg = (
                    f"{where}.{name} must be a list of token ids: {PROMPT} and "
                    f"{GENERATION} come together"
                )
                raise bad_request(msg, f"{where}.{name}")
        prompt, generation = cast("list[list[Any]]", parts)
        given = Given([*prompt, *generation], number, where)
    return given


def given_by_request(
    messages: Sequence[dict[str, Any]], token_ids: list[Any], field: str
) -> Given:
    """Return *token_ids* as those up to the last assistant message.

    Raises:
        ApiError: 400: no message is an assistant's, or the messages say otherwise.
    """
    for number in reversed(range(len(messages))):
        if messages[number].get("role") == "assistant":
            break
    else:
        msg = f"{field} needs an assistant message that it ends with"
        raise bad_request(msg, field)
    of_message = given_by_messages(messages)
    if of_message is not None and of_message.token_ids != token_ids:
        msg = f"{field} and the ids on {of_message.field} differ"
        raise bad_request(msg, field)
    return Given(token_ids, number, field)


def given_by_fields(
    messages: Sequence[dict[str, Any]], token_ids: list[Any] | None, field: str
) -> Given | None:
    """Return what *field* gives, or else the messages.

    Raises:
        ApiError: 400, as above.
    """
    if token_ids is None:
        return given_by_messages(messages)
    return given_by_request(messages, token_ids, field)


def closing(
    token_ids: Sequence[int], special: Collection[int], is_blank: Callable[[int], bool]
) -> int | None:
    """Return where the special token stands that closes a rendering.

    Only blank tokens follow it. None: the template closes messages with text alone.
    """
    for position in reversed(range(len(token_ids))):
        if token_ids[position] in special:
            return position
        if not is_blank(token_ids[position]):
            return None
    return None


def spliced(
    given: Sequence[int],
    whole: Sequence[int],
    until: Sequence[int],
    *,
    closed_at: int | None,
    ends: Collection[int],
) -> list[int] | None:
    """Return *given* and what follows it in *whole*; None where the ids do not nest.

    Args:
        given: The exact ids up to the end of a message.
        whole: The ids of the whole conversation, tokenized anew.
        until: The same up to the end of that message.
        closed_at: Where its closing token stands in *until*.
        ends: Ids that end an answer, beside that closing token.
    """
    cut = len(until)
    if closed_at is not None:
        has_end = given[-1] in ends or given[-1] == until[closed_at]
        cut = closed_at + has_end
    if whole[:cut] != until[:cut]:
        return None
    return [*given, *whole[cut:]]
