"""The bytes of every message, fixed: a change here breaks peers of other releases.

After a change that is meant (a new field with a default does not change old bytes):
``python tests/contract/test_protocol_golden.py --write`` writes the files anew.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from tokenwire.protocol.blocks import block_hashes, pack_hashes, root_hash
from tokenwire.protocol.codec import decode_from_frontend, decode_from_worker, encode
from tokenwire.protocol.messages import (
    BY_PAUSE,
    CAPTURE,
    GOES_ON,
    Adapter,
    Admin,
    AdminDone,
    Batch,
    Bye,
    Cancel,
    Card,
    Discard,
    EngineDead,
    ErrorKind,
    Finished,
    FinishReason,
    FromFrontend,
    FromWorker,
    Hello,
    Keep,
    KVBlocks,
    Leg,
    LetGo,
    Load,
    Logprobs,
    MetricsText,
    OrphanedKV,
    Ping,
    Recall,
    Recalled,
    Refused,
    ReleaseKV,
    Role,
    Sampling,
    ScrapeMetrics,
    Settled,
    Status,
    StructuredOutput,
    Submit,
    Tokens,
    Told,
    Trace,
    WatchKV,
)
from tokenwire.protocol.tokens import pack_floats, pack_ids

GOLDEN = Path(__file__).parent / "golden"

LOGPROBS = Logprobs(
    width=2,
    token_ids=pack_ids([7, 8]),
    logprobs=pack_floats([-0.5, -1.5]),
    ranks=pack_ids([1, 2]),
)

FROM_FRONTEND: dict[str, FromFrontend] = {
    "hello": Hello(1, "frontend-0", "f00d", ["resume"]),
    "submit_least": Submit("r1", pack_ids([1, 2, 3]), Sampling(max_tokens=16)),
    "submit_zeros": Submit("r1", pack_ids([0]), Sampling(1, temperature=0.0, seed=0)),
    "submit_full": Submit(
        "r1",
        pack_ids([1, 49151]),
        Sampling(
            max_tokens=16,
            min_tokens=2,
            temperature=0.5,
            top_p=0.75,
            top_k=40,
            min_p=0.25,
            seed=42,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            repetition_penalty=1.25,
            stop_token_ids=[2],
            ignore_eos=True,
            logprobs=1,
            prompt_logprobs=1,
            logit_bias={5: -1.5},
            allowed_token_ids=[1, 2],
            bad_words=["no"],
            structured_output=StructuredOutput("regex", "a+", " "),
        ),
        leg=Leg.DECODE,
        handover={
            "remote_block_ids": [1, 2],
            "remote_host": "h",
            "nested": {"a": None},
        },
        kv_transfer_params={"b": 1.5},
        priority=-1,
        cache_salt="salt",
        echo_prompt=True,
        reasoning_ended=False,
        reasoning_parser_kwargs={"chat_template_kwargs": {"enable_thinking": True}},
    ),
    "submit_lora": Submit(
        "r1", pack_ids([1]), Sampling(1), lora="adapter", handover_update=7
    ),
    "submit_resumed": Submit("r1", pack_ids([1, 2, 3]), Sampling(16), num_prior=2),
    "submit_kept": Submit(
        "r1",
        pack_ids([1]),
        Sampling(1),
        keep=Keep("chatcmpl-0", b"owner", b"context", 600.0),
    ),
    "submit_kept_full": Submit(
        "r1",
        pack_ids([1, 2, 7]),
        Sampling(9),
        num_prior=1,
        keep=Keep("chatcmpl-0", b"owner", b"c", 1.5, True, 2, LOGPROBS),
    ),
    "submit_traced": Submit(
        "r1",
        pack_ids([1]),
        Sampling(1),
        trace=Trace(
            "chatcmpl-0",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "vendor=1",
        ),
    ),
    "submit_told_of": Submit(
        "r1", pack_ids([1]), Sampling(1), trace=Trace("chatcmpl-0")
    ),
    "let_go": LetGo("r1"),
    "recall": Recall("r1", "chatcmpl-0", b"owner", "follow", seq=2),
    "cancel": Cancel("r1"),
    "cancel_numbered": Cancel("r1", seq=2),
    "release_kv": ReleaseKV("r1", {"remote_engine_id": "e"}),
    "submit_capture": Submit("r1", pack_ids([1]), Sampling(1), capture_tokens=1),
    "settled": Settled("r1"),
    "discard": Discard("/d/capture-0.safetensors"),
    "told": Told("/d/capture-0.safetensors", seq=4),
    "admin_least": Admin("a1", "resume"),
    "admin_full": Admin(
        "a1", "pause", {"mode": "keep", "clear_cache": False}, timeout_s=300.0, seq=2
    ),
    "ping": Ping("f00d"),
    "bye": Bye("rolling restart"),
    "scrape_metrics": ScrapeMetrics(seq=4),
    "watch_kv": WatchKV(seq=2),
}

FROM_WORKER: dict[str, FromWorker] = {
    "card_least": Card(1, "w", "beef", Role.AGGREGATED, "m", 2048, 100, 16, "sim", "1"),
    "card_full": Card(
        1,
        "prefill-0",
        "beef",
        Role.PREFILL,
        "m",
        8192,
        49152,
        16,
        "vllm",
        "0.32.0",
        tokenizer_sha256="ab" * 32,
        revision="main",
        dtype="float32",
        connector="NixlConnector",
        connector_compatibility="nixl-1",
        max_num_seqs=32,
        num_kv_blocks=1000,
        capabilities=["resume"],
    ),
    "card_of_captures": Card(
        1,
        "w",
        "beef",
        Role.PREFILL,
        "m",
        2048,
        100,
        16,
        "sim",
        "1",
        capabilities=[CAPTURE],
        hidden_state_layers=[2, 15],
    ),
    "refused": Refused("another version"),
    "batch_empty": Batch(),
    "batch_numbered": Batch(seq=1),
    "batch_tokens": Batch(
        tokens=[
            Tokens("r1", 0, pack_ids([7])),
            Tokens("r2", 300, pack_ids([7]), LOGPROBS),
        ]
    ),
    "batch_finished": Batch(
        finished=[
            Finished("r1", FinishReason.LENGTH, 16),
            Finished(
                "r2",
                FinishReason.STOP,
                301,
                num_prompt_tokens=2,
                num_cached_tokens=1,
                stop_reason=2,
                prompt_token_ids=pack_ids([1, 2]),
                handover={"remote_block_ids": [[1]]},
                kv_transfer_params={"hidden_states_path": "/x"},
                prompt_logprobs=LOGPROBS,
                queue_s=0.5,
                prefill_s=0.25,
            ),
            Finished(
                "r3",
                FinishReason.ERROR,
                0,
                stop_reason="x",
                error_kind=ErrorKind.HANDOVER,
                error="no KV",
            ),
        ]
    ),
    "batch_unsaved": Batch(
        finished=[
            Finished(
                "r",
                FinishReason.ERROR,
                3,
                error_kind=ErrorKind.CAPTURE,
                error="no space left",
            )
        ]
    ),
    "batch_paused": Batch(
        finished=[Finished("r", FinishReason.ABORT, 3, stop_reason=BY_PAUSE)]
    ),
    "card_of_four": Card(
        1, "w", "beef", Role.DECODE, "m", 1, 1, 1, "sim", "1", world_size=4
    ),
    "card_exact": Card(
        1, "w", "beef", Role.DECODE, "m", 1, 1, 1, "sim", "1", exactness="same_rng"
    ),
    "status_first": Status(),
    "status_full": Status(
        "step-7",
        1_700_000_000_000_000,
        [Adapter("a", 3), Adapter("b", 4)],
        paused=True,
        sleep_level=1,
        busy="update_weights",
        cache_epoch=2,
        fault="half loaded",
        seq=5,
    ),
    "admin_done": AdminDone("a1"),
    "admin_failed": AdminDone("a1", "no such folder", "not_found", seq=6),
    "admin_result": AdminDone("a1", result={"results": [None, "1"]}),
    "recalled_least": Recalled("r1", "unknown"),
    "recalled_full": Recalled(
        "r1",
        "ended",
        2,
        True,
        True,
        b"c",
        pack_ids([1, 2, 7]),
        1,
        LOGPROBS,
        16,
        [(0, "v1")],
        Finished("r0", FinishReason.ABORT, 1, stop_reason=GOES_ON),
        seq=8,
    ),
    "load": Load("beef", 1, 2, 0.5, 300, draining=True, num_requests=3),
    "load_of_two": Load("beef", num_frontends=2),
    "load_idle": Load("beef"),
    "load_numbered": Load("beef", seq=70_000),
    "orphaned_kv": OrphanedKV("b-1", {"remote_engine_id": "e"}, seq=3),
    "engine_dead": EngineDead("out of memory"),
    "metrics_text": MetricsText("# TYPE vllm:a gauge\nvllm:a 1.0\n", seq=5),
    "metrics_text_least": MetricsText(),
    "kv_blocks_first": KVBlocks(
        reset=True,
        stored=pack_hashes(block_hashes(pack_ids([1, 2, 3, 4]), 2, root_hash())),
        seq=3,
    ),
    "kv_blocks_change": KVBlocks(
        stored=pack_hashes([1]), removed=pack_hashes([2**64 - 1]), seq=4
    ),
}

MESSAGES: dict[str, FromFrontend | FromWorker] = {**FROM_FRONTEND, **FROM_WORKER}


def dump(data: bytes) -> list[str]:
    """Return *data* as lines of hexadecimal with the text beside it."""
    rows = [data[i : i + 16] for i in range(0, len(data), 16)]
    return [f"{row.hex(' '):<47}  |{printable(row)}|" for row in rows]


def printable(row: bytes) -> str:
    """Return *row* as text, with a point for what has no character."""
    return "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)


def undump(text: str) -> bytes:
    """Return the bytes of a ``dump``."""
    return b"".join(bytes.fromhex(line[:47]) for line in text.splitlines())


def names_of_direction(union: object) -> Iterator[str]:
    """Return the names of the messages of one direction."""
    return (kind.__name__ for kind in get_args(union))


@pytest.mark.parametrize("name", MESSAGES)
def test_bytes_are_as_ever(name: str) -> None:
    """A message is encoded to the very bytes of the golden file."""
    golden = (GOLDEN / f"{name}.hex").read_text().splitlines()
    assert dump(encode(MESSAGES[name])) == golden


@pytest.mark.parametrize("name", FROM_FRONTEND)
def test_golden_bytes_from_a_frontend_are_understood(name: str) -> None:
    """The bytes of an earlier release still mean the same message."""
    data = undump((GOLDEN / f"{name}.hex").read_text())
    assert decode_from_frontend(data) == FROM_FRONTEND[name]


@pytest.mark.parametrize("name", [n for n in FROM_FRONTEND if n.startswith("submit")])
def test_a_map_s_header_may_be_short(name: str) -> None:
    """Submit has more than 15 fields now, so msgspec gives it the long form always.

    Earlier releases, with fewer, gave it the short one where it was enough.
    """
    data = undump((GOLDEN / f"{name}.hex").read_text())
    assert data[:2] == b"\xde\x00"
    short = bytes([0x80 | data[2]]) + data[3:]
    assert data[2] <= 15
    assert decode_from_frontend(short) == FROM_FRONTEND[name]


@pytest.mark.parametrize("name", FROM_WORKER)
def test_golden_bytes_from_a_worker_are_understood(name: str) -> None:
    """The bytes of an earlier release still mean the same message."""
    data = undump((GOLDEN / f"{name}.hex").read_text())
    assert decode_from_worker(data) == FROM_WORKER[name]


def test_every_message_has_golden_bytes() -> None:
    """No message kind is without a file, and no file without a message."""
    for union, messages in ((FromFrontend, FROM_FRONTEND), (FromWorker, FROM_WORKER)):
        assert {type(m).__name__ for m in messages.values()} == set(
            names_of_direction(union)
        )
    assert {path.stem for path in GOLDEN.glob("*.hex")} == set(MESSAGES)


def main() -> None:
    """Write the golden files anew; only on ``--write``."""
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    GOLDEN.mkdir(exist_ok=True)
    for name, message in MESSAGES.items():
        (GOLDEN / f"{name}.hex").write_text("\n".join(dump(encode(message))) + "\n")


if __name__ == "__main__":
    main()
