#!/usr/bin/env python3
"""Checks that the version, the changelog and a tag agree.

usage: check_release.py [TAG]

The newest release in CHANGELOG.md must have the version of protocol/version.py and a
date. A tag must consist of "v" and this version. With a tag, the section [Unreleased]
of CHANGELOG.md must be empty.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_SECTION = re.compile(r"^## \[([^]]+)\](?: - (\d{4}-\d\d-\d\d))?$", re.MULTILINE)


def problems(version_file: str, changelog: str, tag: str | None = None) -> list[str]:
    """Returns the disagreements between version, changelog and tag, one line each.

    Args:
        version_file: The text of protocol/version.py.
        changelog: The text of CHANGELOG.md.
        tag: The name of the release's tag; None: the release has no tag yet.
    """
    match = re.search(r'^VERSION = "(\d+\.\d+\.\d+)"$', version_file, re.MULTILINE)
    if match is None:
        return ["protocol/version.py: VERSION is not of the form X.Y.Z"]
    version = match[1]
    sections = list(_SECTION.finditer(changelog))
    if len(sections) < 2 or sections[0][1] != "Unreleased":
        return ["CHANGELOG.md: it must begin with [Unreleased] and a release"]
    lines = []
    newest, date = sections[1].groups()
    if newest != version:
        lines.append(
            f"CHANGELOG.md: the newest release is {newest}, but VERSION is {version}"
        )
    if date is None:
        lines.append(f"CHANGELOG.md: [{newest}] has no date")
    if tag is None:
        return lines
    if tag != f"v{version}":
        lines.append(f"the tag is {tag}, but VERSION is {version}: use v{version}")
    if changelog[sections[0].end() : sections[1].start()].strip():
        lines.append("CHANGELOG.md: [Unreleased] has entries; move them to the release")
    return lines


def main(argv: list[str]) -> int:
    """Prints all disagreements. Returns the exit status."""
    lines = problems(
        version_file=(ROOT / "protocol" / "version.py").read_text(),
        changelog=(ROOT / "CHANGELOG.md").read_text(),
        tag=argv[0] if argv else None,
    )
    for line in lines:
        print(line, file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
