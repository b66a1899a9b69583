"""Children that report, die, hang, and outlive nobody."""

import os
import queue
import select
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from protocol.process import lifecycle

ROOT = Path(__file__).resolve().parents[2]
PRELUDE = f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom protocol.process import lifecycle\n"
DEADLINE_S = 60.0


def python(body: str) -> list[str]:
    return [sys.executable, "-c", PRELUDE + textwrap.dedent(body)]


class Events:
    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[lifecycle.Event] = queue.SimpleQueue()

    def spawn(self, body: str, **options: object) -> lifecycle.Child:
        return lifecycle.spawn(
            python(body),
            name="child",
            on_event=self.queue.put,
            **options,  # type: ignore[arg-type]
        )

    def next(self) -> lifecycle.Event:
        return self.queue.get(timeout=DEADLINE_S)


@pytest.fixture
def events() -> Events:
    return Events()


def ends(fd: int) -> bool:
    """Whether every process that holds the other end of this pipe is gone."""
    readable, _, _ = select.select([fd], [], [], DEADLINE_S)
    return bool(readable) and os.read(fd, 1) == b""


def test_reports_arrive_in_order_and_exit_is_last(events: Events) -> None:
    child = events.spawn(
        """
        lifecycle.report_progress("loading")
        lifecycle.report_ready({"port": 12})
        """
    )
    assert events.next() == lifecycle.Progress(child, "loading")
    assert events.next() == lifecycle.Ready(child, {"port": 12})
    assert events.next() == lifecycle.Exited(child, 0)
    assert child.returncode == 0
    assert lifecycle.terminate([child], grace_s=0.0)  # one that has ended is left alone


def test_a_child_is_watched_and_reaped_whatever_becomes_of_its_reports(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def broken(event: lifecycle.Event) -> None:
        raise RuntimeError(f"cannot take {type(event).__name__}")

    body = "lifecycle.report_progress('loading')"
    child = lifecycle.spawn(python(body), name="child", on_event=broken)
    assert child.exited.wait(DEADLINE_S)
    assert lifecycle.terminate([child], 0.0)
    assert "cannot take Progress" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("body", "code", "reason"),
    [
        ("lifecycle.report_failure('no such model'); sys.exit(1)", 1, "no such model"),
        ("raise ValueError('tp is 9')", 1, "ValueError: tp is 9 (exit status 1)"),
        (
            "import os; print('at work', flush=True); os.kill(os.getpid(), 9)",
            -9,
            "killed by SIGKILL, its last line: at work",
        ),
        ("print('at work')", 0, "somebody told it to (exit status 0)"),
    ],
)
def test_an_end_has_a_reason(
    body: str, code: int, reason: str, events: Events, capfd: pytest.CaptureFixture[str]
) -> None:
    child = events.spawn(body)
    if "report" in body:
        assert events.next() == lifecycle.Failed(child, "no such model")
    assert events.next() == lifecycle.Exited(child, code)
    assert child.reason() == reason
    if "raise" in body:
        assert "child | ValueError: tp is 9" in capfd.readouterr().out


def test_a_program_that_is_not_there_leaks_no_descriptor() -> None:
    before = set(os.listdir("/dev/fd"))
    with pytest.raises(OSError, match="no-such-program"):
        lifecycle.spawn(["/no-such-program"], name="child")
    assert set(os.listdir("/dev/fd")) == before


def test_stdin_and_environment_reach_the_child(
    events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_PORT", "8000")  # the launcher's own setting
    events.spawn(
        """
        import os
        lifecycle.report_ready({
            "stdin": sys.stdin.read(),
            "secret": os.environ["BATON_CLUSTER_SECRET"],
            "port": os.environ.get("BATON_PORT"),
        })
        """,
        stdin=b'{"a": 1}',
        env={"BATON_CLUSTER_SECRET": "s"},
    )
    event = events.next()
    assert isinstance(event, lifecycle.Ready)
    assert event.info == {"stdin": '{"a": 1}', "secret": "s", "port": None}
    assert isinstance(events.next(), lifecycle.Exited)


def test_the_child_has_a_session_of_its_own(events: Events) -> None:
    child = events.spawn("lifecycle.report_ready({}); sys.stdin.read(); lifecycle.time.sleep(600)")
    events.next()
    assert os.getsid(child.pid) == child.pid != os.getsid(0)
    assert lifecycle.terminate([child], grace_s=DEADLINE_S)
    assert child.returncode == -signal.SIGTERM


def test_one_that_ignores_sigterm_is_killed_and_reaped(events: Events) -> None:
    child = events.spawn(
        """
        import signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        lifecycle.report_ready({})
        lifecycle.time.sleep(600)
        """
    )
    events.next()
    assert not lifecycle.terminate([child], grace_s=0.05)
    assert child.returncode == -signal.SIGKILL
    with pytest.raises(ChildProcessError):  # no zombie is left
        os.waitpid(child.pid, os.WNOHANG)


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
    assert isinstance(events.get(), lifecycle.Ready)
lifecycle.report_ready({{}})
sys.stdout.write("up\\n")
sys.stdout.flush()
signal.pause()
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("ignore", ["", "signal.signal(signal.SIGTERM, signal.SIG_IGN)"])
def test_sigkill_of_the_launcher_ends_children_and_grandchildren(
    tmp_path: Path, ignore: str
) -> None:
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
        assert ends(alive_read), "a process outlived the launcher"
    finally:
        launcher.kill()
        launcher.wait()
        launcher.stdout and launcher.stdout.close()
        os.close(alive_read)


@pytest.mark.parametrize("value", [None, ""])
def test_a_process_started_by_hand_watches_and_reports_nothing(
    value: str | None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in (lifecycle.PARENT_FD, lifecycle.READY_FD):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert not lifecycle.watch_parent()
    lifecycle.report_ready({"port": 1})
    lifecycle.report_failure("why")
    assert capfd.readouterr().err == "error: why\n"


@pytest.mark.parametrize("variable", [lifecycle.READY_FD, lifecycle.PARENT_FD])
@pytest.mark.parametrize("value", ["abc", "-1", "2", "99999", "9" * 40, "1.5", "{wrong_end}"])
def test_a_descriptor_that_no_parent_left_is_refused_by_name(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(lifecycle.READY_FD, raising=False)
    monkeypatch.delenv(lifecycle.PARENT_FD, raising=False)
    read_end, write_end = os.pipe()
    value = value.format(wrong_end=read_end if variable == lifecycle.READY_FD else write_end)
    monkeypatch.setenv(variable, value)
    with pytest.raises(SystemExit) as ended:
        lifecycle.watch_parent()
    os.close(read_end)
    os.close(write_end)
    assert ended.value.code == 2
    told = capfd.readouterr().err
    assert told.startswith(f'error: {variable} is "{value[:70]}')
    assert told.endswith(f"unset {variable}\n") and told.count("\n") == 1


@pytest.mark.parametrize(
    ("variable", "stream"), [(lifecycle.PARENT_FD, 0), (lifecycle.READY_FD, 1)]
)
def test_a_standard_stream_that_is_a_pipe_is_no_parents(variable: str, stream: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", "from protocol.process import lifecycle; lifecycle.watch_parent()"],
        env={**os.environ, variable: str(stream)},
        input=b"",
        capture_output=True,
    )
    assert ended.returncode == 2 and ended.stdout == b""
    assert ended.stderr.startswith(f'error: {variable} is "{stream}"'.encode())


def test_stop_signals_count_and_are_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen: list[tuple[int, int]] = []
    with lifecycle.stop_signals(lambda number, count: seen.append((number, count))):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
    assert seen == [(signal.SIGINT, 1), (signal.SIGTERM, 2)]
    assert signal.getsignal(signal.SIGTERM) is before


VITAL = (
    PRELUDE
    + """
import threading
from protocol.process.lifecycle import VitalThread, end_with_vital_threads

wait = threading.Event().wait

def fail():
    raise RuntimeError("the device is gone")

"""
)


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
    argv = [sys.executable, "-c", VITAL + textwrap.dedent(body)]
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
    lifecycle._TELL_S = 0.2
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
    argv = [sys.executable, "-c", VITAL + textwrap.dedent(body)]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(argv, **output) as process:  # type: ignore[call-overload]
        assert process.wait(60.0) == 1


PROGRAM = """
import os, signal, sys, time, weakref
from protocol.process.lifecycle import end_on_sigterm, ignore_sigterm

class Thing:
    pass

def tell(_=None):
    os.kill(os.getpid(), signal.SIGTERM)
    for _ in range(1000):
        pass  # where a signal is looked at

end_on_sigterm()
if sys.argv[1] == "finalizer":
    Thing.__del__ = tell
thing = Thing()
ref = weakref.ref(thing, tell) if sys.argv[1] == "callback" else None
try:
    if sys.argv[1] == "code":
        tell()
    del thing
    time.sleep(60)
except SystemExit:
    ignore_sigterm()
    tell()
    print("ended")
"""


@pytest.mark.parametrize("where", ["code", "callback", "finalizer"])
def test_it_is_never_lost(where: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, where], cwd=ROOT, capture_output=True, text=True, timeout=50
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "ended\n", "")
