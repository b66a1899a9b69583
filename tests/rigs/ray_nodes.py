"""A Ray cluster of several nodes on this machine. Each node has its own processes."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tests.ports import reserved_ports
from tests.rigs.cluster import wait_until

START_TIMEOUT_S = 120.0
CONNECT_TIMEOUT_S = 30.0
# On a busy machine, a node may need more than 30 s to start. It then gives up, and the
# start is retried.
MAX_STARTS = 3
# Options for ports that each node gets explicitly, because all nodes share this
# machine.
_PORT_OPTIONS = (
    "--node-manager-port",
    "--object-manager-port",
    "--dashboard-agent-listen-port",
    "--dashboard-agent-grpc-port",
    "--runtime-env-agent-port",
    "--metrics-export-port",
)


@dataclass
class RayNode:
    """One node: the process of `ray start --block`, and all its descendants."""

    process: subprocess.Popen[bytes]

    def is_running(self) -> bool:
        return self.process.poll() is None

    def descendants(self) -> list[int]:
        """Return the pids of all processes that run on this node."""
        pids = [self.process.pid]
        for pid in pids:
            with contextlib.suppress(OSError):
                for task in Path(f"/proc/{pid}/task").iterdir():
                    children = (task / "children").read_text().split()
                    pids += [int(child) for child in children]
        return pids

    def has(self, *words: str) -> bool:
        """Return True if a process on this node has all these words in its command
        line.
        """
        return any(
            all(word in command for word in words)
            for command in map(_command_line, self.descendants())
        )

    def kill(self) -> None:
        """Kill every process of this node at once, as if the node lost its power."""
        pids = self.descendants()
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        self.process.wait()


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().replace("\0", " ")
    except OSError:
        return ""


@dataclass
class RayCluster:
    """A running Ray cluster.

    Attributes:
        address: HOST:PORT of the head node.
        nodes: the nodes, the head first.
        ports: reserved ports for further nodes.
    """

    address: str
    ports: list[int]
    nodes: list[RayNode] = field(default_factory=list)

    def add_node(self, cpus: int, *role: str) -> RayNode:
        """Start a node, and wait until it is part of the cluster.

        Args:
            cpus: the CPUs that Ray may reserve on the node.
            role: options that start a head node. Without them, the node joins the head.
        """
        old_nodes = set() if role else _alive_nodes(self.address)
        argv = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
        argv += role or ("--address", self.address)
        argv += ["--num-cpus", str(cpus), "--num-gpus", "0", "--disable-usage-stats"]
        argv += ["--object-store-memory", "80000000", "--node-ip-address", "127.0.0.1"]
        for option in _PORT_OPTIONS:
            argv += [option, str(self.ports.pop())]
        # Workers use any free ports. Unlike the node's own processes, workers cannot
        # bind a port that a socket of `reserved_ports` has bound.
        argv += ["--min-worker-port", "0", "--max-worker-port", "0"]
        environ = {k: v for k, v in os.environ.items() if not k.startswith("BATON_")}
        for _ in range(MAX_STARTS):
            process = subprocess.Popen(
                argv, env=environ, stdout=subprocess.DEVNULL, start_new_session=True
            )
            node = RayNode(process)
            self.nodes.append(node)
            has_started_or_ended = partial(self._has_started_or_ended, node, old_nodes)
            wait_until(has_started_or_ended, START_TIMEOUT_S)
            if node.is_running():
                return node
            node.kill()  # also the node's other processes
        raise AssertionError(f"Ray did not start a node in {MAX_STARTS} attempts")

    def _has_started_or_ended(self, node: RayNode, old_nodes: set[str]) -> bool:
        """Return True if the cluster has a new node, or the process of `node` has
        ended.

        Ray may still list a node that was just killed. So the ids of the nodes are
        compared, not their number.
        """
        return not node.is_running() or bool(_alive_nodes(self.address) - old_nodes)


@contextlib.contextmanager
def ray_cluster(cpus_of_nodes: list[int], num_spare: int) -> Iterator[RayCluster]:
    """Start a head node and further nodes, and kill them when the block ends.

    Args:
        cpus_of_nodes: the CPUs that Ray may reserve on each node.
        num_spare: number of nodes that the test may add.
    """
    # Ray's sockets lie in this folder, and their paths must be short.
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    num_nodes = len(cpus_of_nodes) + num_spare
    with reserved_ports(2 + len(_PORT_OPTIONS) * num_nodes) as ports:
        port = str(ports.pop())
        head = ["--head", "--port", port, "--temp-dir", folder]
        head += ["--include-dashboard=false", "--ray-client-server-port"]
        head += [str(ports.pop())]
        cluster = RayCluster(f"127.0.0.1:{port}", ports)
        try:
            for index, cpus in enumerate(cpus_of_nodes):
                cluster.add_node(cpus, *([] if index else head))
            yield cluster
        finally:
            for node in reversed(cluster.nodes):
                node.kill()
            shutil.rmtree(folder, ignore_errors=True)


def _alive_nodes(address: str) -> set[str]:
    """Return the ids of all live nodes, or an empty set if there is no cluster yet."""
    script = (
        "import ray, sys\n"
        "ray.init(address=sys.argv[1], log_to_driver=False, logging_level='ERROR')\n"
        "alive = [node['NodeID'] for node in ray.nodes() if node['Alive']]\n"
        "print('alive:', *alive)"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", script, address],
            capture_output=True,
            text=True,
            timeout=CONNECT_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:  # the head does not listen yet
        return set()
    # Ray may print other lines.
    matches = re.findall(r"(?m)^alive: (.*)$", done.stdout)
    return set(matches[0].split()) if matches else set()
