"""The steps of a transfer. Each step moves some of the tokens.

A direct step READs straight into the pool. A staged step READs into a *slot* of staging
memory. Then copies place the KV from the slot into the pool.

A slot contains one paged memory for each head group. The memory has P's layout, but
fewer blocks than P's pool. Reading into a slot is a copy between two layouts of the
same order, so the runs stay long. Placing is a second copy, out of the slot. If several
ranks of P own a head group, each of these ranks fills a share of the slot's blocks. So
placing does not depend on the owner. A slot may hold all heads of the owners, if
reading all heads takes fewer runs than reading the wanted heads.

    P (NHD, 4 heads)           slot (P's order)             D (HND, wants heads 2 and 3)
    b7: n0 h0h1h2h3 n1 ..  ->  s0: n0 h0h1h2h3 n1 ..   ->   b2: h2 n0 n1 .. h3 n0 n1 ..
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from msgspec import structs

from kvcache.layout import KVLayout
from kvcache.transfer.plan.block_copy import (
    BlockCopy,
    ReadDescriptors,
    Side,
    Transfer,
    cut,
    descriptors,
)
from kvcache.transfer.plan.endpoint import IntArray

# Slots, and the memories in a slot, start at multiples of this number of bytes. KV is
# copied out of a slot in words of up to 16 bytes, which must be aligned.
ALIGN_BYTES = 64


class SlotMemory(NamedTuple):
    """The part of a slot for one head group."""

    heads: range  # numbers of the model's KV heads
    layout: KVLayout
    base: int  # bytes from the start of the slot to this part


class Slot(NamedTuple):
    """The layout of a slot for some number of blocks, without an address.

    The layout depends only on P's layout, the heads and the number of blocks. So
    different pulls from an engine have equal Slots, which are cached.
    """

    memories: tuple[SlotMemory, ...]  # one memory for each head group
    nbytes: int
    token_bytes: int  # bytes read for each token


@lru_cache(maxsize=256)
def slot_of(layout: KVLayout, heads: tuple[range, ...], num_blocks: int) -> Slot:
    """Makes the layout of a slot for `num_blocks` blocks of a peer.

    Args:
        layout: the layout of the peer's pool.
        heads: for each head group, the heads that are read.
    """
    memories: list[SlotMemory] = []
    base = 0
    for group_heads in heads:
        memory = structs.replace(
            layout, num_heads=len(group_heads), num_blocks=num_blocks
        )
        memories.append(SlotMemory(group_heads, memory, base))
        base += _aligned(memory.nbytes)
    head_bytes = layout.token_bytes // layout.num_heads
    return Slot(tuple(memories), base, sum(map(len, heads)) * head_bytes)


def min_staging_bytes(layout: KVLayout) -> int:
    """The smallest accepted size of the staging memory: two blocks of `layout`."""
    return 2 * _aligned(layout.block_bytes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def _no_blocks() -> IntArray:
    return np.empty(0, np.int64)


@dataclass(frozen=True, eq=False)
class Step:
    """Moves some tokens of a transfer. READs and copies are computed on first use.

    Attributes:
        transfer: the transfer, restricted to the tokens of this step.
        read: the tokens to read: the tokens of this step, perhaps with unwanted tokens
            before or after them.
        slot: the slot's layout; None: READs write straight into the pool.
        slot_blocks: i64: the block table of the slot, from token 0 of the sequence on.
    """

    transfer: Transfer
    read: range
    slot: Slot | None = None
    slot_blocks: IntArray = field(default_factory=_no_blocks)

    @cached_property
    def reads(self) -> tuple[ReadDescriptors, ...]:
        """The READs. Local offsets count from the start of the slot, or of the pool."""
        return descriptors(self.read_copies())

    def read_copies(self) -> Iterator[BlockCopy]:
        """Yields the copies that READs carry out, from P into the slot or the pool."""
        if self.slot is None:
            yield from self.transfer.copies(self.read)
            return
        memories = zip(self.transfer.groups, self.slot.memories, strict=True)
        for group, memory in memories:
            side = Side(memory.layout, self.slot_blocks, base=memory.base)
            yield from self.transfer.copies_from(group, memory.heads, side, self.read)

    @cached_property
    def copies(self) -> tuple[BlockCopy, ...]:
        """The copies out of the slot into the pool. A direct step has none."""
        if self.slot is None:
            return ()
        transfer = self.transfer
        copies: list[BlockCopy] = []
        for group, memory in zip(transfer.groups, self.slot.memories, strict=True):
            source = Side(
                memory.layout,
                self.slot_blocks,
                head=group.heads.start - memory.heads.start,
                base=memory.base,
            )
            target = transfer.target(group)
            copies += cut(0, source, target, len(group.heads), transfer.tokens)
        return tuple(copies)

    @property
    def bytes_read(self) -> int:
        """Bytes that the READs move, unwanted tokens and heads included."""
        return len(self.read) * (self.slot or self.transfer).token_bytes

    @property
    def unstaged(self) -> "Step":
        """The same step without staging memory: READs write straight into the pool.

        The new step reads no unwanted tokens. The transfer must not convert dtype or
        scales.
        """
        if self.slot is None:
            return self
        return Step(self.transfer, self.transfer.tokens)
