"""Mapping a pool's memory in another process.

Only the memory that its owner has announced can be mapped. The mapping is read-only and
stays readable after the owner has died.
"""

import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvcache.shared_memory import TOKEN_BYTES, NotMappable, SharedMemory, open_memory

NBYTES = 3 * mmap.PAGESIZE + 100
ROOT = Path(__file__).parents[2]
OWNER = """
import os, sys
from kvcache.shared_memory import SharedMemory
memory = SharedMemory(int(sys.argv[1]))
memory.mapping[5] = 77
print(os.getpid(), memory.fd, memory.token.hex(), flush=True)
sys.stdin.readline()
"""


def start_owner() -> "tuple[subprocess.Popen[str], int, int, bytes]":
    """Starts a process that owns shared memory. Returns the process, its pid, and the
    memory's file descriptor and token.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(NBYTES)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdout is not None
    pid, fd, token = process.stdout.readline().split()
    return process, int(pid), int(fd), bytes.fromhex(token)


def test_memory_stays_readable_after_its_owner_was_killed():
    process, pid, fd, token = start_owner()
    memory = open_memory(pid, fd, token, NBYTES)
    assert memory[5] == 77
    assert memory[6] == 0
    process.kill()
    process.communicate()
    assert memory[5] == 77
    memory.close()
    with pytest.raises(NotMappable, match="cannot be opened"):
        open_memory(pid, fd, token, NBYTES)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"token": b"\0" * TOKEN_BYTES}, "another engine's"),
        ({"token": b""}, "another engine's"),
        ({"nbytes": NBYTES + mmap.PAGESIZE}, "are expected"),
        ({"nbytes": 1}, "are expected"),
        ({"fd": 10**6}, "cannot be opened"),
        ({"pid": 2**22 + 1}, "cannot be opened"),
    ],
)
def test_memory_other_than_the_announced_one_is_not_mapped(change, reason):
    memory = SharedMemory(NBYTES)
    values = {
        "pid": os.getpid(),
        "fd": memory.fd,
        "token": memory.token,
        "nbytes": NBYTES,
    }
    with pytest.raises(NotMappable, match=reason):
        open_memory(**(values | change))


def test_file_of_another_kind_is_not_opened(tmp_path):
    with (
        open(tmp_path / "file", "wb") as file,
        pytest.raises(NotMappable, match="belongs to another file"),
    ):
        open_memory(os.getpid(), file.fileno(), b"", 1)


def test_memory_that_could_shrink_is_not_mapped():
    fd = os.memfd_create("baton-kv")
    os.ftruncate(fd, 2 * mmap.PAGESIZE)
    try:
        with pytest.raises(NotMappable, match="not sealed"):
            open_memory(os.getpid(), fd, b"\0" * TOKEN_BYTES, mmap.PAGESIZE)
    finally:
        os.close(fd)


def test_memory_is_zeroed_page_aligned_sealed_and_closed_at_its_end():
    owned = SharedMemory(NBYTES)
    array = np.frombuffer(owned.mapping, np.uint8)
    assert array.ctypes.data % mmap.PAGESIZE == 0
    assert not array[:NBYTES].any()
    mapped = open_memory(os.getpid(), owned.fd, owned.token, NBYTES)
    owned.mapping[NBYTES - 1] = 9
    assert mapped[NBYTES - 1] == 9  # writes after the mapping are visible
    with pytest.raises(PermissionError):
        os.ftruncate(owned.fd, 0)
    fd = owned.fd
    mapped.close()
    del owned, array
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
