"""The planner: from two geometries and a token range to the reads that move exactly those bytes.

There is no case per feature. Tensor parallelism decides whose heads are wanted from whom
(topology.py), block sizes and prefix hits cut the token axis (boxes.py), the layouts' strides
decide how long the runs are (runs.py). Ways of moving the runs compete on cost:

    direct   READ every run into its final place
    staged   READ the peer's own, longer runs into staging memory, then copy (staged.py)
    mixed    whole blocks one way, the partly wanted blocks at the ends the other
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from kvcache.transfer.boxes import Transfer, block_table, direct_boxes, split_ends
from kvcache.transfer.cost import DEFAULT_COSTS, CostModel
from kvcache.transfer.runs import RankRead, count_runs, find_runs
from kvcache.transfer.staged import (
    Chunk,
    Staging,
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
    "check_transfer",
    "heads_of",
    "least_staging_bytes",
    "plan_transfer",
]

_LONG_RUN_BYTES = 1 << 20


@dataclass(frozen=True)
class TransferPlan:
    """What one rank of D does to get its KV: all reads, and all chunks, whatever the path."""

    path: Literal["direct", "staged", "mixed", "mapped"]
    reads: tuple[RankRead, ...]  # straight into the pool
    chunks: tuple[Chunk, ...]  # each is read into a slot, then reformat.apply places it
    descriptors: int  # of reads and chunks together
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
    allow_mixed: bool = False,
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
        convert: lets the staged path change the dtype and the scales.
        allow_mixed: the caller carries out reads and chunks of one and the same plan.

    Raises:
        PlanError: geometries that cannot be bridged, block tables that do not fit them, or a
            dtype to convert in staging memory that does not hold two of the peer's blocks.
    """
    transfer = check_transfer(
        local, remote, total_kv_heads, (token_start, token_stop), local_block_ids, remote_block_ids,
        lease_hash=lease_hash, convert=convert,
    )  # fmt: skip
    if token_start == token_stop:
        return TransferPlan("direct", (), (), 0, 0, 0, 0.0, "direct: there is nothing to read")
    if staging_bytes is None:
        if transfer.converts:
            raise PlanError("staging_bytes is None; converting the KV dtype needs staging memory")
        return _build([_direct(transfer, costs)], "there is no staging memory")
    return _choose(transfer, costs, staging_bytes, allow_mixed)


def _choose(
    transfer: Transfer, costs: CostModel, staging_bytes: int, allow_mixed: bool
) -> TransferPlan:
    if transfer.converts:
        ours, theirs = transfer.local.layout.dtype, transfer.remote[0].layout.dtype
        other = "" if transfer.factors is None else " of other scales"
        staged = _staged(transfer, costs, staging_bytes)
        return _build([staged], f"{theirs} becomes {ours}{other}")
    direct = _direct(transfer, costs)
    if _reads_whole_blocks(transfer, direct):
        return _build([direct], "no way reads longer runs")
    try:
        staged = _staged(transfer, costs, staging_bytes)
    except PlanError as error:  # the peer's blocks are larger than ours: slow is better than not
        return _build([direct], str(error))
    options = [[direct], [staged]]
    if allow_mixed:
        options += _mixed(transfer, costs, staging_bytes)
    best = min(options, key=_total_seconds)
    others = [part for part in (direct, staged) if best != [part]]
    reasons = (f"{part.path} would read {part.summary}" for part in others)
    return _build(best, "; ".join(reasons))


def _reads_whole_blocks(transfer: Transfer, direct: "_Part") -> bool:
    """The direct way has a run for each of the peer's blocks and long ones: all else costs more
    time to work out than it could save."""
    size = transfer.remote[0].layout.block_size
    blocks = -(-transfer.token_stop // size) - transfer.token_start // size
    owners = sum(len(group.owners) for group in transfer.groups)
    is_long = direct.bytes_read >= _LONG_RUN_BYTES * direct.descriptors
    return is_long and direct.descriptors <= blocks * owners


class _Part(NamedTuple):
    """One way to move a range of tokens, not yet worked out."""

    transfer: Transfer
    staging: Staging | None  # None: direct
    descriptors: int
    bytes_read: int
    seconds: float

    @property
    def path(self) -> Literal["direct", "staged"]:
        return "direct" if self.staging is None else "staged"

    @property
    def summary(self) -> str:
        return _summary(self.descriptors, self.bytes_read, self.seconds)


def _seconds(part: _Part) -> float:
    return part.seconds


def _total_seconds(parts: list[_Part]) -> float:
    return sum(part.seconds for part in parts)


def _direct(transfer: Transfer, costs: CostModel) -> _Part:
    descriptors = sum(count_runs(boxes) for _, boxes in direct_boxes(transfer))
    nbytes = transfer.useful_bytes
    return _Part(transfer, None, descriptors, nbytes, costs.read_s(descriptors, nbytes))


def _staged(transfer: Transfer, costs: CostModel, staging_bytes: int) -> _Part:
    return _Part(transfer, *estimate_staged(transfer, costs, staging_bytes))


def check_transfer(
    local: Endpoint,
    remote: Sequence[Endpoint],
    total_kv_heads: int,
    tokens: tuple[int, int],
    local_block_ids: Sequence[int] | IntArray,
    remote_block_ids: Sequence[int] | IntArray,
    *,
    lease_hash: int = 0,
    convert: bool = False,
) -> Transfer:
    """What `plan_transfer` is given, as one transfer that stays inside both sides' memory.

    Raises:
        PlanError: as `plan_transfer`.
    """
    check_endpoints(local, remote, total_kv_heads, convert=convert)
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


def _mixed(transfer: Transfer, costs: CostModel, staging_bytes: int) -> list[list[_Part]]:
    """Whole blocks direct and the ends as is cheapest: a part of a block may be many short runs
    where the whole block is one."""
    body, ends = split_ends(transfer)
    if body is None or not ends:
        return []
    ways = ((_direct(end, costs), _staged(end, costs, staging_bytes)) for end in ends)
    return [[_direct(body, costs), *(min(way, key=_seconds) for way in ways)]]


def _build(parts: list[_Part], reason: str) -> TransferPlan:
    reads = _join([read for part in parts if part.staging is None for read in _reads(part)])
    chunks = tuple(
        chunk for part in parts if part.staging is not None for chunk in make_chunks(part.staging)
    )
    staged = [read for chunk in chunks for read in chunk.reads]
    descriptors = sum(len(read.lengths) for read in (*reads, *staged))
    nbytes = sum(part.bytes_read for part in parts)
    seconds = _total_seconds(parts)
    paths = {part.path for part in parts}
    path: Literal["direct", "staged", "mixed"] = "mixed" if len(paths) > 1 else parts[0].path
    return TransferPlan(
        path,
        reads,
        chunks,
        descriptors,
        nbytes,
        sum(part.transfer.useful_bytes for part in parts),
        seconds,
        f"{path}: {_summary(descriptors, nbytes, seconds)}; {reason}",
    )


def _reads(part: _Part) -> Iterator[RankRead]:
    for owner, boxes in direct_boxes(part.transfer):
        runs = find_runs(boxes)
        if len(runs.lengths):
            yield RankRead(owner, *runs)


def _join(reads: list[RankRead]) -> tuple[RankRead, ...]:
    """One read for each rank of P: several ranges of tokens may have gone direct."""
    joined = []
    for rank in sorted({read.remote_rank for read in reads}):
        same = [read for read in reads if read.remote_rank == rank]
        arrays = zip(
            *((read.remote_offsets, read.local_offsets, read.lengths) for read in same),
            strict=True,
        )
        joined.append(RankRead(rank, *(np.concatenate(parts) for parts in arrays)))
    return tuple(joined)


def _summary(descriptors: int, nbytes: int, seconds: float) -> str:
    return f"{descriptors} runs of {nbytes // descriptors} bytes on average in {seconds:.2g} s"
