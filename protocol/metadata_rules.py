"""Checks that the metadata of a peer is possible and does not contradict itself."""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from protocol.errors import PeerIncompatible
from protocol.handshake import (
    AXES,
    FP8,
    ITEMSIZE,
    MAX_BYTES,
    MAX_GROUPS,
    PROTOCOL_VERSION,
    CompatRecord,
    DraftKV,
    EngineMetadata,
    LayoutRecord,
    RankMetadata,
)
from protocol.short_repr import short_repr


def check_consistent(metadata: EngineMetadata) -> None:
    """Raises PeerIncompatible, naming the field, if the metadata contradicts itself, is
    impossible or has a different protocol version.

    After this check, every KV block of a rank lies inside the memory that the peer
    registered. Whether this engine can use the peer's KV is checked elsewhere: by
    `check_compatible` (protocol/handshake.py) and by the transfer plan.
    """
    _check(_rules(metadata))


def check_region(compat: CompatRecord, group_layers: int) -> None:
    """Raises PeerIncompatible, naming the field, if the KV that an engine wants to keep
    in a KV store has contradictory or impossible properties.

    Args:
        compat: The properties of the KV.
        group_layers: Number of layers in the largest layer group (kvcache/groups.py).
    """
    _check(_region_rules(compat, group_layers))


class _Rule(NamedTuple):
    field: str
    value: object
    is_satisfied: bool
    requirement: str  # continues the message after "it must"


def _check(rules: Iterable[_Rule]) -> None:
    for rule in rules:
        if not rule.is_satisfied:
            raise PeerIncompatible(
                f"{rule.field} is {short_repr(rule.value)} in the peer's metadata; "
                f"it must {rule.requirement}.",
                param=rule.field,
            )


def _range_rule(field: str, value: int, low: int, high: int) -> _Rule:
    return _Rule(field, value, low <= value <= high, f"be {low} to {high}")


def _choice_rule(field: str, value: str, allowed: Iterable[str]) -> _Rule:
    return _Rule(field, value, value in allowed, f"be one of {sorted(allowed)}")


def _rules(metadata: EngineMetadata) -> Iterator[_Rule]:
    """Yields the rules. Each rule may rely on the rules before it, because the caller
    stops at the first rule that is not satisfied.
    """
    yield _Rule(
        "protocol_version",
        metadata.protocol_version,
        metadata.protocol_version == PROTOCOL_VERSION,
        f"be {PROTOCOL_VERSION}",
    )
    yield from _scale_rules(metadata.compat)
    yield from _rank_number_rules(metadata)
    yield from _group_rules(metadata.compat)
    for rank in metadata.ranks:
        yield from _allocation_rules(rank)
        where = f"ranks[{rank.rank}].layout"
        dtypes = (metadata.compat.kv_dtype,)
        yield from _layout_rules(where, rank.layout, dtypes, rank.nbytes)
        if metadata.draft is not None:
            yield from _draft_rules(rank, metadata.draft)


def _scale_rules(compat: CompatRecord) -> Iterator[_Rule]:
    yield _choice_rule("compat.kv_dtype", compat.kv_dtype, ITEMSIZE)
    scales = compat.kv_scales
    num_scales = 0
    if compat.kv_dtype == FP8:
        num_scales = compat.num_layers * compat.num_components
    yield _Rule(
        "compat.kv_scales' length",
        len(scales),
        len(scales) == num_scales,
        f"be {num_scales} for {compat.kv_dtype}",
    )
    yield _Rule(
        "compat.kv_scales",
        scales,
        all(math.isfinite(scale) and scale > 0 for scale in scales),
        "be finite numbers above 0",
    )


def _group_rules(compat: CompatRecord) -> Iterator[_Rule]:
    num_groups = len(compat.kv_windows)
    yield _range_rule("compat.kv_windows' length", num_groups, 0, MAX_GROUPS)
    yield _Rule(
        "compat.kv_scales",
        compat.kv_scales,
        num_groups < 2 or set(compat.kv_scales) <= {1.0},
        "be 1 if there are several KV groups (compat.kv_windows)",
    )


def _region_rules(compat: CompatRecord, group_layers: int) -> Iterator[_Rule]:
    for name in ("num_layers", "total_kv_heads", "num_components", "head_dim"):
        yield _range_rule(f"compat.{name}", getattr(compat, name), 1, 1 << 32)
    yield from _scale_rules(compat)
    yield from _group_rules(compat)
    num_groups = len(compat.kv_windows) or 1
    min_layers = -(-compat.num_layers // num_groups)
    yield _range_rule("group_layers", group_layers, min_layers, compat.num_layers)


def _rank_number_rules(metadata: EngineMetadata) -> Iterator[_Rule]:
    tp_size = metadata.tp_size
    dcp_size = metadata.dcp_size
    yield _Rule(
        "dcp_size",
        dcp_size,
        0 < dcp_size and tp_size % dcp_size == 0,
        f"divide tp_size {tp_size}",
    )
    ranks = [rank.rank for rank in metadata.ranks]
    is_complete = ranks == list(range(len(ranks))) and 0 < len(ranks) == tp_size
    requirement = f"list ranks 0 to {tp_size - 1} in order"
    yield _Rule("ranks", ranks[:64], is_complete, requirement)


def _allocation_rules(rank: RankMetadata) -> Iterator[_Rule]:
    where = f"ranks[{rank.rank}]"
    max_address = (1 << 64) - rank.nbytes
    yield _choice_rule(f"{where}.device_kind", rank.device_kind, ("cpu", "cuda"))
    yield _range_rule(f"{where}.device_id", rank.device_id, 0, 1 << 16)
    yield _range_rule(f"{where}.nbytes", rank.nbytes, 1, MAX_BYTES)
    yield _range_rule(f"{where}.base_address", rank.base_address, 1, max_address)


def _draft_rules(rank: RankMetadata, draft: DraftKV) -> Iterator[_Rule]:
    """Yields the rules for the drafter's KV pool, which follows the engine's KV pool in
    the same allocation.
    """
    where = f"ranks[{rank.rank}].draft"
    yield _Rule(where, rank.draft, rank.draft is not None, "be a pool")
    assert rank.draft is not None
    base = rank.draft.base
    yield _range_rule("draft.total_kv_heads", draft.total_kv_heads, 1, 1 << 32)
    yield _range_rule(f"{where}.base", base, rank.layout.nbytes, rank.nbytes)
    max_bytes = rank.nbytes - base
    layout = rank.draft.layout
    size = rank.layout.block_size
    is_equal = layout.block_size == size
    yield _Rule(f"{where}.block_size", layout.block_size, is_equal, f"be {size}")
    yield _range_rule(
        f"{where}.num_blocks", layout.num_blocks, rank.layout.num_blocks, 1 << 32
    )
    yield from _layout_rules(f"{where}.layout", layout, ITEMSIZE, max_bytes)


def _layout_rules(
    where: str, layout: LayoutRecord, dtypes: Iterable[str], max_bytes: int
) -> Iterator[_Rule]:
    yield _Rule(
        f"{where}.order",
        layout.order,
        sorted(layout.order) == sorted(AXES) and layout.order.endswith("D"),
        f"have each of {AXES} once, D last",
    )
    yield _choice_rule(f"{where}.dtype", layout.dtype, dtypes)
    names = ("num_blocks", "num_heads", "num_layers", "num_components", "head_dim")
    for name in names:
        yield _range_rule(f"{where}.{name}", getattr(layout, name), 1, 1 << 32)
    yield _range_rule(f"{where}.block_size", layout.block_size, 1, 256)
    yield _range_rule(f"{where}'s size in bytes", layout.nbytes, 1, max_bytes)
