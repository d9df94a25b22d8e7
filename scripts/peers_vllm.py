"""``vllm serve``'s own API server before an engine core of ours.

    python scripts/peers_vllm.py CONTROL CORE ARGUMENTS...

Everything in the API server's process is vLLM's, unchanged: HTTP, chat template, tokenizer,
``AsyncLLM``, its ZeroMQ sockets and msgpack, detokenizer, output processing, metrics. The engine
core, a process of its own in vLLM too, is replaced by :func:`run_engine_core` below, which speaks the
same protocol over the same sockets and makes up token ids: one message per step with one
token for every running request, as the real one sends.
"""

from __future__ import annotations

import os
import random
import runpy
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import zmq
from peers_control import Control, Pace

ADD, ABORT, UTILITY = b"\x00", b"\x01", b"\x03"  # EngineCoreRequestType
LENGTH = 1  # FinishReason
ENGINE = b"\x00\x00"  # identity of rank 0
IDLE_S = 0.5
NUM_IDS = 4096
"""Token ids decided beforehand, over and over: the engine's time is the client's core."""


class EngineCore:
    """The engine core's side of vLLM's sockets.

    Args:
        inputs: Where requests come from.
        outputs: Where tokens go.
        ready: The first message.
        control: The step.
        printable: Token ids that are whole characters, as our simulated engine makes.
    """

    def __init__(
        self,
        inputs: str,
        outputs: str,
        ready: bytes,
        control: Path,
        printable: list[int],
    ) -> None:
        context = zmq.Context()
        self._input = context.socket(zmq.DEALER)
        self._input.setsockopt(zmq.IDENTITY, ENGINE)
        self._input.connect(inputs)
        self._input.send(ready)
        self._output = context.socket(zmq.PUSH)
        self._output.setsockopt(zmq.SNDHWM, 0)
        self._output.connect(outputs)
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder().decode
        self._pace = Pace(Control(control))
        self._left: dict[str, int] = {}
        self._ids = random.Random(7).choices(printable, k=NUM_IDS)
        self._at = 0

    def run(self) -> None:
        """Serve until killed."""
        while True:
            wait_s = self._pace.wait_s(len(self._left)) if self._left else IDLE_S
            # ZeroMQ waits in whole ms: what is shorter is slept away.
            if 0 < wait_s < 0.001:
                time.sleep(wait_s)
                wait_s = 0.0
            if self._input.poll(int(wait_s * 1000)):
                self._receive()
            elif self._left and self._pace.wait_s(len(self._left)) == 0:
                self._step()

    def _receive(self) -> None:
        kind, *frames = self._input.recv_multipart()
        if kind == ADD:
            request = self._decode(frames[0])
            # EngineCoreRequest as an array: request_id, prompt_token_ids, ..., params.
            request_id, params = request[0], request[3]
            self._left[request_id] = params.get("max_tokens", 16)
        elif kind == ABORT:
            for request_id in self._decode(frames[0]):
                self._left.pop(request_id, None)
        elif kind == UTILITY:
            _, call_id, name, _ = self._decode(frames[0])
            result = [None, ["generate"] if name == "get_supported_tasks" else None]
            self._send([0, [], None, time.monotonic(), [call_id, None, result]])

    def _step(self) -> None:
        outputs: list[list[Any]] = []
        finished: list[str] = []
        for request_id in self._left:
            self._at = (self._at + 1) % NUM_IDS
            output: list[Any] = [request_id, [self._ids[self._at]]]
            self._left[request_id] -= 1
            if self._left[request_id] <= 0:
                output += [None, None, None, LENGTH]
                finished.append(request_id)
            outputs.append(output)
        self._send([0, outputs, None, time.monotonic()])
        self._pace.stepped(len(outputs))
        for request_id in finished:
            del self._left[request_id]

    def _send(self, message: list[Any]) -> None:
        self._output.send(self._encode(message))


def run_engine_core(
    *, vllm_config: Any, local_client: bool, handshake_address: str, **_: Any
) -> None:
    """Take the place of ``EngineCoreProc.run_engine_core``, in the process made for it."""
    from vllm.v1.engine import EngineCoreReadyResponse

    from tokenwire.worker.sim.model import read_model

    os.sched_setaffinity(0, {int(os.environ["PEERS_ENGINE_CORE"])})
    context = zmq.Context()
    handshake = context.socket(zmq.DEALER)
    handshake.setsockopt(zmq.IDENTITY, ENGINE)
    handshake.connect(handshake_address)
    hello = {"status": "HELLO", "local": local_client, "headless": not local_client}
    handshake.send(msgspec.msgpack.encode(hello))
    addresses = msgspec.msgpack.decode(handshake.recv())["addresses"]
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    ready = EngineCoreReadyResponse(
        max_model_len=model.max_model_len,
        num_gpu_blocks=1 << 20,
        block_size=16,
        dp_stats_address=None,
        dtype=str(model.dtype).removeprefix("torch."),
        vllm_version="0.32.0",
        world_size=1,
        data_parallel_size=1,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        decode_context_parallel_size=1,
        data_parallel_rank=0,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        instance_id=vllm_config.instance_id,
        supports_lora=False,
        max_loras=0,
    )
    core = EngineCore(
        addresses["inputs"][0],
        addresses["outputs"][0],
        msgspec.msgpack.encode(asdict(ready)),
        Path(os.environ["PEERS_CONTROL"]),
        list(read_model(model.model).printable),
    )
    handshake.send(msgspec.msgpack.encode(hello | {"status": "READY"}))
    core.run()


def main() -> None:
    """Run the API server with the engine core replaced."""
    import peers_vllm  # not __main__: a spawned child must find the function by name
    from vllm.v1.engine.core import EngineCoreProc

    os.environ["PEERS_CONTROL"], os.environ["PEERS_ENGINE_CORE"] = sys.argv[1:3]
    EngineCoreProc.run_engine_core = staticmethod(peers_vllm.run_engine_core)
    sys.argv[1:3] = []
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")


if __name__ == "__main__":
    main()
