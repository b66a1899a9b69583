"""The KV heads of each rank, and the ranks of P from which a rank of D reads its heads.

Ranks hold contiguous ranges of the model's KV heads; where there are more ranks than heads (GQA
with few heads, or the one latent "head" of MLA) neighbours hold copies of the same head. A rank of
D reads each of its heads from the ranks of P that hold it. Several holders share the work block by
block, so that no rank of P is a hot spot.

Ranks that share the tokens of every sequence (decode context parallelism, dcp) hold the same heads,
each for the tokens of its own stripe (kvcache/stripe.py).
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
    """Factors of stored elements on their way to a pool of other scales, by layer and component,
    layers outermost; None if all are 1."""
    count = max(len(source.scales), len(target.scales))
    of_source, of_target = (end.scales or (1.0,) * count for end in (source, target))
    factors = tuple(
        theirs / ours for theirs, ours in zip(of_source, of_target, strict=True)
    )
    return factors if any(factor != 1.0 for factor in factors) else None


@dataclass(frozen=True)
class Endpoint:
    """The geometry of one rank of an engine."""

    layout: KVLayout
    rank: int
    tp: int
    scales: tuple[
        float, ...
    ] = ()  # as in KVPool: empty, or one of each layer and component
    dcp: int = (
        1  # number of neighbouring ranks that share a sequence's tokens; divides tp
    )
    groups: KVGroups = ONE_GROUP  # the layout has the layers of one group

    def heads(self, total_kv_heads: int) -> range:
        """The model's KV heads on this rank."""
        return heads_of(self.rank // self.dcp, self.tp // self.dcp, total_kv_heads)

    @property
    def stripe(self) -> Stripe:
        """The tokens of every sequence on this rank."""
        return Stripe(self.rank % self.dcp, self.dcp, self.layout.block_size)


def endpoints_of(metadata: EngineMetadata) -> list[Endpoint]:
    """The geometry of a peer's ranks, by rank."""
    compat, groups = metadata.compat, KVGroups.from_wire(metadata.compat.kv_windows)
    scales = compat.kv_scales if groups.count == 1 else ()  # else they are all 1
    rest = metadata.tp_size, scales, metadata.dcp_size, groups
    layouts = [KVLayout.from_record(each.layout) for each in metadata.ranks]
    return [Endpoint(each, rank, *rest) for rank, each in enumerate(layouts)]


class HeadGroup(NamedTuple):
    """Heads that a rank of D reads from the same owners: one, or holders of copies in turn."""

    heads: range  # of the model
    owners: tuple[int, ...]  # ranks of P; with a dcp, whole context-parallel groups


def heads_of(rank: int, tp: int, total_heads: int) -> range:
    """The heads that `rank` of `tp` holds: at least one, copied where tp exceeds total_heads."""
    assert 0 <= rank < tp and total_heads > 0, (rank, tp, total_heads)
    start = rank * total_heads // tp
    return range(start, max(start + 1, (rank + 1) * total_heads // tp))


@lru_cache(maxsize=64)
def head_groups(
    local_heads: range, remote_tp: int, total_heads: int, remote_dcp: int = 1
) -> tuple[HeadGroup, ...]:
    """Groups the heads that a rank of D wants by their owners on P."""
    num = remote_tp // remote_dcp
    held = [heads_of(rank // remote_dcp, num, total_heads) for rank in range(remote_tp)]
    groups: list[HeadGroup] = []
    for head in local_heads:
        owners = tuple(rank for rank, heads in enumerate(held) if head in heads)
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
    """Refuses geometries that no plan bridges. The peer's has passed check_consistent.

    Raises:
        PlanError: names the field and both values.
    """
    _check_peer(remote)
    ours, theirs = local.layout, remote[0].layout
    local.stripe.check_remote(theirs.block_size)
    for name in ("num_layers", "num_components", "head_dim"):
        if (here := getattr(ours, name)) != (there := getattr(theirs, name)):
            raise PlanError(
                f"{name} is {here} here and {there} on the peer; it must be equal"
            )
    if local.groups != remote[0].groups:
        pair = f"{local.groups.windows} here and {remote[0].groups.windows} on the peer"
        raise PlanError(f"the windows of KV groups are {pair}; they must be equal")
    elements = (
        ("dtype", ours.dtype, theirs.dtype),
        ("scales", local.scales, remote[0].scales),
    )
    for name, mine, peers in elements:
        if mine != peers and not convert:
            raise PlanError(
                f"KV {name} is {mine} here and {peers} on the peer; start both with the same, "
                f"or let D convert with --kv-convert"
            )
    for end in (local, *remote):
        held = len(end.heads(total_kv_heads))
        if end.layout.num_heads != held:
            raise PlanError(
                f"num_heads is {end.layout.num_heads} on rank {end.rank} of tp {end.tp}, "
                f"where {total_kv_heads} heads in all make {held}"
            )


def _check_peer(remote: Sequence[Endpoint]) -> None:
    for rank, end in enumerate(remote):
        for name in (
            "order",
            "num_layers",
            "num_components",
            "block_size",
            "head_dim",
            "dtype",
        ):
            first, value = getattr(remote[0].layout, name), getattr(end.layout, name)
            if first != value:
                raise PlanError(
                    f"peer's ranks 0 and {rank} differ in {name}: {first} and {value}"
                )
