"""Run the services of deploy/compose.yaml as processes of this machine, and use them.

The very commands, environment and order of the file, without its containers: names of
services become loopback, ports free ones, volumes temporary folders, and the images'
paths those of this machine. `make compose-sim` and `make compose-cpu` serve a request so;
the tests run the first.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from compose_file import DOCKERFILE, Compose, Service, load
from waiting import comes_true, status

BIN = Path(sys.executable).parent

PORTS = (3000, 5555, 5600, 8000, 9090, 9555)
"""What containers listen on; each of each service gets a free one here."""

CHECK_S = 0.2  # between two checks of a service's health
START_S = 600.0  # an engine on two busy cores
STOP_S = 60.0  # the longest `stop_grace_period`


class HereError(Exception):
    """A service did not do what the file expects of it."""


def entrypoint(stage: str, dockerfile: Path = DOCKERFILE) -> list[str]:
    """Return what an image runs, whatever its arguments are."""
    text = dockerfile.read_text()
    part = re.split(rf"^FROM \S+ AS {re.escape(stage)}$", text, flags=re.MULTILINE)[1]
    found = re.search(
        r"^ENTRYPOINT (\[.*\])$", part.partition("\nFROM ")[0], re.MULTILINE
    )
    return list(json.loads(found[1])) if found else []


@dataclass(slots=True)
class Here:
    """Services as processes.

    Args:
        compose: The file.
        folder: Where volumes and logs go.
        model: The demo model's folder, with its weights for the profile `cpu`.
    """

    compose: Compose
    folder: Path
    model: Path
    ports: dict[tuple[str, int], int] = field(
        default_factory=dict[tuple[str, int], int]
    )
    running: dict[str, subprocess.Popen[bytes]] = field(
        default_factory=dict[str, subprocess.Popen[bytes]]
    )

    def port(self, service: str, port: int) -> int:
        """Return where a container's *port* is here."""
        key = (service, port)
        if key not in self.ports:
            self.ports[key] = free_port()
        return self.ports[key]

    def url(self, service: str, port: int) -> str:
        """Return where a service serves HTTP."""
        return f"http://127.0.0.1:{self.port(service, port)}"

    def start(self, *profiles: str) -> None:
        """Start what the profiles have, each when what it depends on is there.

        Raises:
            HereError: One ends, or does not become healthy.
        """
        services = self.compose.of(*profiles)
        started: set[str] = set()
        while waiting := services.keys() - started:
            able = [n for n in waiting if services[n].depends_on.keys() <= started]
            if not able:
                msg = f"these depend on each other: {sorted(waiting)}"
                raise HereError(msg)
            for name in able:
                self._spawn(services[name])
            for name in able:
                self._await(services[name])
            started |= set(able)

    @contextmanager
    def program(self, name: str, program: Path) -> Generator[None]:
        """Run the service *name*, whose image is another's, by its *program* here.

        Its health is for its caller to see: the check is a program of its image.
        """
        service = self.compose.services[name]
        words = [self._here(service, word) for word in service.command]
        listen = f"--web.listen-address=127.0.0.1:{self.port(name, 9090)}"
        self._make_volumes(service)
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [str(program), *words, listen], stdout=log, stderr=subprocess.STDOUT
            )
        try:
            url = f"{self.url(name, 9090)}/-/ready"
            self._until(lambda: status(url) == 200, process, name, "does not answer")
            yield
        finally:
            process.terminate()
            process.wait(STOP_S)

    def _until(
        self,
        condition: Callable[[], bool],
        process: subprocess.Popen[bytes],
        name: str,
        otherwise: str,
    ) -> None:
        if not comes_true(condition, START_S, [process], CHECK_S):
            msg = f"{name} {otherwise}: {self.log(name)[-4000:]}"
            raise HereError(msg)

    def stop(self) -> None:
        """Stop all, the last that was started first; each must end well.

        Raises:
            HereError: One ended badly, or had to be killed.
        """
        bad: list[str] = []
        for name, process in reversed(self.running.items()):
            process.send_signal(signal.SIGTERM)
            try:
                code = process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
            if code:
                bad.append(f"{name} ended with {code}: {self.log(name)[-2000:]}")
        self.running.clear()
        if bad:
            raise HereError("\n".join(bad))

    def kill(self) -> None:
        """End all at once."""
        for process in self.running.values():
            process.kill()
            process.wait()

    def log(self, name: str) -> str:
        """Return what a service has written."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def _spawn(self, service: Service) -> None:
        own = service.entrypoint or entrypoint(service.target)
        command = [self._here(service, word) for word in (*own, *service.command)]
        environment = {
            key: self._here(service, value, key)
            for key, value in service.environment.items()
        }
        self._make_volumes(service)
        with (self.folder / f"{service.name}.log").open("wb") as log:
            self.running[service.name] = subprocess.Popen(
                command,
                env=self._outside() | environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _outside(self) -> dict[str, str]:
        """Return the environment that an image has in itself."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith("TOKENWIRE_")}
        return kept | {"PATH": f"{BIN}:{kept.get('PATH', '')}"}

    def _await(self, service: Service) -> None:
        process = self.running[service.name]
        if service.is_job:
            if code := process.wait(START_S):
                msg = f"{service.name} ended with {code}: {self.log(service.name)}"
                raise HereError(msg)
            del self.running[service.name]
            return
        check = [self._here(service, word) for word in service.healthcheck]

        def is_healthy() -> bool:
            ran = subprocess.run(check, env=self._outside(), capture_output=True)
            return ran.returncode == 0

        self._until(is_healthy, process, service.name, "is not healthy")

    def _make_volumes(self, service: Service) -> None:
        for source, _, _ in service.volumes:
            if not source.startswith("."):
                (self.folder / source).mkdir(exist_ok=True)

    def _here(self, service: Service, text: str, variable: str = "") -> str:
        """Return what stands for *text* of a container on this machine."""
        for name in self.compose.services:
            text = re.sub(rf"\b{name}:(\d+)\b", self._place_of(name), text)
            if variable.endswith("_HOST") and text == name:
                text = "127.0.0.1"
            text = re.sub(rf"(-host=){name}$", r"\g<1>127.0.0.1", text)
        own = rf"\b(?:0\.0\.0\.0|127\.0\.0\.1):({'|'.join(map(str, PORTS))})\b"
        text = re.sub(own, self._place_of(service.name), text)
        if text == "0.0.0.0":
            text = "127.0.0.1"
        if variable.endswith("_PORT") and text.isdecimal():
            text = str(self.port(service.name, int(text)))
        for source, target, _ in service.volumes:
            place = self.folder / source
            if source.startswith("."):
                place = self.prepared(source)
            text = re.sub(rf"(?<![\w/]){target}(?=$|[/\s])", str(place), text)
        text = text.replace("/opt/tokenwire/demo-model", str(self.model))
        return text.replace("/opt/models/.", f"{self.model.parent}/.")

    def _place_of(self, service: str) -> Callable[[re.Match[str]], str]:
        """Return what makes of a port of *service* where that is here."""
        return lambda match: f"127.0.0.1:{self.port(service, int(match[1]))}"

    def prepared(self, source: str) -> Path:
        """Return a file or folder that the file mounts, with addresses of here."""
        path = (DOCKERFILE.parent / source).resolve()
        if path.name != "prometheus.yml":
            return path
        copy = self.folder / path.name
        copy.write_text(self._scrapes(path.read_text()))
        return copy

    def _scrapes(self, text: str) -> str:
        """Return Prometheus' configuration, with names that resolve here, and in haste."""
        config: dict[str, Any] = yaml.safe_load(text)
        config["global"] = {"scrape_interval": "300ms", "evaluation_interval": "1s"}
        rules = self.compose.services["prometheus"]
        config["rule_files"] = [self._here_path(rules, p) for p in config["rule_files"]]
        for job in config["scrape_configs"]:
            [source] = job.pop("dns_sd_configs")
            targets = [
                f"127.0.0.1:{self.port(name, source['port'])}"
                for name in source["names"]
                if name in self.running
            ]
            job["static_configs"] = [{"targets": targets}]
        return yaml.safe_dump(config)

    def _here_path(self, service: Service, path: str) -> str:
        for source, target, _ in service.volumes:
            if path.startswith(f"{target}/"):
                place = (DOCKERFILE.parent / source).resolve()
                return str(place) + path.removeprefix(target)
        return path


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def services_here(
    *profiles: str, model: Path, variables: Mapping[str, str] | None = None
) -> Generator[Here]:
    """Run the services of *profiles*; stop them in the end, each of which must be clean.

    Raises:
        HereError: One did not start, or not end, as it should.
    """
    folder = Path(tempfile.mkdtemp(prefix="tokenwire-compose-"))
    here = Here(load(variables or {}), folder, model)
    try:
        here.start(*profiles)
        yield here
        here.stop()
    finally:
        here.kill()
        shutil.rmtree(folder)


def ask(url: str, path: str, body: object | None = None) -> Any:
    """Return the JSON that *path* answers with."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        url + path, data, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def chat(url: str, text: str, max_tokens: int) -> dict[str, Any]:
    """Return the answer to a chat, with its ids."""
    body = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "return_token_ids": True,
    }
    return dict(ask(url, "/v1/chat/completions", body))


QUESTION = "Name three colours of the rainbow, and say which one of them you like best."


def main() -> int:
    """Serve one request through a profile's services; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("profile", choices=("sim", "cpu"))
    parser.add_argument("--model", type=Path, required=True, help="the demo model")
    given = parser.parse_args()
    began = time.monotonic()
    try:
        with services_here(given.profile, model=given.model) as here:
            url = here.url(f"{given.profile}-frontend", 8000)
            print(
                f"healthy after {time.monotonic() - began:.1f} s: {sorted(here.running)}"
            )
            answer = chat(url, QUESTION, 16)
            print(json.dumps(answer["choices"][0]["message"]["content"]))
            ids = answer["nvext"]["completion_token_ids"]
            print(f"{len(answer['nvext']['prompt_token_ids'])} prompt ids, {ids}")
    except HereError as error:
        print(error, file=sys.stderr)
        return 1
    print("all ended well")
    return 0


if __name__ == "__main__":
    sys.exit(main())
