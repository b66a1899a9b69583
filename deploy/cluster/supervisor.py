"""Starts the programs of a cluster, watches them, and restarts those that end.

The life of a part, which is one program across its restarts:

    STARTING --ready--> READY --ends--> BACKING_OFF --back-off is over--> STARTING
        |                 |`--ends, and no restart is left--> the cluster ends
        |                 `--retire--> ENDING --ends--> removed
        `--ends before it was ever ready--> the cluster ends

A part that ends during a restart is handled like a part that was READY. A part can be
retired in every state.

If a part was never ready, its options or its machine are probably wrong, and a restart
would only repeat the failure. Three kinds of parts are removed instead of ending the
cluster: optional parts, parts that are leaving, and parts that were added to a running
cluster and have not been ready yet. `on_removed` is called for each removed part.
"""

import queue
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from deploy.cluster.places import LocalPlace, PartProcess, Place
from deploy.cluster.restarts import RestartBudget
from deploy.commands import Command, Kind
from protocol.process import lifecycle

# `Supervisor.wait` prints what is missing after FIRST_NOTE_S, then at least every
# NOTE_INTERVAL_S.
FIRST_NOTE_S = 1.0
NOTE_INTERVAL_S = 5.0
# Longest time that a restart waits, after its back-off, for processes of the previous
# run. After a server has died, the ranks of its engine end by themselves, but hold
# memory until they end.
MAX_OUTPUT_WAIT_S = 15.0
# Shortest timeout of a wait for an event. While a restart waits for old processes, its
# deadline has passed already, and the loop must not spin.
MIN_WAIT_S = 0.05
# How long a part that has reported a failure may take to exit.
FAILURE_EXIT_S = 10.0
_FOREVER = float("inf")


class ClusterFailed(Exception):
    """The cluster cannot start or continue. The message is for the user."""


class StopRequested(Exception):
    """The user has requested that the cluster stop."""


def print_line(text: str) -> None:
    """Prints a line with the prefix that marks the launcher's own lines."""
    print(f"baton | {text}", flush=True)


class State(Enum):
    STARTING = "starting"
    READY = "ready"
    BACKING_OFF = "backing_off"
    ENDING = "ending"


@dataclass(eq=False)
class Part:
    """A program of the cluster, across its restarts.

    Attributes:
        name: The name of the part, such as "decode-1".
        create_command: Returns the command of the next run, without the ports of
            earlier runs; see `command`.
        place: Where the part runs.
        budget: The restarts of this part.
        is_added: The cluster was already running when the part was added, and the part
            has not been ready yet.
        is_optional: The cluster continues without the part if it cannot start or
            cannot be restarted.
        is_leaving: The part is no longer needed: it drains, and is not restarted.
        was_ready: The part has been ready in any of its runs.
        run: Number of the current run. Events of earlier runs are ignored.
        ports: The ports of the last run that was ready, by the names of their options.
        url: The URL of the last run that was ready.
        progress: The last report about the start of the part.
        deadline: When the current state, such as a back-off, times out (monotonic
            seconds).
        last_words: Why the latest finished run ended; empty if no run has ended.
    """

    name: str
    kind: Kind
    create_command: Callable[[], Command]
    place: Place
    budget: RestartBudget
    is_added: bool = False
    is_optional: bool = False
    is_leaving: bool = False
    was_ready: bool = False
    run: int = 0
    process: PartProcess | None = None
    state: State = State.STARTING
    ports: dict[str, int] = field(default_factory=dict)
    url: str = ""
    progress: str = "starting"
    deadline: float = _FOREVER
    last_words: str = ""

    @property
    def index(self) -> int:
        """Number of this server among the servers of its kind."""
        return int(self.name.rpartition("-")[2])

    def command(self) -> Command:
        """Returns the command of the next run.

        If the place keeps ports, the command has the ports of the last run that was
        ready, if there was one.
        """
        command = self.create_command()
        return command.with_ports(self.ports) if self.place.keeps_ports else command


class _PartEvent(NamedTuple):
    part: Part
    run: int
    kind: str
    value: Any


class _FailedProcess:
    """A run of a program that could not be started."""

    def __init__(self, reason: str) -> None:
        self._reason = reason
        self.exited = threading.Event()
        self.exited.set()
        self.output_ended = threading.Event()
        self.output_ended.set()

    def signal(self, number: int) -> None:
        pass

    def kill(self) -> None:
        pass

    def reason(self) -> str:
        return self._reason


@dataclass(eq=False)
class Supervisor:
    """The parts of one cluster.

    Only the main thread calls the methods. All other threads only put events into the
    queue. `wait` and `take_event` raise ClusterFailed when the cluster cannot continue,
    and StopRequested on a signal.

    Args:
        start_timeout_s: Longest time until the cluster is ready, and until a part that
            is added or restarted later is ready, in seconds.
        grace_s: Longest time for a part to end after SIGTERM, in seconds.

    Attributes:
        on_ready: Called when a part becomes ready, including after a restart.
        on_removed: Called when a part has been removed, with the reason; see `_remove`.
        on_request: Called with each request that a part sends.
    """

    max_restarts: int
    restart_window_s: float
    start_timeout_s: float
    grace_s: float
    on_ready: Callable[[Part], None] = lambda _part: None
    on_removed: Callable[[Part, str], None] = lambda _part, _reason: None
    on_request: Callable[[Any], None] = lambda _value: None

    def __post_init__(self) -> None:
        self.parts: list[Part] = []
        self.killed_by_user = False
        # None stands for a stop signal. The signal handler may call `put` while the
        # main thread is in `get`, which only SimpleQueue allows.
        self._events: queue.SimpleQueue[_PartEvent | None] = queue.SimpleQueue()
        self._start_deadline = time.monotonic() + self.start_timeout_s

    # starting and ending

    def add(
        self,
        name: str,
        kind: Kind,
        create_command: Callable[[], Command],
        place: Place | None = None,
        *,
        is_added: bool = False,
        is_optional: bool = False,
    ) -> Part:
        """Starts a part, and returns it.

        Args:
            place: Where the part runs; None: on this machine.
            is_added: The cluster is already running, and must not end if this part
                cannot start.
            is_optional: The cluster continues without the part if it cannot start or
                cannot be restarted.
        """
        part = Part(
            name=name,
            kind=kind,
            create_command=create_command,
            place=place or LocalPlace(),
            budget=RestartBudget(self.max_restarts, self.restart_window_s),
            is_added=is_added,
            is_optional=is_optional,
        )
        self.parts.append(part)
        self._start(part)
        return part

    def retire(self, part: Part) -> None:
        """Ends a part, and removes it when it has ended."""
        if part.process is None or part.process.exited.is_set():
            self._remove(part, "")
            return
        part.state = State.ENDING
        part.deadline = time.monotonic() + self.grace_s
        part.process.signal(signal.SIGTERM)

    def end_all(self) -> bool:
        """Ends all parts. Returns whether all ended within `grace_s`."""
        # Parts that are ending have already received SIGTERM. A second signal would
        # kill them.
        ending = [part.process for part in self.parts if part.state is State.ENDING]
        return lifecycle.terminate(self.processes(), self.grace_s, signalled=ending)

    def processes(self) -> list[PartProcess]:
        return [part.process for part in self.parts if part.process is not None]

    def on_signal(self, count: int) -> None:
        """Requests a stop on the first signal, and kills the parts on later signals.

        Args:
            count: Number of signals received so far.
        """
        self._events.put(None)
        if count > 1:
            self.killed_by_user = True
            for process in self.processes():
                process.kill()

    def _start(self, part: Part) -> None:
        part.run += 1
        part.state = State.STARTING
        part.progress = "starting"
        # If an optional part is not ready in time, the other parts still need the rest
        # of the start timeout.
        share = 0.5 if part.is_optional else 1.0
        part.deadline = time.monotonic() + share * self.start_timeout_s
        run = part.run
        # If a second stop signal arrives before the assignment, `on_signal` does not
        # kill this process. The process then ends when the launcher exits.
        try:
            part.process = part.place.spawn(
                part.command(),
                lambda kind, value: self._events.put(
                    _PartEvent(part, run, kind, value)
                ),
            )
        except (OSError, RuntimeError) as error:
            # For example, the machine has no free memory. The part is then handled like
            # a part that ends immediately after its start.
            part.process = _FailedProcess(f"it could not be started: {error}")
            self._events.put(_PartEvent(part, run, "exited", None))

    # waiting

    def wait_until_ready(self, *parts: Part) -> None:
        """Waits until all of `parts` are ready or were removed; see `wait`."""
        self.wait(
            lambda: ", ".join(
                f"{part.name} ({part.progress})"
                for part in parts
                if part.state is not State.READY and part in self.parts
            )
        )

    def wait(
        self, missing: Callable[[], str], check_interval_s: float | None = None
    ) -> None:
        """Waits until `missing` returns an empty string.

        While waiting, this method processes events. After a while, it prints what is
        missing at intervals, and whenever the description changes.

        Args:
            missing: Returns a description of what is missing.
            check_interval_s: Longest time between two calls of `missing`.

        Raises:
            ClusterFailed: The start timeout has passed, or a part cannot continue.
            StopRequested: A signal has arrived.
        """
        started = time.monotonic()
        printed = ""
        next_note_at = started + FIRST_NOTE_S
        while description := missing():
            now = time.monotonic()
            if now >= self._start_deadline:
                raise ClusterFailed(
                    f"not ready in time (--start-timeout-s), waited for {description}"
                )
            if now >= next_note_at or (printed and description != printed):
                print_line(f"{now - started:.0f} s, waiting for {description}")
                printed = description
                next_note_at = now + NOTE_INTERVAL_S
            self.take_event(
                min(
                    check_interval_s or NOTE_INTERVAL_S,
                    next_note_at - now,
                    self._start_deadline - now,
                )
            )

    def take_event(self, timeout_s: float) -> None:
        """Waits for an event and handles it; then handles all deadlines that have
        passed.

        Args:
            timeout_s: Longest wait for an event.

        Raises:
            ClusterFailed: A part cannot continue.
            StopRequested: A signal has arrived.
        """
        next_deadline = min((part.deadline for part in self.parts), default=_FOREVER)
        timeout_s = min(
            timeout_s,
            next_deadline - time.monotonic(),
            lifecycle.SIGNAL_CHECK_INTERVAL_S,
        )
        try:
            event = self._events.get(timeout=max(MIN_WAIT_S, timeout_s))
        except queue.Empty:
            pass
        else:
            if event is None:
                raise StopRequested
            # Events of removed parts and of earlier runs may still be in the queue.
            if event.part in self.parts and event.run == event.part.run:
                self._process(event)
        for part in list(self.parts):
            if part.deadline <= time.monotonic():
                self._on_deadline(part)

    # events

    def _process(self, event: _PartEvent) -> None:
        part = event.part
        match event.kind:
            case "progress" if part.state is State.STARTING:
                part.progress = event.value
            case "queued" | "placed" if part.state is State.STARTING:
                self._on_placement(part, event.value, is_placed=event.kind == "placed")
            case "ready" if part.state is State.STARTING:
                self._on_part_ready(part, event.value)
            case "request":
                self.on_request(event.value)
            case "failed":
                self._on_failure(part, event.value)
            case "exited":
                self._on_exit(part)

    def _on_placement(self, part: Part, progress: str, *, is_placed: bool) -> None:
        """Handles the placement of a part: it waits for free resources, or it starts.

        A restarted part may wait for resources without a time limit, because the rest
        of the cluster serves without it.
        """
        part.progress = progress
        if part.was_ready:
            print_line(f"{part.name}: {progress}")
            now = time.monotonic()
            part.deadline = now + self.start_timeout_s if is_placed else _FOREVER

    def _on_part_ready(self, part: Part, info: dict[str, Any]) -> None:
        part.ports = {name: info[name] for name in info if name.endswith("port")}
        part.url = info.get("url") or f"http://{part.place.host}:{info['port']}"
        if part.was_ready:
            print_line(f"{part.name} is ready again at {part.url}")
        part.state = State.READY
        part.deadline = _FOREVER
        part.was_ready = True
        part.is_added = False
        self.on_ready(part)

    def _on_failure(self, part: Part, reason: str) -> None:
        """Handles a failure that a part reports before it exits.

        Raises:
            ClusterFailed: The part is not restarted, and the cluster needs it.
        """
        is_restarted = part.was_ready and part.budget.max_restarts > 0
        may_end = part.is_added or part.is_optional or part.is_leaving
        may_end = may_end or part.state is State.ENDING
        if not (is_restarted or may_end):
            raise ClusterFailed(f"{part.name}: {reason}")
        part.deadline = time.monotonic() + FAILURE_EXIT_S

    def _on_exit(self, part: Part) -> None:
        """Begins the back-off of a part that has ended, or removes the part.

        Raises:
            ClusterFailed: The part cannot be restarted, and the cluster needs it.
        """
        assert part.process is not None
        reason = part.process.reason()
        if part.state is State.ENDING or part.is_leaving:
            self._remove(part, "")
            return
        if part.is_added or (part.is_optional and not part.was_ready):
            self._remove(part, reason)
            return
        ended = f"{part.name} ended: {reason}"
        if not part.was_ready:
            raise ClusterFailed(ended)
        backoff_s = part.budget.take()
        if backoff_s is None and part.is_optional:
            self._remove(part, reason)
            return
        limit = f"{part.budget.max_restarts} within {self.restart_window_s:g} s"
        if backoff_s is None and part.budget.max_restarts == 0:
            raise ClusterFailed(ended)
        if backoff_s is None:
            raise ClusterFailed(
                f"{ended}; no restart is left: it has had {limit} (--max-restarts, "
                "--restart-window-s)"
            )
        part.last_words = reason
        part.state = State.BACKING_OFF
        part.deadline = time.monotonic() + backoff_s
        print_line(
            f"{ended}; restarting it in {backoff_s:g} s (restart "
            f"{part.budget.num_restarts} of {limit})"
        )

    def _remove(self, part: Part, reason: str) -> None:
        """Removes a part after its process has ended.

        Args:
            reason: Why the part could not start, or could not be restarted; empty if
                the part was no longer needed.
        """
        self.parts.remove(part)
        part.deadline = _FOREVER
        self.on_removed(part, reason)

    def _on_deadline(self, part: Part) -> None:
        """Restarts a part after its back-off, or kills a part that is too slow."""
        process = part.process
        assert process is not None
        if part.state is not State.BACKING_OFF:
            # The part was not ready in time, or did not end in time.
            may_end = part.was_ready or part.is_added or part.is_optional
            if part.state is State.STARTING and not may_end:
                return  # `wait` reports that the cluster was not ready in time
            if part.state is State.STARTING:
                print_line(
                    f"{part.name} is not ready in time (--start-timeout-s "
                    f"{self.start_timeout_s:g}); killing it"
                )
            part.deadline = _FOREVER
            process.kill()
            return
        waited_s = time.monotonic() - part.deadline
        if process.output_ended.is_set() or waited_s >= MAX_OUTPUT_WAIT_S:
            self._start(part)
