"""Every program works in a directory whose files are named like Baton's packages and Python's own.

`python -m` and `python -c` put the working directory before everything else on sys.path.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.rigs.plain_http import http

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 60
DECOY = "raise SystemExit('this file belongs to the user: ' + __file__)\n"
MODULES = (
    *("model", "protocol", "attention", "kvcache", "benchmarks"),
    *("json", "socket", "random", "selectors", "pickle", "logging", "queue", "signal", "tempfile"),
    *("torch", "numpy", "nixl", "transformers", "tokenizers", "llguidance", "yaml", "uvicorn"),
)
PACKAGES = ("engine", "tests", "pydantic")
# What pip makes of the entry point `baton`.
CONSOLE_SCRIPT = """\
import sys
from deploy.cli import main
if __name__ == "__main__":
    sys.exit(main())
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A user's own project."""
    folder = tmp_path / "project"
    for name in PACKAGES:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(DECOY)
    for name in MODULES:
        (folder / f"{name}.py").write_text(DECOY)
    return folder


@pytest.fixture
def baton(tmp_path: Path) -> tuple[str, str]:
    script = tmp_path / "bin" / "baton"
    script.parent.mkdir()
    script.write_text(CONSOLE_SCRIPT)
    return sys.executable, str(script)


def environment() -> dict[str, str]:
    """Where this checkout's Baton is what is installed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
    kept.pop("PYTHONSAFEPATH", None)
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@contextmanager
def launched(argv: list[str], cwd: Path, until: str) -> Iterator[str]:
    """The first line of a program that has `until`; the program is ended afterwards."""
    process = subprocess.Popen(
        argv,
        cwd=cwd,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    lines: list[str] = []
    try:
        for line in process.stdout:
            lines.append(line)
            if until in line:
                break
        assert until in lines[-1], "".join(lines[-20:])
        yield lines[-1]
        process.send_signal(signal.SIGTERM)
        lines += process.stdout
        assert process.wait(TIMEOUT_S) == 0, "".join(lines[-20:])
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_local_cluster_serves_and_tries_grammars(baton, home, tiny_model):
    options = ("--model", str(tiny_model), "--port", "0", "--prefill.tp", "2", "--device", "cpu")
    with launched([*baton, "up", *options, "--served-model-name", "m"], home, "ready http") as line:
        url = line.split()[1]
        schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
        wanted = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
        body = {
            "model": "m",
            "messages": [{"role": "user", "content": "Tell a story."}],
            "response_format": wanted,
            "max_tokens": 200,
        }
        answer = http.post(f"{url}v1/chat/completions", json=body, timeout=TIMEOUT_S)
        assert answer.status_code == 200, answer.text
        text = answer.json()["choices"][0]["message"]["content"]
        assert json.loads(text)["a"] in ("x", "y")


@pytest.mark.parametrize("module", ["prefill_server", "decode_server"])
def test_a_server_started_by_its_module_serves(module, home, tiny_model):
    options = ("--model", str(tiny_model), "--port", "0", "--device", "cpu")
    with launched([sys.executable, "-m", module, *options], home, " serves at ") as line:
        url = line.split()[-1]
        body = {"prompt": [5, 6, 7], "max_tokens": 2}
        answer = http.post(f"{url}/v1/completions", json=body, timeout=TIMEOUT_S)
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    "argv",
    [
        ["doctor", "--nbytes", str(1 << 20)],
        ["plan"],
        ["models"],
        ["up", "--help"],
        ["proxy", "--help"],
    ],
    ids=lambda argv: argv[0],
)
def test_tools_work(argv, baton, home):
    for command in (baton, (sys.executable, "-m", "deploy.cli")):
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


@pytest.mark.parametrize("module", ["proxy", "deploy.cli", "deploy.healthcheck"])
def test_a_module_started_by_hand_imports_its_own_packages(module, home):
    done = subprocess.run(
        [sys.executable, "-m", module, "--help"],
        cwd=home,
        env={**environment(), "BATON_PORT": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert "belongs to the user" not in done.stdout + done.stderr
