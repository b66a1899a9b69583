"""The block state machine: every move by hand, then against a naive model, at random."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvcache.blocks import (
    BlockAllocator,
    BlockState,
    BlockStateError,
    IntegrityError,
    OutOfBlocks,
)
from tests.rigs.examples import examples

FREE, USED, CACHED = BlockState.FREE, BlockState.USED, BlockState.CACHED
LEASED, RECEIVING, QUARANTINED = (
    BlockState.LEASED,
    BlockState.RECEIVING,
    BlockState.QUARANTINED,
)


def test_a_pool_has_a_block_beside_the_null_block():
    with pytest.raises(ValueError, match="num_blocks is 1"):
        BlockAllocator(1)


def test_what_is_too_much_is_refused_with_both_numbers():
    with pytest.raises(OutOfBlocks, match="5 blocks wanted, 4 of 4 available"):
        BlockAllocator(5).allocate(5)


def test_fresh_and_released_blocks_come_out_in_ascending_runs():
    allocator = BlockAllocator(10)
    first, second = allocator.allocate(4), allocator.allocate(3)
    assert (first, second) == ([1, 2, 3, 4], [5, 6, 7])
    allocator.release(first)
    assert allocator.allocate(4) == first


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda a: a._uses.__setitem__(1, 0),
        lambda a: a._leases.__setitem__(2, -1),
        lambda a: a._uses.__setitem__(0, 1),
        lambda a: a._free.append(a._free[0]),
        lambda a: a._free.pop(),
        lambda a: a._cached.__setitem__(3, True),
        lambda a: a._counts.__setitem__(0, 99),
        lambda a: a._evictable.clear(),
    ],
)
def test_integrity_check_sees_corrupted_books(corrupt):
    allocator = BlockAllocator(10)
    blocks = allocator.allocate(4)
    allocator.receive([3])
    allocator.mark_cached(4)
    allocator.release([4])
    assert blocks == [1, 2, 3, 4]
    allocator.check_integrity()
    corrupt(allocator)
    with pytest.raises(IntegrityError):
        allocator.check_integrity()


@dataclass
class ModelBlock:
    """The naive model of one block, written from DESIGN section 5 and not from the code."""

    uses: int = 0
    leases: int = 0
    cached: bool = False
    exclusive: BlockState | None = None
    released_at: int = 0

    @property
    def state(self) -> BlockState:
        if self.exclusive is not None:
            return self.exclusive
        if self.uses:
            return USED
        if self.leases:
            return LEASED
        return CACHED if self.cached else FREE


def holds_bytes(m: ModelBlock) -> bool:
    return m.state in (USED, LEASED, CACHED)


def is_exclusive(m: ModelBlock) -> bool:
    return m.state is USED and m.uses == 1 and not m.cached and not m.leases


# When a move is legal, and its effect: values to set, or to add to counts.
Rule = tuple[Callable[[ModelBlock], bool], dict[str, Any]]
MOVES: dict[str, Rule] = {
    "share": (holds_bytes, {"uses": 1}),
    "release": (lambda m: m.uses > 0, {"uses": -1}),
    "lease": (holds_bytes, {"leases": 1}),
    "end_lease": (lambda m: m.leases > 0, {"leases": -1}),
    "receive": (is_exclusive, {"uses": -1, "exclusive": RECEIVING}),
    "received": (lambda m: m.state is RECEIVING, {"uses": 1, "exclusive": None}),
    "quarantine": (lambda m: m.exclusive is not None, {"exclusive": QUARANTINED}),
    "drained": (lambda m: m.exclusive is not None, {"exclusive": None}),
}
MARKS: dict[str, Rule] = {
    "mark_cached": (
        lambda m: m.state in (USED, LEASED) and not m.cached,
        {"cached": True},
    ),
    "unmark_cached": (lambda m: m.cached, {"cached": False}),
}


class AllocatorMachine(RuleBasedStateMachine):
    """Random moves on random lists of ids, legal or not, beside the naive model."""

    one = st.integers(1, 3).map(lambda block: [block])  # often, so that moves meet
    ids = one | one | st.lists(st.integers(-1, 13), min_size=1, max_size=5)

    @initialize(num_blocks=st.integers(2, 12))
    def start(self, num_blocks: int) -> None:
        self.evicted: list[int] = []
        self.allocator = BlockAllocator(num_blocks)
        self.allocator.on_evict = self.evicted.append
        self.model = {block: ModelBlock() for block in range(1, num_blocks)}
        self.clock = 0

    def apply(
        self,
        move: Callable[[list[int]], None],
        ids: list[int],
        legal: Callable[[ModelBlock], bool],
        effect: dict[str, Any],
    ) -> None:
        """The move must succeed exactly if every id is known, single and in a legal state."""
        if len(set(ids)) < len(ids) or not all(
            b in self.model and legal(self.model[b]) for b in ids
        ):
            with pytest.raises(BlockStateError):
                move(ids)
            return
        move(ids)
        for block in reversed(ids):
            self.clock += 1
            m, was = self.model[block], self.model[block].state
            for name, value in effect.items():
                is_count = name in ("uses", "leases")
                setattr(m, name, getattr(m, name) + value if is_count else value)
            if was is not CACHED and m.state is CACHED:
                m.released_at = self.clock

    @rule(n=st.integers(0, 12))
    def allocate(self, n: int) -> None:
        free = {b for b, m in self.model.items() if m.state is FREE}
        cached = [b for b, m in self.model.items() if m.state is CACHED]
        cached.sort(key=lambda b: self.model[b].released_at)
        self.evicted.clear()
        assert self.allocator.can_allocate(n) == (n <= len(free) + len(cached))
        if n > len(free) + len(cached):
            with pytest.raises(OutOfBlocks):
                self.allocator.allocate(n)
            assert not self.evicted
            return
        evicted = cached[: max(0, n - len(free))]
        taken = self.allocator.allocate(n)
        assert self.evicted == evicted
        assert len(set(taken)) == n and set(taken) <= free | set(evicted)
        for block in evicted:
            self.model[block] = ModelBlock()
        for block in taken:
            self.model[block] = ModelBlock(uses=1)

    @rule(
        moves=st.lists(st.sampled_from(sorted(MOVES)), min_size=1, max_size=4), ids=ids
    )
    def move(self, moves: list[str], ids: list[int]) -> None:
        for move in moves:
            self.apply(getattr(self.allocator, move), ids, *MOVES[move])

    @rule(
        move=st.sampled_from(sorted(MARKS)),
        block=st.integers(1, 3) | st.integers(-1, 13),
    )
    def mark(self, move: str, block: int) -> None:
        marked = getattr(self.allocator, move)
        self.apply(lambda ids: marked(ids[0]), [block], *MARKS[move])

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.allocator.check_integrity()
        for block, expected in self.model.items():
            assert self.allocator.state(block) is expected.state
            assert self.allocator.is_cached(block) == expected.cached
            if expected.exclusive is None:
                told = f"uses {expected.uses}, leases {expected.leases}, "
                with pytest.raises(BlockStateError, match=told):
                    self.allocator.drained([block])
        counts = Counter(m.state for m in self.model.values())
        assert self.allocator.counts() == {s: counts[s] for s in BlockState}
        assert sum(self.allocator.counts().values()) == self.allocator.capacity
        assert self.allocator.num_available == counts[FREE] + counts[CACHED]


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = examples(150, stateful_step_count=50)
