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
from kvcache.transfer.link.agent import MemoryKind, ReadHandle, ReadState, TransferAgent
from kvcache.transfer.link.ucx_log import UcxRead, ucx_log
from kvcache.transfer.move.staging import StagingBuffer
from kvcache.transfer.plan.block_copy import ReadDescriptors
from kvcache.transfer.plan.cost import CostModel, Sample, fit_costs, measure_link
from kvcache.transfer.plan.endpoint import Endpoint
from protocol.errors import BatonError, PeerUnreachable, TransferFailed
from protocol.handshake import EngineMetadata
from protocol.ipc.wire import allow_short_naps
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
    """What all links of one rank share: the pool, staging memory, and the memory for probes, which
    nobody looks at.

    Args:
        prototype: the rank's agent, which that of each link is another of.
        connect_timeout_s: longest wait for a connection.

    Attributes:
        wake: called by links' threads when there is news of them.
    """

    def __init__(
        self,
        prototype: TransferAgent,
        pool: KVPool,
        staging: StagingBuffer | None,
        connect_timeout_s: float,
    ) -> None:
        self.prototype, self.connect_timeout_s = prototype, connect_timeout_s
        self.wake: Callable[[], None] = lambda: None
        self.kind: MemoryKind = "VRAM" if pool.device.type == "cuda" else "DRAM"
        self.device_id, self._device = pool.device_id, pool.device
        self._scratch = torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device=pool.device)
        self.scratch_address = int(self._scratch.data_ptr())
        self._memories = [(self.scratch_address, SCRATCH_BYTES), (pool.base_address, pool.nbytes)]
        if staging is not None:
            self._memories.append((staging.base_address, staging.nbytes))
        self.links: set[PeerLink] = set()  # not yet closed

    def offer(self) -> None:
        """Peers may read the pool from here on, through the rank's own agent."""
        (address, nbytes), where = self._memories[1], {"device_id": self.device_id}
        self.prototype.register(address, nbytes, kind=self.kind, **where)

    def register_with(self, agent: TransferAgent) -> None:
        for address, nbytes in self._memories:
            agent.register(address, nbytes, device_id=self.device_id, kind=self.kind)

    def await_copies(self) -> None:
        """Copies between GPUs that an agent had begun go on without it, for milliseconds."""
        if self.kind == "VRAM":
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Ends every link; one that is stuck in connecting has read nothing."""
        links = list(self.links)
        for link in links:
            link.close()
        for link in links:
            link.join()
        self.prototype.close()


class PeerLink:
    """Begins to connect at once; owned by the worker's thread, which is woken when there is news:
    one of `is_ready`, `error` and `is_closed`.

    Args:
        ranks: of the server, that this rank reads from.
        probes: the first of them, by READs that bring nobody's KV.

    Attributes:
        costs: as measured; None where it was not.
        deadline: of connecting, by time.monotonic.
        active: READs of pulls that were not given up; counted by the owner.
    """

    def __init__(
        self,
        here: LocalEnd,
        metadata: EngineMetadata,
        ranks: Sequence[Endpoint],
        *,
        probes: bool,
    ) -> None:
        self.is_connecting = True  # as a system may for minutes after it has failed
        self.is_ready = self.is_closed = False
        self.costs: CostModel | None = None
        self.deadline = time.monotonic() + here.connect_timeout_s
        self.active = 0
        self.agent: TransferAgent = here.prototype  # until there is one
        self._error: BatonError | None = None
        self._here, self._metadata, self._ranks = here, metadata, ranks
        self._probes = probes
        on_gpu = metadata.ranks[0].device_kind == "cuda"
        self._kinds: tuple[MemoryKind, MemoryKind] = here.kind, "VRAM" if on_gpu else "DRAM"
        self.between_gpus = self._kinds == ("VRAM", "VRAM")
        self._names: dict[int, str] = {}  # of the server's agents, by rank
        self._closing = threading.Event()
        name = f"link-{metadata.engine_id}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        here.links.add(self)
        self._thread.start()

    @property
    def is_closing(self) -> bool:
        return self._closing.is_set()

    @property
    def error(self) -> BatonError | None:
        """Why nothing can be read over it, if so."""
        if self._error is None and not self.is_ready and time.monotonic() >= self.deadline:
            limit = f"{self._here.connect_timeout_s:g} s (--connect-timeout-s)"
            self._error = self._unreachable(f"no connection within {limit}")
        return self._error

    def read(self, read: ReadDescriptors, base_address: int) -> ReadHandle:
        """Posts a READ; local offsets count from `base_address`. Raises as the agent's."""
        remote = self._metadata.ranks[read.remote_rank]
        return self.agent.read(
            self._names[read.remote_rank],
            read.local_offsets + base_address,
            read.remote_offsets + remote.base_address,
            read.lengths,
            local_device=self._here.device_id,
            remote_device=remote.device_id,
            kinds=self._kinds,
        )

    @property
    def way_of_reading(self) -> UcxRead | None:
        here, there = (kind == "VRAM" for kind in self._kinds)
        return ucx_log.read_between(gpu_here=here, gpu_there=there)

    def close(self, error: BatonError | None = None) -> None:
        """Begins to end it, as it has failed or nobody needs it: `is_closed` when nothing that it
        read is written any more."""
        if error is not None and not self.is_closing:
            logger.warning("prefill server %s: %s", self._metadata.engine_id, error.message)
            self._error = error
        self._closing.set()

    def join(self) -> None:
        if not self.is_connecting:
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        allow_short_naps()
        agent = None
        try:
            agent = self.agent = self._here.prototype.another()
            self._connect(agent)
            self.is_ready = True
        except Exception as error:  # NIXL's share no base class
            self._error = self._unreachable(str(error) or repr(error))
        self.is_connecting = False
        self._here.wake()
        self._closing.wait()
        try:
            if agent is not None:
                agent.close()
                self._here.await_copies()
        except Exception:  # what it read into stays quarantined
            logger.exception("ending the link to prefill server %s", self._metadata.engine_id)
            return
        self.is_closed = True
        self._here.links.discard(self)
        self._here.wake()

    def _connect(self, agent: TransferAgent) -> None:
        self._here.register_with(agent)
        for end in self._ranks:
            self._names[end.rank] = agent.add_peer(self._metadata.ranks[end.rank].agent_metadata)
        if not self._probes:
            return
        most, name = _MOST_PROBED[self._here.kind], self._metadata.engine_id
        samples = measure_link(self._ranks[0], SCRATCH_BYTES, most, self._probe)
        try:
            costs = fit_costs(*samples, on_gpu=self._here.kind == "VRAM")
        except ValueError as error:  # a null block too small to tell runs apart
            logger.info("prefill server %s: %s; the usual costs", name, error)
            return
        way = self.way_of_reading
        logger.info("prefill server %s: NIXL by %s, %s", name, way or "an untold way", costs)
        if warning := way and way.warning():
            logger.warning("prefill server %s: %s", name, warning)
        self.costs = costs

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
