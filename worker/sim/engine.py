"""The simulated engine: its clock, its steps, its faults; the rules are elsewhere."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import replace

from tokenwire.protocol.admin import Action
from tokenwire.protocol.messages import (
    GRAMMAR_REJECTS_PREFIX,
    ErrorKind,
    FinishReason,
    JsonObject,
    Role,
)
from tokenwire.worker.captures import Captures
from tokenwire.worker.engine import (
    GRAMMAR_REFUSAL,
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
from tokenwire.worker.timers import LoopTimers, Timers

from .faults import Faults
from .model import SimModel, read_model
from .operator import Operator
from .options import SimOptions
from .sampler import Rule
from .saving import Saving
from .scheduler import Scheduler
from .script import Script, read_script
from .transfer import SideChannel
from .weights import Weights

__all__ = ["SimEngine"]

VERSION = "1"
"""Of the rule that makes the ids and of the side channel: raise it with either."""


class SimEngine:
    """An ``Engine`` without a model."""

    def __init__(
        self,
        *,
        model: str,
        role: Role,
        options: SimOptions,
        timers: Timers | None = None,
        captures: Captures | None = None,
        blocks: CachedBlocks | None = None,
    ) -> None:
        self._model = model
        self._role = role
        self._options = options
        self._given_timers = timers
        self._saving = Saving(captures)
        self._blocks = blocks
        self._faults = Faults(options.faults)
        self._channel = SideChannel(
            secrets.token_hex(8), self, transfer_s=options.transfer_s
        )
        self._script = Script()
        self._weights = Weights(model)
        self._num_steps = 0
        self._stepping = False  # a step is under way, or planned for this iteration
        self._flushing = False
        self._started = False
        self._down = ""  # why the engine takes nothing; empty: it does
        self._ended: list[EngineFinished] = []
        self._due = 0.0
        self._expiry_due = False

    # -- the interface --------------------------------------------------------------

    async def start(self, sink: EngineSink, progress: Progress) -> EngineInfo:
        """Read the model's folder and the script, listen, return what is served.

        Raises:
            EngineStartError: One of these fails, or the sizes do not fit together.
        """
        options = self._options
        if self._blocks is not None:
            self._blocks.resize(options.num_blocks)
        progress("reading the model's sizes")
        model = read_model(self._model)
        if options.script:
            self._script = read_script(options.script)
            self._saving.begin(self._script)
        max_model_len = self._checked_model_len(model)
        if options.load_s:
            progress("loading no weights")
            await asyncio.sleep(options.load_s)
        self._timers: Timers = self._given_timers or LoopTimers()
        self._sink = sink
        self._vocab_size = model.vocab_size
        self._scheduler = Scheduler(
            options,
            Rule(model, options.mean_output_tokens, output_draws=options.output_draws),
            self._script,
            max_model_len,
            self._channel,
            self._weights,
            self._blocks,
        )
        self._operator = Operator(
            self._scheduler, self._weights, self._faults, self._timers, options.update_s
        )
        if self._role is Role.PREFILL:
            host, port = options.side_channel_host, options.side_channel_port
            try:
                await self._channel.listen(host, port)
            except OSError as error:
                msg = f"the side channel cannot listen on {host}:{port}: {error}"
                raise EngineStartError(msg) from error
        self._started = True
        disaggregated = self._role is not Role.AGGREGATED
        return EngineInfo(
            engine="sim",
            version=VERSION,
            max_model_len=max_model_len,
            vocab_size=model.vocab_size,
            block_size=options.block_size,
            num_kv_blocks=options.num_blocks,
            max_num_seqs=options.max_num_seqs,
            dtype=model.dtype,
            connector="sim" if disaggregated else "",
            connector_compatibility=f"sim-{VERSION}" if disaggregated else "",
            exactness="same_rng" if options.exact_resume else "",
            tells_blocks=self._blocks is not None and options.prefix_caching,
        )

    def submit(self, request: EngineRequest) -> None:
        """Take a request; whatever is wrong with it arrives as its end."""
        if self._down:
            self._end_soon(_refused(request, ErrorKind.ENGINE, self._down))
            return
        if request.token_ids and not (
            min(request.token_ids) >= 0 and max(request.token_ids) < self._vocab_size
        ):
            error = f"Token id {max(request.token_ids)} is out of vocabulary"
            self._end_soon(_refused(request, ErrorKind.INVALID, error))
            return
        if request.sampling.structured_output is not None:
            # A script says what any grammar would have led to.
            answer = self._script.answer(request.prompt_token_ids)
            if answer is None:
                error = "The simulated engine has structured output by script alone"
                self._end_soon(_refused(request, ErrorKind.INVALID, error))
                return
            prior = request.token_ids[request.num_prompt_tokens :]
            if not answer.begins_with(prior):
                refused = _refused(request, ErrorKind.INVALID, GRAMMAR_REFUSAL)
                self._end_soon(replace(refused, stop_reason=GRAMMAR_REJECTS_PREFIX))
                return
        if refusal := self._saving.refusal(request):
            self._end_soon(_refused(request, ErrorKind.BUSY, refusal))
            return
        self._saving.took(request)
        end = self._scheduler.add(request, self._timers.time())
        if end is not None:
            self._end_soon(end)
        else:
            self._wake()

    def abort(self, request_id: str) -> None:
        """End a request soon, with reason ``abort``; unknown ids are ignored."""
        end = self._scheduler.abort(request_id, self._timers.time())
        if end is not None:
            self._end_soon(end)
            self._wake()

    def release_kv(self, request_id: str, handover: JsonObject) -> None:
        """Let the prefill engine free what it holds."""
        del request_id  # the hand-over names it as the prefill engine knows it
        self._channel.free(handover)

    def unable(self, action: Action) -> str:
        """Return nothing: it can do all."""
        del action
        return ""

    def administer(
        self, action: Action, timeout_s: float, done: Callable[[AdminOutcome], None]
    ) -> None:
        """Do *action*, after the step that is under way."""

        def finished(outcome: AdminOutcome) -> None:
            done(outcome)
            self._wake()

        if self._down:
            self._timers.call_soon(lambda: done(AdminOutcome(self._down, "failed")))
            return
        self._operator.begin(action, timeout_s, finished)
        self._wake()

    def load(self) -> EngineLoad:
        """Return how busy the engine is."""
        return replace(self._scheduler.load(), num_steps=self._num_steps)

    async def stop(self) -> None:
        """Abort what runs and close the side channel."""
        if self._started and not self._down:
            self._down = "the engine is stopped"
            self._ended += self._scheduler.end_all(
                FinishReason.ABORT, self._timers.time()
            )
            self._flush()
            self._operator.down(self._down)
        await self._channel.close()

    # -- the table of held KV, for the side channel ----------------------------------

    def prompt_crc_of(self, request_id: str) -> int | None:
        """Return the checksum of the prompt whose KV is held, or None."""
        held = self._scheduler.held.get(request_id)
        return None if held is None else held.prompt_crc

    def kv_taken(self, request_id: str) -> None:
        """Free held KV."""
        self._scheduler.kv_taken(request_id)
        self._wake()

    def kv_arrived(self, request_id: str, error: str | None) -> None:
        """Go on with a decode leg, or end it."""
        if error is None and self._faults.fails_read():
            error = "the transfer failed: injected fault"
        end = self._scheduler.kv_arrived(request_id, error, self._timers.time())
        if end is not None:
            self._end_soon(end)
        self._wake()

    # -- steps ----------------------------------------------------------------------

    def _wake(self) -> None:
        """Begin a step in the next iteration, unless one is under way."""
        if (
            not self._stepping
            and not self._down
            and not self._operator.stands
            and self._scheduler.has_work
        ):
            self._stepping = True
            self._due = self._timers.time()
            self._timers.call_soon(self._begin_step)
        elif not self._stepping and not self._down:
            self._operator.stopped()

    def _begin_step(self) -> None:
        if self._down:
            return
        now = self._timers.time()
        planned = None if self._operator.stands else self._scheduler.plan(now)
        if planned is None:
            self._stepping = False
            self._operator.stopped()
            return
        num_prompt_tokens = planned
        self._num_steps += 1
        if self._faults.dies(self._num_steps):
            self._die(f"injected fault at step {self._num_steps}")
            return
        if self._faults.freezes(self._num_steps):
            return  # ``_stepping`` stays set: nothing wakes it again
        duration = self._options.step_s + self._faults.extra_s(self._num_steps)
        if self._options.prefill_tokens_per_s:
            duration += num_prompt_tokens / self._options.prefill_tokens_per_s
        if not duration:
            self._timers.call_soon(self._end_step)
            return
        # From where the last step was due, not from now: timers have a grain of 1 ms,
        # and steps must not be longer on average. Lateness is not made up for.
        self._due = max(self._due + duration, now)
        self._timers.call_at(self._due, self._end_step)

    def _end_step(self) -> None:
        if self._down:
            return
        now = self._timers.time()
        output = self._scheduler.commit(now)
        self._emit(output.tokens, output.finished)
        self._arm_expiry()
        self._begin_step()

    def _die(self, reason: str) -> None:
        self._down = f"the engine died: {reason}"
        self._ended += self._scheduler.end_all(
            FinishReason.ERROR, self._timers.time(), self._down
        )
        self._flush()
        self._operator.down(self._down)
        self._sink.died(self._down)

    def _arm_expiry(self) -> None:
        held = self._scheduler.held
        if held and not self._expiry_due:
            self._expiry_due = True
            first = next(iter(held.values()))
            self._timers.call_at(first.expires_at, self._expire)

    def _expire(self) -> None:
        self._expiry_due = False
        self._scheduler.expire(self._timers.time())
        self._arm_expiry()
        self._wake()

    # -- outputs --------------------------------------------------------------------

    def _end_soon(self, end: EngineFinished) -> None:
        self._ended.append(end)
        if not self._flushing:
            self._flushing = True
            self._timers.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        ended, self._ended = self._ended, []
        if ended:
            self._emit([], ended)

    def _emit(self, tokens: list[EngineTokens], ends: list[EngineFinished]) -> None:
        if ends and self._options.faults:
            ends = [end for end in ends if not self._faults.drops_end()]
        if ends:
            tokens, ends = self._saving.apply(tokens, ends)
        if tokens or ends:
            self._sink.outputs(tokens, ends)

    def _checked_model_len(self, model: SimModel) -> int:
        options = self._options
        max_model_len = options.max_model_len or model.max_model_len
        room = options.num_blocks * options.block_size
        if max_model_len > room:
            msg = (
                f"a context of {max_model_len} tokens does not fit into "
                f"{options.num_blocks} blocks of {options.block_size}: raise "
                "--num-blocks or lower --max-model-len"
            )
            raise EngineStartError(msg)
        return max_model_len


def _refused(request: EngineRequest, kind: ErrorKind, error: str) -> EngineFinished:
    return EngineFinished(
        request_id=request.request_id,
        reason=FinishReason.ERROR,
        num_prompt_tokens=request.num_prompt_tokens,
        error_kind=kind,
        error=error,
        prompt_token_ids=request.prompt_token_ids,
    )
