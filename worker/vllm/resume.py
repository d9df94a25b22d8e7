"""Going on exactly behind output that another worker has made: what of vLLM it takes.

A request that vLLM has preempted is a prompt, its output so far, and no KV: vLLM computes
both again and goes on, with the same draws, penalties and grammar. A request that comes
with output is made into just that. It enters as any prompt, so that prefix cache and KV
connectors see nothing new, and from its first step on the end of this prompt is output:
in the scheduler (``resume_scheduler``), and in model runner V1, which keeps books of its
own and the generators of seeds (``resume_runner``). Model runner V2 is told of both parts
by the scheduler, as of a preempted request, and draws by seed and position.

All of it stands on names that vLLM does not promise. So it is done with versions that
were read, where the names are there and nothing else is in their place, and an engine
shows at its start that it does it well (``trial``). Run with vLLM 0.32 on a CPU: runner
V1, and runner V2 in Triton's interpreter. Not run: GPUs.
"""

from __future__ import annotations

from importlib import import_module
from inspect import unwrap
from typing import Any

from tokenwire.protocol.messages import Role
from tokenwire.worker.engine import EngineRequest

from .binding import Vllm

__all__ = [
    "CPU_WORKER_CLASS",
    "GPU_WORKER_CLASS",
    "GRAMMAR_FAILED",
    "NUM_PROMPT_KEY",
    "SCHEDULER_CLASSES",
    "check_runner_v2",
    "is_resuming",
    "num_prompt_of",
    "use_resume",
]

KNOWN_VERSIONS = ("0.32.", "0.33.")
"""Of vLLM, whose scheduler and runners were read; 0.32 was also run."""

NUM_PROMPT_KEY = "tokenwire_num_prompt"
"""In a request's ``SamplingParams.extra_args``: how many of its ids are its prompt; the
others are output. Not there: all are the prompt."""

GRAMMAR_FAILED = "grammar failed: "
"""How the engine core's stop reason begins for a request whose grammar it could not
compile; what was raised stands behind it."""

CPU_WORKER_CLASS = "tokenwire.worker.vllm.cpu_worker.CpuWorker"
GPU_WORKER_CLASS = "tokenwire.worker.vllm.gpu_worker.GpuWorker"
_STOCK_GPU_WORKER_CLASS = "vllm.v1.worker.gpu_worker.Worker"

_SCHEDULERS = "tokenwire.worker.vllm.resume_scheduler"
SCHEDULER_CLASSES = {
    False: f"{_SCHEDULERS}.ResumeScheduler",
    True: f"{_SCHEDULERS}.AsyncResumeScheduler",
}
"""By whether vLLM schedules a step before it has the last one's tokens."""

_NAMES: dict[str, tuple[str, ...]] = {
    "vllm.v1.core.sched.scheduler:Scheduler": (
        "add_request",
        "grammar_compile_error_reqs",
        "requests",
        "schedule",
        "structured_output_manager",
        "update_from_output",
        "use_v2_model_runner",
    ),
    "vllm.v1.core.sched.async_scheduler:AsyncScheduler": ("schedule",),
    "vllm.v1.core.sched.output:NewRequestData": (
        "prefill_token_ids",
        "prompt_token_ids",
        "req_id",
    ),
    "vllm.v1.request:Request": (
        "_all_token_ids",
        "_output_token_ids",
        "num_prompt_tokens",
        "prompt_token_ids",
        "sampling_params",
        "structured_output_request",
    ),
    "vllm.v1.structured_output:StructuredOutputManager": ("accept_tokens", "executor"),
    "vllm.v1.structured_output.request:StructuredOutputRequest": (
        "_grammar",
        "grammar",
        "reasoner",
        "reasoning_ended",
        "reasoning_parser_kwargs",
    ),
}

_NAMES_V1: dict[str, tuple[str, ...]] = {
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": ("_update_states", "sampler"),
    "vllm.v1.worker.gpu_model_runner:CachedRequestState": (
        "__post_init__",
        "generator",
        "output_token_ids",
        "req_id",
    ),
}


def use_resume(vllm: Vllm, config: Any, role: Role) -> str:
    """Put what it takes into vLLM's configuration; return why not, empty if it is there.

    Args:
        vllm: The names of vLLM.
        config: vLLM's VllmConfig, complete, and not yet used.
        role: Of the worker.
    """
    obstacle = _obstacle(vllm, config, role)
    if not obstacle:
        scheduling = config.scheduler_config
        scheduling.scheduler_cls = SCHEDULER_CLASSES[bool(scheduling.async_scheduling)]
        if not config.use_v2_model_runner and not vllm.is_cpu:
            config.parallel_config.worker_cls = GPU_WORKER_CLASS
    return obstacle


def check_runner_v2(request: EngineRequest) -> None:
    """Refuse what model runner V2 cannot do for a request with output.

    It leaves out the prompt logprobs of requests that it takes for preempted ones.

    Raises:
        ValueError: One sentence for the client.
    """
    if request.num_prior and request.sampling.prompt_logprobs is not None:
        msg = "prompt_logprobs cannot be computed again behind output of another worker"
        raise ValueError(msg)


def is_resuming(config: Any) -> bool:  # vLLM's VllmConfig
    """Return whether ``use_resume`` has chosen the scheduler of this engine."""
    return config.scheduler_config.scheduler_cls in SCHEDULER_CLASSES.values()


def num_prompt_of(request: Any) -> int:  # vLLM's Request
    """Return how many ids of a request are its prompt; 0: it came without output."""
    params = request.sampling_params
    extra: dict[str, Any] = (params.extra_args if params is not None else None) or {}
    return int(extra.get(NUM_PROMPT_KEY, 0))


def _obstacle(vllm: Vllm, config: Any, role: Role) -> str:
    if not vllm.version.startswith(KNOWN_VERSIONS):
        return f"it was not tried with vLLM {vllm.version}"
    if config.scheduler_config.scheduler_cls is not None:
        return "another scheduler is asked for (--scheduler-cls)"
    is_v1 = not config.use_v2_model_runner
    speculative = config.speculative_config
    if speculative is not None and (
        is_v1 or speculative.method != "extract_hidden_states"
    ):
        # Runner V1 draws by it all tokens but the first, also where it drafts nothing:
        # an engine that keeps hidden states would go on with other draws (seen).
        return "speculative decoding draws by another rule"
    if config.model_config.is_encoder_decoder:
        return "an encoder's input is no part of it"
    expected = CPU_WORKER_CLASS if vllm.is_cpu else _STOCK_GPU_WORKER_CLASS
    if is_v1 and config.parallel_config.worker_cls != expected:
        return f"another worker class is in use ({config.parallel_config.worker_cls})"
    transfer = config.kv_transfer_config
    in_host = transfer is not None and transfer.kv_buffer_device == "cpu"
    if in_host and not vllm.is_cpu and role is Role.PREFILL:
        # vLLM 0.32 copies KV to the host until the prompt's end, not the output's.
        return "KV is handed over by way of the host's memory"
    if missing := _missing(_NAMES | _NAMES_V1 if is_v1 else _NAMES):
        return f"vLLM {vllm.version} has no {missing}"
    return ""


def _missing(names: dict[str, tuple[str, ...]]) -> str:
    """Return the first name that is not there; empty: all are."""
    for place, attributes in names.items():
        module, _, name = place.partition(":")
        try:
            made: Any = getattr(import_module(module), name)
        except (ImportError, AttributeError):
            return place
        # What a class has, what its instances are born with, and what it sets on them.
        fields: Any = getattr(made, "__dataclass_fields__", ())
        code = getattr(unwrap(made.__init__), "__code__", None)
        for attribute in attributes:
            there = hasattr(made, attribute) or attribute in fields
            if not there and (code is None or attribute not in code.co_names):
                return f"{place}.{attribute}"
    return ""
