"""The steps of a transfer: READs into place, or READs into staging memory and copies out of it.

A slot of staging memory is a paged memory with P's layout and fewer blocks, one for each head
group: reading into it is a copy between two layouts of one order, whose runs stay long, and placing
is a copy out of it. Several owners of a group fill one slot block by block, so placing need not
know who read what. A slot may hold more than what is wanted, all heads of the owners or whole
blocks at the ends, where that makes fewer runs at less cost; never more than the leased blocks.

    P (NHD, 4 heads)           slot (P's order)             D (HND, heads 2 and 3 wanted)
    b7: n0 h0h1h2h3 n1 ..  ->  s0: n0 h0h1h2h3 n1 ..   ->   b2: h2 n0 n1 .. h3 n0 n1 ..

A staged step is a stretch of P's blocks that fits a slot; some slots fill while another is placed.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from math import lcm
from typing import NamedTuple

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
# Where READs are copies chunks are as small as a cache, but not too many: each has to be posted
# and polled.
_CHUNK_S, _MAX_CHUNKS = 0.75e-3, 32
# Between GPUs copies overlap reads. More slots than two keep the link busy while a copy is begun;
# the last chunks become smaller, down to what takes as long to read as to post and to place.
_MANY_SLOTS = 4
_LAST_CHUNK_S = 0.1e-3
# A cut run costs no less between GPUs, whatever a probe's few runs say.
_LEAST_RUN_S = 3e-6


class Way(NamedTuple):
    """Of staging a transfer."""

    wider: bool  # all heads of the owners are read, not just those that are wanted
    whole: bool  # whole blocks are read at the ends
    tapers: bool  # more slots, and the last chunks are smaller


class Slot(NamedTuple):
    """What a slot of some blocks holds, the same for all pulls between two engines."""

    memories: tuple[tuple[range, KVLayout, int], ...]  # of each head group: heads, where it begins
    nbytes: int
    token_bytes: int  # read for each token


@lru_cache(maxsize=256)
def slot_of(layout: KVLayout, heads: tuple[range, ...], num_blocks: int) -> Slot:
    memories, offset, head_bytes = [], 0, layout.token_bytes // layout.num_heads
    for held in heads:
        memory = replace(layout, num_heads=len(held), num_blocks=num_blocks)
        memories.append((held, memory, offset))
        offset += aligned(memory.nbytes)
    return Slot(tuple(memories), offset, sum(map(len, heads)) * head_bytes)


def aligned(nbytes: int) -> int:
    """The next multiple of ALIGN_BYTES."""
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def least_staging_bytes(layout: KVLayout) -> int:
    """Staging memory that two blocks of `layout` need: less is refused."""
    return 2 * aligned(layout.block_bytes)


@dataclass(frozen=True, eq=False)
class Step:
    """Some tokens of a transfer. Their READs and copies are worked out when first asked for."""

    transfer: Transfer  # of these tokens
    slot: Slot | None = None  # None: READs go straight into the pool
    whole: bool = False  # blocks are read whole

    @cached_property
    def reads(self) -> tuple[ReadDescriptors, ...]:
        """Local offsets count from the base of the slot, or of the pool."""
        if self.slot is None:
            return descriptors(self.transfer.copies())
        blocks = np.arange(len(self.transfer.remote_ordinals))
        return descriptors(_into(self.slot, self.transfer, self.read_tokens, blocks))

    @cached_property
    def copies(self) -> tuple[BlockCopy, ...]:
        """Out of the slot into the pool."""
        if self.slot is None:
            return ()
        transfer, found = self.transfer, list[BlockCopy]()
        ordinals = transfer.remote_ordinals
        blocks = np.arange(len(ordinals))
        for group, (heads, layout, base) in zip(transfer.groups, self.slot.memories, strict=True):
            source = Side(layout, blocks, ordinals.start, group.heads.start - heads.start, base)
            target = transfer.target(group)
            found += cut(0, source, target, len(group.heads), transfer.tokens)
        return tuple(found)

    @property
    def read_tokens(self) -> range:
        """At least the wanted ones."""
        return _whole_blocks(self.transfer) if self.whole else self.transfer.tokens

    @property
    def bytes_read(self) -> int:
        if self.slot is None:
            return self.transfer.useful_bytes
        return len(self.read_tokens) * self.slot.token_bytes

    @property
    def unstaged(self) -> "Step":
        """The same without staging memory, where no elements change on the way."""
        return self if self.slot is None else Step(self.transfer)


def _whole_blocks(transfer: Transfer) -> range:
    ordinals, size = transfer.remote_ordinals, transfer.block_size
    return range(ordinals.start * size, ordinals.stop * size)


def _into(slot: Slot, transfer: Transfer, tokens: range, blocks: IntArray) -> Iterator[BlockCopy]:
    """READs of tokens into blocks of a slot, from the transfer's first one on."""
    for group, (heads, layout, base) in zip(transfer.groups, slot.memories, strict=True):
        target = Side(layout, blocks, transfer.remote_ordinals.start, base=base)
        yield from transfer.copies_from(group, heads, target, tokens)


class Estimate(NamedTuple):
    """What moving a transfer in one way would take."""

    way: Way | None  # None: straight into place
    descriptors: int
    nbytes: int
    seconds: float

    def __str__(self) -> str:
        length = self.nbytes // self.descriptors
        return f"{self.descriptors} runs of {length} bytes on average in {self.seconds:.2g} s"


def direct(transfer: Transfer, costs: CostModel) -> Estimate:
    """Of reading straight into place."""
    number, nbytes = count_descriptors(transfer.copies()), transfer.useful_bytes
    return Estimate(None, number, nbytes, costs.read_s(number, nbytes))


def cheapest(transfer: Transfer, costs: CostModel, staging_bytes: int) -> Estimate:
    """The cheapest way to stage a transfer of at least one token.

    Raises:
        PlanError: half the staging memory is smaller than one block.
    """
    exact, wide = _heads(transfer, wider=False), _heads(transfer, wider=True)
    layout = transfer.remote[0].layout
    least = slot_of(layout, exact, 1).nbytes
    if staging_bytes // 2 < least:
        raise PlanError(
            f"staging_bytes is {staging_bytes}; a block of the peer takes {least} bytes, "
            f"and two must fit: use at least {2 * least}"
        )
    fits = wide != exact and slot_of(layout, wide, 1).nbytes <= staging_bytes // 2
    is_ragged = _whole_blocks(transfer) != transfer.tokens
    options = (
        _estimate(transfer, Way(wider, whole, tapers), costs, staging_bytes)
        for wider in ((False, True) if fits else (False,))
        for whole in ((False, True) if is_ragged else (False,))
        for tapers in ((True, False) if costs.overlaps else (False,))
    )
    per_run = max(_LEAST_RUN_S - costs.per_descriptor_s, 0.0) if costs.overlaps else 0.0
    return min(options, key=lambda option: option.seconds + per_run * option.descriptors)


def steps(
    transfer: Transfer, way: Way | None, costs: CostModel, staging_bytes: int
) -> Iterator[Step]:
    """A transfer moved in one way."""
    if way is None:
        yield Step(transfer)
        return
    slot, borders = _chunks(transfer, way, costs, staging_bytes)
    tokens, size = transfer.tokens, transfer.block_size
    for first, last in pairwise(borders):
        part = transfer.part(max(tokens.start, first * size), min(tokens.stop, last * size))
        yield Step(part, slot, way.whole)


def _estimate(transfer: Transfer, way: Way, costs: CostModel, staging_bytes: int) -> Estimate:
    slot, borders = _chunks(transfer, way, costs, staging_bytes)
    tokens, chunks = _whole_blocks(transfer) if way.whole else transfer.tokens, len(borders) - 1
    # As if all were read into one slot with a gap between the chunks, which no run crosses.
    ordinals = np.arange(borders[0], borders[-1])
    blocks = ordinals - borders[0] + np.searchsorted(borders[1:], ordinals, side="right")
    heads = _heads(transfer, way.wider)
    one = slot_of(transfer.remote[0].layout, heads, len(ordinals) + chunks)
    number, nbytes = count_descriptors(_into(one, transfer, tokens, blocks)), len(tokens)
    nbytes *= slot.token_bytes
    last_share = (borders[-1] - borders[-2]) / len(ordinals)
    place_s = transfer.useful_bytes / costs.reformat_bytes_per_s
    seconds = costs.staged_s(costs.read_s(number, nbytes), place_s, chunks, last_share)
    return Estimate(way, number, nbytes, seconds)


def _chunks(
    transfer: Transfer, way: Way, costs: CostModel, staging_bytes: int
) -> tuple[Slot, list[int]]:
    """The slot and where chunks end, as ordinals of P's blocks: at most half the staging memory
    each, and where blocks of both sides end if a slot has room, so that no block of D is cut."""
    layout, heads = transfer.remote[0].layout, _heads(transfer, way.wider)
    block_bytes, wanted = slot_of(layout, heads, 1).nbytes, transfer.remote_ordinals
    period = lcm(layout.block_size, transfer.local.layout.block_size) // layout.block_size
    most = staging_bytes // 2
    if not costs.overlaps:
        aim = max(int(_CHUNK_S * costs.bytes_per_s), len(wanted) * block_bytes // _MAX_CHUNKS)
        most = min(aim, most)
    elif way.tapers:
        most = max(staging_bytes // _MANY_SLOTS, min(block_bytes * period, most))
    blocks = max(1, most // block_bytes)
    period = period if period <= blocks else 1
    blocks -= blocks % period
    least = blocks
    if way.tapers:
        least = min(max(int(_LAST_CHUNK_S * costs.bytes_per_s) // block_bytes, 1), blocks)
    end, borders = wanted.start // period * period, [wanted.start]
    while end < wanted.stop:
        left = wanted.stop - end
        count = max(min(blocks, left // 2), least)
        count = max(count - count % period, period)
        end += left if left <= blocks and left - count < least else count
        borders.append(end)
    return slot_of(layout, heads, blocks), borders


def _heads(transfer: Transfer, wider: bool) -> tuple[range, ...]:
    """Read into each head group's part of a slot."""
    if not wider:
        return tuple(group.heads for group in transfer.groups)
    total = transfer.total_kv_heads
    return tuple(transfer.remote[group.owners[0]].heads(total) for group in transfer.groups)
