"""``GET /v1/rl/workers``: the workers as trainers discover them.

The keys are Dynamo's, and Prime-RL's client refuses any other. Each worker has an
address of its own on the admin plane, since that client wants them apart; what is sent
to the plane itself goes to all.
"""

from __future__ import annotations

from urllib.parse import quote

from .fanout import participants
from .link import Link
from .pool import Pool

__all__ = ["rl_workers"]

PROTOCOL_VERSION = 1
"""Of the discovery: the one that Prime-RL knows."""

NAMESPACE = "tokenwire"

ROUTES = (
    "collective_rpc", "init_broadcaster", "load_lora_adapter", "pause",
    "reset_prefix_cache", "resume", "sleep", "unload_lora_adapter", "update_weights",
    "wake_up",
)  # fmt: skip


def rl_workers(pool: Pool, base: str) -> dict[str, object]:
    """Return the answer.

    Args:
        pool: The workers.
        base: The URL below which each worker has its routes.
    """
    links = participants(pool.links)
    return {
        "protocol_version": PROTOCOL_VERSION,
        "namespace": NAMESPACE,
        "workers": [_worker(link, base) for link in links],
    }


def _worker(link: Link, base: str) -> dict[str, object]:
    card = link.card
    url = f"{base}/{quote(link.worker_id, safe='')}"
    return {
        "namespace": NAMESPACE,
        "component": card.role.value if card is not None else "",
        "endpoint": "generate",
        "instance_id": _number(card.incarnation if card is not None else ""),
        "transport": {"zmq": link.endpoint},
        "request_plane_url": link.endpoint,
        "system_url": url,
        "admin_base_url": url,
        "world_size": card.world_size if card is not None else 1,
        "model": card.model if card is not None else "",
        "routes": list(ROUTES),
        "error": link.status.fault or None,
    }


def _number(incarnation: str) -> int:
    """Return a number for a start of a worker: other starts have others."""
    return int.from_bytes(incarnation.encode()[:7], "big")
