import os
import subprocess
import sys
from typing import Any

import msgspec
import pytest

from protocol.handshake import ProcessRecord
from protocol.ipc.processes import ProcessGone, Watched, is_ending, own_record

CHILD = """
import sys
from msgspec.json import encode
from protocol.ipc.processes import own_record
print(encode(own_record()).decode(), flush=True)
sys.stdin.readline()
"""


def own(**changes: Any) -> ProcessRecord:
    record = own_record()
    assert record is not None
    return msgspec.structs.replace(record, **changes)


def child() -> "tuple[subprocess.Popen[bytes], ProcessRecord]":
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", CHILD], stdin=pipe, stdout=pipe)
    assert process.stdout is not None
    return process, msgspec.json.decode(process.stdout.readline(), type=ProcessRecord)


def test_a_process_that_is_killed_is_not_alive_even_before_it_is_waited_for() -> None:
    process, record = child()
    watched = Watched([own(), record, record])
    assert watched.all_alive()
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not watched.all_alive()
    with pytest.raises(ProcessGone):
        Watched([own(), record])
    process.communicate()
    assert not watched.all_alive()
    with pytest.raises(ProcessGone):
        Watched([record])
    watched.close()
    assert not watched.all_alive()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"host": "another"}, "another host"),
        ({"pid_namespace": 1}, "other numbers"),
        ({"started": 1}, "has ended"),  # its number is another process's now
        ({"pid": 1 << 22}, "has ended"),
        ({"pid": -1}, "cannot be watched"),
    ],
)
def test_who_cannot_be_found_is_not_watched(changes: Any, why: str) -> None:
    with pytest.raises(ProcessGone, match=why):
        Watched([own(**changes)])


def test_a_process_is_ending_once_it_is_killed_and_for_ever() -> None:
    process, record = child()
    assert not is_ending(record.pid)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert is_ending(record.pid)
    process.communicate()
    assert is_ending(record.pid)


def test_nobody_is_not_alive() -> None:
    assert not Watched([]).all_alive()
