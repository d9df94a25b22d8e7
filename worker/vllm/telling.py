"""Which KV blocks vLLM has cached, told while it runs: its KV events, subscribed to.

vLLM publishes them over ZeroMQ, here through sockets in a folder of this user alone, so
that nothing listens on a network; what killed workers have left of those goes first. What an operator has configured is used as it is, if
vLLM binds it.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from tokenwire.worker.kv_blocks import CachedBlocks

from .adapters import reads_our_files
from .binding import Vllm
from .kv_index import RankBlocks, SaltOf
from .kv_subscriber import Context, Source, Subscription, new_context
from .scratch import Scratch

__all__ = ["Telling"]

logger = logging.getLogger(__name__)

_PREFIX = "tokenwire-kv-"

REPLAYED_STEPS = 1_000
"""That vLLM keeps for a replay: 10 s at a 10 ms step, and at most some 40 KB each. Its
own default is 10,000."""

_SOCKET = "inproc"
"""vLLM 0.32 adds the rank to endpoints that have ``inproc`` or ``tcp`` in them, and fails
with a second rank on others: so this is a name of files here."""

_MAX_PATH_BYTES = 107
"""``sockaddr_un.sun_path`` (unix(7)); of them a few for the rank."""

_RANK_BYTES = 8


class Telling:
    """Tells *blocks* what an engine has cached; None: nobody is told."""

    def __init__(self, blocks: CachedBlocks | None) -> None:
        self._blocks = blocks
        self._scratch: Scratch | None = None
        self._context: Context | None = None
        self._subscriptions: list[Subscription] = []
        self._ranks: list[RankBlocks] = []

    @property
    def tells(self) -> bool:
        """Whether it does."""
        return bool(self._subscriptions)

    def arrange(self, vllm: Vllm, config: Any) -> None:  # vLLM's VllmConfig
        """Have an engine of *config*, which does not run yet, publish its events."""
        if self._blocks is None or not config.cache_config.enable_prefix_caching:
            return
        if config.kv_events_config is not None:
            return  # the operator's
        obstacle = _obstacle(config.parallel_config)
        folder = ""
        if not obstacle:
            try:
                self._scratch = Scratch(_PREFIX)
                folder = str(self._scratch.root)
            except OSError as error:
                obstacle = f"no folder for its sockets: {error}"
        if not obstacle:
            longest = len(os.fsencode(folder)) + len("/replay-") + len(_SOCKET)
            if longest + _RANK_BYTES > _MAX_PATH_BYTES:
                obstacle = f"the path {folder} is too long for a socket"
        if obstacle:
            logger.warning("frontends are not told of cached KV: %s", obstacle)
            return
        config.kv_events_config = vllm.KVEventsConfig(
            enable_kv_cache_events=True,
            publisher="zmq",
            endpoint=f"ipc://{folder}/events-{_SOCKET}",
            replay_endpoint=f"ipc://{folder}/replay-{_SOCKET}",
            buffer_steps=REPLAYED_STEPS,
        )

    def begin(self, llm: Any, config: Any, salt_of: SaltOf) -> None:
        """Listen to an engine that runs.

        Args:
            llm: vLLM's ``AsyncLLM``.
            config: Its ``VllmConfig``, completed by the engine core.
            salt_of: See ``kv_index``.
        """
        events = config.kv_events_config
        if self._blocks is None or events is None or not events.enable_kv_cache_events:
            return
        cache = config.cache_config
        if events.publisher != "zmq" or not cache.enable_prefix_caching:
            return
        self._blocks.resize(cache.num_gpu_blocks or 0)
        # Not in every release: then there is what was configured, of the first rank.
        sources: dict[int, Any] = getattr(llm, "get_kv_event_sources", dict)()
        published = sources or {0: events}
        self._context = new_context()
        for rank in sorted(published):
            source = _source(published[rank])
            if source is None:
                logger.warning(
                    "frontends are not told of cached KV: --kv-events-config has %s, "
                    "which vLLM connects to; one it binds has a * or is ipc://",
                    published[rank].endpoint,
                )
                continue
            ours = RankBlocks(
                self._blocks, cache.block_size, cache.num_gpu_blocks or 0, salt_of
            )
            self._ranks.append(ours)
            self._subscriptions.append(
                Subscription(
                    self._context, source, ours.take, ours.forget, self._blocks.usage
                )
            )

    def forget(self, lora: str | None = None) -> None:
        """Take note that no block from before is found any more; or no adapter's."""
        for rank in self._ranks:
            rank.forget(lora)

    def close(self) -> None:
        """Listen no more, and leave nothing; harmless twice."""
        for subscription in self._subscriptions:
            subscription.close()
        context, self._context = self._context, None
        if context is not None:
            context.term()
        scratch, self._scratch = self._scratch, None
        if scratch is not None:
            scratch.close()


def _obstacle(parallel: Any) -> str:  # vLLM's ParallelConfig
    """Return why the engine's processes cannot be heard here; empty: they can."""
    if parallel.data_parallel_backend == "ray" or not reads_our_files(parallel):
        return "its engine has processes on other machines"
    is_local = parallel.data_parallel_size_local >= parallel.data_parallel_size
    if not is_local and not parallel.local_engines_only:
        return "its engine has data-parallel ranks on other machines"
    return ""


def _source(events: Any) -> Source | None:  # vLLM's KVEventsConfig
    """Return where to listen; None: vLLM connects to what listens there already."""
    endpoint = str(events.endpoint)
    if not (endpoint.startswith("ipc://") or "*" in endpoint or "::" in endpoint):
        return None
    replay = events.replay_endpoint
    return Source(
        _here(endpoint), None if replay is None else _here(str(replay)), events.topic
    )


def _here(endpoint: str) -> str:
    """Return how this machine reaches what is bound to *endpoint*."""
    return endpoint.replace("*", "127.0.0.1").replace("[::]", "[::1]")
