"""Print one line that counts the tests of all given JUnit files."""

from __future__ import annotations

import sys
from xml.etree import ElementTree


def main(paths: list[str]) -> int:
    """Print the line; return 1 when there was a failure or no test at all."""
    counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for path in paths:
        for suite in ElementTree.parse(path).iter("testsuite"):
            for name in counts:
                counts[name] += int(suite.get(name, 0))
    failed = counts["failures"] + counts["errors"]
    passed = counts["tests"] - failed - counts["skipped"]
    print(f"{passed} passed, {failed} failed, {counts['skipped']} skipped")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
