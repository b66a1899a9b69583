"""The block state machine: every move by hand, then against a naive model, at random."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvcache.blocks import (
    BlockAllocator,
    BlockState,
    BlockStateError,
    IntegrityError,
    OutOfBlocks,
)

FREE, USED, CACHED = BlockState.FREE, BlockState.USED, BlockState.CACHED
LEASED, RECEIVING, QUARANTINED = BlockState.LEASED, BlockState.RECEIVING, BlockState.QUARANTINED


def cached_allocator(num_blocks: int) -> tuple[BlockAllocator, list[int], list[int]]:
    """All blocks of the allocator CACHED, allocated and released as one sequence."""
    evicted: list[int] = []
    allocator = BlockAllocator(num_blocks, evicted.append)
    blocks = allocator.allocate(num_blocks - 1)
    for block in blocks:
        allocator.mark_cached(block)
    allocator.release(blocks)
    return allocator, blocks, evicted


def test_the_null_block_is_never_allocated_and_no_move_takes_it() -> None:
    allocator = BlockAllocator(4)
    assert allocator.capacity == allocator.num_available == 3
    assert sorted(allocator.allocate(3)) == [1, 2, 3]
    for move in (allocator.share, allocator.release, allocator.lease, allocator.receive):
        with pytest.raises(BlockStateError, match="block 0"):
            move([0])
    with pytest.raises(ValueError, match="num_blocks is 1"):
        BlockAllocator(1)


def test_allocation_beyond_capacity_takes_and_evicts_nothing() -> None:
    allocator, _blocks, evicted = cached_allocator(5)
    assert allocator.can_allocate(4) and not allocator.can_allocate(5)
    with pytest.raises(OutOfBlocks, match="5 blocks wanted, 4 of 4"):
        allocator.allocate(5)
    assert not evicted and allocator.counts()[CACHED] == 4
    assert allocator.allocate(0) == []


def test_fresh_and_released_blocks_come_out_in_ascending_runs() -> None:
    allocator = BlockAllocator(10)
    first = allocator.allocate(4)
    second = allocator.allocate(3)
    assert (first, second) == ([1, 2, 3, 4], [5, 6, 7])
    allocator.release(first)
    assert allocator.allocate(4) == [1, 2, 3, 4]


def test_free_blocks_are_taken_before_anything_is_evicted() -> None:
    evicted: list[int] = []
    allocator = BlockAllocator(5, evicted.append)
    cached = allocator.allocate(2)
    for block in cached:
        allocator.mark_cached(block)
    allocator.release(cached)
    allocator.allocate(2)
    assert not evicted
    allocator.allocate(1)
    assert evicted == [cached[-1]]


def test_eviction_takes_the_least_recently_released_and_a_tail_before_its_head() -> None:
    allocator, blocks, evicted = cached_allocator(7)
    head = blocks[:2]
    allocator.share(head)
    allocator.release(head)  # the head is now more recently used than the rest
    allocator.allocate(6)
    assert evicted == [*reversed(blocks[2:]), *reversed(head)]


def test_a_leased_block_outlives_its_sequence_and_falls_to_cached_or_free() -> None:
    allocator = BlockAllocator(4)
    kept, plain = allocator.allocate(2)
    allocator.mark_cached(kept)
    allocator.lease([kept, plain])
    allocator.lease([kept])
    allocator.release([kept, plain])
    assert allocator.state(kept) is allocator.state(plain) is LEASED
    assert allocator.num_available == 1
    allocator.end_lease([kept, plain])
    assert allocator.state(kept) is LEASED and allocator.state(plain) is FREE
    allocator.end_lease([kept])
    assert allocator.state(kept) is CACHED
    allocator.check_integrity()


def test_a_leased_block_can_be_shared_by_a_new_sequence() -> None:
    allocator = BlockAllocator(3)
    (block,) = allocator.allocate(1)
    allocator.lease([block])
    allocator.release([block])
    allocator.share([block])
    allocator.end_lease([block])
    assert allocator.state(block) is USED and allocator.num_uses(block) == 1


def test_can_allocate_counts_what_sharing_takes_away() -> None:
    allocator, blocks, _evicted = cached_allocator(5)
    assert allocator.can_allocate(2, sharing=blocks[:2])
    assert not allocator.can_allocate(3, sharing=blocks[:2])
    allocator.share(blocks[:2])
    assert allocator.can_allocate(2, sharing=blocks[:2])  # already used: takes nothing away
    assert not allocator.can_allocate(3)


def test_the_life_of_a_received_block() -> None:
    allocator = BlockAllocator(8)
    good, cancelled, late = allocator.allocate(3)
    allocator.receive([good, cancelled, late])
    assert allocator.counts()[RECEIVING] == 3 and allocator.num_available == 4
    allocator.received([good])
    assert allocator.state(good) is USED and allocator.num_uses(good) == 1
    allocator.cancel_receive([cancelled])
    assert allocator.state(cancelled) is FREE
    allocator.quarantine([late])
    assert allocator.state(late) is QUARANTINED and allocator.num_available == 5
    allocator.unquarantine([late])
    assert allocator.state(late) is FREE
    allocator.check_integrity()


def blocks_in_every_state() -> tuple[BlockAllocator, dict[str, int]]:
    allocator = BlockAllocator(20)
    names = ["free", "used", "twice", "used_cached", "used_leased", "cached", "leased"]
    names += ["receiving", "quarantined"]
    at = dict(zip(names, allocator.allocate(len(names)), strict=True))
    allocator.share([at["twice"]])
    for name in ("used_cached", "cached"):
        allocator.mark_cached(at[name])
    allocator.lease([at["used_leased"], at["leased"]])
    allocator.release([at["free"], at["cached"], at["leased"]])
    allocator.receive([at["receiving"], at["quarantined"]])
    allocator.quarantine([at["quarantined"]])
    return allocator, at


ILLEGAL = {
    "share": ["free", "receiving", "quarantined"],
    "release": ["free", "cached", "leased", "receiving", "quarantined"],
    "lease": ["free", "receiving", "quarantined"],
    "end_lease": ["free", "used", "cached", "receiving", "quarantined"],
    "receive": ["free", "twice", "used_cached", "used_leased", "cached", "leased", "receiving"],
    "received": ["free", "used", "cached", "leased", "quarantined"],
    "cancel_receive": ["free", "used", "cached", "leased", "quarantined"],
    "quarantine": ["free", "used", "cached", "leased", "quarantined"],
    "unquarantine": ["free", "used", "cached", "leased", "receiving"],
}
LEGAL = {
    "share": "used",
    "release": "used",
    "lease": "used",
    "end_lease": "leased",
    "receive": "used",
    "received": "receiving",
    "cancel_receive": "receiving",
    "quarantine": "receiving",
    "unquarantine": "quarantined",
}


def snapshot(allocator: BlockAllocator) -> list[tuple[BlockState, int, int, bool]]:
    return [
        (allocator.state(b), allocator.num_uses(b), allocator.num_leases(b), allocator.is_cached(b))
        for b in range(allocator.num_blocks)
    ]


@pytest.mark.parametrize(("move", "name"), [(m, n) for m in ILLEGAL for n in ILLEGAL[m]])
def test_an_illegal_move_raises_and_changes_nothing_of_the_whole_list(move: str, name: str) -> None:
    allocator, at = blocks_in_every_state()
    before = snapshot(allocator)
    legal_first = [at[LEGAL[move]], at[name]]
    with pytest.raises(BlockStateError, match=f"block {at[name]} "):
        getattr(allocator, move)(legal_first)
    assert snapshot(allocator) == before
    allocator.check_integrity()


@pytest.mark.parametrize("move", sorted(LEGAL))
@pytest.mark.parametrize("extra", ["twice", "beyond", "negative"])
def test_repeated_and_unknown_ids_raise_before_any_change(move: str, extra: str) -> None:
    allocator, at = blocks_in_every_state()
    before = snapshot(allocator)
    block = at[LEGAL[move]]
    with pytest.raises(BlockStateError):
        getattr(allocator, move)([block, {"twice": block, "beyond": 20, "negative": -1}[extra]])
    assert snapshot(allocator) == before


@pytest.mark.parametrize("name", ["free", "cached", "used_cached", "receiving", "quarantined"])
def test_only_an_unmarked_block_in_use_or_leased_can_be_marked(name: str) -> None:
    allocator, at = blocks_in_every_state()
    with pytest.raises(BlockStateError):
        allocator.mark_cached(at[name])


def test_unmarking_frees_a_cached_block_and_leaves_a_used_one_used() -> None:
    allocator, at = blocks_in_every_state()
    allocator.unmark_cached(at["cached"])
    allocator.unmark_cached(at["used_cached"])
    assert allocator.state(at["cached"]) is FREE and allocator.state(at["used_cached"]) is USED
    with pytest.raises(BlockStateError):
        allocator.unmark_cached(at["used"])
    allocator.check_integrity()


def test_eviction_may_unmark_other_blocks_from_inside_the_callback() -> None:
    allocator, blocks, evicted = cached_allocator(5)

    def drop_all(block: int) -> None:
        evicted.append(block)
        for other in blocks:
            if allocator.is_cached(other):
                allocator.unmark_cached(other)

    allocator.on_evict = drop_all
    assert sorted(allocator.allocate(4)) == sorted(blocks)
    assert evicted == [blocks[-1]]
    allocator.check_integrity()


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
def test_integrity_check_sees_corrupted_books(corrupt: Callable[[BlockAllocator], object]) -> None:
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


class AllocatorMachine(RuleBasedStateMachine):
    """Random moves on random lists of ids, legal or not, beside the naive model."""

    ids = st.lists(st.integers(-1, 13), min_size=1, max_size=5)

    @initialize(num_blocks=st.integers(2, 12))
    def start(self, num_blocks: int) -> None:
        self.evicted: list[int] = []
        self.allocator = BlockAllocator(num_blocks, self.evicted.append)
        self.model = {block: ModelBlock() for block in range(1, num_blocks)}
        self.clock = 0

    def apply(
        self,
        move: Callable[[list[int]], None],
        ids: list[int],
        legal: Callable[[ModelBlock], bool],
        change: Callable[[ModelBlock], None],
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
            was = self.model[block].state
            change(self.model[block])
            if was is not CACHED and self.model[block].state is CACHED:
                self.model[block].released_at = self.clock

    @rule(n=st.integers(0, 12))
    def allocate(self, n: int) -> None:
        free = {b for b, m in self.model.items() if m.state is FREE}
        cached = [b for b, m in self.model.items() if m.state is CACHED]
        cached.sort(key=lambda b: self.model[b].released_at)
        self.evicted.clear()
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

    @rule(ids=ids)
    def share(self, ids: list[int]) -> None:
        def change(m: ModelBlock) -> None:
            m.uses += 1

        self.apply(self.allocator.share, ids, lambda m: m.state in (USED, LEASED, CACHED), change)

    @rule(ids=ids)
    def release(self, ids: list[int]) -> None:
        def change(m: ModelBlock) -> None:
            m.uses -= 1

        self.apply(self.allocator.release, ids, lambda m: m.uses > 0, change)

    @rule(ids=ids)
    def lease(self, ids: list[int]) -> None:
        def change(m: ModelBlock) -> None:
            m.leases += 1

        self.apply(self.allocator.lease, ids, lambda m: m.state in (USED, LEASED, CACHED), change)

    @rule(ids=ids)
    def end_lease(self, ids: list[int]) -> None:
        def change(m: ModelBlock) -> None:
            m.leases -= 1

        self.apply(self.allocator.end_lease, ids, lambda m: m.leases > 0, change)

    @rule(ids=ids)
    def receive(self, ids: list[int]) -> None:
        def change(m: ModelBlock) -> None:
            m.uses, m.exclusive = 0, RECEIVING

        self.apply(
            self.allocator.receive,
            ids,
            lambda m: m.state is USED and m.uses == 1 and not m.cached and not m.leases,
            change,
        )

    @rule(ids=ids)
    def received(self, ids: list[int]) -> None:
        def change(m: ModelBlock) -> None:
            m.uses, m.exclusive = 1, None

        self.apply(self.allocator.received, ids, lambda m: m.state is RECEIVING, change)

    @rule(ids=ids, quarantined=st.booleans())
    def end_receive(self, ids: list[int], quarantined: bool) -> None:
        def change(m: ModelBlock) -> None:
            m.exclusive = None

        state, move = RECEIVING, self.allocator.cancel_receive
        if quarantined:
            state, move = QUARANTINED, self.allocator.unquarantine
        self.apply(move, ids, lambda m: m.state is state, change)

    @rule(ids=ids)
    def quarantine(self, ids: list[int]) -> None:
        def change(m: ModelBlock) -> None:
            m.exclusive = QUARANTINED

        self.apply(self.allocator.quarantine, ids, lambda m: m.state is RECEIVING, change)

    @rule(block=st.integers(-1, 13))
    def mark(self, block: int) -> None:
        def change(m: ModelBlock) -> None:
            m.cached = True

        self.apply(
            lambda ids: self.allocator.mark_cached(ids[0]),
            [block],
            lambda m: m.state in (USED, LEASED) and not m.cached,
            change,
        )

    @rule(block=st.integers(-1, 13))
    def unmark(self, block: int) -> None:
        def change(m: ModelBlock) -> None:
            m.cached = False

        self.apply(
            lambda ids: self.allocator.unmark_cached(ids[0]), [block], lambda m: m.cached, change
        )

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.allocator.check_integrity()
        for block, expected in self.model.items():
            assert self.allocator.state(block) is expected.state
            assert self.allocator.num_uses(block) == expected.uses
            assert self.allocator.num_leases(block) == expected.leases
            assert self.allocator.is_cached(block) == expected.cached
        counts = Counter(m.state for m in self.model.values())
        assert self.allocator.counts() == {s: counts[s] for s in BlockState}
        assert sum(self.allocator.counts().values()) == self.allocator.capacity
        assert self.allocator.num_available == counts[FREE] + counts[CACHED]


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)
