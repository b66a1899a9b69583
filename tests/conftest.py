"""What holds for all tests where processes share them: `pytest -n auto`, as in make test."""

import os

import pytest

from protocol.cores import available_cores

_MOST = 4  # processes: each starts servers of its own, and torch in every one takes its memory

if "PYTEST_XDIST_WORKER" in os.environ:  # before torch is imported
    # Threads that spin for work would take the cores from the other processes.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(optionalhook=True)  # GPU machines run part of the tests without pytest-xdist
def pytest_xdist_auto_num_workers() -> int:
    return min(available_cores(), _MOST)
