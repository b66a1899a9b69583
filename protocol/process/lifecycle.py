"""Processes that start, report and end together.

Every child runs in a session of its own, so Ctrl-C in a terminal reaches the launcher alone, and
holds one end of a socket pair whose other end only its parent has:

    parent --(nothing, ever)---> child    EOF: the parent is gone, however it died
    child  --(JSON lines)------> parent   progress, ready, failed; EOF: the child is gone
    child  --(stdout + stderr)-> parent   a pipe: prefixed by the child's name, tail kept

Nothing here polls: sockets and waitpid block in threads, and what they learn arrives as events.
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

import protocol
from protocol.process.logging import get_logger, is_rank, sender_of
from protocol.process.output import flush_output
from protocol.settings.sources import clean_environment
from protocol.short_repr import short_repr

PARENT_FD = "BATON_PARENT_FD"
SAFE_PATH = (
    "PYTHONSAFEPATH"  # Python reads it: the working directory is not on sys.path
)
TAIL_LINES = 40
_AGAIN_S = 0.01
ALARM = (
    signal.SIGALRM
)  # ends a process of `end_on_alarm`; a parent sends it, and nobody else
_TELL_S = 5.0  # longest: somebody may have stopped to read our output
_log = get_logger(__name__)
# Longest wait of a main thread that listens to signals. One that arrives just before the thread
# begins to wait does not interrupt it; Python calls the handler when the wait ends.
SIGNAL_LOOK_S = 0.5
ORPHANED = (
    86  # exit status of a process that had to be ended because its parent was gone
)


class Event(NamedTuple):
    """What became of a child, by `kind` and its `value`:

    progress: it says by a text what it is doing while it starts
    ready: it serves; where, by name, such as {"port": 8000}
    failed: why it cannot go on, a text; its exit follows
    exited: it has ended and is reaped; its status, -N if signal N ended it. Always the last
    """

    child: "Child"
    kind: Literal["progress", "ready", "failed", "exited"]
    value: Any


@dataclass(eq=False)
class Child:
    """A running process of ours. Ended by `terminate`, or by itself when this process is gone."""

    name: str
    process: subprocess.Popen[bytes]
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    failure: str | None = None
    exited: threading.Event = field(default_factory=threading.Event)

    @property
    def pid(self) -> int:
        return self.process.pid

    def signal(self, number: int) -> None:
        """Signals the process; one that has ended already is left alone."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL to the process and whatever else is in its group."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def reason(self) -> str:
        """Why it ended: what it reported, else its last line, else its exit status. A last line
        tells nothing if the process ended in order, and little if it was killed."""
        if self.failure is not None:
            return self.failure
        code = self.process.returncode
        ended = _in_words(code)
        last = self._last_words(is_killed=(code or 0) < 0)
        if code == 0:
            return f"somebody told it to ({ended})"
        if last is None:
            return ended
        return (
            f"{ended}, its last line: {last}"
            if (code or 0) < 0
            else f"{last} ({ended})"
        )

    def _last_words(self, *, is_killed: bool) -> str | None:
        """The last line that the process wrote itself. Its engine ranks write to the same pipe, and
        go on doing so after its death, when they report that they end because of it.

        Args:
            is_killed: the process had no chance to write a traceback: lines without a header belong
                to the process that wrote the header before them.
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


def _in_words(returncode: int | None) -> str:
    if returncode is None or returncode >= 0:
        return "still running" if returncode is None else f"exit status {returncode}"
    is_known = -returncode in set(signal.Signals)
    return f"killed by {signal.Signals(-returncode).name if is_known else -returncode}"


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
    """Starts a process in a session of its own that ends when this one does (see watch_parent).

    Args:
        env: added to this process's environment, of which BATON_* settings are not passed on.
        stdin: what the child reads from its standard input, at most a pipe's buffer (64 KiB).
        capture: print its lines prefixed by `name` and keep the last; False: it has our stdout.
        on_event: called from a thread of the child's own.
        files: descriptors that the child has too, by the same numbers.

    Raises:
        OSError: the program cannot be run.
    """
    ours, theirs = socket.socketpair()
    try:
        process = subprocess.Popen(
            list(argv),
            env={**child_environment(), **(env or {}), PARENT_FD: str(theirs.fileno())},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if capture else None,
            stderr=subprocess.STDOUT if capture else None,
            pass_fds=(theirs.fileno(), *files),
            start_new_session=True,
        )
    except OSError:
        ours.close()
        raise
    finally:
        theirs.close()
    child = Child(name, process)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as stream:
        stream.write(stdin)
    printer = threading.Thread(target=_print_lines, args=(child,), daemon=True)
    printer.start()
    watched = (child, ours, printer, on_event or (lambda _: None))
    threading.Thread(target=_watch_child, args=watched, daemon=True).start()
    return child


def child_environment() -> dict[str, str]:
    """This process's environment for another Python process of Baton's. BATON_* settings are left
    out, and the process imports the same Baton as this one, also in a working directory that has a
    model.py, an engine/ or a json.py of its own. The processes that it starts inherit that."""
    environ = clean_environment(os.environ)
    environ[SAFE_PATH] = "1"
    root = os.path.dirname(os.path.dirname(os.path.abspath(protocol.__file__)))
    # A checkout in which `python -m` was called is on sys.path for that reason alone. A folder of
    # installed packages must not be named: it would come before Python's own library.
    paths = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    is_installed = os.path.basename(root) in ("site-packages", "dist-packages")
    if (
        not is_installed
        and root not in paths
        and root in map(os.path.abspath, sys.path)
    ):
        environ["PYTHONPATH"] = os.pathsep.join([root, *paths])
    return environ


@contextlib.contextmanager
def safe_path() -> Iterator[None]:
    """Within, processes that multiprocessing starts do not import from the working directory."""
    before = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SAFE_PATH]
        else:
            os.environ[SAFE_PATH] = before


def _print_lines(child: Child) -> None:
    with child.process.stdout or contextlib.nullcontext(()) as stream:
        for raw in stream:
            line = raw.decode(errors="replace").rstrip()
            child.tail.append(line)
            with contextlib.suppress(OSError, ValueError):  # our own stdout may be gone
                sys.stdout.write(
                    f"{child.name} | {line}\n"
                )  # one write: lines stay whole
                sys.stdout.flush()


def _watch_child(
    child: Child,
    ours: socket.socket,
    printer: threading.Thread,
    on_event: Callable[[Event], None],
) -> None:
    with ours, ours.makefile("rb") as reports:  # closed when the child is reaped
        for line in reports:
            with contextlib.suppress(
                ValueError
            ):  # one that a killed child left unfinished
                kind, value = json.loads(line)
                if kind == "failed":
                    child.failure = value
                _tell(on_event, Event(child, kind, value))
        returncode = child.process.wait()
        printer.join(timeout=1)  # a grandchild may hold the pipe for a moment longer
    child.exited.set()
    _tell(on_event, Event(child, "exited", returncode))


def _tell(on_event: Callable[[Event], None], event: Event) -> None:
    """Whatever comes of it, the child is watched on, until it has ended and is reaped."""
    try:
        on_event(event)
    except Exception:
        traceback.print_exc()


def terminate(
    children: Iterable[Child], grace_s: float, number: int = signal.SIGTERM
) -> bool:
    """This signal to all, SIGKILL to those that have not ended `grace_s` later; all are reaped.
    Returns whether all ended without SIGKILL."""
    running = [child for child in children if not child.exited.is_set()]
    for child in running:
        child.signal(number)
    deadline = time.monotonic() + grace_s
    late = [child for child in running if not _exits(child, deadline)]
    for child in late:
        child.kill()
    for child in late:
        child.exited.wait()
    return not late


def _exits(child: Child, deadline: float) -> bool:
    """Waits for the child's end until `deadline`, a time.monotonic(). Returns whether it ended."""
    while not child.exited.wait(
        max(0.0, min(SIGNAL_LOOK_S, deadline - time.monotonic()))
    ):
        if time.monotonic() >= deadline:
            return False
    return True


@contextlib.contextmanager
def stop_signals(on_stop: Callable[[int, int], None]) -> Iterator[None]:
    """Calls on_stop(signal number, how many so far) for SIGINT, SIGTERM and SIGHUP.

    It runs in the main thread between two bytecodes: take no lock there that the main thread holds.
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
    """Ends this process when the one that spawned it is gone, however it died: it gets this signal,
    and `grace_s` later it ends without asking. Call it first thing in a spawned process.

    Returns:
        False when no parent watches over this process (it was started by hand).

    Raises:
        SystemExit: BATON_PARENT_FD is no socket of a parent's; says so.
    """
    fd = _parent()
    if fd is None:
        return False

    def wait() -> None:
        try:
            with contextlib.suppress(
                ConnectionResetError
            ):  # it has not read all that we told it
                os.read(fd, 1)  # until its end, as it sends nothing
            os.kill(os.getpid(), number)
            time.sleep(grace_s)
        finally:
            exit_now(ORPHANED)

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()
    return True


def _parent() -> int | None:
    """The socket our parent left us, made private to this process."""
    value = os.environ.get(PARENT_FD)
    if not value:
        return None
    try:
        fd = int(value)
        is_socket = fd > 2 and stat.S_ISSOCK(os.fstat(fd).st_mode)
    except (ValueError, OverflowError, OSError):
        is_socket = False
    if not is_socket:  # to go on would be to write into whatever else has that number
        told = f"{PARENT_FD} is {short_repr(value)}, expected the number of an open socket: Baton "
        told += f"sets it for processes that it starts itself; unset {PARENT_FD}"
        print(f"error: {told}", file=sys.stderr, flush=True)
        raise SystemExit(2)
    os.set_inheritable(fd, False)
    return fd


def report_progress(text: str) -> None:
    """Tells the parent what is going on; nothing when started by hand."""
    _report("progress", text)


def report_ready(info: Mapping[str, Any]) -> None:
    """Tells the parent, once, that this process serves and where: {"port": .., ...}."""
    _report("ready", dict(info))


def report_failure(reason: str) -> None:
    """Tells the parent why this process is about to end; the reason also goes to stderr."""
    print(
        f"error: {reason}", file=sys.stderr, flush=True
    )  # first: whoever hears of it may end us
    _report("failed", reason)


def _report(kind: str, value: Any) -> None:
    fd = _parent()
    if fd is not None:
        with contextlib.suppress(BrokenPipeError):
            os.write(fd, json.dumps([kind, value]).encode() + b"\n")


def exit_now(status: int) -> NoReturn:
    """Ends this process without Python's own end, which waits for threads. What it has printed and
    logged is written before that, unless nothing reads it for FLUSH_TIMEOUT_S."""
    try:
        flush_output()
    finally:
        os._exit(status)


def end_on_alarm() -> None:
    """From now on ALARM raises SystemExit, and SIGTERM does nothing: a service manager sends it to
    all processes of a service, and our parent may need us until it ends itself. Call it in the main
    thread."""
    signal.signal(signal.SIGTERM, lambda *_: None)  # what we start does not inherit it
    signal.signal(ALARM, _raise_exit)
    sys.unraisablehook = _on_unraisable


def ignore_alarm() -> None:
    """From now on ALARM does not break into what is being closed: once others hear that this
    process ends, they end it, too."""
    signal.signal(ALARM, signal.SIG_IGN)


def _raise_exit(_number: int, _frame: object) -> NoReturn:
    raise SystemExit(0)


def _on_unraisable(unraisable: Any) -> None:
    """What is raised in callbacks of weak references, finalizers and the like ends there. An alarm
    that came while one ran comes again."""
    if unraisable.exc_type is SystemExit:
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
    else:
        sys.__unraisablehook__(unraisable)


class VitalThread(threading.Thread):
    """A daemon thread that others rely on for as long as the process lives."""

    def __init__(self, target: Callable[[], None], name: str) -> None:
        super().__init__(target=target, name=name, daemon=True)


def end_with_vital_threads() -> None:
    """From now on a VitalThread that raises ends this process, with status 1, the reason reported
    to its parent. Without this it ends as any thread does, which is what tests see."""
    usual = threading.excepthook

    def end(args: threading.ExceptHookArgs) -> None:
        if not isinstance(args.thread, VitalThread):
            usual(args)
            return
        reason = args.exc_type.__name__
        if str(args.exc_value):
            reason += f": {args.exc_value}"
        late = threading.Timer(_TELL_S, os._exit, (1,))
        late.daemon = True
        late.start()
        try:
            report_failure(f"thread {args.thread.name} ended: {reason}")
            _log.critical("thread %s", args.thread.name, exc_info=args.exc_value)
        finally:
            exit_now(1)  # other threads may be anywhere; none of them is asked

    threading.excepthook = end
