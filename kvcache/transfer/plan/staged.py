"""Staged transfers: READ blocks of P as they lie into staging memory, then place them.

A slot of staging memory is a paged memory with P's layout and fewer blocks, one for each head
group: reading into it is a copy between two layouts of one order, whose runs stay long, and placing
is a copy out of it. Several owners of a group fill one slot block by block, so placing need not
know who read what. A slot may hold more than what is wanted, all heads of the owners or whole
blocks at the ends, where that makes fewer runs at less cost; never more than the leased blocks.

    P (NHD, 4 heads)           slot (P's order)             D (HND, heads 2 and 3 wanted)
    b7: n0 h0h1h2h3 n1 ..  ->  s0: n0 h0h1h2h3 n1 ..   ->   b2: h2 n0 n1 .. h3 n0 n1 ..

A chunk is a stretch of P's blocks that fits a slot; some slots fill while another is placed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from math import lcm
from typing import Any, NamedTuple

import numpy as np

from kvcache.layout import KVLayout
from kvcache.transfer.plan.block_copy import (
    BlockCopy,
    ReadDescriptors,
    Side,
    Transfer,
    count_descriptors,
    cut,
    descriptors,
)
from kvcache.transfer.plan.cost import CostModel
from kvcache.transfer.plan.endpoint import IntArray, PlanError

# Slots, and the groups' memories in them, start at multiples of this: placing moves whole words.
ALIGN_BYTES = 64
# Where READs are copies chunks are as small as a cache, but not too many: each costs some 0.1 ms of
# posting and polling.
_CHUNK_S, _MAX_CHUNKS = 0.75e-3, 32
# Between GPUs copies overlap reads. More slots than two keep the link busy while a copy is begun;
# the last chunks may become smaller, down to what takes as long to read as to post and to place.
# With two slots they must not: each would wait for the one before to be placed. But chunks cut
# runs, where these are longer.
_CUTS_BETWEEN_GPUS = ((4, True), (2, False))  # slots, and whether chunks become smaller
_CUTS = ((2, False),)
_LAST_CHUNK_S = 0.1e-3
# A cut run costs no less between GPUs, whatever a probe's few runs say.
_LEAST_RUN_S = 3e-6


class Way(NamedTuple):
    """Of staging a transfer."""

    wider: bool  # all heads of the owners are read, not just those that are wanted
    whole: bool  # whole blocks are read at the ends
    slots: int  # at least, in staging memory
    tapers: bool  # the last chunks are smaller


class Chunk(NamedTuple):
    """One slot full: READs whose local offsets count from the slot's base, then copies out of it
    into the pool, made when they are first looked at: the link waits for the READs only."""

    reads: tuple[ReadDescriptors, ...]
    nbytes: int  # of the slot
    make_copies: Callable[[], tuple[BlockCopy, ...]]  # the same ones whenever it is called
    factors: tuple[float, ...] | None = None  # of the elements, by layer and component

    @property
    def copies(self) -> tuple[BlockCopy, ...]:
        return self.make_copies()


class _Slot(NamedTuple):
    """What a slot of some blocks holds, the same for all pulls between two engines."""

    memories: tuple[tuple[range, KVLayout, int], ...]  # of each head group: heads, where it begins
    nbytes: int
    token_bytes: int  # read for each token


@lru_cache(maxsize=256)
def _slot(layout: KVLayout, heads: tuple[range, ...], num_blocks: int) -> _Slot:
    memories, offset, head_bytes = [], 0, layout.token_bytes // layout.num_heads
    for held in heads:
        memory = replace(layout, num_heads=len(held), num_blocks=num_blocks)
        memories.append((held, memory, offset))
        offset += aligned(memory.nbytes)
    return _Slot(tuple(memories), offset, sum(map(len, heads)) * head_bytes)


def aligned(nbytes: int) -> int:
    """The next multiple of ALIGN_BYTES."""
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def least_staging_bytes(layout: KVLayout) -> int:
    """Staging memory that two blocks of `layout` need: less is refused."""
    return 2 * aligned(layout.block_bytes)


@dataclass(frozen=True, eq=False)
class StagedPlan:
    """A transfer staged in one way."""

    transfer: Transfer
    way: Way
    slot: _Slot
    borders: tuple[int, ...]  # of the chunks: ordinals of blocks of P in the sequence

    @property
    def num_chunks(self) -> int:
        return len(self.borders) - 1

    @property
    def read_tokens(self) -> range:
        """At least the wanted ones."""
        tokens, size = self.transfer.tokens, self.transfer.block_size
        if not self.way.whole:
            return tokens
        return range(tokens.start // size * size, -(-tokens.stop // size) * size)

    @property
    def bytes_read(self) -> int:
        return len(self.read_tokens) * self.slot.token_bytes

    def chunk(self, index: int) -> Chunk:
        first, last = self.borders[index : index + 2]
        reads = descriptors(self._reads(first, last, self.slot, np.arange(last - first)))
        make_copies = cache(lambda: tuple(self._copies(first, last)))
        return Chunk(reads, self.slot.nbytes, make_copies, self.transfer.factors)

    def count_descriptors(self) -> int:
        """Of all chunks, or a few more."""
        first, last = self.borders[0], self.borders[-1]
        transfer, blocks = self.transfer, np.arange(last - first)
        # As if all were read into one slot with a gap between the chunks, which no run crosses.
        blocks += np.searchsorted(self.borders[1:], blocks + first, side="right")
        heads = _heads(transfer, self.way.wider)
        one = _slot(transfer.remote[0].layout, heads, last - first + self.num_chunks)
        return count_descriptors(self._reads(first, last, one, blocks))

    def _reads(self, first: int, last: int, slot: _Slot, blocks: IntArray) -> Iterator[BlockCopy]:
        transfer, tokens = self.transfer, self._within(self.read_tokens, first, last)
        for group, (heads, layout, base) in zip(transfer.groups, slot.memories, strict=True):
            target = Side(layout, blocks, first, base=base)
            yield from transfer.copies_from(group, heads, target, tokens)

    def _copies(self, first: int, last: int) -> Iterator[BlockCopy]:
        transfer, tokens = self.transfer, self._within(self.transfer.tokens, first, last)
        blocks = np.arange(last - first)
        for group, (heads, layout, base) in zip(transfer.groups, self.slot.memories, strict=True):
            source = Side(layout, blocks, first, group.heads.start - heads.start, base)
            yield from cut(0, source, transfer.target(group), len(group.heads), tokens)

    def _within(self, tokens: range, first: int, last: int) -> range:
        size = self.transfer.block_size
        return range(max(tokens.start, first * size), min(tokens.stop, last * size))


class Chunks(Sequence[Chunk]):
    """Of one or several staged plans, in their order; each is made when it is first wanted."""

    def __init__(self, plans: Sequence[StagedPlan]) -> None:
        self._plans = plans
        self._places = [(plan, index) for plan in plans for index in range(plan.num_chunks)]
        self._made: dict[int, Chunk] = {}
        self.slot_bytes = max(plan.slot.nbytes for plan in plans)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: Any) -> Any:
        if index not in self._made:
            plan, number = self._places[index]
            self._made[index] = plan.chunk(number)
        return self._made[index]

    def unstaged(self) -> tuple[ReadDescriptors, ...] | None:
        """What they bring, read straight into the pool; None where elements change on the way."""
        if any(plan.transfer.converts for plan in self._plans):
            return None
        return descriptors(copy for plan in self._plans for copy in plan.transfer.copies())


class Estimate(NamedTuple):
    plan: StagedPlan
    descriptors: int
    seconds: float


def cheapest(transfer: Transfer, costs: CostModel, staging_bytes: int) -> Estimate:
    """The cheapest way to stage a transfer of at least one token.

    Raises:
        PlanError: half the staging memory is smaller than one block.
    """
    exact, wide = _heads(transfer, wider=False), _heads(transfer, wider=True)
    layout = transfer.remote[0].layout
    least = _slot(layout, exact, 1).nbytes
    if staging_bytes // 2 < least:
        raise PlanError(
            f"staging_bytes is {staging_bytes}; a block of the peer takes {least} bytes, "
            f"and two must fit: use at least {2 * least}"
        )
    fits = wide != exact and _slot(layout, wide, 1).nbytes <= staging_bytes // 2
    size, tokens = transfer.block_size, transfer.tokens
    is_ragged = tokens.start % size or tokens.stop % size
    options = (
        _estimate(stage(transfer, Way(wider, whole, *slots), costs, staging_bytes), costs)
        for wider in ((False, True) if fits else (False,))
        for whole in ((False, True) if is_ragged else (False,))
        for slots in (_CUTS_BETWEEN_GPUS if costs.overlaps else _CUTS)
    )
    per_run = max(_LEAST_RUN_S - costs.per_descriptor_s, 0.0) if costs.overlaps else 0.0
    return min(options, key=lambda option: option.seconds + per_run * option.descriptors)


def stage(transfer: Transfer, way: Way, costs: CostModel, staging_bytes: int) -> StagedPlan:
    """A transfer cut into chunks that fit half the staging memory."""
    layout, heads = transfer.remote[0].layout, _heads(transfer, way.wider)
    size, block_bytes = layout.block_size, _slot(layout, heads, 1).nbytes
    first, last = transfer.tokens.start // size, -(-transfer.tokens.stop // size)
    period = lcm(size, transfer.local.layout.block_size) // size
    most = staging_bytes // 2
    if costs.overlaps:
        most = max(staging_bytes // way.slots, min(block_bytes * period, most))
        blocks = max(1, most // block_bytes)
    else:
        aim = max(int(_CHUNK_S * costs.bytes_per_s), (last - first) * block_bytes // _MAX_CHUNKS)
        blocks = max(1, min(aim, most) // block_bytes)
    # Chunks that end where blocks of both sides do cut no block of D in two.
    period = period if period <= blocks else 1
    blocks -= blocks % period
    least = blocks
    if way.tapers:
        least = min(max(int(_LAST_CHUNK_S * costs.bytes_per_s) // block_bytes, 1), blocks)
    borders = [first // period * period]
    while borders[-1] < last:
        borders.append(_next_border(borders[-1], last, blocks, least, period))
    return StagedPlan(transfer, way, _slot(layout, heads, blocks), tuple(borders))


def _next_border(first: int, last: int, blocks: int, least: int, period: int) -> int:
    """Where the chunk from block `first` on ends, in a sequence whose blocks end at `last`: it has
    at most `blocks`, at least `least` while there are as many, and a multiple of `period`."""
    left = last - first
    count = max(min(blocks, left // 2), least)
    count = max(count // period, 1) * period
    rest = left - count
    return last if rest < least and left <= blocks else first + count


def _estimate(plan: StagedPlan, costs: CostModel) -> Estimate:
    number = plan.count_descriptors()
    read_s = costs.read_s(number, plan.bytes_read)
    place_s = costs.reformat_s(plan.transfer.useful_bytes)
    borders = plan.borders
    last_share = (borders[-1] - borders[-2]) / (borders[-1] - borders[0])
    return Estimate(plan, number, costs.staged_s(read_s, place_s, plan.num_chunks, last_share))


def _heads(transfer: Transfer, wider: bool) -> tuple[range, ...]:
    """Read into each head group's part of a slot."""
    if not wider:
        return tuple(group.heads for group in transfer.groups)
    total = transfer.total_kv_heads
    return tuple(transfer.remote[group.owners[0]].heads(total) for group in transfer.groups)
