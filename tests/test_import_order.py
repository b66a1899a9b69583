"""The import order of packages, read from the source.

protocol < kvcache < attention < model < engine < {prefill_server, decode_server}; proxy
imports protocol only. deploy and benchmarks may import all, and nothing else imports
them. Lazy imports and those under TYPE_CHECKING count too.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]

# Each package may import those before it.
ORDER = ("protocol", "kvcache", "attention", "model", "engine")
MAY_IMPORT = {name: set(ORDER[:index]) for index, name in enumerate(ORDER)}
SERVERS = ("prefill_server", "decode_server")
MAY_IMPORT |= {name: set(ORDER) for name in SERVERS} | {"proxy": {"protocol"}}
LAUNCHERS = ("baton_pd", "deploy", "benchmarks")
PACKAGES = (*MAY_IMPORT, *LAUNCHERS)

# Only these files may import these packages. All other files use the interface of these
# files.
WRAPPED = {
    "nixl": ("kvcache/transfer/nixl_agent.py",),
    "flashinfer": ("attention/flashinfer*.py",),
}

# Modules that must not import the packages in HEAVY. The processes that consist of
# these modules must start in a fraction of a second and use little memory.
TORCH_FREE = (
    "protocol/**/*.py",
    "proxy/*.py",
    "kvcache/layout.py",
    "kvcache/blocks.py",
    "kvcache/prefix.py",
    "engine/http/*.py",
    "engine/process/client.py",
    "engine/text/tokenizer.py",
    "engine/process/launch.py",
    "engine/http/legs/*.py",
    "prefill_server/__main__.py",
    "decode_server/__main__.py",
)
HEAVY = ("torch", "transformers")

MAX_PROJECT_IMPORTS = 15


class Import(NamedTuple):
    """One imported name.

    Attributes:
        path: the importing file, relative to the repository.
        module: the dotted name that is imported.
    """

    path: str
    line: int
    module: str

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]

    def __str__(self) -> str:
        return f"{self.path}:{self.line} imports {self.module}"


def sources() -> list[Path]:
    return sorted(
        path for package in PACKAGES for path in (ROOT / package).rglob("*.py")
    )


def imported_names(node: ast.AST, package: list[str]) -> list[str]:
    """Return the dotted names that a statement or call imports.

    For a `from` import, these include the imported members, such as `package.member`.
    """
    match node:
        case ast.Import(names=names):
            return [alias.name for alias in names]
        case ast.ImportFrom(module=module, names=names, level=level):
            base = package[: len(package) - level + 1] if level else []
            start = ".".join([*base, *([module] if module else [])])
            return [start, *(f"{start}.{alias.name}" for alias in names)]
        case ast.Call(func=func, args=[ast.Constant(value=str(name)), *_]):
            called = (
                func.attr
                if isinstance(func, ast.Attribute)
                else getattr(func, "id", None)
            )
            return [name] if called in ("import_module", "__import__") else []
    return []


def imports_in(source: str, path: str) -> Iterator[Import]:
    package = list(Path(path).parent.parts)
    for node in ast.walk(ast.parse(source)):
        for name in imported_names(node, package):
            yield Import(path, getattr(node, "lineno", 0), name)


@cache
def all_imports() -> list[Import]:
    return [
        imported
        for path in sources()
        for imported in imports_in(path.read_text(), path.relative_to(ROOT).as_posix())
    ]


def order_violations(imports: list[Import]) -> list[Import]:
    return [
        imported
        for imported in imports
        if (importer := imported.path.partition("/")[0]) in MAY_IMPORT
        and imported.top in PACKAGES
        and imported.top not in MAY_IMPORT[importer] | {importer}
    ]


def wrapper_violations(imports: list[Import]) -> list[Import]:
    return [
        imported
        for imported in imports
        for wrapped, owners in WRAPPED.items()
        if (imported.top == wrapped or imported.top.startswith(wrapped + "_"))
        and not any(fnmatch(imported.path, owner) for owner in owners)
    ]


def module_graph(imports: list[Import], modules: set[str]) -> dict[str, set[str]]:
    """Return, for each of `modules`, those of `modules` that it imports."""
    graph: dict[str, set[str]] = {module: set() for module in modules}
    for imported in imports:
        importer = (
            imported.path.removesuffix(".py")
            .removesuffix("/__init__")
            .replace("/", ".")
        )
        if imported.module in modules and imported.module != importer:
            graph[importer].add(imported.module)
    return graph


def project_graph() -> dict[str, set[str]]:
    paths = (path.relative_to(ROOT) for path in sources() if path.name != "__init__.py")
    modules = {path.as_posix().removesuffix(".py").replace("/", ".") for path in paths}
    return module_graph(all_imports(), modules)


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """Return the modules of one import cycle, or an empty list if there is none."""
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        return list(error.args[1])
    return []


def torch_free_files() -> list[str]:
    paths = {path for pattern in TORCH_FREE for path in ROOT.glob(pattern)}
    return sorted(path.relative_to(ROOT).as_posix() for path in paths)


def test_packages_import_only_what_lies_below_them():
    violations = order_violations(all_imports())
    assert not violations, "\n".join(map(str, violations))


def test_no_modules_import_each_other():
    assert cycle(project_graph()) == []


def test_no_module_imports_too_many_modules_of_the_project():
    graph = project_graph()
    counts = {name: len(imported) for name, imported in graph.items()}
    too_many = {name: n for name, n in counts.items() if n > MAX_PROJECT_IMPORTS}
    assert too_many == {}


def test_cycle_check_finds_lazy_imports():
    imports = [
        *imports_in("def f():\n    from engine import b", "engine/a.py"),
        *imports_in("import engine.a", "engine/b.py"),
    ]
    assert cycle(module_graph(imports, {"engine.a", "engine.b"}))
    assert not cycle(module_graph(imports[:2], {"engine.a", "engine.b"}))


def test_foreign_transports_and_kernels_are_imported_in_one_place():
    violations = wrapper_violations(all_imports())
    assert not violations, "\n".join(map(str, violations))


def test_light_processes_name_no_heavy_package_even_lazily():
    light = set(torch_free_files())
    heavy = [
        imported
        for imported in all_imports()
        if imported.path in light and imported.top in HEAVY
    ]
    assert not heavy, "\n".join(map(str, heavy))


def test_light_processes_load_no_heavy_package():
    modules = [
        path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        for path in torch_free_files()
    ]
    assert "protocol.handshake" in modules and "kvcache.layout" in modules
    script = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        f"    loaded = [heavy for heavy in {HEAVY!r} if heavy in sys.modules]\n"
        "    if loaded:\n"
        "        sys.exit(f'importing {name} loads {loaded}')\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr


@pytest.mark.parametrize(
    ("path", "source", "violated_check"),
    [
        ("protocol/a.py", "import kvcache.layout", "order"),
        ("kvcache/a.py", "from attention import base", "order"),
        (
            "kvcache/transfer/a.py",
            "def f():\n    from engine.core.core import Core",
            "order",
        ),
        ("model/a.py", "if TYPE_CHECKING:\n    import engine.core.core", "order"),
        ("proxy/a.py", "from kvcache.layout import KVLayout", "order"),
        ("engine/kv/a.py", "import prefill_server.server", "order"),
        ("engine/a.py", "importlib.import_module('deploy.local')", "order"),
        ("engine/a.py", "import benchmarks", "order"),
        ("kvcache/transfer/pulls/messages.py", "import nixl", "wrapper"),
        (
            "engine/worker/a.py",
            "def f():\n    from nixl._api import nixl_agent",
            "wrapper",
        ),
        ("attention/torch_backend.py", "import flashinfer", "wrapper"),
        ("attention/mla.py", "import nixl_cu12", "wrapper"),
        (
            "kvcache/pool.py",
            "from kvcache.layout import KVLayout\nimport protocol.handshake",
            "",
        ),
        (
            "kvcache/transfer/plan.py",
            "from . import topology\nfrom ..layout import KVLayout",
            "",
        ),
        ("kvcache/transfer/nixl_agent.py", "from nixl._api import nixl_agent", ""),
        (
            "kvcache/transfer/pulls/messages.py",
            "from kvcache.transfer import nixl_agent",
            "",
        ),
        ("attention/flashinfer_mla.py", "import flashinfer", ""),
        ("deploy/cli.py", "import proxy, engine.core.core, decode_server", ""),
    ],
)
def test_checks_find_every_kind_of_import(path, source, violated_check):
    imports = list(imports_in(source, path))
    assert imports and bool(order_violations(imports)) == (violated_check == "order")
    assert bool(wrapper_violations(imports)) == (violated_check == "wrapper")
