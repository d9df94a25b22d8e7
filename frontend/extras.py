"""What ``nvext`` says at the end of a choice."""

from __future__ import annotations

from tokenwire.protocol.messages import Logprobs

from .job import End
from .logprobs import sampled_logprobs
from .nvext import Selection

__all__ = ["EngineData", "final_nvext"]


class EngineData:
    """The whole sequence with its log probabilities, as NeMo-RL and NeMo Gym read it."""

    __slots__ = ("_logprobs", "_token_ids")

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []

    def add(self, token_ids: list[int], logprobs: Logprobs | None) -> None:
        """Take the tokens of a chunk with their log probabilities."""
        self._token_ids += token_ids
        if logprobs is not None:
            self._logprobs += sampled_logprobs(logprobs)

    def body(self, prompt_token_ids: list[int] | None) -> dict[str, object]:
        """Return ``engine_data``."""
        return {
            "prompt_token_ids": prompt_token_ids or [],
            "completion_token_ids": self._token_ids,
            "completion_logprobs": self._logprobs,
        }


def final_nvext(
    selection: Selection, token_ids: list[int], end: End
) -> dict[str, object]:
    """Return what of ``nvext`` is known from the end alone; absent, never null.

    Args:
        selection: What the request selected.
        token_ids: Those of the last chunk, or all of a whole response.
        end: How the choice ended.
    """
    nvext: dict[str, object] = {}
    if selection.completion_token_ids:
        nvext["completion_token_ids"] = token_ids
    if selection.prompt_token_ids and end.prompt_token_ids is not None:
        nvext["prompt_token_ids"] = end.prompt_token_ids
    if selection.kv_transfer_params and end.kv_transfer_params is not None:
        nvext["kv_transfer_params"] = end.kv_transfer_params
    if selection.worker_id and end.worker_ids:
        nvext["worker_id"] = end.worker_ids
    if selection.timing:
        timing: dict[str, object] = {
            name: round(value, 3) for name, value in end.timing.items()
        }
        nvext["timing"] = {**timing, "cached_tokens": end.num_cached_tokens}
    if selection.stop_reason and end.stop_reason is not None:
        nvext["stop_reason"] = end.stop_reason
    if selection.weight_version and end.weight_version is not None:
        nvext["weight_version"] = end.weight_version
        if len(end.weight_versions) > 1:
            nvext["weight_versions"] = [
                {"version": version, "first_index": index}
                for index, version in end.weight_versions
            ]
    return nvext
