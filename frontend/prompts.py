"""From text, ids or messages to a prompt's token ids, checked."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from .content import checked_content, text_of
from .errors import ApiError, bad_request
from .policy import Policy
from .threads import is_long_conversation
from .tokenizer import TextModel
from .tools import past_turn
from .turns import TURN_FIELDS, Given, Prefix, closing, spliced

__all__ = [
    "ChatFields",
    "Prompt",
    "chat_prompt",
    "echoed_message",
    "separate_prompts",
    "truncated",
]


class Prompt(msgspec.Struct, frozen=True):
    """A prompt as ids, and what the answer says of it."""

    token_ids: list[int]  # (num_prompt_tokens,)
    echo: str | None = None  # repeated before the output
    prefix: Prefix | None = None  # ids of earlier turns, kept


class ChatFields(Protocol):
    """What a body says about its messages."""

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation."""
        ...

    @property
    def add_generation_prompt(self) -> bool | None:
        """End with the beginning of an answer."""
        ...

    @property
    def continue_final_message(self) -> bool | None:
        """End inside the last message."""
        ...

    @property
    def add_special_tokens(self) -> bool | None:
        """Let the tokenizer add its own beside the template's."""
        ...

    @property
    def chat_template(self) -> str | None:
        """Used in place of the model's."""
        ...

    @property
    def chat_template_kwargs(self) -> dict[str, Any] | None:
        """What the template may name beside."""
        ...

    @property
    def documents(self) -> list[dict[str, Any]] | None:
        """What the template may quote."""
        ...


class _Renderer(msgspec.Struct, frozen=True):
    """A request's template and the model, for as many renderings as it takes."""

    model: TextModel
    fields: ChatFields
    tools: Sequence[dict[str, Any]] | None
    template_kwargs: dict[str, Any]
    messages: list[dict[str, Any]]
    shared: bool
    max_model_len: int | None

    def text(self, *, generation_prompt: bool, continued: bool) -> str:
        """Return the whole conversation as text."""
        return self._render(self.messages, generation_prompt, continued)

    def until(self, message: int) -> str:
        """Return the conversation up to the end of a message as text."""
        return self._render(
            self.messages[: message + 1], generation_prompt=False, continued=False
        )

    def _render(
        self,
        messages: list[dict[str, Any]],
        generation_prompt: bool,
        continued: bool,
    ) -> str:
        return self.model.render_chat(
            messages,
            add_generation_prompt=generation_prompt,
            continue_final_message=continued,
            template_kwargs=self.template_kwargs,
            documents=self.fields.documents,
            chat_template=self.fields.chat_template,
            tools=self.tools,
        )

    async def encode(self, text: str) -> list[int]:
        """Return the ids of a rendering."""
        special = bool(self.fields.add_special_tokens)  # the template writes its own
        return await self.model.encode(
            text,
            add_special_tokens=special,
            shared=self.shared,
            max_model_len=self.max_model_len,
        )


async def chat_prompt(
    fields: ChatFields,
    model: TextModel,
    policy: Policy,
    *,
    tools: Sequence[dict[str, Any]] | None = None,
    template_kwargs: dict[str, Any] | None = None,
    given: Given | None = None,
    shared: bool = False,
    max_model_len: int | None = None,
) -> Prompt:
    """Return the prompt of a conversation.

    Args:
        fields: What the body says about its messages.
        model: Renders and tokenizes.
        policy: What a request may bring.
        tools: What the template is to tell about tools.
        template_kwargs: What the template may name beside; default: as the body says.
        given: Exact ids that take the place of the first messages.
        shared: See ``TextModel.encode``.
        max_model_len: The same.

    Raises:
        ApiError: 400, with the field as ``param``.
    """
    if fields.chat_template is not None and not policy.trust_chat_template:
        msg = (
            "chat_template is refused: the operator has not set "
            "--trust-request-chat-template"
        )
        raise bad_request(msg, "chat_template")
    if not fields.messages:
        msg = "messages must not be empty"
        raise bad_request(msg, "messages")
    continued = bool(fields.continue_final_message)
    generation_prompt = fields.add_generation_prompt
    if generation_prompt is None:
        generation_prompt = not continued
    elif generation_prompt and continued:
        msg = "continue_final_message and add_generation_prompt exclude each other"
        raise bad_request(msg, "continue_final_message")
    named = fields.chat_template_kwargs or {}
    if template_kwargs is not None:
        named = template_kwargs
    is_long = is_long_conversation(fields.messages)

    def first_rendering() -> tuple[_Renderer, str]:
        messages = [_message(message, n) for n, message in enumerate(fields.messages)]
        renderer = _Renderer(
            model, fields, tools, named, messages, shared, max_model_len
        )
        return renderer, renderer.text(
            generation_prompt=generation_prompt, continued=continued
        )

    renderer, text = await model.threads.run(is_long, first_rendering)
    token_ids = await renderer.encode(text)
    if not token_ids:
        msg = "the messages have no tokens"
        raise bad_request(msg, "messages")
    if given is None:
        return Prompt(token_ids)
    return await _exact(renderer, text, token_ids, given)


async def _exact(
    renderer: _Renderer, text: str, token_ids: list[int], given: Given
) -> Prompt:
    """Return the prompt that starts with the given ids."""
    model = renderer.model
    kept = await model.checked_ids(given.token_ids, given.field)
    last = len(renderer.messages) - 1
    if renderer.fields.continue_final_message and given.message == last:
        # The message goes on where its ids end: nothing of the template follows.
        return Prompt(kept, prefix=Prefix(len(kept), kept != token_ids))
    is_long = is_long_conversation(renderer.messages)

    def second_rendering() -> str:
        until_text = renderer.until(given.message)
        if not text.startswith(until_text):
            raise _not_nested(renderer, text, until_text, given)
        return until_text

    until_text = await model.threads.run(is_long, second_rendering)
    until = await renderer.encode(until_text)
    exact = spliced(
        kept,
        token_ids,
        until,
        closed_at=closing(until, model.special_ids, model.is_blank),
        ends=model.end_ids,
    )
    if exact is None:
        # Tokens of the whole reach over the end of the message.
        rest = text[len(until_text) :]
        exact = kept + await model.encode(
            rest, add_special_tokens=False, max_model_len=renderer.max_model_len
        )
    return Prompt(exact, prefix=Prefix(len(kept), exact != token_ids))


def _not_nested(
    renderer: _Renderer, text: str, until_text: str, given: Given
) -> ApiError:
    """Return the 400 that says which message is rendered in two ways."""
    pairs = enumerate(zip(text, until_text, strict=False))
    agree = next((n for n, (one, other) in pairs if one != other), len(text))

    def reaches(message: int) -> bool:
        try:
            return len(renderer.until(message)) > agree
        except ApiError:
            return False  # a template may refuse a beginning that has no user yet

    first = bisect_left(range(given.message), True, key=reaches)
    quoted = text[max(0, agree - 20) : agree + 20]
    msg = (
        f"messages[{first}]: the template renders it differently when more messages "
        f"follow (near {quoted!r}), so the ids up to messages[{given.message}] "
        "cannot be put in the place of their text"
    )
    return bad_request(msg, f"messages[{first}]")


def echoed_message(fields: ChatFields) -> str | None:
    """Return the last message if it is an assistant's: what ``echo`` repeats."""
    if not fields.messages or fields.messages[-1].get("role") != "assistant":
        return None
    number = len(fields.messages) - 1
    return text_of(_message(fields.messages[number], number)["content"])


def _message(message: dict[str, Any], number: int) -> dict[str, Any]:
    """Return *message* as templates take it, its role and content checked."""
    where = f"messages[{number}]"
    if not isinstance(message.get("role"), str):
        msg = f"{where}.role must be a string"
        raise bad_request(msg, f"{where}.role")
    shown = {key: value for key, value in message.items() if key not in TURN_FIELDS}
    content = checked_content(message.get("content"), where)
    shown = past_turn(shown, where)
    shown["content"] = content
    return shown


def separate_prompts(prompt: str | list[Any]) -> list[str | list[Any]]:
    """Return the prompts of a completion request.

    Raises:
        ApiError: 400: none, or texts and lists of ids in one.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        msg = "You must pass at least one prompt"
        raise bad_request(msg, "prompt")
    first = prompt[0]
    kind = str if isinstance(first, str) else list
    if isinstance(first, str | list):
        if not all(isinstance(one, kind) for one in prompt):
            msg = "prompt mixes strings and lists"
            raise bad_request(msg, "prompt")
        return list(prompt)
    return [prompt]


def truncated(
    token_ids: list[int], limit: int | None, side: str | None, max_model_len: int
) -> list[int]:
    """Return at most *limit* ids, the last ones unless *side* is ``right``.

    -1 stands for what leaves room for one token of output, as in vLLM.

    Raises:
        ApiError: 400, the limit is no length that fits.
    """
    if limit is None:
        return token_ids
    if limit == -1:
        limit = max_model_len - 1
    if not 0 < limit <= max_model_len:
        msg = f"truncate_prompt_tokens must be -1, or 1 to {max_model_len}, not {limit}"
        raise bad_request(msg, "truncate_prompt_tokens")
    return token_ids[:limit] if side == "right" else token_ids[-limit:]
