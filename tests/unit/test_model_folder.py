"""A model's folder: what its files say, as transformers reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
from transformers import PreTrainedTokenizerFast

from support.templates import CHATML, LLAMA_2, LLAMA_3
from support.tiny_model import CHAT_TEMPLATE, write_tiny_model
from support.tokenizer_kinds import KINDS, tokenizer_of
from tokenwire.frontend.model import ModelError, load_model
from tokenwire.frontend.tokenizer import TextModel

TEXT = "Hello there 🙂 naïve <|tool|> </s>"


def write_model(
    folder: Path,
    kind: str = "llama_2",
    settings: dict[str, Any] | None = None,
    **config: Any,
) -> Path:
    """Write a model of a kind of tokenizer."""
    folder.mkdir()
    tokenizer = tokenizer_of(kind)
    tokenizer.save(str(folder / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    (folder / "config.json").write_text(json.dumps({"vocab_size": size, **config}))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings or {}))
    return folder


def rendered(model: TextModel, *, tools: bool = False, **options: Any) -> str:
    """Return a short conversation as text."""
    return model.render_chat(
        [{"role": "user", "content": "a"}],
        add_generation_prompt=True,
        continue_final_message=False,
        template_kwargs={},
        tools=[{"type": "function"}] if tools else None,
        **options,
    )


@pytest.mark.parametrize("name", ["/no/such/folder", "./none", "~/none"])
def test_a_folder_that_is_not_there_is_not_asked_of_the_hub(name: str) -> None:
    """A hub id does not look so: the sentence is about the folder."""
    with pytest.raises(ModelError, match=f"^model {name}: there is no such folder$"):
        load_model(name)


# --- tokens that only the settings know ------------------------------------------------

BOS_EOS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
SETTINGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "named": BOS_EOS,
    "bos added": {**BOS_EOS, "add_bos_token": True},
    "bos not added": {**BOS_EOS, "add_bos_token": False},
    "eos added": {**BOS_EOS, "add_bos_token": True, "add_eos_token": True},
    "eos alone": {**BOS_EOS, "add_eos_token": True},
    "bos without a name": {"add_bos_token": True},
    "a name of its own": {**BOS_EOS, "pad_token": "[PAD]", "image_token": "<|tool|>"},
    "older, with objects": {
        "bos_token": {"content": "<s>", "__type": "AddedToken"},
        "add_bos_token": True,
    },
    "decoder": {
        "added_tokens_decoder": {
            "0": {"content": "<unk>", "special": True},
            "2": {"content": "</s>", "special": True},
            "9001": {"content": "<|tool|>", "special": False, "normalized": False},
        }
    },
    "extra": {**BOS_EOS, "additional_special_tokens": ["<|tool|>", "</s>"]},
}


@pytest.mark.parametrize("case", SETTINGS)
@pytest.mark.parametrize("kind", ["llama_2", "mistral", "byte_level", "tiktoken_like"])
async def test_ids_are_those_of_transformers(
    tmp_path: Path, kind: str, case: str
) -> None:
    """With whatever the settings add, a text has the ids that vLLM's tokenizer gives."""
    settings = SETTINGS[case]
    if kind in {"byte_level", "tiktoken_like"}:  # these have other names for them
        text = json.dumps(settings).replace("<s>", "<|begin|>").replace("</s>", "<|e|>")
        settings = json.loads(text)
    folder = write_model(tmp_path / "model", kind, settings)
    oracle = cast("Any", PreTrainedTokenizerFast).from_pretrained(folder)

    model = load_model(str(folder))

    for special in (True, False):
        expected = oracle.encode(TEXT, add_special_tokens=special)
        assert await model.encode(TEXT, add_special_tokens=special) == expected
        for skip in (True, False):
            assert model.decode(expected, skip_special_tokens=skip) == oracle.decode(
                expected, skip_special_tokens=skip
            )


async def test_a_template_that_writes_bos_gives_one(tmp_path: Path) -> None:
    """A chat gets its BOS from the template alone, a completion from the tokenizer."""
    settings = {**BOS_EOS, "add_bos_token": True, "chat_template": LLAMA_2}
    model = load_model(str(write_model(tmp_path / "model", settings=settings)))
    bos = tokenizer_of("llama_2").token_to_id("<s>")

    chat = await model.encode(rendered(model), add_special_tokens=False)
    completion = await model.encode("a", add_special_tokens=True)

    assert bos is not None
    assert (chat[0], chat.count(bos)) == (bos, 1)
    assert (completion[0], completion.count(bos)) == (bos, 1)


@pytest.mark.parametrize("kind", KINDS)
async def test_rows_above_the_tokenizer_are_ids_without_text(
    tmp_path: Path, kind: str
) -> None:
    """An embedding with padding rows: its ids are valid, and silent."""
    folder = write_model(tmp_path / "model", kind, vocab_size=4096)
    model = load_model(str(folder))
    ids = await model.encode("story", add_special_tokens=False)

    assert await model.checked_ids([4095, *ids], "prompt") == [4095, *ids]
    detokenizer = model.detokenizer([], skip_special_tokens=True)
    text = "".join(map(detokenizer.feed, [4095, *ids, 4095])) + detokenizer.flush()
    assert text == model.decode(ids, skip_special_tokens=True)
    assert model.token_bytes(4095) == b""


def test_a_models_text_part_has_the_vocabulary(tmp_path: Path) -> None:
    """A model of several parts keeps its text's sizes apart."""
    folder = write_model(tmp_path / "model")
    (folder / "config.json").write_text(
        json.dumps({"vocab_size": 1, "text_config": {"vocab_size": 777}})
    )

    assert load_model(str(folder)).vocab_size == 777


# --- templates -------------------------------------------------------------------------


def test_a_template_of_the_settings(tmp_path: Path) -> None:
    """One template serves with tools and without."""
    folder = write_tiny_model(tmp_path / "tiny")
    model = load_model(str(folder))

    assert rendered(model) == rendered(model, tools=True)
    assert rendered(model).endswith("<|im_start|>assistant\n")


def test_named_templates_of_the_settings(tmp_path: Path) -> None:
    """``default`` is for chats, ``tool_use`` for chats with tools."""
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "tools"},
        {"name": "rag", "template": "documents"},
    ]
    model = load_model(
        str(write_model(tmp_path / "model", settings={"chat_template": named}))
    )

    assert rendered(model) == "plain"
    assert rendered(model, tools=True) == "tools"


def test_template_files_win(tmp_path: Path) -> None:
    """Files of their own are newer than the settings; further ones have their names."""
    folder = write_model(tmp_path / "model", settings={"chat_template": "old"})
    (folder / "chat_template.jinja").write_text("new")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")

    model = load_model(str(folder))

    assert rendered(model) == "new"
    assert rendered(model, tools=True) == "tools"


def test_a_processors_template(tmp_path: Path) -> None:
    """A model that takes images too has its template in a file of the processor's."""
    folder = write_model(tmp_path / "model")
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "p"}))

    assert rendered(load_model(str(folder))) == "p"


def test_a_template_of_the_request(tmp_path: Path) -> None:
    """It takes the place of the model's, and is refused by its line if it is wrong."""
    model = load_model(str(write_tiny_model(tmp_path / "tiny")))

    assert rendered(model, chat_template="mine") == "mine"
    with pytest.raises(Exception, match="wrong in line 1") as caught:
        rendered(model, chat_template="{% if %}")
    assert getattr(caught.value, "param", None) == "chat_template"


def test_without_a_template_there_is_no_chat(tmp_path: Path) -> None:
    """The refusal names the endpoint that works."""
    model = load_model(str(write_model(tmp_path / "model")))

    with pytest.raises(Exception, match="/v1/completions"):
        rendered(model)


def test_special_tokens_have_names_in_templates(tmp_path: Path) -> None:
    """Those of the settings, and of the older file beside them."""
    folder = write_model(tmp_path / "model", settings={"chat_template": LLAMA_3})
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": {"content": "<s>"}})
    )

    assert rendered(load_model(str(folder))).startswith("<s>Today Date")


# --- folders that cannot be used -------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["tokenizer.model", "tiktoken.model", "tekken.json", "vocab.json"]
)
def test_another_librarys_tokenizer_is_told_how_to_convert(
    tmp_path: Path, name: str
) -> None:
    """One sentence says which file is there, which is missing, and how it is made."""
    folder = write_model(tmp_path / "model")
    (folder / "tokenizer.json").rename(folder / name)

    with pytest.raises(ModelError, match=f"{name} but no tokenizer.json") as caught:
        load_model(str(folder))

    assert "save_pretrained" in str(caught.value)
    assert "\n" not in str(caught.value)


BROKEN = {
    "no config": ("config.json", None, "cannot read"),
    "no tokenizer": ("tokenizer.json", None, "cannot read"),
    "no vocabulary": ("config.json", "{}", "lacks 'vocab_size'"),
    "no JSON": ("tokenizer_config.json", "{", "Expecting"),
    "no tokenizer's JSON": ("tokenizer.json", "{}", "model"),
    "wrong template": ("chat_template.jinja", "{% for %}", "wrong in line 1"),
    "wrong default": ("generation_config.json", '{"top_k": "x"}', "top_k"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_folder_is_one_sentence(tmp_path: Path, case: str) -> None:
    """Start-up ends with the file or the field that is wrong."""
    name, content, reason = BROKEN[case]
    folder = write_model(tmp_path / "model")
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)

    with pytest.raises(ModelError, match=reason):
        load_model(str(folder))


def test_templates_are_what_the_tests_have(tmp_path: Path) -> None:
    """The tiny model's template is a chat template of the usual form."""
    model = load_model(str(write_tiny_model(tmp_path / "tiny")))

    assert rendered(model) == rendered(model, chat_template=CHAT_TEMPLATE)
    assert rendered(model).strip() == rendered(model, chat_template=CHATML).strip()
