"""vLLM's schedulers, for requests that go on behind output; see ``resume``.

Laws:
- Until a request is scheduled for the first time, all its ids are its prompt. Then the
  output becomes output, before the step reaches the model runner.
- Its grammar has accepted the output, one id after the other, before it is scheduled.
  One that does not is refused, and its end says so (``GRAMMAR_REJECTS_PREFIX``).
- The end of any request whose grammar does not compile says why (``GRAMMAR_FAILED``).
- Requests without output are scheduled as by vLLM itself.

vLLM takes these classes by their names, in the process of its engine core.
"""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tokenwire.protocol.limits import MAX_ERROR_CHARS
from tokenwire.protocol.messages import GRAMMAR_REJECTS_PREFIX

from .arguments import first_sentence
from .resume import GRAMMAR_FAILED, num_prompt_of

__all__ = ["AsyncResumeScheduler", "GrammarRefusalError", "ResumeScheduler"]

_stock: Any = import_module("vllm.v1.core.sched.scheduler").Scheduler
_stock_async: Any = import_module("vllm.v1.core.sched.async_scheduler").AsyncScheduler

if TYPE_CHECKING:

    class _Scheduler:
        """What is used of vLLM's schedulers."""

        grammar_compile_error_reqs: set[str]
        requests: dict[str, Any]
        structured_output_manager: Any
        use_v2_model_runner: bool

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...
        def add_request(self, request: Any) -> None: ...
        def schedule(self, *args: Any, **kwargs: Any) -> Any: ...
        def update_from_output(self, planned: Any, brought: Any) -> Any: ...
else:
    _Scheduler = object


class GrammarRefusalError(Exception):
    """The output that a request came with is none of its grammar."""


class _Resuming(_Scheduler):
    """Stands before one of vLLM's schedulers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._prompt_rows: dict[str, Any] = {}  # prompt logprobs that came too early

    def add_request(self, request: Any) -> None:
        """Take a request; begin to have its grammar accept its output."""
        num_prompt = num_prompt_of(request)
        if num_prompt and request.request_id not in self.requests:
            replay_grammar(self.structured_output_manager, request, num_prompt)
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Plan a step; what begins in it has its output from now on."""
        planned = super().schedule(*args, **kwargs)
        for new in planned.scheduled_new_reqs:
            request = self.requests[new.req_id]
            num_prompt = num_prompt_of(request)
            if num_prompt and not request._output_token_ids:
                split(request, num_prompt)
                new.prompt_token_ids = request.prompt_token_ids
                if not self.use_v2_model_runner:  # V2 is always told of all ids
                    new.prefill_token_ids = request._all_token_ids.copy()
        return planned

    def update_from_output(self, planned: Any, brought: Any) -> Any:
        """Take what a step brought; say of a refused request why it ends."""
        requests = self.requests
        refused = {
            request_id: _refusal(request.structured_output_request.grammar)
            for request_id in self.grammar_compile_error_reqs
            if (request := requests.get(request_id)) is not None
        }
        self._keep_prompt_rows(brought)
        outputs = super().update_from_output(planned, brought)
        if refused:
            for of_client in outputs.values():
                for output in of_client.outputs:
                    if output.request_id in refused:
                        output.stop_reason = refused[output.request_id]
                        if hasattr(output, "error"):  # vLLM 0.33: what was raised
                            output.error = None
        return outputs

    def _keep_prompt_rows(self, brought: Any) -> None:
        """Hold prompt logprobs back until the request has a token.

        A runner hands them out when it has computed the prompt. Where a step ends between
        prompt and output there is no token yet, and vLLM 0.32 dies of logprobs without.
        """
        rows: dict[str, Any] = brought.prompt_logprobs_dict
        if not rows and not self._prompt_rows:
            return
        sampled: list[list[int]] = brought.sampled_token_ids
        indices: dict[str, int] = brought.req_id_to_index
        for request_id, index in indices.items():
            has_token = index < len(sampled) and len(sampled[index]) > 0
            if has_token and request_id in self._prompt_rows:
                rows[request_id] = self._prompt_rows.pop(request_id)
            elif not has_token and rows.get(request_id) is not None:
                self._prompt_rows[request_id] = rows.pop(request_id)
        for request_id in self._prompt_rows.keys() - self.requests.keys():
            del self._prompt_rows[request_id]


def _refusal(error: BaseException) -> str:
    """Return the stop reason of a request whose grammar came to *error*."""
    if isinstance(error, GrammarRefusalError):
        return GRAMMAR_REJECTS_PREFIX
    return GRAMMAR_FAILED + first_sentence(error)[:MAX_ERROR_CHARS]


class ResumeScheduler(_Resuming, _stock):
    """vLLM's scheduler."""


class AsyncResumeScheduler(_Resuming, _stock_async):
    """The one that plans a step before it has the tokens of the last."""


def split(request: Any, num_prompt: int) -> None:  # vLLM's Request
    """Make a request's ids behind the first *num_prompt* its output."""
    request._output_token_ids.extend(request._all_token_ids[num_prompt:])
    request.prompt_token_ids = request._all_token_ids[:num_prompt]
    request.num_prompt_tokens = num_prompt


def replay_grammar(manager: Any, request: Any, num_prompt: int) -> None:
    """Have the grammar of *request* accept its output, when it is compiled.

    It happens where grammars are compiled, beside the engine's steps: a long output takes
    a tenth of a second. The request waits for it as for the grammar.

    Args:
        manager: vLLM's StructuredOutputManager.
        request: vLLM's Request, not yet scheduled.
        num_prompt: How many of its ids are its prompt.
    """
    structured = request.structured_output_request
    if structured is None:
        return
    compiling = structured._grammar
    ids = request._all_token_ids.copy()

    def accept() -> Any:  # the grammar
        grammar = compiling.result()  # raises what the compilation has raised
        # Like the request, as it was at each of these ids.
        view = SimpleNamespace(
            request_id=request.request_id,
            use_structured_output=True,
            prompt_token_ids=ids[:num_prompt],
            all_token_ids=ids[:num_prompt],
            structured_output_request=SimpleNamespace(
                grammar=grammar,
                reasoning_ended=structured.reasoning_ended,
                reasoning_parser_kwargs=structured.reasoning_parser_kwargs,
                reasoner=None,
            ),
        )
        for token_id in ids[num_prompt:]:
            view.all_token_ids.append(token_id)
            if not manager.accept_tokens(view, [token_id]):
                raise GrammarRefusalError(request.request_id)
        seen = view.structured_output_request
        structured.reasoning_ended = seen.reasoning_ended
        structured.reasoner = seen.reasoner
        return grammar

    structured.grammar = manager.executor.submit(accept)
