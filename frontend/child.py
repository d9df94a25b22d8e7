"""One process of ``tokenwire-frontend --processes N``; its parent starts it.

Started by ``python -m tokenwire.frontend.child`` with the parent's own command line.
Standard input is the socket to the parent.
"""

from __future__ import annotations

import os
import socket
import sys

import msgspec

from .app import log_as, run
from .config import parse_config
from .control import read_start
from .share import Share

__all__ = ["main"]


def main() -> None:
    """Serve what the parent listens on, until it says otherwise or is gone."""
    try:
        control = socket.socket(fileno=os.dup(0))
    except OSError:
        sys.exit("tokenwire-frontend: --processes starts this, and nobody else can")
    start = read_start(control)
    if start is None:
        sys.exit("tokenwire-frontend: its parent is gone")
    share = Share(start, control)
    config = msgspec.structs.replace(parse_config(), frontend_id=share.frontend_id)
    log_as(config, f"process-{share.process} ")
    run(config, share)


if __name__ == "__main__":
    main()
