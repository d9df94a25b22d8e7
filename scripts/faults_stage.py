"""The stage of one case: workers, frontends and proxies in this process, and the faults.

Each worker and each frontend is the product's own code around real sockets; what is
played is the process around them: it can be killed, stopped, restarted and drained.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self

from faults_parts import TOPOLOGIES, Case
from faults_proxy import Proxy, Watcher
from ports import free_port

from support.awake import within
from support.stack import BOUNDS, SimWorker, Stack, frontend
from tokenwire.frontend.link import LinkState
from tokenwire.protocol.messages import Role
from tokenwire.worker.app import HELD_KV_WAIT_S
from tokenwire.worker.service import Bounds

__all__ = ["LeapingLoop", "Stage", "turn_date"]

STEP = ("--step-ms", "2", "--prefill-tokens-per-s", "50000", "--block-size", "16")

HEARTBEAT_S, LOST_AFTER_S = 0.1, 2.0
"""So that a lost worker is noticed in two seconds; a machine that is busy elsewhere
must not look like one."""

FRONTEND = (
    *("--heartbeat-timeout-s", f"{LOST_AFTER_S}"),
    *("--stall-timeout-s", "2.5", "--first-token-timeout-s", "3.5"),
    *("--worker-wait-s", "15"),
)
FRONTEND_LOST_AFTER_S = 3.0  # frontends beat once a second
TICK_S = 0.05
READY_S = 30.0
_real_time = time.time


class LeapingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock can leap, as after a suspended machine wakes."""

    leapt_s = 0.0

    def time(self) -> float:
        """Return the monotonic clock with its leaps."""
        return super().time() + self.leapt_s


def turn_date(seconds: float) -> None:
    """Turn the clock of the day by *seconds*; 0 turns it back."""
    if seconds:
        time.time = lambda: _real_time() + seconds
    else:
        time.time = _real_time


class Timers:
    """The loop's timers for one worker; they stand still while its process does."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._due: list[Callable[[], None]] = []
        self.standing = False

    def time(self) -> float:
        """Return the loop's time: it passes for a stopped process too."""
        return self._loop.time()

    def call_at(self, when: float, callback: Callable[[], None], /) -> object:
        """Call *callback* then, or when the process goes on."""
        return self._loop.call_at(when, self._call, callback)

    def call_soon(self, callback: Callable[[], None], /) -> object:
        """Call *callback* soon, or when the process goes on."""
        return self._loop.call_soon(self._call, callback)

    def go_on(self) -> None:
        """Call what fell due meanwhile."""
        self.standing = False
        due, self._due = self._due, []
        for callback in due:
            self._loop.call_soon(self._call, callback)

    def _call(self, callback: Callable[[], None]) -> None:
        if self.standing:
            self._due.append(callback)
        else:
            callback()


class Worker(SimWorker):
    """A worker's process."""

    def __init__(
        self, model: Path, role: Role, name: str, options: list[str], bounds: Bounds
    ) -> None:
        self.timers = Timers(asyncio.get_running_loop())
        super().__init__(model, role, name, options, timers=self.timers, bounds=bounds)

    def tick(self) -> None:
        """Beat, unless the process is stopped."""
        if not self.timers.standing and not self.dead:
            super().tick()


class Stage:
    """Everything that serves in one case."""

    def __init__(self, case: Case, model: Path, watcher: Watcher) -> None:
        self._case = case
        self._model = model
        self._watcher = watcher
        self._stack = AsyncExitStack()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._num_starts = 0
        self._side_ports: dict[str, int] = {}
        self.workers: dict[str, Worker] = {}
        self.frontends: list[Stack] = []
        self.killed_frontends: set[int] = set()
        self.proxies: list[Proxy] = []
        self.num_broken = 0  # violations of the protocol that workers have noticed

    async def __aenter__(self) -> Self:
        """Start all of it, and wait until every worker can be used."""
        roles = TOPOLOGIES[self._case.topology]
        counts: dict[str, int] = {}
        for role in roles:
            name = f"{role}-{counts.get(role, 0)}"
            counts[role] = counts.get(role, 0) + 1
            await self._start(name, Role(role), first=True)
        for number in range(self._case.num_frontends):
            running = await self._stack.enter_async_context(
                frontend(self._model, (*FRONTEND, *self._case.frontend))
            )
            self.frontends.append(running)
            endpoints: list[str] = []
            for name, worker in self.workers.items():
                proxy = Proxy(number, name, self._watcher)
                proxy.port = _port(worker)
                endpoints.append(await proxy.listen())
                self.proxies.append(proxy)
            running.pool.set_endpoints(endpoints)
        self._spawn(self._tick())
        async with within(READY_S):
            while not all(self._ready(one) for one in self.frontends):
                await asyncio.sleep(0.01)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Leave nothing behind."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        turn_date(0)
        for proxy in self.proxies:
            proxy.go_on()
        await self._stack.aclose()
        for proxy in self.proxies:
            await proxy.close()
        for worker in self.workers.values():
            await worker.stop()

    # -- what can be done to it -----------------------------------------------------

    def links_of(self, worker: str) -> list[Proxy]:
        """Return the connections of one worker."""
        return [proxy for proxy in self.proxies if proxy.worker == worker]

    def kill(self, name: str) -> None:
        """SIGKILL: its connections close, nothing more is said."""
        worker = self.workers[name]
        worker.dead = True
        for proxy in self.links_of(name):
            proxy.port = None
            proxy.cut()
            proxy.go_on()  # if it stood still, it was for the process that is gone
        self._spawn(worker.die())

    def restart(self, name: str, after_s: float) -> None:
        """SIGKILL, and a new process at the same address."""
        if self.workers[name].dead:
            return  # it is being started already
        self.kill(name)
        self._spawn(self._start_again(name, after_s))

    def freeze(self, name: str, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after *seconds*."""
        worker = self.workers[name]
        worker.timers.standing = True
        for proxy in self.links_of(name):
            proxy.still()
        self._spawn(self._thaw(name, worker, seconds))

    def still(self, proxy: Proxy, seconds: float) -> None:
        """Let nothing pass for a while."""
        proxy.still()
        asyncio.get_running_loop().call_later(seconds, proxy.go_on)

    def drain(self, name: str, patience_s: float) -> None:
        """SIGTERM, and a new process once it has left."""
        if not self.workers[name].dead:
            self._spawn(self._drain(name, patience_s))

    def kill_frontend(self, number: int) -> None:
        """SIGKILL a frontend: its connections close, to both sides."""
        self.killed_frontends.add(number)
        for proxy in self.proxies:
            if proxy.frontend == number:
                proxy.port = None
                proxy.cut()

    # -- what is left ---------------------------------------------------------------

    def leaks(self) -> dict[str, int]:
        """Return what is still held or open; blocks by worker among them."""
        left: dict[str, int] = {}
        for name, worker in self.workers.items():
            if worker.dead:
                continue
            load = worker.engine.load()
            left[f"{name} blocks"] = round(load.kv_usage * 8_192)
            left[f"{name} running"] = load.num_running + load.num_waiting
            left[f"{name} open"] = worker.service.num_requests
        for number, running in enumerate(self.frontends):
            if number in self.killed_frontends:
                continue
            for link in running.pool.links:
                left[f"frontend {number} open at {link.worker_id}"] = link.num_open
        return {what: count for what, count in left.items() if count}

    @property
    def num_violations(self) -> int:
        """Violations of the protocol that either side has noticed."""
        return self.num_broken + sum(
            link.num_protocol_errors
            for running in self.frontends
            for link in running.pool.links
        )

    def missed(self) -> list[str]:
        """Return the workers that run, and that a frontend is not connected to."""
        missing: list[str] = []
        for proxy in self.proxies:
            number, worker = proxy.frontend, self.workers[proxy.worker]
            if worker.dead or number in self.killed_frontends:
                continue
            links = self.frontends[number].pool.links
            ready = {link.worker_id for link in links if link.state is LinkState.READY}
            if proxy.worker not in ready:
                missing.append(f"frontend {number} to {proxy.worker}")
        return missing

    # -- inside ---------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _start(self, name: str, role: Role, *, first: bool) -> None:
        case = self._case
        options = [*STEP, *case.engine.get(role.value, [])]
        if first:
            options += case.engine.get(name, [])  # a restart has no fault of its own
        port = self._side_ports.setdefault(name, free_port())
        options += ["--side-channel-port", str(port)]
        bounds = Bounds(
            case.max_requests,
            BOUNDS.max_queued_tokens,
            HEARTBEAT_S,
            FRONTEND_LOST_AFTER_S,
        )
        worker = Worker(self._model, role, name, options, bounds)
        self._num_starts += 1
        await worker.start(incarnation=f"{name}/{self._num_starts}")
        self._count_broken(worker)
        worker.service.on_change = lambda: self._changed(name, worker)
        self.workers[name] = worker
        for proxy in self.links_of(name):
            proxy.port = _port(worker)

    def _count_broken(self, worker: Worker) -> None:
        broken = worker.service.broken

        def counted(identity: bytes, reason: str) -> None:
            self.num_broken += 1
            broken(identity, reason)

        worker.service.broken = counted  # type: ignore[method-assign]

    def _changed(self, name: str, worker: Worker) -> None:
        """Do what the worker's process does when its engine has died."""
        if worker.service.dead_reason is not None and not worker.dead:
            asyncio.get_running_loop().call_later(0.02, self.restart, name, 0.2)

    async def _start_again(self, name: str, after_s: float) -> None:
        role = self.workers[name].role
        await asyncio.sleep(after_s)
        await self._start(name, role, first=False)

    async def _thaw(self, name: str, worker: Worker, seconds: float) -> None:
        await asyncio.sleep(seconds)
        worker.timers.go_on()
        for proxy in self.links_of(name):
            proxy.go_on()

    async def _drain(self, name: str, patience_s: float) -> None:
        worker = self.workers[name]
        service = worker.service
        service.drain()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + patience_s
        while service.num_requests and loop.time() < deadline and not worker.dead:
            await asyncio.sleep(TICK_S)
        if worker.dead:
            return
        service.evict_all()
        deadline = loop.time() + HELD_KV_WAIT_S
        while not worker.idle and loop.time() < deadline and not worker.dead:
            await asyncio.sleep(TICK_S)
        await asyncio.sleep(TICK_S)  # the last batches leave
        self.restart(name, 0.1)

    async def _tick(self) -> None:
        while True:
            for running in self.frontends:
                for link in list(running.pool.links):
                    link.tick()
            await asyncio.sleep(TICK_S)

    def _ready(self, running: Stack) -> bool:
        usable = [link for role in Role for link in running.pool.usable(role)]
        return len(usable) == len(self.workers)


def _port(worker: SimWorker) -> int:
    return int(worker.link.endpoint.rpartition(":")[2])
