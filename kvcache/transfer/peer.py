"""One prefill engine that a rank of a decode engine pulls from.

A Peer plans the pulls from the engine. The Peer either maps the engine's memory, or
has a link that reads from the engine. Only the rank's transfer thread uses it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from kvcache.transfer.local_rank import LocalRank
from kvcache.transfer.move.peer_memory import Memory, NotMappable
from kvcache.transfer.peer_link import PeerLink
from kvcache.transfer.plan.block_copy import Transfer
from kvcache.transfer.plan.cost import DEFAULT_COSTS
from kvcache.transfer.plan.endpoint import PlanError, endpoints_of, head_groups
from kvcache.transfer.plan.plan import Planner, TransferPlan, join_plans
from kvcache.transfer.pulls.messages import PeerKey, Pull
from protocol.errors import BatonError, PeerIncompatible
from protocol.handshake import EngineMetadata
from protocol.process.logging import get_logger

logger = get_logger(__name__)


class Peer:
    """One prefill engine that this rank pulls from; see the module docstring.

    Attributes:
        memories: the mapped pools, by rank of the peer.
        refusal: why the peer's memory cannot be mapped; None if it is mapped, or if
            mapping was not tried.
        link: the link that reads from the peer; None if there is none.
        transport: UCX's name of the transport that reads from the peer; empty before
            the first READ.
        is_speed_logged: the speed of a pull from the peer was logged.
        is_stale: the peer's memory has to be unmapped once no job uses the peer.
        is_dropped: the worker has to forget the peer once no job uses the peer.
    """

    def __init__(self, rank: LocalRank, metadata: EngineMetadata) -> None:
        self.rank = rank
        self.metadata = metadata
        self.engine_id = metadata.engine_id
        self.key: PeerKey = (metadata.engine_id, metadata.incarnation)
        self.memories: dict[int, Memory] = {}
        self.refusal: str | None = None
        self.link: PeerLink | None = None
        self.transport = ""
        self.is_speed_logged = False
        self.is_stale = False
        self.is_dropped = False
        self._endpoints = endpoints_of(metadata)
        groups = head_groups(
            rank.endpoint.heads(rank.total_kv_heads),
            metadata.tp_size,
            rank.total_kv_heads,
            metadata.dcp_size,
        )
        # The ranks of the peer that this rank reads from.
        self._owners = sorted({owner for group in groups for owner in group.owners})
        self._planner: Planner | None = None
        # After a link has failed, all later links are probed, so that READs of the null
        # block test a connection before pulls use it.
        self._has_link_failed = False

    # -- plans

    def prepare(self) -> None:
        """Maps the peer's memory or begins to connect, so that the first pull is fast.

        Logs a warning if no pull from the peer can be planned.
        """
        if not self.map():
            self.connect()
        try:
            self._get_planner()
        except PlanError as error:  # every pull will fail with this error
            logger.warning(
                "no KV can be pulled from prefill server %s: %s", self.engine_id, error
            )

    def transfers(self, pull: Pull) -> list[Transfer]:
        """Makes the pull's transfers, one for each group of layers.

        Marks the pull's blocks as used in the pool.

        Raises:
            PeerIncompatible: no plan can move KV between the two geometries, or a block
                table of the pull does not fit.
        """
        groups = self.rank.endpoint.groups
        token_ranges = groups.token_ranges(
            pull.token_start, pull.token_stop, pull.reach
        )
        lease_hash = int(pull.lease_id[:8], 16)
        with _as_incompatible():
            planner = self._get_planner()
            transfers = [
                planner.make_transfer(
                    (tokens.start, tokens.stop),
                    groups.group_table(pull.local_block_ids, group),
                    groups.group_table(pull.remote_block_ids, group),
                    lease_hash=lease_hash,
                )
                for group, tokens in enumerate(token_ranges)
            ]
        self.rank.pool.mark_used(max(pull.local_block_ids, default=-1))
        return transfers

    def plan(self, pull: Pull, link: PeerLink) -> TransferPlan:
        """Plans the READs of a pull over the link. Raises the errors of `transfers`."""
        default_costs = DEFAULT_COSTS["cuda" if link.between_gpus else "cpu"]
        costs = self.rank.costs or link.costs or default_costs
        with _as_incompatible():
            planner = self._get_planner()
            plans = [planner.plan(part, costs) for part in self.transfers(pull)]
            return join_plans(plans)

    def _get_planner(self) -> Planner:
        if self._planner is None:
            rank = self.rank
            self._planner = Planner(
                rank.endpoint,
                self._endpoints,
                rank.total_kv_heads,
                staging_bytes=rank.staging.nbytes if rank.staging else None,
                convert=rank.convert,
            )
        return self._planner

    # -- the mapped path

    def map(self) -> bool:
        """Maps the peer's memory, unless that was tried since the last `unmap`.

        Returns:
            True if pulls from the peer have to be MappedJobs: the peer's memory is
            mapped, or READs are not allowed.
        """
        placer = self.rank.placer
        if placer is None:
            return False
        if not self.memories and self.refusal is None:
            try:
                for owner in self._owners:
                    self.memories[owner] = placer.open(self.metadata.ranks[owner])
                logger.info("KV of prefill server %s is mapped", self.engine_id)
            except Exception as error:
                # An error other than NotMappable is a bug here. It is not raised,
                # because READs from the peer may still work.
                if not isinstance(error, NotMappable):
                    logger.exception(
                        "mapping KV of prefill server %s failed", self.engine_id
                    )
                logger.info(
                    "KV of prefill server %s is not mapped: %s", self.engine_id, error
                )
                self.unmap()
                self.refusal = str(error)
        return self.refusal is None or self.rank.maps_only

    def unmap(self) -> None:
        """Closes the mapped memory. No job may be reading from it."""
        for memory in self.memories.values():
            memory.close()
        self.memories.clear()
        self.refusal = None
        self.is_stale = False

    # -- the link

    def connect(self) -> PeerLink | None:
        """Returns the link if it is ready, else None. Creates a link if there is none.

        Raises:
            BatonError: connecting has timed out, but the link's thread is still blocked
                in connecting, so there can be no new link yet.
        """
        link = self.link
        if link is None:
            self.link = PeerLink(
                self.rank,
                self.metadata,
                [self._endpoints[owner] for owner in self._owners],
                probes=self.rank.measures_links or self._has_link_failed,
            )
            return None
        if link.error is not None and link.is_connecting:
            raise link.error
        return link if link.is_ready and not link.is_closing else None

    def clean_up_link(self) -> BatonError | None:
        """Begins to close a link that has failed; forgets a link that is closed.

        Returns:
            If the link has just failed, the error for pulls that wait for the link;
            otherwise None.
        """
        link = self.link
        if link is None or (link.is_ready and not link.is_closing):
            return None
        self._has_link_failed |= link.error is not None
        if link.is_closed:
            self.link = None
        elif link.error is not None and not link.is_closing:
            link.close(link.error)
            return link.error
        return None


@contextmanager
def _as_incompatible() -> Iterator[None]:
    """Turns a PlanError into PeerIncompatible."""
    try:
        yield
    except PlanError as error:
        raise PeerIncompatible(str(error)) from error
