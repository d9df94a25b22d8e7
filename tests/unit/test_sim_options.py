"""The simulated engine's options."""

from __future__ import annotations

import pytest

from tokenwire.worker.sim.faults import Fault, FaultKind
from tokenwire.worker.sim.options import SimOptions, parse_options


def test_no_options_are_the_defaults() -> None:
    """The parser's defaults and the class's are the same."""
    assert parse_options([]) == SimOptions()


def test_every_option_has_its_field() -> None:
    """Milliseconds become seconds, faults are read."""
    given = {
        "step-ms": "2.5", "prefill-tokens-per-s": "0", "tokens-per-step": "2",
        "num-blocks": "10", "block-size": "32", "max-num-seqs": "7",
        "max-num-batched-tokens": "100", "max-model-len": "50",
        "scheduling-policy": "priority", "mean-output-tokens": "9", "script": "s.json",
        "fault": "die@4", "load-ms": "100", "transfer-ms": "20", "kv-lease-s": "3",
        "side-channel-host": "127.0.0.2", "side-channel-port": "99",
    }  # fmt: skip
    arguments = [f"--{name}={value}" for name, value in given.items()]
    flags = ["--no-enable-prefix-caching", "--no-exact-resume", "--output-draws"]
    assert parse_options([*arguments, *flags]) == SimOptions(
        exact_resume=False,
        output_draws=True,
        step_s=0.0025,
        prefill_tokens_per_s=0.0,
        tokens_per_step=2,
        num_blocks=10,
        block_size=32,
        max_num_seqs=7,
        max_num_batched_tokens=100,
        max_model_len=50,
        prefix_caching=False,
        by_priority=True,
        mean_output_tokens=9,
        script="s.json",
        faults=(Fault(FaultKind.DIE, 4),),
        load_s=0.1,
        transfer_s=0.02,
        kv_lease_s=3.0,
        side_channel_host="127.0.0.2",
        side_channel_port=99,
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["--step-ms", "-1"],
        ["--step-ms", "nan"],
        ["--num-blocks", "0"],
        ["--max-model-len", "-1"],
        ["--fault", "burn"],
        ["--step", "1"],
        ["--tensor-parallel-size", "2"],
    ],
)
def test_a_bad_one_is_one_sentence_and_exit_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Abbreviations and vLLM's own options included."""
    with pytest.raises(SystemExit) as stopped:
        parse_options(arguments)
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("tokenwire-worker --engine sim --: ")
    assert said.count("\n") == 1
