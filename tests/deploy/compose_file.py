"""Compose files as compose itself reads them, as far as ours go."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml


def interpolated(text: str, variables: Mapping[str, str]) -> str:
    """Compose's ${NAME:-default} and ${NAME:?reason}."""

    def value(match: re.Match[str]) -> str:
        name, kind, rest = match.groups()
        if variables.get(name):
            return variables[name]
        assert kind == "-", f"{name}: {rest}"
        return rest

    return re.sub(r"\$\{(\w+):([-?])([^}]*)\}", value, text)


def compose(file: Path, **variables: str) -> dict[str, Any]:
    content = yaml.safe_load(interpolated(file.read_text(), variables))
    assert isinstance(content, dict)
    return content
