"""Programs work in a directory that has files named like modules of Baton and Python.

This is not obvious, because `python -m` and `python -c` put the working directory first
on sys.path.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rigs.decoys import make_decoys
from tests.rigs.plain_http import http
from tests.rigs.programs import TIMEOUT_S, environment, launched

# The same script as pip creates for the entry point `baton`.
CONSOLE_SCRIPT = """\
import sys
from baton_pd.__main__ import main
if __name__ == "__main__":
    sys.exit(main())
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The directory of a user's project."""
    folder = tmp_path / "project"
    make_decoys(folder)
    return folder


@pytest.fixture
def baton(tmp_path: Path) -> tuple[str, str]:
    script = tmp_path / "bin" / "baton"
    script.parent.mkdir()
    script.write_text(CONSOLE_SCRIPT)
    return sys.executable, str(script)


def test_local_cluster_serves_and_compiles_grammars(baton, home, tiny_model):
    options = [
        "--model",
        str(tiny_model),
        "--port",
        "0",
        "--prefill.tp",
        "2",
        "--device",
        "cpu",
    ]
    with launched(
        [*baton, "up", *options, "--served-model-name", "m"], home
    ) as program:
        url = program.read_until("ready http").split()[1]
        schema = {
            "type": "object",
            "properties": {"a": {"enum": ["x", "y"]}},
            "required": ["a"],
            "additionalProperties": False,
        }
        response_format = {
            "type": "json_schema",
            "json_schema": {"name": "it", "schema": schema},
        }
        body = {
            "model": "m",
            "messages": [{"role": "user", "content": "Tell a story."}],
            "response_format": response_format,
            "max_tokens": 200,
        }
        answer = http.post(f"{url}v1/chat/completions", json=body, timeout=TIMEOUT_S)
        assert answer.status_code == 200, answer.text
        text = answer.json()["choices"][0]["message"]["content"]
        assert json.loads(text)["a"] in ("x", "y")
        program.stop()


@pytest.mark.parametrize("module", ["prefill_server", "decode_server"])
def test_server_started_by_its_module_serves(module, home, tiny_model):
    options = ["--model", str(tiny_model), "--port", "0", "--device", "cpu"]
    with launched([sys.executable, "-m", module, *options], home) as program:
        url = program.read_until(" serves at ").split()[-1]
        body = {"prompt": [5, 6, 7], "max_tokens": 2}
        answer = http.post(f"{url}/v1/completions", json=body, timeout=TIMEOUT_S)
        assert answer.status_code == 200, answer.text
        program.stop()


@pytest.mark.parametrize(
    "argv",
    [["doctor", "--nbytes", str(1 << 20)], ["plan"], ["models"], ["up", "--help"]],
    ids=lambda argv: argv[0],
)
def test_tools_work(argv, baton, home):
    commands = [baton]
    if argv[0] == "plan":  # one tool for each way to start it
        commands.append((sys.executable, "-m", "deploy.cli"))
        commands.append((sys.executable, "-m", "baton_pd"))
    for command in commands:
        done = subprocess.run(
            [*command, *argv],
            cwd=home,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert "belongs to the user" not in done.stdout + done.stderr
        assert done.returncode == 0, done.stdout + done.stderr
        assert "does not work" not in done.stdout


@pytest.mark.parametrize("module", ["proxy", "deploy.cli", "baton_pd"])
def test_module_started_by_hand_imports_packages_of_baton(module, home):
    done = subprocess.run(
        [sys.executable, "-m", module, "--help"],
        cwd=home,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert "belongs to the user" not in done.stdout + done.stderr
