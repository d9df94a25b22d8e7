"""``tokenwire-healthy``: the health check of a container, where there is no curl."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from http.client import HTTPConnection, HTTPException
from urllib.parse import urlsplit

__all__ = ["main"]

TIMEOUT_S = 4.0
"""Below that of the checks in Dockerfile and compose.yaml, 5 s, so that it says why."""

OK = range(200, 300)


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask the URL on the command line; return 0 if all is well there, else 1."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if len(given) != 1 or not given[0].startswith("http://"):
        print("usage: tokenwire-healthy http://HOST:PORT/PATH", file=sys.stderr)
        return 2
    url = urlsplit(given[0])
    connection = HTTPConnection(url.netloc, timeout=TIMEOUT_S)
    try:
        connection.request("GET", url.path or "/")
        answer = connection.getresponse()
        text = answer.read(500).decode(errors="replace").strip()
    except (OSError, HTTPException) as error:
        print(f"{given[0]}: {error}", file=sys.stderr)
        return 1
    finally:
        connection.close()
    print(f"{answer.status} {text}")
    return 0 if answer.status in OK else 1


if __name__ == "__main__":
    sys.exit(main())
