"""All keys of a frontend, read when it starts: what is wrong with one stops it there."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from dataclasses import dataclass

from tokenwire.protocol.files import UnusableFile

from .admin_key import AdminKey
from .api_keys import ApiKeys
from .config import Config
from .keyring import Keyring
from .resume_keys import ResumeKeys
from .tls import Tls, warn_of_readers

__all__ = ["Keys"]


@dataclass(slots=True, frozen=True)
class Keys:
    """What is secret, or lists who may do what."""

    keyring: Keyring  # of the links to workers
    admin: AdminKey
    resume: ResumeKeys
    api: ApiKeys | None  # None: everyone may
    tls: Tls | None  # of the listener for clients; None: plain text
    admin_tls: Tls | None

    @classmethod
    def read(cls, config: Config) -> Keys:
        """Return the keys in the operator's files.

        Raises:
            UnusableFile: One of them cannot be used.
        """
        access = config.access
        with _of("--curve-secret-key or --curve-worker-keys"):
            keyring = Keyring.read(config.keys)
        with _of("--admin-key-file"):
            admin = AdminKey.read(config.admin.key_file)
        with _of("--resume-key-file"):
            resume = ResumeKeys(config.resume.key_file)
        with _of("--api-keys"):
            api = None if access.api_keys is None else ApiKeys(access.api_keys)
        with _of("--tls-cert, --tls-key or --tls-client-ca"):
            tls = None if access.tls is None else Tls(access.tls)
        admin_tls = tls  # the same, so that what is said of its files is said once
        if access.tls is not None:
            warn_of_readers(access.tls)
        with _of("--admin-tls-client-ca"):
            if access.admin_tls is not None and access.admin_tls != access.tls:
                admin_tls = Tls(access.admin_tls)
        return cls(keyring, admin, resume, api, tls, admin_tls)


@contextlib.contextmanager
def _of(options: str) -> Generator[None]:
    """Name the *options* of a file that cannot be used."""
    try:
        yield
    except UnusableFile as error:
        msg = f"{options}: {error}"
        raise UnusableFile(msg) from error
