"""Writing to standard streams never blocks, even if nothing reads the output."""

import contextlib
import os
import select
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from protocol.process.output import MAX_LAST_TEXTS, OutputQueue

TIMEOUT_S = 60.0
LINE = b"x" * 99 + b"\n"


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)


def read_lines(reader: int, until: bytes) -> list[bytes]:
    """Returns the lines up to the line that begins with `until`, including it."""
    with open(reader, "rb", closefd=False) as stream:
        lines = []
        for line in stream:
            lines.append(line)
            if line.startswith(until):
                return lines
    raise AssertionError(f"no line {until!r}")


def fill(writer: int) -> None:
    """Writes empty lines to a pipe until it is full."""
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"\n" * select.PIPE_BUF)
    os.set_blocking(writer, True)


def test_full_queue_drops_and_counts_and_keeps_the_newest_lines(pipe):
    reader, writer = pipe
    fill(writer)  # the queue's thread then writes nothing before lines are read
    queue = OutputQueue(writer, lambda n: f"dropped {n}", max_queued_bytes=100_000)
    for _ in range(5000):  # 500 kB, which is more than the queue can hold
        queue.put(LINE)
    queue.put(b"last line\n")
    assert queue.num_dropped > 2000
    lines = read_lines(reader, b"last line")
    assert (
        lines[: -1 - MAX_LAST_TEXTS].count(LINE) + queue.num_dropped
        == 5001 - MAX_LAST_TEXTS
    )
    assert lines[-1 - MAX_LAST_TEXTS] == b"dropped %d\n" % queue.num_dropped
    assert queue.flush(TIMEOUT_S)


def test_full_queue_accepts_lines_again_when_the_file_is_read(pipe):
    reader, writer = pipe
    queue = OutputQueue(writer, lambda n: f"dropped {n}", max_queued_bytes=100_000)
    for _ in range(5000):
        queue.put(LINE)
    read_lines(reader, b"dropped")
    flushed = threading.Thread(target=queue.flush, args=(TIMEOUT_S,))
    flushed.start()
    queue.put(b"first line\n")
    read_lines(reader, b"first line")
    flushed.join(TIMEOUT_S)
    num_dropped = queue.num_dropped
    queue.put(b"second line\n")
    read_lines(reader, b"second line")
    assert queue.num_dropped == num_dropped


def test_flush_times_out_if_nothing_reads(pipe):
    queue = OutputQueue(pipe[1], str, max_queued_bytes=1 << 20)
    for _ in range(2000):
        queue.put(LINE)
    assert not queue.flush(0.01)


def test_lines_for_a_full_disk_are_counted_as_dropped():
    full = os.open("/dev/full", os.O_WRONLY)
    queue = OutputQueue(full, str)
    queue.put(LINE)
    queue.put(LINE)
    assert queue.flush(TIMEOUT_S)
    assert queue.num_dropped == 2
    os.close(full)


_PROGRAM = """
import logging, os, sys, threading
from protocol.process.logging import get_logger, setup_logging
setup_logging("decode")
def write():
    for n in range(50):
        print(f"number {n}", file=sys.stderr)
threads = [threading.Thread(target=write) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
get_logger("x").error("last log line")
print("last print", end="", flush=True)
END
"""


@pytest.mark.parametrize(
    ("end", "last", "status"),
    [
        ("", "last print", 0),
        ("raise ValueError('the reason')", "ValueError: the reason", 1),
        (
            "from protocol.process import lifecycle; lifecycle.exit_now(3)",
            "last print",
            3,
        ),
    ],
)
def test_output_is_flushed_however_the_process_ends(end, last, status):
    program = _PROGRAM.replace("END", end)
    done = subprocess.run(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == status
    assert done.stdout.splitlines()[-1].endswith(last)
    assert "last log line" in done.stdout
    for number in range(50):
        assert done.stdout.count(f"number {number}\n") == 4
