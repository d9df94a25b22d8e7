"""Signed checkpoints: whose they are, whether they were altered, and how keys change."""

from __future__ import annotations

import base64
import json
import os
import secrets
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from support.checkpoints import a_checkpoint
from tokenwire.frontend.checkpoint import Checkpoint, canonical_json, read_checkpoint
from tokenwire.frontend.errors import ApiError
from tokenwire.frontend.resume_keys import ResumeKeys
from tokenwire.protocol.files import UnusableFile

OLD, NEW = secrets.token_bytes(32), secrets.token_bytes(32)
NOW = 1_500.0  # between created and expires
ALICE, BOB = "Bearer alice", "Bearer bob"


def write(path: Path, *lines: str, mode: int = 0o600) -> str:
    """Write a key file anew; returns its path."""
    path.unlink(missing_ok=True)
    path.write_text("".join(line + "\n" for line in lines))
    path.chmod(mode)
    return str(path)


def refusal(keys: ResumeKeys, checkpoint: Checkpoint, who: str | None = ALICE) -> str:
    """Return why a checkpoint is refused; empty: it is not."""
    try:
        keys.check(checkpoint, who, NOW)
    except ApiError as error:
        return f"{error.status} {error.code}: {error.message}"
    return ""


def test_what_was_signed_is_believed(tmp_path: Path) -> None:
    """Also when its client has written it in another way."""
    keys = ResumeKeys(write(tmp_path / "k", OLD.hex()))
    signed = keys.signed(a_checkpoint(), ALICE)
    again = read_checkpoint(json.loads(msgspec.json.encode(signed)))

    assert refusal(keys, signed) == refusal(keys, again) == ""
    assert signed.integrity is not None
    assert signed.integrity.key_id == keys.key_ids[0]
    assert OLD.hex().encode() not in canonical_json(signed)
    assert b"alice" not in canonical_json(signed)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value in JSON that holds no others."""
    keys: list[Any] = []
    if isinstance(value, dict):
        keys = list(cast("dict[str, Any]", value))
    elif isinstance(value, list):
        keys = [number for number, _ in enumerate(cast("list[object]", value))]
    if not keys:
        return [path]
    return [one for key in keys for one in leaves(value[key], (*path, key))]


def changed(value: Any) -> Any:
    """Return another value of the same type, or of another where it is null."""
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return ("1" if value[:1] == "0" else "0") + value[1:]
        case list():
            return [1]
        case _:
            return "0" * 64


def test_no_value_can_be_altered(tmp_path: Path) -> None:
    """Each one in turn: it no longer fits its signature, or is no checkpoint."""
    keys = ResumeKeys(write(tmp_path / "k", OLD.hex()))
    whole = json.loads(msgspec.json.encode(keys.signed(a_checkpoint(), ALICE)))
    paths = leaves(whole)
    assert len(paths) > 50
    num_refused = 0

    for path in paths:
        altered = json.loads(json.dumps(whole))
        inner = altered
        for step in path[:-1]:
            inner = inner[step]
        inner[path[-1]] = changed(inner[path[-1]])
        try:
            checkpoint = read_checkpoint(altered)
        except ApiError:
            continue  # of a type that it cannot have
        assert refusal(keys, checkpoint).startswith("403 checkpoint_forbidden"), path
        num_refused += 1
    assert num_refused > 40


def test_a_checkpoint_is_one_tenants(tmp_path: Path) -> None:
    """Another API key is refused, and so is none; a client without one has its own."""
    keys = ResumeKeys(write(tmp_path / "k", OLD.hex()))
    of_alice = keys.signed(a_checkpoint(), ALICE)
    of_nobody = keys.signed(a_checkpoint(), None)

    assert "another API key" in refusal(keys, of_alice, BOB)
    assert "another API key" in refusal(keys, of_alice, None)
    assert "another API key" in refusal(keys, of_nobody, ALICE)
    assert refusal(keys, of_nobody, None) == ""


def test_unsigned_ones_count_only_where_there_is_no_key(tmp_path: Path) -> None:
    """And signed ones only where there is one: what cannot be checked is not believed."""
    keys = ResumeKeys(write(tmp_path / "k", OLD.hex()))
    without = ResumeKeys()
    signed = keys.signed(a_checkpoint(), ALICE)

    assert without.signed(a_checkpoint(), ALICE).integrity is None
    assert refusal(without, a_checkpoint()) == ""
    assert "not signed" in refusal(keys, a_checkpoint())
    assert "none of ours" in refusal(without, signed)


def test_an_expired_one_is_refused(tmp_path: Path) -> None:
    """With a key and without one."""
    for keys in (ResumeKeys(write(tmp_path / "k", OLD.hex())), ResumeKeys()):
        signed = keys.signed(a_checkpoint(), ALICE)
        keys.check(signed, ALICE, 1_999.9)
        with pytest.raises(ApiError, match="expired"):
            keys.check(signed, ALICE, 2_000.0)


def test_keys_are_changed_without_a_gap(tmp_path: Path) -> None:
    """Two count, the first signs; one that is dropped counts no more."""
    file = tmp_path / "k"
    keys = ResumeKeys(write(file, OLD.hex()))
    of_old = keys.signed(a_checkpoint(), ALICE)

    write(file, "# rotated today", OLD.hex(), base64.b64encode(NEW).decode())
    keys.refresh()
    assert keys.signed(a_checkpoint(), ALICE) == of_old

    write(file, base64.urlsafe_b64encode(NEW).decode().rstrip("="), OLD.hex())
    keys.refresh()
    of_new = keys.signed(a_checkpoint(), ALICE)
    assert of_new != of_old
    assert refusal(keys, of_old) == refusal(keys, of_new) == ""

    write(file, NEW.hex())
    keys.refresh()
    assert "none of ours" in refusal(keys, of_old)
    assert refusal(keys, of_new) == ""


def test_a_file_that_went_bad_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged once, and without what stands in it."""
    file = tmp_path / "k"
    keys = ResumeKeys(write(file, OLD.hex()))
    ids = keys.key_ids

    write(file, OLD.hex()[:20])
    keys.refresh()
    keys.refresh()
    file.unlink()
    keys.refresh()

    assert keys.key_ids == ids
    assert len(caplog.records) == 2
    assert OLD.hex()[:20] not in caplog.text


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ([], "0 keys"),
        (["# nothing"], "0 keys"),
        (["00" * 15], "line 1"),
        ([OLD.hex(), "not a key!"], "line 2"),
        ([OLD.hex(), NEW.hex(), "11" * 32], "3 keys"),
        (["#" * 5_000], "above"),
    ],
)
def test_a_bad_file_stops_the_start(
    tmp_path: Path, lines: list[str], text: str
) -> None:
    """One sentence for the operator, without the key."""
    with pytest.raises(UnusableFile, match=text) as caught:
        ResumeKeys(write(tmp_path / "k", *lines))

    assert OLD.hex() not in str(caught.value)


def test_the_file_is_its_owners(tmp_path: Path) -> None:
    """What everyone may read or change is refused; a group's file is not."""
    for mode in (0o604, 0o602):
        with pytest.raises(UnusableFile, match="chmod o-rwx"):
            ResumeKeys(write(tmp_path / "k", OLD.hex(), mode=mode))
    assert ResumeKeys(write(tmp_path / "k", OLD.hex(), mode=0o640)).key_ids
    with pytest.raises(UnusableFile, match="No such file"):
        ResumeKeys(str(tmp_path / "none"))
    assert os.listdir(tmp_path) == ["k"]
