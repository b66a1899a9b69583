"""The KV of a drafter (draft KV), which is pulled with the KV of the engine's model.

A drafter has a separate pool, behind the engine's pool in the same allocation. The
draft KV of a token has the same block id, and the same position in the block, as the
token's KV in the engine's pool. So draft KV needs no separate lease and no separate
block table: pulling it is one more transfer, between different endpoints.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvcache.layout import KVLayout
from kvcache.pool import KVPool
from kvcache.transfer.plan.endpoint import Endpoint, PlanError
from kvcache.transfer.plan.plan import Planner
from protocol.handshake import (
    DraftKV,
    DraftPool,
    EngineMetadata,
    shares_draft_kv,
)
from protocol.process.logging import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True)
class DraftRank:
    """A drafter's KV on one rank of this engine.

    Attributes:
        kv: the properties that a peer's draft KV must share.
        endpoint: the geometry of the drafter's pool.
    """

    kv: DraftKV
    endpoint: Endpoint

    @classmethod
    def make(
        cls, kv: DraftKV, layout: KVLayout, pool: KVPool, rank: int, tp: int
    ) -> "DraftRank":
        """Describes a drafter's pool behind an engine's pool."""
        return cls(kv, Endpoint(layout, rank, tp, base=pool.extra_offset))

    @property
    def pool(self) -> DraftPool:
        """The description of the pool for peers."""
        return DraftPool(layout=self.endpoint.layout, base=self.endpoint.base)


def draft_planner(
    local: DraftRank | None, metadata: EngineMetadata, staging_bytes: int | None
) -> Planner | None:
    """Makes the planner for pulls of draft KV from a peer.

    Args:
        staging_bytes: as in Planner.

    Returns:
        The planner; None if this engine has no drafter, or if the peer's draft KV
        cannot be pulled.
    """
    if local is None or not shares_draft_kv(local.kv, metadata):
        return None
    remote = _draft_endpoints(metadata)
    heads = local.kv.total_kv_heads
    try:
        return Planner(local.endpoint, remote, heads, staging_bytes=staging_bytes)
    except PlanError as error:
        logger.info("no draft KV can be pulled from %s: %s", metadata.engine_id, error)
        return None


def _draft_endpoints(metadata: EngineMetadata) -> Sequence[Endpoint]:
    pools = [record.draft for record in metadata.ranks if record.draft is not None]
    return [
        Endpoint(
            KVLayout.from_record(pool.layout), rank, metadata.tp_size, base=pool.base
        )
        for rank, pool in enumerate(pools)
    ]
