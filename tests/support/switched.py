"""In vLLM's own processes: what goes on behind output, with its parts switched.

Loaded by vLLM: as the scheduler in its engine core, as ``Extension`` in its worker.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from support.switches import is_off, switch
from tokenwire.worker.vllm import resume_runner, resume_scheduler
from tokenwire.worker.vllm.resume import SCHEDULER_CLASSES

__all__ = ["AsyncScheduler", "Extension", "Scheduler"]

switch(SCHEDULER_CLASSES)  # the worker asks for them, too

_split = resume_scheduler.split
_replay_grammar = resume_scheduler.replay_grammar
_advance = resume_runner.advance


class _Switched:
    """Stands before one of our schedulers."""

    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        """``told``: for the model runner all ids are the prompt's."""
        ours: Any = super()
        planned: Any = ours.schedule(*args, **kwargs)
        if is_off("told"):
            for new in planned.scheduled_new_reqs:
                if new.prefill_token_ids is not None:
                    new.prompt_token_ids = new.prefill_token_ids
                    new.prefill_token_ids = None
        return planned


class Scheduler(_Switched, resume_scheduler.ResumeScheduler):
    """Ours."""


class AsyncScheduler(_Switched, resume_scheduler.AsyncResumeScheduler):
    """Ours that plans ahead."""


class Extension:
    """Of vLLM's worker: adds nothing to it, but this module is loaded there."""


def split(request: Any, num_prompt: int) -> None:
    """``relabel``: all ids stay the prompt's."""
    if not is_off("relabel"):
        _split(request, num_prompt)


def replay_grammar(manager: Any, request: Any, num_prompt: int) -> None:
    """``grammar``: it hears nothing; ``prompt``: the prompt ends with the output.

    ``refusal``: what it does not accept is taken for accepted.
    """
    if is_off("grammar"):
        return
    all_ids = list(request._all_token_ids)
    without = {part for part in ("prompt", "refusal") if is_off(part)}

    def accept_tokens(view: Any, token_ids: list[int]) -> bool:
        if "prompt" in without:
            view.prompt_token_ids = all_ids
        accepted: bool = manager.accept_tokens(view, token_ids)
        return accepted or "refusal" in without

    switched = SimpleNamespace(accept_tokens=accept_tokens, executor=manager.executor)
    _replay_grammar(switched, request, num_prompt)


def advance(generator: Any, num_tokens: int, runner: Any) -> None:
    """``draws``: the seed's draws begin anew."""
    if not is_off("draws"):
        _advance(generator, num_tokens, runner)


resume_scheduler.split = split
resume_scheduler.replay_grammar = replay_grammar
resume_runner.advance = advance
