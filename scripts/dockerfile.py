"""A Dockerfile's stages and their instructions: as much of the format as ours uses."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Instruction", "Stage", "read_stages", "with_values"]

_VALUE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


@dataclass(slots=True, frozen=True)
class Instruction:
    """One instruction, on one line."""

    word: str  # RUN, COPY, ...
    rest: str

    def words(self) -> list[str]:
        """Return its list, if it is written as JSON, or its words."""
        if self.rest.startswith("["):
            return list(json.loads(self.rest))
        return shlex.split(self.rest)


@dataclass(slots=True)
class Stage:
    """What one ``FROM`` begins."""

    name: str
    base: str  # another stage, or an image
    instructions: list[Instruction] = field(default_factory=list[Instruction])


def read_stages(path: Path, arguments: Mapping[str, str]) -> dict[str, Stage]:
    """Return the stages by name, in their order; *arguments* as of ``--build-arg``.

    Raises:
        ValueError: A stage has no name, or an instruction comes before the first.
    """
    known: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    stage: Stage | None = None
    for line in _lines(path.read_text()):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            base, _, name = with_values(rest, known).partition(" AS ")
            if not name:
                msg = f"{line}: a stage without a name"
                raise ValueError(msg)
            stage = stages[name] = Stage(name, base)
        elif stage is not None:
            stage.instructions.append(Instruction(word, rest))
        elif word == "ARG":
            name, _, usual = rest.partition("=")
            known[name] = arguments.get(name, usual)
        else:
            msg = f"{line}: before the first stage"
            raise ValueError(msg)
    return stages


def with_values(text: str, values: Mapping[str, str]) -> str:
    """Return *text* with ``$NAME`` and ``${NAME}`` replaced; unknown ones are empty."""
    return _VALUE.sub(lambda match: values.get(match[1] or match[2], ""), text)


def _lines(text: str) -> list[str]:
    kept = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    whole = re.sub(r"\s*\\\n\s*", " ", "\n".join(kept))
    return [line.strip() for line in whole.splitlines() if line.strip()]
