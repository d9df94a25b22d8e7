"""vLLM's connector of hidden states, with our files, in vLLM's own processes.

vLLM 0.32's ``ExampleHiddenStatesConnector`` has the states of every prompt in a layer
of its KV cache. Of it stay how they get there and, on a GPU, how they come from there
(not run on a GPU). What differs:

- Only requests that ask for it are saved, and none that was aborted.
- Files are ours (``capture_files``): whole, named by us, with the operator's access.
- The worker hears of every file when it is whole or has failed; no error of a disk
  reaches the engine.
- On a CPU the copy is a plain one: vLLM's needs CUDA streams.
- Every rank reports what it has done, so that vLLM counts alike with NIXL beside it.

vLLM loads this class by ``kv_connector_module_path``; see ``arguments``.
"""

from __future__ import annotations

import threading
from importlib import import_module
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from tokenwire.worker.capture_files import Access, Array, write

from .capture import CAPTURE_KEY, PATH_KEY, Notifier

__all__ = ["CaptureConnector"]

logger: Any = init_logger(__name__)

_stock: Any = import_module(
    "vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector"
)

MAX_UNWRITTEN_BYTES = 1 << 30
"""States that have left the KV cache and wait for the disk. Above, requests keep their
blocks until their file is written: a slow disk then slows admission, and no memory
grows. With it a disk may pause for a second at 1 GB/s. Requests that share a prefix keep
hardly any blocks of their own and are admitted all the same: above twice as much, a
save fails at once."""

_GOOD_ENDS = frozenset(
    {
        RequestStatus.FINISHED_STOPPED,
        RequestStatus.FINISHED_LENGTH_CAPPED,
        RequestStatus.FINISHED_REPETITION,
    }
)

_DTYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
}


class _Unwritten:
    """What waits for the disk, over all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sizes: dict[str, int] = {}  # by path
        self._num_bytes = 0

    def add(self, path: str, num_bytes: int) -> bool:
        """Count a file that is not written yet; return False if too much waits."""
        with self._lock:
            if self._num_bytes > 2 * MAX_UNWRITTEN_BYTES:
                return False
            self._sizes[path] = num_bytes
            self._num_bytes += num_bytes
            return True

    def done(self, path: str) -> None:
        """Take note that a file is written, or has failed."""
        with self._lock:
            self._num_bytes -= self._sizes.pop(path, 0)

    def holds(self, path: str) -> bool:
        """Return whether a file waits while too much does."""
        return self._num_bytes > MAX_UNWRITTEN_BYTES and path in self._sizes


class _Copied:
    """When a request's blocks may be freed: in the place of vLLM's event for it."""

    def __init__(self, event: Any, path: str, unwritten: _Unwritten) -> None:
        self._event = event  # of the copy on a GPU; None: it is done
        self._path = path
        self._unwritten = unwritten

    def query(self) -> bool:
        """Return whether they may be freed now."""
        is_copied = self._event is None or self._event.query()
        return is_copied and not self._unwritten.holds(self._path)


class CaptureConnector(_stock.ExampleHiddenStatesConnector):
    """Saves what requests ask for."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)  # pyright: ignore[reportUnknownMemberType] - of vLLM's
        extra = self._kv_transfer_config.get_from_extra_config
        self._access = Access(
            extra("file_mode", None) or 0o600, extra("file_group", None)
        )
        self._notifier = Notifier(extra("notify", ""))
        self._unwritten = _Unwritten()

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Return the layout that the connector beside this one wants.

        The states are read through views that hide the layout. vLLM's own connector
        asks for the one that keeps a token's states together, NIXL for another, and an
        engine with two wishes does not start.
        """
        extra: dict[str, Any] = vllm_config.kv_transfer_config.kv_connector_extra_config
        beside: str | None = extra.get("layout_of")
        asked: Any = _stock.ExampleHiddenStatesConnector
        if beside is not None:
            asked = KVConnectorFactory.get_connector_class_by_name(beside)
        layout: str | None = asked.get_required_kvcache_layout(vllm_config)
        return layout

    def get_finished_count(self) -> None:
        """Every rank reports, as every other connector's ranks do."""

    # --- in the scheduler ----------------------------------------------------------

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Return what is to be saved now. No file is begun before it can be written."""
        del scheduler_output
        meta = _stock.ExampleHiddenStatesConnectorMetadata()
        meta.pending_saves = list(self._pending_saves.values())
        self._pending_saves.clear()
        return meta

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Have the states saved if the request asks for it and has ended well."""
        parameters: dict[str, Any] = request.kv_transfer_params or {}
        wish: dict[str, Any] | None = parameters.get(CAPTURE_KEY)
        prompt: list[int] | None = request.prompt_token_ids
        if wish is None or not prompt or request.status not in _GOOD_ENDS:
            return False, None
        token_ids = prompt[: wish["num_tokens"]]
        num_blocks = -(-len(token_ids) // self._block_size)  # those of the output stay
        self._pending_saves[request.request_id] = _stock.PendingSave(
            req_id=request.request_id,
            filename=wish["path"],
            token_ids=torch.tensor(token_ids, dtype=torch.int64),
            block_ids=list(block_ids[:num_blocks]),
        )
        return True, {PATH_KEY: wish["path"]}

    # --- in the workers ------------------------------------------------------------

    def wait_for_save(self) -> None:
        """Nothing to wait for: locks are made with their files."""

    def _submit_async_write(self, pending: Any) -> None:
        """Copy the states out of the KV cache, and have them written in a thread."""
        event: Any = None
        path: str = pending.filename
        num_tokens = len(pending.token_ids)
        if self._is_tp_rank_zero:
            cache = self._kv_cache  # (num_blocks, num_layers, block_size, hidden_size)
            row_bytes = cache.shape[1] * cache.shape[3] * cache.element_size()
            if not self._unwritten.add(path, num_tokens * row_bytes):
                self._tell(path, 0, "too much waits for the disk")
            elif cache.device.type == "cpu":
                slots = self._slots(pending.block_ids)
                states = _stock.extract_from_kv_cache(cache, slots, num_tokens)
                tensors = {"hidden_states": states, "token_ids": pending.token_ids}
                self._executor.submit(self._write_tensors, tensors, None, path, None)
            else:
                event = self._copy_on_gpu(pending)
        self._req_copy_events[pending.req_id] = _Copied(event, path, self._unwritten)

    def _copy_on_gpu(self, pending: Any) -> Any:  # torch.cuda.Event or None
        """Do as vLLM's connector, but without harm to others when it fails."""
        try:
            super()._submit_async_write(pending)  # pyright: ignore[reportUnknownMemberType] - of vLLM's
        except (OSError, RuntimeError) as error:  # no folder; no pinned memory
            self._unwritten.done(pending.filename)
            self._tell(pending.filename, 0, str(error))
            return None
        return self._req_copy_events[pending.req_id]

    def _write_tensors(
        self, tensors: dict[str, Any], event: Any, filename: str, lock_fd: int | None
    ) -> None:
        """Write a file, in a thread, and tell how that went."""
        del lock_fd  # of vLLM's own locks, which are off
        num_bytes, error = 0, ""
        try:
            if event is not None:
                event.synchronize()
            arrays = {name: _array(tensor) for name, tensor in tensors.items()}
            num_bytes = write(filename, arrays, self._access)
        except OSError as failure:
            error = failure.strerror or str(failure)
        except Exception as failure:
            logger.exception("%s could not be written", filename)
            error = f"{type(failure).__name__}: {failure}"
        finally:
            self._unwritten.done(filename)
        self._tell(filename, num_bytes, error)

    def _tell(self, path: str, num_bytes: int, error: str) -> None:
        try:
            self._notifier.tell(path, num_bytes, error)
        except OSError as failure:
            # The worker is on its way out, or fails the request when it has waited.
            logger.warning("nobody hears of %s: %s", path, failure)

    def _slots(self, block_ids: list[int]) -> Any:  # (num_blocks * block_size,)
        blocks = torch.tensor(block_ids, dtype=torch.int64).reshape(-1, 1)
        offsets = torch.arange(self._block_size, dtype=torch.int64)
        return (blocks * self._block_size + offsets).flatten()


def _array(tensor: Any) -> Array:  # torch.Tensor, on the CPU
    flat = tensor.contiguous().flatten().view(torch.uint8)
    return Array(_DTYPES[tensor.dtype], tuple(tensor.shape), memoryview(flat.numpy()))
