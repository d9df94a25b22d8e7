"""Starts a plan's processes, keeps them up, and takes all of them down.

Laws:
- A worker is in the workers file exactly while it is up.
- Frontends stop before workers, so that no request meets a worker that is gone.
- When ``run`` returns, none of its processes is left.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path

from tokenwire.protocol.announce import Announce, BadAnnounce, read_announce
from tokenwire.protocol.files import replace_file
from tokenwire.protocol.restart import GiveUp, RestartPolicy, Restarts, status_text

from .child import Child
from .output import Kind, OutputReader
from .plan import Commands, FrontendSpec, Plan, child_environment
from .probe import browsable, http_status
from .progress import SILENCE_S, Progress, serving_text
from .workers_file import render_workers

__all__ = ["START_TIMEOUT_S", "Supervisor", "Timing"]

START_TIMEOUT_S = 1800.0
"""For one worker to load: 400 GB of weights from a disk that gives 250 MB/s."""


@dataclass(slots=True, frozen=True)
class Timing:
    """How long things may take, and how often they are looked at."""

    poll_s: float = 0.2  # announce files and /ready; little beside an engine's seconds
    start_timeout_s: float = START_TIMEOUT_S
    stop_timeout_s: float = (
        10.0  # for frontends, then for workers, to end by themselves
    )
    kill_timeout_s: float = 10.0  # above the guard's own waits
    silence_s: float = SILENCE_S


@dataclass(slots=True, frozen=True)
class _Process:
    """What to run, and run again, under one name."""

    name: str
    command: Callable[[Path], list[str]]  # of its announce file, new in each attempt
    env: Mapping[str, str]
    announces: bool  # else it is up once HTTP is answered


@dataclass(slots=True, frozen=True)
class _Running:
    child: Child
    restarts: Restarts


class Supervisor:
    """Runs one plan. *say* takes finished lines; *environ* is what children inherit."""

    def __init__(
        self,
        plan: Plan,
        commands: Commands,
        *,
        run_folder: Path,
        log_folder: Path,
        say: Callable[[str], None],
        environ: Mapping[str, str],
        policy: RestartPolicy | None = None,
        timing: Timing | None = None,
    ) -> None:
        self._plan = plan
        self._run_folder = run_folder
        self._log_folder = log_folder
        self._say = say
        self._environ = environ
        self._policy = policy or RestartPolicy()
        self._timing = timing or Timing()
        self._workers_file = run_folder / "workers.json"
        self._workers = [
            _Process(
                spec.name, partial(commands.worker, spec), spec.env, announces=True
            )
            for spec in plan.workers
        ]
        self._frontends = [
            _Process(
                spec.name, self._frontend_command(commands, spec), {}, announces=False
            )
            for spec in plan.frontends
        ]
        names = [process.name for process in (*self._workers, *self._frontends)]
        self._progress = Progress(names, time.monotonic(), self._timing.silence_s)
        self._running: dict[str, _Running] = {}
        self._announced: dict[str, Announce] = {}
        self._up: set[str] = set()
        self._told_to_end: set[str] = set()
        self._stopping = asyncio.Event()
        self._killing = asyncio.Event()
        self._failed = False

    def stop(self) -> None:
        """Ask ``run`` to end; asked a second time, it kills what still runs."""
        if self._stopping.is_set():
            self._killing.set()
        self._stopping.set()

    async def run(self) -> int:
        """Run everything until ``stop``; return the exit code for this program.

        It is 0 after ``stop`` and 1 when a process could not be brought up.

        Raises:
            OSError: The workers file cannot be written.
        """
        self._write_workers_file()
        try:
            async with asyncio.TaskGroup() as tasks:
                frontends = [tasks.create_task(self._keep(p)) for p in self._frontends]
                workers = [tasks.create_task(self._keep(p)) for p in self._workers]
                watchers = [
                    tasks.create_task(self._watch_http()),
                    tasks.create_task(self._break_silence()),
                ]
                await self._stopping.wait()
                await self._end(self._frontends, frontends)
                await self._end(self._workers, workers)
                for watcher in watchers:
                    watcher.cancel()
        finally:
            # Empty but after a bug of ours, which must not leave engines behind.
            for running in self._running.values():
                running.child.kill_group()
        return 1 if self._failed else 0

    # --- one process, for as long as we run ------------------------------------------

    async def _keep(self, process: _Process) -> None:
        """Run a process, again and again, until we stop or it is given up."""
        name = process.name
        restarts = Restarts(self._policy)
        attempt = 0
        while not self._stopping.is_set():
            attempt += 1
            self._phase(
                name, "starting" if attempt == 1 else f"starting again ({attempt})"
            )
            announce = self._run_folder / f"{name}.{attempt}.json"
            try:
                child = await Child.start(
                    process.command(announce),
                    env=child_environment(self._environ, process.env),
                    log_path=self._log_folder / f"{name}.log",
                    on_line=partial(self._output, name, OutputReader()),
                    on_end=partial(self._ended_itself, name),
                )
            except OSError as error:
                self._give_up(name, f"cannot be started: {error}", ())
                return
            self._running[name] = _Running(child, restarts)
            status = await self._attend(process, child, announce)
            del self._running[name]
            self._forget(name)
            announce.unlink(missing_ok=True)
            how = status_text(status)
            if self._stopping.is_set():
                self._phase(name, f"stopped ({how})")
                return
            verdict = restarts.ended(time.monotonic(), status)
            if isinstance(verdict, GiveUp):
                self._give_up(name, f"{verdict.why} ({how})", child.last_lines)
                return
            self._quote(name, child.last_lines)
            self._phase(name, f"ended ({how}), starts again in {verdict.delay_s:.0f} s")
            await self._pause(verdict.delay_s)

    async def _attend(self, process: _Process, child: Child, announce: Path) -> int:
        """Return the status of *child* at its end; until then, see when it is up."""
        if self._killing.is_set():  # while it was being started
            child.kill()
        elif process.name in self._told_to_end:
            child.stop()
        if not process.announces:
            return await child.wait()
        awaited = asyncio.create_task(
            self._await_announce(process.name, child, announce)
        )
        try:
            return await child.wait()
        finally:
            awaited.cancel()
            await asyncio.wait([awaited])

    async def _await_announce(self, name: str, child: Child, path: Path) -> None:
        try:
            async with asyncio.timeout(self._timing.start_timeout_s):
                while (announce := read_announce(path)) is None:  # noqa: ASYNC110 - a file has no event
                    await asyncio.sleep(self._timing.poll_s)
        except TimeoutError:
            limit_s = self._timing.start_timeout_s
            self._note(name, f"not up after {limit_s:.0f} s: killing it")
            child.kill()
        except (BadAnnounce, OSError) as error:
            self._note(name, f"{error}: killing it")
            child.kill()
        else:
            self._announced[name] = announce
            self._write_workers_file()
            metrics = f", metrics at {announce.metrics}" if announce.metrics else ""
            self._is_up(name, f" at {announce.endpoint}{metrics}")

    async def _pause(self, delay_s: float) -> None:
        """Wait before a new start; not when everything ends."""
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait([stopping], timeout=delay_s)
        stopping.cancel()

    async def _end(
        self, processes: Sequence[_Process], keepers: Iterable[asyncio.Task[None]]
    ) -> None:
        """End *processes*: ask, then kill, then kill their guards."""
        names = [process.name for process in processes]
        self._told_to_end.update(names)
        for child in self._children(names):
            child.stop()
        if await self._ended(keepers, self._timing.stop_timeout_s, self._killing):
            return
        for name in names:
            if name in self._running:
                self._note(name, "does not stop: killing it")
        for child in self._children(names):
            child.kill()
        if not await self._ended(keepers, self._timing.kill_timeout_s):
            for child in self._children(names):
                child.kill_group()

    def _children(self, names: Iterable[str]) -> list[Child]:
        return [self._running[name].child for name in names if name in self._running]

    async def _ended(
        self,
        keepers: Iterable[asyncio.Task[None]],
        timeout_s: float,
        interrupt: asyncio.Event | None = None,
    ) -> bool:
        """Return whether *keepers* are done, at the latest at timeout or *interrupt*."""
        keepers = list(keepers)
        all_done = asyncio.create_task(_done(keepers))
        interrupted = asyncio.create_task((interrupt or asyncio.Event()).wait())
        waits = [all_done, interrupted]
        await asyncio.wait(
            waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        for wait in waits:
            wait.cancel()
        await asyncio.wait(waits)
        return all(keeper.done() for keeper in keepers)

    # --- who is up ---------------------------------------------------------------------

    async def _watch_http(self) -> None:
        """See when the frontends are up, and, once, when requests are answered."""
        host, port = self._plan.probed or (self._plan.host, self._plan.port)
        names = [process.name for process in self._frontends]
        serving = False
        while not self._stopping.is_set():
            # Frontends that share a port cannot be asked one by one: an answer
            # counts for all that were running before the question.
            asked = [n for n in names if n in self._running and n not in self._up]
            if asked and await http_status(host, port, "/live") == HTTPStatus.OK:
                for name in asked:
                    if name in self._running:
                        self._is_up(name, "")
            # A frontend is ready with one worker that decodes; we wait for all of them.
            whole = len(self._announced) == len(self._plan.workers)
            if (
                not serving
                and whole
                and await http_status(host, port, "/ready") == HTTPStatus.OK
            ):
                serving = True
                self._say_serving()
            await asyncio.sleep(self._timing.poll_s)

    async def _break_silence(self) -> None:
        while not self._stopping.is_set():
            await asyncio.sleep(self._timing.poll_s)
            self._say_if(self._progress.silence(time.monotonic()))

    def _is_up(self, name: str, detail: str) -> None:
        now = time.monotonic()
        self._up.add(name)
        self._running[name].restarts.up(now)
        self._say_if(self._progress.up(name, now, detail))

    def _ended_itself(self, name: str) -> None:
        self._forget(name)
        if not self._stopping.is_set():
            self._phase(name, "ended, clearing up after it")

    def _forget(self, name: str) -> None:
        self._up.discard(name)
        if self._announced.pop(name, None) is not None:
            self._write_workers_file()

    def _write_workers_file(self) -> None:
        replace_file(self._workers_file, render_workers(self._announced.values()))

    # --- what is said ------------------------------------------------------------------

    def _output(self, name: str, reader: OutputReader, text: str) -> None:
        seen = reader.line(text, time.monotonic())
        if seen is None or seen.kind is Kind.QUIET:
            return
        if seen.kind is Kind.PHASE and name not in self._up:
            self._phase(name, seen.text)
        elif seen.kind is Kind.MUTED:
            self._note(name, f"| many warnings: see {self._log_folder / name}.log")
        else:
            self._note(name, f"| {seen.text}")

    def _give_up(self, name: str, why: str, last_lines: Iterable[str]) -> None:
        self._quote(name, last_lines)
        self._note(name, f"{why}: stopping everything")
        self._failed = True
        self._stopping.set()

    def _quote(self, name: str, last_lines: Iterable[str]) -> None:
        for line in last_lines:
            self._note(name, f"> {line}")

    def _phase(self, name: str, phase: str) -> None:
        self._say_if(self._progress.phase(name, phase, time.monotonic()))

    def _note(self, name: str, text: str) -> None:
        self._say(self._progress.line(name, text, time.monotonic()))

    def _say_if(self, line: str | None) -> None:
        if line is not None:
            self._say(line)

    def _say_serving(self) -> None:
        plan = self._plan
        scheme = "https" if plan.tls else "http"
        url = f"{scheme}://{browsable(plan.host)}:{plan.port}"
        metrics = [("frontends", f"{url}/metrics")]
        if plan.probed is not None:
            host, port = plan.probed
            metrics = [("frontends", f"http://{browsable(host)}:{port}/metrics")]
        metrics += [
            (name, announce.metrics)
            for name, announce in sorted(self._announced.items())
            if announce.metrics
        ]
        self._say(
            serving_text(
                url=url,
                model=self._plan.served_model_name,
                metrics=metrics,
                log_folder=str(self._log_folder),
                elapsed_s=self._progress.elapsed_s(time.monotonic()),
            )
        )

    def _frontend_command(
        self, commands: Commands, spec: FrontendSpec
    ) -> Callable[[Path], list[str]]:
        return lambda _announce: commands.frontend(spec, self._workers_file)


async def _done(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Wait for *tasks*; a cancelled wait leaves them alone."""
    await asyncio.wait(list(tasks))
