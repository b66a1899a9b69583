"""The Ray actor that owns one server as a child process.

The server ends if its actor ends for any reason (`protocol/process/lifecycle.py`). The
driver reads the actor's events: the lines of the server, and its lifecycle events.
"""

import contextlib
import os
import platform
import socket
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from protocol.process import lifecycle
from protocol.registration import http_url
from protocol.version import VERSION

# In a server's arguments, this word stands for the address of the server's node.
NODE_HOST = "@node"
# Limit on lines that the driver has not read yet. New lines beyond it are dropped.
MAX_LINES = 10_000
MAX_EVENTS_PER_ANSWER = 1000

# The kind and the value of an event. The kinds are those of lifecycle.Event, and "line"
# with a line of output as value. The value of "exited" is the reason of the exit.
ServerEvent = tuple[str, Any]


class ServerActor:
    """Owns one server. Its methods run in different threads (`max_concurrency`)."""

    def __init__(self) -> None:
        self._child: lifecycle.Child | None = None
        self._events: deque[ServerEvent] = deque()
        self._changed = threading.Condition()
        self._num_lines = 0
        self._num_dropped = 0

    def describe(self) -> dict[str, str]:
        """Returns where this actor runs, and its versions."""
        return {
            "node_id": ray.get_runtime_context().get_node_id(),
            "host": ray.util.get_node_ip_address(),
            "name": socket.gethostname(),
            "version": VERSION,
            "python": platform.python_version(),
        }

    def start(
        self, name: str, argv: Sequence[str], env: Mapping[str, str], folder: str
    ) -> list[int]:
        """Starts the server.

        Args:
            argv: The command. Its first word, the interpreter, is replaced by this
                node's interpreter.
            folder: The driver's working directory, to which paths in `argv` may be
                relative. The server starts in this directory if the node has it.

        Returns:
            The indices of the GPUs that Ray has reserved for the server. A GPU without
            a number is left out.
        """
        with contextlib.suppress(OSError):
            os.chdir(folder)
        host = ray.util.get_node_ip_address()
        words = [word.replace(NODE_HOST, host) for word in argv[1:]]
        gpus = [gpu for gpu in map(str, ray.get_gpu_ids()) if gpu.isdigit()]
        if gpus:
            # Servers on one node map each other's memory, so each must see the GPUs of
            # all of them. A GPU without a number, such as a MIG slice, is only visible
            # through the variable that Ray has set.
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)
            words += [f"--devices={gpu}" for gpu in gpus]
        self._child = lifecycle.spawn(
            [sys.executable, *words],
            name=name,
            env=env,
            on_event=lambda event: self._on_event(event, host),
            on_line=self._on_line,
        )
        return [int(gpu) for gpu in gpus]

    def next_events(self, timeout_s: float) -> list[ServerEvent]:
        """Returns the oldest events that were not returned yet.

        They are at most MAX_EVENTS_PER_ANSWER, and a line about dropped lines. If there
        are no events, this method waits up to `timeout_s` for one.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._events, timeout_s)
            events: list[ServerEvent] = []
            while self._events and len(events) < MAX_EVENTS_PER_ANSWER:
                event = self._events.popleft()
                events.append(event)
                if event[0] == "line":
                    self._num_lines -= 1
            if self._num_dropped and not self._events:
                text = f"{self._num_dropped} lines were dropped: too many at once"
                events.append(("line", text))
                self._num_dropped = 0
            return events

    def signal(self, number: int) -> None:
        """Sends a signal to the server."""
        if self._child is not None:
            self._child.signal(number)

    def _on_line(self, line: str) -> None:
        with self._changed:
            if self._num_lines >= MAX_LINES:
                self._num_dropped += 1
                return
            self._num_lines += 1
        self._put(("line", line))

    def _on_event(self, event: lifecycle.Event, host: str) -> None:
        match event.kind:
            case "exited":
                self._put(("exited", event.child.reason()))
            case "ready":
                url = http_url(host, event.value["port"])
                self._put(("ready", {**event.value, "url": url}))
            case kind:
                self._put((kind, event.value))

    def _put(self, event: ServerEvent) -> None:
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()
