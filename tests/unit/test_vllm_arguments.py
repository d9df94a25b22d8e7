"""What vLLM is told of hidden states, by role; a fake takes its command line."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest

from tokenwire.protocol.messages import Role
from tokenwire.worker.capture_files import Access
from tokenwire.worker.engine import EngineStartError
from tokenwire.worker.vllm.arguments import (
    CaptureArguments,
    engine_config,
    set_environment,
)
from tokenwire.worker.vllm.binding import Vllm

NUM_LAYERS = 30
SAVING = CaptureArguments((2, 30), "/d", Access(0o640, 5), "somewhere")
KEEPING = CaptureArguments((2, 30))


@dataclass
class FakeArgs:
    """vLLM's ``AsyncEngineArgs``, which makes a configuration of what it was given."""

    given: dict[str, Any] = field(default_factory=dict[str, Any])
    executor: ClassVar[str] = "mp"  # vLLM's choice on a CPU

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add the options that we use."""
        for name in (
            *("--model", "--served-model-name", "--kv-transfer-config", "--worker-cls"),
            *("--speculative-config", "--kv-cache-memory-bytes"),
            "--distributed-executor-backend",
        ):
            parser.add_argument(name)
        parser.add_argument("--disable-log-stats", action="store_true")
        parser.add_argument("--enforce-eager", action="store_true")
        return parser

    @classmethod
    def from_cli_args(cls, parsed: argparse.Namespace) -> FakeArgs:
        """Keep what was parsed."""
        return cls(vars(parsed))

    def create_engine_config(self) -> Any:
        """Return it, with a model of 30 layers."""
        model = SimpleNamespace(get_total_num_hidden_layers=lambda: NUM_LAYERS)
        parallel = SimpleNamespace(
            world_size=1, distributed_executor_backend=self.executor
        )
        return SimpleNamespace(
            model_config=model, parallel_config=parallel, **self.given
        )


def configured(
    role: Role, capture: CaptureArguments | None, *given: str, is_cpu: bool = False
) -> Any:
    """Return the configuration that vLLM would make."""
    vllm = SimpleNamespace(
        is_cpu=is_cpu,
        AsyncEngineArgs=FakeArgs,
        FlexibleArgumentParser=argparse.ArgumentParser,
    )
    return engine_config(cast("Vllm", vllm), "m", "n", role, list(given), capture)


def transfer(config: Any) -> Any:
    """Return the KV connectors."""
    text = config.kv_transfer_config
    return None if text is None else json.loads(text)


def test_without_capture_nothing_changes() -> None:
    """A pair has NIXL alone, an aggregated engine nothing, and none speculates."""
    assert transfer(configured(Role.AGGREGATED, None)) is None
    alone = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    assert transfer(configured(Role.PREFILL, None)) == alone
    assert configured(Role.DECODE, None).speculative_config is None


@pytest.mark.parametrize("role", [Role.AGGREGATED, Role.PREFILL])
def test_who_saves_has_our_connector(role: Role) -> None:
    """Beside NIXL, whose KV layout it takes, or alone."""
    made = transfer(configured(role, SAVING))
    if role is Role.PREFILL:
        assert (made["kv_connector"], made["kv_role"]) == ("MultiConnector", "kv_both")
        nixl, made = made["kv_connector_extra_config"]["connectors"]
        assert nixl == {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    extra = made["kv_connector_extra_config"]
    assert made["kv_connector_module_path"].endswith(".capture_connector")
    assert made["kv_role"] == "kv_producer"
    assert extra.get("layout_of") == ("NixlConnector" if role is Role.PREFILL else None)
    assert extra["shared_storage_path"] == "/d"
    assert (extra["file_mode"], extra["file_group"]) == (0o640, 5)
    assert extra["notify"] == "somewhere"
    assert extra["use_synchronization_lock"] is False


def test_a_decode_engine_keeps_the_same_layers() -> None:
    """And saves nothing."""
    both = [configured(Role.PREFILL, SAVING), configured(Role.DECODE, KEEPING)]
    kept = [json.loads(config.speculative_config) for config in both]
    assert kept[0] == kept[1]
    assert kept[0]["method"] == "extract_hidden_states"
    layers = kept[0]["draft_model_config"]["hf_config"]
    assert layers == {"eagle_aux_hidden_state_layer_ids": [2, 30]}
    assert transfer(both[1])["kv_connector"] == "NixlConnector"


def test_a_layer_that_the_model_has_not_is_one_sentence() -> None:
    """Before any weight is loaded; the last layer's output is there."""
    configured(Role.AGGREGATED, CaptureArguments((NUM_LAYERS,), "/d"))
    with pytest.raises(EngineStartError) as caught:
        configured(Role.AGGREGATED, CaptureArguments((2, NUM_LAYERS + 1), "/d"))
    assert str(caught.value) == (
        "--capture-layers names layer 31, the model has 30: 0..30 are there"
    )


@pytest.mark.parametrize(
    "given", [("--kv-transfer-config", "{}"), ("--speculative_config.method=x",)]
)
def test_the_operator_s_own_of_the_same_contradicts(given: tuple[str, ...]) -> None:
    """What would silently win over ours, or be overwritten, is refused."""
    with pytest.raises(EngineStartError, match="contradicts --capture-layers"):
        configured(Role.PREFILL, SAVING, *given)


def test_on_a_cpu_nixl_has_its_buffer_there() -> None:
    """With and without capture."""
    alone = transfer(configured(Role.DECODE, KEEPING, is_cpu=True))
    assert alone["kv_buffer_device"] == "cpu"
    made = transfer(configured(Role.PREFILL, SAVING, is_cpu=True))
    [nixl, _] = made["kv_connector_extra_config"]["connectors"]
    assert nixl["kv_buffer_device"] == "cpu"


@pytest.mark.parametrize(
    ("given", "bind", "expected"),
    [
        ((), "nobind", "uni"),
        ((), "0-3", "mp"),
        (("--distributed-executor-backend", "mp"), "nobind", "mp"),
    ],
)
def test_on_a_cpu_the_model_runs_in_the_core(
    given: tuple[str, ...], bind: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless vLLM binds threads, or the operator has said where it runs."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", bind)
    config = configured(Role.AGGREGATED, None, *given, is_cpu=True)
    assert config.parallel_config.distributed_executor_backend == expected
    on_gpu = configured(Role.AGGREGATED, None)
    assert on_gpu.parallel_config.distributed_executor_backend == "mp"


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ({}, "127.0.0.1"),
        ({"VLLM_NIXL_SIDE_CHANNEL_HOST": "10.0.0.7"}, "10.0.0.7"),
        ({"VLLM_NIXL_SIDE_CHANNEL_HOST": "localhost"}, "127.0.0.1"),
    ],
)
def test_the_side_channel_is_at_an_address(given: dict[str, str], address: str) -> None:
    """Compose gives each service a name, which ZeroMQ does not bind."""
    environ = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", **given}
    set_environment(Role.PREFILL, is_cpu=True, environ=environ)

    found = environ["VLLM_NIXL_SIDE_CHANNEL_HOST"]
    assert found in {address, "::1"}


def test_a_side_channel_that_does_not_resolve_is_said() -> None:
    """Before an engine loads."""
    environ = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "no such host"}
    with pytest.raises(EngineStartError, match="no such host does not resolve"):
        set_environment(Role.DECODE, is_cpu=True, environ=environ)
