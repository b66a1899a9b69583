"""A TransferAgent inside one process.

Bytes move when a READ is polled, not when it is posted. A stalled READ therefore
delivers late, like a network when its peer was stopped and continued. `stall`, `resume`
and `fail` control that.
"""

import ctypes
import json
import threading
import uuid
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field

from kvcache.stripe import IntArray
from kvcache.transfer.agent import MemoryKind, ReadHandle, ReadState, TransferAgent
from protocol.errors import TransferFailed

# All open agents by their unique names. It stands for the network of real agents.
_open_agents: dict[str, "MemoryAgent"] = {}
_lock = threading.Lock()

# Local address, remote address and number of bytes of each run.
_Runs = list[tuple[int, int, int]]


@dataclass
class _Network:
    """Faults of the READs of an agent and of all agents that `another` made of it.

    Attributes:
        stalled: names of stalled peers; None stands for all peers.
        failing: number of READs that will fail.
        spoiling: number of READs that will deliver a wrong bit.
        active: number of READs that were posted and have not ended.
        late: runs of failed READs that have still to arrive.
    """

    stalled: set[str | None] = field(default_factory=set)
    failing: int = 0
    spoiling: int = 0
    active: int = 0
    late: list[tuple["MemoryAgent", _Runs]] = field(default_factory=list)


class MemoryAgent(TransferAgent):
    def __init__(self, prefix: str = "memory", network: _Network | None = None) -> None:
        self._prefix = prefix
        self._network = network or _Network()
        self._begin()

    def new_sibling(self) -> "MemoryAgent":
        made = copy(self)
        made._begin()
        return made

    def _begin(self) -> None:
        self.name = f"{self._prefix}-{uuid.uuid4().hex}"
        self._regions: list[tuple[int, int]] = []
        self._peers: dict[str, list[tuple[int, int]]] = {}  # readable (address, nbytes)
        self._num_active = 0  # READs of this agent alone
        with _lock:
            _open_agents[self.name] = self

    @property
    def active(self) -> int:
        """READs of all agents of this network that were posted and have not ended."""
        return self._network.active

    def stall(self, peer: str | None = None) -> None:
        """Stall READs, or those from one peer, until `resume`. They deliver nothing."""
        self._network.stalled.add(peer)

    def resume(self) -> None:
        self._network.stalled.clear()

    def fail(self, count: int = 1) -> None:
        """Make the next `count` READs to be polled end in ERROR.

        UCX reports the first failure of several runs while the others continue. Here,
        all runs but the last continue. They arrive when another READ is polled, unless
        the agent was closed before.
        """
        self._network.failing = count

    def spoil(self, count: int = 1) -> None:
        """Make the next `count` READs to be polled silently deliver one wrong bit
        each.
        """
        self._network.spoiling = count

    def register(
        self,
        address: int,
        nbytes: int,
        *,
        device_id: int = 0,
        kind: MemoryKind = "DRAM",
    ) -> None:
        if address <= 0 or nbytes <= 0:
            raise TransferFailed(f"cannot register {nbytes} bytes at address {address}")
        self._regions.append((address, nbytes))

    def metadata(self) -> bytes:
        return json.dumps(
            {"memory_agent": self.name, "regions": self._regions}
        ).encode()

    def add_peer(self, metadata: bytes) -> str:
        try:
            record = json.loads(metadata)
            name = str(record["memory_agent"])
            regions = [
                (int(address), int(nbytes)) for address, nbytes in record["regions"]
            ]
        except (ValueError, KeyError, TypeError) as error:
            raise TransferFailed(
                f"agent metadata is not a memory agent's: {error}"
            ) from error
        with _lock:
            if name not in _open_agents:
                raise TransferFailed(f"memory agent {name} is not in this process")
        self._peers[name] = regions
        return name

    def read(
        self,
        peer: str,
        local_addresses: IntArray,
        remote_addresses: IntArray,
        lengths: IntArray,
        *,
        local_device: int = 0,
        remote_device: int = 0,
        kinds: Sequence[MemoryKind] = ("DRAM", "DRAM"),
    ) -> ReadHandle:
        if peer not in self._peers:
            raise TransferFailed(f"peer {peer} was not added")
        runs: _Runs = list(
            zip(
                local_addresses.tolist(),
                remote_addresses.tolist(),
                lengths.tolist(),
                strict=True,
            )
        )
        for local, remote, length in runs:
            _require_inside(self._regions, local, length, "local")
            _require_inside(self._peers[peer], remote, length, "remote")
        self._count(1)
        return ReadHandle(peer, ReadState.ACTIVE, runs)

    def poll(self, handle: ReadHandle) -> ReadState:
        network = self._network
        late = network.late
        network.late = []
        for agent, runs in late:
            agent._deliver(runs)
        if handle.ended or network.stalled & {None, handle.peer}:
            return handle.state
        with _lock:
            is_closed = handle.peer not in _open_agents
        if is_closed or network.failing:
            network.failing = max(0, network.failing - 1)
            handle.state = ReadState.ERROR
            if not is_closed:
                network.late.append((self, handle.key[:-1]))
        else:
            _copy(handle.key)
            if network.spoiling:
                network.spoiling -= 1
                ctypes.c_uint8.from_address(handle.key[-1][0]).value ^= 4
            handle.state = ReadState.DONE
        self._count(-1)
        return handle.state

    def _deliver(self, runs: _Runs) -> None:
        if self._regions:  # the agent is not closed
            _copy(runs)

    def _count(self, change: int) -> None:
        self._num_active += change
        self._network.active += change

    def release(self, handle: ReadHandle) -> None:
        if not handle.ended:
            raise RuntimeError(f"released an active READ from {handle.peer}")
        handle.key = None

    def close(self) -> None:
        with _lock:
            _open_agents.pop(self.name, None)
        self._regions.clear()
        self._peers.clear()
        self._count(-self._num_active)


def _require_inside(
    regions: list[tuple[int, int]], address: int, length: int, side: str
) -> None:
    if not any(
        start <= address and address + length <= start + nbytes
        for start, nbytes in regions
    ):
        raise TransferFailed(
            f"{length} bytes at {side} address {address} are not registered"
        )


def _copy(runs: _Runs) -> None:
    for local, remote, length in runs:
        ctypes.memmove(local, remote, length)
