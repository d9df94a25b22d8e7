"""Parts of ``worker/vllm/resume*.py`` that a test switches off in a running engine.

A file says which are off; vLLM's processes look into it (``support.switched``) whenever
they come to a part. With none off they do what they do anyway.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from pathlib import Path

__all__ = ["ARGUMENTS", "Switches", "is_off", "switch"]

_VARIABLE = "TOKENWIRE_TEST_SWITCHES"
_SCHEDULERS = {False: "Scheduler", True: "AsyncScheduler"}

ARGUMENTS = ("--worker-extension-cls", "support.switched.Extension")
"""Have vLLM's worker process load the switches."""


class Switches:
    """The test's end.

    Args:
        folder: Where the file lies.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "off"
        self._file.touch()
        self.environment = {_VARIABLE: str(self._file)}
        """Of the engine's process."""

    @contextlib.contextmanager
    def off(self, part: str) -> Generator[None]:
        """Switch *part* off, for requests that are sent within."""
        self._file.write_text(part)
        try:
            yield
        finally:
            self._file.write_text("")


def is_off(part: str) -> bool:
    """Return whether *part* is switched off now."""
    return part in Path(os.environ[_VARIABLE]).read_text().split()


def switch(classes: dict[bool, str]) -> None:
    """Put schedulers with switches in the place of *classes*, if there is a file."""
    if _VARIABLE in os.environ:
        classes.update(
            {key: f"support.switched.{name}" for key, name in _SCHEDULERS.items()}
        )
