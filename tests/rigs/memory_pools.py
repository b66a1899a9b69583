"""Pools of small engines, with values by which tests can check every byte."""

from typing import Any, NamedTuple

import numpy as np
import torch
from msgspec.structs import replace

from kvcache.layout import KVLayout
from kvcache.pool import KVPool
from kvcache.transfer.draft import DraftRank
from kvcache.transfer.plan.endpoint import heads_of
from protocol.handshake import DraftKV

HEADS = 4
LAYERS = 3
HEAD_DIM = 8
_MAX_HEADS = 8


def layout(
    tp: int = 1, rank: int = 0, *, heads: int = HEADS, dcp: int = 1, **changes: Any
) -> KVLayout:
    """Return the KV layout of one rank."""
    fields = {
        "order": "BHLCND",
        "num_blocks": 32,
        "num_heads": len(heads_of(rank // dcp, tp // dcp, heads)),
        "num_layers": LAYERS,
        "num_components": 2,
        "block_size": 8,
        "head_dim": HEAD_DIM,
        "dtype": "float32",
    }
    return KVLayout(**{**fields, **changes})


def value(
    head: Any, layer: Any, component: Any, block: Any, token: Any, element: Any
) -> Any:
    """Return the value of P's KV at these coordinates. `block` is a block ID of P.

    The value is exact in float32 and never 0.
    """
    number = (
        (((block * _MAX_HEADS + head) * LAYERS + layer) * 2 + component) * 256 + token
    ) * HEAD_DIM
    return (number + element) % 16_000_057 + 1


def fill(pool: KVPool, rank: int, tp: int, heads: int = HEADS) -> None:
    """Fill a rank's pool with the values of `value`."""
    sizes = pool.layout.sizes
    grid = np.meshgrid(*(np.arange(sizes[axis]) for axis in "BHLCND"), indexing="ij")
    block, head, layer, component, token, element = grid
    first = heads_of(rank, tp, heads).start
    numbers = value(head + first, layer, component, block, token, element)
    pool.canonical.copy_(torch.from_numpy(numbers).to(pool.tensor.dtype))


class PoolWithDraft(NamedTuple):
    """The pool of a rank, and the pool of a drafter directly behind it in memory.

    Attributes:
        draft_pool, draft: None if there is no drafter.
    """

    pool: KVPool
    draft_pool: KVPool | None
    draft: DraftRank | None

    @classmethod
    def make(
        cls,
        rank_layout: KVLayout,
        device: str,
        scales: tuple[float, ...],
        rank: int,
        tp: int,
        drafter: dict[str, Any] | None,
    ) -> "PoolWithDraft":
        """Make the pools of a rank.

        Args:
            drafter: fields of the layout of the drafter's KV, its `fingerprint`, and
                the number of its KV `heads`.
        """
        if drafter is None:
            return cls(KVPool(rank_layout, device, scales), None, None)
        fields = {"num_layers": 1, "head_dim": 4, "dtype": "float32", **drafter}
        heads = fields.pop("heads")
        kv = DraftKV(fingerprint=fields.pop("fingerprint", "d"), total_kv_heads=heads)
        draft_layout = replace(
            rank_layout,
            num_blocks=rank_layout.num_blocks + 3,  # scratch blocks
            num_heads=len(heads_of(rank, tp, heads)),
            **fields,
        )
        pool = KVPool(rank_layout, device, scales, extra_bytes=draft_layout.nbytes)
        draft_pool = KVPool(draft_layout, device, memory=pool.extra)
        return cls(pool, draft_pool, DraftRank.make(kv, draft_layout, pool, rank, tp))
