"""Checks rules of CONTRIBUTING.md that ruff cannot check.

The rules are about sizes of files, functions and folders, names of variables, and
forbidden text.
"""

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
    "prefill_server",
    "decode_server",
    "proxy",
    "kvcache",
    "attention",
    "deploy",
    "tests",
}
OTHER_FOLDERS = set("protocol model engine benchmarks docs baton_pd examples".split())
# Text that no line may contain. Each description maps to two patterns: one for the
# names of the files to which the rule applies, and one for the forbidden text. The
# patterns for text are concatenated from parts, so that they do not match this file.
FORBIDDEN = {
    "a path of the machine that the line was written on": (
        "",
        r"(?<![\w.~$}-])/(?:" + "work|" + "root)/",
    ),
    "an error of any kind, silently suppressed": (
        r"\.py$",
        r"suppress\((Base)" + r"?Exception\b",
    ),
    "a logger that hides lines below a warning; use get_logger(__name__)": (
        r"^(?!tests/|protocol/process/logging).*\.py$",
        "logging.get" + r"Logger\((?!\"baton\.)",
    ),
}
# Variable names that do not describe their value. Better names are message,
# health_report, matched_blocks, max_tokens or min_run_seconds.
VAGUE_NAMES = frozenset(
    "told said asked ask found own most least known like kept alone beside gone heard "
    "wanted untold".split()
)


def tracked_files() -> list[Path]:
    """Return the files that git tracks, or all files if there is no repository."""
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
            path
            for path in ROOT.rglob("*")
            if not any(part[0] == "." for part in path.parts[1:])
        ]
    return sorted(path for path in paths if path.is_file())


def python_files() -> list[Path]:
    return [path for path in tracked_files() if path.suffix == ".py"]


def is_test(path: Path) -> bool:
    return path.relative_to(ROOT).parts[0] == "tests"


def short(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def long_functions(source: str) -> Iterator[tuple[int, str, int]]:
    """Yield (line, name, number of lines) of each function that is too long."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                yield node.lineno, node.name, lines


def forbidden(rule: str, text: str) -> list[int]:
    """Return the numbers of the lines that break a rule of FORBIDDEN."""
    pattern = re.compile(FORBIDDEN[rule][1])
    lines = enumerate(text.splitlines(), 1)
    return [number for number, line in lines if pattern.search(line)]


def vague_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of each definition of a vague name."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()):
                pass
            case ast.Attribute(attr=name, ctx=ast.Store()):
                pass
            case ast.arg(arg=name):
                pass
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                pass
            case _:
                continue
        if name.strip("_").lower() in VAGUE_NAMES:
            yield node.lineno, name


def multiplied_booleans(tree: ast.AST) -> Iterator[int]:
    """Yield the lines on which a list or string is multiplied by a boolean."""
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            sides = (node.left, node.right)
            if any(map(is_boolean, sides)) and any(map(is_sequence, sides)):
                yield node.lineno


def is_boolean(node: ast.expr) -> bool:
    """Return True if an expression is obviously boolean: a comparison, a logical
    operation, a boolean constant, or a name or call that begins with is_ or has_.
    """
    match node:
        case ast.Compare() | ast.BoolOp() | ast.UnaryOp(op=ast.Not()):
            return True
        case ast.Constant(value=value):
            return isinstance(value, bool)
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.lstrip("_").startswith(("is_", "has_"))
        case ast.Call(func=function):
            return is_boolean(function)
    return False


def is_sequence(node: ast.expr) -> bool:
    """Return True if an expression is a list, a tuple, or a string or bytes."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str | bytes)
    return isinstance(node, ast.List | ast.ListComp | ast.Tuple | ast.JoinedStr)


def test_top_level_folders_are_fixed() -> None:
    folders = set()
    for path in tracked_files():
        top, *rest = path.relative_to(ROOT).parts
        if rest and not top.startswith("."):
            folders.add(top)
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
    assert {name: n for name, n in files.items() if n > MAX_FOLDER_FILES} == {}


def test_no_function_is_too_long() -> None:
    violations = [
        f"{short(path)}:{line} {name} has {lines} lines"
        for path in python_files()
        if not is_test(path)
        for line, name, lines in long_functions(path.read_text())
    ]
    assert not violations, "\n".join(violations)


@pytest.mark.parametrize("rule", FORBIDDEN)
def test_no_line_contains_forbidden_text(rule: str) -> None:
    violations = []
    for path in tracked_files():
        if re.search(FORBIDDEN[rule][0], short(path)):
            with suppress(UnicodeDecodeError):  # skips pictures and archives
                lines = forbidden(rule, path.read_text())
                violations += [f"{short(path)}:{line}" for line in lines]
    assert not violations, f"{rule}:\n" + "\n".join(violations)


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
def test_check_of_forbidden_text_finds_it(
    rule: str, text: str, lines: list[int]
) -> None:
    (name,) = (name for name in FORBIDDEN if rule in name.partition(";")[0].split())
    text = text.replace("{}", "/" if rule == "path" else "")
    assert forbidden(name, text) == lines


def test_length_check_counts_a_whole_function() -> None:
    body = "\n".join("    pass" for _ in range(MAX_FUNCTION_LINES - 1))
    assert not list(long_functions(f"def f():\n{body}"))
    assert list(long_functions(f"async def f():\n{body}\n    pass"))


def test_no_name_is_vague() -> None:
    violations = [
        f"{short(path)}:{line} {name}"
        for path in python_files()
        for line, name in vague_names(ast.parse(path.read_text()))
    ]
    assert not violations, "name the value:\n" + "\n".join(violations)


def test_no_boolean_is_multiplied() -> None:
    violations = [
        f"{short(path)}:{line}"
        for path in python_files()
        for line in multiplied_booleans(ast.parse(path.read_text()))
    ]
    assert not violations, "use an if statement:\n" + "\n".join(violations)


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("told = 1", ["told"]),
        ("for found in items: pass", ["found"]),
        ("_most: int = 3", ["_most"]),
        ("def ask(known, *, own=1): pass", ["ask", "known", "own"]),
        ("self._kept = 1", ["_kept"]),
        ("if (said := f()): pass", ["said"]),
        ("async def wanted(): pass", ["wanted"]),
        ("message = told.text", []),
        ("num_found = least_loaded = known_servers = 0", []),
        ("def foundation(most_recent): pass", []),
    ],
)
def test_check_of_names_finds_vague_ones(source: str, names: list[str]) -> None:
    assert sorted(name for _, name in vague_names(ast.parse(source))) == sorted(names)


@pytest.mark.parametrize(
    ("source", "is_violation"),
    [
        ("x = [1] * (a == b)", True),
        ("x = not a * 'text'", False),
        ("x = (not a) * 'text'", True),
        ("x = ', fresh' * is_fresh", True),
        ("x = f'{a}' * self.has_text", True),
        ("x = [a, b] * request.is_final()", True),
        ("x = [1] * count", False),
        ("x = '-' * 20", False),
        ("x = 2 * is_fresh", False),
    ],
)
def test_check_of_booleans_finds_multiplied_ones(
    source: str, is_violation: bool
) -> None:
    assert bool(list(multiplied_booleans(ast.parse(source)))) == is_violation


def test_pytest_reports_a_marker_expression_that_selects_nothing() -> None:
    """Without the hook in tests/conftest.py, pytest-xdist would report an internal
    error.
    """
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "1"]
    command += ["-m", "slowly", __file__]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    assert "expression: slowly" in output
    assert "INTERNALERROR" not in output
