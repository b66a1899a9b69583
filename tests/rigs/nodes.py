"""Servers that run on several nodes.

The nodes are loopback addresses of this machine, or hosts of tests/rigs/hosts.py.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

from protocol.process import lifecycle
from tests.ports import reserved_ports
from tests.rigs.cluster import Server, start
from tests.rigs.hosts import Hosts

_PORT = 29500  # free on every host


class Node(NamedTuple):
    """The differences between one node and the others.

    Attributes:
        argv: options in addition to those of all nodes.
        env: variables in addition to those of all nodes.
        host: the name of the host; unused on loopback addresses.
    """

    argv: Sequence[str] = ()
    env: Mapping[str, str] = {}
    host: str = ""


def start_nodes(
    module: str,
    *argv: str,
    nodes: Sequence[Node] = (Node(), Node()),
    hosts: Hosts | None = None,
) -> list[Server]:
    """Start a server on several nodes. Return the program of each node.

    Raises:
        AssertionError: a node ended before it was ready.
    """
    starts = _start_all(module, *argv, nodes=nodes, hosts=hosts)
    failures = [future.exception() for future in starts]
    if any(failures):
        lifecycle.terminate(
            [start.result().child for start in starts if not start.exception()], 20
        )
        raise AssertionError("\n".join(map(str, failures)))
    return [future.result() for future in starts]


def start_failures(
    module: str, *argv: str, nodes: Sequence[Node] = (Node(), Node())
) -> list[str]:
    """Start nodes on loopback addresses. All of them must refuse to start.

    Return the reason that each node reports.
    """
    reasons = []
    for future in _start_all(module, *argv, nodes=nodes, hosts=None):
        error = future.exception()
        assert isinstance(error, AssertionError), error or "a node has started"
        name, _, reason = str(error).partition(" ended at start: ")
        assert reason, name
        reasons.append(reason)
    return reasons


def _start_all(
    module: str, *argv: str, nodes: Sequence[Node], hosts: Hosts | None
) -> list[Future[Server]]:
    """Start all nodes, and wait until each is ready or has ended."""
    with reserved_ports(1) as (port,), ThreadPoolExecutor(len(nodes)) as pool:
        rendezvous = f"127.0.0.1:{port}"
        if hosts is not None:
            rendezvous = f"{hosts.address(nodes[0].host)}:{_PORT}"
        starts = []
        for number, node in enumerate(nodes):
            words = ["--nnodes", str(len(nodes)), "--rendezvous", rendezvous, *argv]
            words += ["--node-rank", str(number), *node.argv]
            if hosts is None:
                begin = partial(start, module, name=f"node {number}")
                words += ["--node-host", f"127.0.0.{number + 1}"]
            else:
                begin = partial(hosts.start, node.host, module, name=f"node {number}")
            starts.append(pool.submit(begin, *words, **node.env))
        return starts
