"""One version, however it is asked for."""

import tomllib
from pathlib import Path

from protocol.version import VERSION, system_fingerprint


def test_the_version_is_that_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["version"] == VERSION


def test_a_fingerprint_is_a_function_of_the_model() -> None:
    assert system_fingerprint("a") == system_fingerprint("a") != system_fingerprint("b")
