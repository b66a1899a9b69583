"""Prints one JSON line about a finished run: python tests/closing_line.py JUNIT_XML."""

import json
import os
import platform
import subprocess
import sys
import xml.etree.ElementTree as ElementTree


def closing_line(xml: str, commit: str) -> dict[str, object]:
    """Counts of a JUnit report, with when, where and of what."""
    root = ElementTree.fromstring(xml)
    suites = list(root.iter("testsuite"))
    total, failed, errors, skipped = (
        sum(int(suite.get(key, 0)) for suite in suites)
        for key in ("tests", "failures", "errors", "skipped")
    )
    return {
        "run": "test-all", "passed": total - failed - errors - skipped, "failed": failed,
        "errors": errors, "skipped": skipped,
        "seconds": round(sum(float(suite.get("time", 0)) for suite in suites), 1),
        "started": min((suite.get("timestamp", "") for suite in suites), default=""),
        "python": platform.python_version(), "cores": os.cpu_count(), "commit": commit,
    }  # fmt: skip


def main() -> None:
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    with open(sys.argv[1], encoding="utf-8") as file:
        print(json.dumps(closing_line(file.read(), commit or "unknown")))


if __name__ == "__main__":
    main()
