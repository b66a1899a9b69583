"""Print one JSON line about a finished test run: tests/closing_line.py JUNIT_XML."""

import json
import os
import platform
import subprocess
import sys
import xml.etree.ElementTree as ElementTree


def closing_line(xml: str, commit: str) -> dict[str, object]:
    """Return the summary of a JUnit report: counts, times, machine and commit."""
    suites = list(ElementTree.fromstring(xml).iter("testsuite"))

    def total(key: str) -> int:
        return sum(int(suite.get(key, 0)) for suite in suites)

    failed = total("failures")
    errors = total("errors")
    skipped = total("skipped")
    seconds = sum(float(suite.get("time", 0)) for suite in suites)
    return {
        "run": "test-all",
        "passed": total("tests") - failed - errors - skipped,
        "failed": failed,
        "errors": errors,
        "skipped": skipped,
        "seconds": round(seconds, 1),
        "started": min((suite.get("timestamp", "") for suite in suites), default=""),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "commit": commit,
    }


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
