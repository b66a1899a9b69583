"""One prefill engine that a rank of a decode engine pulls from.

A Peer plans the pulls from the engine. The Peer either maps the engine's memory, or
has a link that reads from the engine. Only the rank's transfer thread uses it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from kvcache.transfer.draft import draft_planner
from kvcache.transfer.local_rank import LocalRank
from kvcache.transfer.move.peer_memory import Memory
from kvcache.transfer.peer_link import PeerLink
from kvcache.transfer.peer_mapping import PeerMapping
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
        link: the link that reads from the peer; None if there is none.
        transport: UCX's name of the transport that reads from the peer; empty before
            the first READ.
        is_speed_logged: the speed of a pull from the peer was logged.
        is_stale: the peer's memory has to be unmapped once no job uses the peer.
        is_dropped: the worker has to forget the peer once no job uses the peer.
        is_reported: the worker has reported that the peer is prepared.
    """

    def __init__(self, rank: LocalRank, metadata: EngineMetadata) -> None:
        self.rank = rank
        self.metadata = metadata
        self.engine_id = metadata.engine_id
        self.key: PeerKey = (metadata.engine_id, metadata.incarnation)
        self._mapping: PeerMapping | None = None
        self.link: PeerLink | None = None
        self.transport = ""
        self.is_speed_logged = False
        self.is_stale = False
        self.is_dropped = False
        self.is_reported = False
        self._endpoints = endpoints_of(metadata)
        groups = head_groups(
            rank.endpoint.heads(rank.total_kv_heads),
            metadata.tp_size,
            rank.total_kv_heads,
            metadata.dcp_size,
        )
        self._staging_bytes = rank.staging.nbytes if rank.staging else None
        self._planner: Planner | None = None
        self._draft_planner = draft_planner(rank.draft, metadata, self._staging_bytes)
        if self._draft_planner is not None:
            groups += self._draft_planner.head_groups
        # The ranks of the peer that this rank reads from.
        self._owners = sorted({owner for group in groups for owner in group.owners})
        # After a link has failed, all later links are probed, so that READs of the null
        # block test a connection before pulls use it.
        self._has_link_failed = False

    # -- plans

    def prepare(self) -> None:
        """Begins to map the peer's memory or to connect, so that the first pull is
        fast.

        Logs a warning if no pull from the peer can be planned.
        """
        self.begin_mapping()
        self.connect_if_unmapped()
        try:
            self._get_planner()
        except PlanError as error:  # every pull will fail with this error
            logger.warning(
                "no KV can be pulled from prefill server %s: %s", self.engine_id, error
            )

    @property
    def is_prepared(self) -> bool:
        """True if the preparation has ended, so that a pull need not wait for it."""
        if self.is_mapping:
            return False
        is_connected = self.link is not None and self.link.is_ready
        return self.uses_mapping or is_connected or self._has_link_failed

    def connect_if_unmapped(self) -> None:
        """Begins to connect if pulls from the peer cannot use mapped memory. Does
        nothing if a link has failed before."""
        is_needed = not (self.is_mapping or self.uses_mapping)
        if is_needed and self.link is None and not self._has_link_failed:
            self.connect()

    def transfers(self, pull: Pull) -> list[Transfer]:
        """Makes the pull's transfers: one for each group of layers, and one for draft
        KV if the pull has any. See `_transfers_with_planners`."""
        return [transfer for _, transfer in self._transfers_with_planners(pull)]

    def _transfers_with_planners(self, pull: Pull) -> list[tuple[Planner, Transfer]]:
        """Makes the pull's transfers. Marks the pull's blocks as used in the pool.

        Raises:
            PeerIncompatible: no plan can move KV between the two geometries, or a block
                table of the pull does not fit.
        """
        groups = self.rank.endpoint.groups
        token_ranges = groups.token_ranges(
            pull.token_start, pull.token_stop, pull.min_resume_tokens
        )
        lease_hash = int(pull.lease_id[:8], 16)
        transfers = []
        with _as_incompatible():
            planners = [(self._get_planner(), group) for group in range(groups.count)]
            if self._draft_planner is not None and pull.has_draft_kv:
                # Draft KV shares its block ids with a layer group without a window,
                # because that group keeps the blocks of all tokens.
                planners.append((self._draft_planner, groups.windows.index(None)))
            for planner, group in planners:
                transfer = planner.make_transfer(
                    (token_ranges[group].start, token_ranges[group].stop),
                    groups.group_table(pull.local_block_ids, group),
                    groups.group_table(pull.remote_block_ids, group),
                    lease_hash=lease_hash,
                )
                transfers.append((planner, transfer))
        self.rank.pool.mark_used(max(pull.local_block_ids, default=-1))
        return transfers

    def plan(self, pull: Pull, link: PeerLink) -> TransferPlan:
        """Plans the READs of a pull over the link. Raises the errors of `transfers`."""
        default_costs = DEFAULT_COSTS["cuda" if link.between_gpus else "cpu"]
        costs = self.rank.costs or link.costs or default_costs
        with _as_incompatible():
            plans = [
                planner.plan(transfer, costs)
                for planner, transfer in self._transfers_with_planners(pull)
            ]
            return join_plans(plans)

    def _get_planner(self) -> Planner:
        if self._planner is None:
            rank = self.rank
            self._planner = Planner(
                rank.endpoint,
                self._endpoints,
                rank.total_kv_heads,
                staging_bytes=self._staging_bytes,
                convert=rank.convert,
            )
        return self._planner

    # -- the mapped path

    @property
    def is_mapping(self) -> bool:
        """True while an attempt to map the peer's memory is running. False before
        `begin_mapping` and after `unmap`."""
        return self._mapping is not None and not self._mapping.has_ended

    @property
    def uses_mapping(self) -> bool:
        """True if pulls from the peer have to be MappedJobs: the peer's memory is
        mapped, or READs are not allowed. Only valid while not `is_mapping`."""
        if self._mapping is None:
            return False
        return self.refusal is None or self.rank.maps_only

    @property
    def memories(self) -> dict[int, Memory]:
        """The mapped pools, by rank of the peer."""
        return self._mapping.memories if self._mapping is not None else {}

    @property
    def refusal(self) -> str | None:
        """Why the peer's memory cannot be mapped; None if it is mapped, or if mapping
        was not tried."""
        return self._mapping.refusal if self._mapping is not None else None

    def begin_mapping(self) -> None:
        """Begins to map the peer's memory, unless that was tried since the last
        `unmap`. Does nothing if this rank maps no memory."""
        placer = self.rank.placer
        if placer is not None and self._mapping is None:
            self._mapping = PeerMapping(
                placer, self.metadata, self._owners, self.rank.wake
            )

    def unmap(self) -> None:
        """Closes the mapped memory. No job may be reading from it."""
        if self._mapping is not None:
            self._mapping.close()
        self._mapping = None
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
