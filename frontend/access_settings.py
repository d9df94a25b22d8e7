"""The settings of who may speak to a frontend, and of how long it may take."""

from __future__ import annotations

import argparse

import msgspec

from tokenwire.protocol.settings import (
    SettingsParser,
    host_and_port,
    seconds,
    whole_number,
)

from .connections import ConnectionLimits
from .cors import is_origin
from .hosts import is_allowed_host
from .tls import TlsFiles

__all__ = ["AccessSettings", "access_settings", "add_access_options"]

MIN_HEADER_BYTES = 1_024
"""A usual request has 300 to 800."""

_DEFAULT = ConnectionLimits()


class AccessSettings(msgspec.Struct, frozen=True):
    """Who may speak to a frontend."""

    api_keys: str | None = None  # a file; None: everyone may
    tls: TlsFiles | None = None  # None: plain text
    admin_tls: TlsFiles | None = None  # the same of the admin plane
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()  # of what listens on loopback without keys
    metrics_listen: tuple[str, int] | None = None
    limits: ConnectionLimits = ConnectionLimits()


def add_access_options(parser: SettingsParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add(
        "--api-keys",
        metavar="FILE",
        help="names and hashes of API keys, as `tokenwire-keys api` writes them: requests "
        "need one; watched for changes (default: no keys)",
    )
    add(
        "--tls-cert",
        metavar="FILE",
        help="certificate chain, PEM: HTTP is spoken over TLS, by the admin plane too; "
        "watched for changes",
    )
    add("--tls-key", metavar="FILE", help="its key, PEM")
    add(
        "--tls-client-ca",
        metavar="FILE",
        help="authorities, PEM: clients must have a certificate of one of them",
    )
    add(
        "--admin-tls-client-ca",
        metavar="FILE",
        help="the same for clients of the admin plane (default: --tls-client-ca)",
    )
    add(
        "--cors-origin",
        action="append",
        default=[],
        type=_origin,
        metavar="ORIGIN",
        help="pages of this origin may read answers in browsers; repeatable",
    )
    add(
        "--allowed-host",
        action="append",
        default=[],
        type=_allowed_host,
        metavar="NAME",
        help="a name that what listens on loopback without keys answers to, as a proxy on "
        "this machine may ask for it; *: any; repeatable (default: localhost, "
        "*.localhost, addresses)",
    )
    add(
        "--metrics-listen",
        type=host_and_port,
        metavar="HOST:PORT",
        help="serve /metrics, /live, /ready and /health there too, in plain text and "
        "without a key: for Prometheus and probes",
    )
    add(
        "--max-header-bytes",
        type=whole_number(MIN_HEADER_BYTES),
        default=_DEFAULT.max_header_bytes,
        metavar="N",
        help="of a request's line and headers together; more get 431 "
        "(default: %(default)s)",
    )
    add(
        "--client-header-timeout-s",
        type=seconds(),
        default=_DEFAULT.header_timeout_s,
        metavar="S",
        help="how long a new connection, or one whose request has begun, may take until "
        "its headers are there; TLS too (default: %(default)s)",
    )
    add(
        "--keep-alive-timeout-s",
        type=seconds(),
        default=_DEFAULT.keep_alive_timeout_s,
        metavar="S",
        help="how long a connection may wait for its next request (default: %(default)s)",
    )
    add(
        "--max-connections",
        type=whole_number(1),
        default=_DEFAULT.max_connections,
        metavar="N",
        help="connections at once; then those without a request are closed, and if all "
        "have one, new ones get 503 (default: %(default)s)",
    )
    add(
        "--max-connections-per-client",
        type=whole_number(0),
        default=_DEFAULT.max_per_client,
        metavar="N",
        help="the same for one address, of IPv6 one /64; 0: no bound, since a proxy is "
        "one (default: %(default)s)",
    )


def access_settings(
    parser: SettingsParser, given: argparse.Namespace
) -> AccessSettings:
    """Return what was given for ``add_access_options``.

    Raises:
        SystemExit: 2 after one sentence, if the options contradict each other.
    """
    if bool(given.tls_cert) != bool(given.tls_key):
        parser.error("give both --tls-cert and --tls-key, or neither")
    tls = admin_tls = None
    if given.tls_cert:
        tls = TlsFiles(given.tls_cert, given.tls_key, given.tls_client_ca or None)
        admin_ca = given.admin_tls_client_ca or tls.client_ca
        admin_tls = msgspec.structs.replace(tls, client_ca=admin_ca)
    elif given.tls_client_ca or given.admin_tls_client_ca:
        parser.error("certificates of clients need --tls-cert and --tls-key")
    return AccessSettings(
        api_keys=given.api_keys or None,
        tls=tls,
        admin_tls=admin_tls,
        cors_origins=tuple(given.cors_origin),
        allowed_hosts=tuple(given.allowed_host),
        metrics_listen=given.metrics_listen,
        limits=ConnectionLimits(
            max_header_bytes=given.max_header_bytes,
            header_timeout_s=given.client_header_timeout_s,
            keep_alive_timeout_s=given.keep_alive_timeout_s,
            max_connections=given.max_connections,
            max_per_client=given.max_connections_per_client,
            write_timeout_s=given.client_write_timeout_s,
        ),
    )


def _allowed_host(text: str) -> str:
    if not is_allowed_host(text):
        msg = f"{text!r} is not a name like box.example.com, without a port"
        raise argparse.ArgumentTypeError(msg)
    return text


def _origin(text: str) -> str:
    if not is_origin(text):
        msg = (
            f"{text!r} is not an origin like https://app.example.com, in small letters"
        )
        raise argparse.ArgumentTypeError(msg)
    return text
