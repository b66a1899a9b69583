"""Starts the rank processes of an engine on this node, and reports their end."""

import os
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from engine.config import EngineConfig
from engine.process.interfaces import interface_of
from protocol.process import lifecycle

# Number of turns that an idle thread of torch's OpenMP pool spins before it frees the
# core. The default of 300,000 turns greatly slows processes that share cores, such as a
# prefill and a decode server on one machine. Without spinning, steps would be slower.
_OPENMP_ENV = {"GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "4000")}


# Seconds that ranks have to exit after a failure on any node. This is less than in an
# orderly shutdown, because ranks may hang in a collective that waits for a lost rank.
FAILED_GRACE_S = 1.0


@dataclass(frozen=True)
class Launch:
    """The arguments with which node 0 starts its ranks; see engine/nodes.

    Attributes:
        rank_sockets: two connected sockets for each rank of other nodes, in the order
            of the ranks; see RankLinks in engine/worker/ranks.py.
        store: the listening socket of torch's store, through which the collectives
            connect; None: the collectives connect through a file.
    """

    config: EngineConfig
    rank_sockets: list[socket.socket] = field(default_factory=list)
    store: socket.socket | None = None


class EngineProcesses:
    """The rank processes of one engine on this node.

    Args:
        module: the module that each rank runs.
        on_failure: called with the reason, from another thread, when the first rank
            exits before `stop` is called.
    """

    def __init__(self, module: str, on_failure: Callable[[str], None]) -> None:
        self._module = module
        self._on_failure = on_failure
        self._children: list[lifecycle.Child] = []
        self._lock = threading.Lock()
        self._is_stopping = False
        self._folder = tempfile.mkdtemp(prefix="baton-engine-")
        self._where = ""  # names this node in messages, if there are several nodes

    def start(self, launch: Launch) -> socket.socket:
        """Start the ranks of node 0; return the socket to rank 0.

        Rank 0 also has two sockets to every other rank; see RankLinks.
        """
        config = launch.config
        link, http = socket.socketpair()
        rank_sockets = {0: [http]}
        for rank in config.node_ranks[1:]:
            pairs = [socket.socketpair(), socket.socketpair()]
            rank_sockets[0] += [ours for ours, _ in pairs]
            rank_sockets[rank] = [theirs for _, theirs in pairs]
        rank_sockets[0] += launch.rank_sockets
        update: dict[str, object] = {"rendezvous_file": f"{self._folder}/meeting"}
        if launch.store is not None:
            update = {"store_fd": launch.store.fileno()}
        self._spawn(config.model_copy(update=update), rank_sockets, launch.store)
        return link

    def start_others(
        self, config: EngineConfig, rank_sockets: Mapping[int, list[socket.socket]]
    ) -> None:
        """Start the ranks of a node other than node 0.

        Args:
            rank_sockets: for each rank of this node, two sockets to rank 0.
        """
        self._spawn(config, rank_sockets, None)

    def _spawn(
        self,
        config: EngineConfig,
        rank_sockets: Mapping[int, list[socket.socket]],
        store: socket.socket | None,
    ) -> None:
        if config.nnodes > 1:
            self._where = f" on node {config.node_rank} ({config.node_host})"
        config_json = config.model_dump_json().encode()
        for rank, sockets in rank_sockets.items():
            name = config.role if config.tp == 1 else f"{config.role}.{rank}"
            files = [each.fileno() for each in sockets]
            argv = [sys.executable, "-m", self._module, "--rank", str(rank)]
            argv += ["--sockets", *map(str, files)]
            if store is not None and rank == 0:
                files.append(store.fileno())
            child = lifecycle.spawn(
                argv,
                name=name,
                env={**_OPENMP_ENV, **_network_env(config)},
                stdin=config_json,
                capture=False,
                on_event=self._on_event,
                files=files,
            )
            self._children.append(child)
            for each in sockets:
                each.close()
        if store is not None:
            store.close()

    def _on_event(self, event: lifecycle.Event) -> None:
        if event.kind != "exited":
            return
        with self._lock:
            was_stopping = self._is_stopping
            self._is_stopping = True
        if not was_stopping:
            self._on_failure(
                f"engine process {event.child.name}{self._where}: "
                f"{event.child.reason()}"
            )

    def have_exited_in_order(self) -> bool:
        """Whether every rank that has exited has the exit status 0."""
        return not any(child.process.returncode for child in self._children)

    def kill(self) -> None:
        """Kill every rank."""
        for child in self._children:
            child.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def stop(self, grace_s: float) -> None:
        """End every rank: SIGALRM first, SIGKILL after `grace_s`. Idempotent."""
        with self._lock:
            self._is_stopping = True
        lifecycle.terminate(self._children, grace_s, lifecycle.ALARM)
        shutil.rmtree(self._folder, ignore_errors=True)


def _network_env(config: EngineConfig) -> dict[str, str]:
    """Returns the environment variables for ranks of a server with several nodes.

    Variables that the operator has set are left out.
    """
    if config.nnodes == 1:
        return {}
    # torch's store logs a warning for each address without a host name.
    variables = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    # NCCL would choose the first interface, which other nodes may not reach.
    if interface := interface_of(config.node_host or ""):
        variables["NCCL_SOCKET_IFNAME"] = f"={interface}"
    return {name: value for name, value in variables.items() if name not in os.environ}
