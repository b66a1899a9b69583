"""The copying thread is alone, and everybody else's number of threads stays."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import threading
import torch
from kvcache.transfer.worker.worker import use_one_core
torch.set_num_threads(2)
torch.get_num_threads()
def copy():
    use_one_core()
    print(torch.get_num_threads())
thread = threading.Thread(target=copy)
thread.start()
thread.join()
print(torch.get_num_threads())
"""


def test_only_the_copying_thread_is_alone() -> None:
    argv = [sys.executable, "-c", PROGRAM]
    root = Path(__file__).parents[3]
    done = subprocess.run(argv, cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "2"]
