"""What holds for all tests where processes share them: `pytest -n auto`, as in make test."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.cores import available_cores

_MOST = 4  # processes: each starts servers of its own
_EACH_BYTES = 4 << 30  # of memory: torch in every server, and a dozen servers at most

if "PYTEST_XDIST_WORKER" in os.environ:  # before torch is imported
    # Threads that spin for work would take the cores from the other processes.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(optionalhook=True)  # GPU machines run part of the tests without pytest-xdist
def pytest_xdist_auto_num_workers() -> int:
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(available_cores(), _MOST, memory_bytes // _EACH_BYTES))


@pytest.fixture
def socket_folder() -> Iterator[Path]:
    """For Unix sockets, whose paths have 107 bytes at most: `tmp_path` may be deeper."""
    folder = Path(tempfile.mkdtemp(prefix="baton-test-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)
