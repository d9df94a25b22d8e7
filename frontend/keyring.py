"""With which keys a frontend goes to a worker, or why it does not go at all."""

from __future__ import annotations

from dataclasses import dataclass

from tokenwire.protocol.errors import Incompatible
from tokenwire.protocol.keys import Key, KeyFiles, KeyList, read_secret_key, stays_here

__all__ = ["LOOPBACK_ONLY", "Curve", "Keyring"]


@dataclass(slots=True, frozen=True)
class Curve:
    """The keys of one connection, in Z85."""

    secret_key: str  # this frontend's
    worker_key: str  # the worker must prove that it has the secret to this one


class Keyring:
    """This frontend's secret key and the public keys of its workers.

    Without keys it goes to workers on this machine alone, unless told otherwise.
    """

    def __init__(
        self,
        secret_key: str = "",
        worker_keys: KeyList | None = None,
        *,
        insecure_plaintext: bool = False,
    ) -> None:
        self._secret_key = secret_key
        self._worker_keys = worker_keys
        self._insecure_plaintext = insecure_plaintext

    @classmethod
    def read(cls, files: KeyFiles) -> Keyring:
        """Return the keyring in *files*.

        Raises:
            UnusableFile: One of them cannot be used.
        """
        if files.is_plaintext:
            return cls(insecure_plaintext=files.insecure_plaintext)
        return cls(read_secret_key(files.secret_key), KeyList(files.peer_keys))

    def curve_for(self, endpoint: str, turn: int) -> Curve | None:
        """Return the keys for a connection to *endpoint*; None: in plain text.

        Args:
            endpoint: The worker's.
            turn: How many attempts have failed. While the workers' key is being changed
                two may be right: they are tried in turn.

        Raises:
            Incompatible: There must be no connection; one sentence why.
        """
        if self._worker_keys is None:
            if self._insecure_plaintext or stays_here(endpoint):
                return None
            msg = (
                "plain text goes to workers on this machine alone: give "
                "--curve-secret-key and --curve-worker-keys, or --insecure-plaintext"
            )
            raise Incompatible(msg)
        self._worker_keys.refresh()
        keys = _keys_of(endpoint, self._worker_keys.keys)
        if not keys:
            msg = f"{self._worker_keys.path} has no key for this worker"
            raise Incompatible(msg)
        return Curve(self._secret_key, keys[turn % len(keys)])


def _keys_of(endpoint: str, keys: tuple[Key, ...]) -> list[str]:
    """Return the keys that name *endpoint*, else those that name none."""
    named = [key.z85 for key in keys if key.note.split(" ")[0] == endpoint]
    return named or [key.z85 for key in keys if "://" not in key.note.split(" ")[0]]


LOOPBACK_ONLY = Keyring()
"""Of a frontend that has no keys."""
