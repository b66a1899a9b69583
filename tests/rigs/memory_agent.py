"""A TransferAgent that copies memory inside one process.

Bytes move when a READ is polled, not when it is posted. So the bytes of a stalled READ
arrive after `resume`, as over a network from a peer that was stopped and then
continued.
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

# All open agents by their unique names. `add_peer` looks peers up in this dict, because
# there is no network.
_open_agents: dict[str, "MemoryAgent"] = {}
_lock = threading.Lock()

# The contiguous ranges of a READ: local address, remote address, number of bytes.
_Runs = list[tuple[int, int, int]]


@dataclass
class _Network:
    """READs in progress and injected faults of an agent and of all its siblings
    (`new_sibling`).

    Attributes:
        stalled: names of stalled peers; None stands for all peers.
        num_failing: number of READs that will fail.
        num_spoiling: number of READs that will deliver a wrong bit.
        active: number of READs that were posted and have not ended.
        late_runs: runs of failed READs with the agent that posted them. They are
            delivered at the next poll.
    """

    stalled: set[str | None] = field(default_factory=set)
    num_failing: int = 0
    num_spoiling: int = 0
    active: int = 0
    late_runs: list[tuple["MemoryAgent", _Runs]] = field(default_factory=list)


class MemoryAgent(TransferAgent):
    def __init__(self, prefix: str = "memory", network: _Network | None = None) -> None:
        self._prefix = prefix
        self._network = network or _Network()
        self._begin()

    def new_sibling(self) -> "MemoryAgent":
        sibling = copy(self)
        sibling._begin()
        return sibling

    def _begin(self) -> None:
        self.name = f"{self._prefix}-{uuid.uuid4().hex}"
        self._regions: list[tuple[int, int]] = []
        self._peers: dict[str, list[tuple[int, int]]] = {}  # readable (address, nbytes)
        self._num_active = 0  # active READs of this agent alone
        with _lock:
            _open_agents[self.name] = self

    @property
    def active(self) -> int:
        """Number of READs of this agent and its siblings that were posted and have not
        ended.
        """
        return self._network.active

    def stall(self, peer: str | None = None) -> None:
        """Until `resume`, let no READ end or deliver bytes.

        Args:
            peer: if given, this applies only to READs from this peer.
        """
        self._network.stalled.add(peer)

    def resume(self) -> None:
        self._network.stalled.clear()

    def fail(self, count: int = 1) -> None:
        """Make the next `count` READs that are polled end in ERROR.

        UCX reports a READ as failed as soon as one of its runs (contiguous ranges)
        fails, while the other runs continue. So this agent delivers all runs of a
        failed READ except the last, at the next poll of any READ, unless the agent is
        closed first.
        """
        self._network.num_failing = count

    def spoil(self, count: int = 1) -> None:
        """Make the next `count` READs that are polled deliver one wrong bit each,
        without an error.
        """
        self._network.num_spoiling = count

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
        late_runs = network.late_runs
        network.late_runs = []
        for agent, runs in late_runs:
            agent._deliver(runs)
        if handle.has_ended or network.stalled & {None, handle.peer}:
            return handle.state
        with _lock:
            is_closed = handle.peer not in _open_agents
        if is_closed or network.num_failing:
            network.num_failing = max(0, network.num_failing - 1)
            handle.state = ReadState.ERROR
            if not is_closed:
                network.late_runs.append((self, handle.key[:-1]))
        else:
            _copy(handle.key)
            if network.num_spoiling:
                network.num_spoiling -= 1
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
        if not handle.has_ended:
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
