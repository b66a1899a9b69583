"""From a pull's order to the job that carries it out on one rank: mapped, or READs by a plan."""

from kvcache.pool import KVPool
from kvcache.transfer.link.read_throttle import Throttle
from kvcache.transfer.link.read_window import ReadWindow
from kvcache.transfer.link.ucx_log import UcxRead
from kvcache.transfer.move.place import measure
from kvcache.transfer.move.staging import StagingBuffer
from kvcache.transfer.plan.cost import DEFAULT_COSTS, CostModel, Sample, fit_costs
from kvcache.transfer.plan.endpoint import Endpoint, PlanError, head_groups
from kvcache.transfer.plan.plan import Planner
from kvcache.transfer.pulls.messages import Pull
from kvcache.transfer.worker.job_peer import JobPeer
from kvcache.transfer.worker.link_log import log_measured
from kvcache.transfer.worker.mapped_job import MappedJob, MappedPath
from kvcache.transfer.worker.read_job import ReadJob
from protocol.errors import PeerIncompatible
from protocol.process.logging import get_logger

logger = get_logger(__name__)

_LEAST_STAGING_BYTES = 4 << 20  # with less there is little to choose

Job = ReadJob | MappedJob


class JobMaker:
    """Plans one rank's pulls, and measures the links that plans depend on.

    Args:
        endpoint, total_kv_heads: geometry of this rank and of the model.
        convert: accept a peer with another KV dtype.
        costs: of every link; None measures each peer at first contact.
        mapped: takes the pulls from peers that it can map.
        throttle: bounds the rate of READs beside a batch.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        total_kv_heads: int,
        pool: KVPool,
        staging: StagingBuffer | None,
        limits: ReadWindow,
        *,
        convert: bool,
        costs: CostModel | None,
        mapped: MappedPath | None,
        throttle: Throttle | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._total_kv_heads = total_kv_heads
        self._pool = pool
        self._on_gpu = pool.device.type == "cuda"
        self._staging = staging
        self._limits = limits
        self._convert = convert
        self._costs = costs
        self._mapped = mapped
        self._throttle = throttle
        self._reformat_bytes_per_s = DEFAULT_COSTS["cuda"].reformat_bytes_per_s
        if costs is not None:
            logger.info("every link, as configured: %s", costs)

    @property
    def measures(self) -> bool:
        """Plans depend on what is measured of a peer's link."""
        room = self._staging.nbytes if self._staging else 0
        return self._costs is None and room >= _LEAST_STAGING_BYTES

    def measure_copies(self) -> None:
        """Takes some ms on a CPU, where plans depend on it."""
        if self.measures and not self._on_gpu:
            self._reformat_bytes_per_s = measure()

    def owners(self, remote_tp: int) -> set[int]:
        """Ranks of a peer that hold heads of ours."""
        ours = self._endpoint.heads(self._total_kv_heads)
        groups = head_groups(ours, remote_tp, self._total_kv_heads)
        return {owner for group in groups for owner in group.owners}

    def learn(self, peer: JobPeer, samples: tuple[Sample, Sample], way: UcxRead | None) -> None:
        """Takes in what was measured of a link, which reads by `way`, if that is known."""
        try:
            peer.costs = fit_costs(*samples, reformat_bytes_per_s=self._reformat_bytes_per_s)
        except ValueError as error:  # a null block too small to tell runs apart
            logger.info("prefill server %s: %s; the usual costs", peer.metadata.engine_id, error)
            return
        between_gpus = self._between_gpus(peer)
        log_measured(peer.metadata.engine_id, peer.costs, way, between_gpus=between_gpus)

    def make(self, pull: Pull, peer: JobPeer) -> Job:
        """The job of a pull.

        Raises:
            PeerIncompatible: no plan bridges the geometries, or the mapped path is required.
        """
        try:
            return self._make(pull, peer)
        except PlanError as error:
            raise PeerIncompatible(str(error)) from error

    def prepare(self, peer: JobPeer) -> None:
        """Pulls of a peer are going to come: says if none can be planned."""
        try:
            peer.planner = peer.planner or self._planner(peer)
        except PlanError as error:  # every pull fails with it
            logger.warning("prefill server %s: %s", peer.metadata.engine_id, error)

    def _make(self, pull: Pull, peer: JobPeer) -> Job:
        planner = peer.planner = peer.planner or self._planner(peer)
        transfer = planner.take(
            (pull.token_start, pull.token_stop),
            pull.local_block_ids,
            pull.remote_block_ids,
            lease_hash=pull.lease_hash,
        )
        if self._mapped is not None:
            mapped = self._mapped.job(pull.pull_id, peer.metadata, transfer)
            if mapped is not None:
                return mapped
        usual = DEFAULT_COSTS["cuda" if self._between_gpus(peer) else "cpu"]
        plan = planner.plan(transfer, self._costs or peer.costs or usual)
        pool, staging = self._pool.base_address, self._staging
        return ReadJob(pull.pull_id, plan, pool, staging, self._limits, self._throttle)

    def _planner(self, peer: JobPeer) -> Planner:
        return Planner(
            self._endpoint,
            peer.endpoints,
            self._total_kv_heads,
            staging_bytes=self._staging.nbytes if self._staging else None,
            convert=self._convert,
        )

    def _between_gpus(self, peer: JobPeer) -> bool:
        return self._on_gpu and peer.metadata.ranks[0].device_kind == "cuda"
