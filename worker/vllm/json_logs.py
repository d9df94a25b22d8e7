"""vLLM's lines of the log as JSON, in all of its processes.

vLLM reads a file that says how it logs (``VLLM_LOGGING_CONFIG_PATH``) in each of them, also
on other machines, so the file is part of what is installed there.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import MutableMapping
from pathlib import Path

from tokenwire.protocol.log_lines import JsonLines

__all__ = ["CONFIG", "handler", "log_as_json"]

WORKER_ID = "VLLM_TOKENWIRE_WORKER_ID"
"""The variable that says it to vLLM's processes: those of this name reach all of them."""

CONFIG = Path(__file__).with_name("json_logs.json")


def log_as_json(worker_id: str, environ: MutableMapping[str, str] = os.environ) -> None:
    """Have vLLM log as JSON, unless the operator has a file of his own."""
    environ.setdefault("VLLM_LOGGING_CONFIG_PATH", str(CONFIG))
    environ[WORKER_ID] = worker_id


def handler() -> logging.Handler:
    """Return the handler that the file names; called by ``logging.config``."""
    level = os.environ.get("VLLM_LOGGING_LEVEL", "INFO").upper()
    logging.getLogger("vllm").setLevel(level)
    made = logging.StreamHandler(sys.stderr)
    worker = os.environ.get(WORKER_ID, "")
    fields = {"worker": worker} if worker else {}
    made.setFormatter(JsonLines(fields))
    made.addFilter(_name_process)
    return made


def _name_process(record: logging.LogRecord) -> bool:
    """Note which of vLLM's processes writes."""
    process = getattr(record, "vllm_process_name", None)
    record.fields = {"process": process} if process else None
    return True
