"""The file of API keys, and whether what a client gives is one of them."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from support.keyed import Keyed
from tokenwire.deploy import api_keys as command
from tokenwire.deploy.keys import main as keys_main
from tokenwire.frontend.api_keys import ApiKeys
from tokenwire.protocol.api_keys import (
    MAX_FILE_BYTES,
    MAX_KEYS,
    ApiKey,
    KeyLimits,
    digest_of,
    line_of,
    make_key,
    read_api_keys,
)
from tokenwire.protocol.files import UnusableFile

HASH = "ab" * 32


def touch(path: Path) -> None:
    """Have a file look changed, however quick the test is."""
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def test_a_line_is_read_as_it_was_written(tmp_path: Path) -> None:
    """With all limits, and with none; comments and empty lines are nothing."""
    limits = KeyLimits(60, 100_000, 4)
    keys = [ApiKey("alice", digest_of("a"), limits), ApiKey("b.o_b-2", digest_of("b"))]
    file = tmp_path / "keys"
    file.write_text("# ours\n\n" + "\n".join(map(line_of, keys)))

    assert read_api_keys(str(file)) == tuple(keys)
    assert line_of(keys[1]) == f"b.o_b-2 {digest_of('b').hex()}"
    assert digest_of("a").hex() not in repr(keys)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("alice", "line 1 of .* is not NAME SHA256"),
        ("alice tw-secret", "is not NAME SHA256"),
        (f"alice {HASH[1:]}", "is not NAME SHA256"),
        (f"al/ice {HASH}", "is not NAME SHA256"),
        (f"{'a' * 65} {HASH}", "is not NAME SHA256"),
        (f"alice {HASH} requests=1", "behind the hash may stand requests-per-minute=N"),
        (f"alice {HASH} concurrency=0", "with N from 1 up"),
        (f"alice {HASH} concurrency=-1", "with N from 1 up"),
        (f"alice {HASH} concurrency=1e3", "with N from 1 up"),
        (f"alice {HASH} concurrency={'9' * 40}", "with N from 1 up"),
        (f"a {HASH}\na {HASH} concurrency=1", "line 2 of .* other limits than a has"),
    ],
)
def test_a_line_that_is_none_is_named_by_its_number(
    tmp_path: Path, line: str, says: str
) -> None:
    """Never by what it says: it may be a key that nobody has hashed."""
    file = tmp_path / "keys"
    file.write_text(line)
    with pytest.raises(UnusableFile, match=says) as caught:
        read_api_keys(str(file))
    assert "secret" not in str(caught.value)


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    """One that is missing, that all may write, that is too long, or has too many keys."""
    file = tmp_path / "keys"
    with pytest.raises(UnusableFile, match="No such file"):
        ApiKeys(str(file))
    file.write_text("")
    file.chmod(0o666)
    with pytest.raises(UnusableFile, match="chmod o-w"):
        ApiKeys(str(file))
    file.chmod(0o600)
    file.write_bytes(b"#" * (MAX_FILE_BYTES + 1))
    with pytest.raises(UnusableFile, match="no API key file"):
        ApiKeys(str(file))
    file.write_text("".join(f"n{n} {HASH}\n" for n in range(MAX_KEYS + 1)))
    with pytest.raises(UnusableFile, match="holds 1025 API keys"):
        ApiKeys(str(file))


def test_every_key_is_compared_in_constant_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By ``hmac.compare_digest``, all of them, whichever fits and whatever was given."""
    compared: list[bytes] = []

    def compare(given: bytes, digest: bytes) -> bool:
        compared.append(digest)
        return given == digest

    monkeypatch.setattr("tokenwire.frontend.api_keys.hmac.compare_digest", compare)
    names = ["a", "b", "c"]
    keys = ApiKeys(str(Keyed(tmp_path / "keys", names).path))
    digests = [digest_of(f"key-of-{name}") for name in names]
    for given, name in [
        ("Bearer key-of-a", "a"),
        ("bearer  key-of-c ", "c"),
        ("Bearer key-of-d", None),
        ("Bearer \udce9", None),
        ("Basic key-of-a", None),
        ("key-of-a", None),
        ("Bearer", None),
        ("", None),
        (None, None),
    ]:
        compared.clear()
        found = keys.verified(given)
        assert (found and found.name) == name, given
        assert compared == digests, given


def test_the_file_is_read_again_when_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a second of requests: new keys count, and those that are gone do not."""
    now = 100.0
    monkeypatch.setattr("tokenwire.protocol.watched.time.monotonic", lambda: now)
    file = Keyed(tmp_path / "keys", ["old"])
    keys = ApiKeys(str(file.path))
    file.write([line_of(ApiKey("new", digest_of("n")))])
    touch(file.path)
    assert keys.verified("Bearer key-of-old")
    now += 1
    assert keys.verified("Bearer key-of-old") is None
    assert keys.verified("Bearer n")
    file.write([])
    now += 1
    assert keys.verified("Bearer n") is None


def test_a_file_that_becomes_unusable_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said once; when it is good again, it counts."""
    file = Keyed(tmp_path / "keys", ["old"])
    keys = ApiKeys(str(file.path))
    for how in ("nonsense", "gone"):
        caplog.clear()
        if how == "gone":
            file.path.unlink()
        else:
            file.write([how])
        with caplog.at_level(logging.ERROR):
            keys.refresh()
            keys.refresh()
        assert keys.verified("Bearer key-of-old")
        [record] = caplog.records
        assert "what was read before stays in use" in record.getMessage()
    file.write([])
    keys.refresh()
    assert keys.verified("Bearer key-of-old") is None


def test_the_command_prints_a_key_and_writes_its_hash(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The key is nowhere in the file, which nobody else may read."""
    file = tmp_path / "api-keys"
    for name in ("alice", "bob"):
        keys_main(["api", name, "--file", str(file), "--requests-per-minute", "60"])
    first, second = capsys.readouterr().out.split()

    assert first.startswith("tw-")
    assert len({first, second, make_key()}) == 3
    assert first not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    keys = ApiKeys(str(file))
    found = keys.verified(f"Bearer {first}")
    assert found is not None
    assert (found.name, found.limits) == ("alice", KeyLimits(requests_per_minute=60))
    assert found != keys.verified(f"Bearer {second}")


def test_a_second_key_of_a_name_has_its_limits(tmp_path: Path) -> None:
    """So that a key can be changed: both count until the old line is taken out."""
    file = tmp_path / "keys"
    file.write_text(f"# no end of line\nalice {HASH} concurrency=2")
    key = command.add_key(file, "alice", KeyLimits())

    found = ApiKeys(str(file)).verified(f"Bearer {key}")
    assert found is not None
    assert found.limits == KeyLimits(concurrency=2)
    with pytest.raises(UnusableFile, match="alice with other limits"):
        command.add_key(file, "alice", KeyLimits(concurrency=3))


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["a b"], 2, "is not a name"),
        (["a", "--concurrency", "0"], 2, "is not a whole number from 1 up"),
        (["a", "--file", "/nowhere/keys"], 1, "No such file"),
        (["a", "--file", "/dev/null"], 1, "it is no regular file"),
    ],
)
def test_what_the_command_cannot_do_is_a_sentence(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, says: str
) -> None:
    """And no key is printed."""
    with pytest.raises(SystemExit) as ended:
        keys_main(["api", *arguments])
    out, error = capsys.readouterr()
    assert not out
    assert says in (error or str(ended.value.code))
    assert ended.value.code == code or code == 1
