"""The agent that reads from one prefill server. Its whole life is in a thread of its own: to
connect blocks for minutes where packets are dropped on the way, to end takes a while, and neither
may hold up pulls from other servers.

Each server has an agent to itself, because only an agent's end proves that nothing is written any
more (I7): then its sockets, queues and registrations are gone. A READ that hangs, or that failed
while some of its runs go on, has ended when its agent is closed.
"""

import threading
import time
from collections.abc import Callable, Sequence

import torch

from kvcache.pool import KVPool
from kvcache.transfer.link.agent import Addresses, MemoryKind, ReadHandle, ReadState, TransferAgent
from kvcache.transfer.link.read_window import Post
from kvcache.transfer.link.threads import allow_short_naps
from kvcache.transfer.move.staging import StagingBuffer
from kvcache.transfer.plan.block_copy import ReadDescriptors
from kvcache.transfer.plan.cost import Sample, measure_link
from kvcache.transfer.plan.endpoint import Endpoint
from protocol.errors import PeerUnreachable, TransferFailed
from protocol.handshake import EngineMetadata
from protocol.process.logging import get_logger

logger = get_logger(__name__)

SCRATCH_BYTES = 4 << 20  # that probes are read into
_MOST_PROBED = {"DRAM": 4 << 20, "VRAM": 16 << 20}  # more says no more about the link
_SHORTEST_NAP_S, _LONGEST_NAP_S = 0.00001, 0.01
_CLOSE_S = 5.0  # longest wait for agents at the end of the worker
FIX = (
    "Open its UCX ports to this host (UCX_TCP_PORT_RANGE sets them), and let both use an interface "
    "that reaches the other (UCX_NET_DEVICES): an address that both have, as docker0's, does not"
)


class LocalEnd:
    """What all agents of one rank read into: the pool, staging memory, and what probes bring,
    which nobody looks at."""

    def __init__(self, pool: KVPool, staging: StagingBuffer | None) -> None:
        self.kind: MemoryKind = "VRAM" if pool.device.type == "cuda" else "DRAM"
        self.device_id = pool.device_id
        self._device = pool.device
        self._scratch = torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device=pool.device)
        self.scratch_address = int(self._scratch.data_ptr())
        self._memories = [(self.scratch_address, SCRATCH_BYTES)]
        for memory in (pool, staging):
            if memory is not None:
                self._memories.append((memory.base_address, memory.nbytes))

    def register_with(self, agent: TransferAgent) -> None:
        for address, nbytes in self._memories:
            agent.register(address, nbytes, device_id=self.device_id, kind=self.kind)

    def await_copies(self) -> None:
        """Copies between GPUs that an agent had begun go on without it, for milliseconds."""
        if self.kind == "VRAM":
            torch.cuda.synchronize(self._device)


class PeerLink:
    """Begins to connect at once; owned by the worker's thread, which is woken by `wake` when there
    is news: one of `is_ready`, `error` and `is_closed`.

    Args:
        prototype: the rank's agent, which this one is another of.
        ranks: of the server, that this rank reads from.
        probes: the first of them, by READs that bring nobody's KV.
    """

    def __init__(
        self,
        prototype: TransferAgent,
        here: LocalEnd,
        metadata: EngineMetadata,
        ranks: Sequence[Endpoint],
        timeout_s: float,
        wake: Callable[[], None],
        *,
        probes: bool,
    ) -> None:
        self.is_connecting = True  # as a system may for minutes after it has failed
        self.is_ready = False
        self.is_closed = False
        self.samples: tuple[Sample, Sample] | None = None
        self.deadline = time.monotonic() + timeout_s
        self.agent: TransferAgent = prototype  # until there is one
        self._error: PeerUnreachable | None = None
        self._prototype = prototype
        self._here = here
        self._metadata = metadata
        self._ranks = ranks
        self._probes = probes
        self._timeout_s = timeout_s
        self._wake = wake
        self._names: dict[int, str] = {}  # of the server's agents, by rank
        self._closing = threading.Event()
        name = f"link-{metadata.engine_id}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_closing(self) -> bool:
        return self._closing.is_set()

    @property
    def error(self) -> PeerUnreachable | None:
        """Why it cannot be read from, if so."""
        if self._error is None and not self.is_ready and time.monotonic() >= self.deadline:
            limit = f"no connection within {self._timeout_s:g} s (--connect-timeout-s)"
            self._error = self._unreachable(limit)
        return self._error

    def read(self, read: ReadDescriptors | Post, base_address: int) -> ReadHandle:
        """Posts a READ; local offsets count from `base_address`. Raises as the agent's."""
        remote = self._metadata.ranks[read.remote_rank]
        local: Addresses = read.local_offsets + base_address
        return self.agent.read(
            self._names[read.remote_rank],
            local,
            read.remote_offsets + remote.base_address,
            read.lengths,
            local_device=self._here.device_id,
            remote_device=remote.device_id,
            kinds=(self._here.kind, "VRAM" if remote.device_kind == "cuda" else "DRAM"),
        )

    def close(self) -> None:
        """Begins to end it: `is_closed` when nothing that it read is written any more."""
        self._closing.set()

    def join(self) -> None:
        """Waits for the end, unless it is stuck in connecting: it has read nothing then."""
        if not self.is_connecting:
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        allow_short_naps()
        agent = None
        try:
            agent = self.agent = self._prototype.another()
            self._connect(agent)
            self.is_connecting = False
            self.is_ready = True
        except Exception as error:  # NIXL's share no base class
            self.is_connecting = False
            self._error = self._unreachable(str(error) or repr(error))
        self._wake()
        self._closing.wait()
        try:
            if agent is not None:
                agent.close()
                self._here.await_copies()
        except Exception:  # what it read into stays quarantined
            logger.exception("ending the link to prefill server %s", self._metadata.engine_id)
            return
        self.is_closed = True
        self._wake()

    def _connect(self, agent: TransferAgent) -> None:
        self._here.register_with(agent)
        for end in self._ranks:
            self._names[end.rank] = agent.add_peer(self._metadata.ranks[end.rank].agent_metadata)
        if self._probes:
            most = _MOST_PROBED[self._here.kind]
            self.samples = measure_link(self._ranks[0], SCRATCH_BYTES, most, self._probe)

    def _probe(self, read: ReadDescriptors) -> Sample:
        began = time.perf_counter()
        handle = self.read(read, self._here.scratch_address)
        at_once = handle.ended
        while self.agent.poll(handle) is ReadState.ACTIVE:
            if self.is_closing or time.monotonic() >= self.deadline:
                raise TransferFailed("a READ at first contact does not end")
            nap_s = (time.perf_counter() - began) / 16  # what it tells is that wrong at most
            time.sleep(min(max(nap_s, _SHORTEST_NAP_S), _LONGEST_NAP_S))
        seconds = time.perf_counter() - began
        if handle.state is ReadState.ERROR:
            raise TransferFailed("a READ at first contact failed")
        self.agent.release(handle)
        return Sample(len(read.lengths), int(read.lengths.sum()), seconds, at_once)

    def _unreachable(self, reason: str) -> PeerUnreachable:
        name = self._metadata.engine_id
        return PeerUnreachable(f"prefill server {name} cannot be read over NIXL: {reason}. {FIX}.")
