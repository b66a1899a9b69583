"""A pool's memory, opened by others: only the right one, read-only, for longer than its owner."""

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


def owner() -> "tuple[subprocess.Popen[str], int, int, bytes]":
    argv = [sys.executable, "-c", OWNER, str(NBYTES)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True, cwd=ROOT)
    assert process.stdout is not None
    pid, fd, token = process.stdout.readline().split()
    return process, int(pid), int(fd), bytes.fromhex(token)


def test_another_process_reads_what_the_owner_wrote_even_when_it_was_killed():
    process, pid, fd, token = owner()
    memory = open_memory(pid, fd, token, NBYTES)
    assert memory[5] == 77 and memory[6] == 0
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
        ({"nbytes": NBYTES + mmap.PAGESIZE}, "bytes, not the"),
        ({"nbytes": 1}, "bytes, not the"),
        ({"fd": 10**6}, "cannot be opened"),
        ({"pid": 2**22 + 1}, "cannot be opened"),
    ],
)
def test_what_is_not_the_announced_memory_is_refused(change, reason):
    mine = SharedMemory(NBYTES)
    values = {"pid": os.getpid(), "fd": mine.fd, "token": mine.token, "nbytes": NBYTES}
    with pytest.raises(NotMappable, match=reason):
        open_memory(**(values | change))


def test_a_file_of_another_kind_is_not_opened(tmp_path):
    with (
        open(tmp_path / "file", "wb") as file,
        pytest.raises(NotMappable, match="another one"),
    ):
        open_memory(os.getpid(), file.fileno(), b"", 1)


def test_memory_that_could_shrink_under_a_reader_is_refused():
    fd = os.memfd_create("baton-kv")
    os.ftruncate(fd, 2 * mmap.PAGESIZE)
    try:
        with pytest.raises(NotMappable, match="cut short"):
            open_memory(os.getpid(), fd, b"\0" * TOKEN_BYTES, mmap.PAGESIZE)
    finally:
        os.close(fd)


def test_it_begins_zeroed_on_a_page_cannot_shrink_and_closes_its_file_with_its_end():
    mine = SharedMemory(NBYTES)
    array = np.frombuffer(mine.mapping, np.uint8)
    assert array.ctypes.data % mmap.PAGESIZE == 0
    assert not array[:NBYTES].any()
    memory = open_memory(os.getpid(), mine.fd, mine.token, NBYTES)
    mine.mapping[NBYTES - 1] = 9
    assert memory[NBYTES - 1] == 9  # later writes are seen
    with pytest.raises(PermissionError):
        os.ftruncate(mine.fd, 0)
    fd = mine.fd
    memory.close()
    del mine, array
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
