"""The interface of places where servers run, and its implementation for this machine.

`deploy/cluster/ray_place.py` implements it for the nodes of a Ray cluster.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from deploy.commands import Command
from deploy.healthcheck import LOOPBACK
from protocol.process import lifecycle
from protocol.settings.machine import available_cores

# Called with the kind and the value of each Event of a process; see lifecycle.Event.
# The value of "exited" is not used. A place may add two kinds of events, which have a
# text as value: "queued" (the server waits for free resources) and "placed" (the server
# starts on a machine).
OnEvent = Callable[[str, Any], None]


class PlaceError(Exception):
    """The servers cannot run at this place. The message is for the user."""


class PartProcess(lifecycle.Terminable, Protocol):
    """One run of a program of the cluster.

    Attributes:
        output_ended: Set when no more lines of this run can be printed.
    """

    output_ended: threading.Event

    def reason(self) -> str:
        """Returns why the process has ended, for an error message."""


class Place(Protocol):
    """A place where servers run.

    Attributes:
        host: The value of --host in the servers' command lines: an address, or on Ray
            a placeholder for the address of the server's node.
        cores: CPU cores from which the default of --threads is computed. On this
            machine, all servers share them; on Ray, each server has its own.
        keeps_ports: Whether a restarted server must use the ports of its previous run.
        is_shared: Whether other machines can reach the servers, which then need API
            keys.
    """

    host: str
    cores: int
    keeps_ports: bool
    is_shared: bool

    def check(self, commands: Sequence[Command]) -> None:
        """Raises PlaceError if these servers certainly cannot run here together.

        LocalPlace checks nothing.
        """

    def spawn(self, command: Command, on_event: OnEvent) -> PartProcess:
        """Starts a server.

        The value of the server's event "ready" contains "port". It also contains "url",
        unless the server's URL is http://HOST:PORT with `host` as HOST.
        """

    def close(self) -> None:
        """Releases the resources of the place, after all servers have ended."""


class LocalPlace:
    """This machine."""

    host = LOOPBACK
    keeps_ports = True
    is_shared = False

    def __init__(self) -> None:
        self.cores = available_cores()

    def check(self, commands: Sequence[Command]) -> None:
        pass

    def spawn(self, command: Command, on_event: OnEvent) -> lifecycle.Child:
        return lifecycle.spawn(
            command.argv,
            name=command.name,
            env=command.env,
            on_event=lambda event: on_event(event.kind, event.value),
        )

    def close(self) -> None:
        pass
