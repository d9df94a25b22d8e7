"""Where the workers are: a fixed list, a watched file, or a DNS name.

Each source calls back with all endpoints it knows, whenever that changes.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import socket
from collections.abc import Callable
from functools import partial

import msgspec

from tokenwire.protocol.files import UnusableFile, read_file
from tokenwire.protocol.settings import tcp_endpoint
from tokenwire.protocol.watched import Watched

from .config import Config

__all__ = ["WorkersFile", "discover", "parse_workers_file"]

_log = logging.getLogger(__name__)

_KIND = "workers file"

MAX_FILE_BYTES = 1024 * 1024
"""Of a workers file: half a KiB for each of the workers that a frontend uses."""

FILE_POLL_S = 0.5
"""How often the workers file is looked at: a ``stat`` call."""

DNS_POLL_S = 5.0
"""How often the name is resolved: the usual TTL of a cluster's headless service."""

Found = Callable[[list[str]], None]


class WorkersFile(msgspec.Struct):
    """The JSON of ``--workers-file``; other keys are ignored."""

    class Worker(msgspec.Struct):
        """One worker."""

        endpoint: str

    workers: list[Worker]


def parse_workers_file(data: bytes) -> list[str]:
    """Return the endpoints in a workers file.

    Raises:
        ValueError: It is not such a file; the text names the field.
    """
    try:
        file = msgspec.json.decode(data, type=WorkersFile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(str(error)) from error
    try:
        return [tcp_endpoint(worker.endpoint) for worker in file.workers]
    except argparse.ArgumentTypeError as error:
        raise ValueError(str(error)) from None


async def discover(config: Config, found: Found) -> None:
    """Report endpoints to *found* until cancelled."""
    if config.workers_file is not None:
        await _watch_file(config.workers_file, found)
    elif config.workers_dns is not None:
        await _watch_name(config.workers_dns, found)
    else:
        found(list(config.workers))


async def _watch_file(path: str, found: Found) -> None:
    file = Watched(_KIND, [path], partial(_read_workers, path))
    while True:
        endpoints = file.changed()
        if endpoints is not None:
            found(endpoints)
        await asyncio.sleep(FILE_POLL_S)


def _read_workers(path: str) -> list[str]:
    try:
        return parse_workers_file(read_file(_KIND, path, MAX_FILE_BYTES))
    except ValueError as error:
        msg = f"workers file {path}: {error}"
        raise UnusableFile(msg) from error


async def _watch_name(name_and_port: str, found: Found) -> None:
    name, _, port = name_and_port.rpartition(":")
    loop = asyncio.get_running_loop()
    known: list[str] | None = None
    complaint = ""
    while True:
        try:
            infos = await loop.getaddrinfo(name, int(port), type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            # What was known stays: a name server that is away takes no worker along.
            # A headless service without ready pods answers so too; those that are gone
            # are noticed by their connections.
            if str(error) != complaint:
                complaint = str(error)
                _log.warning("workers name %s does not resolve: %s", name, error)
        else:
            complaint = ""
            endpoints = sorted({_endpoint(str(info[4][0]), port) for info in infos})
            if endpoints != known:
                known = endpoints
                found(endpoints)
        await asyncio.sleep(DNS_POLL_S)


def _endpoint(host: str, port: str) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
