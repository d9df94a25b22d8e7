"""Other people's clients: their environment, their tokenizer, their programs."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

from support.awake import within

__all__ = ["client_tokenizer", "run_client", "run_snippet"]

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "tests" / "integration" / "clients"
TIMEOUT_S = 120.0  # 30 s on a quiet machine, half of it for their imports

_MARKERS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>",
    "</tool_response>",
)  # fmt: skip
"""What the ChatML renderer of the renderers library insists on, beside ``<|im_start|>``
and its like; none of them is ever written."""


def client_tokenizer(model: str, folder: Path) -> Path:
    """Return *folder* with the tokenizer of *model* as a ChatML renderer takes it.

    The demo model calls ``<|endoftext|>`` its unknown token, which the library takes for
    a token that is not there.
    """
    source = Path(model)
    shutil.copy(source / "config.json", folder)
    tokenizer: Any = json.loads((source / "tokenizer.json").read_text())
    settings: Any = json.loads((source / "tokenizer_config.json").read_text())
    del settings["unk_token"]
    first = 1 + max(tokenizer["model"]["vocab"].values())
    for token_id, piece in enumerate(_MARKERS, first):
        entry = {
            "content": piece, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": False,
        }  # fmt: skip
        tokenizer["added_tokens"].append({"id": token_id, **entry})
        settings["added_tokens_decoder"][str(token_id)] = entry
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


async def run_client(program: str, *arguments: str, cwd: Path | None = None) -> Any:
    """Return the JSON that a program prints, which runs in the clients' environment."""
    text = await _run({}, str(PROGRAMS / program), *arguments, cwd=cwd)
    return json.loads(text)


async def run_snippet(text: str, variables: dict[str, str]) -> None:
    """Run Python of a document's in the clients' environment; fail if it does."""
    await _run(variables, "-c", text)


async def _run(
    variables: dict[str, str], *arguments: str, cwd: Path | None = None
) -> str:
    """Return what the clients' Python prints."""
    python = ROOT / os.environ.get("CLIENTS_VENV", ".venv-clients") / "bin" / "python"
    assert python.exists(), f"{python} is missing: run `make setup-clients`"
    # Its modules are compiled once; nothing of this environment is found in that one.
    left_out = {"PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "VIRTUAL_ENV"}
    environment = {k: v for k, v in os.environ.items() if k not in left_out}
    process = await asyncio.create_subprocess_exec(
        *(str(python), *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=cwd,
        env=environment | {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"} | variables,
    )
    try:
        async with within(TIMEOUT_S):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, err.decode()[-3000:]
    return out.decode()
