"""A ``VllmEngine`` in a process of its own, driven from a test.

Each engine of a pair needs its own environment and must be killable, so the engine
runs in a child (``python -m support.vllm_engine SOCKET ROLE ARGUMENT...``) and speaks
msgpack over a Unix socket: a kind, and what that kind is made of. Both ends are this
file.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import msgspec

from support.awake import Awake, within
from support.switches import switch
from support.tracing import untraced
from tokenwire.protocol.messages import JsonObject, Leg, Role, Sampling
from tokenwire.protocol.tokens import TOKEN_BYTES
from tokenwire.worker.engine import (
    EngineFinished,
    EngineInfo,
    EngineLoad,
    EngineRequest,
    EngineTokens,
)
from tokenwire.worker.kv_blocks import CachedBlocks
from tokenwire.worker.vllm.engine import VllmEngine
from tokenwire.worker.vllm.fork_server import forking
from tokenwire.worker.vllm.resume import SCHEDULER_CLASSES

__all__ = [
    "MODEL",
    "PROMPTS",
    "REFERENCE_TOKENS",
    "EngineProcess",
    "Stream",
    "prompt",
    "reference_ids",
]

MODEL = Path(
    os.environ.get(
        "TOKENWIRE_DEMO_MODEL",
        Path.home() / ".cache" / "tokenwire" / "smollm2-135m-instruct",
    )
)
ENGINE_ARGUMENTS = ["--dtype", "float32", "--max-model-len", "2048"]
"""float32: in bf16 greedy ties flip between batch shapes."""

PROMPT_TOKENS = (1, 2, 15, 16, 17, 31, 32, 33, 127, 128, 129, 300)
"""Around every edge of a block: 16 tokens on a GPU, 128 on a CPU."""

REFERENCE_TOKENS = 24

_random = random.Random(20)  # noqa: S311 - a test's prompts


def prompt(num_tokens: int) -> list[int]:
    """Return a prompt that no other one shares a prefix with."""
    return [_random.randrange(1_000, 40_000) for _ in range(num_tokens)]


PROMPTS = [prompt(num_tokens) for num_tokens in PROMPT_TOKENS]

READY_S = 420.0  # 25-40 s on two idle cores; ten times that on busy ones
ANSWER_S = 90.0  # any one answer; a test that is slower than this hangs


T = TypeVar("T")


class _Outputs(msgspec.Struct):
    """What one step brought."""

    tokens: list[EngineTokens]
    finished: list[EngineFinished]


class _Release(msgspec.Struct):
    """Which KV is not needed."""

    request_id: str
    handover: JsonObject


ANSWERS: Final[dict[str, Any]] = {
    "info": EngineInfo,
    "failed": str,
    "load": EngineLoad,
    "blocks": list[int],
    "process_ids": dict[str, int],
}
"""What the child answers, by the kind of the frame."""


class _Frame(msgspec.Struct, array_like=True, frozen=True):
    """What goes over the socket, behind four bytes with its length."""

    kind: str
    value: msgspec.Raw  # what the kind is made of


@dataclass
class Stream:
    """What came for one request."""

    request_id: str
    token_ids: list[int] = field(default_factory=list[int])
    batches: list[EngineTokens] = field(default_factory=list[EngineTokens])
    num_ends: int = 0
    first_token_at: float = 0.0
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _end: EngineFinished | None = None

    async def end(self) -> EngineFinished:
        """Return the end, once it is there."""
        async with within(ANSWER_S):
            while self._end is None:
                await self._change()
        return self._end

    async def have(self, num_tokens: int) -> None:
        """Wait until it has that many tokens, or its end."""
        async with within(ANSWER_S):
            while len(self.token_ids) < num_tokens and self._end is None:
                await self._change()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def take(self, item: EngineTokens | EngineFinished) -> None:
        """Note what came."""
        if isinstance(item, EngineTokens):
            assert self._end is None, "tokens after the end"
            self.first_token_at = self.first_token_at or time.monotonic()
            self.token_ids += item.token_ids
            self.batches.append(item)
            if item.logprobs is not None:
                rows = len(item.token_ids) * item.logprobs.width
                assert len(item.logprobs.token_ids) == rows * TOKEN_BYTES
        else:
            self.num_ends += 1
            assert self.num_ends == 1, "a second end"
            self._end = item
        self._changed.set()


class EngineProcess:
    """The parent's end: submit requests, look at the load, kill."""

    def __init__(self) -> None:
        self.info: EngineInfo
        self.phases: list[str] = []
        self.streams: dict[str, Stream] = {}
        self.load_s = 0.0
        self.died: asyncio.Future[str]
        self._answers: asyncio.Queue[object] = asyncio.Queue()
        self._process: asyncio.subprocess.Process
        self._writer: asyncio.StreamWriter
        self._reading: asyncio.Task[None]
        self._num = 0

    @classmethod
    async def start(
        cls,
        role: Role,
        *arguments: str,
        nixl_port: int | None = None,
        model: Path = MODEL,
        environment: Mapping[str, str] | None = None,
    ) -> EngineProcess:
        """Start an engine and wait until it serves.

        Args:
            role: What it is for.
            arguments: Of vLLM.
            nixl_port: Where peers shake hands with it; None: a free port.
            model: A folder.
            environment: More of it.
        """
        self = cls()
        began = time.monotonic()
        self.died = asyncio.get_running_loop().create_future()
        connected: asyncio.Future[asyncio.StreamReader] = (
            asyncio.get_running_loop().create_future()
        )

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._writer = writer
            connected.set_result(reader)

        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/engine"
            server = await asyncio.start_unix_server(accept, path)
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "support.vllm_engine",
                path,
                role.value,
                *ENGINE_ARGUMENTS,
                *arguments,
                env={
                    **untraced(os.environ),
                    "PYTHONPATH": os.pathsep.join(sys.path),
                    "TOKENWIRE_DEMO_MODEL": str(model),
                    **(environment or {}),
                    **(
                        {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(nixl_port)}
                        if nixl_port
                        else {}
                    ),
                },
                start_new_session=True,
            )
            async with within(READY_S):
                self._reading = asyncio.create_task(self._read(await connected))
                answer = await self._answers.get()
            server.close()
        if not isinstance(answer, EngineInfo):
            await self._ended()
        assert isinstance(answer, EngineInfo), answer
        self.info = answer
        self.load_s = time.monotonic() - began
        return self

    def submit(
        self,
        token_ids: list[int],
        sampling: Sampling,
        leg: Leg = Leg.FULL,
        *,
        handover: JsonObject | None = None,
        cache_salt: str | None = None,
        num_prior: int = 0,
        reasoning_ended: bool | None = None,
    ) -> Stream:
        """Submit a request under a new id."""
        self._num += 1
        request_id = f"r{self._num}"
        stream = self.streams[request_id] = Stream(request_id)
        request = EngineRequest(
            request_id,
            token_ids,
            sampling,
            leg,
            handover=handover,
            cache_salt=cache_salt,
            num_prior=num_prior,
            reasoning_ended=reasoning_ended,
        )
        _write(self._writer, "submit", request)
        return stream

    def abort(self, stream: Stream) -> None:
        """Abort a request."""
        _write(self._writer, "abort", stream.request_id)

    def release_kv(self, request_id: str, handover: JsonObject) -> None:
        """Release KV held elsewhere."""
        _write(self._writer, "release_kv", _Release(request_id, handover))

    async def load(self) -> EngineLoad:
        """Return the engine's load."""
        answer = await self._ask("load")
        assert isinstance(answer, EngineLoad)
        return answer

    async def until_load(
        self, condition: Callable[[EngineLoad], bool], within_s: float
    ) -> EngineLoad:
        """Ask for the load, over and over, until *condition* holds."""
        awake = Awake()
        while not condition(load := await self.load()):
            assert awake.seconds < within_s, f"after {within_s} s still {load}"
        return load

    async def until_cached(self, hashes: set[int], within_s: float) -> None:
        """Ask which blocks are cached, over and over, until these are among them."""
        awake = Awake()
        while missing := hashes - set(cast("list[int]", await self._ask("blocks"))):
            assert awake.seconds < within_s, f"after {within_s} s still {missing}"

    async def process_ids(self) -> dict[str, int]:
        """Return the engine's processes by name."""
        answer = await self._ask("process_ids")
        assert isinstance(answer, dict)
        return cast("dict[str, int]", answer)

    async def stop(self) -> list[int]:
        """Stop the engine; return the ids of its processes that are still there."""
        before: list[int] = []
        if self._process.returncode is None:
            before += (await self.process_ids()).values()
            _write(self._writer, "stop", None)
        await self._ended()
        return [pid for pid in before if _alive(pid)]

    async def kill(self) -> None:
        """Kill it with all that it has started, as the end of its machine would."""
        os.killpg(self._process.pid, signal.SIGKILL)
        await self._ended()

    async def _ended(self) -> None:
        """Wait for the end of the process, and leave nothing open."""
        try:
            async with within(30):
                await self._process.wait()
        finally:
            if self._process.returncode is None:
                self._process.kill()
        await self._reading
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()

    async def _ask(self, command: str) -> object:
        _write(self._writer, command, None)
        async with within(ANSWER_S):
            return await self._answers.get()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                self._take(await _next(reader))
        self._answers.put_nowait(ConnectionError("the engine's process has ended"))

    def _take(self, frame: _Frame) -> None:
        """Take what the child says."""
        match frame.kind:
            case "outputs":
                outputs = _value(frame, _Outputs)
                for tokens in outputs.tokens:
                    self.streams[tokens.request_id].take(tokens)
                for finished in outputs.finished:
                    self.streams[finished.request_id].take(finished)
            case "progress":
                self.phases.append(_value(frame, str))
            case "died":
                self.died.set_result(_value(frame, str))
            case kind:
                self._answers.put_nowait(_value(frame, ANSWERS[kind]))


_reference_ids: list[list[int]] = []


async def reference_ids() -> list[list[int]]:
    """Return the greedy ids of a plain ``vllm.LLM`` for ``PROMPTS``.

    It runs once a session, in a process of its own and without a line of ours.
    """
    if not _reference_ids:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "support.vllm_engine",
            "reference",
            stdout=asyncio.subprocess.PIPE,
            env={
                **untraced(os.environ),
                "PYTHONPATH": os.pathsep.join(sys.path),
                "OMP_NUM_THREADS": "1",
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                # In that one process: half a minute less than in three.
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_PLUGINS": "",
            },
        )
        async with within(READY_S):
            out, _ = await process.communicate()
        # vLLM logs to stdout too.
        line = next(line for line in out.splitlines() if line.startswith(b"[["))
        _reference_ids.extend(msgspec.json.decode(line, type=list[list[int]]))
    return _reference_ids


# --- the child's end -----------------------------------------------------------------


class _Sink:
    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    def outputs(
        self, tokens: list[EngineTokens], finished: list[EngineFinished]
    ) -> None:
        _write(self._writer, "outputs", _Outputs(tokens, finished))

    def died(self, reason: str) -> None:
        _write(self._writer, "died", reason)


async def _serve(path: str, role: Role, arguments: list[str]) -> None:
    reader, writer = await asyncio.open_unix_connection(path)
    switch(SCHEDULER_CLASSES)
    blocks = CachedBlocks()
    engine = VllmEngine(str(MODEL), "demo", role, arguments, blocks=blocks)

    def tell(kind: str, value: object) -> None:
        _write(writer, kind, value)

    try:
        info = await engine.start(_Sink(writer), lambda phase: tell("progress", phase))
        tell("info", info)
        while (frame := await _next(reader)).kind != "stop":
            match frame.kind:
                case "submit":
                    engine.submit(_value(frame, EngineRequest))
                case "abort":
                    engine.abort(_value(frame, str))
                case "release_kv":
                    release = _value(frame, _Release)
                    engine.release_kv(release.request_id, release.handover)
                case "load":
                    tell("load", engine.load())
                case "blocks":
                    tell("blocks", list(blocks))
                case "process_ids":
                    tell("process_ids", _process_ids())
                case unknown:
                    tell("failed", f"no such command: {unknown}")
    except Exception as error:
        tell("failed", f"{type(error).__name__}: {error}")
        raise
    finally:
        await engine.stop()
        writer.close()


def _process_ids() -> dict[str, int]:
    """Return the processes below this one: title -> id."""
    psutil = import_module("psutil")  # in the child only, where vLLM is
    return {
        f"{process.name()} {process.pid}": process.pid
        for process in psutil.Process().children(recursive=True)
        if "resource_tracker" not in " ".join(process.cmdline())
    }


def _reference() -> None:
    vllm = import_module("vllm")

    llm = vllm.LLM(
        str(MODEL), dtype="float32", enforce_eager=True, max_model_len=2048, seed=0
    )
    params = vllm.SamplingParams(temperature=0.0, max_tokens=REFERENCE_TOKENS)
    ids: list[list[int]] = []
    for token_ids in PROMPTS:  # one by one: no batch that a stream would not have
        (output,) = llm.generate(
            [vllm.TokensPrompt(prompt_token_ids=token_ids)], params, use_tqdm=False
        )
        ids.append(list(output.outputs[0].token_ids))
    sys.stdout.write("\n" + msgspec.json.encode(ids).decode() + "\n")


def _write(writer: asyncio.StreamWriter, kind: str, value: object) -> None:
    data = msgspec.msgpack.encode((kind, value))
    writer.write(len(data).to_bytes(4, "big") + data)


async def _next(reader: asyncio.StreamReader) -> _Frame:
    size = int.from_bytes(await reader.readexactly(4), "big")
    return msgspec.msgpack.decode(await reader.readexactly(size), type=_Frame)


def _value(frame: _Frame, kind: type[T]) -> T:
    return msgspec.msgpack.decode(frame.value, type=kind)


def _alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    except (ProcessLookupError, FileNotFoundError):
        return False
    return state[0] != "Z"


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.argv[1] == "reference":
        _reference()
        return
    role = Role(sys.argv[2])
    with forking(role):
        asyncio.run(_serve(sys.argv[1], role, sys.argv[3:]))


if __name__ == "__main__":
    _main()
