"""A process ends with a thread that others would wait for; with no other thread."""

import queue
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from protocol.process import lifecycle

ROOT = Path(__file__).resolve().parents[2]
PRELUDE = f"""
import sys, threading
sys.path.insert(0, {str(ROOT)!r})
from protocol.process import lifecycle
from protocol.process.lifecycle import VitalThread, end_with_vital_threads

wait = threading.Event().wait

def fail():
    raise RuntimeError("the device is gone")

"""


@pytest.mark.parametrize(
    ("body", "events"),
    [
        (
            "end_with_vital_threads(); VitalThread(fail, 'pull-0').start(); wait()",
            [lifecycle.Failed, lifecycle.Exited],
        ),
        (
            """
            end_with_vital_threads()
            for thread in (threading.Thread(target=fail), VitalThread(int, "done")):
                thread.start()
                thread.join()
            lifecycle.report_ready({})
            """,
            [lifecycle.Ready, lifecycle.Exited],
        ),
    ],
    ids=["a vital one", "others"],
)
def test_a_process_ends_with_a_vital_thread_that_raises(body: str, events: list[type]) -> None:
    found: queue.SimpleQueue[lifecycle.Event] = queue.SimpleQueue()
    argv = [sys.executable, "-c", PRELUDE + textwrap.dedent(body)]
    child = lifecycle.spawn(argv, name="child", on_event=found.put)
    assert [type(found.get(timeout=60.0)) for _ in events] == events
    if lifecycle.Failed in events:
        assert child.returncode == 1
        assert child.reason() == "thread pull-0 ended: RuntimeError: the device is gone"
    else:
        assert child.returncode == 0


def test_an_output_that_nobody_reads_keeps_no_process() -> None:
    body = """
    import os
    import protocol.process.lifecycle as vital_threads

    vital_threads._TELL_S = 0.2
    end_with_vital_threads()
    os.set_blocking(1, False)
    try:
        while True:
            os.write(1, bytes(4096))
    except BlockingIOError:
        os.set_blocking(1, True)  # it is full
    VitalThread(fail, "pull-0").start()
    wait()
    """
    argv = [sys.executable, "-c", PRELUDE + textwrap.dedent(body)]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(argv, **output) as process:  # type: ignore[call-overload]
        assert process.wait(60.0) == 1
