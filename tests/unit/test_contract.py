"""The contract of a generation: what changes it, what a difference is called."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from support.checkpoints import a_checkpoint
from support.tiny_model import CHAT_TEMPLATE
from tokenwire.frontend.checkpoint import (
    Adapter,
    Contract,
    Environment,
    Grammar,
    json_sha256,
)
from tokenwire.frontend.contract import (
    Terms,
    check_contract,
    check_sampling,
    differences,
    environment_of,
    on_worker,
    promise,
    sampling_params,
)
from tokenwire.frontend.errors import ApiError
from tokenwire.frontend.job import Job
from tokenwire.frontend.model import load_model
from tokenwire.frontend.parsers import ParserChoice, Parsers
from tokenwire.frontend.peer import Peer
from tokenwire.frontend.policy import Policy
from tokenwire.frontend.schema import ChatRequest, CompletionRequest
from tokenwire.protocol.messages import Card, Role, Sampling, StructuredOutput

TOOL = {"type": "function", "function": {"name": "f"}}
HASH, OTHER = "a" * 64, "b" * 64
BASE = Contract(model="m", vocab_size=1)


def terms(model: Path, job: dict[str, Any] | None = None, **fields: Any) -> Terms:
    """Return the terms of a chat with *fields*."""
    request = msgspec.convert({"messages": [], **fields}, ChatRequest)
    sampling = (job or {}).pop("sampling", Sampling(8))
    return Terms(
        request,
        Job([1], sampling, **(job or {})),
        load_model(str(model)),
        Policy(),
        "m",
    )


def contract(model: Path, job: dict[str, Any] | None = None, **fields: Any) -> Contract:
    """Return the contract of a chat with *fields*."""
    return terms(model, job, **fields).contract()


def test_a_plain_chat_has_the_models_hashes(tiny_model: Path) -> None:
    """Of the files themselves; null where there is nothing."""
    made = contract(tiny_model)
    tokenizer = (tiny_model / "tokenizer.json").read_bytes()

    assert made == Contract(
        model="m",
        vocab_size=264,
        tokenizer_sha256=hashlib.sha256(tokenizer).hexdigest(),
        chat_template_sha256=hashlib.sha256(CHAT_TEMPLATE.encode()).hexdigest(),
    )


def test_a_completion_has_nothing_of_chats(tiny_model: Path) -> None:
    """No template, no tools, no parsers."""
    request = msgspec.convert({"prompt": "a"}, CompletionRequest)
    of_chat = terms(tiny_model)

    made = Terms(
        request, of_chat.job, of_chat.model, Policy(), of_chat.served_model
    ).contract()

    assert made.chat_template_sha256 is None
    assert made.tokenizer_sha256 == of_chat.contract().tokenizer_sha256


@pytest.mark.parametrize(
    ("field", "job", "fields"),
    [
        ("chat_template_sha256", {}, {"chat_template": "x"}),
        ("template_kwargs_sha256", {}, {"chat_template_kwargs": {"a": 1}}),
        ("template_kwargs_sha256", {}, {"reasoning_effort": "low"}),
        ("template_kwargs_sha256", {}, {"include_reasoning": False}),
        ("template_kwargs_sha256", {}, {"chat_template_kwargs": {"a": "\ud800"}}),
        ("tools_sha256", {}, {"tools": [TOOL]}),
        ("cache_salt_sha256", {"cache_salt": "s"}, {}),
        ("adapter", {"lora": "l"}, {}),
        (
            "grammar",
            {"sampling": Sampling(8, structured_output=StructuredOutput("regex", "a"))},
            {},
        ),
    ],
)
def test_what_a_request_asks_changes_one_field(
    tiny_model: Path, field: str, job: dict[str, Any], fields: dict[str, Any]
) -> None:
    """So that a difference can be named."""
    plain, made = contract(tiny_model), contract(tiny_model, dict(job), **fields)

    assert msgspec.structs.replace(made, **{field: getattr(plain, field)}) == plain
    assert getattr(made, field) != getattr(plain, field)
    assert made == contract(tiny_model, dict(job), **fields)


def test_tools_are_told_apart_by_their_choice(tiny_model: Path) -> None:
    """It decides how the output is held and parsed."""
    choices: list[dict[str, Any]] = [
        {},
        {"tool_choice": "required"},
        {"parallel_tool_calls": False},
    ]
    made = [contract(tiny_model, tools=[TOOL], **more) for more in choices]

    assert len({one.tools_sha256 for one in made}) == 3


def test_parsers_are_named(tiny_model: Path) -> None:
    """Those that the operator configured."""
    choice = ParserChoice("hermes", "qwen3")
    parsers = cast("Parsers", SimpleNamespace(choice=choice))
    plain = terms(tiny_model)

    made = Terms(
        plain.request, plain.job, plain.model, Policy(parsers=parsers), "m"
    ).contract()

    assert (made.tool_parser, made.reasoning_parser) == ("hermes", "qwen3")


def peer(**card: Any) -> Peer:
    """Return a worker with a card."""
    made = Peer("tcp://w:1")
    made.told_card(
        Card(1, "w", "i", Role.AGGREGATED, "m", 100, 264, 16, "vllm", "0.32", **card)
    )
    return made


def test_the_worker_says_the_rest() -> None:
    """Revision and weights are the contract's; the engine is the environment's."""
    made = peer(revision="r", weight_version="step-7", dtype="float32", world_size=2)

    assert on_worker(BASE, made) == msgspec.structs.replace(
        BASE, revision="r", weight_version="step-7"
    )
    assert on_worker(BASE, Peer("tcp://w:1")) == BASE
    assert environment_of(made) == Environment(
        engine="vllm", engine_version="0.32", dtype="float32", world_size=2
    )
    assert environment_of(None) == environment_of(Peer("x")) == Environment()


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("model", "n", "model_mismatch"),
        ("revision", "r", "model_mismatch"),
        ("weight_version", "w", "model_mismatch"),
        ("quantization", "fp8", "model_mismatch"),
        ("tokenizer_sha256", HASH, "tokenizer_mismatch"),
        ("vocab_size", 2, "tokenizer_mismatch"),
        ("chat_template_sha256", HASH, "chat_template_mismatch"),
        ("template_kwargs_sha256", HASH, "chat_template_mismatch"),
        ("adapter", Adapter("l", update=5), "adapter_mismatch"),
        ("grammar", Grammar("json", HASH), "grammar_mismatch"),
        ("reasoning_parser", "qwen3", "parser_mismatch"),
        ("tool_parser", "hermes", "parser_mismatch"),
        ("tools_sha256", HASH, "tools_mismatch"),
        ("cache_salt_sha256", HASH, "prompt_mismatch"),
    ],
)
def test_each_field_of_the_contract_has_its_error(
    field: str, value: Any, code: str
) -> None:
    """409, with the field as ``param`` and both values in the message."""
    other = msgspec.structs.replace(BASE, **{field: value})
    check_contract(BASE, BASE, "checkpoint.contract")

    with pytest.raises(ApiError) as caught:
        check_contract(other, BASE, "checkpoint.contract")

    error = caught.value
    assert (error.status, error.code) == (409, code)
    assert error.param == f"nvext.resume_from.checkpoint.contract.{field}"
    shown = getattr(value, "sha256", None) or getattr(value, "id", value)
    assert str(shown) in error.message


def test_every_field_of_a_contract_counts() -> None:
    """None is left out of the check."""
    for field in Contract.__struct_fields__:
        other = msgspec.structs.replace(BASE, **{field: "x"})
        with pytest.raises(ApiError, match=field):
            check_contract(other, BASE, "checkpoint.contract")


def test_sampling_must_be_the_same() -> None:
    """Each parameter; 409 by its name."""
    theirs = a_checkpoint().sampling
    check_sampling(theirs, theirs, "checkpoint.sampling")

    for field in theirs.__struct_fields__:
        other = msgspec.structs.replace(theirs, **{field: "x"})
        with pytest.raises(ApiError) as caught:
            check_sampling(theirs, other, "checkpoint.sampling")
        assert caught.value.code == "sampling_mismatch"
        assert caught.value.param == f"nvext.resume_from.checkpoint.sampling.{field}"


def test_sampling_has_one_form() -> None:
    """Order and kind of number do not make parameters differ."""
    request = msgspec.convert({"messages": []}, ChatRequest)
    one = Sampling(
        9, temperature=1, stop_token_ids=[5, 3, 5], logit_bias={7: 1, 10: 2.0}
    )
    other = Sampling(
        9, temperature=1.0, stop_token_ids=[3, 5], logit_bias={10: 2, 7: 1.0}
    )

    made = sampling_params(one, request, ["x"])

    assert json_sha256(made) == json_sha256(sampling_params(other, request, ["x"]))
    assert made.stop == ["x"]
    assert made.skip_special_tokens
    in_text = msgspec.convert(
        {"messages": [], "skip_special_tokens": False}, ChatRequest
    )
    assert not sampling_params(one, in_text, []).skip_special_tokens


def test_only_what_is_known_can_differ() -> None:
    """An unknown part of the environment is no difference."""
    known = Environment(engine="vllm", dtype="bfloat16", device="H200")

    assert differences(known, known) == []
    assert differences(known, Environment(engine="vllm")) == []
    assert differences(known, Environment(engine="sim", dtype="float32")) == [
        "engine",
        "dtype",
    ]


GREEDY = Sampling(8, temperature=0)
SEEDED = Sampling(8, seed=1)
UNSEEDED = Sampling(8)


@pytest.mark.parametrize(
    ("sampling", "offered", "differs", "promised"),
    [
        (GREEDY, "", [], "same_rng"),  # there is nothing to draw
        (Sampling(8, temperature=0, presence_penalty=1), "", [], "best_effort"),
        (SEEDED, "", [], "best_effort"),
        (UNSEEDED, "", [], "best_effort"),
        (UNSEEDED, "same_rng", [], "best_effort"),  # draws that nobody can repeat
        (SEEDED, "same_rng", [], "same_rng"),
        (SEEDED, "bitwise", [], "bitwise"),
        (SEEDED, "bitwise", ["dtype"], "same_rng"),
        (SEEDED, "bitwise", ["rng"], "best_effort"),
        (SEEDED, "same_rng", ["engine"], "best_effort"),
        (GREEDY, "bitwise", ["rng"], "same_rng"),
        (GREEDY, "bitwise", ["engine"], "best_effort"),
    ],
)
def test_what_is_promised(
    sampling: Sampling, offered: str, differs: list[str], promised: str
) -> None:
    """Not more than sampling, worker and environment allow."""
    assert promise(sampling, offered, differs) == promised
