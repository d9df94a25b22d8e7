"""Certificates for tests, of authorities that last as long as a test."""

from __future__ import annotations

import ssl
from pathlib import Path

import trustme

__all__ = ["Certificates"]


class Certificates:
    """An authority, a server's files, and clients that believe it.

    Args:
        folder: Where the files are.
    """

    def __init__(self, folder: Path) -> None:
        self.cert = folder / "tls.crt"
        self.key = folder / "tls.key"
        self.client_ca = folder / "clients.crt"
        self.authority = trustme.CA()
        self.clients = trustme.CA()
        self.issue()
        self.trust(self.clients)

    def issue(self, authority: trustme.CA | None = None) -> None:
        """Give the server a new certificate; another *authority*'s, if there is one."""
        self.authority = authority or self.authority
        made = self.authority.issue_cert("127.0.0.1", "localhost")
        self.cert.write_bytes(b"".join(b.bytes() for b in made.cert_chain_pems))
        self.key.write_bytes(made.private_key_pem.bytes())
        self.key.chmod(0o600)

    def trust(self, clients: trustme.CA) -> None:
        """Let the server believe certificates of *clients*."""
        self.clients = clients
        self.client_ca.write_bytes(clients.cert_pem.bytes())

    @property
    def arguments(self) -> tuple[str, ...]:
        """What a frontend is told."""
        return "--tls-cert", str(self.cert), "--tls-key", str(self.key)

    @property
    def mutual(self) -> tuple[str, ...]:
        """The same, where clients need certificates."""
        return *self.arguments, "--tls-client-ca", str(self.client_ca)

    def client(self, issuer: trustme.CA | None = None) -> ssl.SSLContext:
        """Return a client's context, with a certificate of *issuer* or with none."""
        authority = self.authority.cert_pem.bytes().decode()
        context = ssl.create_default_context(cadata=authority)
        if issuer is not None:
            made = issuer.issue_cert("someone@example.org")
            with made.private_key_and_cert_chain_pem.tempfile() as file:
                context.load_cert_chain(file)
        return context
