"""The planner: from two geometries and a token range to the reads that move exactly those bytes.

There is no case per feature. Tensor parallelism decides whose heads are wanted from whom
(topology.py), block sizes and prefix hits cut the token axis (boxes.py), the layouts' strides
decide how long the runs are (runs.py). Two ways of moving the runs compete on cost:

    direct   READ every run into its final place
    staged   READ the peer's own, longer runs into staging memory, then copy (staged.py)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvcache.transfer.boxes import Transfer, block_table, direct_boxes
from kvcache.transfer.cost import DEFAULT_COSTS, CostModel
from kvcache.transfer.runs import RankRead, count_runs, find_runs
from kvcache.transfer.staged import (
    Chunk,
    StagedEstimate,
    estimate_staged,
    least_staging_bytes,
    make_chunks,
)
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
    "Chunk",
    "CostModel",
    "Endpoint",
    "PlanError",
    "RankRead",
    "TransferPlan",
    "heads_of",
    "least_staging_bytes",
    "plan_transfer",
]


@dataclass(frozen=True)
class TransferPlan:
    """What one rank of D does to get its KV."""

    path: Literal["direct", "staged"]
    reads: tuple[RankRead, ...]  # direct: into the pool; staged: none
    chunks: tuple[Chunk, ...]  # staged: read into a slot, then reformat.apply; direct: none
    descriptors: int
    bytes_read: int  # over the link
    useful_bytes: int  # wanted, in the peer's dtype
    estimated_s: float
    why: str


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
        staging_bytes: staging memory, two slots of half its size; None plans the direct path.
        convert: lets the staged path change the dtype.

    Raises:
        PlanError: geometries that cannot be bridged, block tables that do not fit them, or
            staging memory that does not hold two of the peer's blocks.
    """
    check_endpoints(local, remote, total_kv_heads, convert=convert)
    transfer = _checked(
        local, remote, total_kv_heads, (token_start, token_stop), local_block_ids, remote_block_ids,
        lease_hash,
    )  # fmt: skip
    if token_start == token_stop:
        return TransferPlan("direct", (), (), 0, 0, 0, 0.0, "direct: there is nothing to read")
    converts = local.layout.dtype != remote[0].layout.dtype
    if staging_bytes is None:
        if converts:
            raise PlanError("staging_bytes is None; converting the KV dtype needs staging memory")
        return _direct_plan(transfer, costs, "there is no staging memory")
    staged = estimate_staged(transfer, costs, staging_bytes)
    if converts:
        return _staged_plan(staged, f"{remote[0].layout.dtype} becomes {local.layout.dtype}")
    return _cheaper(transfer, costs, staged)


def _cheaper(transfer: Transfer, costs: CostModel, staged: StagedEstimate) -> TransferPlan:
    descriptors = sum(count_runs(boxes) for _, boxes in direct_boxes(transfer))
    seconds = costs.read_s(descriptors, transfer.useful_bytes)
    if seconds <= staged.seconds:
        other = _summary(staged.descriptors, staged.bytes_read, staged.seconds)
        return _direct_plan(transfer, costs, f"staged would read {other}, the copy included")
    other = _summary(descriptors, transfer.useful_bytes, seconds)
    return _staged_plan(staged, f"direct would read {other}")


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


def _direct_plan(transfer: Transfer, costs: CostModel, reason: str) -> TransferPlan:
    found = ((owner, find_runs(boxes)) for owner, boxes in direct_boxes(transfer))
    reads = tuple(RankRead(owner, *runs) for owner, runs in found if len(runs.lengths))
    descriptors = sum(len(read.lengths) for read in reads)
    nbytes = transfer.useful_bytes
    seconds = costs.read_s(descriptors, nbytes)
    why = f"direct: {_summary(descriptors, nbytes, seconds)}; {reason}"
    return TransferPlan("direct", reads, (), descriptors, nbytes, nbytes, seconds, why)


def _staged_plan(estimate: StagedEstimate, reason: str) -> TransferPlan:
    chunks = make_chunks(estimate.staging)
    descriptors = sum(len(read.lengths) for chunk in chunks for read in chunk.reads)
    summary = _summary(descriptors, estimate.bytes_read, estimate.seconds)
    return TransferPlan(
        "staged",
        (),
        chunks,
        descriptors,
        estimate.bytes_read,
        estimate.staging.transfer.useful_bytes,
        estimate.seconds,
        f"staged: {summary}, the copy included; {reason}",
    )


def _summary(descriptors: int, nbytes: int, seconds: float) -> str:
    return f"{descriptors} runs of {nbytes // descriptors} bytes on average in {seconds:.2g} s"
