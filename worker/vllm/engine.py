"""vLLM as an ``Engine``: token ids in, token ids out, one end per request.

Laws, beside those of ``worker.engine``:
- The model runs in vLLM's processes; here one callback per engine step takes what
  all requests got, so that the step reaches the sink as one call.
- No start, stop or abort waits without a bound, and none blocks the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from tokenwire.protocol.admin import Action
from tokenwire.protocol.logs import about
from tokenwire.protocol.messages import (
    ErrorKind,
    JsonObject,
    Leg,
    Role,
)
from tokenwire.worker.captures import CaptureError, Captures
from tokenwire.worker.engine import (
    AdminOutcome,
    EngineFinished,
    EngineInfo,
    EngineLoad,
    EngineRequest,
    EngineSink,
    EngineStartError,
    EngineTokens,
    Progress,
)
from tokenwire.worker.kv_blocks import CachedBlocks

from . import binding
from .adapters import Copies
from .arguments import engine_config, first_sentence, set_environment
from .capturing import Capturing
from .information import engine_information
from .operator import Operator
from .processes import Descendants
from .release import Releases
from .request import OpenRequest, Signal
from .resume import check_runner_v2, use_resume
from .sampling import sampling_params
from .stats import LoadRecorder
from .tables import check_tables
from .telling import Telling
from .trial import exactness, give_token

__all__ = ["VllmEngine"]

logger = logging.getLogger(__name__)

ABORT_WAIT_S = 5.0
"""For the engine core to answer after an abort. It answers between two steps; a step
of a full prefill batch takes up to 2 s on two CPU cores."""

WATCH_INTERVAL_S = 0.5
"""How often an idle engine is asked whether it lives. A busy one tells by itself."""

STOP_WAIT_S = 10.0
"""For vLLM to end its processes, which it gives 5 s before it kills them
(``VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS``). Below the 30 s that Kubernetes gives."""


class VllmEngine:
    """An engine on vLLM's ``AsyncLLM``; use from one event loop, start once.

    Args:
        model: A path or hub id.
        served_name: The name that clients use.
        role: Prefill and decode get a KV connector, unless *engine_args* names one.
        engine_args: vLLM's own command-line arguments, as ``vllm serve`` takes them.
        layers: Whose hidden states the engine keeps beside the KV.
        captures: Where those that requests ask for are saved; None: nowhere.
        exact_resume: Whether it goes on behind output of other workers, if it can.
        blocks: Is told which KV blocks are cached; None: nobody is.
        traces_endpoint: Where vLLM's spans go, too, unless *engine_args* say; empty: nowhere.
    """

    def __init__(
        self,
        model: str,
        served_name: str,
        role: Role,
        engine_args: list[str],
        layers: tuple[int, ...] = (),
        captures: Captures | None = None,
        *,
        exact_resume: bool = True,
        blocks: CachedBlocks | None = None,
        traces_endpoint: str = "",
    ) -> None:
        self._model = model
        self._traces_endpoint = traces_endpoint
        self._served_name = served_name
        self._role = role
        self._engine_args = list(engine_args)
        self._capturing = Capturing(layers, captures)
        self._telling = Telling(blocks)
        self._exact_resume = exact_resume
        self._obstacle = ""  # why it cannot
        self._vllm: binding.Vllm
        self._llm: Any = None  # vLLM's AsyncLLM, once started
        self._sink: EngineSink
        self._loop: asyncio.AbstractEventLoop
        self._descendants: Descendants
        self._recorder = LoadRecorder()
        self._open: dict[str, OpenRequest] = {}
        self._ready: dict[str, OpenRequest] = {}  # have an output that is not taken
        self._flush_due = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._releases: Releases
        self._traces = False  # vLLM makes spans of its own
        self._is_v2 = False  # the model runner, whose tables have a fixed width
        self._operator: Operator
        self._copies = Copies()  # of adapters
        self._gone = ""  # why nothing can be submitted any more

    async def start(self, sink: EngineSink, progress: Progress) -> EngineInfo:
        """Load the model, try one token, and return what is served.

        Raises:
            EngineStartError: vLLM is missing, refuses its arguments, or fails.
        """
        self._sink = sink
        self._loop = asyncio.get_running_loop()
        progress("importing vLLM")
        try:
            self._vllm = await asyncio.to_thread(binding.load)
        except (ImportError, AttributeError) as error:
            msg = f"vLLM cannot be imported ({error}): install tokenwire[cpu] or [gpu]"
            raise EngineStartError(msg) from error
        self._descendants = Descendants()
        self._capturing.open()
        loading = asyncio.create_task(asyncio.to_thread(self._load, progress))
        try:
            config = await asyncio.shield(loading)
            self._releases = Releases(self._vllm, self._llm)
            self._operator = Operator(
                self._vllm, self._llm, config, self._copies, self._telling.forget
            )
            level = await self._try(progress)
            self._telling.begin(self._llm, config, self._operator.client_salt)
        except BaseException:
            await self._abandon(loading)
            raise
        self._is_v2 = bool(getattr(config, "use_v2_model_runner", False))
        self._traces = bool(config.observability_config.otlp_traces_endpoint)
        self._descendants.look()
        self._spawn(self._watch())
        progress("ready")
        info = engine_information(self._vllm, config, self._served_name)
        return replace(info, exactness=level, tells_blocks=self._telling.tells)

    def submit(self, request: EngineRequest) -> None:
        """Take a request; whatever is wrong with it arrives as its end.

        Raises:
            ValueError: A request of this id is open: a bug of the caller.
        """
        if request.request_id in self._open:
            msg = f"request {request.request_id} is already open"
            raise ValueError(msg)
        state = OpenRequest(request)
        self._open[request.request_id] = state
        self._spawn(self._add(state))

    def abort(self, request_id: str) -> None:
        """End a request soon, with reason ``abort``; unknown ids are ignored."""
        state = self._open.get(request_id)
        if state is None or state.aborted:
            return
        state.aborted = True
        self._spawn(self._abort(state))

    def release_kv(self, request_id: str, handover: JsonObject) -> None:
        """Let the prefill engine free what it holds, by an empty read from here."""
        if not self._gone:
            self._spawn(self._releases.release(request_id, handover))

    def unable(self, action: Action) -> str:
        """Return why *action* can never be done here; empty: it may be tried."""
        return self._operator.unable(action)

    def administer(
        self, action: Action, timeout_s: float, done: Callable[[AdminOutcome], None]
    ) -> None:
        """Do *action*; requests that were aborted before it end first."""
        self._operator.expect(action)
        self._spawn(self._administer(action, timeout_s, done))

    async def _administer(
        self, action: Action, timeout_s: float, done: Callable[[AdminOutcome], None]
    ) -> None:
        outcome = AdminOutcome(self._gone or "the engine is stopping", "failed")
        try:
            if not self._gone:
                await self._aborted()
                outcome = await self._operator.do(action, timeout_s)
                self._flush()
        finally:
            done(outcome)

    async def _aborted(self) -> None:
        """Wait until what has been aborted has ended, for a while."""
        aborted = [state for state in self._open.values() if state.aborted]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ABORT_WAIT_S):
                for state in aborted:
                    await state.ended.wait()

    def load(self) -> EngineLoad:
        """Return the engine core's counts after its last step.

        Waiting for a file of hidden states counts as a step.
        """
        load = self._recorder.load()
        num_steps = (load.num_steps or 0) + self._capturing.num_waits()
        return replace(load, num_steps=num_steps)

    async def stop(self) -> None:
        """Abort what runs, end vLLM's processes; takes up to 15 s."""
        first = not self._gone
        self._gone = self._gone or "the engine is stopping"
        if first:
            self._end_all([state.stopped() for state in self._open.values()])
        for task in self._tasks:
            task.cancel()
        if self._llm is not None:
            llm, self._llm = self._llm, None
            if llm.output_handler is not None:
                llm.output_handler.cancel()  # else it logs the end as a crash
            ending = asyncio.create_task(asyncio.to_thread(llm.shutdown))
            _, late = await asyncio.wait({ending}, timeout=STOP_WAIT_S)
            if late:
                logger.warning("vLLM did not stop within %s s", STOP_WAIT_S)
            elif error := ending.exception():
                logger.warning("vLLM's shutdown failed: %s", error)
            if killed := await asyncio.to_thread(self._descendants.kill):
                logger.warning("%d processes of vLLM had to be killed", killed)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._telling.close()
        self._capturing.close()
        self._copies.close()

    # --- start -------------------------------------------------------------------

    def _load(self, progress: Progress) -> Any:  # vLLM's VllmConfig
        """Make the ``AsyncLLM``, in a thread: it blocks for half a minute."""

        def tell(phase: str) -> None:
            self._loop.call_soon_threadsafe(progress, phase)

        set_environment(self._role, is_cpu=self._vllm.is_cpu)
        tell("reading the model's configuration")
        config = engine_config(
            self._vllm,
            self._model,
            self._served_name,
            self._role,
            self._engine_args,
            self._capturing.arguments,
            self._traces_endpoint,
        )
        self._telling.arrange(self._vllm, config)
        if self._exact_resume:
            self._obstacle = use_resume(self._vllm, config, self._role)
        tell("loading weights, making the KV cache")
        try:
            self._llm = self._vllm.AsyncLLM.from_vllm_config(
                config,
                stat_loggers=[self._recorder.factory],
                disable_log_stats=True,  # its log lines; the recorder turns stats on
            )
        except Exception as error:  # whatever the model's code raises
            msg = f"vLLM did not start: {first_sentence(error)}"
            raise EngineStartError(msg) from error
        return config

    async def _try(self, progress: Progress) -> str:
        """Have the engine show what it can; return its exactness, see ``EngineInfo``."""
        progress("trying one token")
        await give_token(self._vllm, self._llm)
        if not self._exact_resume:
            return ""
        level = ""
        if not self._obstacle:
            progress("trying to go on behind output")
            is_invariant = self._vllm.is_batch_invariant()
            level = await exactness(self._vllm, self._llm, bitwise=is_invariant)
        why = self._obstacle or "it did not when it was tried"
        if not level:
            logger.warning("goes on behind no output of other workers: %s", why)
        return level

    async def _abandon(self, loading: asyncio.Task[Any]) -> None:
        """Leave nothing of a start that failed or was cancelled."""
        self._gone = "the engine did not start"
        for _ in range(20):  # it may be between two of its processes: 20 looks in 10 s
            if self._llm is not None:
                break  # it is loaded: its own end is a quiet one
            await asyncio.to_thread(self._descendants.kill)
            done, _ = await asyncio.wait({loading}, timeout=0.5)
            if done:
                if not loading.cancelled():
                    loading.exception()  # of our killing: nobody else asks for it
                break
        if self._llm is not None:
            await self.stop()
        self._telling.close()

    # --- requests ----------------------------------------------------------------

    async def _add(self, state: OpenRequest) -> None:
        """Give a request to vLLM, or end it with the reason why not."""
        request = state.request
        try:
            if self._gone or self._llm is None:
                self._end(state, state.failed(ErrorKind.ENGINE, self._gone))
                return
            if self._is_v2:
                check_tables(request.sampling)
                check_runner_v2(request)
            capture = self._capturing.begin(state)
            collector = await self._llm.add_request(
                request.request_id,
                self._vllm.tokens_input(
                    request.token_ids, cache_salt=self._operator.salt_of(request)
                ),
                sampling_params(self._vllm, request, capture),
                lora_request=self._operator.lora_of(request),
                priority=request.priority,
                trace_headers=self._headers_of(request),
                reasoning_ended=request.reasoning_ended,
                reasoning_parser_kwargs=request.reasoning_parser_kwargs,
            )
        except self._vllm.EngineDeadError as error:
            self._end(state, state.failed(ErrorKind.ENGINE, first_sentence(error)))
        except (self._vllm.GracefulHTTPError, CaptureError) as error:
            self._end(state, state.failed(ErrorKind.BUSY, first_sentence(error)))
        except (self._vllm.VLLMClientError, ValueError, TypeError, OverflowError) as e:
            # OverflowError: a number that vLLM's msgpack has no form for.
            await self._forget(state)
            self._end(state, state.failed(ErrorKind.INVALID, first_sentence(e)))
        except Exception as error:  # one request's task: the others go on
            logger.exception(
                "request %s could not be added",
                request.request_id,
                extra=about(_fields_of(request)),
            )
            await self._forget(state)
            self._end(state, state.failed(ErrorKind.ENGINE, first_sentence(error)))
        else:
            state.collector = collector
            collector.ready = Signal(lambda: self._notice(state))
            if collector.output is not None:  # it came before the signal was there
                self._notice(state)
        finally:
            state.added.set()

    def _headers_of(self, request: EngineRequest) -> dict[str, str] | None:
        """Return the headers that vLLM's spans hang below, if it makes spans."""
        trace = request.trace
        if not self._traces or trace is None or not trace.traceparent:
            return None
        headers = {"traceparent": trace.traceparent}
        if trace.tracestate:
            headers["tracestate"] = trace.tracestate
        return headers

    async def _forget(self, state: OpenRequest) -> None:
        """Drop what vLLM may have registered of a request it then failed to add."""
        if not self._gone:
            await self._llm.abort(state.request.request_id)

    def _notice(self, state: OpenRequest) -> None:
        self._ready[state.request.request_id] = state
        if not self._flush_due:
            # vLLM hands out a whole step before it yields: one flush takes it all.
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Take the outputs of all requests that have one, as one call of the sink."""
        self._flush_due = False
        ready, self._ready = self._ready, {}
        tokens: list[EngineTokens] = []
        finished: list[EngineFinished] = []
        for request_id, state in ready.items():
            if self._open.get(request_id) is not state:
                continue
            end: EngineFinished | None
            try:
                output = state.collector.get_nowait()
                if output is None:
                    continue
                new, end = state.take(output)
                if end is not None and self._capturing.holds(
                    state, new, end, self._deliver
                ):
                    continue
                if new is not None:
                    tokens.append(new)
            except Exception as error:  # noqa: BLE001 - vLLM hands over what ended it
                end = state.failed(ErrorKind.ENGINE, first_sentence(error))
            if end is not None:
                self._close(state)
                finished.append(end)
        if tokens or finished:
            self._sink.outputs(tokens, finished)

    def _deliver(
        self, state: OpenRequest, new: EngineTokens | None, end: EngineFinished
    ) -> None:
        """End a request that has waited for its file."""
        self._close(state)
        self._sink.outputs([] if new is None else [new], [end])

    def _end(self, state: OpenRequest, end: EngineFinished) -> None:
        """End a request that is still open; else its end is out already."""
        if self._open.get(state.request.request_id) is state:
            if state.aborted:
                end = state.stopped()
            self._close(state)
            self._sink.outputs([], [end])

    def _end_all(self, ends: list[EngineFinished]) -> None:
        for state in list(self._open.values()):
            self._close(state)
        if ends:
            self._sink.outputs([], ends)

    def _close(self, state: OpenRequest) -> None:
        del self._open[state.request.request_id]
        self._capturing.ended(state)
        state.added.set()
        state.moved.set()
        state.ended.set()

    async def _abort(self, state: OpenRequest) -> None:
        """Abort in the engine.

        A transfer in flight ends first: vLLM 0.32 keeps the blocks that it writes to
        until then (``finish_requests`` in its scheduler).
        """
        request = state.request
        await state.added.wait()  # ends with _add, which only waits to send
        if self._gone or self._open.get(request.request_id) is not state:
            return
        try:
            if request.leg is Leg.PREFILL:
                # ``AsyncLLM.abort`` forgets the request at once, and with it the
                # handles of KV that this very step may have put on hold for 30 s.
                # The core works in order: its answer to the question comes after
                # the last output that the request will have.
                await self._llm.engine_core.abort_requests_async(
                    [state.collector.request_id]
                )
                await _within(ABORT_WAIT_S, self._llm.is_paused())
                await asyncio.sleep(0)  # one turn, for outputs that came before it
            unread = request.leg is Leg.DECODE and not state.moved.is_set()
            await self._llm.abort(request.request_id)
            if unread and request.handover is not None:
                # vLLM 0.32 does not see to what is held for a request that it aborts
                # before it has scheduled it. If it was read after all, a second
                # release does nothing.
                await self._releases.release(request.request_id, request.handover)
        except self._vllm.EngineDeadError:
            return  # the watch ends every request

    # --- death -------------------------------------------------------------------

    async def _watch(self) -> None:
        """Wait for the engine's death; a stop cancels this."""
        while not self._llm.errored:
            await asyncio.wait({self._llm.output_handler}, timeout=WATCH_INTERVAL_S)
        reason = "vLLM's engine died; its log has the cause"
        self._gone = reason
        self._flush()
        ends = [s.failed(ErrorKind.ENGINE, reason) for s in self._open.values()]
        self._end_all(ends)
        logger.error("%s", reason)
        self._sink.died(reason)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _fields_of(request: EngineRequest) -> dict[str, str]:
    trace = request.trace
    return {} if trace is None else {"request_id": trace.request_id}


async def _within(timeout_s: float, work: Coroutine[Any, Any, Any]) -> None:
    """Wait for *work*, for at most *timeout_s*."""
    try:
        async with asyncio.timeout(timeout_s):
            await work
    except TimeoutError:
        return
