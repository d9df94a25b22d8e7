"""The chart's commands as processes of this machine: whether what it renders serves.

Each pod of the rendered manifests becomes one process at a loopback address of its own, with
the command, arguments and environment of its container. Three things differ: it listens at
its address instead of at all; frontends are given their workers' addresses, where a cluster's
DNS would tell them; the model is a folder with the texts of the demo model alone, as in the
images. Then its probes are asked, `helm test`'s own program is run, and all must end well.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from chart_commands import environment_of, expanded
from chart_manifests import Json, Pod, pods_of
from waiting import comes_true, status

__all__ = ["process_problems"]

START_TIMEOUT_S = 120.0
"""A process takes a second or two; a machine may stand still for a minute."""

TEXT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
"""What the images have of the demo model: no weights."""

IMAGE_MODEL = "/opt/tokenwire/demo-model"


@dataclass(slots=True)
class Running:
    """A pod as a process."""

    pod: Pod
    address: str
    process: subprocess.Popen[bytes]
    log: Path


def process_problems(manifests: Sequence[Json], model: Path) -> Iterator[str]:
    """Run the servers in *manifests*, yield what is not as it must be, and stop them.

    Args:
        manifests: Of one simulated model.
        model: Folder of the demo model.
    """
    with ExitStack() as stack:
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="tokenwire-chart-"))
        )
        texts = folder / "model"
        texts.mkdir()
        for name in TEXT_FILES:
            shutil.copy(model / name, texts)
        pods = [pod for pod in pods_of(manifests) if pod.is_server]
        # Not the addresses of another run at the same time.
        net = f"127.{random.randint(1, 254)}.{random.randint(1, 254)}"
        where = {pod.name: f"{net}.{i}" for i, pod in enumerate(pods, 1)}
        running: list[Running] = []
        stack.callback(_kill, running)
        # One by one: what runs is known, and killed, if the next cannot be started.
        running.extend(_start(pod, where, pods, texts, folder) for pod in pods)
        problems = list(_starts(running))
        if not problems:
            problems += _probes(running)
            problems += _test(manifests, running, folder)
        problems += _ends(running)
        if problems:
            problems += (
                f"{one.pod.name}: ... {line}"
                for one in running
                for line in one.log.read_text().splitlines()[-5:]
            )
        yield from problems


def _start(
    pod: Pod, where: dict[str, str], pods: Sequence[Pod], texts: Path, folder: Path
) -> Running:
    (container,) = pod.containers
    address = where[pod.name]
    home = folder / address
    home.mkdir()
    name = f"{pod.owner['metadata']['name']}-0"
    fields = {"status.podIP": address, "metadata.name": name}
    known = environment_of(container, pod.kind, fields)
    workers = [
        f"--worker=tcp://{where[one.name]}:{one.ports['link']}"
        for one in pods
        if one.command == "tokenwire-worker"
    ]
    arguments: list[str] = []
    for argument in container["args"]:
        if argument.startswith("--workers-dns="):
            arguments += workers
            continue
        text = expanded(argument, known).replace("0.0.0.0", address)
        arguments.append(text.replace(IMAGE_MODEL, str(texts)))
    environment = {
        name: value.replace("/cache", str(home)) for name, value in known.items()
    }
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    log = folder / f"{address}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*container["command"], *arguments],
            cwd=home,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    return Running(pod, address, process, log)


def _starts(running: Sequence[Running]) -> Iterator[str]:
    """Wait until all have passed their startup probes."""
    for one in running:
        if _passes(one, "startupProbe"):
            continue
        if one.process.returncode is not None:
            yield f"{one.pod.name}: it ended with {one.process.returncode}"
        else:
            yield f"{one.pod.name}: it did not start within {START_TIMEOUT_S:g} s"
            return


def _probes(running: Sequence[Running]) -> Iterator[str]:
    """Ask all other probes; frontends become ready when they have found workers."""
    for one in running:
        _passes(one, "readinessProbe")
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            got = _asked(one, probe)
            if got != 200:
                yield f"{one.pod.name}: its {probe} gets {got or 'no answer'}"


def _passes(one: Running, probe: str) -> bool:
    """Wait until a probe gets 200."""
    return comes_true(lambda: _asked(one, probe) == 200, START_TIMEOUT_S, [one.process])


def _asked(one: Running, probe: str) -> int:
    """Return the status that a probe gets; 0: no answer."""
    (container,) = one.pod.containers
    get = container[probe]["httpGet"]
    url = f"http://{one.address}:{one.pod.ports[get['port']]}{get['path']}"
    return status(url)


def _test(
    manifests: Sequence[Json], running: Sequence[Running], folder: Path
) -> Iterator[str]:
    """Run the program of `helm test` against the frontend."""
    (frontend,) = (one for one in running if one.pod.command == "tokenwire-frontend")
    tests = [pod for pod in pods_of(manifests) if pod.kind == "Pod"]
    if len(tests) != 1:
        yield f"{len(tests)} pods of helm test for one model"
        return
    (container,) = tests[0].containers
    script, _, name = container["args"]
    url = f"http://{frontend.address}:{frontend.pod.ports['http']}"
    ran = subprocess.run(
        [sys.executable, "-c", script, url, name],
        check=False,
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=2 * START_TIMEOUT_S,
    )
    if ran.returncode:
        yield f"{tests[0].name}: {(ran.stderr + ran.stdout).strip()}"


def _ends(running: Sequence[Running]) -> Iterator[str]:
    """Stop all as Kubernetes does: SIGTERM, and the grace period."""
    for one in running:
        if one.process.poll() is None:
            one.process.send_signal(signal.SIGTERM)
    for one in running:
        grace_s = one.pod.spec["terminationGracePeriodSeconds"]
        try:
            code = one.process.wait(timeout=grace_s)
        except subprocess.TimeoutExpired:
            yield f"{one.pod.name}: it runs {grace_s} s after SIGTERM"
            continue
        if code:
            yield f"{one.pod.name}: it ended with {code}"


def _kill(running: Sequence[Running]) -> None:
    for one in running:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()
