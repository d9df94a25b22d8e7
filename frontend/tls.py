"""TLS of the HTTP listeners, with certificates that are read again when they change.

Each connection is opened with what the files hold then: connections that are there keep
what they have. Sessions cannot be taken up again under another set of files, so that a
client certificate is asked for anew when the list of its authorities has changed.
"""

from __future__ import annotations

import logging
import os
import ssl
import stat
import time

import msgspec

from tokenwire.protocol.keys import KeyFileError, file_version

__all__ = ["Tls", "TlsFiles"]

_log = logging.getLogger(__name__)

LOOK_S = 1.0
"""How often the files are looked at, while connections come: three system calls."""


class TlsFiles(msgspec.Struct, frozen=True):
    """What the operator has set, as PEM."""

    cert: str  # the server's, with those between it and its authority behind it
    key: str
    client_ca: str | None = None  # whose certificates clients must have; None: no need


class Tls:
    """The contexts of one listener's connections."""

    def __init__(self, files: TlsFiles) -> None:
        """Read *files*.

        Raises:
            KeyFileError: One of them cannot be used.
        """
        self._files = files
        self._complaint = ""
        self._looked_at = time.monotonic()
        self._seen = _versions(files)
        self._context = _context(files)
        if os.stat(files.key).st_mode & stat.S_IROTH:
            _log.warning("%s can be read by every user: chmod o-r it", files.key)

    def context(self) -> ssl.SSLContext:
        """Return what a new connection is opened with."""
        now = time.monotonic()
        if now - self._looked_at >= LOOK_S:
            self._looked_at = now
            self.refresh()
        return self._context

    def refresh(self) -> None:
        """Read the files again if one has changed; what cannot be used changes nothing.

        A certificate and its key may be replaced one after the other.
        """
        try:
            versions = _versions(self._files)
            if versions == self._seen:
                return
            context = _context(self._files)
        except KeyFileError as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                _log.error("%s; the certificate read before stays in use", error)
            return
        self._seen, self._complaint = versions, ""
        self._context = context
        _log.info("%s has been read again", self._files.cert)


def _versions(files: TlsFiles) -> list[tuple[int, int, int]]:
    versions: list[tuple[int, int, int]] = []
    for path in filter(None, (files.cert, files.key, files.client_ca)):
        try:
            versions.append(file_version(path))
        except OSError as error:
            msg = f"TLS: {path}: {error.strerror or error}"
            raise KeyFileError(msg) from error
    return versions


def _context(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION  # of TLS 1.2: work that clients ask for
    context.set_alpn_protocols(["http/1.1"])
    try:
        # A key with a password would be asked for at the terminal.
        context.load_cert_chain(files.cert, files.key, password=lambda: "")
    except (OSError, ValueError) as error:
        msg = f"TLS: {files.cert} and {files.key} are no certificate with its key: {error}"
        raise KeyFileError(msg) from error
    if files.client_ca is not None:
        try:
            context.load_verify_locations(files.client_ca)
        except OSError as error:
            msg = f"TLS: {files.client_ca} has no certificates of authorities: {error}"
            raise KeyFileError(msg) from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context
