"""The KV heads of each rank, and the ranks of P from which a rank of D reads its heads.

P is the prefill server, and D is the decode server. Ranks hold contiguous ranges of the
model's KV heads. If there are more ranks than heads (GQA with few heads, or the one
latent "head" of MLA), neighboring ranks hold copies of the same head. A rank of D reads
each of its heads from the ranks of P that hold the head. If several ranks of P hold
copies of a head, the blocks of the head are read from these ranks in rotation, so that
no rank becomes a hot spot.

Ranks that share the tokens of every sequence (decode context parallelism, dcp) hold the
same heads. Each of these ranks stores the tokens of one stripe (kvcache/stripe.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from kvcache.groups import ONE_GROUP, KVGroups
from kvcache.layout import KVLayout
from kvcache.stripe import IntArray as IntArray
from kvcache.stripe import PlanError as PlanError
from kvcache.stripe import Stripe
from protocol.handshake import EngineMetadata


def scale_factors(source: "Endpoint", target: "Endpoint") -> tuple[float, ...] | None:
    """Factors that convert stored elements of `source` into elements of `target`.

    Returns:
        One factor for each layer and component, layers outermost; None if all are 1.
    """
    count = max(len(source.scales), len(target.scales))
    source_scales = source.scales or (1.0,) * count
    target_scales = target.scales or (1.0,) * count
    pairs = zip(source_scales, target_scales, strict=True)
    factors = tuple(source_scale / target_scale for source_scale, target_scale in pairs)
    if all(factor == 1.0 for factor in factors):
        return None
    return factors


@dataclass(frozen=True)
class Endpoint:
    """The geometry of one rank of an engine.

    Attributes:
        layout: the layout of the rank's pool; its layers are those of one layer group.
        tp: number of ranks of the engine.
        scales: as in KVPool: empty, or one for each layer and component.
        dcp: number of neighboring ranks that share a sequence's tokens; divides tp.
        groups: the layer groups of the model.
        base: bytes from the start of the rank's memory to block 0.
    """

    layout: KVLayout
    rank: int
    tp: int
    scales: tuple[float, ...] = ()
    dcp: int = 1
    groups: KVGroups = ONE_GROUP
    base: int = 0

    def heads(self, total_kv_heads: int) -> range:
        """The model's KV heads on this rank."""
        return heads_of(self.rank // self.dcp, self.tp // self.dcp, total_kv_heads)

    @property
    def stripe(self) -> Stripe:
        """The tokens of every sequence that this rank stores."""
        return Stripe(self.rank % self.dcp, self.dcp, self.layout.block_size)


def endpoints_of(metadata: EngineMetadata) -> list[Endpoint]:
    """The geometry of each rank of a peer, in the order of the ranks."""
    compat = metadata.compat
    groups = KVGroups.from_wire(compat.kv_windows)
    # With several layer groups, all scales are 1.
    scales = compat.kv_scales if groups.count == 1 else ()
    return [
        Endpoint(
            layout=KVLayout.from_record(record.layout),
            rank=rank,
            tp=metadata.tp_size,
            scales=scales,
            dcp=metadata.dcp_size,
            groups=groups,
        )
        for rank, record in enumerate(metadata.ranks)
    ]


class HeadGroup(NamedTuple):
    """Heads that a rank of D reads from the same ranks of P, the owners.

    Each owner holds all of these heads. If there are several owners, the blocks are
    read from these owners in rotation.
    """

    heads: range  # numbers of the model's KV heads
    owners: tuple[int, ...]  # ranks of P; all ranks of each context-parallel group


def heads_of(rank: int, tp: int, total_heads: int) -> range:
    """The heads that `rank` of `tp` ranks holds.

    A rank holds at least one head. If tp exceeds total_heads, several ranks hold copies
    of the same head.
    """
    assert 0 <= rank < tp and total_heads > 0, (rank, tp, total_heads)
    start = rank * total_heads // tp
    return range(start, max(start + 1, (rank + 1) * total_heads // tp))


@lru_cache(maxsize=64)
def head_groups(
    local_heads: range, remote_tp: int, total_heads: int, remote_dcp: int = 1
) -> tuple[HeadGroup, ...]:
    """Groups heads of a rank of D. The same ranks of P hold all heads of a group.

    Args:
        local_heads: the heads of the rank of D.
        remote_tp, remote_dcp: tp and dcp of P, as in Endpoint.
    """
    num_positions = remote_tp // remote_dcp
    rank_heads = [
        heads_of(rank // remote_dcp, num_positions, total_heads)
        for rank in range(remote_tp)
    ]
    groups: list[HeadGroup] = []
    for head in local_heads:
        owners = tuple(rank for rank, heads in enumerate(rank_heads) if head in heads)
        if groups and groups[-1].owners == owners:
            groups[-1] = HeadGroup(range(groups[-1].heads.start, head + 1), owners)
        else:
            groups.append(HeadGroup(range(head, head + 1), owners))
    return tuple(groups)


def check_endpoints(
    local: Endpoint,
    remote: Sequence[Endpoint],
    total_kv_heads: int,
    *,
    convert: bool = False,
) -> None:
    """Checks that KV can be moved between two geometries.

    The peer's metadata must have passed check_consistent (protocol/metadata_rules.py).

    Args:
        convert: accept different dtypes and scales.

    Raises:
        PlanError: the values of a field do not fit together; the message has both
            values.
    """
    _check_ranks_agree(remote)
    peer = remote[0]
    local.stripe.check_remote(peer.layout.block_size)
    for name in ("num_layers", "num_components", "head_dim"):
        local_value = getattr(local.layout, name)
        peer_value = getattr(peer.layout, name)
        if local_value != peer_value:
            raise PlanError(
                f"{name} is {local_value} here and {peer_value} on the peer; "
                f"it must be equal"
            )
    if local.groups != peer.groups:
        raise PlanError(
            f"the windows of KV groups are {local.groups.windows} here and "
            f"{peer.groups.windows} on the peer; they must be equal"
        )
    if not convert:
        _check_elements("dtype", local.layout.dtype, peer.layout.dtype)
        _check_elements("scales", local.scales, peer.scales)
    for endpoint in (local, *remote):
        num_heads = len(endpoint.heads(total_kv_heads))
        if endpoint.layout.num_heads != num_heads:
            raise PlanError(
                f"num_heads is {endpoint.layout.num_heads} on rank {endpoint.rank}; "
                f"with {total_kv_heads} KV heads and tp {endpoint.tp} it must be "
                f"{num_heads}"
            )


def _check_elements(name: str, local_value: object, peer_value: object) -> None:
    """Raises PlanError if two dtypes, or two sets of scales, differ.

    Not called if KV may be converted.
    """
    if local_value != peer_value:
        raise PlanError(
            f"KV {name} is {local_value} here and {peer_value} on the peer; start both "
            f"servers with the same KV {name}, or the decode server with --kv-convert"
        )


def _check_ranks_agree(remote: Sequence[Endpoint]) -> None:
    """Raises PlanError if the layouts of a peer's ranks differ in more than heads."""
    names = ("order", "num_layers", "num_components", "block_size", "head_dim", "dtype")
    for rank, endpoint in enumerate(remote):
        for name in names:
            first_value = getattr(remote[0].layout, name)
            value = getattr(endpoint.layout, name)
            if first_value != value:
                raise PlanError(
                    f"the peer's ranks 0 and {rank} differ in {name}: "
                    f"{first_value} and {value}"
                )
