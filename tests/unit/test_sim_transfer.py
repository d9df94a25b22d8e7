"""The simulated engines' side channel, over TCP on loopback."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from support.awake import within
from tokenwire.protocol.messages import JsonObject
from tokenwire.worker.sim.transfer import SideChannel

CRC = 1234


class Table:
    """A ``HeldKVTable`` that records."""

    def __init__(self) -> None:
        self.held = {"p": CRC}
        self.arrived: asyncio.Queue[tuple[str, str | None]] = asyncio.Queue()
        self.taken: asyncio.Queue[str] = asyncio.Queue()

    def prompt_crc_of(self, request_id: str) -> int | None:
        """Return what the test has set."""
        return self.held.get(request_id)

    def kv_taken(self, request_id: str) -> None:
        """Record it."""
        self.held.pop(request_id, None)
        self.taken.put_nowait(request_id)

    def kv_arrived(self, request_id: str, error: str | None) -> None:
        """Record it."""
        self.arrived.put_nowait((request_id, error))


class Pair:
    """A prefill side that listens, and a decode side."""

    def __init__(self) -> None:
        self.prefill_table, self.decode_table = Table(), Table()
        self.prefill = SideChannel("prefill-1", self.prefill_table)
        self.decode = SideChannel("decode-1", self.decode_table)

    async def read(self, handover: JsonObject, crc: int = CRC) -> str | None:
        """Return how a read ended."""
        self.decode.read("d", handover, crc)
        async with within(60):
            request_id, error = await self.decode_table.arrived.get()
        assert request_id == "d"
        return error


@asynccontextmanager
async def pair() -> AsyncGenerator[Pair]:
    """Give a pair whose prefill side listens."""
    both = Pair()
    await both.prefill.listen("127.0.0.1", 0)
    try:
        yield both
    finally:
        await both.decode.close()
        await both.prefill.close()


async def test_a_read_frees_what_is_held() -> None:
    """And can be made once."""
    async with pair() as both:
        handover = both.prefill.offer("p", 20, [1, 2])
        assert await both.read(handover) is None
        assert not both.prefill_table.held
        assert await both.read(handover) == "no KV is held for request p"


async def test_a_hand_over_looks_like_nixl_s() -> None:
    """The keys that a frontend may meet in the real one."""
    async with pair() as both:
        handover = both.prefill.offer("p", 20, [1, 2])
        assert handover["do_remote_prefill"] is True
        assert handover["remote_block_ids"] == [1, 2]
        assert handover["remote_host"] == "127.0.0.1"
        assert handover["remote_port"] > 0


async def test_an_empty_read_frees_without_reading() -> None:
    """Whatever the prompt was; the decode side hears nothing of it."""
    async with pair() as both:
        both.decode.free(both.prefill.offer("p", 20, [1]))
        async with within(60):
            assert await both.prefill_table.taken.get() == "p"
        assert both.decode_table.arrived.empty()


async def test_an_engine_frees_its_own_without_a_connection() -> None:
    """A release that is sent to the prefill worker itself works as well."""
    async with pair() as both:
        both.prefill.free(both.prefill.offer("p", 20, [1]))
        assert not both.prefill_table.held


async def test_kv_of_another_prompt_is_refused() -> None:
    """Two hand-overs that were mixed up must not give wrong tokens."""
    async with pair() as both:
        error = await both.read(both.prefill.offer("p", 20, [1]), crc=CRC + 1)
        assert error == "the KV of request p is of another prompt"
        assert both.prefill_table.held


async def test_a_restarted_prefill_engine_is_another_one() -> None:
    """Its old hand-overs fail at once."""
    async with pair() as both:
        handover = both.prefill.offer("p", 20, [1]) | {"remote_engine_id": "prefill-0"}
        error = await both.read(handover)
        assert error == "engine prefill-0 is gone: this is another one"


async def test_a_dead_prefill_engine_fails_the_read() -> None:
    """Its port refuses connections."""
    async with pair() as both:
        handover = both.prefill.offer("p", 20, [1])
        await both.prefill.close()
        error = await both.read(handover)
        assert error is not None
        assert error.startswith("no KV from 127.0.0.1:")


async def test_a_hand_over_of_another_kind_fails_the_read() -> None:
    """With what is wrong with it."""
    async with pair() as both:
        error = await both.read({"remote_port": "x"})
        assert error is not None
        assert "not one of this engine's" in error


async def test_garbage_is_hung_up_on() -> None:
    """Too large a frame, or bytes of another kind; the server goes on."""
    async with pair() as both:
        handover = both.prefill.offer("p", 20, [1])
        for garbage in (struct.pack(">I", 1 << 30), struct.pack(">I", 3) + b"\xc1xx"):
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", handover["remote_port"]
            )
            writer.write(garbage)
            async with within(60):
                assert await reader.read() == b""
            writer.close()
            await writer.wait_closed()
        assert await both.read(handover) is None


async def test_garbage_for_an_answer_fails_the_read() -> None:
    """A port that now belongs to somebody else."""

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with pair() as both:
        port = server.sockets[0].getsockname()[1]
        handover = both.prefill.offer("p", 20, [1]) | {"remote_port": port}
        error = await both.read(handover)
        assert error is not None
        assert "the limit is" in error
    server.close()
    await server.wait_closed()
