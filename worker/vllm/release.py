"""Freeing KV that a prefill engine holds for a decode leg that will not come."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from tokenwire.protocol.messages import JsonObject

from .binding import Vllm

__all__ = ["Releases"]

logger = logging.getLogger(__name__)

NUDGE_INTERVAL_S = 0.25
NUM_NUDGES = 8
"""After a release: 2 s of empty steps. vLLM 0.32's NIXL connector shakes hands with a
new peer in a thread and looks for the result in the next step only; an idle decode
engine makes none, and the first release of a pair then waits for the 30 s lease."""


class Releases:
    """Empty reads, made by a decode engine, that free a prefill engine's blocks."""

    def __init__(self, vllm: Vllm, llm: Any) -> None:
        self._vllm = vllm
        self._llm = llm
        self._num = 0
        self._nudges_due = 0

    async def release(self, request_id: str, handover: JsonObject) -> None:
        """Make the empty read for *handover*, and see it through; takes 2 s.

        A dead engine releases nothing: the lease ends by itself, after 30 s.
        """
        try:
            await self._reject(f"{request_id}-release", handover)
        except self._vllm.EngineDeadError:
            return
        except (ValueError, TypeError, OverflowError) as error:
            # The handles came over the wire: what they hold is not ours to trust.
            logger.warning("request %s has no hand-over: %s", request_id, error)
            return
        await self.nudge()

    async def nudge(self) -> None:
        """Make the engine go on stepping for ``NUM_NUDGES`` intervals from now."""
        running = self._nudges_due > 0
        self._nudges_due = NUM_NUDGES
        if running:
            return
        try:
            while self._nudges_due:
                await asyncio.sleep(NUDGE_INTERVAL_S)
                self._nudges_due -= 1
                await self._reject("nudge", {})  # of nothing: one empty step
        except self._vllm.EngineDeadError:
            return
        finally:
            self._nudges_due = 0

    async def _reject(self, name: str, handover: JsonObject) -> None:
        # Unique: a repeated release must not meet the first one in the scheduler.
        self._num += 1
        await self._llm.notify_kv_transfer_request_rejected(
            f"{name}-{self._num}", handover
        )
