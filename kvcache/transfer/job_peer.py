"""What a rank's transfer thread knows of one prefill engine."""

from dataclasses import dataclass, field

from kvcache.transfer.pace import Speed
from kvcache.transfer.plan import CostModel, Endpoint, Planner
from kvcache.transfer.probe_job import ProbeJob
from kvcache.transfer.pull import PeerKey
from protocol.handshake import EngineMetadata


@dataclass
class JobPeer:
    metadata: EngineMetadata
    endpoints: tuple[Endpoint, ...]
    planner: Planner | None = None  # once pulled from
    costs: CostModel | None = None  # as measured
    probe: ProbeJob | None = None  # measuring them
    names: dict[int, str] = field(default_factory=dict)  # of its agents, by rank, once read from
    users: int = 0  # jobs
    speed: Speed = field(default_factory=Speed)
    stale: bool = False  # connect anew when nobody uses it
    dropped: bool = False  # forget when nobody uses it

    @property
    def key(self) -> PeerKey:
        return self.metadata.engine_id, self.metadata.incarnation
