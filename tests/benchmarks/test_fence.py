import json
import subprocess
import sys
from pathlib import Path


def test_both_kinds_of_fence_are_timed() -> None:
    argv = [sys.executable, "-m", "benchmarks.fence", "--repeat", "3"]
    run = subprocess.run(argv, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    for kind in ("word", "asked"):
        times = found[kind]
        assert 0 < times["fence"] <= times["woken"] and 0 < times["pull"] <= times["woken"]
