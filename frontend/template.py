"""Chat templates: messages to a prompt's text; the only door to jinja2.

The environment is the one that templates are written for (transformers'): a sandbox in
which nothing can be changed and no Python attribute is reached, with ``raise_exception``,
``strftime_now``, ``tojson``, loop controls and ``{% generation %}``. It is ours because
transformers takes 39 MB and 0.7 s to import, and because output has a bound here.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, cast

import jinja2
import jinja2.ext
import jinja2.runtime
import jinja2.sandbox
from jinja2 import nodes
from jinja2.parser import Parser

from .content import text_of
from .errors import bad_request

__all__ = ["ChatTemplate", "ContentFormat", "Sandbox"]

ContentFormat = Literal["string", "openai"]
"""How a template wants ``content``: as text, or as OpenAI's list of parts."""

MAX_RENDERED_CHARS = 256 * 1024 * 1024
"""A template's output: four times the largest body. What a template makes of messages
is the operator's, but how many there are is the client's."""

MAX_REASON_CHARS = 2_000
"""Of what a template says when it refuses: it may quote a message of any length."""

RESERVED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "messages",
        "tokenize",
        "tools",
    }
)
"""Names in ``chat_template_kwargs`` that are refused: each is a field of the request, or
none of the client's. vLLM refuses or overrides them too."""

_MARK = "\x02continue\x03 "
"""Stands behind the final message while it is rendered. Its own last space tells whether
the template strips messages: then the prompt ends without white space, as in vLLM."""


class _Generation(jinja2.ext.Extension):
    """``{% generation %}``: marks what a model wrote, for training; here plain text."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the block's content in a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    # The local time, as everywhere: TZ is the operator's.
    return datetime.datetime.now().strftime(form)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own escapes what HTML does not like; a model wants plain JSON.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox; what templates ask for most, it finds sooner, and the same."""

    def getattr(self, obj: object, attribute: str) -> Any:
        """Return an attribute, or else an item.

        A message is a dictionary, and ``message.role`` no attribute of those: to look for
        it as one ends in an error that is caught, several for each message.
        """
        kind: type = type(obj)
        if kind is dict and attribute not in _OF_DICTS:
            item = cast("dict[str, Any]", obj).get(attribute, _MISSING)
            if item is _MISSING:
                return self.undefined(obj=obj, name=attribute)
            return item
        if kind is jinja2.runtime.LoopContext and attribute in _OF_LOOPS:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)


_OF_DICTS = frozenset(dir(dict))
_OF_LOOPS = frozenset({"first", "last", "index", "index0", "length"})
"""Numbers and truths, which are safe; other names take the long way."""

_MISSING = object()


def _environment() -> jinja2.Environment:
    # Not for HTML: nothing is escaped in a prompt.
    environment = Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    return environment


_ENVIRONMENT = _environment()
_FUNCTIONS: dict[str, Any] = {
    "raise_exception": _raise_exception,
    "strftime_now": _strftime_now,
}


class ChatTemplate:
    """One chat template, compiled."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        """Compile *source*; *special_tokens* are the names it may use, as ``bos_token``.

        Raises:
            ValueError: It is no template; the message says where.
        """
        try:
            tree = _ENVIRONMENT.parse(source)
            template = _ENVIRONMENT.from_string(source, _FUNCTIONS)
        except jinja2.TemplateSyntaxError as error:
            msg = f"the chat template is wrong in line {error.lineno}: {error.message}"
            raise ValueError(msg) from error
        # As one dictionary: of two chained ones each rendering would make one, slowly.
        template.globals = dict(template.globals)
        self._template = template
        self.source = source
        self._special_tokens = special_tokens
        self.content_format: ContentFormat = (
            "openai" if _iterates_content(tree) else "string"
        )
        self.has_developer = any(
            constant.value == "developer" for constant in tree.find_all(nodes.Const)
        )
        """Whether it knows the role ``developer``; for others it becomes ``system``."""

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        template_kwargs: dict[str, Any],
        tools: Sequence[dict[str, Any]] | None = None,
        documents: Sequence[dict[str, Any]] | None = None,
    ) -> str:
        """Return the conversation as text.

        Args:
            messages: OpenAI's messages, not none; ``content`` is null, a string, or a list
                of text parts.
            add_generation_prompt: End with the beginning of an answer.
            continue_final_message: End inside the last message, which is to go on.
            template_kwargs: Further names, and other values of the special tokens.
            tools: OpenAI's tools.
            documents: What the template may quote.

        Raises:
            ApiError: 400: a reserved name, or the template refuses the messages.
        """
        reserved = sorted(template_kwargs.keys() & RESERVED)
        if reserved:
            msg = f"chat_template_kwargs must not set {', '.join(reserved)}"
            raise bad_request(msg, "chat_template_kwargs")
        conversation = self._conversation(messages)
        final = _text_of(conversation[-1]) if continue_final_message else None
        if final is not None:
            conversation[-1] = _marked(conversation[-1])
        names = {
            **self._special_tokens,
            "documents": None,
            **template_kwargs,
            "messages": conversation,
            "tools": None if tools is None else list(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        if documents is not None:
            names["documents"] = list(documents)
        try:
            text = _joined(self._template.generate(names))
        except Exception as error:
            # A template is the model's own code: what it meets in a message that it
            # was not written for may end in any error.
            msg = (
                f"the chat template refused the messages: {error!s:.{MAX_REASON_CHARS}}"
            )
            raise bad_request(msg, "messages") from error
        return text if final is None else _up_to_mark(text, final)

    def _conversation(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages as this template wants them, as vLLM forms them."""
        conversation = [dict(message) for message in messages]
        if not self.has_developer and any(
            message.get("role") == "developer" for message in conversation
        ):
            conversation = _one_system(conversation)
        for message in conversation:
            content = message.get("content")
            if self.content_format == "openai" and message.get("role") != "tool":
                if content is None:
                    message["content"] = []
                elif isinstance(content, str):
                    message["content"] = [{"type": "text", "text": content}]
            else:
                message["content"] = text_of(content)
        return conversation


def _one_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return *messages* with developers' among the system's, as one, in front.

    Templates that know no developer often want the system message first, and one.
    """
    first = [m for m in messages if m.get("role") in {"developer", "system"}]
    texts = [text for text in (text_of(m.get("content")) for m in first) if text]
    others = [m for m in messages if m.get("role") not in {"developer", "system"}]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others]


def _text_of(message: dict[str, Any]) -> str:
    """Return the text of a final message that is to go on: its last part's.

    Raises:
        ApiError: 400, it has none.
    """
    content = message.get("content")
    if isinstance(content, list) and content:
        return str(cast("list[dict[str, Any]]", content)[-1]["text"])
    if isinstance(content, str):
        return content
    msg = "continue_final_message needs a final message with text"
    raise bad_request(msg, "messages")


def _marked(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + _MARK}
    *parts, last = content
    return {**message, "content": [*parts, {**last, "text": last["text"] + _MARK}]}


def _up_to_mark(text: str, final: str) -> str:
    """Return the rendering up to the end of the message *final*.

    Raises:
        ApiError: 400, the template leaves the message out, or changes it.
    """
    before, found, after = text.rpartition(_MARK.strip())
    if not found or final.strip() not in text:
        msg = (
            "continue_final_message: the chat template does not keep the final message"
        )
        raise bad_request(msg, "continue_final_message")
    return before if after.startswith(" ") else before.rstrip()


def _joined(pieces: Iterator[str]) -> str:
    """Return a template's output, within its bound."""
    parts: list[str] = []
    size = 0
    for piece in pieces:
        size += len(piece)
        if size > MAX_RENDERED_CHARS:
            msg = f"its output is above {MAX_RENDERED_CHARS} characters"
            raise ValueError(msg)
        parts.append(piece)
    return "".join(parts)


# --- what a template wants -------------------------------------------------------------


def _iterates_content(tree: nodes.Template) -> bool:
    """Return whether a template loops over a message's content, which are parts then.

    A content is ``message.content`` for a *message* that a loop takes from ``messages``
    (or a slice, a filter or a copy of it), what is called ``content`` outside macros,
    and a macro's parameter that is given one.
    """
    lists = _copies(tree, "messages")
    loops = list(tree.find_all(nodes.For))
    messages = {
        loop.target.name
        for loop in loops
        if isinstance(loop.target, nodes.Name) and _root(loop.iter) in lists
    }

    def is_content(node: nodes.Node) -> bool:
        node = _unfiltered(node)
        if isinstance(node, nodes.Getattr):
            key = node.attr
        elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
            key = node.arg.value
        else:
            return False
        return key == "content" and _name(node.node) in messages

    in_macros: set[int] = set()
    for macro in tree.find_all(nodes.Macro):
        inside = list(macro.find_all(nodes.For))
        in_macros.update(map(id, inside))
        given = _given(tree, macro, is_content)
        if any(_name(loop.iter) in given for loop in inside):
            return True
    return any(
        is_content(loop.iter)
        or (_name(loop.iter) == "content" and id(loop) not in in_macros)
        for loop in loops
    )


def _copies(tree: nodes.Template, name: str) -> set[str]:
    """Return *name*, and all that is assigned it, a slice of it, or a filter's output."""
    names = {name}
    assigns = [
        (node.target.name, _root(node.node))
        for node in tree.find_all(nodes.Assign)
        if isinstance(node.target, nodes.Name)
    ]
    while more := {to for to, root in assigns if root in names} - names:
        names |= more
    return names


def _given(
    tree: nodes.Template, macro: nodes.Macro, is_content: Callable[[nodes.Node], bool]
) -> set[str]:
    """Return the parameters of *macro* that a call somewhere gives a content."""
    parameters = [argument.name for argument in macro.args]
    given: set[str] = set()
    for call in tree.find_all(nodes.Call):
        if _name(call.node) == macro.name:
            pairs = zip(parameters, call.args, strict=False)
            given.update(name for name, value in pairs if is_content(value))
            given.update(one.key for one in call.kwargs if is_content(one.value))
    return given


def _unfiltered(node: nodes.Node) -> nodes.Node:
    """Return what filters, tests and slices are applied to."""
    while True:
        sliced = isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
        if not sliced and not isinstance(node, nodes.Filter | nodes.Test):
            return node
        inner: nodes.Node | None = getattr(node, "node", None)
        if inner is None:  # the filter of a block
            return node
        node = inner


def _name(node: nodes.Node) -> str | None:
    return node.name if isinstance(node, nodes.Name) else None


def _root(node: nodes.Node) -> str | None:
    return _name(_unfiltered(node))
