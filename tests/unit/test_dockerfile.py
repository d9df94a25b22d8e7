"""The reader of deploy/Dockerfile that `make check-images` goes by."""

from __future__ import annotations

from pathlib import Path

import pytest
from compose_file import DOCKERFILE
from dockerfile import read_stages, with_values

TEXT = r"""
# a comment
ARG BASE=a:1
ARG ENGINE=sim
FROM ${BASE} AS first
# hadolint ignore=DL1
RUN one \
    && two
COPY x y z/
FROM first-${ENGINE} AS last
HEALTHCHECK --interval=1s \
    CMD ["a", "b c"]
ENTRYPOINT ["run", "it"]
"""


def test_stages_have_their_bases_and_whole_lines(tmp_path: Path) -> None:
    """Comments are left out, continued lines joined, arguments put in."""
    file = tmp_path / "Dockerfile"
    file.write_text(TEXT)
    stages = read_stages(file, {"ENGINE": "cpu"})

    assert [(one.name, one.base) for one in stages.values()] == [
        ("first", "a:1"),
        ("last", "first-cpu"),
    ]
    run, copy = stages["first"].instructions
    assert run.rest == "one && two"
    assert copy.words() == ["x", "y", "z/"]
    assert stages["last"].instructions[1].words() == ["run", "it"]


@pytest.mark.parametrize("text", ["RUN x\n", "FROM a\n"])
def test_what_is_not_understood_is_an_error(text: str, tmp_path: Path) -> None:
    """A step must not be left out in silence."""
    file = tmp_path / "Dockerfile"
    file.write_text(text)
    with pytest.raises(ValueError, match="stage"):
        read_stages(file, {})


def test_values_are_put_in() -> None:
    """As a builder does; an unknown one is empty."""
    assert with_values("$A/${B}:$C", {"A": "1", "B": "2"}) == "1/2:"


@pytest.mark.parametrize("engine", ["sim", "cpu", "gpu"])
def test_every_stage_stands_on_another_or_on_the_base(engine: str) -> None:
    """And copies from stages that exist."""
    stages = read_stages(DOCKERFILE, {"ENGINE": engine, "PARSERS": "cpu"})
    base = stages["installer"].base
    assert base.startswith("python:3.11.")
    for stage in stages.values():
        assert stage.base == base or stage.base in stages, stage.name
        for step in stage.instructions:
            if step.rest.startswith("--from="):
                assert step.words()[0].removeprefix("--from=") in stages
