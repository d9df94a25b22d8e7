"""What a stack listens on, by default."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from support.listening import listening
from support.up import children, until, up


@pytest.mark.parametrize(
    ("family", "address"),
    [
        (socket.AF_INET, "127.0.0.1"),
        (socket.AF_INET, "0.0.0.0"),  # noqa: S104 - what is to be found
        (socket.AF_INET6, "::1"),
        (socket.AF_INET6, "::"),
    ],
)
def test_whatever_listens_is_found(family: socket.AddressFamily, address: str) -> None:
    """Of this process, at the address that it has."""
    with socket.socket(family) as one:
        one.bind((address, 0))
        assert one.getsockname()[1] not in {
            port for _, port in listening([os.getpid()])
        }
        one.listen()
        port = one.getsockname()[1]
        found = {str(host) for host, at in listening([os.getpid()]) if at == port}
        assert found == {address}


@pytest.mark.pitfall(36)
async def test_a_default_stack_listens_on_loopback_alone(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Frontend, its processes, its admin plane, workers, metrics: nothing else is open."""
    settings = {"TOKENWIRE_PROCESSES": "2", "TOKENWIRE_ADMIN_PORT": "0"}
    async with up(
        tiny_model,
        tmp_path,
        engine="sim",
        workers={"prefill": 1, "decode": 1},
        timeout_s=60,
        settings=settings,
    ) as running:
        seats: set[int] = set()

        def both_serve() -> bool:
            processes = running.get("/health")[1]["processes"]
            seats.update(seat["pid"] for seat in processes if seat["ready"])
            return len(seats) == 2

        await until(both_serve, 60, "both processes serve")
        pids = [running.process.pid, *children(running.process.pid)]
        places = listening(pids)
        open_to_others = [place for place in places if not place[0].is_loopback]
        assert not open_to_others, open_to_others
        [holders] = [
            found for place, found in places.items() if place[1] == running.port
        ]
        assert seats < holders  # and their parent
        # The port, the admin plane, and of each worker a link and its metrics.
        assert len(places) >= 6, places
