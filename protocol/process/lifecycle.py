"""Starts, watches and ends child processes.

Every child runs in a session of its own, so Ctrl-C in a terminal reaches only the
launcher. The child holds one end of a socket pair; only its parent has the other end:

    parent --(no data)---------> child    EOF: the parent has ended, for whatever reason
    child  --(JSON lines)------> parent   progress, ready, failed; EOF: the child ended
    child  --(stdout + stderr)-> parent   a pipe; the parent prefixes the lines by the
                                          child's name and keeps the last ones

Nothing here polls. Threads block on sockets and in waitpid, and deliver events.
"""

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, NoReturn

from protocol.process.environment import child_environment
from protocol.process.logging import get_logger, is_rank, sender_of
from protocol.process.output import flush_output
from protocol.short_repr import short_repr

PARENT_FD = "BATON_PARENT_FD"
TAIL_LINES = 40
_REPEAT_ALARM_S = 0.01
# Ends a process of `end_on_alarm`. Only its parent sends this signal.
ALARM = signal.SIGALRM
# Maximum time of reporting the end of a thread. The reader of our output may be
# stopped.
_MAX_REPORT_S = 5.0
_log = get_logger(__name__)
# Longest wait of a main thread that handles signals. A signal that arrives just before
# the wait does not interrupt it; Python calls the handler when the wait ends.
SIGNAL_CHECK_INTERVAL_S = 0.5
# Exit status of a process that had to be ended because its parent was gone.
ORPHANED = 86


class Event(NamedTuple):
    """A change in the state of a child. The kinds and their values are:

    progress: The child is starting; the value describes the current step.
    ready: The child serves; the value has its addresses, such as {"port": 8000}.
    failed: The child cannot continue; the value is the reason. Its exit follows.
    exited: The child has ended and is reaped; the value is its exit status, or -N if
        signal N ended it. This is always the last event.
    """

    child: "Child"
    kind: Literal["progress", "ready", "failed", "exited"]
    value: Any


@dataclass(eq=False)
class Child:
    """A running child process. It ends by `terminate`, or when this process ends."""

    name: str
    process: subprocess.Popen[bytes]
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    failure: str | None = None
    exited: threading.Event = field(default_factory=threading.Event)

    @property
    def pid(self) -> int:
        return self.process.pid

    def signal(self, number: int) -> None:
        """Sends a signal to the process, unless it has ended."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """Sends SIGKILL to the process and all other processes of its group."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def reason(self) -> str:
        """Returns why the process ended.

        This is the reason that it reported, else its last line, else its exit status. A
        last line means nothing if the process ended in order, and little if it was
        killed.
        """
        if self.failure is not None:
            return self.failure
        code = self.process.returncode
        status = _describe_status(code)
        is_killed = (code or 0) < 0
        last_line = self._last_line(is_killed=is_killed)
        if code == 0:
            return f"another process ended it ({status})"
        if last_line is None:
            return status
        if is_killed:
            return f"{status}, its last line: {last_line}"
        return f"{last_line} ({status})"

    def _last_line(self, *, is_killed: bool) -> str | None:
        """Returns the last line that the process wrote itself.

        Its engine ranks write to the same pipe. They still do so after the death of the
        process, when they report that they end because of it.

        Args:
            is_killed: The process had no chance to write a traceback. Lines without a
                header therefore belong to the process that wrote the last header.
        """
        last = None
        is_of_rank = False
        for line in self.tail:
            sender = sender_of(line)
            if sender is not None:
                is_of_rank = is_rank(sender)
            elif not is_killed:
                is_of_rank = False
            if line.strip() and not is_of_rank:
                last = line.strip()
        return last


def _describe_status(returncode: int | None) -> str:
    if returncode is None:
        return "still running"
    if returncode >= 0:
        return f"exit status {returncode}"
    number = -returncode
    is_named = number in set(signal.Signals)
    return f"killed by {signal.Signals(number).name if is_named else number}"


def spawn(
    argv: Sequence[str],
    *,
    name: str,
    env: Mapping[str, str] | None = None,
    stdin: bytes = b"",
    capture: bool = True,
    on_event: Callable[[Event], None] | None = None,
    files: Sequence[int] = (),
) -> Child:
    """Starts a process in a session of its own. It ends when this process ends.

    The child calls `watch_parent` for that.

    Args:
        env: Additions to this process's environment, whose BATON_* settings are left
            out.
        stdin: What the child reads from its standard input; at most a pipe's buffer (64
            KiB).
        capture: True: print the child's lines with `name` as prefix, and keep the last
            ones. False: the child writes to this process's stdout.
        on_event: Called from a thread that belongs to the child.
        files: Descriptors that the child inherits under the same numbers.

    Raises:
        OSError: The program cannot be run.
    """
    parent_socket, child_socket = socket.socketpair()
    try:
        process = subprocess.Popen(
            list(argv),
            env={
                **child_environment(),
                **(env or {}),
                PARENT_FD: str(child_socket.fileno()),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if capture else None,
            stderr=subprocess.STDOUT if capture else None,
            pass_fds=(child_socket.fileno(), *files),
            start_new_session=True,
        )
    except OSError:
        parent_socket.close()
        raise
    finally:
        child_socket.close()
    child = Child(name, process)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as stream:
        stream.write(stdin)
    printer = threading.Thread(target=_print_lines, args=(child,), daemon=True)
    printer.start()
    watcher = threading.Thread(
        target=_watch_child,
        args=(child, parent_socket, printer, on_event or (lambda _: None)),
        daemon=True,
    )
    watcher.start()
    return child


def _print_lines(child: Child) -> None:
    """Prints the child's lines and keeps the last ones, until its pipe closes."""
    with child.process.stdout or contextlib.nullcontext(()) as stream:
        for raw in stream:
            line = raw.decode(errors="replace").rstrip()
            child.tail.append(line)
            # Our own stdout may be closed. A single write keeps the line in one piece.
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.write(f"{child.name} | {line}\n")
                sys.stdout.flush()


def _watch_child(
    child: Child,
    parent_socket: socket.socket,
    printer: threading.Thread,
    on_event: Callable[[Event], None],
) -> None:
    with (
        parent_socket,
        parent_socket.makefile("rb") as reports,
    ):  # closed when the child is reaped
        for line in reports:
            # A killed child may leave an incomplete line.
            with contextlib.suppress(ValueError):
                kind, value = json.loads(line)
                if kind == "failed":
                    child.failure = value
                _deliver(on_event, Event(child, kind, value))
        returncode = child.process.wait()
        # A grandchild may hold the pipe for a moment longer.
        printer.join(timeout=1)
    child.exited.set()
    _deliver(on_event, Event(child, "exited", returncode))


def _deliver(on_event: Callable[[Event], None], event: Event) -> None:
    """Delivers an event. An exception of the callback must not end the watching
    thread.
    """
    try:
        on_event(event)
    except Exception:
        traceback.print_exc()


def terminate(
    children: Iterable[Child], grace_s: float, number: int = signal.SIGTERM
) -> bool:
    """Sends a signal to all children, and SIGKILL to those still alive after `grace_s`.

    All children are reaped on return.

    Returns:
        Whether all ended without SIGKILL.
    """
    running = [child for child in children if not child.exited.is_set()]
    for child in running:
        child.signal(number)
    deadline = time.monotonic() + grace_s
    remaining = [child for child in running if not _exits(child, deadline)]
    for child in remaining:
        child.kill()
    for child in remaining:
        child.exited.wait()
    return not remaining


def _exits(child: Child, deadline: float) -> bool:
    """Waits until `deadline`, a time.monotonic(). Returns whether the child has
    ended.
    """
    while not child.exited.wait(
        max(0.0, min(SIGNAL_CHECK_INTERVAL_S, deadline - time.monotonic()))
    ):
        if time.monotonic() >= deadline:
            return False
    return True


@contextlib.contextmanager
def stop_signals(on_stop: Callable[[int, int], None]) -> Iterator[None]:
    """Calls on_stop(signal number, count of signals so far) for SIGINT, SIGTERM,
    SIGHUP.

    The call interrupts the main thread between two bytecodes. It must not take a lock
    that the main thread may hold.
    """
    count = 0

    def handle(number: int, _frame: object) -> None:
        nonlocal count
        count += 1
        on_stop(number, count)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def watch_parent(*, grace_s: float = 3.0, number: int = signal.SIGTERM) -> bool:
    """Ends this process when its parent ends, for whatever reason.

    The process sends itself the signal `number`, and after `grace_s` seconds it exits
    unconditionally. A spawned process calls this function first.

    Returns:
        False if there is no parent that watches this process: a user started it.

    Raises:
        SystemExit: BATON_PARENT_FD is not a socket of a parent.
    """
    fd = _parent()
    if fd is None:
        return False

    def wait() -> None:
        try:
            # A reset means that the parent ended with unread reports of ours.
            with contextlib.suppress(ConnectionResetError):
                # The parent sends nothing, so this blocks until it ends.
                os.read(fd, 1)
            os.kill(os.getpid(), number)
            time.sleep(grace_s)
        finally:
            exit_now(ORPHANED)

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()
    return True


def _parent() -> int | None:
    """Returns the socket to the parent, and makes it private to this process."""
    value = os.environ.get(PARENT_FD)
    if not value:
        return None
    try:
        fd = int(value)
        is_socket = fd > 2 and stat.S_ISSOCK(os.fstat(fd).st_mode)
    except (ValueError, OverflowError, OSError):
        is_socket = False
    if not is_socket:  # another file may have this number, and must not be written to
        print(
            f"error: {PARENT_FD} is {short_repr(value)}, expected the number of an "
            "open socket: Baton sets it for processes that it starts itself; unset "
            f"{PARENT_FD}",
            file=sys.stderr,
            flush=True,
        )
        raise SystemExit(2)
    os.set_inheritable(fd, False)
    return fd


def report_progress(text: str) -> None:
    """Reports the current step of the start to the parent, if there is one."""
    _report("progress", text)


def report_ready(info: Mapping[str, Any]) -> None:
    """Reports to the parent, once, that this process serves, and at which port."""
    _report("ready", dict(info))


def report_failure(reason: str) -> None:
    """Reports to stderr and to the parent why this process is about to end."""
    # The parent may end this process on receiving the report, so stderr comes first.
    print(f"error: {reason}", file=sys.stderr, flush=True)
    _report("failed", reason)


def _report(kind: str, value: Any) -> None:
    fd = _parent()
    if fd is not None:
        with contextlib.suppress(BrokenPipeError):
            os.write(fd, json.dumps([kind, value]).encode() + b"\n")


def exit_now(status: int) -> NoReturn:
    """Ends this process without Python's own shutdown, which waits for threads.

    Output is written before, unless nothing reads it for FLUSH_TIMEOUT_S.
    """
    try:
        flush_output()
    finally:
        os._exit(status)


def end_on_alarm() -> None:
    """Makes ALARM raise SystemExit and SIGTERM do nothing. Call it in the main thread.

    A service manager sends SIGTERM to all processes of a service at once, but our
    parent may need this process until the parent itself ends.
    """
    # The handler is a function, because child processes would inherit SIG_IGN.
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.signal(ALARM, _raise_exit)
    sys.unraisablehook = _on_unraisable


def ignore_alarm() -> None:
    """Ignores ALARM from now on, so that it cannot interrupt the shutdown.

    Other processes send it as soon as they learn that this process ends.
    """
    signal.signal(ALARM, signal.SIG_IGN)


def _raise_exit(_number: int, _frame: object) -> NoReturn:
    raise SystemExit(0)


def _on_unraisable(unraisable: Any) -> None:
    """Repeats an ALARM that arrived during a callback of a weak reference or a
    finalizer.

    Python drops the exceptions of such callbacks.
    """
    if unraisable.exc_type is SystemExit:
        signal.setitimer(signal.ITIMER_REAL, _REPEAT_ALARM_S)
    else:
        sys.__unraisablehook__(unraisable)


class VitalThread(threading.Thread):
    """A daemon thread that the process cannot work without."""

    def __init__(self, target: Callable[[], None], name: str) -> None:
        super().__init__(target=target, name=name, daemon=True)


def end_with_vital_threads() -> None:
    """Makes an exception in a VitalThread end this process with status 1.

    The reason is reported to the parent. Without this call only the thread ends, which
    is what tests need.
    """
    usual = threading.excepthook

    def end(args: threading.ExceptHookArgs) -> None:
        if not isinstance(args.thread, VitalThread):
            usual(args)
            return
        reason = args.exc_type.__name__
        if str(args.exc_value):
            reason += f": {args.exc_value}"
        # Reporting blocks if the reader of our output is stopped.
        watchdog = threading.Timer(_MAX_REPORT_S, os._exit, (1,))
        watchdog.daemon = True
        watchdog.start()
        try:
            report_failure(f"thread {args.thread.name} ended: {reason}")
            _log.critical("thread %s", args.thread.name, exc_info=args.exc_value)
        finally:
            exit_now(1)  # other threads may be in any state, so none is notified

    threading.excepthook = end
