"""SIGTERM ends a process wherever its main thread is."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import os, signal, sys, time, weakref
from protocol.process.lifecycle import end_on_sigterm, ignore_sigterm

class Thing:
    pass

def tell(_=None):
    os.kill(os.getpid(), signal.SIGTERM)
    for _ in range(1000):
        pass  # where a signal is looked at

end_on_sigterm()
if sys.argv[1] == "finalizer":
    Thing.__del__ = tell
thing = Thing()
ref = weakref.ref(thing, tell) if sys.argv[1] == "callback" else None
try:
    if sys.argv[1] == "code":
        tell()
    del thing
    time.sleep(60)
except SystemExit:
    ignore_sigterm()
    tell()
    print("ended")
"""


@pytest.mark.parametrize("where", ["code", "callback", "finalizer"])
def test_it_is_never_lost(where: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, where], cwd=ROOT, capture_output=True, text=True, timeout=50
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "ended\n", "")
