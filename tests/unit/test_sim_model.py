"""What the simulated engine reads from a model's folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tokenwire.worker.engine import EngineStartError
from tokenwire.worker.sim.model import read_model


def write(folder: Path, name: str, content: object) -> None:
    """Write a JSON file."""
    (folder / name).write_text(json.dumps(content))


def test_a_name_that_is_no_folder_gets_usual_sizes_and_no_eos() -> None:
    """So the engine can be tried without any file."""
    model = read_model("some/name")
    assert model.vocab_size == 32_000
    assert model.eos_token_id is None
    assert min(model.printable) >= 512


def test_sizes_come_from_the_config(tmp_path: Path) -> None:
    """The vocabulary, the context, the EOS and the type of the weights."""
    config = {
        "vocab_size": 5000, "max_position_embeddings": 77, "eos_token_id": 4,
        "dtype": "bfloat16",
    }  # fmt: skip
    write(tmp_path, "config.json", config)
    model = read_model(str(tmp_path))
    assert (model.vocab_size, model.max_model_len) == (5000, 77)
    assert (model.eos_token_id, model.dtype) == (4, "bfloat16")
    assert model.printable == tuple(range(512, 5000))


def test_the_generation_config_may_name_several_eos_ids(tmp_path: Path) -> None:
    """The first is the EOS, the others stop as well; none of them is ever by rule."""
    write(tmp_path, "config.json", {"vocab_size": 5000, "eos_token_id": 4})
    write(tmp_path, "generation_config.json", {"eos_token_id": [600, 601]})
    model = read_model(str(tmp_path))
    assert model.eos_token_id == 600
    assert model.extra_stop_ids == {601}
    assert not {600, 601} & set(model.printable)


def test_a_multi_modal_model_has_its_sizes_one_level_down(tmp_path: Path) -> None:
    """``text_config``, as transformers writes it."""
    text = {"vocab_size": 2000, "max_position_embeddings": 64}
    write(tmp_path, "config.json", {"text_config": text})
    model = read_model(str(tmp_path))
    assert (model.vocab_size, model.max_model_len) == (2000, 64)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_printable_ids_are_whole_ascii_words(tmp_path: Path, kind: str) -> None:
    """No special ids, no parts of characters, none the model has no row for."""
    words = ["<s>", "Ġé", *(f"Ġword{'x' * n}" for n in range(40)), "9"]
    pairs = [(text, n) for n, text in enumerate(words)]
    vocab = dict(pairs) if kind == "bpe" else [(text, -1.0) for text, _ in pairs]
    write(tmp_path, "config.json", {"vocab_size": 40})
    tokenizer = {"model": {"vocab": vocab}, "added_tokens": [{"id": 5}]}
    write(tmp_path, "tokenizer.json", tokenizer)
    expected = tuple(n for n in range(2, 40) if n != 5)
    assert read_model(str(tmp_path)).printable == expected


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    """Start-up stops with one sentence."""
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(EngineStartError, match=r"config\.json cannot be read"):
        read_model(str(tmp_path))
