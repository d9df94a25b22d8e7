"""vLLM's lines as JSON: the file that it reads, as ``logging.config`` takes it."""

from __future__ import annotations

import io
import json
import logging
import sys
from logging.config import dictConfig

import pytest

from tokenwire.worker.vllm import json_logs


def test_vllm_s_lines_are_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the worker's name and vLLM's own of its process, on the level that is set."""
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "debug")
    monkeypatch.setenv(json_logs.WORKER_ID, "decode-0")
    logger = logging.getLogger("vllm")
    before = logger.handlers[:], logger.level, logger.propagate
    try:
        dictConfig(json.loads(json_logs.CONFIG.read_text()))
        child = logging.getLogger("vllm.core")
        child.debug("step\n%d", 5, extra={"vllm_process_name": "EngineCore"})
    finally:
        logger.handlers, logger.level, logger.propagate = before
    line = json.loads(written.getvalue())
    assert line.pop("time")
    assert line == {
        "level": "debug",
        "logger": "vllm.core",
        "message": "step\n5",
        "worker": "decode-0",
        "process": "EngineCore",
    }


def test_an_operator_s_own_file_stays() -> None:
    """Ours stands where there is none."""
    for own in ({}, {"VLLM_LOGGING_CONFIG_PATH": "/mine.json"}):
        environ = dict(own)
        json_logs.log_as_json("w", environ)
        expected = own.get("VLLM_LOGGING_CONFIG_PATH", str(json_logs.CONFIG))
        assert environ["VLLM_LOGGING_CONFIG_PATH"] == expected
        assert environ[json_logs.WORKER_ID] == "w"
