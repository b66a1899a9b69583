"""The state of each block of the pool: the state machine of invariants I1 and I2.

The invariants are in docs/design.md. A READ is a one-sided read, as in RDMA: it copies
a peer's bytes into blocks of this engine. The state of a block follows from two counts
and a flag, except for the two exclusive states:

    uses    running sequences that read or write the block
    leases  prefill leases that let a peer read the block
    cached  the prefix index has an entry for the block's content

    RECEIVING | QUARANTINED    exclusive: uses = leases = 0, not cached
    USED                       uses > 0
    LEASED                     uses = 0, leases > 0
    CACHED                     uses = leases = 0, cached; evicted in LRU order
    FREE                       nothing refers to the block

    allocate            FREE -> USED        evicts CACHED -> FREE if too few are FREE
    share / release     uses +1 / -1        blocks that hold bytes: USED, LEASED, CACHED
    lease / end_lease   leases +1 / -1      blocks that hold bytes
    receive             USED -> RECEIVING   the block has one use, and is neither cached
                                            nor leased
    received            RECEIVING -> USED   the peer has confirmed that its lease was
                                            held until now, so the bytes are good
    quarantine          RECEIVING or QUARANTINED -> QUARANTINED
                        the pull was given up, but its bytes may still arrive (I7)
    drained             RECEIVING or QUARANTINED -> FREE
                        no READ can write to the block any more

`allocate` evicts the CACHED block that was used least recently. It evicts blocks with a
soft pin (kvcache/pins/) only if no other CACHED block is left, in the order in which
the pins end. Only a cached block can have a pin; the pin is removed when the block is
no longer cached. Eviction passes over each pinned block once: it moves the block from
the LRU list to the queue of spared blocks. After its pin has ended, a spared block is
evicted first, because it was used less recently than all blocks of the LRU list.

Block 0 is the null block. Padding is written to it. The null block is never allocated
and has no state.

A transition of many blocks is all or nothing: an illegal transition or a repeated id
raises before anything has changed. One thread owns an allocator; there are no locks. A
transition costs amortized O(1) per block, because every eviction undoes one earlier
`mark_cached`. If n pins exist, it costs O(log n).
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from enum import IntEnum
from operator import index

from kvcache.pins.soft_pins import SoftPins
from kvcache.pins.spared_blocks import SparedBlocks

NULL_BLOCK = 0
# Largest share of the pool that may be RECEIVING or QUARANTINED; see `can_receive` for
# the exception.
_MAX_RECEIVING_SHARE = 0.75


class BlockState(IntEnum):
    """The state of a block; the header of this file defines the states."""

    FREE = 0
    USED = 1
    CACHED = 2
    LEASED = 3
    RECEIVING = 4
    QUARANTINED = 5


# READs may write to RECEIVING and QUARANTINED blocks.
_EXPOSED_STATES = frozenset({BlockState.RECEIVING, BlockState.QUARANTINED})
# The bytes of USED, LEASED and CACHED blocks may be read.
_READABLE_STATES = frozenset({BlockState.USED, BlockState.LEASED, BlockState.CACHED})


class BlockError(RuntimeError):
    """A transition was refused, or the counts are inconsistent."""


class OutOfBlocks(BlockError):
    """Fewer blocks are free or evictable than requested; no block was allocated."""


class BlockStateError(BlockError):
    """The state machine forbids a transition: a bug of the caller, not of a peer."""


class IntegrityError(BlockError):
    """The counts do not add up (invariant I1), or a state is inconsistent (I2)."""


class BlockAllocator:
    """Counts the references to each block of a pool, and allocates unreferenced blocks.

    Args:
        num_blocks: Number of blocks of the pool, including the null block; at least 2.
        clock: Returns the time in seconds; used for the ends of pins.

    Attributes:
        on_evict: Called with the id of each evicted block after the block has become
            FREE. The callback may unmark other blocks.
        num_pinned_evicted: Number of CACHED blocks that became FREE before their pin
            ended.
    """

    on_evict: Callable[[int], None] | None = None

    def __init__(
        self, num_blocks: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if num_blocks < 2:
            raise ValueError(
                f"num_blocks is {num_blocks}; use at least 2, because block 0 is the "
                "null block"
            )
        self.num_blocks = num_blocks
        self._uses = [0] * num_blocks
        self._leases = [0] * num_blocks
        self._cached = [False] * num_blocks
        self._states = [BlockState.FREE] * num_blocks
        self._counts = [0] * len(BlockState)
        self._counts[BlockState.FREE] = self.capacity
        # The FREE blocks, as a stack. Every transition pushes blocks in reverse order,
        # so that a later sequence gets the blocks of an earlier one in the same order.
        # Neighbors in memory then stay neighbors in block tables: transfers need
        # fewer descriptors, and sequences lie on fewer memory pages.
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))
        # The CACHED blocks in the order of eviction, without those in `_spared`.
        self._evictable: OrderedDict[int, None] = OrderedDict()
        # CACHED blocks that eviction has passed over, in the order of their pins' ends.
        self._spared = SparedBlocks()
        self._clock = clock
        self._pins = SoftPins(self.capacity, clock)
        self.num_pinned_evicted = 0

    @property
    def capacity(self) -> int:
        """Number of blocks that can be allocated: all blocks except the null block."""
        return self.num_blocks - 1

    @property
    def num_available(self) -> int:
        """Number of blocks that `allocate` could return now: FREE and CACHED blocks."""
        return len(self._free) + len(self._evictable) + len(self._spared)

    @property
    def is_all_available(self) -> bool:
        """Whether no block is used, leased, receiving or quarantined."""
        return self.num_available == self.capacity

    @property
    def num_quarantined(self) -> int:
        """Number of blocks that READs of given-up pulls may still write to."""
        return self._counts[BlockState.QUARANTINED]

    @property
    def num_pinned(self) -> int:
        """Number of blocks with a pin that has not ended."""
        self._pins.remove_expired()
        return len(self._pins)

    @property
    def num_pins_refused(self) -> int:
        """Number of pins that were refused because the owner's share was used up."""
        return self._pins.num_refused

    def can_receive(self, num_blocks: int, *, ignore_receiving: bool = False) -> bool:
        """Whether a pull may read into `num_blocks` more blocks.

        Any READ may hang, so only a part of the pool may be RECEIVING or QUARANTINED.
        The engine can then still compute in the rest of the pool. If no block is
        RECEIVING or QUARANTINED, a pull of any size is allowed.

        Args:
            ignore_receiving: Count only QUARANTINED blocks, as if no pull were active.
        """
        exposed = self.num_quarantined
        if not ignore_receiving:
            exposed += self._counts[BlockState.RECEIVING]
        return (
            not exposed or exposed + num_blocks <= self.capacity * _MAX_RECEIVING_SHARE
        )

    def counts(self) -> dict[BlockState, int]:
        """Number of blocks in each state; the numbers add up to `capacity`."""
        return {state: self._counts[state] for state in BlockState}

    def state(self, block: int) -> BlockState:
        return self._states[block]

    def is_cached(self, block: int) -> bool:
        return self._cached[block]

    def can_allocate(self, num_blocks: int) -> bool:
        return num_blocks <= self.num_available

    def allocate(self, num_blocks: int) -> list[int]:
        """FREE -> USED, with one use each; evicts CACHED blocks if too few are FREE.

        Raises:
            OutOfBlocks: Fewer than `num_blocks` are available; nothing was allocated or
                evicted.
        """
        if num_blocks < 0:
            raise BlockStateError(f"cannot allocate {num_blocks} blocks")
        if num_blocks > self.num_available:
            raise OutOfBlocks(
                f"{num_blocks} blocks requested, {self.num_available} of "
                f"{self.capacity} available"
            )
        while len(self._free) < num_blocks:
            self._evict_one()
        allocated = [self._free.pop() for _ in range(num_blocks)]
        for block in allocated:
            self._uses[block] = 1
            self._update_state(block)
        return allocated

    def share(self, blocks: Iterable[int]) -> None:
        """Adds a use to each block.

        Each block must hold bytes: USED, LEASED or CACHED.
        """
        for block in self._checked("share", blocks, self._holds_bytes):
            self._uses[block] += 1
            self._update_state(block)

    def release(self, blocks: Iterable[int]) -> None:
        """Removes a use from each block.

        Pass a sequence's blocks in order. Then the last blocks, which the fewest
        sequences share, are evicted first.
        """
        for block in reversed(
            self._checked("release", blocks, lambda b: self._uses[b] > 0)
        ):
            self._uses[block] -= 1
            self._update_state(block)

    def lease(self, blocks: Iterable[int]) -> None:
        """Adds a lease to each block.

        Each block must hold bytes: USED, LEASED or CACHED.
        """
        for block in self._checked("lease", blocks, self._holds_bytes):
            self._leases[block] += 1
            self._update_state(block)

    def end_lease(self, blocks: Iterable[int]) -> None:
        """Removes a lease from each block. Order the blocks as for `release`."""
        ids = self._checked("end the lease of", blocks, lambda b: self._leases[b] > 0)
        for block in reversed(ids):
            self._leases[block] -= 1
            self._update_state(block)

    def receive(self, blocks: Iterable[int]) -> None:
        """USED -> RECEIVING: READs will write a peer's bytes to the blocks.

        Each block must have one use, and be neither leased nor cached.
        """
        for block in self._checked("receive into", blocks, self._is_exclusively_used):
            self._uses[block] = 0
            self._set_state(block, BlockState.RECEIVING)

    def received(self, blocks: Iterable[int]) -> None:
        """RECEIVING -> USED, with one use: the pull has succeeded."""
        for block in self._checked("end receiving into", blocks, self._is_receiving):
            self._uses[block] = 1
            self._set_state(block, BlockState.USED)

    def quarantine(self, blocks: Iterable[int]) -> None:
        """RECEIVING or QUARANTINED -> QUARANTINED.

        The pull was given up, but its READs may still write to the blocks (I7).
        """
        for block in self._checked("quarantine", blocks, self._is_exposed):
            self._set_state(block, BlockState.QUARANTINED)

    def drained(self, blocks: Iterable[int]) -> None:
        """RECEIVING or QUARANTINED -> FREE.

        No READ can write to the blocks any more.
        """
        for block in reversed(self._checked("drain", blocks, self._is_exposed)):
            self._set_state(block, BlockState.FREE)

    def mark_cached(self, block: int) -> None:
        """Records that the prefix index has an entry for a USED or LEASED block."""
        (block,) = self._checked("mark as cached", (block,), self._is_markable)
        self._cached[block] = True

    def unmark_cached(self, block: int) -> None:
        """Records that the prefix index has dropped a block's entry.

        A CACHED block becomes FREE.
        """
        (block,) = self._checked("unmark as cached", (block,), self.is_cached)
        self._remove_mark(block)

    def pin(self, blocks: Iterable[int], seconds: float, owner: str = "") -> None:
        """Makes eviction take blocks without a pin before these blocks, for `seconds`.

        Each block must be marked as cached. Pass the blocks of a prefix in order.

        Args:
            owner: The owner of the pins. Pins beyond the owner's share of the pool are
                ignored, and counted in `num_pins_refused`.
        """
        ids = self._checked("pin", blocks, self.is_cached)
        pinned = self._pins.pin(ids, seconds, owner)
        for block in reversed(pinned):  # the first blocks are to be evicted last
            if block in self._spared:
                self._spared.remove(block)
                self._spared.add(block, self._pins.pin_of(block))

    def _evict_one(self) -> None:
        block = self._next_victim()
        self._remove_mark(block)
        if self.on_evict is not None:
            self.on_evict(block)

    def _next_victim(self) -> int:
        """The CACHED block to evict next; there must be one."""
        self._pins.remove_expired()
        spared = self._spared.first()
        if spared is not None and spared not in self._pins:
            return spared
        while self._evictable:
            block = next(iter(self._evictable))
            if block not in self._pins:
                return block
            del self._evictable[block]
            self._spared.add(block, self._pins.pin_of(block))
        spared = self._spared.first()
        assert spared is not None
        return spared

    def _remove_mark(self, block: int) -> None:
        """Records that a block is no longer cached, and removes the block's pin."""
        if block in self._pins:
            is_lost = self._states[block] is BlockState.CACHED
            self.num_pinned_evicted += is_lost
            self._pins.remove(block)
        self._cached[block] = False
        self._update_state(block)

    def _update_state(self, block: int) -> None:
        """Derives the state of a block from its counts.

        The block must not be in an exclusive state.
        """
        state = self._derived_state(block)
        if state is not self._states[block]:
            self._set_state(block, state)

    def _derived_state(self, block: int) -> BlockState:
        if self._uses[block]:
            return BlockState.USED
        if self._leases[block]:
            return BlockState.LEASED
        return BlockState.CACHED if self._cached[block] else BlockState.FREE

    def _set_state(self, block: int, state: BlockState) -> None:
        old = self._states[block]
        if block in self._spared:
            self._spared.remove(block)
        elif old is BlockState.CACHED:
            del self._evictable[block]
        if state is BlockState.FREE:
            self._free.append(block)
        elif state is BlockState.CACHED:
            self._evictable[block] = None
        self._counts[old] -= 1
        self._counts[state] += 1
        self._states[block] = state

    def _checked(
        self, verb: str, blocks: Iterable[int], allowed: Callable[[int], bool]
    ) -> list[int]:
        """Checks the blocks of a transition, and returns their ids as plain ints.

        Args:
            verb: The transition's name, for errors.
            allowed: Returns True for a block that may make the transition.

        Raises:
            BlockStateError: A block may not make the transition, or occurs twice.
        """
        ids = [index(block) for block in blocks]
        for block in ids:
            if not NULL_BLOCK < block < self.num_blocks:
                raise BlockStateError(
                    f"cannot {verb} block {block}: ids are 1 to {self.num_blocks - 1}"
                )
            if not allowed(block):
                raise BlockStateError(f"cannot {verb} {self._describe(block)}")
        if len(set(ids)) != len(ids):
            raise BlockStateError(f"cannot {verb} {ids}: a block occurs twice")
        return ids

    def _holds_bytes(self, block: int) -> bool:
        return self._states[block] in _READABLE_STATES

    def _is_receiving(self, block: int) -> bool:
        return self._states[block] is BlockState.RECEIVING

    def _is_exposed(self, block: int) -> bool:
        return self._states[block] in _EXPOSED_STATES

    def _is_markable(self, block: int) -> bool:
        return not self._cached[block] and self._holds_bytes(block)

    def _is_exclusively_used(self, block: int) -> bool:
        return (
            self._uses[block] == 1
            and not self._leases[block]
            and not self._cached[block]
        )

    def _describe(self, block: int) -> str:
        cached = "cached" if self._cached[block] else "not cached"
        return (
            f"block {block} ({self._states[block].name}, uses {self._uses[block]}, "
            f"leases {self._leases[block]}, {cached})"
        )

    def check_integrity(self) -> None:
        """Recounts all blocks, and compares the result with the stored states.

        Raises:
            IntegrityError: A state contradicts the counts, or a list contradicts the
                states.
        """
        for block in range(self.num_blocks):
            self._check_block(block)
        states = self._states[NULL_BLOCK + 1 :]
        recount = {state: states.count(state) for state in BlockState}
        if recount != self.counts():
            raise IntegrityError(
                f"blocks per state: a recount gives {recount}, but {self.counts()} is "
                "recorded (invariant I1)"
            )
        self._check_list(self._free, BlockState.FREE)
        self._check_list([*self._evictable, *self._spared], BlockState.CACHED)
        self._check_pins()

    def _check_list(self, listed: Iterable[int], state: BlockState) -> None:
        blocks = sorted(listed)
        expected = [b for b in range(1, self.num_blocks) if self._states[b] is state]
        if blocks != expected:
            raise IntegrityError(
                f"the list of {state.name} blocks is {blocks}, but the blocks in that "
                f"state are {expected} (invariant I2)"
            )

    def _check_pins(self) -> None:
        problem = self._pins.find_inconsistency()
        uncached = [block for block in self._pins if not self._cached[block]]
        if uncached:
            problem = f"blocks {uncached} are pinned but not cached"
        for block in self._spared:
            pin = self._spared.pin_of(block)
            has_ended = block not in self._pins and pin.expires_at_s <= self._clock()
            if not has_ended and self._pins.pin_of(block) is not pin:
                problem = f"block {block} was spared for another pin than it has"
        if problem is not None:
            raise IntegrityError(f"pins: {problem}")

    def _check_block(self, block: int) -> None:
        """Checks that the state of a block follows from its counts.

        A block in an exclusive state, and block 0, must have no uses and no leases, and
        must not be marked as cached.
        """
        state = self._states[block]
        must_be_unreferenced = state in _EXPOSED_STATES or block == NULL_BLOCK
        expected = BlockState.FREE if must_be_unreferenced else state
        has_negative_count = self._uses[block] < 0 or self._leases[block] < 0
        if has_negative_count or self._derived_state(block) is not expected:
            raise IntegrityError(
                f"the state contradicts the counts of {self._describe(block)} "
                "(invariant I2)"
            )
