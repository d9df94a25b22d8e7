"""The commands of docs/capture.md, run as they stand there, in the working directory.

Usage: speculators_jobs.py URL PAGE. Prints what the jobs have made, as JSON.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

HERE = "http://127.0.0.1:8000"


def blocks(page: str, language: str) -> list[str]:
    """Return the code of the speculators section in *language*."""
    section = page[page.index("## speculators") :]
    return re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)


def main() -> None:
    """Run the jobs."""
    url, page_path = sys.argv[1:]
    page = Path(page_path).read_text().replace(HERE, url)
    commands = [
        shlex.split(line)
        for block in blocks(page, "sh")
        for line in block.replace("\\\n", " ").splitlines()
        if line.strip()
    ]
    result: dict[str, Any] = {}
    # Their imports take 10 s: once for all commands. Whatever they print is no JSON.
    with contextlib.redirect_stdout(sys.stderr):
        from speculators.cli import app

        for program, *arguments in commands:
            assert program == "speculators", program
            app(arguments, standalone_mode=False)
            result.setdefault("commands", []).append(arguments[0])

        import torch
        from datasets import load_from_disk
        from safetensors.torch import load_file

        rows = [row["input_ids"].tolist() for row in load_from_disk("prepared")]
        result["rows"] = rows
        result["responses"] = [
            json.loads(line)
            for line in Path("responses.jsonl").read_text().splitlines()
        ]
        result["errors"] = Path("responses.errors.jsonl").read_text()
        offline = [
            load_file(f"states/hs_{n}.safetensors")["hidden_states"]
            for n in range(len(rows))
        ]
        result["shapes"] = [list(one.shape) for one in offline]

        def alike(one: Any, other: Any) -> bool:
            """Return whether they differ by no more than another batch makes them."""
            return bool(torch.cosine_similarity(one, other, dim=-1).min() > 0.999)

        names: dict[str, Any] = {}
        [online] = blocks(page, "python")
        exec(online, names)  # noqa: S102 - a page of ours
        samples = [names["dataset"][n] for n in range(len(rows))]
        result["online"] = [
            {
                "input_ids": sample["input_ids"].tolist(),
                "is_offline": alike(sample["hidden_states"], one[:, :-1].flatten(1))
                and alike(sample["verifier_last_hidden_states"], one[:, -1]),
            }
            for sample, one in zip(samples, offline, strict=True)
        ]
    print(json.dumps(result))


main()
