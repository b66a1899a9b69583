"""Options of a server whose ranks run on several hosts, which are called nodes."""

from typing import ClassVar

from pydantic import Field, ValidationInfo, field_validator

from protocol.settings.addresses import Address, check_host_name, split_address
from protocol.settings.machine import WILDCARDS, check_is_local
from protocol.settings.options import Options, Seconds


class NodeOptions(Options):
    """The nodes of one server. Each node runs the same number of ranks.

    All nodes get the same options, except --node-rank and options that describe one
    node, such as --node-host or --devices.
    """

    topic: ClassVar[str] = "nodes"
    nnodes: int = Field(1, ge=1, le=64)
    """number of nodes (hosts) of one server. Each node runs --tp divided by --nnodes
    ranks. Give every node the same command, except --node-rank (nodes, a divisor of
    --tp)"""
    node_rank: int = Field(0, ge=0, le=63)
    """number of this node. Node 0 serves HTTP and has the address of the server; the
    other nodes only run ranks (0 to --nnodes - 1)"""
    rendezvous: Address | None = None
    """HOST:PORT at which the nodes of one server meet: an address of node 0, which all
    nodes reach, and a free port there (needed with --nnodes)"""
    rendezvous_timeout_s: Seconds = 300.0
    """how long a node waits for the other nodes at its start (s)"""
    node_host: str | None = Field(None, min_length=1)
    """address of this node for the other nodes (None: the address from which this node
    reaches --rendezvous)"""
    node_timeout_s: Seconds = 5.0
    """how long a node may be silent before the server ends on all nodes (s)"""

    @field_validator("nnodes")
    @classmethod
    def _check_divides_ranks(cls, nnodes: int, info: ValidationInfo) -> int:
        tp = info.data.get("tp", nnodes)
        if tp % nnodes:
            raise ValueError(
                f"{nnodes} does not divide --tp {tp}, and every node runs the same "
                "number of ranks: use a divisor of --tp, or a different --tp"
            )
        return nnodes

    @field_validator("node_rank")
    @classmethod
    def _check_is_a_node(cls, node_rank: int, info: ValidationInfo) -> int:
        nnodes = info.data.get("nnodes")
        if nnodes is not None and node_rank >= nnodes:
            fix = f"give 0 to {nnodes - 1}" if nnodes > 1 else "give --nnodes too"
            raise ValueError(
                f"{node_rank} is not the number of a node of --nnodes {nnodes}: {fix}"
            )
        return node_rank

    @field_validator("rendezvous")
    @classmethod
    def _check_rendezvous(cls, address: str | None, info: ValidationInfo) -> str | None:
        nnodes = info.data.get("nnodes", 1)
        if nnodes > 1 and address is None:
            raise ValueError(
                f"--nnodes {nnodes} needs an address at which the nodes meet: give "
                "every node the same --rendezvous HOST:PORT, an address of node 0 and "
                "a free port there"
            )
        if nnodes == 1 and address is not None:
            raise ValueError(
                f"{address} has no effect on a server of one node: give --nnodes too, "
                "or leave --rendezvous out"
            )
        if address is not None and info.data.get("cluster_secret", ...) is None:
            check_is_local(split_address(address)[0], f"--rendezvous {address}")
        return address

    @field_validator("node_host")
    @classmethod
    def _check_node_host(cls, host: str | None, info: ValidationInfo) -> str | None:
        if host is not None and info.data.get("nnodes") == 1:
            raise ValueError(
                f"{host} has no effect on a server of one node: give --nnodes too, or "
                "leave --node-host out"
            )
        if host in WILDCARDS:
            raise ValueError(
                f"other nodes cannot connect to {host}; give one address of this node"
            )
        if host is not None:
            check_host_name(host)
        return host

    @property
    def rendezvous_address(self) -> tuple[str, int]:
        """Host and port of --rendezvous."""
        assert self.rendezvous is not None
        return split_address(self.rendezvous)
