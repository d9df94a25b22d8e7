"""``tokenwire-up``: workers and frontends on this machine, with one command."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

from tokenwire.protocol.settings import SettingsParser

from .keys import make_pair
from .plan import (
    METRICS_VARIABLE,
    PROBE_HOST,
    TLS_VARIABLE,
    BadPlan,
    Commands,
    Machine,
    Plan,
    TokenwireCommands,
    make_plan,
)
from .probe import PortUnusable, usable_port
from .supervisor import START_TIMEOUT_S, Supervisor, Timing

__all__ = ["main", "run", "this_machine"]

MAX_PROCESSES = 64
"""Of one role: a typing error must not start a thousand engines."""

ENGINE_ARGUMENTS: dict[str, list[str]] = {
    "vllm": [],
    "sim": ["--mean-output-tokens", "128"],
}
"""Unless some are given. A simulated output has no end of its own: one without
``max_tokens`` would go on to the end of the context, 80 s."""

_DEMO_MODEL = "smollm2-135m-instruct"  # as scripts/demo_model.py names it


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what the command line and the environment ask for, until Ctrl-C.

    Raises:
        SystemExit: 0 after Ctrl-C or SIGTERM, 1 if something did not come up, 2 on a
            bad setting.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    engine_arguments: list[str] = []
    if "--" in given:
        cut = given.index("--")
        given, engine_arguments = given[:cut], given[cut + 1 :]
    parser = _parser()
    settings = parser.parse_settings(given)
    model = settings.model or _demo_model(parser)
    if model.startswith(("/", ".", "~")) and not Path(model).is_dir():
        parser.error(f"argument --model: there is no folder {model}")
    try:
        port = usable_port(settings.host, settings.port)
        over_tls = TLS_VARIABLE in os.environ and METRICS_VARIABLE not in os.environ
        probe_port = usable_port(PROBE_HOST, 0) if over_tls else None
    except PortUnusable as error:
        sys.exit(f"tokenwire-up: {error}")
    machine = this_machine()
    with _throw_away_keys(wanted=settings.curve) as keys:
        commands = TokenwireCommands(
            engine=settings.engine,
            model=model,
            served_model_name=settings.served_model_name or _name_of(model),
            host=settings.host,
            port=port,
            num_frontends=settings.frontends,
            processes=settings.processes,
            engine_arguments=engine_arguments or ENGINE_ARGUMENTS[settings.engine],
            tool_call_parser=settings.tool_call_parser,
            reasoning_parser=settings.reasoning_parser,
            capture_folder=settings.capture_hidden_states,
            capture_layers=settings.capture_layers,
            keys=keys,
            probe_port=probe_port,
            log_format=settings.log_format,
        )
        try:
            plan = make_plan(
                commands,
                num_prefill=settings.prefill,
                num_decode=settings.decode,
                num_aggregated=settings.aggregated,
                machine=machine,
                environ=os.environ,
            )
        except BadPlan as error:
            parser.error(str(error))
        timing = Timing(start_timeout_s=settings.start_timeout_s)
        sys.exit(run(plan, commands, settings.log_dir, timing))


def run(plan: Plan, commands: Commands, log_dir: str | None, timing: Timing) -> int:
    """Run *plan* until a signal, with its files in private folders.

    Args:
        plan: What to run.
        commands: Makes the command lines.
        log_dir: For the log files; None takes a new folder, kept after a failure.
        timing: How long things may take.

    Returns:
        The exit code for this program.

    Raises:
        SystemExit: A folder cannot be written.
    """
    # mkdtemp makes folders that only we can enter.
    run_folder = Path(tempfile.mkdtemp(prefix="tokenwire-"))
    try:
        if log_dir is None:
            log_folder = Path(tempfile.mkdtemp(prefix="tokenwire-logs-"))
        else:
            log_folder = Path(log_dir).absolute()
            try:
                log_folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                sys.exit(f"tokenwire-up: --log-dir {log_dir}: {error.strerror}")
        _say(f"tokenwire-up: logs in {log_folder}")
        code = asyncio.run(_supervise(plan, commands, run_folder, log_folder, timing))
        if log_dir is None and code == 0:
            shutil.rmtree(log_folder, ignore_errors=True)
        else:
            _say(f"tokenwire-up: logs are kept in {log_folder}")
    except OSError as error:
        sys.exit(f"tokenwire-up: {error}")
    finally:
        shutil.rmtree(run_folder, ignore_errors=True)
    return code


async def _supervise(
    plan: Plan,
    commands: Commands,
    run_folder: Path,
    log_folder: Path,
    timing: Timing,
) -> int:
    supervisor = Supervisor(
        plan,
        commands,
        run_folder=run_folder,
        log_folder=log_folder,
        say=_say,
        environ=os.environ,
        timing=timing,
    )
    loop = asyncio.get_running_loop()

    def stop() -> None:
        _say("tokenwire-up: stopping; once more kills at once")
        supervisor.stop()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop)
    return await supervisor.run()


def _parser() -> SettingsParser:
    parser = SettingsParser(
        prog="tokenwire-up",
        usage="tokenwire-up [options] [-- engine arguments for the workers]",
        description="Serve a model on this machine: workers, frontends and all.",
        epilog="Other TOKENWIRE_ variables reach the workers and frontends as they are.",
    )
    count = _number(int, 0, MAX_PROCESSES)
    add = parser.add_argument
    add(
        "--engine",
        choices=["vllm", "sim"],
        default="vllm",
        help="vLLM, or the simulated engine (default: vllm)",
    )
    add("--model", help="folder or hub id (default: the demo model, once it is built)")
    add(
        "--served-model-name",
        help="name in requests and answers (default: the folder's name, or the hub id)",
    )
    add("--prefill", type=count, metavar="N", help="prefill workers")
    add("--decode", type=count, metavar="N", help="decode workers")
    add(
        "--aggregated",
        type=count,
        metavar="N",
        help="workers that do both (default: one prefill and one decode worker)",
    )
    add(
        "--frontends",
        type=count,
        default=1,
        metavar="N",
        help="frontends, which share the port (default: 1)",
    )
    add(
        "--processes",
        default="1",
        metavar="N|auto",
        help="processes of each frontend (default: 1)",
    )
    add(
        "--tool-call-parser",
        metavar="NAME",
        help="vLLM's parser of tool calls, for the frontends",
    )
    add(
        "--reasoning-parser",
        metavar="NAME",
        help="vLLM's parser of reasoning, for frontends and engines",
    )
    add(
        "--capture-hidden-states",
        metavar="DIR",
        help="save hidden states of prompts there, see docs/capture.md",
    )
    add("--capture-layers", metavar="L,L,...", help="whose hidden states")
    add(
        "--curve",
        action="store_true",
        help="encrypt the links between frontends and workers, with keys of this run",
    )
    add("--host", default="127.0.0.1", help="address to serve on (default: 127.0.0.1)")
    add(
        "--port",
        type=_number(int, 0, 65535),
        default=8000,
        help="0 takes a free one (default: 8000)",
    )
    add(
        "--log-format",
        choices=["text", "json"],
        default="text",
        help="how workers and frontends log (default: text)",
    )
    add(
        "--log-dir",
        metavar="DIR",
        help="where each process's log goes (default: a new folder, kept after a failure)",
    )
    add(
        "--start-timeout-s",
        type=_number(float, 1, 86_400),
        default=START_TIMEOUT_S,
        metavar="S",
        help="for one worker to load (default: 1800)",
    )
    return parser


def _number(kind: type[int | float], low: int, high: int) -> Callable[[str], float]:
    """Return a converter that refuses numbers outside *low*..*high*."""

    def number(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            msg = f"{text!r} is not a number"
            raise argparse.ArgumentTypeError(msg) from None
        if not low <= value <= high:
            msg = f"{text} is not within {low}..{high}"
            raise argparse.ArgumentTypeError(msg)
        return value

    return number


def _demo_model(parser: SettingsParser) -> str:
    """Return the folder of the demo model; end with a sentence if it is not built."""
    cache = os.environ.get("TOKENWIRE_CACHE")
    if not cache:
        cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        cache = str(Path(cache) / "tokenwire")
    folder = Path(cache).expanduser().absolute() / _DEMO_MODEL
    if not folder.is_dir():
        parser.error(f"--model is required: no demo model is built in {folder}")
    return str(folder)


@contextlib.contextmanager
def _throw_away_keys(*, wanted: bool) -> Generator[Path | None]:
    """Give a private folder with a pair for the frontends and one for the workers."""
    if not wanted:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="tokenwire-keys-") as name:
        folder = Path(name)
        for owner in ("frontend", "worker"):
            make_pair(folder / owner)
        yield folder


def _name_of(model: str) -> str:
    return Path(model).absolute().name if Path(model).is_dir() else model


def this_machine() -> Machine:
    """Return what this machine offers; no driver of NVIDIA's: no GPU."""
    gpus = Path("/proc/driver/nvidia/gpus")  # one folder each; no driver: no folder
    num_gpus = len(list(gpus.iterdir())) if gpus.is_dir() else 0
    return Machine(num_cores=len(os.sched_getaffinity(0)), num_gpus=num_gpus)


def _say(text: str) -> None:
    # Nobody reads any more: the processes matter more than the lines.
    with contextlib.suppress(OSError):
        print(text, flush=True)


if __name__ == "__main__":
    main()
