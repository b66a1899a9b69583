"""One prefill engine as a rank's transfer thread sees it: its pulls' plans, its mapped memory,
and the link that reads from it.

Each engine is read by an agent of its own, because only closing the agent ends a READ that hangs,
or that failed while some of its runs go on (I7): its sockets, queues and registrations are gone
then. Connecting may block for minutes where packets are dropped, and closing takes a while. A link
does both in its own thread, so that pulls from other engines go on.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from kvcache.pool import KVPool
from kvcache.transfer.agent import (
    GPU_WINDOW,
    MemoryKind,
    ReadHandle,
    ReadState,
    ReadWindow,
    Throttle,
    TransferAgent,
)
from kvcache.transfer.move.cuda_placer import staging_placer
from kvcache.transfer.move.peer_memory import Memory, NotMappable
from kvcache.transfer.move.place import Placer, StagingBuffer
from kvcache.transfer.plan.block_copy import ReadDescriptors, Transfer
from kvcache.transfer.plan.cost import (
    DEFAULT_COSTS,
    CostModel,
    Sample,
    fit_costs,
    measure_link,
)
from kvcache.transfer.plan.endpoint import (
    Endpoint,
    PlanError,
    endpoints_of,
    head_groups,
)
from kvcache.transfer.plan.plan import Planner, TransferPlan, joined
from kvcache.transfer.pulls.messages import PeerKey, Pull
from kvcache.transports import UcxRead, ucx_log
from protocol.errors import (
    BatonError,
    PeerIncompatible,
    PeerUnreachable,
    TransferFailed,
)
from protocol.handshake import EngineMetadata
from protocol.ipc.wire import allow_short_naps
from protocol.process.logging import get_logger

logger = get_logger(__name__)

SCRATCH_BYTES = 4 << 20  # the target of probes
_LEAST_STAGING_BYTES = 4 << 20  # with less, plans hardly depend on a link's costs
_MOST_PROBED = {"DRAM": 4 << 20, "VRAM": 16 << 20}  # longer probes measure no better
_SHORTEST_NAP_S, _LONGEST_NAP_S = 0.00001, 0.01
_CLOSE_S = 5.0  # longest wait for a link's thread when the worker ends
FIX = (
    "Open its UCX ports to this host (UCX_TCP_PORT_RANGE sets them), and let both use an interface "
    "that reaches the other (UCX_NET_DEVICES): an address that both have, as docker0's, does not"
)


class LocalRank:
    """One rank of D: the resources shared by its pulls and links.

    Args:
        tp_size, total_kv_heads, dcp: geometry of this engine; dcp as in Endpoint.
        agent: lends the pool to peers; each link reads with `agent.another()`. Owned by the worker
            from `start` to the end of `close`.
        staging_bytes: size of the staging memory; None: transfers are direct only.
        convert: accept a peer with another KV dtype.
        costs: of every link; None measures each peer at first contact.
        placer: carries out pulls from peers whose memory it can map; agents read from the others.
        maps_only: refuse a peer that cannot be mapped.
        busy: whether this rank's engine computes a batch: READs between GPUs are slowed then.
        connect_timeout_s: longest wait of a pull for the connection to its peer.

    Attributes:
        wake: called by a link's thread when the link is ready, failed or closed.
        links: those not closed yet.
    """

    def __init__(
        self,
        number: int,
        tp_size: int,
        total_kv_heads: int,
        agent: TransferAgent,
        pool: KVPool,
        *,
        dcp: int = 1,
        staging_bytes: int | None = None,
        convert: bool = False,
        costs: CostModel | None = None,
        limits: ReadWindow | None = None,
        placer: Placer | None = None,
        maps_only: bool = False,
        busy: Callable[[], bool] = lambda: False,
        connect_timeout_s: float = 5.0,
    ) -> None:
        on_gpu = pool.device.type == "cuda"
        self.number, self.total_kv_heads, self.pool = number, total_kv_heads, pool
        self.placer, self.maps_only = placer, maps_only
        self.convert, self.costs = convert, costs
        self.busy = busy if on_gpu else None
        self.endpoint = Endpoint(
            pool.layout, number, tp_size, pool.scales, dcp, pool.groups
        )
        self.staging = None
        if staging_bytes:
            self.staging = StagingBuffer(
                staging_bytes, pool, staging_placer(pool, convert=convert)
            )
        window = limits or (GPU_WINDOW if on_gpu else ReadWindow())
        self.throttle = Throttle(window, busy) if on_gpu else Throttle(window)
        self.agent, self.connect_timeout_s = agent, connect_timeout_s
        self.kind: MemoryKind = "VRAM" if on_gpu else "DRAM"
        self._scratch = torch.empty(
            SCRATCH_BYTES, dtype=torch.uint8, device=pool.device
        )
        self.scratch_address = int(self._scratch.data_ptr())
        self.wake: Callable[[], None] = lambda: None
        self.links: set[PeerLink] = set()
        if costs is not None:
            logger.info("every link, as configured: %s", costs)

    @staticmethod
    def reserved_bytes(staging_bytes: int | None) -> int:
        """Device memory of a LocalRank, beside the pool."""
        return (staging_bytes or 0) + SCRATCH_BYTES

    @property
    def measures(self) -> bool:
        """Whether links are probed: plans depend on their costs, and none are configured."""
        room = self.staging.nbytes if self.staging else 0
        return self.costs is None and room >= _LEAST_STAGING_BYTES

    def bind_thread(self) -> None:
        """To be called once by the transfer thread."""
        self.agent.bind_thread()
        if self.staging is not None:
            self.staging.bind_thread()
        if self.placer is not None:
            self.placer.bind_thread()

    def offer(self) -> None:
        """Makes the pool readable by peers."""
        self._register(self.agent, self.pool.base_address, self.pool.nbytes)

    def register_with(self, agent: TransferAgent) -> None:
        """Registers all memory that a link's READs may write to."""
        self._register(agent, self.scratch_address, SCRATCH_BYTES)
        self._register(agent, self.pool.base_address, self.pool.nbytes)
        if self.staging is not None:
            self._register(agent, self.staging.base_address, self.staging.nbytes)

    def _register(self, agent: TransferAgent, address: int, nbytes: int) -> None:
        agent.register(address, nbytes, device_id=self.pool.device_id, kind=self.kind)

    def close(self) -> None:
        """Closes every link. One stuck in connecting is not waited for: it has read nothing."""
        links = list(self.links)
        for link in links:
            link.close()
        for link in links:
            link.join()
        self.agent.close()


class PeerLink:
    """The agent that reads from one engine. It begins to connect at once. Owned by the worker's
    thread, which is woken whenever `is_ready`, `error` or `is_closed` changes.

    Args:
        ranks: the server's ranks to read from.
        probes: measure the link to the first of them, with READs of its null block.

    Attributes:
        costs: as measured; None without a measurement.
        deadline: of connecting, by time.monotonic.
        active: READs of pulls that are not stopping; counted by their jobs.
    """

    def __init__(
        self,
        rank: LocalRank,
        metadata: EngineMetadata,
        ranks: Sequence[Endpoint],
        *,
        probes: bool,
    ) -> None:
        self.is_connecting = (
            True  # also after a timeout, while the system's call still blocks
        )
        self.is_ready = self.is_closed = False
        self.costs: CostModel | None = None
        self.deadline = time.monotonic() + rank.connect_timeout_s
        self.active = 0
        self.agent: TransferAgent = (
            rank.agent
        )  # replaced by the link's own, in its thread
        self._error: BatonError | None = None
        self._rank, self._metadata, self._ranks = rank, metadata, ranks
        self._probes = probes
        on_gpu = metadata.ranks[0].device_kind == "cuda"
        self._kinds: tuple[MemoryKind, MemoryKind] = (
            rank.kind,
            "VRAM" if on_gpu else "DRAM",
        )
        self.between_gpus = self._kinds == ("VRAM", "VRAM")
        self._names: dict[int, str] = {}  # of the server's agents, by rank
        self._closing = threading.Event()
        name = f"link-{metadata.engine_id}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        rank.links.add(self)
        self._thread.start()

    @property
    def is_closing(self) -> bool:
        return self._closing.is_set()

    @property
    def error(self) -> BatonError | None:
        """Why the link cannot be used; None while it can, or is still connecting."""
        if (
            self._error is None
            and not self.is_ready
            and time.monotonic() >= self.deadline
        ):
            limit = f"{self._rank.connect_timeout_s:g} s (--connect-timeout-s)"
            self._error = self._unreachable(f"no connection within {limit}")
        return self._error

    def read(self, read: ReadDescriptors, base_address: int) -> ReadHandle:
        """Posts a READ; local offsets count from `base_address`. Raises as TransferAgent.read."""
        remote = self._metadata.ranks[read.remote_rank]
        return self.agent.read(
            self._names[read.remote_rank],
            read.local_offsets + base_address,
            read.remote_offsets + remote.base_address,
            read.lengths,
            local_device=self._rank.pool.device_id,
            remote_device=remote.device_id,
            kinds=self._kinds,
        )

    @property
    def way_of_reading(self) -> UcxRead | None:
        here, there = (kind == "VRAM" for kind in self._kinds)
        return ucx_log.read_between(gpu_here=here, gpu_there=there)

    def close(self, error: BatonError | None = None) -> None:
        """Begins to close the link, after an error or because it is not needed. Its READs may write
        until `is_closed`."""
        if error is not None and not self.is_closing:
            logger.warning(
                "prefill server %s: %s", self._metadata.engine_id, error.message
            )
            self._error = error
        self._closing.set()

    def join(self) -> None:
        if not self.is_connecting:
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        allow_short_naps()
        agent = None
        try:
            agent = self.agent = self._rank.agent.another()
            self._rank.register_with(agent)
            self._connect(agent)
            self.is_ready = True
        except Exception as error:  # NIXL's share no base class
            self._error = self._unreachable(str(error) or repr(error))
        self.is_connecting = False
        self._rank.wake()
        self._closing.wait()
        try:
            if agent is not None:
                agent.close()
                if self._rank.kind == "VRAM":  # its last copies go on for milliseconds
                    torch.cuda.synchronize(self._rank.pool.device)
        except Exception:  # never `is_closed`: blocks it may write to stay quarantined
            logger.exception(
                "ending the link to prefill server %s", self._metadata.engine_id
            )
            return
        self.is_closed = True
        self._rank.links.discard(self)
        self._rank.wake()

    def _connect(self, agent: TransferAgent) -> None:
        for end in self._ranks:
            self._names[end.rank] = agent.add_peer(
                self._metadata.ranks[end.rank].agent_metadata
            )
        if not self._probes:
            return
        most, name = _MOST_PROBED[self._rank.kind], self._metadata.engine_id
        samples = measure_link(self._ranks[0], SCRATCH_BYTES, most, self._probe)
        try:
            costs = fit_costs(*samples, on_gpu=self._rank.kind == "VRAM")
        except ValueError as error:  # a null block too small to tell runs apart
            logger.info("prefill server %s: %s; the usual costs", name, error)
            return
        way = self.way_of_reading
        logger.info(
            "prefill server %s: NIXL by %s, %s", name, way or "an untold way", costs
        )
        if warning := way and way.warning():
            logger.warning("prefill server %s: %s", name, warning)
        self.costs = costs

    def _probe(self, read: ReadDescriptors) -> Sample:
        began = time.perf_counter()
        handle = self.read(read, self._rank.scratch_address)
        at_once = handle.ended
        while self.agent.poll(handle) is ReadState.ACTIVE:
            if self.is_closing or time.monotonic() >= self.deadline:
                raise TransferFailed("a READ at first contact does not end")
            nap_s = (
                time.perf_counter() - began
            ) / 16  # bounds the error of the measured time
            time.sleep(min(max(nap_s, _SHORTEST_NAP_S), _LONGEST_NAP_S))
        seconds = time.perf_counter() - began
        if handle.state is ReadState.ERROR:
            raise TransferFailed("a READ at first contact failed")
        self.agent.release(handle)
        return Sample(len(read.lengths), int(read.lengths.sum()), seconds, at_once)

    def _unreachable(self, reason: str) -> PeerUnreachable:
        name = self._metadata.engine_id
        return PeerUnreachable(
            f"prefill server {name} cannot be read over NIXL: {reason}. {FIX}."
        )


class Peer:
    """
    Attributes:
        memories: the mapped pools, by rank of the peer.
        refusal: why its memory cannot be mapped.
        is_stale: its memory is to be mapped anew when no pull uses it.
        is_dropped: it is to be forgotten when no pull uses it.
    """

    def __init__(self, rank: LocalRank, metadata: EngineMetadata) -> None:
        tp, dcp = metadata.tp_size, metadata.dcp_size
        self._ends = endpoints_of(metadata)
        total = rank.total_kv_heads
        groups = head_groups(rank.endpoint.heads(total), tp, total, dcp)
        self._owners = sorted({owner for group in groups for owner in group.owners})
        self._planner: Planner | None = None
        self.rank, self.metadata, self.engine_id = rank, metadata, metadata.engine_id
        self.key: PeerKey = (metadata.engine_id, metadata.incarnation)
        self.memories: dict[int, Memory] = {}
        self.refusal: str | None = None
        self.link: PeerLink | None = None
        self._has_failed = False  # one of its links: the next one is probed
        self.is_speed_told = self.is_stale = self.is_dropped = False

    # -- plans

    def prepare(self) -> None:
        """Maps or connects before the first pull, and logs if no pull can be planned."""
        if not self.map():
            self.connect()
        try:
            self._plans()
        except PlanError as error:  # every pull fails with it
            logger.warning("prefill server %s: %s", self.engine_id, error)

    def transfers(self, pull: Pull) -> list[Transfer]:
        """The pull's transfers, one for each group of layers.

        Raises:
            PeerIncompatible: no plan bridges the geometries.
        """
        groups = self.rank.endpoint.groups
        spans = groups.spans(pull.token_start, pull.token_stop, pull.reach)
        with _as_incompatible():
            transfers = [
                self._plans().take(
                    (span.start, span.stop),
                    groups.of_group(pull.local_block_ids, group),
                    groups.of_group(pull.remote_block_ids, group),
                    lease_hash=int(pull.lease_id[:8], 16),
                )
                for group, span in enumerate(spans)
            ]
        self.rank.pool.use(max(pull.local_block_ids, default=-1))
        return transfers

    def plan(self, pull: Pull, link: PeerLink) -> TransferPlan:
        """The plan of READs over the link. Raises as `transfers`."""
        usual = DEFAULT_COSTS["cuda" if link.between_gpus else "cpu"]
        with _as_incompatible():
            costs = self.rank.costs or link.costs or usual
            return joined(
                [self._plans().plan(part, costs) for part in self.transfers(pull)]
            )

    def _plans(self) -> Planner:
        if self._planner is None:
            rank = self.rank
            self._planner = Planner(
                rank.endpoint,
                self._ends,
                rank.total_kv_heads,
                staging_bytes=rank.staging.nbytes if rank.staging else None,
                convert=rank.convert,
            )
        return self._planner

    # -- the mapped path

    def map(self) -> bool:
        """Maps the peer's memory if that was not tried yet. Whether its pulls are to be MappedJobs:
        it is mapped, or nothing else is allowed."""
        placer = self.rank.placer
        if placer is None:
            return False
        if not self.memories and self.refusal is None:
            try:
                for owner in self._owners:
                    self.memories[owner] = placer.open(self.metadata.ranks[owner])
                logger.info("prefill server %s: its KV is mapped here", self.engine_id)
            except (
                Exception
            ) as error:  # not NotMappable: a bug of ours, and NIXL may still work
                if not isinstance(error, NotMappable):
                    logger.exception("mapping KV of prefill server %s", self.engine_id)
                logger.info("prefill server %s: not mapped, %s", self.engine_id, error)
                self.unmap()
                self.refusal = str(error)
        return self.refusal is None or self.rank.maps_only

    def unmap(self) -> None:
        """Closes the mapped memory; no job may read from it any more."""
        for memory in self.memories.values():
            memory.close()
        self.memories.clear()
        self.refusal, self.is_stale = None, False

    # -- the link

    def connect(self) -> PeerLink | None:
        """The link, if it is ready, else None. Begins a link if there is none.

        Raises:
            BatonError: the link has failed, and its thread still blocks in connecting.
        """
        link = self.link
        if link is None:
            self.link = PeerLink(
                self.rank,
                self.metadata,
                [self._ends[owner] for owner in self._owners],
                probes=self.rank.measures or self._has_failed,
            )
            return None
        if link.error is not None and link.is_connecting:
            raise link.error
        return link if link.is_ready and not link.is_closing else None

    def settle(self) -> BatonError | None:
        """Closes a failed link and forgets a closed one; the error for pulls that wait for it."""
        link = self.link
        if link is None or (link.is_ready and not link.is_closing):
            return None
        self._has_failed |= link.error is not None
        if link.is_closed:
            self.link = None
        elif link.error is not None and not link.is_closing:
            link.close(link.error)
            return link.error
        return None


@contextmanager
def _as_incompatible() -> Iterator[None]:
    try:
        yield
    except PlanError as error:
        raise PeerIncompatible(str(error)) from error
