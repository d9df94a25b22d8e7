"""Take the stages of deploy/Dockerfile in a clean Debian, and serve from what they make.

What `docker build` would do, without a daemon: each stage is a layer over its base (an
overlay mount), each RUN a shell in it (chroot). The base is Debian of the same release
with its Python in the place of Docker's image, made by debootstrap. Then, as the images'
user on a read-only root: `--help`, and a pair of simulated workers behind a frontend that
answers a request. Needs root, and leaves no mount: it runs in a mount namespace of its own.

Not shown by this: Docker's own base image, its builder, and networks between containers.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from compose_here import chat, free_port
from dockerfile import Instruction, Stage, read_stages, with_values
from image_tools import ToolError, debian, folder
from waiting import comes_true, status

ROOT = Path(__file__).parents[1]
DOCKERFILE = ROOT / "deploy/Dockerfile"

PACKAGES = "python3,python3-venv,python3-pip,ca-certificates"
RELEASE = "bookworm"

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
USUAL = {"PATH": PATH, "HOME": "/root", "LANG": "C.UTF-8"}

# What the network of this machine wants, beside names and certificates.
PASSED = (
    "PIP_CERT",
    "PIP_INDEX_URL",
    "PIP_DEFAULT_TIMEOUT",
    "HTTPS_PROXY",
    "HTTP_PROXY",
)
OF_HOST = ("/etc/resolv.conf", "/etc/hosts", "/etc/ssl/certs/ca-certificates.crt")

START_S = 120.0
MIB = 1 << 20


class BuildError(Exception):
    """A step failed; its output."""


@dataclass(slots=True)
class Layer:
    """What a stage has become."""

    folders: list[Path]  # its own layer, then those under it
    env: dict[str, str]
    workdir: str = "/"
    user: str = "0:0"
    entrypoint: list[str] = field(default_factory=list[str])
    healthcheck: list[str] = field(default_factory=list[str])


class Builder:
    """Builds stages, each once, those that it needs before it.

    Args:
        stages: Of the Dockerfile.
        base: A root that stands for the images which are not stages.
        work: Where layers go.
        arguments: As of ``--build-arg``.
    """

    def __init__(
        self,
        stages: Mapping[str, Stage],
        base: Path,
        work: Path,
        arguments: Mapping[str, str],
    ) -> None:
        self._stages = stages
        self._base = base
        self._work = work
        self._arguments = arguments
        self._built: dict[str, Layer] = {}

    def build(self, name: str) -> Layer:
        """Return the layer of a stage, made if need be.

        Raises:
            BuildError: A step fails.
        """
        if name in self._built:
            return self._built[name]
        stage = self._stages.get(name)
        if stage is None:
            return Layer([self._base], dict(USUAL))
        below = self.build(stage.base)
        own = self._work / name
        own.mkdir()
        layer = Layer(
            [own, *below.folders],
            dict(below.env),
            below.workdir,
            below.user,
            list(below.entrypoint),
            list(below.healthcheck),
        )
        self._built[name] = layer
        began = time.monotonic()
        values: dict[str, str] = {}
        for step in stage.instructions:
            self._take(layer, step, values)
        took = time.monotonic() - began
        print(f"{name}: {_size(own) / MIB:.0f} MiB in {took:.0f} s", flush=True)
        return layer

    def _take(self, layer: Layer, step: Instruction, values: dict[str, str]) -> None:
        known = layer.env | values
        match step.word:
            case "RUN":
                self._run(layer, step.rest, values)
            case "COPY":
                self._copy(layer, step.words())
            case "ENV":
                for word in step.words():
                    key, _, value = word.partition("=")
                    layer.env[key] = with_values(value, known)
            case "ARG":
                key, _, usual = step.rest.partition("=")
                values[key] = self._arguments.get(key, usual)
            case "WORKDIR":
                layer.workdir = step.rest
                with Mounted(layer) as root:
                    (root / step.rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
            case "USER":
                layer.user = step.rest
            case "ENTRYPOINT":
                layer.entrypoint = step.words()
            case "HEALTHCHECK":
                layer.healthcheck = json.loads(step.rest.partition("CMD ")[2])
            case "LABEL" | "EXPOSE" | "STOPSIGNAL":
                pass  # says something, does nothing
            case _:
                msg = f"{step.word}: not understood here"
                raise BuildError(msg)

    def _run(self, layer: Layer, script: str, values: dict[str, str]) -> None:
        passed = {k: os.environ[k] for k in PASSED if k in os.environ}
        with Mounted(layer) as root:
            done = subprocess.run(
                in_root(root, layer.user, layer.workdir, ["/bin/sh", "-c", script]),
                env=passed | layer.env | values,
                capture_output=True,
                text=True,
            )
        if done.returncode:
            raise BuildError(f"{script}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")

    def _copy(self, layer: Layer, words: list[str]) -> None:
        source_root = ROOT
        with ExitStack() as mounts:
            if words[0].startswith("--from="):
                other = self.build(words.pop(0).removeprefix("--from="))
                source_root = mounts.enter_context(Mounted(other))
            root = mounts.enter_context(Mounted(layer))
            *sources, target = words
            into = root / os.path.join(layer.workdir, target).lstrip("/")
            for name in sources:
                source = source_root / name.lstrip("/")
                if source.is_dir():
                    _copy_folder(source, into)
                else:
                    place = into / source.name if target.endswith("/") else into
                    place.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(source, place)


class Mounted:
    """A layer as a root that can be written, but for what is mounted read-only."""

    def __init__(self, layer: Layer, *, read_only: bool = False) -> None:
        self._layer = layer
        self._read_only = read_only
        self._place = Path(
            tempfile.mkdtemp(prefix="root-", dir=layer.folders[0].parent)
        )

    def __enter__(self) -> Path:
        """Mount it, with what every container has."""
        upper, *lower = self._layer.folders
        options = f"lowerdir={':'.join(map(str, lower or [upper]))}"
        if self._read_only:
            options = f"lowerdir={':'.join(map(str, self._layer.folders))}"
        else:
            work = upper.parent / f".{upper.name}.work"
            work.mkdir(exist_ok=True)
            options += f",upperdir={upper},workdir={work}"
        place = str(self._place)
        _mount("-t", "overlay", "overlay", "-o", options, place)
        _mount("-t", "proc", "proc", f"{place}/proc")
        _mount("--rbind", "/dev", f"{place}/dev")
        if self._read_only:
            for folder in ("tmp", "cache"):
                _mount("-t", "tmpfs", "tmpfs", "-o", "mode=1777", f"{place}/{folder}")
        else:
            for file in OF_HOST:
                if Path(file).exists() and Path(place + file).exists():
                    _mount("--bind", file, place + file)
        return self._place

    def __exit__(self, *exception: object) -> None:
        """Let it go."""
        subprocess.run(["umount", "-l", str(self._place)], check=True)
        self._place.rmdir()


def in_root(root: Path, user: str, workdir: str, command: Sequence[str]) -> list[str]:
    """Return how *command* runs in *root*, as *user*, without any capability but root's."""
    chroot = ["chroot", f"--userspec={user}", str(root)]
    return [*chroot, "/usr/bin/env", f"--chdir={workdir}", *command]


def _mount(*words: str) -> None:
    done = subprocess.run(["mount", *words], capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"mount {' '.join(words)}: {done.stderr}")


def _copy_folder(source: Path, into: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    shutil.copytree(source, into, symlinks=True, ignore=ignored, dirs_exist_ok=True)


def _size(path: Path) -> int:
    return sum(
        file.lstat().st_size
        for file in path.rglob("*")
        if file.is_file() and not file.is_symlink()
    )


def debian_root() -> Path:
    """Return a Debian with Python, made once.

    Raises:
        ToolError: debootstrap cannot be had.
        BuildError: It failed.
    """
    target = folder() / f"debian-{RELEASE}"
    if target.exists():
        return target
    tools = debian("debootstrap")
    beside = Path(tempfile.mkdtemp(prefix="debian-", dir=target.parent))
    command = [str(tools / "usr/sbin/debootstrap"), "--variant=minbase"]
    command += [f"--include={PACKAGES}", RELEASE, str(beside), _mirror()]
    done = subprocess.run(
        command,
        env={**os.environ, "DEBOOTSTRAP_DIR": str(tools / "usr/share/debootstrap")},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        shutil.rmtree(beside)
        raise BuildError(f"debootstrap: {done.stdout[-1000:]}{done.stderr[-1000:]}")
    # As in Docker's image of Python: `python` is there, and pip may install.
    (beside / "usr/local/bin/python").symlink_to("/usr/bin/python3")
    for file in beside.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
        file.unlink()
    beside.chmod(0o755)
    beside.rename(target)
    return target


def _mirror() -> str:
    """Return where apt has this release from."""
    files = [Path("/etc/apt/sources.list"), *Path("/etc/apt/sources.list.d").glob("*")]
    text = "\n\n".join(file.read_text() for file in files if file.is_file())
    for part in text.split("\n\n"):  # of a .sources file, or lines of a .list
        if re.search(rf"^Suites:.*\b{RELEASE}(?=\s|$)", part, re.MULTILINE):
            found = re.search(r"^URIs: *(\S+)", part, re.MULTILINE)
        else:
            line = rf"^deb(?: \[.*?\])? +(\S+) +{RELEASE} "
            found = re.search(line, part, re.MULTILINE)
        if found is not None:
            return found[1]
    msg = f"apt has no source of {RELEASE}"
    raise BuildError(msg)


def serve(frontend: Layer, worker: Layer) -> None:
    """Run a pair from the images, each on a read-only root, and ask it.

    Raises:
        BuildError: Something does not start, or answers wrongly.
    """
    model = "/opt/tokenwire/demo-model"
    with ExitStack() as stack:
        roots = {name: stack.enter_context(Mounted(layer, read_only=True))
                 for name, layer in (("frontend", frontend), ("worker", worker))}  # fmt: skip
        layers = {"frontend": frontend, "worker": worker}

        def run(name: str, *words: str) -> subprocess.Popen[bytes]:
            layer = layers[name]
            process = subprocess.Popen(
                in_root(roots[name], layer.user, layer.workdir, words),
                env=layer.env,
                stdout=subprocess.DEVNULL,
            )
            stack.callback(_end, process)
            return process

        for name, layer in layers.items():
            if run(name, *layer.entrypoint, "--help").wait():
                msg = f"{name} --help failed"
                raise BuildError(msg)
        ports = [free_port() for _ in range(5)]
        for at, role in enumerate(("prefill", "decode")):
            run(
                "worker",
                *worker.entrypoint,
                *("--engine=sim", f"--role={role}", f"--model={model}"),
                *("--served-model-name=smollm2", f"--metrics-port={ports[at + 2]}"),
                f"--listen=tcp://127.0.0.1:{ports[at]}",
            )
        run(
            "frontend",
            *frontend.entrypoint,
            *(f"--model={model}", "--served-model-name=smollm2", f"--port={ports[4]}"),
            *(f"--worker=tcp://127.0.0.1:{port}" for port in ports[:2]),
        )
        url = f"http://127.0.0.1:{ports[4]}"
        if not comes_true(lambda: status(f"{url}/ready") == 200, START_S):
            msg = f"{url} is not ready"
            raise BuildError(msg)
        answer = chat(url, "Tell me of the sea. " * 10, 16)
        if len(answer["nvext"]["completion_token_ids"]) != 16:
            msg = f"not 16 ids: {answer}"
            raise BuildError(msg)
        # The check of the image itself, at the port of here.
        for name, usual, port in (("frontend", 8000, 4), ("worker", 9555, 2)):
            check = layers[name].healthcheck
            check = [word.replace(str(usual), str(ports[port])) for word in check]
            if run(name, *check).wait():
                msg = f"the health check of {name} fails: {check}"
                raise BuildError(msg)
        if run("frontend", "python3", "-c", "open('/opt/x', 'w')").wait() == 0:
            raise BuildError("the root can be written")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main() -> int:
    """Build and serve; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--engine", choices=("sim", "cpu"), default="sim")
    given = parser.parse_args()
    if os.environ.get("TOKENWIRE_OWN_MOUNTS") != "1":
        own = {**os.environ, "TOKENWIRE_OWN_MOUNTS": "1"}
        command = ["unshare", "--mount", "--propagation=private", sys.executable]
        return subprocess.run([*command, *sys.argv], env=own).returncode
    arguments = {"ENGINE": given.engine}
    stages = read_stages(DOCKERFILE, arguments)
    try:
        base = debian_root()
        with tempfile.TemporaryDirectory(dir=folder(), prefix="layers-") as work:
            builder = Builder(stages, base, Path(work), arguments)
            frontend, worker = builder.build("frontend"), builder.build("worker")
            for name, layer in (("frontend", frontend), ("worker", worker)):
                above = layer.folders[:-1]
                print(f"{name}: {sum(map(_size, above)) / MIB:.0f} MiB above its base")
            if given.engine == "sim":
                serve(frontend, worker)
    except (BuildError, ToolError) as error:
        print(error, file=sys.stderr)
        return 1
    print("built, and served a request")
    return 0


if __name__ == "__main__":
    sys.exit(main())
