"""The planner: from two geometries and a token range to the reads that move exactly those bytes.

There is no case per feature. Tensor parallelism decides whose heads are wanted from whom
(endpoint.py), context parallelism picks a rank's blocks beforehand (kvcache/stripe.py), blocks of
both sides cut the tokens and the layouts' strides decide how long the runs are (block_copy.py).
Ways of moving the copies compete on cost:

    direct   READ every run into its final place
    staged   READ the peer's own, longer runs into staging memory, then place them (staged.py)
    mixed    whole blocks direct, the partly wanted blocks at the ends as is cheapest
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import lcm
from typing import Literal, NamedTuple

import numpy as np

from kvcache.transfer.plan.block_copy import (
    ReadDescriptors,
    Transfer,
    check_blocks,
    count_descriptors,
    descriptors,
)
from kvcache.transfer.plan.cost import CostModel
from kvcache.transfer.plan.endpoint import (
    Endpoint,
    IntArray,
    PlanError,
    check_endpoints,
    head_groups,
    scale_factors,
)
from kvcache.transfer.plan.staged import Chunk, Chunks, StagedPlan, Way, cheapest, stage

_LONG_RUN_BYTES = 1 << 20
_LOOKED_AT = 8  # blocks at either end of a table
_MAX_DECISIONS = 1024  # kept; there are a few dozen kinds of pulls from a peer


@dataclass(frozen=True)
class TransferPlan:
    """What one rank of D does to get its KV: all reads, and all chunks, whatever the path."""

    path: Literal["direct", "staged", "mixed", "mapped"]
    reads: tuple[ReadDescriptors, ...]  # straight into the pool
    chunks: Sequence[Chunk]  # each is read into a slot, then placed
    bytes_read: int  # over the link
    useful_bytes: int  # wanted, in the peer's dtype
    estimated_s: float
    reason: str

    @cached_property
    def descriptors(self) -> int:
        """Of reads and chunks together; makes all chunks."""
        staged = [read for chunk in self.chunks for read in chunk.reads]
        return sum(len(read.lengths) for read in (*self.reads, *staged))

    @property
    def slot_bytes(self) -> int:
        """Of staging memory, at most, by one chunk."""
        if isinstance(self.chunks, Chunks):
            return self.chunks.slot_bytes
        return max((chunk.nbytes for chunk in self.chunks), default=0)

    @property
    def why(self) -> str:
        """For people; makes all chunks."""
        if not self.descriptors:
            return f"{self.path}: {self.reason}"
        read = _summary(self.descriptors, self.bytes_read, self.estimated_s)
        return f"{self.path}: {read}; {self.reason}"


class _Part(NamedTuple):
    """One way to move a range of tokens, not yet worked out."""

    transfer: Transfer
    staged: StagedPlan | None  # None: direct
    descriptors: int
    seconds: float

    @property
    def path(self) -> Literal["direct", "staged"]:
        return "direct" if self.staged is None else "staged"

    @property
    def bytes_read(self) -> int:
        return self.transfer.useful_bytes if self.staged is None else self.staged.bytes_read


class _Decision(NamedTuple):
    """What was decided for a pull, and holds for those like it."""

    ways: tuple[Way | None, ...]  # None: direct. Several: of whole blocks, then of the ends
    seconds_per_token: float
    reason: str


class Planner:
    """Plans the pulls of one rank of D from one engine; kept, as it remembers its decisions.

    Args:
        local: this rank of D.
        remote: all ranks of P, by rank.
        total_kv_heads: KV heads of the model.
        staging_bytes: staging memory, two slots of half its size; None plans the direct path.
        convert: lets the staged path change the dtype and the scales.

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
    ) -> None:
        check_endpoints(local, remote, total_kv_heads, convert=convert)
        self._local, self._remote = local, tuple(remote)
        self._total_kv_heads = total_kv_heads
        self._staging_bytes = staging_bytes
        self._period = lcm(local.layout.block_size, remote[0].layout.block_size)
        self._factors = scale_factors(remote[0], local)
        self._groups = head_groups(local.heads(total_kv_heads), len(remote), total_kv_heads)
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
        """A pull of tokens [start, stop) into the blocks of this rank, inside both sides' memory.

        Args:
            local_block_ids: D's blocks from token 0 of the sequence on, in D's block size; with
                a dcp, of dcp times as many tokens, of which the rank keeps its own.
            remote_block_ids: P's leased blocks from token 0 on, in P's block size.
            lease_hash: spreads leases over ranks of P that hold the same head.

        Raises:
            PlanError: tokens that are none, or a block table does not fit.
        """
        start, stop = tokens
        if not 0 <= start <= stop:
            raise PlanError(f"token range is [{start}, {stop}); use 0 <= start <= stop")
        local, remote = self._local, self._remote
        theirs = remote[0].layout.block_size
        if local.dcp > 1:
            start, stop = local.stripe.num_local(np.array([start, stop])).tolist()
            remote_block_ids = local.stripe.remote_blocks(remote_block_ids, theirs)
        wanted = range(start, stop)
        pool = local.layout.num_blocks, local.layout.block_size
        pools = min(end.layout.num_blocks for end in remote), theirs
        return Transfer(
            local,
            remote,
            self._total_kv_heads,
            self._groups,
            wanted,
            check_blocks("local_block_ids", local_block_ids, *pool, wanted, distinct=True),
            check_blocks("remote_block_ids", remote_block_ids, *pools, wanted),
            local.rank + lease_hash,
            self._factors,
        )

    def plan(self, transfer: Transfer, costs: CostModel) -> TransferPlan:
        """The cheapest plan of what `take` returned.

        Raises:
            PlanError: a dtype to convert in too little staging memory.
        """
        if not transfer.tokens:
            return TransferPlan("direct", (), (), 0, 0, 0.0, "there is nothing to read")
        ways, seconds_per_token, reason = self._decide(transfer, costs)
        spans = [transfer] if len(ways) == 1 else self._split(transfer)
        direct = [span for span, way in zip(spans, ways, strict=True) if way is None]
        staged = [
            stage(span, way, costs, self._staging_bytes or 0)
            for span, way in zip(spans, ways, strict=True)
            if way is not None
        ]
        return TransferPlan(
            "mixed" if direct and staged else "staged" if staged else "direct",
            descriptors(copy for span in direct for copy in span.copies()),
            Chunks(staged) if staged else (),
            sum(span.useful_bytes for span in direct) + sum(each.bytes_read for each in staged),
            transfer.useful_bytes,
            seconds_per_token * len(transfer.tokens),
            reason,
        )

    def _split(self, transfer: Transfer) -> list[Transfer]:
        """The tokens in blocks that both sides want whole, then those before and after them; only
        these where there are no such blocks."""
        start, stop = transfer.tokens.start, transfer.tokens.stop
        first, last = -(-start // self._period) * self._period, stop // self._period * self._period
        if first >= last:
            return [transfer]
        spans = ((first, last), (start, first), (last, stop))
        return [transfer.part(*span) for span in spans if span[0] < span[1]]

    # -- decisions

    def _decide(self, transfer: Transfer, costs: CostModel) -> _Decision:
        """What costs least; of pulls that are alike only the first is looked at."""
        if costs is not self._decided_by or len(self._decisions) >= _MAX_DECISIONS:
            self._decided_by = costs
            self._decisions.clear()
        kind = self._kind(transfer)
        found = self._decisions.get(kind)
        if found is None:
            found = self._decisions[kind] = self._weigh(transfer, costs)
        return found

    def _kind(self, transfer: Transfer) -> tuple[int, ...]:
        """Equal for transfers whose best plans are alike: they end at the same places of a block,
        are about as long, and about as many blocks are next to each other."""
        start, stop = transfer.tokens.start, transfer.tokens.stop
        whole = max(stop // self._period + -start // self._period, 0)
        length = whole.bit_length() if whole else start - stop
        sides = (
            (transfer.local_blocks, self._local.layout.block_size),
            (transfer.remote_blocks, transfer.block_size),
        )
        near = (_together(blocks[start // size : -(-stop // size)]) for blocks, size in sides)
        return start % self._period, stop % self._period, length, *near

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
        body, *ends = self._split(transfer)
        if ends:  # a part of a block may be many short runs where the whole block is one
            ways = ((_direct(end, costs), _staged(end, costs, self._staging_bytes)) for end in ends)
            options.append([_direct(body, costs), *(min(way, key=_seconds) for way in ways)])
        best = min(options, key=_total_seconds)
        others = [part for part in (direct, staged) if best != [part]]
        reasons = (
            f"{part.path} would read {_summary(part.descriptors, part.bytes_read, part.seconds)}"
            for part in others
        )
        return _decision(best, "; ".join(reasons))


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
    """Plans one pull; arguments as of Planner and its methods.

    Raises:
        PlanError: geometries that cannot be bridged, block tables that do not fit them, or a
            dtype to convert in staging memory that does not hold two of the peer's blocks.
    """
    planner = Planner(local, remote, total_kv_heads, staging_bytes=staging_bytes, convert=convert)
    tokens = (token_start, token_stop)
    transfer = planner.take(tokens, local_block_ids, remote_block_ids, lease_hash=lease_hash)
    return planner.plan(transfer, costs)


def _together(blocks: IntArray) -> int:
    """At how many ends of a table some blocks seem to follow one another: exactness would take
    longer than most plans differ by."""
    reach = min(_LOOKED_AT, len(blocks)) - 1
    if reach < 1:
        return 0
    ends: list[int] = blocks[[0, reach, -1 - reach, -1]].tolist()
    return (ends[1] - ends[0] == reach) + (ends[3] - ends[2] == reach)


def _decision(parts: list[_Part], reason: str) -> _Decision:
    tokens = sum(len(part.transfer.tokens) for part in parts)
    ways = tuple(None if part.staged is None else part.staged.way for part in parts)
    return _Decision(ways, _total_seconds(parts) / tokens, reason)


def _reads_whole_blocks(transfer: Transfer, direct: _Part) -> bool:
    """The direct way has a run for each of the peer's blocks and long ones: all else costs more
    time to work out than it could save."""
    size, tokens = transfer.block_size, transfer.tokens
    blocks = -(-tokens.stop // size) - tokens.start // size
    owners = sum(len(group.owners) for group in transfer.groups)
    is_long = direct.bytes_read >= _LONG_RUN_BYTES * direct.descriptors
    return is_long and direct.descriptors <= blocks * owners


def _direct(transfer: Transfer, costs: CostModel) -> _Part:
    number = count_descriptors(transfer.copies())
    return _Part(transfer, None, number, costs.read_s(number, transfer.useful_bytes))


def _staged(transfer: Transfer, costs: CostModel, staging_bytes: int) -> _Part:
    return _Part(transfer, *cheapest(transfer, costs, staging_bytes))


def _seconds(part: _Part) -> float:
    return part.seconds


def _total_seconds(parts: list[_Part]) -> float:
    return sum(part.seconds for part in parts)


def _summary(number: int, nbytes: int, seconds: float) -> str:
    return f"{number} runs of {nbytes // number} bytes on average in {seconds:.2g} s"
