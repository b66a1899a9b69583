"""The planner: from two geometries and a token range to the steps that move exactly those bytes.

Tensor parallelism decides the heads to read from each rank (endpoint.py), context parallelism picks
a rank's blocks beforehand (kvcache/stripe.py), block borders of both sides cut the tokens, and the
layouts' strides decide the length of the runs (block_copy.py). The cheaper of two paths is taken:

    direct   READ every run into its final place
    staged   READ the peer's own, longer runs into staging memory, then place them

(A mapped pull reads nothing: its copies are placed out of P's memory, and need no plan.)

Part of a block may be hundreds of short runs where the whole block is one. Either path may then
read more than the wanted tokens, but never more than the leased blocks. The direct path adds only
the rest of the last block, which belongs to the sequence and holds nothing yet.

A slot of staging memory is a paged memory with P's layout and fewer blocks, one for each head
group: reading into it is a copy between two layouts of one order, whose runs stay long, and placing
is a copy out of it. Several owners of a group fill one slot block by block, so that placing does
not depend on the owner. A slot may hold all heads of the owners, if that makes fewer runs.

    P (NHD, 4 heads)           slot (P's order)             D (HND, heads 2 and 3 wanted)
    b7: n0 h0h1h2h3 n1 ..  ->  s0: n0 h0h1h2h3 n1 ..   ->   b2: h2 n0 n1 .. h3 n0 n1 ..

A staged step is a *chunk* of P's blocks that fits a slot; some slots fill while another is placed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from math import lcm
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from msgspec import structs

from kvcache.layout import KVLayout
from kvcache.transfer.plan.block_copy import (
    BlockCopy,
    ReadDescriptors,
    Side,
    Transfer,
    check_blocks,
    count_descriptors,
    cut,
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

# Slots, and the groups' memories in them, start at multiples of this: placing moves whole words.
ALIGN_BYTES = 64
# Where READs are CPU copies, a chunk is placed while it is still in the processor's cache: this is
# the time to read one. Each chunk has to be posted and polled, so their number is bounded.
_CACHED_CHUNK_S = 0.75e-3
_MAX_CACHED_CHUNKS = 32
# Where copies overlap reads, a transfer is read in this many equal chunks or in chunks as large as
# possible, whichever costs less. The last chunk's placing, which overlaps nothing, is then an
# eighth of all placing. At least four slots keep the link busy while a copy is launched.
_PIPELINE_CHUNKS = 8
_PIPELINE_SLOTS = 4
_MIN_PIPELINE_CHUNK_S = (
    0.1e-3  # of reading: about what posting and placing a chunk takes
)
_LEAST_RUN_S = 3e-6  # of a run between GPUs; a probe of few runs may measure less
_SECONDS = attrgetter("seconds")
_MAX_DECISIONS = 1024  # remembered; there are a few dozen kinds of pulls from a peer


class Way(NamedTuple):
    """A way of moving a transfer."""

    staged: bool  # else direct
    whole: bool  # read whole blocks where a part is wanted
    wider: bool = False  # read all heads of the owners, not only the wanted ones
    pipelined: bool = (
        False  # read in _PIPELINE_CHUNKS chunks, not in chunks as large as possible
    )


class Slot(NamedTuple):
    """The layout of a slot of some blocks, the same for all pulls between two engines."""

    memories: tuple[
        tuple[range, KVLayout, int], ...
    ]  # by head group: heads, layout, byte offset
    nbytes: int
    token_bytes: int  # bytes read for each token


@lru_cache(maxsize=256)
def slot_of(layout: KVLayout, heads: tuple[range, ...], num_blocks: int) -> Slot:
    memories, offset, head_bytes = [], 0, layout.token_bytes // layout.num_heads
    for held in heads:
        memory = structs.replace(layout, num_heads=len(held), num_blocks=num_blocks)
        memories.append((held, memory, offset))
        offset += _aligned(memory.nbytes)
    return Slot(tuple(memories), offset, sum(map(len, heads)) * head_bytes)


def least_staging_bytes(layout: KVLayout) -> int:
    """The smallest accepted staging memory: of two blocks of `layout`."""
    return 2 * _aligned(layout.block_bytes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


@dataclass(frozen=True, eq=False)
class Step:
    """Some tokens of a transfer. Their READs and copies are computed on first use."""

    transfer: Transfer  # of these tokens
    read: range  # these tokens, and unwanted ones that are read along
    slot: Slot | None = None  # None: READs go straight into the pool
    slot_blocks: IntArray = field(
        default_factory=lambda: np.empty(0, np.int64)
    )  # of the sequence

    @cached_property
    def reads(self) -> tuple[ReadDescriptors, ...]:
        """Local offsets count from the base of the slot, or of the pool."""
        return descriptors(self.read_copies())

    def read_copies(self) -> Iterator[BlockCopy]:
        if self.slot is None:
            yield from self.transfer.copies(self.read)
            return
        memories = zip(self.transfer.groups, self.slot.memories, strict=True)
        for group, (heads, layout, base) in memories:
            side = Side(layout, self.slot_blocks, base=base)
            yield from self.transfer.copies_from(group, heads, side, self.read)

    @cached_property
    def copies(self) -> tuple[BlockCopy, ...]:
        """The copies out of the slot into the pool."""
        if self.slot is None:
            return ()
        transfer, copies = self.transfer, list[BlockCopy]()
        for group, (heads, layout, base) in zip(
            transfer.groups, self.slot.memories, strict=True
        ):
            source = Side(
                layout, self.slot_blocks, group.heads.start - heads.start, base
            )
            target = transfer.target(group)
            copies += cut(0, source, target, len(group.heads), transfer.tokens)
        return tuple(copies)

    @property
    def bytes_read(self) -> int:
        return len(self.read) * (self.slot or self.transfer).token_bytes

    @property
    def unstaged(self) -> "Step":
        """The same without staging memory; only for a transfer that converts nothing."""
        return self if self.slot is None else Step(self.transfer, self.transfer.tokens)


def _read_tokens(transfer: Transfer, way: Way) -> range:
    """The tokens to read: the wanted ones and, with `way.whole`, the rest of their blocks."""
    tokens, size = transfer.tokens, transfer.block_size
    if not way.whole:
        return tokens
    start, stop = tokens.start // size * size, -(-tokens.stop // size) * size
    if way.staged:
        return range(start, stop)
    own_size = transfer.local.layout.block_size
    return range(tokens.start, min(stop, -(-tokens.stop // own_size) * own_size))


class Estimate(NamedTuple):
    """The cost of moving a transfer in one way."""

    way: Way
    descriptors: int
    nbytes: int
    seconds: float

    def __str__(self) -> str:
        return _in_words(self.descriptors, self.nbytes, self.seconds)


def _in_words(number: int, nbytes: int, seconds: float) -> str:
    return f"{number} runs of {nbytes // number} bytes on average in {seconds:.2g} s"


def direct(transfer: Transfer, costs: CostModel) -> Estimate:
    """The cheapest way to read straight into place."""
    ways = (Way(staged=False, whole=whole) for whole in (False, True))
    return min((_estimate(transfer, way, costs, 0) for way in ways), key=_SECONDS)


def staged(transfer: Transfer, costs: CostModel, staging_bytes: int) -> Estimate:
    """The cheapest way to stage a transfer of at least one token.

    Raises:
        PlanError: half the staging memory is smaller than one block.
    """
    exact, wide = (_heads(transfer, wider) for wider in (False, True))
    layout = transfer.remote[0].layout
    least = slot_of(layout, exact, 1).nbytes
    if staging_bytes // 2 < least:
        raise PlanError(
            f"staging_bytes is {staging_bytes}; a block of the peer takes {least} bytes, "
            f"and two must fit: use at least {2 * least}"
        )
    fits = wide != exact and slot_of(layout, wide, 1).nbytes <= staging_bytes // 2
    options = (
        _estimate(transfer, Way(True, whole, wider, pipelined), costs, staging_bytes)
        for whole in (False, True)
        for wider in ((False, True) if fits else (False,))
        for pipelined in ((False, True) if costs.overlaps else (False,))
    )
    per_run = max(_LEAST_RUN_S - costs.per_descriptor_s, 0.0) if costs.overlaps else 0.0
    return min(
        options, key=lambda option: option.seconds + per_run * option.descriptors
    )


def _estimate(
    transfer: Transfer, way: Way, costs: CostModel, staging_bytes: int
) -> Estimate:
    step = Step(transfer, _read_tokens(transfer, way))
    if way.staged:
        borders = _borders(transfer, way, costs, staging_bytes)
        chunks = len(borders) - 1
        # Count as if one slot took all chunks, with a gap between two, which no run crosses.
        ordinals, length = np.arange(borders[-1]), borders[-1] - borders[0]
        blocks = (
            ordinals - borders[0] + np.searchsorted(borders[1:], ordinals, side="right")
        )
        heads = _heads(transfer, way.wider)
        one = slot_of(transfer.remote[0].layout, heads, length + chunks)
        step = replace(step, slot=one, slot_blocks=blocks)
    number, nbytes = count_descriptors(step.read_copies()), step.bytes_read
    seconds = costs.read_s(number, nbytes)
    if way.staged:
        last_share = (borders[-1] - borders[-2]) / length
        place_s = transfer.useful_bytes / costs.reformat_bytes_per_s
        seconds = costs.staged_s(seconds, place_s, chunks, last_share)
    return Estimate(way, number, nbytes, seconds)


def steps(
    transfer: Transfer, way: Way, costs: CostModel, staging_bytes: int
) -> Iterator[Step]:
    """The steps of a transfer that is moved in one way."""
    if not way.staged:
        yield Step(transfer, _read_tokens(transfer, way))
        return
    chunks = list(pairwise(_borders(transfer, way, costs, staging_bytes)))
    most = max(last - first for first, last in chunks)
    slot = slot_of(transfer.remote[0].layout, _heads(transfer, way.wider), most)
    tokens, size = transfer.tokens, transfer.block_size
    for first, last in chunks:
        part = transfer.part(
            max(tokens.start, first * size), min(tokens.stop, last * size)
        )
        ordinals = part.remote_ordinals
        blocks = np.arange(-ordinals.start, len(ordinals))
        yield Step(part, _read_tokens(part, way), slot, blocks)


def _borders(
    transfer: Transfer, way: Way, costs: CostModel, staging_bytes: int
) -> list[int]:
    """The chunks' borders, as indices into P's block table.

    A chunk takes at most half the staging memory. It ends where blocks of both sides end, if such
    a chunk fits, so that no block of D is cut.
    """
    layout = transfer.remote[0].layout
    wanted = transfer.remote_ordinals
    period = (
        lcm(layout.block_size, transfer.local.layout.block_size) // layout.block_size
    )
    max_blocks = _max_chunk_blocks(transfer, way, costs, staging_bytes, period)
    if period > max_blocks:
        period = 1
    chunk_blocks = max_blocks // period * period
    first_border = wanted.start // period * period + chunk_blocks
    return [wanted.start, *range(first_border, wanted.stop, chunk_blocks), wanted.stop]


def _max_chunk_blocks(
    transfer: Transfer, way: Way, costs: CostModel, staging_bytes: int, period: int
) -> int:
    """The most blocks of P in one chunk, at least one.

    Args:
        period: blocks of P after which blocks of both sides end; a pipelined chunk has at least
            this many.
    """
    block_bytes = slot_of(
        transfer.remote[0].layout, _heads(transfer, way.wider), 1
    ).nbytes
    total_bytes = len(transfer.remote_ordinals) * block_bytes
    max_bytes = staging_bytes // 2
    if not costs.overlaps:
        cached_bytes = int(_CACHED_CHUNK_S * costs.bytes_per_s)
        max_bytes = min(max_bytes, max(cached_bytes, total_bytes // _MAX_CACHED_CHUNKS))
    elif way.pipelined:
        share_bytes = min(
            -(-total_bytes // _PIPELINE_CHUNKS), staging_bytes // _PIPELINE_SLOTS
        )
        min_bytes = max(
            period * block_bytes, int(_MIN_PIPELINE_CHUNK_S * costs.bytes_per_s)
        )
        max_bytes = min(max_bytes, max(share_bytes, min_bytes))
    return max(1, max_bytes // block_bytes)


def _heads(transfer: Transfer, wider: bool) -> tuple[range, ...]:
    """The heads that are read for each head group."""
    if not wider:
        return tuple(group.heads for group in transfer.groups)
    total = transfer.total_kv_heads
    return tuple(
        transfer.remote[group.owners[0]].heads(total) for group in transfer.groups
    )


@dataclass(frozen=True)
class TransferPlan:
    """The steps by which one rank of D gets its KV."""

    path: str  # "direct", "staged", or "mixed" for steps of both
    transfer: Transfer  # of the first of several groups
    steps: tuple[Step, ...]
    estimated_s: float
    reason: str

    @property
    def reads(self) -> Iterator[ReadDescriptors]:
        """The READs of all steps, which are computed here."""
        return (read for step in self.steps for read in step.reads)

    @cached_property
    def descriptors(self) -> int:
        return sum(len(read.lengths) for read in self.reads)

    @property
    def useful_bytes(self) -> int:
        """Bytes of the wanted tokens, in the peer's dtype."""
        return sum(step.transfer.useful_bytes for step in self.steps)

    @property
    def bytes_read(self) -> int:
        return sum(step.bytes_read for step in self.steps)

    @property
    def slot_bytes(self) -> int:
        """Size of a slot: the most staging memory that a step needs."""
        return max((step.slot.nbytes for step in self.steps if step.slot), default=0)

    @property
    def why(self) -> str:
        """The path, its cost and the reason, for a person; computes the READs of all steps."""
        if not self.descriptors:
            return f"{self.path}: {self.reason}"
        runs = _in_words(self.descriptors, self.bytes_read, self.estimated_s)
        return f"{self.path}: {runs}; {self.reason}"


def joined(plans: Sequence[TransferPlan]) -> TransferPlan:
    """One plan that carries out the plans of several groups in turn."""
    first, *others = [plan for plan in plans if plan.steps] or plans[:1]
    if not others:
        return first
    all_steps = tuple(step for plan in plans for step in plan.steps)
    path = first.path if {plan.path for plan in others} == {first.path} else "mixed"
    seconds = sum(plan.estimated_s for plan in plans)
    return TransferPlan(path, first.transfer, all_steps, seconds, first.reason)


class Planner:
    """Plans the pulls of one rank of D from one engine, and remembers its decisions.

    Args:
        local: this rank of D.
        remote: all ranks of P, by rank.
        total_kv_heads: KV heads of the model.
        staging_bytes: size of the staging memory, two slots or more; None: the path is direct.
        convert: let the staged path change the dtype and the scales.

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
        heads = local.heads(total_kv_heads)
        self._groups = head_groups(heads, len(remote), total_kv_heads, remote[0].dcp)
        self._decided_by: CostModel | None = None
        # By kind of pull: the way, seconds per token, and the reason.
        self._decisions: dict[tuple[int, ...], tuple[Way, float, str]] = {}

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
            local_block_ids: D's blocks from token 0 of the sequence on, each of D's block size
                times its dcp; the rank keeps its own part of each.
            remote_block_ids: P's leased blocks from token 0 on, each of P's block size; with a dcp
                of P each id occurs once for every rank of the group.
            lease_hash: spreads leases over ranks of P that hold the same head.

        Raises:
            PlanError: an impossible token range, or a block table that does not fit.
        """
        start, stop = tokens
        if not 0 <= start <= stop:
            raise PlanError(f"token range is [{start}, {stop}); use 0 <= start <= stop")
        local, remote = self._local, self._remote
        theirs = remote[0].layout.block_size
        lanes = np.arange(len(remote_block_ids)) % remote[0].dcp
        if local.dcp > 1:
            start, stop = local.stripe.num_local(np.array([start, stop])).tolist()
            remote_block_ids = local.stripe.remote_blocks(remote_block_ids, theirs)
            lanes = local.stripe.remote_blocks(lanes, theirs)
        wanted = range(start, stop)
        pool = local.layout.num_blocks, local.layout.block_size
        pools = min(end.layout.num_blocks for end in remote), theirs
        least = int(local.groups.drops)
        return Transfer(
            local,
            remote,
            self._total_kv_heads,
            self._groups,
            wanted,
            check_blocks("local_block_ids", local_block_ids, *pool, wanted, least),
            check_blocks("remote_block_ids", remote_block_ids, *pools, wanted, least),
            lanes,
            local.rank + lease_hash,
            self._factors,
        )

    def plan(self, transfer: Transfer, costs: CostModel) -> TransferPlan:
        """The cheapest plan of what `take` returned.

        Raises:
            PlanError: the KV has to be converted, and the staging memory is too small.
        """
        if not transfer.tokens:
            return TransferPlan("direct", transfer, (), 0.0, "there is nothing to read")
        way, seconds_per_token, reason = self._decide(transfer, costs)
        plan = tuple(steps(transfer, way, costs, self._staging_bytes or 0))
        path = "staged" if way.staged else "direct"
        return TransferPlan(
            path, transfer, plan, seconds_per_token * len(transfer.tokens), reason
        )

    def _decide(self, transfer: Transfer, costs: CostModel) -> tuple[Way, float, str]:
        """The cheapest way, weighed once for each kind of pull: pulls that begin and end at equal
        offsets in a block, are about as long, and have about as many neighbouring blocks."""
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
            best, reason = self._weigh(transfer, costs)
            self._decisions[kind] = (
                best.way,
                best.seconds / len(transfer.tokens),
                reason,
            )
        return self._decisions[kind]

    def _weigh(self, transfer: Transfer, costs: CostModel) -> tuple[Estimate, str]:
        """The cheapest way, and the reason."""
        room = self._staging_bytes
        if transfer.converts:
            if room is None:
                raise PlanError(
                    "staging_bytes is None; converting the KV dtype needs staging memory"
                )
            ours, theirs = self._local.layout.dtype, self._remote[0].layout.dtype
            other = "" if transfer.factors is None else " of other scales"
            return staged(transfer, costs, room), f"{theirs} becomes {ours}{other}"
        straight = direct(transfer, costs)
        if room is None:
            return straight, "there is no staging memory"
        try:
            best, other_way = sorted(
                (straight, staged(transfer, costs, room)), key=_SECONDS
            )
        except (
            PlanError
        ) as error:  # the peer's blocks are too large for the staging memory
            return straight, str(error)
        return (
            best,
            f"{'direct' if best.way.staged else 'staged'} would read {other_way}",
        )


def _neighbours(blocks: IntArray) -> int:
    """The share of blocks that follow the one before in memory, in quarters: 0 to 4."""
    if len(blocks) < 2:
        return 0
    return 4 * int(np.count_nonzero(np.diff(blocks) == 1)) // (len(blocks) - 1)
