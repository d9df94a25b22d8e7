"""Chat templates: rendered as transformers renders them, in a sandbox, within bounds."""

from __future__ import annotations

import datetime
from typing import Any, cast

import jinja2
import jinja2.exceptions
import jinja2.runtime
import jinja2.sandbox
import pytest
from transformers.utils import chat_template_utils

from support.templates import CHATML, LLAMA_2, LLAMA_3, PARTS, QWEN, TEMPLATES
from tokenwire.frontend import template as module
from tokenwire.frontend.errors import ApiError
from tokenwire.frontend.template import RESERVED, ChatTemplate

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'Wie wird\'s in <Köln> & "Bonn"?',
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = {"function": {"name": "weather", "arguments": {"city": "Köln"}}}


def message(role: str, content: Any, **more: Any) -> dict[str, Any]:
    """Return a message."""
    return {"role": role, "content": content, **more}


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [message("user", "Hello  there ")],
    "system": [message("system", "Be brief."), message("user", "Why? <b>&amp;")],
    "answered": [
        message("user", "a"), message("assistant", " b "), message("user", "c\n\nd"),
    ],
    "thought": [
        message("user", "a"), message("assistant", "<think>x</think>y"),
        message("user", "🙂"),
    ],
    "tool": [
        message("user", "a"), message("assistant", "", tool_calls=[CALL]),
        message("tool", '{"sun": true}'),
    ],
}  # fmt: skip


def render(
    source: str,
    messages: list[dict[str, Any]],
    *,
    prompt: bool = True,
    continued: bool = False,
    tools: list[dict[str, Any]] | None = None,
    **names: Any,
) -> str:
    """Return what we render."""
    return ChatTemplate(source, SPECIAL).render(
        messages,
        add_generation_prompt=prompt,
        continue_final_message=continued,
        template_kwargs=names,
        tools=tools,
    )


def oracle(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    """Return what transformers renders of messages that are formed already."""
    rendered, _ = cast("Any", chat_template_utils).render_jinja_template(
        conversations=[messages], chat_template=source, **{**SPECIAL, **options}
    )
    return cast("str", rendered[0])


def formed(name: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with parts where the template wants parts."""
    if name != "parts":
        return messages
    return [
        message_
        if message_["role"] == "tool"
        else {**message_, "content": [{"type": "text", "text": message_["content"]}]}
        for message_ in messages
    ]


def either(work: Any, *arguments: Any, **options: Any) -> str:
    """Return what comes of it, a refusal by its reason."""
    try:
        return cast("str", work(*arguments, **options))
    except (ApiError, jinja2.TemplateError) as error:
        own_words = "the chat template refused the messages: "
        return f"refused: {str(error).removeprefix(own_words)}"


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("tools", [None, [WEATHER]], ids=["no tools", "tools"])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_renders_as_transformers_does(
    name: str, conversation: str, tools: list[dict[str, Any]] | None, prompt: bool
) -> None:
    """Every style, with roles it takes or refuses, with tools and without."""
    source, messages = TEMPLATES[name], CONVERSATIONS[conversation]

    expected = either(
        oracle,
        source,
        formed(name, messages),
        add_generation_prompt=prompt,
        tools=tools,
    )

    assert either(render, source, messages, prompt=prompt, tools=tools) == expected


@pytest.mark.parametrize("text", ["Once upon", " Once upon ", "Once\n", "a {{ b }}"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_final_message_goes_on_as_in_transformers(name: str, text: str) -> None:
    """The prompt ends inside the last message, stripped where the template strips."""
    source = TEMPLATES[name]
    messages = [message("user", "Tell me"), message("assistant", text)]

    expected = oracle(
        source,
        formed(name, messages),
        add_generation_prompt=False,
        continue_final_message=True,
    )

    got = render(source, messages, prompt=False, continued=True)
    assert got == expected
    assert got.rstrip().endswith(text.strip())


def test_a_final_message_that_the_template_changes_cannot_go_on() -> None:
    """The reasoning that the template cuts out would be lost in silence."""
    messages = [message("user", "a"), message("assistant", "<think>x</think>y")]

    with pytest.raises(ApiError, match="does not keep the final message") as caught:
        render(QWEN, messages, prompt=False, continued=True)
    assert caught.value.param == "continue_final_message"

    with pytest.raises(ApiError, match="final message with text"):
        render(
            PARTS, [message("user", "a"), message("assistant", None)], continued=True
        )


# --- what a template may use -----------------------------------------------------------


def test_its_refusal_is_quoted() -> None:
    """``raise_exception`` is a 400 with the template's own words."""
    with pytest.raises(ApiError, match="roles must alternate") as caught:
        render(LLAMA_2, [message("assistant", "a")])

    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_a_date_is_todays() -> None:
    """``strftime_now`` gives the local date, unless the request sets another."""
    before = datetime.datetime.now().strftime("%d %b %Y")
    text = render(LLAMA_3, [message("user", "a")])
    after = datetime.datetime.now().strftime("%d %b %Y")

    assert f"Today Date: {before}" in text or f"Today Date: {after}" in text
    set_text = render(LLAMA_3, [message("user", "a")], date_string="1 May 2001")
    assert "Today Date: 1 May 2001" in set_text


def test_json_is_plain() -> None:
    """Nothing is escaped for HTML, and no letter is spelled as an escape."""
    text = render(QWEN, [message("user", "a")], tools=[WEATHER])

    assert 'Wie wird\'s in <Köln> & \\"Bonn\\"?' in text


def test_names_of_the_request_reach_the_template() -> None:
    """``chat_template_kwargs`` sets what a template asks for; others do no harm."""
    messages = [message("user", "a")]

    assert "<think>" in render(QWEN, messages, enable_thinking=False)
    assert render(QWEN, messages, no_such_name=1) == render(QWEN, messages)
    assert render(LLAMA_3, messages, bos_token="").startswith("Today")


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_fields_of_the_request_are_no_template_names(name: str) -> None:
    """What the request itself says cannot be said again there, nor the template set."""
    template = ChatTemplate(CHATML, SPECIAL)

    with pytest.raises(ApiError, match=name) as caught:
        template.render(
            [message("user", "a")],
            add_generation_prompt=True,
            continue_final_message=False,
            template_kwargs={name: []},
        )

    assert caught.value.param == "chat_template_kwargs"


def test_undefined_names_are_empty_and_their_attributes_a_refusal() -> None:
    """As jinja2 has it: nothing is printed for a name, and an attribute of it fails."""
    assert render("[{{ nobody }}]", [message("user", "a")]) == "[]"
    with pytest.raises(ApiError, match="nobody"):
        render("{{ nobody.name }}", [message("user", "a")])


def test_a_wrong_template_is_told_with_its_line() -> None:
    """A syntax error is found when the template is read, not when a request comes."""
    with pytest.raises(ValueError, match="line 2"):
        ChatTemplate("a\n{% for %}", {})


# --- the sandbox -----------------------------------------------------------------------

ESCAPES = {
    "class": "{{ messages.__class__ }}",
    "subclasses": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "attr": "{{ messages | attr('__class__') }}",
    "globals": "{{ raise_exception.__globals__ }}",
    "function globals": "{{ strftime_now['__globals__'] }}",
    "import": "{% include '/etc/passwd' %}",
    "format": "{{ '{0.__class__}'.format(messages) }}",
    "format_map": "{{ '{a.__class__}'.format_map({'a': messages}) }}",
    "change": "{{ messages.append(1) }}",
    "set item": "{{ messages[0].update({'role': 'x'}) }}",
    "cycler": "{{ cycler.__init__.__globals__ }}",
    "endless range": "{% for n in range(10 ** 9) %}x{% endfor %}",
    "endless macro": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
}


@pytest.mark.parametrize("case", ESCAPES)
def test_nothing_of_python_is_reached(case: str) -> None:
    """A template sees its messages and its functions: nothing behind them, no file."""
    text = either(render, ESCAPES[case], [message("user", "a")])

    assert text == "" or text.startswith("refused: ")


def test_messages_are_the_callers_still() -> None:
    """Rendering changes no message: other renderings of them follow."""
    messages = [message("developer", "x"), message("user", [text_part("a")])]
    before = repr(messages)

    render(PARTS, messages, continued=True, prompt=False)
    render(CHATML, messages)

    assert repr(messages) == before


def test_output_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A template that makes too much of what it gets refuses it instead."""
    monkeypatch.setattr(module, "MAX_RENDERED_CHARS", 1000)
    doubling = "{% for a in messages %}{% for b in messages %}{{ b.content }}"
    doubling += "{% endfor %}{% endfor %}"

    with pytest.raises(ApiError, match="above 1000 characters"):
        render(doubling, [message("user", "x" * 10)] * 100)


def test_a_long_refusal_is_cut() -> None:
    """A template that quotes a long message does not make a long error."""
    source = "{{ raise_exception(messages[0].content) }}"

    with pytest.raises(ApiError) as caught:
        render(source, [message("user", "x" * 100_000)])

    assert len(caught.value.message) < 3000


# --- content ---------------------------------------------------------------------------


def text_part(text: str) -> dict[str, Any]:
    """Return a part of a content."""
    return {"type": "text", "text": text}


FORMATS = {
    "text": ("{% for m in messages %}{{ m.content }}{% endfor %}", "string"),
    "loop": (PARTS, "openai"),
    "attribute": (
        "{% for m in messages %}{% for p in m.content %}x{% endfor %}{% endfor %}",
        "openai",
    ),
    "filtered": (
        (
            "{% for m in messages %}{% for p in m['content'] | list %}x"
            "{% endfor %}{% endfor %}"
        ),
        "openai",
    ),
    "slice": (
        (
            "{% set rest = messages[1:] %}{% set all = rest %}"
            "{% for m in all %}{% for p in m.content[1:] %}x{% endfor %}{% endfor %}"
        ),
        "openai",
    ),
    "variable": (
        (
            "{% for m in messages %}{% set content = m.content %}"
            "{% for p in content %}x{% endfor %}{% endfor %}"
        ),
        "openai",
    ),
    "macro": (
        (
            "{% macro show(what, n) %}{% for p in what %}x{% endfor %}{% endmacro %}"
            "{% for m in messages %}{{ show(m.content, 1) }}{% endfor %}"
        ),
        "openai",
    ),
    "macro by name": (
        (
            "{% macro show(n, what) %}{% for p in what %}x{% endfor %}{% endmacro %}"
            "{% for m in messages %}{{ show(1, what=m['content']) }}{% endfor %}"
        ),
        "openai",
    ),
    "macro of others": (
        (
            "{% macro show(content) %}{% for p in content %}x{% endfor %}{% endmacro %}"
            "{% for m in messages %}{{ show(m.tool_calls) }}{{ m.content }}{% endfor %}"
        ),
        "string",
    ),
    "tool calls": (QWEN, "string"),
    "unpacked": ("{% for k, v in messages[0].items() %}{{ v }}{% endfor %}", "string"),
}


@pytest.mark.parametrize("case", FORMATS)
def test_the_content_format_is_seen_in_the_template(case: str) -> None:
    """A template that loops over contents gets OpenAI's parts, another one text."""
    source, expected = FORMATS[case]

    assert ChatTemplate(source, {}).content_format == expected


def test_parts_and_texts_are_formed_for_the_template() -> None:
    """Either way of writing a content suits either kind of template."""
    parts = message("user", [text_part("a"), text_part("b")])

    assert "user\na\nb<|im_end|>" in render(CHATML, [parts])
    assert render(PARTS, [parts], prompt=False) == "<user>(a)(b)"
    assert render(PARTS, [message("user", "c")], prompt=False) == "<user>(c)"
    assert render(PARTS, [message("assistant", None)], prompt=False) == "<assistant>"
    assert "assistant\n<|im_end|>" in render(CHATML, [message("assistant", None)])
    tool = message("tool", [text_part("a"), text_part("b")])
    assert render(PARTS, [tool], prompt=False) == "<tool>[a\nb]"


def test_developers_are_the_system_where_a_template_knows_none() -> None:
    """Their messages join the system's, in front; a template that knows them gets them."""
    messages = [
        message("user", "a"), message("developer", "Be kind."), message("system", "Go"),
    ]  # fmt: skip
    knows = CHATML + "{# #}{% if messages[0].role == 'developer' %}{% endif %}"

    joined = render(CHATML, messages, prompt=False)
    assert joined.startswith("<|im_start|>system\nBe kind.\n\nGo<|im_end|>")
    assert "developer" not in joined
    assert "<|im_start|>developer\nBe kind." in render(knows, messages)


def told(undefined: jinja2.Undefined) -> tuple[type[Exception], str]:
    """Return what an undefined value says of itself where it is used."""
    with pytest.raises(
        (jinja2.UndefinedError, jinja2.exceptions.SecurityError)
    ) as raised:
        _ = undefined.more
    return raised.type, str(raised.value)


def test_what_is_found_sooner_is_found_the_same() -> None:
    """Attributes of messages and loops, and names that are none, as the sandbox has them."""
    plain = jinja2.sandbox.ImmutableSandboxedEnvironment()
    ours = module.Sandbox()
    loop = jinja2.runtime.LoopContext([1, 2], jinja2.Undefined)
    next(loop)
    values: list[Any] = [
        {"role": "user", "items": 1, "first": 2},
        {},
        loop,
        "text",
        [1],
    ]
    names = [
        *("role", "items", "first", "last", "index", "index0", "length", "cycle"),
        *("update", "__class__", "_iterable", "nothing", "previtem", "append"),
    ]

    for value in values:
        for name in names:
            got, want = ours.getattr(value, name), plain.getattr(value, name)
            assert type(got) is type(want), (value, name)
            if isinstance(want, jinja2.Undefined):
                assert told(got) == told(want)
            elif not callable(want):
                assert got == want


def test_a_template_does_not_keep_what_it_is_given() -> None:
    """Names of one rendering are not there in the next."""
    source = "{{ extra is defined }}{% set extra = 1 %}{{ raise_exception is defined }}"
    template = ChatTemplate(source, {})

    def text(**names: Any) -> str:
        return template.render(
            [message("user", "a")],
            add_generation_prompt=True,
            continue_final_message=False,
            template_kwargs=names,
        )

    assert text(extra=0) == "TrueTrue"
    assert text() == "FalseTrue"
