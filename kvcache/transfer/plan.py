"""The planner: from two geometries and a token range to the reads that move exactly those bytes.

There is no case per feature. Tensor parallelism decides whose heads are wanted from whom
(topology.py), block sizes and prefix hits cut the token axis (boxes.py), the layouts' strides
decide how long the runs are (runs.py). Two ways of moving the runs compete on cost:

    direct   READ every run into its final place
    staged   READ the peer's own, longer runs into staging memory, then copy (staged.py)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from kvcache.transfer.boxes import Transfer, block_table, direct_boxes
from kvcache.transfer.cost import DEFAULT_COSTS, CostModel
from kvcache.transfer.runs import count_runs, find_runs
from kvcache.transfer.topology import (
    Endpoint,
    IntArray,
    PlanError,
    check_endpoints,
    head_groups,
    heads_of,
)

__all__ = [
    "DEFAULT_COSTS",
    "CostModel",
    "Endpoint",
    "PlanError",
    "RankRead",
    "TransferPlan",
    "heads_of",
    "plan_transfer",
]


@dataclass(frozen=True)
class RankRead:
    """What to read from one rank of P. Three i64[n], bytes from each allocation's base."""

    remote_rank: int
    remote_offsets: IntArray
    local_offsets: IntArray
    lengths: IntArray


@dataclass(frozen=True)
class TransferPlan:
    """What one rank of D does to get its KV."""

    path: Literal["direct", "staged"]
    reads: tuple[RankRead, ...]  # direct: into the pool
    descriptors: int
    bytes_read: int  # over the link
    useful_bytes: int  # wanted, in the peer's dtype
    estimated_s: float
    why: str


class _Estimate(NamedTuple):
    descriptors: int
    bytes_read: int
    seconds: float


def plan_transfer(
    local: Endpoint,
    remote: Sequence[Endpoint],
    total_kv_heads: int,
    token_start: int,
    token_stop: int,
    local_block_ids: Sequence[int] | IntArray,
    remote_block_ids: Sequence[int] | IntArray,
    *,
    costs: CostModel,
    lease_hash: int = 0,
    staging_bytes: int | None = None,
    convert: bool = False,
) -> TransferPlan:
    """Plans the read of tokens [token_start, token_stop) into the blocks of one rank of D.

    Args:
        local: this rank of D.
        remote: all ranks of P, by rank.
        total_kv_heads: KV heads of the model.
        local_block_ids: D's blocks from token 0 of the sequence on, in D's block size.
        remote_block_ids: P's leased blocks from token 0 on, in P's block size.
        costs: of the link between the two.
        lease_hash: spreads leases over ranks of P that hold the same head.
        staging_bytes: staging memory; None plans the direct path.
        convert: lets the staged path change the dtype.

    Raises:
        PlanError: geometries that cannot be bridged, or block tables that do not fit them.
    """
    check_endpoints(local, remote, total_kv_heads, convert=convert)
    transfer = _checked(
        local, remote, total_kv_heads, (token_start, token_stop), local_block_ids, remote_block_ids,
        lease_hash,
    )  # fmt: skip
    return _plan_direct(transfer, costs)


def _checked(
    local: Endpoint,
    remote: Sequence[Endpoint],
    total_kv_heads: int,
    tokens: tuple[int, int],
    local_block_ids: Sequence[int] | IntArray,
    remote_block_ids: Sequence[int] | IntArray,
    lease_hash: int,
) -> Transfer:
    start, stop = tokens
    if not 0 <= start <= stop:
        raise PlanError(f"token range is [{start}, {stop}); use 0 <= start <= stop")
    ours, theirs, span = local.layout, remote[0].layout, range(start, stop)
    local_blocks = block_table(
        "local_block_ids", local_block_ids, ours.num_blocks, ours.block_size, span
    )
    fewest = min(end.layout.num_blocks for end in remote)
    remote_blocks = block_table(
        "remote_block_ids", remote_block_ids, fewest, theirs.block_size, span
    )
    _check_distinct(local_blocks[start // ours.block_size : -(-stop // ours.block_size)])
    turn = local.rank + lease_hash
    groups = head_groups(local.heads(total_kv_heads), len(remote), total_kv_heads, turn=turn)
    return Transfer(
        local, tuple(remote), groups, total_kv_heads, start, stop, local_blocks, remote_blocks
    )


def _check_distinct(blocks: IntArray) -> None:
    ordered = np.sort(blocks)
    twice = np.flatnonzero(ordered[1:] == ordered[:-1])
    if len(twice):
        raise PlanError(f"local_block_ids names block {ordered[twice[0]]} twice")


def _estimate_direct(transfer: Transfer, costs: CostModel) -> _Estimate:
    descriptors = sum(count_runs(boxes) for _, boxes in direct_boxes(transfer))
    nbytes = transfer.useful_bytes
    return _Estimate(descriptors, nbytes, costs.read_s(descriptors, nbytes))


def _plan_direct(transfer: Transfer, costs: CostModel) -> TransferPlan:
    reads = []
    for owner, boxes in direct_boxes(transfer):
        runs = find_runs(boxes)
        if len(runs.remote):
            reads.append(RankRead(owner, *runs))
    descriptors = sum(len(read.lengths) for read in reads)
    nbytes = transfer.useful_bytes
    seconds = costs.read_s(descriptors, nbytes)
    why = f"direct: {descriptors} runs of {_mean(nbytes, descriptors)} on average, {seconds:.2g} s"
    return TransferPlan("direct", tuple(reads), descriptors, nbytes, nbytes, seconds, why)


def _mean(nbytes: int, count: int) -> str:
    return f"{nbytes // max(count, 1)} bytes"
