"""The copying thread is alone, and everybody else's number of threads stays."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import torch
from kvcache.transfer.copy_thread import copy_thread
torch.set_num_threads(2)
thread = copy_thread("copy")
print(thread.submit(torch.get_num_threads).result(), torch.get_num_threads())
"""


def test_only_the_copying_thread_is_alone() -> None:
    argv = [sys.executable, "-c", PROGRAM]
    root = Path(__file__).parents[3]
    done = subprocess.run(argv, cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "2"]
