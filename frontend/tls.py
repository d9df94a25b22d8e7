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
from functools import partial

import msgspec

from tokenwire.protocol.files import UnusableFile
from tokenwire.protocol.watched import LOOK_S, Watched

__all__ = ["Tls", "TlsFiles", "warn_of_readers"]

_log = logging.getLogger(__name__)


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
            UnusableFile: One of them cannot be used.
        """
        self._cert = files.cert
        paths = [path for path in (files.cert, files.key, files.client_ca) if path]
        self._files = Watched("TLS file", paths, partial(_context, files))
        self._context = self._files.read()

    def context(self) -> ssl.SSLContext:
        """Return what a new connection is opened with."""
        self.refresh(LOOK_S)
        return self._context

    def refresh(self, every_s: float = 0.0) -> None:
        """Read the files again if one has changed; see ``Watched.changed``.

        A certificate and its key may be replaced one after the other.
        """
        context = self._files.changed(every_s)
        if context is not None:
            self._context = context
            _log.info("%s has been read again", self._cert)


def warn_of_readers(files: TlsFiles) -> None:
    """Say that the key can be read by all: once, however many listeners have it."""
    if os.stat(files.key).st_mode & stat.S_IROTH:
        _log.warning("%s can be read by every user: chmod o-r it", files.key)


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
        raise UnusableFile(msg) from error
    if files.client_ca is not None:
        try:
            context.load_verify_locations(files.client_ca)
        except OSError as error:
            msg = f"TLS: {files.client_ca} has no certificates of authorities: {error}"
            raise UnusableFile(msg) from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context
