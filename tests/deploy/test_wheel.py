"""The installed product: built, installed into an empty environment, and used.

A .pth file makes the libraries of the running environment importable in the new one. It
does not make this checkout importable.
"""

import os
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from zipfile import ZipFile

import pytest

from protocol.version import VERSION
from tests.make_models import ensure_model
from tests.rigs.decoys import make_decoys
from tests.rigs.plain_http import http
from tests.rigs.programs import TIMEOUT_S, environment, launched

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
NAME = "baton_pd"
BUILD = "from setuptools import build_meta; build_meta.build_sdist({!r})"
INSTALL_TIMEOUT_S = 300
PIP_OPTIONS = ("--no-deps", "--no-build-isolation")


def installed_environment() -> dict[str, str]:
    """Returns an environment in which no variable leads to this checkout."""
    variables = environment()
    del variables["PYTHONPATH"]
    return variables


def run(argv: Sequence[str | Path], cwd: Path, timeout_s: float = TIMEOUT_S) -> str:
    done = subprocess.run(
        argv,
        cwd=cwd,
        env=installed_environment(),
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pip(*argv: str | Path, cwd: Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *argv]
    run(command, cwd, INSTALL_TIMEOUT_S)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, so that nothing is built in it."""
    folder = tmp_path_factory.mktemp("source")
    listed = run(["git", "ls-files", "-z", "--cached", "--others"], ROOT)
    ignored = run(["git", "ls-files", "-z", "-o", "-i", "--exclude-standard"], ROOT)
    for name in set(listed.split("\0")) - set(ignored.split("\0")):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel that is built from the source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    run([sys.executable, "-P", "-c", BUILD.format(str(folder))], source)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(folder)
    unpacked = folder / f"{NAME}-{VERSION}"
    pip("wheel", *PIP_OPTIONS, "--wheel-dir", folder, unpacked, cwd=folder)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module", params=["wheel", "folder", "editable"])
def environment_folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """An environment in which Baton is installed in one of three ways."""
    folder = tmp_path_factory.mktemp("venv")
    run([sys.executable, "-m", "venv", "--without-pip", folder], folder)
    if request.param == "wheel":
        requirement = [request.getfixturevalue("wheel")]
    else:
        requirement = [request.getfixturevalue("source")]
        if request.param == "editable":
            requirement.insert(0, "--editable")
    libraries = sysconfig.get_path("purelib")
    (site_packages(folder) / "libraries.pth").write_text(libraries)
    names_before = top_level_names(folder)
    argv = ["--python", python(folder), "install", *PIP_OPTIONS, "-q", *requirement]
    pip(*argv, cwd=folder)
    names = top_level_names(folder) - names_before
    assert names == ({NAME} if request.param != "editable" else set())
    yield folder


def python(folder: Path) -> Path:
    return folder / "bin" / "python"


def site_packages(folder: Path) -> Path:
    (path,) = folder.glob("lib/python3.*/site-packages")
    return path


def top_level_names(folder: Path) -> set[str]:
    """Returns the names that programs in the environment can import."""
    return {
        path.stem
        for path in site_packages(folder).iterdir()
        if path.suffix not in (".dist-info", ".pth") and not path.name.startswith("__")
    }


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    make_decoys(folder)
    return folder


def test_wheel_adds_one_name_and_has_every_file_of_the_packages(wheel, source):
    with ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert {name.partition("/")[0] for name in names} == {NAME}
    folders = {name.split("/")[1] for name in names if name.count("/") > 1}
    assert folders >= {"protocol", "engine", "proxy", "deploy"}
    expected = {
        f"{NAME}/{path.relative_to(source).as_posix()}"
        for folder in folders
        for path in (source / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    expected |= {f"{NAME}/__init__.py", f"{NAME}/__main__.py"}
    assert names == expected


def test_answers_a_chat_from_a_hostile_folder(environment_folder, project):
    baton = environment_folder / "bin" / "baton"
    argv = [
        str(baton),
        "up",
        str(ensure_model("gqa")),
        "--port=0",
        "--served-model-name=m",
    ]
    argv += ["--prefill.tp=2", "--device=cpu"]
    with launched(argv, project, installed_environment()) as program:
        url = program.read_until("ready http").split()[1]
        message = {"role": "user", "content": "Tell a story."}
        body = {"model": "m", "messages": [message], "max_tokens": 5}
        answer = http.post(f"{url}v1/chat/completions", json=body, timeout=TIMEOUT_S)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 5
        assert "transferred=0" not in answer.headers["x-baton-kv"]
        page = http.get(url, timeout=TIMEOUT_S)
        assert "<title>" in page.text
        program.stop()


def test_commands_work_in_a_hostile_folder(environment_folder, project):
    baton = environment_folder / "bin" / "baton"
    module = (python(environment_folder), "-m", NAME)
    for command in ([baton], module):
        assert run([*command, "--version"], project) == f"baton {VERSION}\n"
        assert "common options" in run([*command, "up", "--help"], project)
    printed = run([baton, "files", "written"], project).split()
    assert "written/deploy/docker-compose.yml" in printed
    assert all((project / name).is_file() for name in printed)
    assert run([baton, "completion", "bash"], project).count("\n") > 100


def test_package_finds_the_folder_of_its_packages(environment_folder):
    code = f"import {NAME}, os; {NAME}.add_to_path(); import engine; print(engine)"
    printed = run([python(environment_folder), "-P", "-c", code], Path(os.sep))
    assert str(ROOT) not in printed
