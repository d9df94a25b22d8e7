"""One process of ``tokenwire-frontend --processes N``; its parent starts it.

Started by ``python -m tokenwire.frontend.child`` with the parent's own command line.
Standard input is the socket to the parent.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable

import msgspec

from tokenwire.protocol.logs import exits_as_lines

from .app import begin_log, run
from .config import parse_config
from .control import read_start
from .share import Share

__all__ = ["main", "watch_parent"]

_log = logging.getLogger("tokenwire.frontend")

GRACE_S = 10.0
"""From the parent's end to ours: streams are told in a second or two. Longer only takes a
process that downloads a model, or whose event loop stands still."""


def main() -> None:
    """Serve what the parent listens on, until it says otherwise or is gone."""
    try:
        control = socket.socket(fileno=os.dup(0))
    except OSError:
        sys.exit("tokenwire-frontend: --processes starts this, and nobody else can")
    start = read_start(control)
    if start is None:
        sys.exit("tokenwire-frontend: its parent is gone")
    watch_parent(control, lambda: os._exit(1))
    share = Share(start, control)
    config = msgspec.structs.replace(parse_config(), frontend_id=share.frontend_id)
    begin_log(config, share.process)
    with exits_as_lines(_log):
        run(config, share)


def watch_parent(
    control: socket.socket, end: Callable[[], None], grace_s: float = GRACE_S
) -> threading.Thread:
    """Call *end* when the other side of *control* has been gone for *grace_s*.

    For a process that does not come to its event loop, which ends it well. Nothing is
    read here: a thread sleeps until the kernel says that the other side is closed.
    """

    def watch() -> None:
        poll = select.poll()
        poll.register(control.fileno(), 0)  # a hang-up alone
        poll.poll()
        time.sleep(grace_s)
        end()

    thread = threading.Thread(target=watch, name="parent", daemon=True)
    thread.start()
    return thread


if __name__ == "__main__":
    main()
