"""An engine of which a thread has ended says so and ends; it does not go on without it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.make_models import ensure_model

ROOT = Path(__file__).parents[3]

# A rank as it is, but that its transfer thread cannot use its agent.
_BROKEN_ROLE = """
import threading
from decode_server.service import KVFactory
from engine.worker.worker import main
from kvcache.transfer.nixl_agent import NixlAgent

usual = NixlAgent.bind_thread

def bind_thread(agent):
    if threading.current_thread().name == "pull-0":
        raise RuntimeError("no such device")
    usual(agent)

NixlAgent.bind_thread = bind_thread
if __name__ == "__main__":
    main(KVFactory())
"""

_SERVER = """
import sys
from engine.http.api import ServerHooks
from engine.serve import run_server
from protocol.settings.settings import DecodeSettings, parse

settings = parse(DecodeSettings, sys.argv[1:], prog="broken")
raise SystemExit(run_server(settings, lambda secret: ServerHooks(), "broken_role"))
"""


@pytest.mark.slow  # test_pull_worker.py and test_lifecycle.py have each half of it
def test_a_server_ends_when_its_transfer_thread_cannot_begin(tmp_path):
    (tmp_path / "broken_role.py").write_text(_BROKEN_ROLE)
    options = ["--model", str(ensure_model("gqa")), "--port", "0", "--cluster-secret", "s" * 32]
    options += ["--kv-cache-tokens", "1024", "--threads", "1", "--device", "cpu"]
    done = subprocess.run(
        [sys.executable, "-c", _SERVER, *options],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])},
        check=False,
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last == (
        "error: engine process decode: thread pull-0 ended: RuntimeError: no such device"
    )
