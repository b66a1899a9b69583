"""What README and docs name is there: options and files."""

import re
from pathlib import Path

import pytest

from deploy.doctor import DoctorSettings
from deploy.plan import PlanSettings
from protocol.settings import PROGRAMS
from protocol.settings_sources import field_paths, option_name

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
# A pattern; docker's; argparse's; pip's.
OTHERS = {"--kebab-case", "--profile", "--build", "--help", "--index-url"}
# docs/log.md keeps what was; the others name options of other programs.
OF_BATON = [
    path for path in DOCS if path.name not in ("log.md", "evaluation.md", "CONTRIBUTING.md")
]


@pytest.mark.parametrize("path", OF_BATON, ids=lambda path: path.name)
def test_every_option_that_a_text_names_is_one(path: Path) -> None:
    programs = (*PROGRAMS, PlanSettings, DoctorSettings)
    known = {option_name(fields) for program in programs for fields in field_paths(program)}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*(?:\.[a-z-]+)?", path.read_text()))
    named = {name.replace("--no-", "--") for name in named if not name.endswith("-")}
    assert named - known - OTHERS == set()


@pytest.mark.parametrize("path", [p for p in DOCS if p.name != "log.md"], ids=lambda p: p.name)
def test_every_file_that_a_text_names_exists(path: Path) -> None:
    text = path.read_text()
    named = set(re.findall(r"`((?:tests|docs|deploy|benchmarks)/[\w./-]+)`", text))
    linked = {str((path.parent / link).relative_to(ROOT)) for link in _links(text)}
    missing = {name for name in named | linked if not (ROOT / name).exists()}
    assert missing == set()


def _links(text: str) -> list[str]:
    return re.findall(r"\]\(([\w./-]+\.md)\)", text)
