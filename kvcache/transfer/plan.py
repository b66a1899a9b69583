"""The planner: from two geometries and a token range to the reads that move exactly those bytes.

There is no case per feature. Tensor parallelism decides whose heads are wanted from whom
(topology.py), block sizes and prefix hits cut the token axis (boxes.py), the layouts' strides
decide how long the runs are (runs.py). Context parallelism picks a rank's blocks before all that,
in `Planner.take`: behind it a rank's share is a shorter sequence. Ways of moving the runs compete
on cost:

    direct   READ every run into its final place
    staged   READ the peer's own, longer runs into staging memory, then copy (staged.py)
    mixed    whole blocks one way, the partly wanted blocks at the ends the other

A planner is kept for a pair of engines: what depends on their geometries is worked out once, what
was decided for one pull holds for those like it, and chunks are made when they are wanted
(chunks.py). So the first read can be posted after some ten numpy calls.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import lcm
from typing import Literal, NamedTuple

import numpy as np

from kvcache.transfer.boxes import BlockTable, Transfer, direct_boxes, split_ends
from kvcache.transfer.chunks import Chunks
from kvcache.transfer.cost import DEFAULT_COSTS, CostModel
from kvcache.transfer.runs import RankRead, count_runs, find_runs
from kvcache.transfer.staged import (
    Chunk,
    Staging,
    Way,
    estimate_staged,
    least_staging_bytes,
    stage,
)
from kvcache.transfer.topology import (
    Endpoint,
    HeadGroup,
    IntArray,
    PlanError,
    check_endpoints,
    head_groups,
    heads_of,
)
from kvcache.transfer.transfer_plan import TransferPlan, summary
from kvcache.transfer.whole_blocks import WholeBlocks

__all__ = [
    "DEFAULT_COSTS",
    "Chunk",
    "CostModel",
    "Endpoint",
    "PlanError",
    "Planner",
    "RankRead",
    "TransferPlan",
    "check_transfer",
    "heads_of",
    "least_staging_bytes",
    "plan_transfer",
]

_LONG_RUN_BYTES = 1 << 20
_NO_BLOCKS = BlockTable("no blocks", [], 0, 1, range(0))
_LOOKED_AT = 8  # blocks at either end of a table
_MAX_DECISIONS = 1024  # kept; there are a few dozen kinds of pulls from a peer


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
        local_block_ids: D's blocks from token 0 of the sequence on, in D's block size; with
            a dcp, of dcp times as many tokens, of which the rank keeps its own.
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
    planner = Planner(
        local, remote, total_kv_heads,
        staging_bytes=staging_bytes, convert=convert, allow_mixed=allow_mixed,
    )  # fmt: skip
    tokens = (token_start, token_stop)
    transfer = planner.take(tokens, local_block_ids, remote_block_ids, lease_hash=lease_hash)
    transfer.local_table.check()
    return planner.plan(transfer, costs)


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
    planner = Planner(local, remote, total_kv_heads, convert=convert)
    transfer = planner.take(tokens, local_block_ids, remote_block_ids, lease_hash=lease_hash)
    transfer.local_table.check()
    return transfer


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
        return summary(self.descriptors, self.bytes_read, self.seconds)


class _Decision(NamedTuple):
    """What was decided for a pull, and holds for those like it."""

    split: bool  # whole blocks apart from the ends
    ways: tuple[Way | None, ...]  # of each part; None: direct
    seconds_per_token: float
    reason: str


class Planner:
    """Plans the pulls of one rank of D from one engine.

    Args:
        local, remote, total_kv_heads, staging_bytes, convert, allow_mixed: as of `plan_transfer`.

    Raises:
        PlanError: geometries that cannot be bridged.
    """

    def __init__(
        self,
        local: Endpoint,
        remote: Sequence[Endpoint],
        total_kv_heads: int,
        *,
        staging_bytes: int | None = None,
        convert: bool = False,
        allow_mixed: bool = False,
    ) -> None:
        check_endpoints(local, remote, total_kv_heads, convert=convert)
        self._local, self._remote = local, tuple(remote)
        self._total_kv_heads = total_kv_heads
        self._staging_bytes = staging_bytes
        self._allow_mixed = allow_mixed
        self._num_blocks = min(end.layout.num_blocks for end in remote)
        self._sizes = local.layout.block_size, remote[0].layout.block_size
        self._stripe = local.stripe if local.dcp > 1 else None
        self._period = lcm(*self._sizes)
        self._groups = head_groups(local.heads(total_kv_heads), len(remote), total_kv_heads)
        self._takes_turns = any(len(group.owners) > 1 for group in self._groups)
        self._kept: dict[object, object] = {}
        self._whole = WholeBlocks.of(local, remote, self._groups, total_kv_heads)
        nothing = Transfer(local, self._remote, (), 0, 0, 0, _NO_BLOCKS, _NO_BLOCKS)
        whole = self._whole if not (convert and nothing.converts) else None
        self._long_runs = whole if whole and whole.run_bytes >= _LONG_RUN_BYTES else None
        self._decided_by: CostModel | None = None
        self._decisions: dict[tuple[int, ...], _Decision] = {}

    def take(
        self,
        tokens: tuple[int, int],
        local_block_ids: Sequence[int] | IntArray,
        remote_block_ids: Sequence[int] | IntArray,
        *,
        lease_hash: int = 0,
    ) -> Transfer:
        """A pull, as one transfer that stays inside both sides' memory; arguments as of
        `plan_transfer`. Tokens and blocks of the transfer are this rank's share of them.

        D's table is checked when it is first asked for, which for staged chunks may be when the
        first one is being read: the link idles until that begins.

        Raises:
            PlanError: tokens that are none, or P's block table does not fit.
        """
        start, stop = tokens
        if not 0 <= start <= stop:
            raise PlanError(f"token range is [{start}, {stop}); use 0 <= start <= stop")
        ours, theirs = self._sizes
        if self._stripe is not None:
            start, stop = self._stripe.num_local(np.array([start, stop])).tolist()
            remote_block_ids = self._stripe.remote_blocks(remote_block_ids, theirs)
        span = range(start, stop)
        blocks = self._local.layout.num_blocks
        local = BlockTable("local_block_ids", local_block_ids, blocks, ours, span, distinct=True)
        remote = BlockTable("remote_block_ids", remote_block_ids, self._num_blocks, theirs, span)
        remote.check()
        return Transfer(
            self._local,
            self._remote,
            self._turned(self._local.rank + lease_hash),
            self._total_kv_heads,
            start,
            stop,
            local,
            remote,
            self._kept,
        )

    def _turned(self, turn: int) -> tuple[HeadGroup, ...]:
        if not self._takes_turns:
            return self._groups
        return tuple(replace(group, turn=turn) for group in self._groups)

    def plan(self, transfer: Transfer, costs: CostModel) -> TransferPlan:
        """The cheapest plan of what `take` returned.

        Raises:
            PlanError: a dtype to convert in too little staging memory.
        """
        if transfer.token_start == transfer.token_stop:
            return TransferPlan("direct", (), (), 0, 0, 0.0, "there is nothing to read")
        if self._long_runs is not None and self._is_whole(
            transfer.token_start, transfer.token_stop
        ):
            return self._whole_blocks(self._long_runs, transfer, costs)
        decision = self._decide(transfer, costs)
        seconds = decision.seconds_per_token * (transfer.token_stop - transfer.token_start)
        spans = [transfer]
        if decision.split:
            body, ends = split_ends(transfer)
            spans = [*([body] if body is not None else []), *ends]
        parts = [
            (span, None if way is None else stage(span, way, costs, self._staging_bytes or 0))
            for span, way in zip(spans, decision.ways, strict=True)
        ]
        return self._build(parts, seconds, decision.reason)

    def _whole_blocks(
        self, long_runs: WholeBlocks, transfer: Transfer, costs: CostModel
    ) -> TransferPlan:
        """What costs more time to compare than it could save."""
        size, nbytes = self._sizes[0], transfer.useful_bytes
        first, last = transfer.token_start // size, transfer.token_stop // size
        reads = long_runs.reads(transfer, first, last)
        seconds = costs.read_s(sum(len(read.lengths) for read in reads), nbytes)
        reason = "no way reads longer runs"
        return TransferPlan("direct", reads, (), nbytes, nbytes, seconds, reason)

    def _is_whole(self, start: int, stop: int) -> bool:
        """Of nothing but whole blocks of both sides."""
        return start % self._period == 0 == stop % self._period

    # -- decisions

    def _decide(self, transfer: Transfer, costs: CostModel) -> _Decision:
        """What costs least; of pulls that are alike only the first is looked at."""
        if costs is not self._decided_by or len(self._decisions) >= _MAX_DECISIONS:
            self._decided_by = costs
            self._decisions.clear()
        key = self._kind(transfer)
        found = self._decisions.get(key)
        if found is None:
            found = self._decisions[key] = self._weigh(transfer, costs)
        return found

    def _kind(self, transfer: Transfer) -> tuple[int, ...]:
        """Equal for transfers whose best plans are alike: they end at the same places of a block,
        are about as long, and about as many blocks are next to each other."""
        start, stop = transfer.token_start, transfer.token_stop
        ours, theirs = self._sizes
        return (
            *self._ends(start, stop),
            _together(transfer.local_table.ids, start // ours, -(-stop // ours)),
            _together(transfer.remote_table.ids, start // theirs, -(-stop // theirs)),
        )

    def _ends(self, start: int, stop: int) -> tuple[int, int, int]:
        """Equal where pulls end at the same places of a block and are about as long."""
        whole = max(stop // self._period + -start // self._period, 0)
        length = whole.bit_length() if whole else start - stop
        return start % self._period, stop % self._period, length

    def _weigh(self, transfer: Transfer, costs: CostModel) -> _Decision:
        if self._staging_bytes is None:
            if transfer.converts:
                raise PlanError(
                    "staging_bytes is None; converting the KV dtype needs staging memory"
                )
            return _decision([_direct(transfer, costs)], "there is no staging memory")
        if transfer.converts:
            ours, theirs = self._local.layout.dtype, self._remote[0].layout.dtype
            other = "" if transfer.factors is None else " of other scales"
            staged = _staged(transfer, costs, self._staging_bytes)
            return _decision([staged], f"{theirs} becomes {ours}{other}")
        direct = _direct(transfer, costs)
        if _reads_whole_blocks(transfer, direct):
            return _decision([direct], "no way reads longer runs")
        try:
            staged = _staged(transfer, costs, self._staging_bytes)
        except PlanError as error:  # the peer's blocks are large: slow is better than not
            return _decision([direct], str(error))
        options = [[direct], [staged]]
        if self._allow_mixed:
            options += _mixed(transfer, costs, self._staging_bytes)
        best = min(options, key=_total_seconds)
        others = [part for part in (direct, staged) if best != [part]]
        reasons = (f"{part.path} would read {part.summary}" for part in others)
        return _decision(best, "; ".join(reasons))

    # -- plans

    def _build(
        self,
        parts: Sequence[tuple[Transfer, Staging | None]],
        seconds: float,
        reason: str,
    ) -> TransferPlan:
        reads: list[RankRead] = []
        stagings, nbytes, useful = [], 0, 0
        for transfer, staging in parts:
            wanted = transfer.useful_bytes
            useful += wanted
            if staging is None:
                reads += self._direct_reads(transfer)
                nbytes += wanted
            else:
                stagings.append(staging)
                nbytes += staging.bytes_read
        path: Literal["direct", "staged", "mixed"] = "staged" if stagings else "direct"
        if stagings and len(stagings) < len(parts):
            path = "mixed"
        joined = tuple(reads) if len(parts) == 1 else _join(reads)
        chunks = Chunks(stagings) if stagings else ()
        return TransferPlan(path, joined, chunks, nbytes, useful, seconds, reason)

    def _direct_reads(self, transfer: Transfer) -> Sequence[RankRead]:
        if self._whole is not None and self._is_whole(transfer.token_start, transfer.token_stop):
            size = self._sizes[0]
            first, last = transfer.token_start // size, transfer.token_stop // size
            return self._whole.reads(transfer, first, last)
        return _join(list(_reads(transfer)))


def _together(blocks: list[int], first: int, last: int) -> int:
    """At how many ends of blocks [first, last) some seem to follow one another: exactness would
    take longer than most plans differ by."""
    reach = min(_LOOKED_AT, last - first) - 1
    if last > len(blocks) or reach < 1:
        return 0
    low = blocks[first + reach] - blocks[first] == reach
    return low + (blocks[last - 1] - blocks[last - 1 - reach] == reach)


def _decision(parts: list[_Part], reason: str) -> _Decision:
    tokens = sum(part.transfer.token_stop - part.transfer.token_start for part in parts)
    ways = tuple(None if part.staging is None else part.staging.way for part in parts)
    return _Decision(len(parts) > 1, ways, _total_seconds(parts) / tokens, reason)


def _reads_whole_blocks(transfer: Transfer, direct: _Part) -> bool:
    """The direct way has a run for each of the peer's blocks and long ones: all else costs more
    time to work out than it could save."""
    size = transfer.remote[0].layout.block_size
    blocks = -(-transfer.token_stop // size) - transfer.token_start // size
    owners = sum(len(group.owners) for group in transfer.groups)
    is_long = direct.bytes_read >= _LONG_RUN_BYTES * direct.descriptors
    return is_long and direct.descriptors <= blocks * owners


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


def _mixed(transfer: Transfer, costs: CostModel, staging_bytes: int) -> list[list[_Part]]:
    """Whole blocks direct and the ends as is cheapest: a part of a block may be many short runs
    where the whole block is one."""
    body, ends = split_ends(transfer)
    if body is None or not ends:
        return []
    ways = ((_direct(end, costs), _staged(end, costs, staging_bytes)) for end in ends)
    return [[_direct(body, costs), *(min(way, key=_seconds) for way in ways)]]


def _reads(transfer: Transfer) -> Iterator[RankRead]:
    for owner, boxes in direct_boxes(transfer):
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
