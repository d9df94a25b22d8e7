"""``python -m tokenwire.frontend``."""

from .app import main

main()
