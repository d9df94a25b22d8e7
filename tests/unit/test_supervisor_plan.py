"""Which processes run, with which arguments and environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tokenwire.deploy.plan import (
    BadPlan,
    Machine,
    Plan,
    TokenwireCommands,
    WorkerSpec,
    child_environment,
    gpus_per_worker,
    make_plan,
)
from tokenwire.deploy.supervisor import Timing

COMMANDS = TokenwireCommands(
    engine="vllm",
    model="/models/m",
    served_model_name="m",
    host="127.0.0.1",
    port=8000,
    num_frontends=1,
)


def planned(
    *counts: int | None,
    commands: TokenwireCommands = COMMANDS,
    num_cores: int = 2,
    num_gpus: int = 0,
    environ: Mapping[str, str] | None = None,
) -> Plan:
    """Return the plan for (prefill, decode, aggregated) workers."""
    prefill, decode, aggregated = counts
    return make_plan(
        commands,
        num_prefill=prefill,
        num_decode=decode,
        num_aggregated=aggregated,
        machine=Machine(num_cores=num_cores, num_gpus=num_gpus),
        environ=environ or {},
    )


@pytest.mark.parametrize(
    ("counts", "names"),
    [
        ((None, None, None), ["prefill-0", "decode-0"]),
        ((None, None, 0), ["prefill-0", "decode-0"]),
        ((None, None, 2), ["aggregated-0", "aggregated-1"]),
        ((1, 2, None), ["prefill-0", "decode-0", "decode-1"]),
        ((None, 1, None), ["decode-0"]),
        ((1, 1, 1), ["prefill-0", "decode-0", "aggregated-0"]),
    ],
)
def test_counts(counts: tuple[int | None, ...], names: list[str]) -> None:
    """Named roles run as counted; without a count, one prefill and one decode."""
    assert [worker.name for worker in planned(*counts).workers] == names


@pytest.mark.parametrize(
    ("counts", "num_frontends", "option"),
    [
        ((1, 0, 0), 1, "--decode"),
        ((1, None, 1), 1, "--decode"),
        ((0, 0, 0), 1, "--decode"),
        ((1, 1, 0), 0, "--frontends"),
    ],
)
def test_useless_counts_are_refused(
    counts: tuple[int | None, ...], num_frontends: int, option: str
) -> None:
    """Counts that could not answer one request are refused, naming the option."""
    with pytest.raises(BadPlan, match=option):
        planned(*counts, commands=replace(COMMANDS, num_frontends=num_frontends))


def test_engines_share_the_cores_of_a_cpu() -> None:
    """Several vLLM engines without a GPU are unbound and divide the cores."""
    for worker in planned(1, 1, None, num_cores=8).workers:
        assert worker.env == {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "4",
        }


def test_more_engines_than_cores_have_one_thread_each() -> None:
    """No engine is told to run with zero threads."""
    assert planned(2, 2, None, num_cores=2).workers[3].env["OMP_NUM_THREADS"] == "1"


def test_what_the_operator_set_stays() -> None:
    """A variable in the environment is not overridden."""
    environ = {"OMP_NUM_THREADS": "7", "CUDA_VISIBLE_DEVICES": "3"}
    cpu = planned(1, 1, None, environ=environ).workers[0].env
    assert cpu == {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    assert planned(1, 1, None, num_gpus=4, environ=environ).workers[0].env == {}


def test_a_single_or_simulated_worker_needs_nothing() -> None:
    """One engine has the machine for itself; a simulated one computes nothing."""
    assert planned(None, None, 1).workers[0].env == {}
    sim = replace(COMMANDS, engine="sim")
    assert planned(1, 1, None, commands=sim).workers[0].env == {}


@pytest.mark.parametrize(
    ("arguments", "devices"),
    [((), ["0", "1", "2", "0"]), (("-tp", "2"), ["0,1", "2,0", "1,2", "0,1"])],
)
def test_gpus_go_round(arguments: Sequence[str], devices: list[str]) -> None:
    """Each worker has as many GPUs as its parallelism needs, in turn."""
    commands = replace(COMMANDS, engine_arguments=arguments)
    workers = planned(2, 2, None, commands=commands, num_gpus=3).workers
    assert [worker.env["CUDA_VISIBLE_DEVICES"] for worker in workers] == devices


@pytest.mark.parametrize(
    ("arguments", "number"),
    [
        ([], 1),
        (["--tensor-parallel-size=4", "-pp", "2"], 8),
        (["--tensor_parallel_size", "2", "--seed", "3"], 2),
        (["--tensor-parallel-size", "x"], 1),
        (["-tp"], 1),
    ],
)
def test_gpus_per_worker(arguments: list[str], number: int) -> None:
    """The parallelism options of vLLM, in all their spellings, multiply."""
    assert gpus_per_worker(arguments) == number


def test_worker_command() -> None:
    """A worker listens on loopback, announces itself, and gets the engine's arguments."""
    commands = replace(COMMANDS, engine_arguments=["--dtype", "float32"])
    command = commands.worker(WorkerSpec("decode-0", "decode"), Path("/run/a.json"))
    text = " ".join(command[1:])
    assert text == (
        "-m tokenwire.worker --engine vllm --role decode --model /models/m "
        "--served-model-name m --worker-id decode-0 --listen tcp://127.0.0.1:0 "
        "--announce /run/a.json --metrics-port 0 -- --dtype float32"
    )


@pytest.mark.parametrize(("num_frontends", "shared"), [(1, False), (2, True)])
def test_frontend_command(num_frontends: int, *, shared: bool) -> None:
    """Several frontends share the port; a single one takes it for itself."""
    commands = replace(COMMANDS, num_frontends=num_frontends)
    spec = planned(1, 1, None, commands=commands).frontends[0]
    command = commands.frontend(spec, Path("/run/workers.json"))
    assert " ".join(command[1 : -1 if shared else None]) == (
        "-m tokenwire.frontend --model /models/m --served-model-name m "
        "--host 127.0.0.1 --port 8000 --workers-file /run/workers.json"
    )
    assert ("--reuse-port" in command) is shared


def test_frontends_of_several_processes() -> None:
    """Each frontend gets the option as it is; without it, the frontend decides."""
    commands = replace(COMMANDS, processes="auto")
    spec = planned(1, 1, None, commands=commands).frontends[0]
    command = commands.frontend(spec, Path("/run/workers.json"))
    assert command[-2:] == ["--processes", "auto"]


def test_one_frontend_has_the_admin_plane() -> None:
    """The first: its port cannot be shared."""
    commands = replace(COMMANDS, num_frontends=3)
    specs = planned(1, 1, None, commands=commands).frontends
    made = [commands.frontend(spec, Path("/run/workers.json")) for spec in specs]
    assert ["--admin-port" in command for command in made] == [False, True, True]


def test_parsers_reach_frontends_and_engines() -> None:
    """Both parsers the frontends; that of reasoning also vLLM, before the operator's."""
    commands = replace(
        COMMANDS,
        tool_call_parser="hermes",
        reasoning_parser="qwen3",
        engine_arguments=["--dtype", "float32"],
    )
    spec = planned(1, 1, None, commands=commands).frontends[-1]
    frontend = " ".join(commands.frontend(spec, Path("/run/workers.json")))
    assert frontend.endswith("--tool-call-parser hermes --reasoning-parser qwen3")
    prefill = WorkerSpec("prefill-0", "prefill")
    worker = " ".join(commands.worker(prefill, Path("/run/a.json")))
    assert worker.endswith(" -- --reasoning-parser qwen3 --dtype float32")
    simulated = replace(commands, engine="sim", engine_arguments=[])
    assert "--" not in simulated.worker(prefill, Path("/run/a.json"))


def test_keys_reach_both_sides() -> None:
    """Each has its own secret, and the other's public key."""
    commands = replace(COMMANDS, keys=Path("/keys"))
    spec = planned(1, 1, None, commands=commands).frontends[-1]
    frontend = " ".join(commands.frontend(spec, Path("/run/workers.json")))
    assert "--curve-secret-key /keys/frontend.secret" in frontend
    assert "--curve-worker-keys /keys/worker.public" in frontend
    worker = " ".join(commands.worker(WorkerSpec("d", "decode"), Path("/run/a.json")))
    assert "--curve-secret-key /keys/worker.secret" in worker
    assert "--curve-allowed-keys /keys/frontend.public" in worker


def test_child_environment() -> None:
    """Settings made here do not reach a child twice; all other variables do."""
    environ = {"TOKENWIRE_WORKER": "tcp://x:1", "TOKENWIRE_LOG_LEVEL": "debug"}
    child = child_environment(environ, {"C": "d"})
    assert environ.items() - child.items() == {("TOKENWIRE_WORKER", "tcp://x:1")}
    assert (child["C"], child["PYTHONUNBUFFERED"]) == ("d", "1")


def test_children_end_before_they_are_killed() -> None:
    """Unless the operator says otherwise, a drain is shorter than our patience."""
    name = "TOKENWIRE_SHUTDOWN_TIMEOUT_S"
    assert float(child_environment({}, {})[name]) < Timing().stop_timeout_s
    assert child_environment({name: "60"}, {})[name] == "60"


def test_hidden_states_are_every_worker_s_business() -> None:
    """Prefill workers save them, decode workers keep the same layers."""
    commands = replace(COMMANDS, capture_folder="/d", capture_layers="2,30")
    plan = planned(None, None, None, commands=commands)
    for spec in plan.workers:
        command = commands.worker(spec, Path("/a"))
        at = command.index("--capture-hidden-states")
        assert command[at : at + 4] == [
            *("--capture-hidden-states", "/d", "--capture-layers", "2,30")
        ]
    assert "--capture-layers" not in COMMANDS.worker(plan.workers[0], Path("/a"))


@pytest.mark.parametrize(
    "commands",
    [replace(COMMANDS, capture_folder="/d"), replace(COMMANDS, capture_layers="1")],
)
def test_folder_and_layers_go_together(commands: TokenwireCommands) -> None:
    """One without the other is a mistake, told before anything runs."""
    with pytest.raises(BadPlan, match="--capture-hidden-states and --capture-layers"):
        planned(None, None, None, commands=commands)


def test_frontends_over_tls_are_asked_in_plain_text(tmp_path: Path) -> None:
    """At a listener of their own, since this program has no certificate."""
    assert (planned(1, 1, None).probed, planned(1, 1, None).tls) == (None, False)
    environ = {"TOKENWIRE_TLS_CERT": "c"}
    commands = replace(COMMANDS, probe_port=9)
    plan = planned(1, 1, None, commands=commands, environ=environ)
    assert (plan.probed, plan.tls) == (("127.0.0.1", 9), True)
    command = commands.frontend(plan.frontends[0], tmp_path / "w")
    assert command[command.index("--metrics-listen") + 1] == "127.0.0.1:9"


def test_where_they_are_asked_is_the_operators() -> None:
    """If he has a listener for that; it needs a port that is known."""
    environ = {"TOKENWIRE_METRICS_LISTEN": "0.0.0.0:9400"}
    assert planned(1, 1, None, environ=environ).probed == ("0.0.0.0", 9400)  # noqa: S104
    with pytest.raises(BadPlan, match="TOKENWIRE_METRICS_LISTEN needs a port"):
        planned(1, 1, None, environ={"TOKENWIRE_METRICS_LISTEN": "127.0.0.1:0"})
