"""Version, changelog and tag agree."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = runpy.run_path(str(ROOT / ".ci" / "check_release.py"))
VERSION_FILE = 'VERSION = "1.2.3"\n'
RELEASED = "# Changelog\n\n## [Unreleased]\n\n## [1.2.3] - 2026-01-31\n\n- x\n"


def test_repository_is_consistent():
    assert SCRIPT["main"]([]) == 0


@pytest.mark.parametrize(
    ("version_file", "changelog", "tag", "message"),
    [
        (VERSION_FILE, RELEASED, None, None),
        (VERSION_FILE, RELEASED, "v1.2.3", None),
        (VERSION_FILE, RELEASED, "1.2.3", "the tag is 1.2.3"),
        (VERSION_FILE, RELEASED, "v1.2.4", "the tag is v1.2.4"),
        ('VERSION = "1.3"\n', RELEASED, None, "not of the form"),
        ('VERSION = "1.3.0"\n', RELEASED, None, "newest release is 1.2.3"),
        (VERSION_FILE, RELEASED.replace(" - 2026-01-31", ""), None, "has no date"),
        (VERSION_FILE, RELEASED.replace("Unreleased", "9.9.9"), None, "must begin"),
        (
            VERSION_FILE,
            RELEASED.replace("[Unreleased]\n", "[Unreleased]\n\n- new\n"),
            "v1.2.3",
            "has entries",
        ),
    ],
)
def test_each_contradiction_is_named(version_file, changelog, tag, message):
    lines = SCRIPT["problems"](version_file, changelog, tag)
    assert len(lines) == (0 if message is None else 1)
    assert message is None or message in lines[0]
