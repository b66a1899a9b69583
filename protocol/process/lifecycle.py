"""Starts, watches and ends child processes.

Every child runs in its own session, so Ctrl-C in a terminal reaches only the launcher.
The child and its parent are connected by a socket pair and, by default, a pipe:

    parent --(no data)---------> child    socket; EOF: the parent has ended
    child  --(JSON lines)------> parent   socket; progress, ready, request, failed;
                                          EOF: the child has ended
    child  --(stdout + stderr)-> parent   pipe; the parent prints each line after the
                                          child's name, and keeps the last lines

No other process has the parent's end of the socket pair. Therefore the child detects
that its parent has ended, even if SIGKILL ended the parent. The state of a child is not
polled: threads block on sockets and in waitpid, and deliver events.
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
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, NoReturn, Protocol

from protocol.process.environment import child_environment
from protocol.process.log_lines import as_text, format_child_line, is_rank, sender_of
from protocol.process.output import flush_output
from protocol.short_repr import short_repr

PARENT_FD = "BATON_PARENT_FD"
TAIL_LINES = 40  # number of a child's last lines that are kept
# The signal by which a parent ends a child that has called alarm.end_on_alarm.
ALARM = signal.SIGALRM
# Maximum duration of a single wait in a main thread that handles signals. If a signal
# arrives just before a wait, it does not interrupt the wait, and Python calls the
# handler only when the wait ends.
SIGNAL_CHECK_INTERVAL_S = 0.5
_KILLED_TIMEOUT_S = 10.0  # longest wait for the end of processes after SIGKILL
# Exit status of a process that still ran some time after its parent had ended; see
# `watch_parent`.
ORPHANED = 86


class Event(NamedTuple):
    """A report of a child process, or its end. The kinds and their values are:

    progress: The child is starting; the value describes the current step.
    ready: The child serves; the value has its addresses, such as {"port": 8000}.
    request: The child requests a change from its parent; see `request_of_parent`.
    failed: The child cannot continue; the value is the reason. The child then exits.
    exited: The child has ended and is reaped; the value is its exit status, or -N if
        signal N ended it. This is always the last event.
    """

    child: "Child"
    kind: Literal["progress", "ready", "request", "failed", "exited"]
    value: Any


class Terminable(Protocol):
    """A process that `terminate` can end, such as a Child."""

    exited: threading.Event

    def signal(self, number: int) -> None:
        """Sends a signal to the process, unless it has ended."""

    def kill(self) -> None:
        """Ends the process immediately, so that it cannot finish its work."""


@dataclass(eq=False)
class Child:
    """A child process, which ends if this process ends; see `spawn`.

    Attributes:
        tail: The last lines that the child and its ranks have written.
        failure: The reason that the child has reported for its exit, or None.
        exited: Set when the child has ended and is reaped.
        output_ended: Set when no process can write to the child's pipe any more: the
            child has ended, and so have its engine's ranks. Set at once without a pipe.
    """

    name: str
    process: subprocess.Popen[bytes]
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    failure: str | None = None
    exited: threading.Event = field(default_factory=threading.Event)
    output_ended: threading.Event = field(default_factory=threading.Event)

    @property
    def pid(self) -> int:
        return self.process.pid

    def signal(self, number: int) -> None:
        """Sends a signal to the process, unless it has ended."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """Sends SIGKILL to all processes of the child's process group.

        If the child was already reaped, no signal is sent.
        """
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def reason(self) -> str:
        """Returns why the process ended, for an error message.

        The result is the reason that the process reported, else its last line with its
        exit status. The last line of a process that another process ended (exit status
        0) does not show the reason, so it is left out.
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
        """Returns the last line that the process itself wrote, or None.

        The engine ranks of the process write to the same pipe, even after the process
        has died. Lines with a rank in their header are skipped.

        Args:
            is_killed: The process was killed by a signal, so it wrote no traceback.
                Then lines without a header that follow a rank's line are skipped, too.
                If False, lines without a header belong to the process's traceback.
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
                last = as_text(line.strip())
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
    on_line: Callable[[str], None] | None = None,
    files: Sequence[int] = (),
) -> Child:
    """Starts a child process in its own session.

    The child must call `watch_parent`, so that it ends when this process ends.

    Args:
        name: Name of the child in its Events and in front of its lines.
        env: Variables that the child receives in addition to `child_environment`.
        stdin: The bytes that the child reads from its standard input. They must fit
            into the buffer of a pipe (64 KiB).
        capture: True: print the child's lines with `name` as prefix, and keep the last
            lines. False: the child writes to this process's stdout and stderr.
        on_event: Called with each Event of the child, in a thread for this child.
        on_line: Called with each captured line, in a thread for this child, instead of
            printing the line.
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
    _start_threads(child, parent_socket, on_event, on_line)
    return child


def _start_threads(
    child: Child,
    parent_socket: socket.socket,
    on_event: Callable[[Event], None] | None,
    on_line: Callable[[str], None] | None,
) -> None:
    """Starts the threads that read the child's lines and the child's reports."""
    on_event = on_event or (lambda _: None)
    on_line = on_line or partial(print_line_of, child.name)
    printer = threading.Thread(target=_read_lines, args=(child, on_line), daemon=True)
    printer.start()
    watcher = threading.Thread(
        target=_watch_child,
        args=(child, parent_socket, printer, on_event),
        daemon=True,
    )
    watcher.start()


def print_line_of(name: str, line: str) -> None:
    """Prints a line of the process `name` after its name."""
    # This process's stdout may be closed. A single write keeps the line in one piece.
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.write(f"{format_child_line(name, line)}\n")
        sys.stdout.flush()


def _read_lines(child: Child, on_line: Callable[[str], None]) -> None:
    """Stores the child's last lines and calls `on_line` for each line, until the pipe
    closes.
    """
    with child.process.stdout or contextlib.nullcontext(()) as stream:
        for raw in stream:
            line = raw.decode(errors="replace").rstrip()
            child.tail.append(line)
            on_line(line)
    child.output_ended.set()


def _watch_child(
    child: Child,
    parent_socket: socket.socket,
    printer: threading.Thread,
    on_event: Callable[[Event], None],
) -> None:
    """Delivers the child's reports as events until it ends, then reaps the child."""
    # The socket stays open until the child is reaped: closing it would end the child.
    with parent_socket, parent_socket.makefile("rb") as reports:
        for line in reports:
            # The last line is incomplete if the child was killed while it wrote.
            with contextlib.suppress(ValueError):
                kind, value = json.loads(line)
                if kind == "failed":
                    child.failure = value
                _deliver(on_event, Event(child, kind, value))
        returncode = child.process.wait()
        # A process that the child has started may still keep the pipe open.
        printer.join(timeout=1)
    child.exited.set()
    _deliver(on_event, Event(child, "exited", returncode))


def _deliver(on_event: Callable[[Event], None], event: Event) -> None:
    """Calls `on_event`. An exception is printed, and the calling thread continues."""
    try:
        on_event(event)
    except Exception:
        traceback.print_exc()


def terminate(
    children: Iterable[Terminable],
    grace_s: float,
    number: int = signal.SIGTERM,
    *,
    signalled: Collection[Terminable | None] = (),
) -> bool:
    """Ends all children: sends the signal `number`, and after `grace_s` SIGKILL.

    When the function returns, all children have ended and are reaped, except for a
    child that still runs _KILLED_TIMEOUT_S after SIGKILL.

    Args:
        signalled: Children that have already received the signal.

    Returns:
        Whether all children ended without SIGKILL.
    """
    running = [child for child in children if not child.exited.is_set()]
    for child in running:
        if child not in signalled:
            child.signal(number)
    deadline = time.monotonic() + grace_s
    remaining = [child for child in running if not _wait_for_exit(child, deadline)]
    for child in remaining:
        child.kill()
    # The kernel may keep a process that waits for a device, even after SIGKILL.
    killed_deadline = time.monotonic() + _KILLED_TIMEOUT_S
    for child in remaining:
        _wait_for_exit(child, killed_deadline)
    return not remaining


def _wait_for_exit(child: Terminable, deadline_s: float) -> bool:
    """Waits for the end of a child. Returns False if it still runs at the deadline.

    Args:
        deadline_s: A time of time.monotonic.
    """
    while not child.exited.wait(
        max(0.0, min(SIGNAL_CHECK_INTERVAL_S, deadline_s - time.monotonic()))
    ):
        if time.monotonic() >= deadline_s:
            return False
    return True


@contextlib.contextmanager
def stop_signals(on_stop: Callable[[int, int], None]) -> Iterator[None]:
    """Calls `on_stop` for each SIGINT, SIGTERM or SIGHUP within the `with`.

    Args:
        on_stop: Called with the number of the signal, and the number of signals so far.
            The call interrupts the main thread at any point. Therefore `on_stop` must
            not take a lock that the main thread may hold.
    """
    count = 0

    def handle(number: int, _frame: object) -> None:
        nonlocal count
        count += 1
        on_stop(number, count)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    old_handlers = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)


def watch_parent(*, grace_s: float = 3.0, number: int = signal.SIGTERM) -> bool:
    """Starts a thread that ends this process when its parent ends, for any reason.

    The thread sends the signal `number` to this process, and exits the process
    unconditionally after `grace_s` seconds. A process that `spawn` may have started
    calls this function when it starts.

    Returns:
        False if `spawn` has not started this process. No thread is started then.

    Raises:
        SystemExit: BATON_PARENT_FD is not an open socket.
    """
    fd = _parent_fd()
    if fd is None:
        return False

    def end_with_parent() -> None:
        try:
            # The connection is reset if the parent ends before it has read all reports
            # of this process.
            with contextlib.suppress(ConnectionResetError):
                # The parent sends no data, so this call blocks until the parent ends.
                os.read(fd, 1)
            os.kill(os.getpid(), number)
            time.sleep(grace_s)
        finally:
            exit_now(ORPHANED)

    threading.Thread(target=end_with_parent, name="parent-watch", daemon=True).start()
    return True


def _parent_fd() -> int | None:
    """Returns the descriptor of the socket to the parent, and keeps child processes
    from inheriting the socket.

    The result is None if `spawn` has not started this process.

    Raises:
        SystemExit: BATON_PARENT_FD is not an open socket.
    """
    value = os.environ.get(PARENT_FD)
    if not value:
        return None
    try:
        fd = int(value)
        is_socket = fd > 2 and stat.S_ISSOCK(os.fstat(fd).st_mode)
    except (ValueError, OverflowError, OSError):
        is_socket = False
    if not is_socket:
        # The number may belong to any file, so no report must be written to it.
        print(
            f"error: {PARENT_FD} is {short_repr(value)}, expected the number of an "
            "open socket. Only Baton sets this variable, for its child processes; "
            f"unset {PARENT_FD}",
            file=sys.stderr,
            flush=True,
        )
        raise SystemExit(2)
    os.set_inheritable(fd, False)
    return fd


def report_progress(text: str) -> None:
    """Reports the current step of the startup to the parent process, if any."""
    _report("progress", text)


def report_ready(info: Mapping[str, Any]) -> None:
    """Reports to the parent process, if any, that this process serves requests.

    A process calls this function once. `info` has the addresses of this process, such
    as {"port": 8000}.
    """
    _report("ready", dict(info))


def request_of_parent(value: Mapping[str, Any]) -> bool:
    """Sends a request to the parent process. Returns False if there is no parent.

    Only `baton up` and `baton serve` handle requests, namely those of their proxy.
    """
    _report("request", dict(value))
    return _parent_fd() is not None


def report_failure(reason: str) -> None:
    """Reports to stderr and to the parent process, if any, why this process ends."""
    # The parent may end this process when it receives the report. Therefore the reason
    # is written to stderr first.
    print(f"error: {reason}", file=sys.stderr, flush=True)
    _report("failed", reason)


def _report(kind: str, value: Any) -> None:
    fd = _parent_fd()
    if fd is not None:
        with contextlib.suppress(BrokenPipeError):
            os.write(fd, json.dumps([kind, value]).encode() + b"\n")


def exit_now(status: int) -> NoReturn:
    """Ends this process without Python's shutdown, which would wait for threads.

    The output is flushed first, for at most FLUSH_TIMEOUT_S per stream.
    """
    try:
        flush_output()
    finally:
        os._exit(status)
