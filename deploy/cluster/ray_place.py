"""The nodes of a Ray cluster, on which servers run as child processes of actors.

This process is the driver. It reads the events of each actor in a thread. The
supervisor restarts servers, and Ray does not: a server starts on another node if its
node has died, and a server that ends too often ends the cluster.

Each server has its own placement group with a single bundle. So all ranks of a server
are on one node, and each server can be restarted while other servers run. A decode
server prefers the node of its peer, which is a prefill server (see `preferred_node`),
because KV moves fastest within a node.
"""

import contextlib
import os
import re
import socket
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from deploy.cluster.places import OnEvent, PlaceError
from deploy.cluster.ray_actor import NODE_HOST, ServerActor, ServerEvent
from deploy.commands import (
    MIN_CORES_PER_SERVER,
    SERVERS,
    Command,
    option_prefix,
)
from protocol.process import lifecycle
from protocol.process.environment import SAFE_PATH, child_environment
from protocol.process.log_lines import as_text
from protocol.settings.settings import LocalSettings
from protocol.version import VERSION

NAMESPACE = "baton"
ADDRESS_VARIABLE = "RAY_ADDRESS"
CONNECT_TIMEOUT_S = 5.0  # timeout of a connection to the cluster's head node
# Threads of an actor: one waits for events, and others start and signal the server.
ACTOR_THREADS = 4
EVENTS_TIMEOUT_S = 5.0  # how long an actor waits for an event before it answers
# How much longer than EVENTS_TIMEOUT_S the driver waits for an actor's answer.
ANSWER_TIMEOUT_S = 30.0
# How often a thread that waits for Ray checks whether its server must end.
CHECK_INTERVAL_S = 0.5
# Longest time that a decode server waits until its peer has a node.
PEER_TIMEOUT_S = 5.0
# Ray's variable that sets whether driver and cluster must have the same "minor" or the
# same "patch" version of Python.
_MATCH_VARIABLE = "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL"


class RayPlace:
    """The nodes of a running Ray cluster.

    Raises:
        PlaceError: The cluster cannot be used, or the settings choose GPUs.
    """

    host = NODE_HOST
    keeps_ports = False
    is_shared = True

    def __init__(self, settings: LocalSettings) -> None:
        _refuse_devices(settings)
        self._settings = settings
        _connect(settings.ray_address)
        cpus = max(int(node.get("CPU", 0)) for node in _nodes())
        self.cores = min(cpus, MIN_CORES_PER_SERVER)
        # The id of the last node of each server, by the server's name.
        self._node_ids: dict[str, str] = {}
        self._placed = threading.Condition()

    def check(self, commands: Sequence[Command]) -> None:
        nodes = _nodes()
        bundles = {command.name: self.resources(command) for command in commands}
        for name, bundle in bundles.items():
            if not any(_fits(bundle, node) for node in nodes):
                raise PlaceError(
                    f"{name} needs {_describe(bundle)} on one node, and no node of the "
                    f"Ray cluster has that; the nodes have {_describe_all(nodes)}. Add "
                    f"a node, or change {self._options(bundle)}"
                )
        for resource in ("GPU", "CPU"):
            needed = sum(bundle.get(resource, 0) for bundle in bundles.values())
            available = sum(node.get(resource, 0) for node in nodes)
            if needed > available:
                raise PlaceError(
                    f"{len(bundles)} servers need {needed:g} {resource}, and the Ray "
                    f"cluster has {available:g}; its nodes have "
                    f"{_describe_all(nodes)}. Add a node, or change "
                    f"{self._options({resource: needed})}, or start fewer servers"
                )

    def resources(self, command: Command) -> dict[str, float]:
        """Returns the resources that Ray reserves for a server.

        A server on GPUs needs a GPU and a core for each rank. A server on CPUs needs a
        core for each thread of each rank.
        """
        group = self._settings.server_groups()[command.kind]
        device = group.device or self._settings.device
        has_gpus = any(node.get("GPU", 0) > 0 for node in _nodes())
        if device == "cuda" or (device == "auto" and has_gpus):
            return {"GPU": float(group.tp), "CPU": float(group.tp)}
        threads = group.threads or max(1, self.cores // group.tp)
        return {"CPU": float(group.tp * threads)}

    def spawn(self, command: Command, on_event: OnEvent) -> "RayServer":
        return RayServer(self, command, on_event)

    def close(self) -> None:
        ray.shutdown()

    def note_node(self, name: str, node_id: str) -> None:
        """Stores the node on which a server runs."""
        with self._placed:
            self._node_ids[name] = node_id
            self._placed.notify_all()

    def preferred_node(self, name: str) -> str | None:
        """Returns the id of the node that a server prefers; None: it prefers none.

        Decode server N prefers the node of its peer, if that node is alive. The peer is
        the prefill server with number N modulo --prefill.count. This method waits for
        at most PEER_TIMEOUT_S until the peer has a node.
        """
        kind, _, index = name.rpartition("-")
        group = self._settings.server_groups().get("prefill")
        if kind != "decode" or group is None:
            return None
        peer = f"prefill-{int(index) % group.count}"
        with self._placed:
            self._placed.wait_for(lambda: peer in self._node_ids, PEER_TIMEOUT_S)
            node_id = self._node_ids.get(peer)
        is_alive = any(node["NodeID"] == node_id for node in _alive_nodes())
        return node_id if is_alive else None

    def _options(self, bundle: dict[str, float]) -> str:
        """Returns the names of the `baton up` options that set the resources in
        `bundle`, for an error message."""
        option = "tp" if bundle.get("GPU") else "threads"
        groups = self._settings.server_groups()
        prefixes = [
            option_prefix(self._settings, kind) for kind in SERVERS if kind in groups
        ]
        return " and ".join(f"{prefix}{option}" for prefix in prefixes)


class RayServer:
    """One run of a server, owned by an actor.

    A thread creates the actor and reads its events until the server has ended.

    Attributes:
        exited: Set at the end of the run, after the actor was killed: the server has
            ended, could not start, or cannot be reached any more.
        output_ended: Set just before `exited`.
    """

    def __init__(self, place: RayPlace, command: Command, on_event: OnEvent) -> None:
        self.name = command.name
        self.exited = threading.Event()
        self.output_ended = threading.Event()
        self._place = place
        self._command = command
        self._on_event = on_event
        self._tail: deque[str] = deque(maxlen=lifecycle.TAIL_LINES)
        self._reason = ""
        self._node = ""
        self._actor: Any = None
        self._group: Any = None
        # Set by `signal` if there is no server yet, and by `kill`.
        self._must_end = threading.Event()
        threading.Thread(target=self._run, name=self.name, daemon=True).start()

    def signal(self, number: int) -> None:
        """Sends a signal to the server. A server that has not started is ended."""
        if self._actor is None:
            self._must_end.set()
        else:
            self._actor.signal.remote(number)

    def kill(self) -> None:
        """Ends the actor. The actor's server ends, too."""
        self._must_end.set()
        if self._actor is not None:
            ray.kill(self._actor)

    def reason(self) -> str:
        return self._reason

    def _run(self) -> None:
        try:
            self._place_actor()
            self._read_events()
        except _EndRequested:
            self._reason = self._reason or "stopped before it was ready"
        except RayError as error:
            self._reason = self._explain(error)
        except PlaceError as error:
            self._reason = str(error)
            self._on_event("failed", self._reason)
        finally:
            self._release()
            self.output_ended.set()
            self.exited.set()
            self._on_event("exited", None)

    def _place_actor(self) -> None:
        """Reserves the server's resources, and starts the server in an actor."""
        bundle = self._place.resources(self._command)
        self._on_event("queued", f"waiting for {_describe(bundle)} of the Ray cluster")
        self._group = placement_group(
            [bundle],
            strategy="STRICT_PACK",
            name=f"baton-{self.name}",
            _soft_target_node_id=self._place.preferred_node(self.name),
        )
        self._wait_for(self._group.ready())
        actor_class = ray.remote(
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            max_concurrency=ACTOR_THREADS,
            max_restarts=0,
        )(ServerActor)
        actor = actor_class.options(
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group)
        ).remote()
        description = self._wait_for(actor.describe.remote())
        self._node = f"{description['name']} ({description['host']})"
        if description["version"] != VERSION:
            raise PlaceError(
                f"the Ray node {self._node} has Baton {description['version']}, and "
                f"this driver has {VERSION}; install the same version on all nodes"
            )
        self._place.note_node(self.name, description["node_id"])
        self._on_event("placed", f"starting on {self._node}")
        self._wait_for(
            actor.start.remote(
                self.name, self._command.argv, self._command.env, os.getcwd()
            )
        )
        self._actor = actor
        if self._must_end.is_set():  # set while `_actor` was None
            raise _EndRequested

    def _wait_for(self, reference: Any) -> Any:
        """Returns the value of a Ray object.

        Raises:
            _EndRequested: `signal` or `kill` was called before the value was available.
        """
        while not self._must_end.is_set():
            try:
                return ray.get(reference, timeout=CHECK_INTERVAL_S)
            except GetTimeoutError:
                continue
        raise _EndRequested

    def _read_events(self) -> None:
        """Prints the server's lines, and calls `on_event`, until the server has ended.

        Raises:
            RayError: The actor has died or does not answer.
        """
        while True:
            reference = self._actor.next_events.remote(EVENTS_TIMEOUT_S)
            events: list[ServerEvent] = ray.get(
                reference, timeout=EVENTS_TIMEOUT_S + ANSWER_TIMEOUT_S
            )
            for kind, value in events:
                if kind == "exited":
                    self._reason = value
                    return
                if kind == "line":
                    self._tail.append(value)
                    lifecycle.print_line_of(self.name, value)
                else:
                    self._on_event(kind, value)

    def _release(self) -> None:
        """Ends the actor, and releases the resources that Ray reserved for it."""
        try:
            if self._actor is not None:
                ray.kill(self._actor)
            if self._group is not None:
                remove_placement_group(self._group)
        except (RayError, RuntimeError) as error:
            lifecycle.print_line_of(
                self.name, f"its resources may stay reserved: {error}"
            )

    def _explain(self, error: RayError) -> str:
        """Returns why a run failed, with the last line of its server, if there is one.

        Args:
            error: The error of a call to Ray.
        """
        text = str(error)
        if isinstance(error, GetTimeoutError):
            cause = f"no answer from the Ray node {self._node}"
        elif isinstance(error, ActorUnavailableError) or "node has died" in text:
            cause = f"the connection to the Ray node {self._node} is lost"
        elif "ModuleNotFoundError" in text:
            cause = (
                "a Ray node cannot import Baton; install the same version on all nodes"
            )
        else:
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            cause = f"its Ray actor died: {lines[0] if lines else type(error).__name__}"
        last_lines = [line.strip() for line in self._tail if line.strip()]
        if not last_lines:
            return cause
        return f"{cause}, its last line: {as_text(last_lines[-1])}"


class _EndRequested(Exception):
    """The server must end before it has started."""


def _refuse_devices(settings: LocalSettings) -> None:
    """Raises PlaceError if the settings choose GPUs, because Ray chooses them."""
    groups = settings.server_groups()
    for kind in SERVERS:
        if kind in groups and groups[kind].devices:
            given = ",".join(map(str, groups[kind].devices))
            raise PlaceError(
                f"{option_prefix(settings, kind)}devices {given} cannot be combined "
                "with --on ray, because Ray chooses the GPUs of each server: leave it "
                "out"
            )


def _connect(address: str | None) -> None:
    """Connects this process to a running Ray cluster.

    Raises:
        PlaceError: There is no such cluster, or it runs another version of Ray or
            Python.
    """
    # Nodes with another patch release of Python can read what this process pickles.
    os.environ.setdefault(_MATCH_VARIABLE, "minor")
    address = address or os.environ.get(ADDRESS_VARIABLE) or "auto"
    if address != "auto":
        _check_reachable(address)
    environ = child_environment()
    # The actors import Baton from the folder that this process imports it from, if
    # their nodes have this folder.
    variables = {name: environ[name] for name in ("PYTHONPATH", SAFE_PATH)}
    try:
        # Ray puts the driver's working directory in the sys.path of all actors. A
        # model.py in it would hide Baton's package `model`.
        with contextlib.chdir("/"):
            ray.init(
                address=address,
                namespace=NAMESPACE,
                log_to_driver=False,
                logging_level="ERROR",
                runtime_env={"env_vars": variables},
            )
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        raise PlaceError(_explain_connection(str(error), address)) from None


def _check_reachable(address: str) -> None:
    """Raises PlaceError if `address` is not HOST:PORT, or if nothing listens there.

    Without this check, Ray would try to connect for minutes.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in host:
        raise PlaceError(
            f"{address} (--ray-address or RAY_ADDRESS) is not HOST:PORT, such as "
            "10.0.0.3:6379"
        )
    try:
        socket.create_connection(
            (host.strip("[]"), int(port)), CONNECT_TIMEOUT_S
        ).close()
    except (OSError, OverflowError) as error:
        raise PlaceError(_explain_connection(str(error), address)) from None


def _explain_connection(message: str, address: str) -> str:
    versions = re.findall(r"(Ray|Python): (\S+)", message)
    if "Version mismatch" in message and len(versions) == 4:
        cluster = " and ".join(f"{name} {value}" for name, value in versions[:2])
        driver = " and ".join(f"{name} {value}" for name, value in versions[2:])
        return (
            f"the Ray cluster runs {cluster}, and this environment has {driver}; use "
            "the same versions (pip install ray==VERSION), such as one image for all "
            "nodes"
        )
    where = "on this machine" if address == "auto" else f"at {address}"
    cause = " ".join(message.split())
    return (
        f"no Ray cluster {where} can be used; start it by `ray start --head`, or give "
        f"its HOST:PORT by --ray-address: {cause}"
    )


def _alive_nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _nodes() -> list[dict[str, float]]:
    """Returns the resources of each node that is alive; [{}] if there is no node."""
    return [node["Resources"] for node in _alive_nodes()] or [{}]


def _fits(bundle: dict[str, float], node: dict[str, float]) -> bool:
    return all(node.get(name, 0) >= amount for name, amount in bundle.items())


def _describe(resources: dict[str, float]) -> str:
    named = [
        f"{resources[name]:g} {name}" for name in ("GPU", "CPU") if resources.get(name)
    ]
    return " and ".join(named) or "neither GPU nor CPU"


def _describe_all(nodes: Sequence[dict[str, float]]) -> str:
    return "; ".join(sorted(_describe(node) for node in nodes))
