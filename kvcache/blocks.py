"""The state of each block of the pool: the state machine of invariants I1 and I2 (docs/design.md).

A block has three counts, and its state follows from them; two further states are exclusive:

    uses    running sequences that read or write it        leases  prefill leases a peer may read
    cached  the prefix index has an entry for its content

    RECEIVING | QUARANTINED    exclusive: uses = leases = 0, not cached
    USED                       uses > 0
    LEASED                     uses = 0, leases > 0
    CACHED                     uses = leases = 0, cached: may be evicted, least recently used first
    FREE                       nothing refers to it

    allocate            FREE -> USED        (first evicts CACHED -> FREE if FREE is too few)
    share / release     uses +1 / -1        share only what holds bytes: USED, LEASED, CACHED
    lease / end_lease   leases +1 / -1      lease only what holds bytes
    receive             USED -> RECEIVING   of one single use, neither cached nor leased
    received            RECEIVING -> USED   the fence was passed: the bytes are good
    quarantine          RECEIVING or QUARANTINED -> QUARANTINED
                        the pull was given up, but its bytes may still arrive (I7)
    drained             RECEIVING or QUARANTINED -> FREE    every READ handle has ended

Block 0 is the null block: padding writes go there, it is never allocated and in no state.

Every move takes the ids of many blocks and is all or nothing: an illegal one, a repeated id
included, raises before anything changed. One thread owns an allocator; there are no locks. Every
move costs O(1) a block, amortised: an evicted block was cached once.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from enum import IntEnum
from operator import index

NULL_BLOCK = 0
_MAX_AT_RISK_SHARE = 0.75  # of the pool: blocks that READs may write to


class BlockState(IntEnum):
    """The one state of a block."""

    FREE = 0
    USED = 1
    CACHED = 2
    LEASED = 3
    RECEIVING = 4
    QUARANTINED = 5


_EXPOSED = frozenset(
    {BlockState.RECEIVING, BlockState.QUARANTINED}
)  # READs may write there
_HOLDS_BYTES = frozenset({BlockState.USED, BlockState.LEASED, BlockState.CACHED})


class BlockError(RuntimeError):
    """A move was refused, or the counts are inconsistent."""


class OutOfBlocks(BlockError):
    """Fewer blocks are free or evictable than requested; nothing was taken."""


class BlockStateError(BlockError):
    """A move that the state machine does not have: a bug of the caller, never a peer's fault."""


class IntegrityError(BlockError):
    """The counts do not add up (I1), or a block is in two states (I2)."""


class BlockAllocator:
    """Counts the references to `num_blocks` blocks and allocates those without any.

    Args:
        num_blocks: blocks of the pool, the null block included; at least 2.

    Attributes:
        on_evict: called with the id of each evicted block, which is then FREE and not marked any
            more; may unmark other blocks.
    """

    on_evict: Callable[[int], None] | None = None

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(
                f"num_blocks is {num_blocks}; use at least 2, block 0 being the null block"
            )
        self.num_blocks = num_blocks
        self._uses = [0] * num_blocks
        self._leases = [0] * num_blocks
        self._cached = [False] * num_blocks
        self._states = [BlockState.FREE] * num_blocks
        self._counts = [0] * len(BlockState)
        self._counts[BlockState.FREE] = self.capacity
        # A stack, and every move releases in reverse: a sequence's blocks are allocated again in
        # their old order, so neighbours stay neighbours (fewer descriptors), on few pages.
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self._evictable: OrderedDict[int, None] = (
            OrderedDict()
        )  # CACHED, first to go first

    @property
    def capacity(self) -> int:
        """Blocks that can ever be allocated: all but the null block."""
        return self.num_blocks - 1

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could hand out now: FREE and CACHED."""
        return len(self._free) + len(self._evictable)

    @property
    def is_all_available(self) -> bool:
        """Whether no block is used, leased, receiving or quarantined."""
        return self.num_available == self.capacity

    @property
    def num_quarantined(self) -> int:
        """Blocks that READs of given-up pulls may still write to."""
        return self._counts[BlockState.QUARANTINED]

    def has_room_to_receive(
        self, num_blocks: int, *, beside_hung: bool = False
    ) -> bool:
        """Whether READs may write to `num_blocks` more blocks. Unless these are the only ones, a
        part of the pool must stay free of READs to compute in, as all of them may hang.

        Args:
            beside_hung: count quarantined blocks only, as if all other READs had ended.
        """
        at_risk = self.num_quarantined + (
            0 if beside_hung else self._counts[BlockState.RECEIVING]
        )
        return not at_risk or at_risk + num_blocks <= self.capacity * _MAX_AT_RISK_SHARE

    def counts(self) -> dict[BlockState, int]:
        """Blocks in each state; they add up to `capacity`."""
        return {state: self._counts[state] for state in BlockState}

    def state(self, block: int) -> BlockState:
        return self._states[block]

    def is_cached(self, block: int) -> bool:
        return self._cached[block]

    def can_allocate(self, num_blocks: int) -> bool:
        return num_blocks <= self.num_available

    def allocate(self, num_blocks: int) -> list[int]:
        """FREE -> USED, with one use each; evicts if too few are FREE.

        Raises:
            OutOfBlocks: fewer than `num_blocks` are available; nothing was taken or evicted.
        """
        if num_blocks < 0:
            raise BlockStateError(f"cannot allocate {num_blocks} blocks")
        if num_blocks > self.num_available:
            raise OutOfBlocks(
                f"{num_blocks} blocks wanted, {self.num_available} of {self.capacity} available"
            )
        while len(self._free) < num_blocks:
            self._evict_one()
        taken = [self._free.pop() for _ in range(num_blocks)]
        for block in taken:
            self._uses[block] = 1
            self._settle(block)
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """One more use of each block; it must hold bytes (USED, LEASED or CACHED)."""
        for block in self._checked("share", blocks, self._holds_bytes):
            self._uses[block] += 1
            self._settle(block)

    def release(self, blocks: Iterable[int]) -> None:
        """One use of each block less. Pass a sequence's blocks in order: the last ones, whose
        content helps the fewest others, are then the first to be evicted."""
        for block in reversed(
            self._checked("release", blocks, lambda b: self._uses[b] > 0)
        ):
            self._uses[block] -= 1
            self._settle(block)

    def lease(self, blocks: Iterable[int]) -> None:
        """One more lease of each block; it must hold bytes (USED, LEASED or CACHED)."""
        for block in self._checked("lease", blocks, self._holds_bytes):
            self._leases[block] += 1
            self._settle(block)

    def end_lease(self, blocks: Iterable[int]) -> None:
        """One lease of each block less; order as for `release`."""
        ids = self._checked("end the lease of", blocks, lambda b: self._leases[b] > 0)
        for block in reversed(ids):
            self._leases[block] -= 1
            self._settle(block)

    def receive(self, blocks: Iterable[int]) -> None:
        """USED -> RECEIVING: a peer's bytes will be written here; must be one sequence's alone."""
        for block in self._checked("receive into", blocks, self._is_exclusively_used):
            self._uses[block] = 0
            self._move(block, BlockState.RECEIVING)

    def received(self, blocks: Iterable[int]) -> None:
        """RECEIVING -> USED with one use."""
        for block in self._checked("have received", blocks, self._is_receiving):
            self._uses[block] = 1
            self._move(block, BlockState.USED)

    def quarantine(self, blocks: Iterable[int]) -> None:
        """RECEIVING or QUARANTINED -> QUARANTINED: READs may still write there (I7)."""
        for block in self._checked("quarantine", blocks, self._is_exposed):
            self._move(block, BlockState.QUARANTINED)

    def drained(self, blocks: Iterable[int]) -> None:
        """RECEIVING or QUARANTINED -> FREE: nothing can write to the blocks any more."""
        for block in reversed(self._checked("take back", blocks, self._is_exposed)):
            self._move(block, BlockState.FREE)

    def mark_cached(self, block: int) -> None:
        """The prefix index has an entry for a USED or LEASED block from now on."""
        (block,) = self._checked("mark as cached", (block,), self._is_markable)
        self._cached[block] = True

    def unmark_cached(self, block: int) -> None:
        """The prefix index gave its entry up; a CACHED block becomes FREE."""
        (block,) = self._checked("unmark as cached", (block,), self.is_cached)
        self._cached[block] = False
        self._settle(block)

    def _evict_one(self) -> None:
        block = next(iter(self._evictable))
        self._cached[block] = False
        self._settle(block)
        if self.on_evict is not None:
            self.on_evict(block)

    def _settle(self, block: int) -> None:
        """Brings the state of a block that is in no exclusive state in line with its counts."""
        state = self._derived(block)
        if state is not self._states[block]:
            self._move(block, state)

    def _derived(self, block: int) -> BlockState:
        if self._uses[block]:
            return BlockState.USED
        if self._leases[block]:
            return BlockState.LEASED
        return BlockState.CACHED if self._cached[block] else BlockState.FREE

    def _move(self, block: int, state: BlockState) -> None:
        old = self._states[block]
        if old is BlockState.CACHED:
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
        """The ids as plain ints, or a BlockStateError when one of them may not make this move."""
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
        return self._states[block] in _HOLDS_BYTES

    def _is_receiving(self, block: int) -> bool:
        return self._states[block] is BlockState.RECEIVING

    def _is_exposed(self, block: int) -> bool:
        return self._states[block] in _EXPOSED

    def _is_markable(self, block: int) -> bool:
        return not self._cached[block] and self._holds_bytes(block)

    def _is_exclusively_used(self, block: int) -> bool:
        return (
            self._uses[block] == 1
            and not self._leases[block]
            and not self._cached[block]
        )

    def _describe(self, block: int) -> str:
        return (
            f"block {block} ({self._states[block].name}, uses {self._uses[block]}, leases "
            f"{self._leases[block]}, {'cached' if self._cached[block] else 'not cached'})"
        )

    def check_integrity(self) -> None:
        """Recounts everything.

        Raises:
            IntegrityError: a state contradicts the counts, or a list the states.
        """
        for block in range(self.num_blocks):
            self._check_block(block)
        owned = self._states[NULL_BLOCK + 1 :]
        recount = {state: owned.count(state) for state in BlockState}
        if recount != self.counts():
            raise IntegrityError(f"I1: counted {recount}, recorded {self.counts()}")
        for listed, state in (
            (self._free, BlockState.FREE),
            (self._evictable, BlockState.CACHED),
        ):
            expected = [
                b for b in range(1, self.num_blocks) if self._states[b] is state
            ]
            if sorted(listed) != expected:
                raise IntegrityError(
                    f"I2: {sorted(listed)} are listed as {state.name}: {expected}"
                )

    def _check_block(self, block: int) -> None:
        """The state must follow from the references; exclusive states and block 0 have none."""
        state, free = self._states[block], BlockState.FREE
        expected = free if state in _EXPOSED or block == NULL_BLOCK else state
        is_negative = self._uses[block] < 0 or self._leases[block] < 0
        if is_negative or self._derived(block) is not expected:
            raise IntegrityError(
                f"I2: state contradicts counts: {self._describe(block)}"
            )
