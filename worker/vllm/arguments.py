"""vLLM's own command line and environment, with the defaults that a role needs.

The operator's arguments reach vLLM untouched. Ours stand before them, so whatever
the operator also gives wins; an environment variable is set only where it is not.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any, NoReturn

from tokenwire.protocol.messages import Role
from tokenwire.worker.capture_files import Access
from tokenwire.worker.engine import EngineStartError

from .binding import Vllm
from .resume import CPU_WORKER_CLASS

__all__ = ["CaptureArguments", "engine_config", "set_environment"]

CPU_KV_CACHE_BYTES = 1 << 30
"""KV cache of one CPU engine. vLLM's own default is 92 % of the machine's memory,
which no second engine survives; 1 GiB is 23,000 tokens of a 135M model in float32."""

EXECUTOR = "--distributed-executor-backend"

CAPTURE_CONNECTOR = "CaptureConnector"
CAPTURE_MODULE = "tokenwire.worker.vllm.capture_connector"


@dataclass(slots=True, frozen=True)
class CaptureArguments:
    """What an engine has to do with hidden states."""

    layers: tuple[int, ...]  # kept beside the KV
    folder: str = ""  # where they are saved; empty: nowhere
    access: Access | None = None
    notify: str = ""  # who hears of each file


def set_environment(
    role: Role, *, is_cpu: bool, environ: MutableMapping[str, str] = os.environ
) -> None:
    """Set the variables that vLLM's processes inherit, where the operator did not.

    Raises:
        EngineStartError: The side channel is to be at a name that does not resolve.
    """
    # The process holds sockets and threads by now: a fork would share both.
    environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    # A worker talks to its own stack only; vLLM would report to its makers.
    environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if role is not Role.AGGREGATED:
        # Loopback until the operator names an interface: the handshake on this port
        # has no authentication. The port is vLLM's 5600 for every engine otherwise,
        # and the second one on a machine dies.
        host = environ.get("VLLM_NIXL_SIDE_CHANNEL_HOST") or "127.0.0.1"
        environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = _address(host)
        if "VLLM_NIXL_SIDE_CHANNEL_PORT" not in environ:
            environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(_free_port())
    if is_cpu and "VLLM_CPU_OMP_THREADS_BIND" not in environ:
        # vLLM binds each engine's threads to the machine's first cores: two engines
        # share them and the rest idles. Unbound, the kernel places them.
        environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        # OpenMP's threads spin while they wait: one core too many taken, and a token
        # costs 500 ms instead of 30. One core is left to the other processes; a
        # disaggregated engine has a peer, on the same machine when it is a CPU.
        cores = len(os.sched_getaffinity(0))
        threads = cores - 1 if role is Role.AGGREGATED else cores // 2
        environ.setdefault("OMP_NUM_THREADS", str(max(1, threads)))


def _address(host: str) -> str:
    """Return the address of *host*: ZeroMQ, by which vLLM listens there, binds no names.

    Raises:
        EngineStartError: It does not resolve.
    """
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        msg = f"VLLM_NIXL_SIDE_CHANNEL_HOST: {host} does not resolve ({error})"
        raise EngineStartError(msg) from error
    return str(infos[0][4][0])


def engine_config(
    vllm: Vllm,
    model: str,
    served_name: str,
    role: Role,
    given: list[str],
    capture: CaptureArguments | None = None,
    traces_endpoint: str = "",
) -> Any:  # vLLM's VllmConfig, untyped here
    """Return vLLM's configuration for *role* from the operator's arguments.

    Raises:
        EngineStartError: vLLM refuses an argument or their combination.
    """
    for name in ("--model", "--served-model-name"):
        if any(_names(argument, name) for argument in given):
            msg = f"{name} is an option of tokenwire-worker, not of the engine"
            raise EngineStartError(msg)
    has_connector = any(_names(one, "--kv-transfer-config") for one in given)
    if capture is not None:
        for name in ("--kv-transfer-config", "--speculative-config"):
            if any(_names(argument, name) for argument in given):
                msg = f"{name} contradicts --capture-layers, which makes one of its own"
                raise EngineStartError(msg)
    arguments = ["--model", model, "--served-model-name", served_name]
    # Only vLLM's log lines; its Prometheus families are recorded all the same.
    arguments.append("--disable-log-stats")
    has_own = any(_names(one, "--otlp-traces-endpoint") for one in given)
    if traces_endpoint and not has_own:
        arguments += ["--otlp-traces-endpoint", traces_endpoint]
        _trace_as_we_do()
    if vllm.is_cpu:
        # Compiling takes minutes, and the two sides of a pair would not share it.
        arguments += ["--enforce-eager", "--worker-cls", CPU_WORKER_CLASS]
        if not os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
            arguments += ["--kv-cache-memory-bytes", str(CPU_KV_CACHE_BYTES)]
    if capture is not None:
        arguments += ["--speculative-config", json.dumps(_keep_states(capture.layers))]
    transfer = None if has_connector else _transfer(vllm, role, capture)
    if transfer is not None:
        arguments += ["--kv-transfer-config", json.dumps(transfer)]
    parser = vllm.AsyncEngineArgs.add_cli_args(
        vllm.FlexibleArgumentParser(prog="tokenwire-worker --")
    )
    parser.error = _refuse
    try:
        parsed = vllm.AsyncEngineArgs.from_cli_args(
            parser.parse_args([*arguments, *given])
        )
        config = parsed.create_engine_config()
    except (ValueError, TypeError, OSError, RuntimeError, NotImplementedError) as error:
        raise EngineStartError(first_sentence(error)) from error
    if capture is not None:
        _check_layers(config, capture.layers)
    if vllm.is_cpu and not any(_names(one, EXECUTOR) for one in given):
        _run_model_in_core(config.parallel_config)
    return config


def _run_model_in_core(config: Any) -> None:  # vLLM's ParallelConfig
    """Have one process for the scheduler and the model, as vLLM has for one GPU.

    On a CPU vLLM 0.32 starts a second one, always, since it may have to bind the threads
    of that. Each of the two then spins while it waits for the other: an engine takes two
    cores for what one does, and eight seconds longer to import.
    """
    binds = os.environ.get("VLLM_CPU_OMP_THREADS_BIND") != "nobind"
    if config.world_size == 1 and not binds:
        config.distributed_executor_backend = "uni"


def _trace_as_we_do(environ: MutableMapping[str, str] = os.environ) -> None:
    """Have vLLM speak our protocol to the collector (its own default is gRPC)."""
    environ.setdefault("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    environ.setdefault("OTEL_SERVICE_NAME", "vllm")


def _keep_states(layers: tuple[int, ...]) -> dict[str, object]:
    """Return the speculative config that keeps hidden states and drafts nothing."""
    return {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {
            "hf_config": {"eagle_aux_hidden_state_layer_ids": list(layers)}
        },
    }


def _transfer(
    vllm: Vllm, role: Role, capture: CaptureArguments | None
) -> dict[str, object] | None:
    """Return the KV connectors that *role* needs."""
    connectors: list[dict[str, object]] = []
    if role is not Role.AGGREGATED:
        nixl: dict[str, object] = {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_both",
        }
        if vllm.is_cpu:
            nixl["kv_buffer_device"] = "cpu"  # vLLM's default is cuda
        connectors.append(nixl)
    if capture is not None and capture.folder:
        access = capture.access
        extra: dict[str, object] = {
            "shared_storage_path": capture.folder,
            "use_synchronization_lock": False,  # the locks are ours
            "file_mode": None if access is None else access.mode,
            "file_group": None if access is None else access.group,
            "notify": capture.notify,
        }
        if connectors:
            extra["layout_of"] = "NixlConnector"
        connectors.append(
            {
                "kv_connector": CAPTURE_CONNECTOR,
                "kv_connector_module_path": CAPTURE_MODULE,
                "kv_role": "kv_producer",
                "kv_connector_extra_config": extra,
            }
        )
    if len(connectors) < 2:
        return connectors[0] if connectors else None
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": connectors},
    }


def _check_layers(config: Any, layers: tuple[int, ...]) -> None:  # vLLM's VllmConfig
    num_layers = config.model_config.get_total_num_hidden_layers()
    if layers[-1] > num_layers:
        msg = (
            f"--capture-layers names layer {layers[-1]}, the model has {num_layers}: "
            f"0..{num_layers} are there"
        )
        raise EngineStartError(msg)


def first_sentence(error: BaseException) -> str:
    """Return the first lines of an error's text that say something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # pydantic's first line only counts the errors; the next two name and explain.
    return " ".join(lines[:3]) or type(error).__name__


def _refuse(message: str) -> NoReturn:
    msg = f"vLLM refuses its arguments: {message}"
    raise EngineStartError(msg)


def _names(argument: str, option: str) -> bool:
    """Return whether *argument* is *option*, in any of vLLM's spellings of it."""
    name = argument.partition("=")[0].partition(".")[0].rstrip("+")
    return name.replace("_", "-") == option


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
