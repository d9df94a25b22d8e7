"""Keys that sign checkpoints: whose a checkpoint is, and that nobody has altered it.

A line of the key file is a key in hexadecimal or base64; one that begins with ``#`` is a
comment. The first key signs, all are believed: to change keys, add the new one as the
second everywhere, then make it the first everywhere, then drop the old one. The file is
read again when it has changed.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import logging
from functools import partial

import msgspec

from tokenwire.protocol.files import UnusableFile, read_file
from tokenwire.protocol.keys import key_lines
from tokenwire.protocol.watched import Watched

from .checkpoint import Checkpoint, Integrity, canonical_json
from .resume_errors import checkpoint_forbidden

__all__ = ["ResumeKeys"]

_log = logging.getLogger(__name__)

_KIND = "resume key file"

MIN_KEY_BYTES = 16
"""Shorter ones can be guessed. 32, as many as the hash has, are as good as any number."""

MAX_KEYS = 2
"""The one in use, and the one before or after it."""

MAX_FILE_BYTES = 4_096
"""Of a key file; what is longer is another file."""

KEY_ID_CHARS = 16
"""Of the hash of a key: enough to tell two apart, and nothing of the key."""


class _Key:
    """One key, and its name in checkpoints."""

    __slots__ = ("_secret", "key_id")

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        named = hashlib.sha256(b"key id\0" + secret).hexdigest()
        self.key_id = named[:KEY_ID_CHARS]

    def tenant(self, authorization: str | None) -> str | None:
        """Return who a request is of; None: it has no API key.

        Keyed, so that a checkpoint is no help in guessing an API key.
        """
        if authorization is None:
            return None
        data = b"tenant\0" + authorization.encode(errors="surrogateescape")
        return hmac.digest(self._secret, data, "sha256").hex()

    def mac(self, checkpoint: Checkpoint, integrity: Integrity) -> str:
        """Return the signature of a checkpoint with *integrity*, whatever its ``mac``."""
        empty = msgspec.structs.replace(integrity, mac="")
        data = canonical_json(msgspec.structs.replace(checkpoint, integrity=empty))
        return hmac.digest(self._secret, data, "sha256").hex()


class ResumeKeys:
    """The operator's keys; without any, checkpoints are not signed, and all are believed."""

    def __init__(self, path: str | None = None) -> None:
        """Read *path*, if there is one.

        Raises:
            UnusableFile: It cannot be read, or by everyone, or holds something else.
        """
        self._path = path
        self._file: Watched[dict[str, _Key]] | None = None
        self._keys: dict[str, _Key] = {}
        if path is not None:
            self._file = Watched(_KIND, [path], partial(_read, path))
            self._keys = self._file.read()

    @property
    def key_ids(self) -> list[str]:
        """The keys' names; the first signs."""
        return list(self._keys)

    def refresh(self) -> None:
        """Read the file again if it has changed.

        One that cannot be used any more changes nothing: what was read before counts.
        """
        keys = None if self._file is None else self._file.changed()
        if keys is not None:
            self._keys = keys
            _log.info("%s has changed: %s signs", self._path, self.key_ids[0])

    def signed(self, checkpoint: Checkpoint, authorization: str | None) -> Checkpoint:
        """Return *checkpoint*, signed for the client with this header, if there is a key."""
        if not self._keys:
            return checkpoint
        key = next(iter(self._keys.values()))
        integrity = Integrity(key_id=key.key_id, tenant=key.tenant(authorization))
        mac = key.mac(checkpoint, integrity)
        return msgspec.structs.replace(
            checkpoint, integrity=msgspec.structs.replace(integrity, mac=mac)
        )

    def check(
        self, checkpoint: Checkpoint, authorization: str | None, now: float
    ) -> None:
        """Refuse a checkpoint that is not this client's, or not as it was signed.

        Args:
            checkpoint: A client's.
            authorization: The header of its request.
            now: Unix seconds.

        Raises:
            ApiError: 403.
        """
        integrity = checkpoint.integrity
        if integrity is None:
            if self._keys:
                msg = "the checkpoint is not signed"
                raise checkpoint_forbidden(msg)
        else:
            key = self._keys.get(integrity.key_id)
            if key is None:
                msg = f"the checkpoint's key, {integrity.key_id!r:.40}, is none of ours"
                raise checkpoint_forbidden(msg)
            if not hmac.compare_digest(integrity.mac, key.mac(checkpoint, integrity)):
                msg = "the checkpoint is not as it was signed"
                raise checkpoint_forbidden(msg)
            tenant = key.tenant(authorization) or ""
            if not hmac.compare_digest(integrity.tenant or "", tenant):
                msg = "the checkpoint is of another API key"
                raise checkpoint_forbidden(msg)
        if checkpoint.identity.expires <= now:
            msg = "the checkpoint has expired"
            raise checkpoint_forbidden(msg)


def _read(path: str) -> dict[str, _Key]:
    data = read_file(_KIND, path, MAX_FILE_BYTES, denied="rwx")
    keys: dict[str, _Key] = {}
    for number, text in key_lines(data):
        secret = _secret(text)
        if secret is None:
            # Without the line itself: it may be a key with a typing error.
            msg = (
                f"line {number} of {path} is no key of {MIN_KEY_BYTES} bytes or more in "
                "hexadecimal or base64"
            )
            raise UnusableFile(msg)
        key = _Key(secret)
        keys[key.key_id] = key
    if not 1 <= len(keys) <= MAX_KEYS:
        msg = f"{path} holds {len(keys)} keys; one signs, and one more may be believed"
        raise UnusableFile(msg)
    return keys


def _secret(text: str) -> bytes | None:
    """Return the bytes of a key; None if this is none."""
    for decode in (bytes.fromhex, _base64):
        try:
            secret = decode(text)
        except (ValueError, binascii.Error):
            continue
        return secret if len(secret) >= MIN_KEY_BYTES else None
    return None


def _base64(text: str) -> bytes:
    plain = text.replace("-", "+").replace("_", "/")  # of the alphabet for URLs
    return base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
