"""Stacks that speak a model family's format, by scripted ids and vLLM's parsers."""

from __future__ import annotations

import json
import warnings
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from support.formats import Format, encode, write_format_model
from support.stack import Stack, stack
from tokenwire.frontend.parsers import ParserChoice, Parsers, load_parsers
from tokenwire.protocol.messages import Role

__all__ = ["Start", "format_stacks", "load_format"]

Start = Callable[..., AbstractAsyncContextManager[Stack]]


def load_format(folder: Path, form: Format) -> Parsers:
    """Write a model that has *form* and its ``script.json`` into *folder*."""
    write_format_model(folder, form)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries, at import
        choice = ParserChoice(form.tool_call_parser, form.reasoning_parser)
        parsers = load_parsers(choice, folder)
    rules = [
        {
            "contains": encode(folder, case.name),
            "output_token_ids": encode(folder, case.text),
        }
        for case in form.cases
    ]
    (folder / "script.json").write_text(json.dumps(rules))
    return parsers


def format_stacks(tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Return what starts a stack that answers a case's name with the case's output."""
    loaded: dict[str, tuple[Path, Parsers]] = {}

    @asynccontextmanager
    async def serving(
        form: Format,
        *options: str,
        roles: tuple[Role, ...] = (Role.AGGREGATED,),
        arguments: tuple[str, ...] = (),
    ) -> AsyncGenerator[Stack]:
        if form.name not in loaded:
            folder = tmp_path_factory.mktemp("model")
            loaded[form.name] = folder, load_format(folder, form)
        folder, parsers = loaded[form.name]
        script = ("--step-ms", "0", "--script", str(folder / "script.json"), *options)
        async with stack(folder, roles, script, arguments, parsers=parsers) as running:
            yield running
            await running.idle()

    return serving
