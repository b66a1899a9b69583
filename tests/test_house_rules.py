"""Sizes, and what no line says: the house rules that a machine can read, beside ruff's own."""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_FOLDER_FILES = 15
REQUIRED_FOLDERS = {
    "prefill_server", "decode_server", "proxy", "kvcache", "attention", "deploy", "tests",
}  # fmt: skip
OTHER_FOLDERS = {"protocol", "model", "engine", "benchmarks", "docs"}
# What no line says, and in which files; parts are set apart, or they would match themselves.
FORBIDDEN = {
    "a path of the machine it was written on": (
        "",
        r"(?<![\w.~$}-])/(?:" + "work|" + "root)/",
    ),
    "an error of any kind that nobody hears of": (
        r"\.py$",
        r"suppress\((Base)" + r"?Exception\b",
    ),
    "a logger whose lines below a warning nobody sees, for want of get_logger(__name__)": (
        r"^(?!tests/|protocol/process/logging).*\.py$",
        "logging.get" + r"Logger\((?!\"baton\.)",
    ),
}


def tracked_files() -> list[Path]:
    """What belongs to the project: git's list, or every file where there is no repository."""
    if (ROOT / ".git").exists():
        listed = subprocess.run(
            ["git", "ls-files", "-z"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    else:
        paths = [
            p
            for p in ROOT.rglob("*")
            if not any(part[0] == "." for part in p.parts[1:])
        ]
    return sorted(path for path in paths if path.is_file())


def python_files() -> list[Path]:
    return [path for path in tracked_files() if path.suffix == ".py"]


def is_test(path: Path) -> bool:
    return path.relative_to(ROOT).parts[0] == "tests"


def short(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def long_functions(source: str) -> Iterator[tuple[int, str, int]]:
    """(line, name, lines) of the functions that are too long."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                yield node.lineno, node.name, lines


def forbidden(rule: str, text: str) -> list[int]:
    """Numbers of lines."""
    found = re.compile(FORBIDDEN[rule][1]).search
    return [number for number, line in enumerate(text.splitlines(), 1) if found(line)]


def test_the_top_level_is_fixed() -> None:
    folders = {
        parts[0]
        for path in tracked_files()
        if len(parts := path.relative_to(ROOT).parts) > 1
        and not parts[0].startswith(".")
    }
    assert folders - REQUIRED_FOLDERS <= OTHER_FOLDERS
    assert folders >= REQUIRED_FOLDERS


def test_no_file_is_too_long() -> None:
    sizes = {short(path): len(path.read_text().splitlines()) for path in python_files()}
    assert sizes, "no Python files found"
    assert {name: n for name, n in sizes.items() if n > MAX_FILE_LINES} == {}


def test_no_folder_has_too_many_files() -> None:
    files = Counter(
        short(path.parent)
        for path in python_files()
        if not is_test(path) and path.name != "__init__.py"
    )
    crowded = {name: n for name, n in files.items() if n > MAX_FOLDER_FILES}
    assert not crowded


def test_no_function_is_too_long() -> None:
    found = [
        f"{short(path)}:{line} {name} has {lines} lines"
        for path in python_files()
        if not is_test(path)
        for line, name, lines in long_functions(path.read_text())
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("rule", FORBIDDEN)
def test_no_line_says_what_none_may(rule: str) -> None:
    found = []
    for path in tracked_files():
        if re.search(FORBIDDEN[rule][0], short(path)):
            with suppress(UnicodeDecodeError):  # a picture or an archive
                found += [
                    f"{short(path)}:{line}"
                    for line in forbidden(rule, path.read_text())
                ]
    assert not found, f"{rule}:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("rule", "text", "lines"),
    [
        ("path", 'fine\ncd {}work/x; open("{}root/models")', [2]),
        ("path", ".{}work/x home{}root/x https://host{}work/x", []),
        (
            "error",
            "with contextlib.suppress({}Exception):\nwith suppress(Base{}Exception):",
            [1, 2],
        ),
        ("error", "with suppress({}FileNotFoundError):", []),
        ("logger", "x = logging.get{}Logger(__name__)", [1]),
        ("logger", 'logging.get{}Logger("baton.x")', []),
    ],
)
def test_what_none_may_say_is_seen(rule: str, text: str, lines: list[int]) -> None:
    (name,) = (each for each in FORBIDDEN if rule in each.partition(":")[0])
    text = text.replace("{}", "/" if rule == "path" else "")
    assert forbidden(name, text) == lines


def test_the_length_check_counts_a_whole_function() -> None:
    body = "\n".join("    pass" for _ in range(MAX_FUNCTION_LINES - 1))
    assert not list(long_functions(f"def f():\n{body}"))
    assert list(long_functions(f"async def f():\n{body}\n    pass"))


def test_an_expression_that_selects_nothing_is_told_of_by_processes_that_share_the_tests():
    run = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-n",
        "1",
        "-m",
        "slowly",
    ]
    told = subprocess.run(
        [*run, __file__], cwd=ROOT, capture_output=True, text=True
    ).stdout
    assert "expression: slowly" in told and "INTERNALERROR" not in told
