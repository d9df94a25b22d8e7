"""``python -m tokenwire.worker``: the command ``tokenwire-worker``."""

import sys

from .app import main

if __name__ == "__main__":
    sys.exit(main())
