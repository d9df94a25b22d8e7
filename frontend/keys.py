"""All keys of a frontend, read when it starts: what is wrong with one stops it there."""

from __future__ import annotations

from dataclasses import dataclass

from .admin_key import AdminKey
from .api_keys import ApiKeys
from .config import Config
from .keyring import Keyring
from .resume_keys import ResumeKeys
from .tls import Tls

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
        return cls(
            keyring=Keyring.read(config.keys),
            admin=AdminKey.read(config.admin.key_file),
            resume=ResumeKeys(config.resume.key_file),
            api=None if access.api_keys is None else ApiKeys(access.api_keys),
            tls=None if access.tls is None else Tls(access.tls),
            admin_tls=None if access.admin_tls is None else Tls(access.admin_tls),
        )
