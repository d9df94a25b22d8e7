"""A model's folder, read: tokenizer, templates, defaults. Nothing needs torch."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, cast

import msgspec

from .encoding import TokenizerBackend
from .tokenizer import SamplingDefaults, SpecialTokens, TextModel, read_tokenizer

__all__ = ["ModelError", "NoModelYet", "load_model"]

OTHER_TOKENIZERS = ("tokenizer.model", "tiktoken.model", "tekken.json", "vocab.json")
"""Files of other libraries, from which ``tokenizer.json`` can be made."""


class ModelError(Exception):
    """A model folder cannot be used; one sentence for the operator."""


class NoModelYet(ModelError):
    """A model could not be had from the hub, which may be another time."""


def load_model(
    path: str,
    executor: Executor | None = None,
    backend: TokenizerBackend = TokenizerBackend.TOKENIZERS,
) -> TextModel:
    """Return the text side of the model in folder *path*, or on the hub.

    Raises:
        ModelError: The folder lacks a file, or one cannot be read.
        NoModelYet: There is no such folder, and the hub does not give it.
    """
    folder = Path(path)
    if not folder.is_dir():
        if path.startswith(("/", ".", "~")):  # no hub id begins so
            msg = f"model {path}: there is no such folder"
            raise ModelError(msg)
        folder = _download(path)
    file = folder / "tokenizer.json"
    try:
        _check_tokenizer_file(file)
        data = file.read_bytes()
        config = _read_json(folder / "config.json")
        generation = _read_json(folder / "generation_config.json", missing={})
        settings = _read_json(folder / "tokenizer_config.json", missing={})
        if "added_tokens_decoder" not in settings:  # as older tools wrote it
            settings |= _read_json(folder / "special_tokens_map.json", missing={})
        special = _special_tokens(settings)
        templates = _templates(folder, settings)
        tokenizer = read_tokenizer(data.decode(), special)
        eos = tokenizer.token_to_id(special.names.get("eos_token", ""))
        return TextModel(
            tokenizer,
            sha256=hashlib.sha256(data).hexdigest(),
            vocab_size=int(config.get("text_config", config)["vocab_size"]),
            chat_template=templates.get("default"),
            tool_template=templates.get("tool_use"),
            special_tokens=special.names,
            sampling_defaults=msgspec.convert(generation, SamplingDefaults),
            end_ids=_end_ids(eos, config, generation),
            executor=executor,
            folder=folder,
            backend=backend,
        )
    except ModelError:
        raise
    except OSError as error:
        msg = f"model {path}: cannot read {error.filename}: {error.strerror}"
        raise ModelError(msg) from error
    except KeyError as error:
        msg = f"model {path}: config.json lacks {error}"
        raise ModelError(msg) from error
    except Exception as error:
        # tokenizers raises a bare Exception for a file it cannot parse.
        msg = f"model {path}: {error}"
        raise ModelError(msg) from error


def _check_tokenizer_file(file: Path) -> None:
    """Say what to do with a folder that has another library's tokenizer.

    Raises:
        ModelError: It has, and no ``tokenizer.json``.
    """
    if file.exists():
        return
    folder = file.parent
    for name in OTHER_TOKENIZERS:
        if (folder / name).exists():
            msg = (
                f"model {folder} has {name} but no tokenizer.json, which is needed; "
                "make it once: transformers.AutoTokenizer.from_pretrained("
                f"{str(folder)!r}).save_pretrained({str(folder)!r})"
            )
            raise ModelError(msg)


def _download(name: str) -> Path:
    """Return the local folder of a hub model's tokenizer files."""
    import huggingface_hub  # half a second, rarely needed
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    hub = cast("Any", huggingface_hub)

    patterns = ["*.json", "*.jinja"]
    try:
        return Path(hub.snapshot_download(name, allow_patterns=patterns))
    except (OSError, HfHubHTTPError, HFValidationError, ValueError) as error:
        msg = (
            f"model {name} is neither a folder nor a hub model that can be had: {error}"
        )
        raise NoModelYet(msg) from error


def _read_json(file: Path, missing: dict[str, Any] | None = None) -> dict[str, Any]:
    if missing is not None and not file.exists():
        return missing
    return cast("dict[str, Any]", json.loads(file.read_text()))


def _templates(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Return the chat templates by name; ``default`` is the one for chats.

    Files of their own win over the settings, as in transformers.
    """
    files = {
        file.stem: file.read_text()
        for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))
    }
    default = folder / "chat_template.jinja"
    if default.exists():
        files["default"] = default.read_text()
    if files:
        return files
    template = settings.get("chat_template")
    if template is None:  # of a processor: the model takes more than text
        processor = _read_json(folder / "chat_template.json", missing={})
        template = processor.get("chat_template")
    if isinstance(template, list):
        entries = cast("list[dict[str, str]]", template)
        return {entry["name"]: entry["template"] for entry in entries}
    return {"default": template} if isinstance(template, str) else {}


def _end_ids(eos: int | None, *settings: dict[str, Any]) -> frozenset[int]:
    """Return every id that ends an answer, whoever says so."""
    ends: set[object] = {eos}
    for file in settings:
        given = file.get("eos_token_id")
        ends |= set(cast("list[object]", given)) if isinstance(given, list) else {given}
    return frozenset(one for one in ends if isinstance(one, int))


def _special_tokens(settings: dict[str, Any]) -> SpecialTokens:
    names: dict[str, str] = {}
    for key, value in settings.items():
        text = _content(value)
        if key.endswith("_token") and text is not None:
            names[key] = text
    extra: list[str] = []
    for key in ("additional_special_tokens", "extra_special_tokens"):
        value = settings.get(key)
        if isinstance(value, dict):  # by names of their own, as image_token
            named = cast("dict[str, Any]", value)
            texts = {name: _content(one) for name, one in named.items()}
            names.update({name: text for name, text in texts.items() if text})
        elif isinstance(value, list):
            texts_of = map(_content, cast("list[object]", value))
            extra += [text for text in texts_of if text]
    added = cast("dict[str, dict[str, Any]]", settings.get("added_tokens_decoder", {}))
    return SpecialTokens(
        names=names,
        added=[added[key] for key in sorted(added, key=int)],
        extra=extra,
    )


def _content(token: object) -> str | None:
    """Return the text of a token, which may be written as an object."""
    if isinstance(token, dict):
        token = cast("dict[str, object]", token).get("content")
    return token if isinstance(token, str) else None
