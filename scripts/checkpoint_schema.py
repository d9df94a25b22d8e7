"""Write docs/checkpoint.schema.json: the JSON schema of checkpoints, made of the types.

`make docs` runs this.
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from tokenwire.frontend.checkpoint import OBJECT, Checkpoint

__all__ = ["PATH", "rendered"]

PATH = Path(__file__).parents[1] / "docs" / "checkpoint.schema.json"


def rendered() -> str:
    """Return the file as it should be."""
    _, schemas = msgspec.json.schema_components(
        [Checkpoint], ref_template="#/$defs/{name}"
    )
    for schema in schemas.values():
        text = schema.get("description", "")
        schema["description"] = " ".join(text.replace("``", "").split())
    root = schemas.pop(Checkpoint.__name__)
    document = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **root,
        "title": f"{OBJECT}, version 1",
        "$defs": dict(sorted(schemas.items())),
    }
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def main() -> None:
    """Write the file."""
    PATH.write_text(rendered())


if __name__ == "__main__":
    main()
