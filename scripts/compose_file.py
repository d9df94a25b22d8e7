"""deploy/compose.yaml, read as `docker compose` reads it, and what must be true of it.

Merges are YAML's own (``<<``); variables are put in, and a variable that is used wrongly
is an error. ``complaints`` is what `docker compose config` would refuse, and what we ask
of every container: nothing it could do beyond its work.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import yaml

ROOT = Path(__file__).parents[1]
COMPOSE = ROOT / "deploy/compose.yaml"
DOCKERFILE = ROOT / "deploy/Dockerfile"
ENGINES = ("sim", "cpu", "gpu")  # profiles of which one is chosen

_VARIABLE = re.compile(
    r"\$(?:(?P<escaped>\$)|(?P<plain>[A-Za-z_]\w*)|"
    r"\{(?P<name>[A-Za-z_]\w*)(?:(?P<operator>:?[-+?])(?P<rest>[^{}]*))?\}|(?P<wrong>))"
)
_LINK = re.compile(r"(?:tcp|http)://([a-z][\w-]*):(\d+)")


class ComposeError(Exception):
    """The file cannot be read; one sentence."""


@dataclass(slots=True)
class Service:
    """One service, its lists and texts as a container would get them."""

    name: str
    image: str
    profiles: list[str]
    entrypoint: list[str]  # empty: the image's
    command: list[str]
    environment: dict[str, str]
    ports: list[str]
    volumes: list[tuple[str, str, str]]  # source, target, mode
    networks: list[str]
    depends_on: dict[str, str]  # by service, the condition
    healthcheck: list[str]  # without CMD; empty: none
    target: str  # of the Dockerfile; empty: the image is not ours
    engine: str  # the build argument ENGINE
    raw: dict[str, Any] = field(repr=False)

    @property
    def is_job(self) -> bool:
        """Whether it ends by itself."""
        return self.raw.get("restart") == "no"


@dataclass(slots=True)
class Compose:
    """The whole file."""

    services: dict[str, Service]
    networks: dict[str, Any]
    volumes: dict[str, Any]
    raw: dict[str, Any] = field(repr=False)

    def of(self, *profiles: str) -> dict[str, Service]:
        """Return what `--profile` with these would start."""
        return {
            name: service
            for name, service in self.services.items()
            if not service.profiles or set(profiles) & set(service.profiles)
        }


def load(environ: Mapping[str, str], path: Path = COMPOSE) -> Compose:
    """Return the file with the variables of *environ* put in.

    Raises:
        ComposeError: It is no YAML, or uses a variable wrongly.
    """
    try:
        parsed = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ComposeError(str(error)) from error
    return compose_of(parsed, environ)


def compose_of(parsed: dict[str, Any], environ: Mapping[str, str]) -> Compose:
    """Return what a parsed file says, with the variables of *environ* put in.

    Raises:
        ComposeError: It uses a variable wrongly.
    """
    whole: dict[str, Any] = _with_variables(parsed, environ)
    services = {name: _service(name, raw) for name, raw in whole["services"].items()}
    return Compose(services, whole.get("networks", {}), whole.get("volumes", {}), whole)


def interpolate(text: str, environ: Mapping[str, str]) -> str:
    """Return *text* with its variables put in.

    Raises:
        ComposeError: A variable has no value and no default, or is no variable.
    """

    def value(match: re.Match[str]) -> str:
        if match["escaped"]:
            return "$"
        name = match["plain"] or match["name"]
        if not name:
            msg = f"{text!r}: a $ that begins no variable (write $$)"
            raise ComposeError(msg)
        operator, rest = match["operator"] or "", match["rest"] or ""
        found = environ.get(name)
        is_set = bool(found) if operator.startswith(":") else found is not None
        if operator.endswith("+"):
            return rest if is_set else ""
        if is_set and found is not None:
            return found
        if operator.endswith("-"):
            return rest
        msg = f"{text!r}: {name} is not set, and has no default"
        raise ComposeError(msg)

    return _VARIABLE.sub(value, text)


def _with_variables(value: Any, environ: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return interpolate(value, environ)
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        return {key: _with_variables(one, environ) for key, one in items}
    if isinstance(value, list):
        parts = cast("list[object]", value)
        return [_with_variables(one, environ) for one in parts]
    return value


def _service(name: str, raw: dict[str, Any]) -> Service:
    build = raw.get("build", {})
    depends_on = raw.get("depends_on", {})
    check = raw.get("healthcheck", {}).get("test", [])
    return Service(
        name=name,
        image=raw.get("image", ""),
        profiles=raw.get("profiles", []),
        entrypoint=raw.get("entrypoint", []),
        command=raw.get("command", []),
        environment={key: str(one) for key, one in raw.get("environment", {}).items()},
        ports=raw.get("ports", []),
        volumes=[_volume(text) for text in raw.get("volumes", [])],
        networks=raw.get("networks", []),
        depends_on={one: how["condition"] for one, how in depends_on.items()},
        healthcheck=check[1:],
        target=build.get("target", ""),
        engine=build.get("args", {}).get("ENGINE", ""),
        raw=raw,
    )


def _volume(text: str) -> tuple[str, str, str]:
    source, target, *mode = text.split(":")
    return source, target, mode[0] if mode else "rw"


def stages(dockerfile: Path = DOCKERFILE) -> set[str]:
    """Return the names of the Dockerfile's stages."""
    return set(re.findall(r"^FROM \S+ AS (\S+)$", dockerfile.read_text(), re.MULTILINE))


def complaints(compose: Compose) -> Iterator[str]:
    """Yield what is wrong, a sentence each."""
    used: set[str] = set()
    for service in compose.services.values():
        for complaint in (
            *_unconfined(service),
            *_wired_wrongly(service, compose),
            *_mounted_wrongly(service, compose),
        ):
            yield f"{service.name}: {complaint}"
        used |= {source for source, _, _ in service.volumes}
    for name in compose.volumes.keys() - used:
        yield f"nobody uses the volume {name}"
    for profile in ENGINES:
        ports = [p for one in compose.of(profile).values() for p in one.ports]
        if len(ports) != len(set(ports)):
            yield f"two services of the profile {profile} publish one port"


def _unconfined(service: Service) -> Iterator[str]:
    raw = service.raw
    if raw.get("read_only") is not True:
        yield "its root can be written"
    if raw.get("cap_drop") != ["ALL"] or raw.get("cap_add"):
        yield "it has capabilities"
    if "no-new-privileges:true" not in raw.get("security_opt", []):
        yield "it may gain privileges"
    if str(raw.get("user", "0")).split(":", maxsplit=1)[0] in {"0", "root", ""}:
        yield "it runs as root"
    for name in ("privileged", "pid", "ipc", "devices", "userns_mode"):
        if raw.get(name):
            yield f"it has {name}"
    if raw.get("network_mode") not in {None, "none"}:
        yield "it is in the host's network"
    for port in service.ports:
        if not port.startswith("127.0.0.1:"):
            yield f"{port} is published beyond loopback"
    if (
        not re.fullmatch(r"[\w./-]+:[\w.-]+", service.image)
        or ":latest" in service.image
    ):
        yield f"its image {service.image} has no version"
    if "profiles" not in raw:
        yield "it starts without a profile"


def _wired_wrongly(service: Service, compose: Compose) -> Iterator[str]:
    for name, condition in service.depends_on.items():
        other = compose.services.get(name)
        if other is None:
            yield f"it depends on {name}, which is none"
            continue
        if not set(service.profiles) <= set(other.profiles):
            yield f"it depends on {name}, which its profiles do not start"
        if condition == "service_healthy" and not other.healthcheck:
            yield f"it waits for the health of {name}, which has no check"
        if (condition == "service_completed_successfully") != other.is_job:
            yield f"it waits for {name} by {condition}"
    if not service.is_job and not service.healthcheck:
        yield "it has no health check"
    for text in (*service.command, *service.environment.values()):
        for name, _ in _LINK.findall(text):
            other = compose.services.get(name)
            if other is None:
                yield f"{text} names no service"
            elif not set(service.networks) & set(other.networks):
                yield f"it does not reach {name}: they share no network"
    for name in service.networks:
        if name not in compose.networks:
            yield f"there is no network {name}"
    if service.target and service.target not in stages():
        yield f"the Dockerfile has no stage {service.target}"


def _mounted_wrongly(service: Service, compose: Compose) -> Iterator[str]:
    for source, target, mode in service.volumes:
        if mode not in {"rw", "ro"}:
            yield f"{target}: {mode} is no mode"
        if source.startswith("."):
            if not (COMPOSE.parent / source).exists():
                yield f"{source} does not exist"
            if mode != "ro":
                yield f"{source} can be written"
        elif source not in compose.volumes:
            yield f"there is no volume {source}"
