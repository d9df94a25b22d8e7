"""Pauses, updates, adapters and sleep, as vLLM does them.

vLLM forgets cached KV only when nothing uses it, and stands still with requests that do.
So what has to be forgotten is not found any more, which is the same to the token: a
request's cache salt says how often the cache was emptied, and which version of its
adapter it is for. Adapters are loaded from copies, see ``adapters``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from types import NoneType
from typing import Any, assert_never

from tokenwire.protocol.admin import (
    Action,
    CollectiveRpc,
    LoadLora,
    Pause,
    PauseMode,
    ResetPrefixCache,
    Resume,
    Sleep,
    UnloadLora,
    UpdateWeights,
    WakeUp,
)
from tokenwire.worker.engine import AdminOutcome, EngineRequest

from .adapters import Copies, reads_our_files
from .arguments import first_sentence
from .binding import Vllm
from .checkpoint import checkpoint_fault

__all__ = ["Operator"]

logger = logging.getLogger(__name__)

MIN_TIMEOUT_S = 1.0
"""Of a call to vLLM's workers, which takes no limit of 0."""

UNDO_WAIT_S = 3.0
"""For the engine to go on after what failed: it answers between two steps, of up to 2 s
on two CPU cores, and frontends wait for the outcome 5 s beyond the time limit."""

_SETTLE_TURNS = 3
"""Turns of the event loop in which vLLM hands out what a last step has brought."""


class Operator:
    """Does what Admins ask for, on a started ``AsyncLLM``.

    Args:
        vllm: What we use of vLLM.
        llm: The engine.
        config: Its ``VllmConfig``.
        copies: Those of its adapters; whoever gives them closes them.
        forgotten: Called when no KV from before is found any more, of an adapter or, with
            None, of any.
    """

    def __init__(
        self,
        vllm: Vllm,
        llm: Any,
        config: Any,
        copies: Copies,
        forgotten: Callable[[str | None], None] | None = None,
    ) -> None:
        self._vllm = vllm
        self._llm = llm
        self._config = config
        self._copies = copies
        self._forgotten = forgotten
        self._adapters: dict[str, tuple[Any, int]] = {}  # LoRARequest, its update
        self._num_adapters = 0  # ever loaded: makes their ids
        self._cache_epoch = 0
        self._paused = False
        self._loading = False  # weights, so that a failure leaves neither old nor new
        self._stuck = False  # it did not go on when an action failed
        self._resumed = asyncio.Event()  # since the action that it may cross was asked

    # --- for requests --------------------------------------------------------------

    def lora_of(self, request: EngineRequest) -> Any:  # vLLM's LoRARequest or None
        """Return the adapter of *request*.

        Raises:
            ValueError: It is not loaded.
        """
        if not request.lora:
            return None
        known = self._adapters.get(request.lora)
        if known is None:
            msg = f"The model {request.lora!r} does not exist"
            raise ValueError(msg)
        return known[0]

    def salt_of(self, request: EngineRequest) -> str | None:
        """Return the cache salt of *request*: its own, and what has been forgotten."""
        known = self._adapters.get(request.lora)
        if request.cache_salt is None and not self._cache_epoch and known is None:
            return None  # a client's salt never stands alone: it may look like ours
        loaded = known[1] if known is not None else 0
        return f"{self._cache_epoch}:{loaded}:{request.cache_salt or ''}"

    def client_salt(self, lora: str, salt: str | None) -> str | None:
        """Return the client's part of what ``salt_of`` has returned.

        Raises:
            LookupError: It was for KV that is not found any more.
        """
        known = self._adapters.get(lora)
        if lora and known is None:
            raise LookupError(lora)
        if salt is None:
            if self._cache_epoch or known is not None:
                raise LookupError(lora)
            return None
        loaded = known[1] if known is not None else 0
        ours = f"{self._cache_epoch}:{loaded}:"
        if not salt.startswith(ours):
            raise LookupError(salt)
        return salt.removeprefix(ours) or None

    def _begin_epoch(self) -> None:
        self._cache_epoch += 1
        self._tell_forgotten(None)

    def _tell_forgotten(self, lora: str | None) -> None:
        if self._forgotten is not None:
            self._forgotten(lora)

    # --- actions -------------------------------------------------------------------

    def expect(self, action: Action) -> None:
        """Take note that *action* will be done: a Resume after this ends a pause."""
        if not isinstance(action, Resume):
            self._resumed.clear()

    def unable(self, action: Action) -> str:
        """Return why *action* can never be done here; empty: it may be tried."""
        match action:
            case Sleep(level=0):
                return ""
            case Sleep() if self._vllm.is_cpu:
                return "there is no sleep mode on a CPU (level 0 pauses)"
            case Sleep() if not self._config.model_config.enable_sleep_mode:
                return "the engine has no sleep mode: start it with --enable-sleep-mode"
            case _:
                return ""

    async def do(self, action: Action, timeout_s: float) -> AdminOutcome:
        """Do *action*, which was expected; a failure is an outcome, too."""
        limit_s = timeout_s or None
        try:
            async with asyncio.timeout(limit_s):
                return await self._do(action, timeout_s)
        except TimeoutError:
            text = f"it was not done within {timeout_s:g} s"
            return AdminOutcome(
                text, "timeout", is_broken=self._loading, is_stuck=self._stuck
            )
        except self._vllm.EngineDeadError as error:
            return AdminOutcome(first_sentence(error), "failed")
        except Exception as error:  # noqa: BLE001 - whatever vLLM raises in its workers
            return self._failed(action, error)
        finally:
            self._loading = self._stuck = False

    async def _do(self, action: Action, timeout_s: float) -> AdminOutcome:
        match action:
            case Pause():
                return await self._pause(action)
            case Resume():
                await self._llm.resume_generation()
                self._paused = False
                self._resumed.set()
            case UpdateWeights():
                return await self._update(action, timeout_s)
            case LoadLora():
                return await self._load_lora(action)
            case UnloadLora(name):
                number = self._adapters[name][0].lora_int_id
                await self._llm.remove_lora(number)
                del self._adapters[name]
                self._tell_forgotten(name)
                self._copies.forget(number)
            case ResetPrefixCache():
                await self._forget_cache(
                    running=action.reset_running_requests,
                    external=action.reset_external,
                )
                return AdminOutcome(result={"success": True})
            case Sleep():
                return await self._sleep(action)
            case WakeUp():
                is_awake = bool(await self._llm.wake_up(action.tags))
                if is_awake:
                    self._paused = False
                return AdminOutcome(result={"awake": is_awake}, is_awake=is_awake)
            case CollectiveRpc():
                results = await self._call(
                    action.method, timeout_s, action.args, action.kwargs
                )
                return AdminOutcome(result={"results": [_plain(r) for r in results]})
            case _:
                assert_never(action)
        return AdminOutcome()

    async def _pause(self, action: Pause) -> AdminOutcome:
        if not await self._stand(action.mode):
            return AdminOutcome("it was resumed", "failed", is_stuck=self._stuck)
        self._paused = True
        await self._settle()
        if action.clear_cache:
            await self._forget_cache(running=True)
        return AdminOutcome()

    async def _stand(self, mode: PauseMode) -> bool:
        """Have the engine stand still; return whether it does, and was not resumed.

        At the time limit it goes on as before.
        """
        if self._resumed.is_set():
            return False
        pausing = asyncio.ensure_future(
            self._llm.pause_generation(mode=_engine_mode(mode), clear_cache=False)
        )
        resumed = asyncio.ensure_future(self._resumed.wait())
        try:
            await asyncio.wait({pausing, resumed}, return_when=asyncio.FIRST_COMPLETED)
            if not self._resumed.is_set():
                pausing.result()
                return True
        except asyncio.CancelledError:
            pausing.cancel()
            await self._undo()
            raise
        finally:
            pausing.cancel()
            resumed.cancel()
        # The Resume may have been there first: then the engine stands after it.
        await self._undo()
        return False

    async def _undo(self, *, is_asleep: bool = False) -> None:
        """Have the engine do what it did before, within a bound and without a failure."""
        try:
            async with asyncio.timeout(UNDO_WAIT_S):
                if is_asleep:
                    await self._llm.wake_up(None)
                if self._paused:
                    await self._llm.pause_generation(mode="keep", clear_cache=False)
                else:
                    await self._llm.resume_generation()
        except Exception as error:  # noqa: BLE001 - what failed before is told
            logger.warning("the engine does not go on: %s", first_sentence(error))
            self._stuck = True

    async def _update(self, action: UpdateWeights, timeout_s: float) -> AdminOutcome:
        extension = self._config.parallel_config.worker_extension_cls
        if action.weight_dir is not None:
            fault = await asyncio.to_thread(checkpoint_fault, action.weight_dir)
            if fault is not None:
                return fault
        elif not extension:
            text = "weight_dir is missing: only a --worker-extension-cls needs none"
            return AdminOutcome(text, "invalid")
        was_paused = self._paused
        if not was_paused:
            await self._stand("keep")  # no Resume crosses an update
            await self._settle()
        self._loading = True
        try:
            if extension:  # Prime-RL's, whose methods are named so
                args = [action.weight_dir]
                await self._call("update_weights_from_path", timeout_s, args, {})
            else:
                kwargs = {"weights_path": action.weight_dir}
                await self._call("reload_weights", timeout_s, [], kwargs)
            if action.reset_prefix_cache:
                await self._forget_cache()
        finally:
            if not was_paused:
                await self._undo()
        if self._stuck:
            text = "the weights are loaded, but the engine does not go on"
            return AdminOutcome(text, "failed", is_broken=True)
        return AdminOutcome()

    async def _load_lora(self, action: LoadLora) -> AdminOutcome:
        name, path = action.lora_name, Path(action.lora_path)
        if self._config.lora_config is None:
            text = "the engine has no LoRA: start it with --enable-lora"
            return AdminOutcome(text, "unsupported")
        is_there = await asyncio.to_thread((path / "adapter_config.json").is_file)
        if not is_there:
            text = f"Loading lora {name} failed: No adapter found for {path}"
            return AdminOutcome(text, "not_found")
        known = self._adapters.get(name)
        if known is None:
            self._num_adapters += 1
        number = known[0].lora_int_id if known is not None else self._num_adapters
        copy = None
        if reads_our_files(self._config.parallel_config):
            try:
                copy = await self._copies.make(path)
            except OSError as error:
                text = f"Loading lora {name} failed: it cannot be copied: {error}"
                return AdminOutcome(text, "failed")
        try:
            await self._add_lora(action, number, path, copy)
        except BaseException:
            if copy is not None:
                self._copies.drop(copy)
            raise
        if self._stuck:
            text = f"{name} is loaded, but the engine does not go on"
            return AdminOutcome(text, "failed", is_stuck=True)
        return AdminOutcome()

    async def _add_lora(
        self, action: LoadLora, number: int, path: Path, copy: Path | None
    ) -> None:
        """Have the engine read *copy*, or *path* where it cannot.

        In the place of another, it stands meanwhile: else a step that loads the adapter
        again could bring the former version back behind this one.
        """
        name, in_place = action.lora_name, action.lora_name in self._adapters

        def adapter(where: Path, *, anew: bool) -> Any:  # vLLM's LoRARequest
            return self._vllm.LoRARequest(
                name,
                number,
                str(where),
                load_inplace=anew,
                is_3d_lora_weight=action.is_3d_lora_weight,
            )

        stands = in_place and not self._paused
        if stands:
            await self._stand("keep")
        try:
            await self._llm.add_lora(adapter(copy or path, anew=in_place))
            stays = path if copy is None else self._copies.place(number, copy)
            # Requests bring it along: it must not be loaded anew with each of them.
            self._adapters[name] = adapter(stays, anew=False), action.update
            self._tell_forgotten(name)
        except BaseException:
            if in_place:
                await self._read_again(number)
            raise
        finally:
            if stands:
                await self._undo()

    async def _read_again(self, number: int) -> None:
        """Have an adapter loaded again from its path: a load may have been cut off."""
        with contextlib.suppress(Exception):
            async with asyncio.timeout(UNDO_WAIT_S):
                await self._llm.remove_lora(number)

    async def _sleep(self, action: Sleep) -> AdminOutcome:
        if text := self.unable(action):
            return AdminOutcome(text, "unsupported")
        await self._stand(action.mode)  # no Resume crosses a sleep
        try:
            await self._llm.sleep(action.level, "keep")
        except BaseException:
            await self._undo(is_asleep=bool(action.level))
            raise
        self._paused = True
        if action.level:
            self._begin_epoch()
        return AdminOutcome()

    async def _forget_cache(
        self, *, running: bool = False, external: bool = False
    ) -> None:
        """Have no KV found again.

        Args:
            running: That of running requests neither: they are computed anew.
            external: Nor what a connector keeps.
        """
        self._begin_epoch()
        try:
            # False while blocks are in use: they are not found again all the same.
            await self._llm.reset_prefix_cache(running, external)
        except self._vllm.EngineDeadError:
            raise
        except Exception as error:
            if not running:
                raise
            # What is held for a hand-over, or waits for one, keeps its own (vLLM 0.32
            # raises then, and has not come to the connector); nothing else does.
            logger.warning("part of the KV stays: %s", first_sentence(error))
            if external:
                await self._llm.reset_prefix_cache(False, True)

    async def _call(
        self, method: str, timeout_s: float, args: list[Any], kwargs: dict[str, Any]
    ) -> list[Any]:
        limit_s = max(timeout_s, MIN_TIMEOUT_S) if timeout_s else None
        results = await self._llm.collective_rpc(method, limit_s, tuple(args), kwargs)
        return list(results or ())

    async def _settle(self) -> None:
        """Let all outputs of the steps before now reach the sink."""
        queue = self._llm.engine_core.outputs_queue
        while not queue.empty():  # noqa: ASYNC110 - vLLM's, without an event
            await asyncio.sleep(0)
        for _ in range(_SETTLE_TURNS):
            await asyncio.sleep(0)

    def _failed(self, action: Action, error: Exception) -> AdminOutcome:
        text = first_sentence(error)
        if isinstance(action, CollectiveRpc) and "has no attribute" in text:
            text = f"the engine's workers have no method {action.method!r:.200}"
            return AdminOutcome(text, "unsupported")
        return AdminOutcome(
            text, "failed", is_broken=self._loading, is_stuck=self._stuck
        )


def _engine_mode(mode: PauseMode) -> PauseMode:
    # A mode that ends requests has done so before: the worker releases their KV.
    return "wait" if mode == "wait" else "keep"


def _plain(result: Any) -> Any:
    """Return what a message can carry, as vLLM's route does."""
    return result if type(result) in {NoneType, dict, list} else str(result)
