"""Hidden states of the simulated engine: files like the real ones, with made-up states.

Also a connector's manifest, by script: what an unknown connector says at the end of a
request, which passes to its client as it is.
"""

from __future__ import annotations

from array import array
from dataclasses import replace

from tokenwire.protocol.messages import ErrorKind, FinishReason, Leg
from tokenwire.worker.capture_files import Array, write
from tokenwire.worker.captures import Captures
from tokenwire.worker.engine import EngineFinished, EngineRequest, EngineTokens

from .script import Script

__all__ = ["HIDDEN_SIZE", "Saving"]

HIDDEN_SIZE = 8
"""Of a state: files stay small, and are written between two steps."""


class Saving:
    """What requests leave behind when they end well."""

    def __init__(self, captures: Captures | None) -> None:
        self._captures = captures
        self._script = Script()
        self._open: dict[str, EngineRequest] = {}

    def begin(self, script: Script) -> None:
        """Take the script, which has been read."""
        self._script = script

    def refusal(self, request: EngineRequest) -> str:
        """Why a request cannot be run; empty: it can."""
        if self._captures is None or not request.capture_tokens:
            return ""
        return self._captures.refusal

    def took(self, request: EngineRequest) -> None:
        """Remember a request until it ends, if it leaves anything."""
        wants_file = self._captures is not None and request.capture_tokens
        if wants_file or self._script.has_manifests:
            self._open[request.request_id] = request

    def apply(
        self, tokens: list[EngineTokens], ends: list[EngineFinished]
    ) -> tuple[list[EngineTokens], list[EngineFinished]]:
        """Return what a step brought, with what its ends leave behind.

        The last tokens of one whose file failed are gone with it, as in the real engine.
        """
        if not self._open:
            return tokens, ends
        done = [self._applied(end) for end in ends]
        failed = {
            new.request_id
            for new, old in zip(done, ends, strict=True)
            if new.reason is not old.reason
        }
        return [one for one in tokens if one.request_id not in failed], done

    def _applied(self, end: EngineFinished) -> EngineFinished:
        request = self._open.pop(end.request_id, None)
        if request is None or end.reason not in (
            FinishReason.STOP,
            FinishReason.LENGTH,
        ):
            return end
        if request.leg is Leg.FULL:
            answer = self._script.answer(request.prompt_token_ids)
            if answer is not None and answer.kv_transfer_params is not None:
                end = replace(end, kv_transfer_params=answer.kv_transfer_params)
        if self._captures is None or not request.capture_tokens:
            return end
        path = self._captures.new_path()
        try:
            size = write(path, self._arrays(request), self._captures.settings.access)
        except OSError as error:
            text = self._captures.failed(error.strerror or str(error))
            return replace(
                end,
                reason=FinishReason.ERROR,
                error_kind=ErrorKind.CAPTURE,
                error=text,
                kv_transfer_params=None,
            )
        self._captures.written(size)
        return replace(end, kv_transfer_params={"hidden_states_path": path})

    def _arrays(self, request: EngineRequest) -> dict[str, Array]:
        """Return states that say which token and layer they are of."""
        token_ids = request.token_ids[: request.capture_tokens]
        layers = self._captures.settings.layers if self._captures is not None else ()
        states = array("f")
        for token_id in token_ids:
            for layer in layers:
                states.extend(
                    [float(token_id), float(layer), *[0.0] * (HIDDEN_SIZE - 2)]
                )
        shape = (len(token_ids), len(layers), HIDDEN_SIZE)
        wide = array("q", token_ids)
        return {
            "hidden_states": Array("F32", shape, states.tobytes()),
            "token_ids": Array("I64", (len(token_ids),), wide.tobytes()),
        }
