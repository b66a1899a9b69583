"""Child processes: their reports, their supervision, and their end with the parent."""

import os
import queue
import select
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from protocol.process import lifecycle

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 60.0
PRELUDE = f"""
import os, signal, sys, threading, time
sys.path.insert(0, {str(ROOT)!r})
from protocol.process import lifecycle, vital_threads
from protocol.process.alarm import *
from protocol.process.lifecycle import *
from protocol.process.vital_threads import *

def fail():
    raise RuntimeError("the device is gone")
"""


def python(body: str) -> list[str]:
    return [sys.executable, "-c", PRELUDE + textwrap.dedent(body)]


class Events:
    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[lifecycle.Event] = queue.SimpleQueue()

    def spawn(self, body: str, **options: Any) -> lifecycle.Child:
        return lifecycle.spawn(
            python(body), name="child", on_event=self.queue.put, **options
        )

    def next(self) -> tuple[str, Any]:
        event = self.queue.get(timeout=DEADLINE_S)
        return event.kind, event.value


@pytest.fixture
def events() -> Events:
    return Events()


def closes_in_time(fd: int) -> bool:
    """Waits until all processes that hold the write end of a pipe have ended.

    Args:
        fd: The read end of the pipe.

    Returns:
        False if a process still runs after DEADLINE_S.
    """
    readable, _, _ = select.select([fd], [], [], DEADLINE_S)
    return bool(readable) and os.read(fd, 1) == b""


def test_reports_arrive_in_order_and_exit_is_last(events):
    child = events.spawn("report_progress('loading'); report_ready({'port': 12})")
    result = [events.next() for _ in range(3)]
    assert result == [("progress", "loading"), ("ready", {"port": 12}), ("exited", 0)]
    assert child.process.returncode == 0
    # A child that has ended receives no signal.
    assert lifecycle.terminate([child], grace_s=0.0)


def test_child_is_watched_and_reaped_even_if_the_callback_raises(capfd):
    def failing_callback(event: lifecycle.Event) -> None:
        assert event.kind == "exited", f"unexpected event {event.kind}"

    child = lifecycle.spawn(
        python("report_progress('loading')"), name="child", on_event=failing_callback
    )
    assert child.exited.wait(DEADLINE_S)
    assert lifecycle.terminate([child], 0.0)
    assert "unexpected event progress" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("body", "code", "reason"),
    [
        ("report_failure('no such model'); sys.exit(1)", 1, "no such model"),
        ("raise ValueError('tp is 9')", 1, "ValueError: tp is 9 (exit status 1)"),
        ("print('at work', flush=True); os.kill(os.getpid(), 9)", -9,
         "killed by SIGKILL, its last line: at work"),
        ("print('at work')", 0, "another process ended it (exit status 0)"),
        ("end_with_vital_threads(); VitalThread(fail, 'pull-0').start(); "
         "time.sleep(600)", 1, "thread pull-0 ended: RuntimeError: the device is gone"),
    ],
)  # fmt: skip
def test_reason_why_a_child_ended_is_reported(body, code, reason, events, capfd):
    child = events.spawn(body)
    if "report" in body or "Vital" in body:
        assert events.next() == ("failed", reason)
    assert events.next() == ("exited", code)
    assert child.reason() == reason
    if "raise" in body:
        assert "child | ValueError: tp is 9" in capfd.readouterr().out


HEADER = "2026-01-31T12:00:00.123Z INFO    {} baton.x: "
# A child process with a rank process, which writes a line after the child has died.
CHILD_WITH_RANK = """
def log(sender, text):
    print({header!r}.format(sender) + text, flush=True)

log("prefill", "serving")
log("prefill/0", "the last step of rank 0")
parent = os.getpid()
if os.fork() == 0:  # a rank, which detects the death and writes to the same pipe
    while os.getppid() == parent:
        time.sleep(0.001)
    log("prefill/0", "rank 0 ends")
    {more}
    os._exit(0)
{death}
"""


@pytest.mark.parametrize(
    ("death", "more", "reason"),
    [
        (
            "os.kill(os.getpid(), 9)",
            "print('the warning of a library in rank 0', flush=True)",
            f"killed by SIGKILL, its last line: {HEADER.format('prefill')}serving",
        ),
        ("raise ValueError('tp is 9')", "", "ValueError: tp is 9 (exit status 1)"),
    ],
    ids=["killed", "raises"],
)
def test_last_line_ignores_lines_that_ranks_wrote_after_a_death(
    death, more, reason, events
):
    child = events.spawn(CHILD_WITH_RANK.format(header=HEADER, more=more, death=death))
    assert events.next()[0] == "exited"
    assert child.reason() == reason


def test_missing_program_leaks_no_descriptor():
    before = set(os.listdir("/dev/fd"))
    with pytest.raises(OSError, match="no-such-program"):
        lifecycle.spawn(["/no-such-program"], name="child")
    assert set(os.listdir("/dev/fd")) == before


def test_stdin_and_environment_reach_the_child(events, monkeypatch):
    # This is a setting of the launcher, which the child must not get.
    monkeypatch.setenv("BATON_PORT", "8000")
    message = (
        "sys.stdin.read(), *map(os.environ.get, ('BATON_CLUSTER_SECRET', 'BATON_PORT'))"
    )
    events.spawn(
        f"report_ready({{'message': [{message}]}})",
        stdin=b'{"a": 1}',
        env={"BATON_CLUSTER_SECRET": "s"},
    )
    assert events.next() == ("ready", {"message": ['{"a": 1}', "s", None]})
    assert events.next() == ("exited", 0)


@pytest.mark.parametrize(
    "has_variable", [False, True], ids=["by its directory", "by PYTHONPATH"]
)
def test_child_imports_its_parents_baton_and_not_its_working_directory(
    has_variable, tmp_path, monkeypatch
):
    """The parent imports Baton from its working directory, or through PYTHONPATH.

    The child has a different working directory, which has modules `protocol` and
    `json`.
    """
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if has_variable:
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in ("protocol", "json"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('of the user')")
    program = """
import subprocess, sys
from protocol.process import environment
child = [sys.executable, "-c", "import json, protocol; print(protocol.__file__)"]
subprocess.run(child, cwd=sys.argv[1], env=environment.child_environment(), check=True)
"""
    argv = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(
        argv, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.stdout.strip() == str(ROOT / "protocol" / "__init__.py"), done.stderr


@pytest.mark.parametrize("ignores", [False, True])
def test_child_has_a_session_and_is_terminated_then_killed_and_reaped(events, ignores):
    body = "report_ready({}); time.sleep(600)"
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN);" if ignores else ""
    child = events.spawn(ignore + body)
    events.next()
    assert os.getsid(child.pid) == child.pid != os.getsid(0)
    assert (
        lifecycle.terminate([child], grace_s=0.05 if ignores else DEADLINE_S)
        is not ignores
    )
    assert child.process.returncode == -(signal.SIGKILL if ignores else signal.SIGTERM)
    with pytest.raises(ChildProcessError):  # no zombie is left
        os.waitpid(child.pid, os.WNOHANG)


# Starts a chain of `depth` processes, each a child of the previous one. All of them
# inherit the descriptor `fd`.
TREE = """
import signal, sys
sys.path.insert(0, {root!r})
from protocol.process import lifecycle
depth, fd = int(sys.argv[1]), int(sys.argv[2])
lifecycle.watch_parent(grace_s=0.2)
{ignore}
if depth:
    import queue, os
    os.set_inheritable(fd, True)
    events = queue.SimpleQueue()
    import subprocess
    real = subprocess.Popen
    def popen(*args, pass_fds=(), **options):
        return real(*args, pass_fds=(*pass_fds, fd), **options)
    subprocess.Popen = popen
    lifecycle.spawn([sys.executable, __file__, str(depth - 1), str(fd)], name="d",
                    on_event=events.put)
    assert events.get().kind == "ready"
lifecycle.report_ready({{}})
sys.stdout.write("up\\n")
sys.stdout.flush()
signal.pause()
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "ignore", ["", "signal.signal(signal.SIGTERM, signal.SIG_IGN)"]
)
def test_sigkill_of_the_launcher_ends_children_and_grandchildren(tmp_path, ignore):
    program = tmp_path / "tree.py"
    program.write_text(TREE.format(root=str(ROOT), ignore=ignore))
    alive_read, alive_write = os.pipe()
    argv = [sys.executable, str(program), "2", str(alive_write)]
    launcher = subprocess.Popen(argv, pass_fds=(alive_write,), stdout=subprocess.PIPE)
    os.close(alive_write)
    try:
        assert launcher.stdout is not None
        assert any(line.strip() == b"up" for line in launcher.stdout)
        launcher.kill()
        launcher.wait()
        assert closes_in_time(alive_read), "a process outlived the launcher"
    finally:
        launcher.kill()
        launcher.wait()
        launcher.stdout and launcher.stdout.close()
        os.close(alive_read)


@pytest.mark.parametrize("value", [None, ""])
def test_process_without_a_parent_watches_and_reports_nothing(
    value, monkeypatch, capfd
):
    monkeypatch.delenv(lifecycle.PARENT_FD, raising=False)
    if value is not None:
        monkeypatch.setenv(lifecycle.PARENT_FD, value)
    assert not lifecycle.watch_parent()
    lifecycle.report_ready({"port": 1})
    lifecycle.report_failure("why")
    assert capfd.readouterr().err == "error: why\n"


def test_child_exits_cleanly_if_its_parent_ends_with_unread_reports():
    program = """
import signal, sys
from protocol.process import lifecycle
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
lifecycle.watch_parent(grace_s=60.0)
lifecycle.report_progress("so far")
print("up", flush=True)
signal.pause()
"""
    parent_socket, child_socket = socket.socketpair()
    child = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, lifecycle.PARENT_FD: str(child_socket.fileno())},
        pass_fds=(child_socket.fileno(),),
        stdout=subprocess.PIPE,
    )
    child_socket.close()
    with child:
        assert child.stdout is not None and child.stdout.readline() == b"up\n"
        parent_socket.close()
    assert child.returncode == 7


@pytest.mark.parametrize(
    "value", ["abc", "-1", "0", "99999", "9" * 40, "1.5", "{a_pipe}"]
)
def test_invalid_parent_descriptor_is_refused_by_its_variable_name(
    value, monkeypatch, capfd
):
    reader, writer = os.pipe()
    monkeypatch.setenv(lifecycle.PARENT_FD, value.format(a_pipe=writer))
    with pytest.raises(SystemExit) as ended:
        lifecycle.watch_parent()
    os.close(reader)
    os.close(writer)
    assert ended.value.code == 2
    message = capfd.readouterr().err
    assert message.startswith(
        f'error: BATON_PARENT_FD is "{value.format(a_pipe=writer)[:70]}'
    )
    assert message.endswith("unset BATON_PARENT_FD\n") and message.count("\n") == 1


def test_stop_signals_count_and_are_restored():
    before = signal.getsignal(signal.SIGTERM)
    seen: list[tuple[int, int]] = []
    with lifecycle.stop_signals(lambda number, count: seen.append((number, count))):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
    assert seen == [(signal.SIGINT, 1), (signal.SIGTERM, 2)]
    assert signal.getsignal(signal.SIGTERM) is before


def test_only_a_vital_thread_that_raises_ends_its_process(events):
    events.spawn(
        """
        end_with_vital_threads()
        for thread in (threading.Thread(target=fail), VitalThread(int, "done")):
            thread.start()
            thread.join()
        report_ready({})
        """
    )
    assert [events.next(), events.next()] == [("ready", {}), ("exited", 0)]


def test_unread_output_does_not_keep_a_process_alive():
    argv = python(
        """
        vital_threads._MAX_REPORT_S = 0.2
        end_with_vital_threads()
        os.set_blocking(1, False)
        try:
            while True:
                os.write(1, bytes(4096))
        except BlockingIOError:
            os.set_blocking(1, True)  # the pipe is full
        VitalThread(fail, "pull-0").start()
        time.sleep(600)
        """
    )
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.wait(60.0) == 1


PROGRAM = (
    PRELUDE
    + """
import weakref

class Thing:
    pass

def send_alarm(_=None):
    os.kill(os.getpid(), signal.SIGALRM)
    for _ in range(1000):
        pass  # Python calls the signal handler here

end_on_alarm()
os.kill(os.getpid(), signal.SIGTERM)  # as a service manager
if sys.argv[1] == "finalizer":
    Thing.__del__ = send_alarm
thing = Thing()
ref = weakref.ref(thing, send_alarm) if sys.argv[1] == "callback" else None
try:
    if sys.argv[1] == "code":
        send_alarm()
    del thing
    time.sleep(60)
except SystemExit:
    ignore_alarm()
    send_alarm()
    print("ended")
"""
)


@pytest.mark.parametrize("where", ["code", "callback", "finalizer"])
def test_alarm_is_never_lost(where):
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, where],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "ended\n", "")
