"""The engine that the settings ask for, and who keeps its hidden states."""

from __future__ import annotations

from dataclasses import replace

from tokenwire.worker.captures import Captures
from tokenwire.worker.engine import Engine, EngineStartError
from tokenwire.worker.kv_blocks import CachedBlocks

from .config import WorkerConfig

__all__ = ["make_captures", "make_engine"]


def make_captures(config: WorkerConfig) -> Captures | None:
    """Return who keeps the folder of hidden states; None: this worker saves none."""
    if config.capture is None or not config.capture.folder:
        return None
    return Captures(config.capture)


def make_engine(
    config: WorkerConfig,
    captures: Captures | None = None,
    blocks: CachedBlocks | None = None,
) -> Engine:
    """Return the engine that *config* asks for; the other one is not imported.

    Raises:
        SystemExit: 2: a bad option of the simulated engine.
        EngineStartError: The engine is not installed.
    """
    if config.engine == "sim":
        from .sim.engine import SimEngine
        from .sim.options import parse_options

        options = parse_options(config.engine_args)
        exact_resume = config.exact_resume and options.exact_resume
        return SimEngine(
            model=config.model,
            role=config.role,
            options=replace(options, exact_resume=exact_resume),
            captures=captures,
            blocks=blocks,
        )
    try:
        from .vllm.engine import VllmEngine
    except ModuleNotFoundError as error:
        msg = (
            f"the engine vllm is not installed ({error}): install tokenwire[cpu] or "
            "tokenwire[gpu], or use --engine sim"
        )
        raise EngineStartError(msg) from error
    engine: Engine = VllmEngine(
        model=config.model,
        served_name=config.served_model_name,
        role=config.role,
        engine_args=list(config.engine_args),
        layers=() if config.capture is None else config.capture.layers,
        captures=captures,
        exact_resume=config.exact_resume,
        blocks=blocks,
        traces_endpoint=config.traces.endpoint,
    )
    return engine
