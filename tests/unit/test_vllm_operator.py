"""What vLLM is told, and when: pauses, sleep, cache salts, and adapters."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.admin import adapter
from support.awake import within
from tokenwire.protocol.admin import (
    Action,
    LoadLora,
    Pause,
    ResetPrefixCache,
    Resume,
    Sleep,
    UnloadLora,
)
from tokenwire.protocol.messages import Sampling
from tokenwire.worker.engine import AdminOutcome, EngineRequest
from tokenwire.worker.vllm import operator as module
from tokenwire.worker.vllm.adapters import Copies
from tokenwire.worker.vllm.operator import Operator


class EngineDeadError(Exception):
    """As vLLM's."""


@dataclass
class Adapter:
    """As vLLM's ``LoRARequest``."""

    name: str
    lora_int_id: int
    path: str
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


@dataclass
class Core:
    """vLLM's ``AsyncLLM``: takes calls in order, and answers those that it may."""

    calls: list[Any] = field(default_factory=list[Any])
    is_paused: bool = False
    hangs: set[str] = field(default_factory=set[str])  # get no answer
    loaded: list[tuple[int, bytes, bool]] = field(
        default_factory=list[tuple[int, bytes, bool]]
    )

    engine_core = SimpleNamespace(outputs_queue=asyncio.Queue())

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        """Pause; vLLM answers a wait when nothing runs."""
        assert not clear_cache
        await self._take(f"pause {mode}", is_paused=True)

    async def resume_generation(self) -> None:
        """Go on."""
        await self._take("resume", is_paused=False)

    async def sleep(self, level: int, mode: str) -> None:
        """Sleep."""
        await self._take(f"sleep {level} {mode}", is_paused=True)

    async def reset_prefix_cache(
        self, running: bool = False, external: bool = False
    ) -> bool:
        """Fail where vLLM fails: requests wait for KV from elsewhere."""
        call = f"reset {running}{' external' * external}"
        await self._take(call, is_paused=self.is_paused)
        if running:
            msg = "Failed to reset KV cache"
            raise RuntimeError(msg)
        return True

    async def add_lora(self, adapter: Adapter) -> bool:
        """Read an adapter; one without content cannot be loaded."""
        await self._take("add", is_paused=self.is_paused)
        content = (Path(adapter.path) / "adapter_model.safetensors").read_bytes()
        if not content:
            msg = "Call to add_lora method failed: no tensors"
            raise RuntimeError(msg)
        self.loaded.append((adapter.lora_int_id, content, adapter.load_inplace))
        return True

    async def remove_lora(self, number: int) -> bool:
        """Forget an adapter."""
        await self._take(f"remove {number}", is_paused=self.is_paused)
        return True

    async def _take(self, call: str, *, is_paused: bool) -> None:
        self.calls.append(call)
        self.is_paused = is_paused
        if call in self.hangs:
            await asyncio.Event().wait()
        await asyncio.sleep(0)


def operator(
    core: Core,
    copies: Copies | None = None,
    forgotten: Callable[[str | None], None] | None = None,
    **parallel: Any,
) -> Operator:
    """Return an operator of a CPU's engine."""
    vllm: Any = SimpleNamespace(
        EngineDeadError=EngineDeadError, is_cpu=True, LoRARequest=Adapter
    )
    on_one = {"nnodes": 1, "distributed_executor_backend": "mp", **parallel}
    config = SimpleNamespace(
        lora_config=object(), parallel_config=SimpleNamespace(**on_one)
    )
    return Operator(vllm, core, config, copies or Copies(), forgotten)


async def do(one: Operator, action: Action, timeout_s: float = 0.0) -> AdminOutcome:
    """Do an action as the engine has it done."""
    one.expect(action)
    async with within(60):
        return await one.do(action, timeout_s)


@pytest.mark.parametrize("action", [Pause("wait"), Sleep(0, "wait")])
async def test_what_waits_too_long_is_undone(action: Action) -> None:
    """The engine goes on, as the Status says."""
    core = Core(hangs={"pause wait"})
    outcome = await do(operator(core), action, 0.01)
    assert (outcome.kind, outcome.is_stuck) == ("timeout", False)
    assert core.calls == ["pause wait", "resume"]


async def test_an_engine_that_was_paused_before_stays_so() -> None:
    """A second pause that fails does not end the first."""
    core = Core(hangs={"pause wait"})
    one = operator(core)
    await do(one, Pause("keep", clear_cache=False))
    await do(one, Pause("wait"), 0.01)
    assert core.calls == ["pause keep", "pause wait", "pause keep"]


async def test_an_engine_that_does_not_go_on_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Within a bound: else the worker would be busy for ever."""
    monkeypatch.setattr(module, "UNDO_WAIT_S", 0.01)
    core = Core(hangs={"pause wait", "resume"})
    outcome = await do(operator(core), Pause("wait"), 0.01)
    assert (outcome.kind, outcome.is_stuck) == ("timeout", True)


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_resume_wins_over_the_pause_that_it_crosses(is_late: bool) -> None:
    """Whichever of the two the core gets first: the last word is resume."""
    core = Core(hangs={"pause wait"})
    one = operator(core)
    one.expect(Pause("wait"))
    if is_late:
        pausing = asyncio.ensure_future(one.do(Pause("wait"), 0))
        while not core.calls:
            await asyncio.sleep(0)
        assert not (await do(one, Resume())).error
    else:  # while the worker waits for what was aborted
        assert not (await do(one, Resume())).error
        pausing = asyncio.ensure_future(one.do(Pause("wait"), 0))
    async with within(60):
        outcome = await pausing
    assert outcome.error == "it was resumed"
    assert not core.is_paused
    assert core.calls[-1] == "resume"


async def test_a_resume_that_the_core_gets_first_is_sent_again() -> None:
    """Its answer comes when the pause has been sent behind it."""
    core = Core(hangs={"pause wait"})
    one = operator(core)
    one.expect(Pause("wait"))
    both = [one.do(Resume(), 0), one.do(Pause("wait"), 0)]
    async with within(60):
        resumed, paused = await asyncio.gather(*both)
    assert (resumed.error, paused.error) == ("", "it was resumed")
    assert core.calls == ["resume", "pause wait", "resume"]
    assert not core.is_paused


@pytest.mark.parametrize("is_cpu", [True, False])
def test_where_there_is_no_sleep_mode_none_is_tried(is_cpu: bool) -> None:
    """It is said before anything is ended for it; level 0 is a pause, and may be."""
    vllm: Any = SimpleNamespace(is_cpu=is_cpu)
    model = SimpleNamespace(enable_sleep_mode=False)
    parallel = SimpleNamespace(nnodes=1, distributed_executor_backend="mp")
    config = SimpleNamespace(model_config=model, parallel_config=parallel)
    one = Operator(vllm, Core(), config, Copies(), None)
    text = "on a CPU" if is_cpu else "--enable-sleep-mode"
    assert text in one.unable(Sleep(1))
    assert one.unable(Sleep(0)) == ""
    assert one.unable(Pause()) == ""
    model.enable_sleep_mode = True
    assert bool(one.unable(Sleep(2))) == is_cpu


async def test_the_engine_stands_before_it_sleeps() -> None:
    """So a sleep that waits may be given up."""
    core = Core()
    assert not (await do(operator(core), Sleep(0, "wait"))).error
    assert core.calls == ["pause wait", "sleep 0 keep"]


async def test_a_pause_that_clears_the_cache_clears_that_of_running_requests() -> None:
    """As vLLM's own; what it cannot clear is not found again all the same."""
    core = Core()
    one = operator(core)
    assert not (await do(one, Pause("keep"))).error
    assert core.calls == ["pause keep", "reset True"]
    assert one.salt_of(EngineRequest("r", [1], Sampling(max_tokens=1))) == "1:0:"


async def test_a_reset_under_hand_overs_is_done_all_the_same() -> None:
    """What they hold is not found again, and the connector's own is forgotten, too."""
    core = Core()
    one = operator(core)
    action = ResetPrefixCache(reset_running_requests=True, reset_external=True)
    outcome = await do(one, action)
    assert not outcome.error
    assert outcome.result == {"success": True}
    assert core.calls == ["reset True external", "reset False external"]
    assert one.salt_of(EngineRequest("r", [1], Sampling(max_tokens=1))) == "1:0:"


async def test_a_clients_salt_is_never_the_operators() -> None:
    """Whatever it looks like: it would find KV that was to be forgotten."""
    one = operator(Core())
    asked = EngineRequest("r", [1], Sampling(max_tokens=1), cache_salt="1:0:")
    plain = EngineRequest("r", [1], Sampling(max_tokens=1))
    assert one.salt_of(plain) is None
    before = one.salt_of(asked)
    await do(one, Pause("keep"))
    assert before
    assert before not in {"1:0:", one.salt_of(asked), one.salt_of(plain)}


async def test_what_is_not_found_any_more_is_told() -> None:
    """With each cache that is emptied, before it is: blocks of older salts are none."""
    told: list[str | None] = []
    one = operator(Core(), forgotten=told.append)
    asked = EngineRequest("r", [1], Sampling(max_tokens=1), cache_salt="0:0:")
    before = one.salt_of(asked)
    assert one.client_salt("", before) == "0:0:"
    assert one.client_salt("", None) is None
    await do(one, ResetPrefixCache())
    assert told == [None]
    for salt in (before, None):
        with pytest.raises(LookupError):
            one.client_salt("", salt)
    assert one.client_salt("", one.salt_of(asked)) == "0:0:"
    plain = EngineRequest("r", [1], Sampling(max_tokens=1))
    assert one.client_salt("", one.salt_of(plain)) is None


# --- adapters ----------------------------------------------------------------------------


@pytest.fixture
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Copies]:
    """Copies in a folder of the test."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    made = Copies()
    yield made
    made.close()
    assert not list((tmp_path / "tmp").iterdir())


def load(folder: Path, content: bytes, update: int = 1) -> LoadLora:
    """Return what loads an adapter of *content*."""
    path = adapter(folder)
    (path / "adapter_model.safetensors").write_bytes(content)
    (path / "optimizer.pt").write_bytes(b"large")
    return LoadLora("a", str(path), update, load_inplace=True)


def read(one: Operator) -> tuple[str, bytes]:
    """Return what a request for the adapter brings: a path, and what vLLM reads there."""
    request = EngineRequest("r", [1], Sampling(max_tokens=1), lora="a")
    brings = one.lora_of(request)
    assert not brings.load_inplace
    folder = Path(brings.path)
    assert not (folder / "optimizer.pt").exists()
    return brings.path, (folder / "adapter_model.safetensors").read_bytes()


async def test_an_adapter_is_read_again_from_a_copy(
    tmp_path: Path, copies: Copies
) -> None:
    """Its own folder may be gone by then, which would end vLLM, or have other files."""
    core = Core()
    one = operator(core, copies)
    assert not (await do(one, load(tmp_path / "1", b"one"))).error
    load(tmp_path / "1", b"changed")
    assert read(one)[1] == b"one"
    shutil.rmtree(tmp_path / "1")
    assert read(one)[1] == b"one"
    assert core.calls == ["add"]


async def test_what_runs_reads_the_new_version_of_an_adapter(
    tmp_path: Path, copies: Copies
) -> None:
    """By the path that it came with; the engine stands until that is so."""
    core = Core()
    one = operator(core, copies)
    await do(one, load(tmp_path / "1", b"one"))
    path, _ = read(one)
    core.calls.clear()
    assert not (await do(one, load(tmp_path / "2", b"two", 2))).error
    assert core.calls == ["pause keep", "add", "resume"]
    assert core.loaded == [(1, b"one", False), (1, b"two", True)]
    assert read(one) == (path, b"two")
    assert len([p for p in Path(path).parent.iterdir() if not p.is_symlink()]) == 1
    await do(one, Pause("keep"))
    core.calls.clear()
    await do(one, load(tmp_path / "3", b"three", 3))
    assert core.calls == ["add"]  # it stands, and goes on standing


async def test_blocks_of_an_adapter_s_older_version_are_told_as_gone(
    tmp_path: Path, copies: Copies
) -> None:
    """And those of one that is unloaded; the model's own stay."""
    told: list[str | None] = []
    one = operator(Core(), copies, told.append)
    request = EngineRequest("r", [1], Sampling(max_tokens=1), lora="a")
    await do(one, load(tmp_path / "1", b"one"))
    first = one.salt_of(request)
    assert one.client_salt("a", first) is None
    await do(one, load(tmp_path / "2", b"two", 2))
    assert one.client_salt("a", one.salt_of(request)) is None
    second = one.salt_of(request)
    await do(one, UnloadLora("a"))
    assert told == ["a", "a", "a"]
    for salt in (first, second, None):
        with pytest.raises(LookupError):
            one.client_salt("a", salt)
    assert one.client_salt("", None) is None


@pytest.mark.parametrize("hangs", [False, True])
async def test_an_adapter_that_cannot_be_loaded_leaves_the_one_before(
    tmp_path: Path, copies: Copies, hangs: bool
) -> None:
    """Read again, as nobody knows how far the load went; a mended one is loaded."""
    core = Core()
    one = operator(core, copies)
    await do(one, load(tmp_path / "1", b"one"))
    before = read(one)
    core.calls.clear()
    core.hangs = {"add"} if hangs else set()
    outcome = await do(one, load(tmp_path / "2", b""), 0.05 if hangs else 0.0)
    assert (outcome.kind, outcome.is_stuck) == ("timeout" if hangs else "failed", False)
    assert core.calls == ["pause keep", "add", "remove 1", "resume"]
    assert read(one) == before
    assert len([p for p in Path(before[0]).parent.iterdir() if p.is_dir()]) == 2
    core.hangs = set()
    assert not (await do(one, load(tmp_path / "2", b"two", 2))).error
    assert read(one) == (before[0], b"two")


async def test_an_unloaded_adapter_leaves_nothing(
    tmp_path: Path, copies: Copies
) -> None:
    """Neither in vLLM nor on the disk."""
    core = Core()
    one = operator(core, copies)
    await do(one, load(tmp_path / "1", b"one"))
    root = Path(read(one)[0]).parent
    assert not (await do(one, UnloadLora("a"))).error
    assert core.calls[-1] == "remove 1"
    assert list(root.iterdir()) == []


async def test_an_adapter_that_cannot_be_copied_is_not_loaded(
    tmp_path: Path, copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the system's words, such as that there is no room."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    core = Core()
    one = operator(core, copies)
    monkeypatch.setattr(shutil, "copyfile", full)
    outcome = await do(one, load(tmp_path / "1", b"one"))
    assert (outcome.kind, core.calls) == ("failed", [])
    assert "cannot be copied" in outcome.error
    assert "No space left" in outcome.error


@pytest.mark.parametrize(
    "parallel", [{"nnodes": 2}, {"distributed_executor_backend": "ray"}]
)
async def test_an_engine_of_several_machines_reads_the_folder_itself(
    tmp_path: Path, copies: Copies, parallel: dict[str, Any]
) -> None:
    """The others do not see files of ours."""
    one = operator(Core(), copies, **parallel)
    action = load(tmp_path / "1", b"one")
    (tmp_path / "1" / "optimizer.pt").unlink()
    assert not (await do(one, action)).error
    assert read(one)[0] == str(tmp_path / "1")
    assert not (await do(one, UnloadLora("a"))).error
    assert (tmp_path / "1").is_dir()


async def test_copies_of_killed_workers_are_swept(
    tmp_path: Path, copies: Copies
) -> None:
    """By the next one; those of living ones, and other people's folders, are not."""
    living = Copies()
    folder = Path(load(tmp_path / "1", b"one").lora_path)
    kept = await living.make(folder)
    left = kept.parent.parent / "tokenwire-adapters-left"
    (left / "copy-1").mkdir(parents=True)
    other = kept.parent.parent / "other"
    other.mkdir()
    await copies.make(folder)
    assert (kept.is_dir(), left.exists(), other.is_dir()) == (True, False, True)
    other.rmdir()
    living.close()
    assert not kept.exists()
