"""``tokenwire-keys``: makes the key pairs of secure links; ``api``: of clients, keys."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import zmq

from tokenwire.protocol.files import replace_file
from tokenwire.protocol.settings import SettingsParser

from . import api_keys

__all__ = ["main", "make_pair"]

SECRET_MODE = 0o600
PUBLIC_MODE = 0o644


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the pairs that the command line asks for, and print their public keys.

    Raises:
        SystemExit: 1 if a file is there already or cannot be written, 2 on a bad setting.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["api"]:
        api_keys.main(given[1:])
        return
    parser = SettingsParser(
        prog="tokenwire-keys",
        description="Make key pairs for secure links: NAME.secret stays with its owner, "
        "NAME.public goes into the lists of those it speaks to. Prints the public keys. "
        "`tokenwire-keys api NAME` makes the API key of a client.",
    )
    parser.add_argument(
        "names",
        nargs="+",
        metavar="NAME",
        help="path without the ending, such as /etc/tokenwire/frontend",
    )
    parser.add_argument(
        "--force", action="store_true", help="replace keys that are there already"
    )
    settings = parser.parse_settings(given)
    for name in settings.names:
        try:
            line = make_pair(Path(name), force=settings.force)
        except FileExistsError as error:
            sys.exit(
                f"tokenwire-keys: {error.filename} is there already; --force replaces "
                "it, and whoever has its public key must get the new one"
            )
        except OSError as error:
            sys.exit(f"tokenwire-keys: {error.filename}: {error.strerror}")
        print(line)


def make_pair(path: Path, *, force: bool = False) -> str:
    """Write ``PATH.secret`` and ``PATH.public``; return the line of the public one.

    Raises:
        FileExistsError: One of them is there, and not *force*.
        OSError: One of them cannot be written.
    """
    public_key, secret_key = (key.decode() for key in zmq.curve_keypair())
    secret = path.with_name(f"{path.name}.secret")
    public = path.with_name(f"{path.name}.public")
    line = f"{public_key} {path.name}"
    if not force:
        for one in (secret, public):
            if one.exists():
                raise FileExistsError(None, None, str(one))
    note = f"# The secret key of {line}\n"
    replace_file(secret, f"{note}{secret_key}\n".encode(), SECRET_MODE)
    replace_file(public, f"{line}\n".encode(), PUBLIC_MODE)
    return line


if __name__ == "__main__":
    main()
