"""The admin plane from a trainer's side, and folders with weights for it."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from support.stack import Reply, Stack

__all__ = ["adapter", "admin_get", "admin_post", "weights", "write_safetensors"]


async def admin_post(
    running: Stack,
    path: str,
    body: Any = None,
    headers: dict[str, str] | None = None,
) -> Reply:
    """POST to the admin plane, with JSON if there is a body."""
    url = running.admin + path
    async with running.client.post(url, json=body, headers=headers) as answer:
        return Reply(answer.status, answer.headers, await answer.text())


async def admin_get(
    running: Stack, path: str, headers: dict[str, str] | None = None
) -> Reply:
    """GET from the admin plane."""
    async with running.client.get(running.admin + path, headers=headers) as answer:
        return Reply(answer.status, answer.headers, await answer.text())


def write_safetensors(path: Path, content: bytes) -> None:
    """Write a file of safetensors with one tensor of bytes."""
    tensor = {"dtype": "U8", "shape": [len(content)], "data_offsets": [0, len(content)]}
    header = json.dumps({"w": tensor}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + content)


def weights(folder: Path, content: bytes = b"other") -> Path:
    """Return *folder* with weights that depend on *content*."""
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / "model.safetensors", content)
    return folder


def adapter(folder: Path, content: bytes = b"adapter") -> Path:
    """Return *folder* with a LoRA adapter that depends on *content*."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text('{"r": 8}')
    write_safetensors(folder / "adapter_model.safetensors", content)
    return folder
