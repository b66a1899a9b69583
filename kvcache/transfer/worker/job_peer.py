"""What a rank's transfer thread knows of one prefill engine."""

from dataclasses import dataclass, field

from kvcache.layout import KVLayout
from kvcache.transfer.link.peer_link import PeerLink
from kvcache.transfer.plan.cost import CostModel
from kvcache.transfer.plan.endpoint import Endpoint
from kvcache.transfer.plan.plan import Planner
from kvcache.transfer.pulls.messages import PeerKey, Pull
from protocol.handshake import EngineMetadata


@dataclass(eq=False)
class JobPeer:
    metadata: EngineMetadata
    endpoints: tuple[Endpoint, ...]
    planner: Planner | None = None  # once pulled from
    costs: CostModel | None = None  # as measured
    link: PeerLink | None = None  # once there is something to read over it
    suspect: bool = False  # its last link failed
    waiting: dict[str, Pull] = field(default_factory=dict)  # for the link, by pull id
    users: int = 0  # jobs
    speed_told: bool = False
    stale: bool = False  # map its memory anew when nobody uses it
    dropped: bool = False  # forget when nobody uses it

    @classmethod
    def of(cls, metadata: EngineMetadata) -> "JobPeer":
        """
        Raises:
            ValueError: a rank's layout is none.
        """
        tp, dcp = metadata.tp_size, metadata.dcp_size
        layouts = [KVLayout.from_record(rank.layout) for rank in metadata.ranks]
        scales = metadata.compat.kv_scales
        ends = (Endpoint(layout, rank, tp, scales, dcp) for rank, layout in enumerate(layouts))
        return cls(metadata, tuple(ends))

    @property
    def key(self) -> PeerKey:
        return self.metadata.engine_id, self.metadata.incarnation
