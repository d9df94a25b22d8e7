"""deploy/compose.yaml, the Dockerfile, and what reads them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from compose_file import (
    COMPOSE,
    DOCKERFILE,
    ENGINES,
    ComposeError,
    complaints,
    compose_of,
    interpolate,
    load,
    stages,
)
from compose_here import entrypoint

from tokenwire.frontend.config import parse_config as frontend_config
from tokenwire.worker.config import parse_config as worker_config
from tokenwire.worker.sim.options import parse_options

PARSED = yaml.safe_load(COMPOSE.read_text())


def test_the_file_has_nothing_to_complain_about() -> None:
    """Everything that it names exists, and no container may do more than it must."""
    assert not list(complaints(load({})))


ELSEWHERE = ["--worker=tcp://sim-prefill:1"]
NOWHERE = ["--worker=tcp://moon:5555"]


@pytest.mark.parametrize(
    ("name", "changes", "complaint"),
    [
        ("sim-decode", {"read_only": None}, "its root can be written"),
        ("sim-decode", {"cap_drop": None}, "it has capabilities"),
        ("sim-decode", {"cap_add": ["NET_ADMIN"]}, "it has capabilities"),
        ("sim-decode", {"security_opt": None}, "it may gain privileges"),
        ("sim-decode", {"user": "0:0"}, "it runs as root"),
        ("sim-decode", {"user": None}, "it runs as root"),
        ("sim-decode", {"privileged": True}, "it has privileged"),
        ("sim-decode", {"ipc": "host"}, "it has ipc"),
        ("sim-decode", {"network_mode": "host"}, "in the host's network"),
        ("sim-decode", {"ports": ["8001:8000"]}, "beyond loopback"),
        ("sim-decode", {"image": "tokenwire/worker"}, "has no version"),
        ("sim-decode", {"image": "a/b:latest"}, "has no version"),
        ("sim-decode", {"profiles": None}, "without a profile"),
        ("sim-decode", {"healthcheck": None}, "has no check"),
        ("grafana", {"healthcheck": None}, "it has no health check"),
        ("sim-decode", None, "depends on sim-decode, which is none"),
        ("sim-decode", {"profiles": ["cpu"]}, "profiles do not start"),
        ("keys", {"restart": None}, "waits for keys by service_completed"),
        ("sim-decode", {"networks": ["edge"], "command": ELSEWHERE}, "does not reach"),
        ("sim-decode", {"networks": ["moon"]}, "no network moon"),
        ("sim-decode", {"volumes": ["moon:/m"]}, "no volume moon"),
        ("sim-decode", {"volumes": ["./moon:/m:ro"]}, "does not exist"),
        ("sim-decode", {"volumes": ["./helm:/m"]}, "./helm can be written"),
        ("sim-decode", {"volumes": ["captures:/m:z"]}, "z is no mode"),
        ("sim-decode", {"build": {"target": "moon"}}, "no stage moon"),
        ("sim-frontend", {"command": NOWHERE}, "names no service"),
        ("sim-frontend", {"profiles": ["sim", "cpu"]}, "publish one port"),
    ],
)
def test_what_is_wrong_is_found(
    name: str, changes: dict[str, Any] | None, complaint: str
) -> None:
    """Each complaint can be made."""
    services = {**PARSED["services"]}
    if changes is None:
        del services[name]
    else:
        changed = {**services[name], **changes}
        services[name] = {k: one for k, one in changed.items() if one is not None}
    compose = compose_of({**PARSED, "services": services}, {})

    assert any(complaint in one for one in complaints(compose))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a $$B", "a $B"),
        ("$SET ${SET}", "x x"),
        ("${NONE:-y}${EMPTY:-y}${EMPTY-y}${NONE-y}", "yyy"),
        ("${SET:+/z}${EMPTY:+/z}${EMPTY+/e}${NONE+/z}", "/z/e"),
        ("${SET:?no}", "x"),
        ("127.0.0.1:${NONE:-8000}:8000", "127.0.0.1:8000:8000"),
    ],
)
def test_variables_are_put_in_as_compose_does(text: str, value: str) -> None:
    """All of its forms."""
    assert interpolate(text, {"SET": "x", "EMPTY": ""}) == value


@pytest.mark.parametrize(
    "text", ["$NONE", "${NONE}", "${NONE:?no}", "$", "${", "${A:=b}"]
)
def test_a_variable_that_has_no_value_is_an_error(text: str) -> None:
    """An empty text in its place would be found out much later."""
    with pytest.raises(ComposeError):
        interpolate(text, {})


def test_a_container_gets_what_the_operator_has_set() -> None:
    """Capture, for one, is two settings of one variable."""
    usual = load({}).services["sim-prefill"].environment
    given = (
        load({"TOKENWIRE_CAPTURE_LAYERS": "2,4"}).services["sim-prefill"].environment
    )

    assert usual["TOKENWIRE_CAPTURE_HIDDEN_STATES"] == ""
    assert given["TOKENWIRE_CAPTURE_HIDDEN_STATES"] == "/captures"
    assert given["TOKENWIRE_CAPTURE_LAYERS"] == "2,4"


@pytest.mark.parametrize("profile", ENGINES)
def test_every_command_is_taken(profile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options, variables and the simulated engine's arguments exist."""
    for service in load({}).of(profile).values():
        command = service.entrypoint or entrypoint(service.target)
        for name, value in service.environment.items():
            monkeypatch.setenv(name, value)
        if command == ["tokenwire-frontend"]:
            config = frontend_config(service.command)
            assert len(config.workers) == 2
            assert config.host not in {"127.0.0.1", ""}  # else nothing is published
            known = _known(frontend_config)
        elif command == ["tokenwire-worker"]:
            worker = worker_config(service.command)
            assert worker.engine == ("sim" if profile == "sim" else "vllm")
            if profile == "sim":
                parse_options(worker.engine_args)
            known = _known(worker_config)
        else:
            continue
        assert _own_variables(service.environment) <= known, service.name
        for name in service.environment:
            monkeypatch.delenv(name)


def test_nobody_mounts_the_secret_of_another_role() -> None:
    """A frontend that is broken into cannot pass for a worker; only who makes them has both."""
    own = {"frontend": "frontend-keys", "worker": "worker-keys"}
    for service in load({}).services.values():
        mounted = {source for source, _, _ in service.volumes if "keys" in source}
        if service.name == "keys":
            assert mounted == set(own.values())
        elif service.target in own:
            assert mounted == {own[service.target]}, service.name
            [place] = [
                target for source, target, _ in service.volumes if source in mounted
            ]
            keys = {k: v for k, v in service.environment.items() if "_CURVE_" in k}
            assert len(keys) == 2
            assert all(Path(v).parent == Path(place) for v in keys.values())
        else:
            assert not mounted, service.name


def test_keys_are_made_once_each_in_its_own_folder(tmp_path: Path) -> None:
    """Also where the first run was cut off."""
    [command] = load({}).services["keys"].command
    command = command.replace("/keys/", f"{tmp_path}/")
    path = f"{Path(sys.executable).parent}:{os.defpath}"

    def made() -> dict[str, bytes]:
        subprocess.run(["/bin/sh", "-c", command], env={"PATH": path}, check=True)
        return {
            str(one.relative_to(tmp_path)): one.read_bytes()
            for one in tmp_path.rglob("*.*")
        }

    for role in ("frontend", "worker"):
        (tmp_path / role).mkdir()
    first = made()
    assert set(first) == {
        *("frontend/frontend.secret", "frontend/frontend.public"),
        *("worker/worker.secret", "worker/worker.public"),
        *("frontend/worker.public", "worker/frontend.public"),
    }
    for one, same in (("frontend", "worker"), ("worker", "frontend")):
        assert first[f"{same}/{one}.public"] == first[f"{one}/{one}.public"]
    assert made() == first
    (tmp_path / "worker/frontend.public").unlink()
    again = made()
    assert again["frontend/frontend.secret"] != first["frontend/frontend.secret"]
    assert again["worker/frontend.public"] == again["frontend/frontend.public"]


def _own_variables(environment: dict[str, str]) -> set[str]:
    return {name for name in environment if name.startswith("TOKENWIRE_")}


def _known(parse: Callable[[Sequence[str]], object]) -> set[str]:
    import contextlib
    import io

    page = io.StringIO()
    with contextlib.redirect_stdout(page), pytest.raises(SystemExit):
        parse(["--help"])
    return set(re.findall(r"\[(TOKENWIRE_\w+)\]", page.getvalue()))


def test_images_run_as_the_user_that_compose_names() -> None:
    """A volume that is empty takes its owner from the image."""
    text = DOCKERFILE.read_text()
    last = re.split(r"^FROM ", text, flags=re.MULTILINE)[1:]
    users = re.findall(r"^USER (\S+)$", text, re.MULTILINE)
    assert users[-1] == users[0] == "10001:10001"
    assert "10001:10001" in COMPOSE.read_text()
    final = [part for part in last if part.startswith("runtime")]
    assert len(final) == 6
    for volume in ("/captures", "/keys", "/models", "/cache"):
        assert re.search(rf"chown -R 10001:10001 .*{volume}\b", text), volume


def test_what_the_dockerfile_copies_reaches_the_daemon() -> None:
    """`.dockerignore` leaves everything out but that."""
    root = DOCKERFILE.parents[1]
    kept = {
        line.removeprefix("!")
        for line in (root / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    copied = re.findall(
        r"^COPY (?!--from)(.+) \S+$", DOCKERFILE.read_text(), re.MULTILINE
    )
    for source in " ".join(copied).split():
        assert (root / source).exists(), source
        assert any(
            Path(source).match(pattern) or pattern.startswith(f"{source}/")
            for pattern in kept
        ), source


def test_the_file_and_the_dockerfile_name_each_other() -> None:
    """Every image that is ours is built from a stage, and every last stage is used."""
    built = {
        (service.image.split(":", maxsplit=1)[0], service.target)
        for service in load({}).services.values()
        if service.target
    }
    assert built == {
        ("tokenwire/frontend", "frontend"),
        ("tokenwire/worker", "worker"),
        ("tokenwire/demo-model", "demo-model"),
    }
    assert {stage for _, stage in built} <= stages()
    assert {f"venv-{engine}" for engine in ENGINES} <= stages()
    assert entrypoint("worker") == ["tokenwire-worker"]
    assert entrypoint("frontend") == ["tokenwire-frontend"]
