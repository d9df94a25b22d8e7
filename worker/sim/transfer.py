"""The simulated engines' side channel: where NIXL would move KV, a few bytes of TCP.

A prefill engine listens; a decode engine connects once per hand-over, asks, and gets a
yes or a no. A frame is its length (u32, big-endian) and msgpack of a fixed type.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Coroutine
from typing import Literal, Protocol, TypeVar

import msgspec

from tokenwire.protocol.messages import JsonObject

__all__ = ["HeldKVTable", "SideChannel"]

T = TypeVar("T")

MAX_FRAME_BYTES = 64 * 1024
"""A question or an answer: two ids, two numbers and a sentence."""

MAX_CONNECTIONS = 4_096
"""Reads at once: one per sequence of the largest ``max_num_seqs`` in use."""

FRAME_TIMEOUT_S = 5.0
"""A peer that takes longer for its few bytes is gone, or is no peer."""

READ_TIMEOUT_S = 10.0
"""A whole read beyond the transfer's own time. A prefill worker that dies in a hand-over
is noticed by its connection; this bounds one that is frozen."""

_LENGTH = struct.Struct(">I")


class _Read(msgspec.Struct, tag="read", frozen=True):
    """Give me the KV of a prefill leg; or, with *empty*, only free it."""

    engine_id: str
    request_id: str
    prompt_crc: int
    empty: bool = False


class _Answer(msgspec.Struct, tag="answer", frozen=True):
    """An empty *error* means that the KV is there, and now free on this side."""

    error: str = ""


class _Handover(msgspec.Struct, frozen=True):
    """What a prefill leg's ``kv_transfer_params`` hold; the keys are NIXL's."""

    remote_engine_id: str
    remote_request_id: str
    remote_host: str
    remote_port: int
    remote_block_ids: list[int]
    remote_num_tokens: int
    tp_size: Literal[1] = 1
    do_remote_prefill: Literal[True] = True
    do_remote_decode: Literal[False] = False


class HeldKVTable(Protocol):
    """Who knows which KV is held on this side."""

    def prompt_crc_of(self, request_id: str) -> int | None:
        """Return the checksum of the prompt whose KV is held, or None."""

    def kv_taken(self, request_id: str) -> None:
        """Take note that the KV was read, or will not be."""

    def kv_arrived(self, request_id: str, error: str | None) -> None:
        """Take note of the end of a read that this side began."""


class SideChannel:
    """Both ends of the hand-over, for one engine."""

    def __init__(
        self, engine_id: str, table: HeldKVTable, *, transfer_s: float = 0.0
    ) -> None:
        self.engine_id = engine_id
        self._table = table
        self._transfer_s = transfer_s
        self._server: asyncio.Server | None = None
        self._address = ("", 0)
        self._num_connections = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self, host: str, port: int) -> None:
        """Answer reads from now on.

        Raises:
            OSError: The address cannot be bound.
        """
        self._server = await asyncio.start_server(self._serve, host, port)
        bound = self._server.sockets[0].getsockname()
        self._address = (host, int(bound[1]))

    async def close(self) -> None:
        """Stop answering, and give up what is being read."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def offer(self, request_id: str, num_tokens: int, blocks: list[int]) -> JsonObject:
        """Return the hand-over of KV that is held on this side."""
        host, port = self._address
        handover = _Handover(
            remote_engine_id=self.engine_id,
            remote_request_id=request_id,
            remote_host=host,
            remote_port=port,
            remote_block_ids=blocks,
            remote_num_tokens=num_tokens,
        )
        return msgspec.structs.asdict(handover)

    def read(self, request_id: str, handover: JsonObject, prompt_crc: int) -> None:
        """Begin to read; the table is told how it ended."""
        self._spawn(self._read(request_id, handover, prompt_crc))

    def free(self, handover: JsonObject) -> None:
        """Have the other side free what it holds, without reading it."""
        if handover.get("remote_engine_id") == self.engine_id:
            self._table.kv_taken(str(handover.get("remote_request_id")))
            return
        self._spawn(self._free(handover))

    # -- the side that reads --------------------------------------------------------

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _read(
        self, request_id: str, handover: JsonObject, prompt_crc: int
    ) -> None:
        error = await self._ask(handover, prompt_crc, empty=False)
        self._table.kv_arrived(request_id, error or None)

    async def _free(self, handover: JsonObject) -> None:
        # A failure needs no answer: then the other side's lease frees the blocks.
        await self._ask(handover, 0, empty=True)

    async def _ask(self, handover: JsonObject, prompt_crc: int, *, empty: bool) -> str:
        """Return what went wrong, or an empty string."""
        try:
            there = msgspec.convert(handover, _Handover)
        except msgspec.ValidationError as error:
            return f"the hand-over is not one of this engine's: {error}"
        question = _Read(
            there.remote_engine_id, there.remote_request_id, prompt_crc, empty
        )
        address = f"{there.remote_host}:{there.remote_port}"
        try:
            async with asyncio.timeout(READ_TIMEOUT_S + self._transfer_s):
                if not empty and self._transfer_s:
                    await asyncio.sleep(self._transfer_s)
                answer = await _exchange(there.remote_host, there.remote_port, question)
        except TimeoutError:
            return f"no KV from {address} within {READ_TIMEOUT_S} s"
        except (OSError, EOFError, msgspec.DecodeError) as error:
            return f"no KV from {address}: {type(error).__name__} {error}"
        return answer.error

    # -- the side that is read ------------------------------------------------------

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._num_connections += 1
        try:
            if self._num_connections <= MAX_CONNECTIONS:
                async with asyncio.timeout(FRAME_TIMEOUT_S):
                    question = await _receive(reader, _Read)
                    _send(writer, self._answer(question))
                    await writer.drain()
        except (OSError, EOFError, TimeoutError, msgspec.DecodeError):
            pass  # no peer, or one that left: its own side notices
        finally:
            self._num_connections -= 1
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _answer(self, question: _Read) -> _Answer:
        if question.engine_id != self.engine_id:
            return _Answer(f"engine {question.engine_id} is gone: this is another one")
        held_crc = self._table.prompt_crc_of(question.request_id)
        if held_crc is None:
            return _Answer(f"no KV is held for request {question.request_id}")
        if not question.empty and held_crc != question.prompt_crc:
            return _Answer(
                f"the KV of request {question.request_id} is of another prompt"
            )
        self._table.kv_taken(question.request_id)
        return _Answer()


async def _exchange(host: str, port: int, question: _Read) -> _Answer:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        _send(writer, question)
        return await _receive(reader, _Answer)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def _send(writer: asyncio.StreamWriter, message: _Read | _Answer) -> None:
    body = msgspec.msgpack.encode(message)
    writer.write(_LENGTH.pack(len(body)) + body)


async def _receive(reader: asyncio.StreamReader, kind: type[T]) -> T:
    """Return the next frame.

    Raises:
        EOFError: The peer closed.
        OSError: The connection broke, or the frame is above ``MAX_FRAME_BYTES``.
        msgspec.DecodeError: It is not a *kind*.
    """
    (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if size > MAX_FRAME_BYTES:
        msg = f"a frame of {size} bytes, the limit is {MAX_FRAME_BYTES}"
        raise OSError(msg)
    return msgspec.msgpack.decode(await reader.readexactly(size), type=kind)
