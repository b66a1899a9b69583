"""The planner: from two geometries and a token range to the steps that move exactly those bytes.

There is no case per feature. Tensor parallelism decides whose heads are wanted from whom
(endpoint.py), context parallelism picks a rank's blocks beforehand (kvcache/stripe.py), blocks of
both sides cut the tokens and the layouts' strides decide how long the runs are (block_copy.py).
Ways of moving the copies compete on cost:

    direct   READ every run into its final place
    staged   READ the peer's own, longer runs into staging memory, then place them (staged.py)
    mixed    whole blocks direct, the partly wanted blocks at the ends as is cheapest
    mapped   no READ: place out of P's memory
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Literal, NamedTuple

import numpy as np

from kvcache.transfer.plan.block_copy import ReadDescriptors, Transfer, check_blocks
from kvcache.transfer.plan.cost import CostModel
from kvcache.transfer.plan.endpoint import (
    Endpoint,
    IntArray,
    PlanError,
    check_endpoints,
    head_groups,
    scale_factors,
)
from kvcache.transfer.plan.staged import Estimate, Step, Way, cheapest, direct, steps

Path = Literal["direct", "staged", "mixed", "mapped"]

_LOOKED_AT = 8  # blocks at either end of a table
_MAX_DECISIONS = 1024  # kept; there are a few dozen kinds of pulls from a peer


@dataclass(frozen=True)
class TransferPlan:
    """What one rank of D does to get its KV."""

    path: Path
    transfer: Transfer
    steps: tuple[Step, ...]
    estimated_s: float
    reason: str

    @classmethod
    def mapped(cls, transfer: Transfer) -> "TransferPlan":
        """Of copies out of P's memory."""
        return cls("mapped", transfer, (), 0.0, "mapped")

    @property
    def reads(self) -> Iterator[ReadDescriptors]:
        """Of all steps; works them out."""
        return (read for step in self.steps for read in step.reads)

    @property
    def descriptors(self) -> int:
        return sum(len(read.lengths) for read in self.reads)

    @property
    def useful_bytes(self) -> int:
        """Wanted, in the peer's dtype."""
        return self.transfer.useful_bytes

    @property
    def bytes_read(self) -> int:
        """Over the link, or out of P's memory."""
        return sum(step.bytes_read for step in self.steps) if self.steps else self.useful_bytes

    @property
    def slot_bytes(self) -> int:
        """Of staging memory, at most, by one step."""
        return max((step.slot.nbytes for step in self.steps if step.slot), default=0)

    @property
    def why(self) -> str:
        """For people; works out all steps."""
        if not self.descriptors:
            return f"{self.path}: {self.reason}"
        read = Estimate(None, self.descriptors, self.bytes_read, self.estimated_s)
        return f"{self.path}: {read}; {self.reason}"


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
            return TransferPlan("direct", transfer, (), 0.0, "there is nothing to read")
        ways, seconds_per_token, reason = self._decide(transfer, costs)
        spans = [transfer] if len(ways) == 1 else self._split(transfer)
        found = tuple(
            step
            for span, way in zip(spans, ways, strict=True)
            for step in steps(span, way, costs, self._staging_bytes or 0)
        )
        seconds = seconds_per_token * len(transfer.tokens)
        path: Path = "mixed" if None in ways else "staged"
        path = path if any(way is not None for way in ways) else "direct"
        return TransferPlan(path, transfer, found, seconds, reason)

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
        """What costs least; of pulls that are alike only the first is looked at: they end at the
        same places of a block, are about as long, and about as many blocks are neighbours."""
        if costs is not self._decided_by or len(self._decisions) >= _MAX_DECISIONS:
            self._decided_by = costs
            self._decisions.clear()
        start, stop = transfer.tokens.start, transfer.tokens.stop
        whole = max(stop // self._period + -start // self._period, 0)
        size = self._local.layout.block_size
        ours = transfer.local_blocks[start // size : -(-stop // size)]
        ordinals = transfer.remote_ordinals
        theirs = transfer.remote_blocks[ordinals.start : ordinals.stop]
        length = whole.bit_length() if whole else start - stop
        ends = start % self._period, stop % self._period
        kind = (*ends, length, _neighbours(ours), _neighbours(theirs))
        if kind not in self._decisions:
            self._decisions[kind] = self._weigh(transfer, costs)
        return self._decisions[kind]

    def _weigh(self, transfer: Transfer, costs: CostModel) -> _Decision:
        room, tokens = self._staging_bytes, len(transfer.tokens)
        if transfer.converts:
            if room is None:
                raise PlanError(
                    "staging_bytes is None; converting the KV dtype needs staging memory"
                )
            ours, theirs = self._local.layout.dtype, self._remote[0].layout.dtype
            other = "" if transfer.factors is None else " of other scales"
            staged = cheapest(transfer, costs, room)
            reason = f"{theirs} becomes {ours}{other}"
            return _Decision((staged.way,), staged.seconds / tokens, reason)
        straight = direct(transfer, costs)
        options, reason = [[straight]], "there is no staging memory"
        try:
            if room is not None:
                options.append([cheapest(transfer, costs, room)])
                body, *ends = self._split(transfer)
                if ends:  # a part of a block may be many short runs where the whole block is one
                    both = ((direct(end, costs), cheapest(end, costs, room)) for end in ends)
                    best_of_ends = [min(ways, key=_seconds) for ways in both]
                    options.append([direct(body, costs), *best_of_ends])
        except PlanError as error:  # the peer's blocks are large: slow is better than not
            reason = str(error)
        best = min(options, key=lambda parts: sum(map(_seconds, parts)))
        others = {"direct": options[0], "staged": options[1]} if len(options) > 1 else {}
        reasons = [f"{p} would read {each[0]}" for p, each in others.items() if each is not best]
        seconds = sum(map(_seconds, best))
        ways = tuple(part.way for part in best)
        return _Decision(ways, seconds / tokens, "; ".join(reasons) or reason)


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


def _seconds(part: Estimate) -> float:
    return part.seconds


def _neighbours(blocks: IntArray) -> int:
    """At how many ends of a table some blocks seem to follow one another: exactness would take
    longer than most plans differ by."""
    reach = min(_LOOKED_AT, len(blocks)) - 1
    ends: list[int] = blocks[[0, reach, -1 - reach, -1]].tolist() if reach > 0 else []
    return sum(last - first == reach for first, last in zip(ends[::2], ends[1::2], strict=True))
