"""The command `baton`."""

import subprocess
import sys
from pathlib import Path

import pytest

from deploy import cli
from deploy.chat.program import ChatSettings
from deploy.doctor import DoctorSettings
from deploy.files import FilesSettings
from deploy.models import ModelsSettings
from deploy.scale import ScaleSettings
from protocol.settings.settings import PROGRAMS, ServeSettings, load
from protocol.settings.sources import (
    TOOL_VARIABLES,
    ConfigError,
    field_paths,
    variable_name,
)
from protocol.version import VERSION

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("argv", "status", "output"),
    [
        *((["--help"], 0, f"\n  {name} ") for name in cli.COMMANDS),
        ([], 2, "usage"),
        (["prefil"], 2, "unknown command prefil (did you mean prefill"),
        (["--version"], 0, f"baton {VERSION}\n"),
    ],
)
def test_help_and_version_run_no_program(argv, status, output, capsys):
    assert cli.main(argv) == status
    assert output in "".join(capsys.readouterr())


def test_subcommand_gets_its_arguments_and_returns_the_status(monkeypatch):
    seen: list[str] = []
    monkeypatch.setattr("proxy.__main__.main", lambda argv: seen.extend(argv) or 7)
    assert cli.main(["proxy", "--port", "0"]) == 7
    assert seen == ["--port", "0"]


def test_slow_imports_happen_after_ctrl_c_is_handled():
    code = (
        "import sys, deploy.cli; assert not {'pydantic', 'asyncio'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("command", ["up", "proxy"])
def test_wrong_option_exits_with_2_and_is_named(command):
    argv = [sys.executable, "-m", "deploy.cli", command, "--prot", "1"]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert f"baton {command}: error: unrecognized arguments: --prot 1" in ended.stderr
    assert "did you mean --port" in ended.stderr


@pytest.mark.parametrize("command", ["up", "warm", "plan"])
@pytest.mark.parametrize(
    ("misspelt_option", "proposals"),
    [("--prefil.tp", "--prefill.tp"), ("--decode.tpp", "--decode.tp")],
)
def test_near_names_of_options_of_a_group_are_proposed(
    command, misspelt_option, proposals
):
    argv = [sys.executable, "-m", "deploy.cli", command, f"{misspelt_option}=1"]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert f"(did you mean {proposals}?)" in ended.stderr


@pytest.mark.parametrize("closed", ["<&-", ">&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_change_nothing_for_children(closed):
    """If a standard stream is closed, `baton` opens it.

    Otherwise the pipes to a child process would get the numbers of closed streams, and
    the child would replace the pipes with its own streams.
    """
    program = (
        "import sys; from deploy import cli; from protocol.process import lifecycle;"
        "cli.main(['--version']);"
        "child = lifecycle.spawn([sys.executable, '-c', 'import os;"
        "from protocol.process import lifecycle;"
        "lifecycle.report_failure(os.environ[lifecycle.PARENT_FD])'], name='child');"
        "child.exited.wait(50); sys.exit(int(child.failure) < 3)"
    )
    argv = ["bash", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, program]
    assert subprocess.run(argv, cwd=ROOT, timeout=60).returncode == 0


TOOLS = [ChatSettings, DoctorSettings, FilesSettings, ModelsSettings, ScaleSettings]


def test_servers_accept_the_variables_of_all_tools(monkeypatch):
    """Several programs may run in one environment, so servers also accept variables of
    tools.
    """
    names = {variable_name(path) for tool in TOOLS for path in field_paths(tool)}
    programs = {
        variable_name(path)
        for program in PROGRAMS.values()
        for path in field_paths(program)
    }
    assert names - programs == TOOL_VARIABLES
    monkeypatch.setenv("BATON_URL", "http://gpu-host:8000")
    load(ServeSettings, [])
    monkeypatch.setenv("BATON_URI", "http://gpu-host:8000")
    with pytest.raises(ConfigError, match=r"BATON_URI \(did you mean .*BATON_URL"):
        load(ServeSettings, [])
