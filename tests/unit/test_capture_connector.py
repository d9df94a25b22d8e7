"""What the connector copies, without vLLM: in the place of its modules are stand-ins."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

CONNECTOR = "tokenwire.worker.vllm.capture_connector"
CONNECTORS = "vllm.distributed.kv_transfer.kv_connector"
BLOCK_SIZE = 16


@dataclass
class PendingSave:
    """vLLM's, of the same fields."""

    req_id: str
    filename: str
    token_ids: Any
    block_ids: list[int]


class StockConnector:
    """vLLM's own, as far as ours uses it."""

    def __init__(self, *_: Any) -> None:
        def extra(_: str, default: Any) -> Any:
            return default

        self._kv_transfer_config = SimpleNamespace(get_from_extra_config=extra)
        self._block_size = BLOCK_SIZE
        self._pending_saves: dict[str, PendingSave] = {}
        self._is_tp_rank_zero = True
        self._kv_cache = SimpleNamespace(
            shape=(8, 4, BLOCK_SIZE, 64),  # blocks, layers, block size, hidden size
            element_size=lambda: 2,
            device=SimpleNamespace(type="gpu"),
        )
        self._req_copy_events: dict[str, Any] = {}
        self.copied: list[str] = []

    def _submit_async_write(self, pending: PendingSave) -> None:
        self.copied.append(pending.req_id)
        event = SimpleNamespace(query=lambda: True)
        self._req_copy_events[pending.req_id] = event

    def submit(self, pending: PendingSave) -> bool:
        """Have states copied; return whether their blocks may be freed."""
        self._submit_async_write(pending)
        return bool(self._req_copy_events[pending.req_id].query())


def tensor(values: list[int], dtype: object) -> list[int]:
    """Stand in for torch's."""
    del dtype
    return values


STAND_INS: dict[str, dict[str, Any]] = {
    "torch": {
        "tensor": tensor,
        **{name: name for name in ("float32", "float16", "bfloat16", "int64")},
    },
    "vllm.logger": {"init_logger": logging.getLogger},
    "vllm.v1.request": {
        "RequestStatus": SimpleNamespace(
            FINISHED_STOPPED=1, FINISHED_LENGTH_CAPPED=2, FINISHED_REPETITION=3
        )
    },
    f"{CONNECTORS}.factory": {"KVConnectorFactory": None},
    f"{CONNECTORS}.v1.example_hidden_states_connector": {
        "ExampleHiddenStatesConnector": StockConnector,
        "ExampleHiddenStatesConnectorMetadata": SimpleNamespace,
        "PendingSave": PendingSave,
    },
}


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The connector's module, on stand-ins."""
    for name, attributes in STAND_INS.items():
        stand_in = ModuleType(name)
        vars(stand_in).update(attributes)
        monkeypatch.setitem(sys.modules, name, stand_in)
    real = sys.modules.pop(CONNECTOR, None)
    yield import_module(CONNECTOR)
    del sys.modules[CONNECTOR]
    if real is not None:
        sys.modules[CONNECTOR] = real


class News:
    """What the worker is told, in the place of a socket."""

    def __init__(self, address: str) -> None:
        del address
        self.told: list[tuple[str, int, str]] = []

    def tell(self, path: str, num_bytes: int, error: str = "") -> None:
        """Take note of how a file went."""
        self.told.append((path, num_bytes, error))


@pytest.fixture
def connector(module: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A connector, of either role."""
    monkeypatch.setattr(module, "Notifier", News)
    return module.CaptureConnector(None, None, None)


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks"), [(1, 1), (16, 1), (17, 2), (40, 3)]
)
def test_the_blocks_of_the_prompt_alone_are_copied(
    connector: Any, num_tokens: int, num_blocks: int
) -> None:
    """Those of an output may be many times as many."""
    request = SimpleNamespace(
        request_id="r",
        kv_transfer_params={
            "tokenwire_capture": {"path": "/d/x", "num_tokens": num_tokens}
        },
        prompt_token_ids=list(range(40)),
        status=1,
    )
    block_ids = list(range(100, 120))
    assert connector.request_finished(request, block_ids) == (
        True,
        {"hidden_states_path": "/d/x"},
    )
    [save] = connector.build_connector_meta(None).pending_saves
    assert save.token_ids == list(range(num_tokens))
    assert save.block_ids == block_ids[:num_blocks]


def test_what_waits_for_the_disk_is_bounded(
    connector: Any, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First requests keep their blocks; then, if more come all the same, saves fail."""
    size = 10 * 4 * 64 * 2
    monkeypatch.setattr(module, "MAX_UNWRITTEN_BYTES", size)

    def save(name: str) -> PendingSave:
        return PendingSave(name, f"/d/{name}", list(range(10)), [1])

    assert connector.submit(save("a"))
    assert not connector.submit(save("b"))
    assert not connector.submit(save("c"))
    assert connector._notifier.told == []
    assert connector.submit(save("d"))
    assert connector._notifier.told == [("/d/d", 0, "too much waits for the disk")]
    assert connector.copied == ["a", "b", "c"]

    connector._unwritten.done("/d/a")
    connector.submit(save("e"))
    assert connector.copied == ["a", "b", "c", "e"]
