"""One prefill engine, as a rank's transfer thread knows it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvcache.pool import KVPool
from kvcache.transfer.link.agent import GPU_WINDOW, ReadWindow, Throttle, TransferAgent
from kvcache.transfer.link.peer_link import SCRATCH_BYTES, LocalEnd, PeerLink
from kvcache.transfer.move.peer_memory import Memory, NotMappable
from kvcache.transfer.move.place import Placer
from kvcache.transfer.move.staging import StagingBuffer, staging_placer
from kvcache.transfer.plan.block_copy import Transfer
from kvcache.transfer.plan.cost import DEFAULT_COSTS, CostModel
from kvcache.transfer.plan.endpoint import Endpoint, PlanError, endpoints_of, head_groups
from kvcache.transfer.plan.plan import Planner, TransferPlan, joined
from kvcache.transfer.pulls.messages import PeerKey, Pull
from protocol.errors import BatonError, PeerIncompatible
from protocol.handshake import EngineMetadata
from protocol.process.logging import get_logger

logger = get_logger(__name__)

_LEAST_STAGING_BYTES = 4 << 20  # with less there is little to choose


@dataclass(frozen=True)
class MappedPath:
    """Pulls out of peers' memory that is mapped here.

    Attributes:
        required: a peer that cannot be mapped is refused, not left to NIXL.
        launch_bytes: of one launch, at most; None: the placer's.
    """

    placer: Placer
    required: bool = False
    launch_bytes: int | None = None


class LocalRank:
    """One rank of D: what its pulls share.

    Args:
        tp_size, total_kv_heads, dcp: geometry of this engine; dcp as of Endpoint.
        agent: reads nothing; another of it is made for each peer that is read from. Owned by the
            worker from its `start` on, its `close` included.
        staging_bytes: bound of the memory for staged transfers; None plans direct ones only.
        convert: accept a peer with another KV dtype.
        costs: of every link; None measures each peer at first contact.
        mapped: takes the pulls from peers that it can map; the agent moves the others.
        busy: whether this rank's engine computes: READs between GPUs then leave it room.
        connect_timeout_s: longest wait of a pull for the connection to its peer.
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
        mapped: MappedPath | None = None,
        busy: Callable[[], bool] = lambda: False,
        connect_timeout_s: float = 5.0,
    ) -> None:
        on_gpu = pool.device.type == "cuda"
        self.number, self.total_kv_heads, self.pool = number, total_kv_heads, pool
        self.mapped, self.convert, self.costs = mapped, convert, costs
        self.busy = busy if on_gpu else None
        self.endpoint = Endpoint(pool.layout, number, tp_size, pool.scales, dcp, pool.groups)
        self.staging = None
        if staging_bytes:
            self.staging = StagingBuffer(staging_bytes, pool, staging_placer(pool, convert=convert))
        window = limits or (GPU_WINDOW if on_gpu else ReadWindow())
        self.throttle = Throttle(window, busy) if on_gpu else Throttle(window)
        self.end = LocalEnd(agent, pool, self.staging, connect_timeout_s)
        if costs is not None:
            logger.info("every link, as configured: %s", costs)

    @staticmethod
    def reserved_bytes(staging_bytes: int | None) -> int:
        """What it takes of its device's memory."""
        return (staging_bytes or 0) + SCRATCH_BYTES

    @property
    def measures(self) -> bool:
        """Plans depend on the costs of a peer's link."""
        room = self.staging.nbytes if self.staging else 0
        return self.costs is None and room >= _LEAST_STAGING_BYTES

    def bind_thread(self) -> None:
        """Called once by the thread that pulls."""
        self.end.prototype.bind_thread()
        if self.staging is not None:
            self.staging.bind_thread()
        if self.mapped is not None:
            self.mapped.placer.bind_thread()


class Peer:
    """
    Attributes:
        memories: of its ranks, mapped here.
        refusal: why it cannot be mapped.
        is_stale: its memory is to be mapped anew when no pull uses it.
        is_dropped: it is to be forgotten when no pull uses it.

    Raises:
        ValueError: a rank's layout is none.
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
        self._has_failed = False  # a link
        self.is_speed_told = self.is_stale = self.is_dropped = False

    # -- plans

    def prepare(self) -> None:
        """Pulls are going to come: maps or connects, and says if none can be planned."""
        if not self.map():
            self.connect()
        try:
            self._plans()
        except PlanError as error:  # every pull fails with it
            logger.warning("prefill server %s: %s", self.engine_id, error)

    def transfers(self, pull: Pull) -> list[Transfer]:
        """What is wanted of each group of layers.

        Raises:
            PeerIncompatible: no plan bridges the geometries.
        """
        groups = self.rank.endpoint.groups
        with _as_incompatible():
            found = [
                self._plans().take(
                    (span.start, span.stop),
                    groups.of_group(pull.local_block_ids, group),
                    groups.of_group(pull.remote_block_ids, group),
                    lease_hash=int(pull.lease_id[:8], 16),
                )
                for group, span in enumerate(groups.spans(*pull.span))
            ]
        self.rank.pool.use(max(pull.local_block_ids, default=-1))
        return found

    def plan(self, pull: Pull, link: PeerLink) -> TransferPlan:
        """Of READs over the link. Raises as `transfers`."""
        usual = DEFAULT_COSTS["cuda" if link.between_gpus else "cpu"]
        with _as_incompatible():
            costs = self.rank.costs or link.costs or usual
            return joined([self._plans().plan(each, costs) for each in self.transfers(pull)])

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
        """Opens its memory, unless that was done; whether pulls are mapped, or fail as it cannot
        be."""
        mapped = self.rank.mapped
        if mapped is None:
            return False
        if not self.memories and self.refusal is None:
            try:
                for owner in self._owners:
                    self.memories[owner] = mapped.placer.open(self.metadata.ranks[owner])
                logger.info("prefill server %s: its KV is mapped here", self.engine_id)
            except Exception as error:  # of any other kind it is our own: NIXL may do better
                if not isinstance(error, NotMappable):
                    logger.exception("mapping KV of prefill server %s", self.engine_id)
                logger.info("prefill server %s: not mapped, %s", self.engine_id, error)
                self.unmap()
                self.refusal = str(error)
        return self.refusal is None or mapped.required

    def unmap(self) -> None:
        """No job reads from its memory any more."""
        for memory in self.memories.values():
            memory.close()
        self.memories.clear()
        self.refusal, self.is_stale = None, False

    # -- the link

    def connect(self) -> PeerLink | None:
        """The link; None while it begins or ends.

        Raises:
            BatonError: it could not be made, and has not ended yet.
        """
        link = self.link
        if link is None:
            self.link = PeerLink(
                self.rank.end,
                self.metadata,
                [self._ends[owner] for owner in self._owners],
                probes=self.rank.measures or self._has_failed,
            )
            return None
        if link.error is not None and link.is_connecting:
            raise link.error
        return link if link.is_ready and not link.is_closing else None

    def settle(self) -> BatonError | None:
        """Takes in what became of the link: why the pulls that wait for it fail, if they do."""
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
