"""The simulated engine's own options: what stands behind ``--`` on the command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from tokenwire.protocol.settings import whole_number

from .faults import Fault, parse_fault

__all__ = ["SimOptions", "parse_options"]


@dataclass(slots=True, frozen=True)
class SimOptions:
    """Speeds and sizes. The names that vLLM has too mean what they mean there."""

    step_s: float = 0.010
    prefill_tokens_per_s: float = 20_000.0  # 0: prefill takes no time
    tokens_per_step: int = 1
    num_blocks: int = 8_192
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2_048  # prompt tokens in one step
    max_model_len: int = 0  # 0: the model's
    prefix_caching: bool = True
    by_priority: bool = False
    mean_output_tokens: int = 0  # 0: EOS by script alone
    script: str = ""
    faults: tuple[Fault, ...] = ()
    load_s: float = 0.0
    update_s: float = 0.0
    exact_resume: bool = True
    output_draws: bool = False
    transfer_s: float = 0.0
    kv_lease_s: float = 30.0  # vLLM's kv_lease_duration
    side_channel_host: str = "127.0.0.1"
    side_channel_port: int = 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """End the process with one sentence and exit code 2."""
        self.exit(2, f"{self.prog}: {message}\n")


def parse_options(arguments: Sequence[str]) -> SimOptions:
    """Return the options in *arguments*.

    Raises:
        SystemExit: 2 on a bad value, 0 after ``--help``.
    """
    parser = _parser()
    given = parser.parse_args(list(arguments))
    return SimOptions(
        step_s=given.step_ms / 1000,
        prefill_tokens_per_s=given.prefill_tokens_per_s,
        tokens_per_step=given.tokens_per_step,
        num_blocks=given.num_blocks,
        block_size=given.block_size,
        max_num_seqs=given.max_num_seqs,
        max_num_batched_tokens=given.max_num_batched_tokens,
        max_model_len=given.max_model_len,
        prefix_caching=given.enable_prefix_caching,
        by_priority=given.scheduling_policy == "priority",
        mean_output_tokens=given.mean_output_tokens,
        script=given.script,
        faults=tuple(given.fault),
        load_s=given.load_ms / 1000,
        update_s=given.update_ms / 1000,
        exact_resume=given.exact_resume,
        output_draws=given.output_draws,
        transfer_s=given.transfer_ms / 1000,
        kv_lease_s=given.kv_lease_s,
        side_channel_host=given.side_channel_host,
        side_channel_port=given.side_channel_port,
    )


def _parser() -> _Parser:
    usual = SimOptions()
    parser = _Parser(
        prog="tokenwire-worker --engine sim --",
        description="Options of the simulated engine.",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--step-ms",
        type=_amount,
        default=usual.step_s * 1000,
        help="duration of a step; 0: as fast as it goes",
    )
    add(
        "--prefill-tokens-per-s",
        type=_amount,
        default=usual.prefill_tokens_per_s,
        help="speed of prefill, on top of the step; 0: no time at all",
    )
    add(
        "--tokens-per-step",
        type=whole_number(1),
        default=usual.tokens_per_step,
        help="new tokens of each running sequence per step",
    )
    add(
        "--num-blocks", type=whole_number(1), default=usual.num_blocks, help="KV blocks"
    )
    add(
        "--block-size",
        type=whole_number(1),
        default=usual.block_size,
        help="tokens in one",
    )
    add(
        "--max-num-seqs",
        type=whole_number(1),
        default=usual.max_num_seqs,
        help="sequences that run at once",
    )
    add(
        "--max-num-batched-tokens",
        type=whole_number(1),
        default=usual.max_num_batched_tokens,
        help="prompt tokens in one step; longer prompts take several",
    )
    add("--max-model-len", type=whole_number(0), default=0, help="0: the model's")
    add(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="reuse blocks of equal prefixes",
    )
    add(
        "--scheduling-policy",
        choices=("fcfs", "priority"),
        default="fcfs",
        help="order of the waiting requests",
    )
    add(
        "--mean-output-tokens",
        type=whole_number(0),
        default=0,
        help="EOS falls with this mean; 0: by script alone",
    )
    add("--script", default="", help="JSON file of scripted sequences")
    add(
        "--fault",
        type=_fault,
        action="append",
        default=[],
        metavar="KIND[=VALUE][@N]",
        help="die@N, freeze@N, slow=MS[@N], fail-handover[@N], drop-finish[@N], "
        "fail-update[@N], break-update[@N], hang-admin[@N]; repeatable",
    )
    add(
        "--exact-resume",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="go on exactly behind output of another worker",
    )
    add(
        "--output-draws",
        action="store_true",
        help="seeds and penalties count the output, as a real engine's do",
    )
    add("--load-ms", type=_amount, default=0.0, help="duration of the start")
    add("--update-ms", type=_amount, default=0.0, help="duration of a weight update")
    add("--transfer-ms", type=_amount, default=0.0, help="duration of a KV read")
    add(
        "--kv-lease-s",
        type=_amount,
        default=usual.kv_lease_s,
        help="how long a prefill engine holds KV that nobody reads",
    )
    add(
        "--side-channel-host",
        default=usual.side_channel_host,
        help="where a prefill engine answers reads",
    )
    add("--side-channel-port", type=whole_number(0), default=0, help="0: any free one")
    return parser


def _amount(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        msg = f"{text} is not a number from 0 up"
        raise argparse.ArgumentTypeError(msg)
    return value


def _fault(text: str) -> Fault:
    try:
        return parse_fault(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
