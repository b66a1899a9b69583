"""The block state machine: single cases, then random transitions compared with a
model.
"""

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
from kvcache.pins.soft_pins import OWNER_SHARE
from tests.rigs.examples import examples

FREE = BlockState.FREE
USED = BlockState.USED
CACHED = BlockState.CACHED
LEASED = BlockState.LEASED
RECEIVING = BlockState.RECEIVING
QUARANTINED = BlockState.QUARANTINED


def test_pool_of_only_the_null_block_is_refused():
    with pytest.raises(ValueError, match="num_blocks is 1"):
        BlockAllocator(1)


def test_allocating_too_many_blocks_raises_an_error_with_both_numbers():
    with pytest.raises(OutOfBlocks, match="5 blocks requested, 4 of 4 available"):
        BlockAllocator(5).allocate(5)


def test_new_blocks_are_allocated_in_ascending_order():
    allocator = BlockAllocator(10)
    assert allocator.allocate(4) == [1, 2, 3, 4]
    assert allocator.allocate(3) == [5, 6, 7]


def test_released_blocks_are_reused_before_new_blocks_in_the_order_of_release():
    allocator = BlockAllocator(10)
    allocator.allocate(4)
    allocator.release([3, 1])
    assert allocator.allocate(3) == [3, 1, 5]


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
        lambda a: a._pins._pins.clear(),
        lambda a: a._pins._num_by_owner.update({"a": 1}),
        lambda a: a._pins.pin([1], 60.0, "a"),
        lambda a: a._spared.add(4, a._pins.pin_of(4)),
    ],
)
def test_integrity_check_detects_corrupted_state(corrupt):
    allocator = BlockAllocator(10)
    blocks = allocator.allocate(4)
    allocator.receive([3])
    allocator.mark_cached(4)
    allocator.pin([4], 60.0, "a")
    allocator.release([4])
    assert blocks == [1, 2, 3, 4]
    allocator.check_integrity()
    corrupt(allocator)
    with pytest.raises(IntegrityError):
        allocator.check_integrity()


def cached_blocks(allocator: BlockAllocator, num_blocks: int) -> list[int]:
    """Returns new CACHED blocks. The last block is the first to be evicted."""
    blocks = allocator.allocate(num_blocks)
    for block in blocks:
        allocator.mark_cached(block)
    allocator.release(blocks)
    return blocks


def evicted_blocks(allocator: BlockAllocator) -> list[int]:
    """Evicts all CACHED blocks, and returns them in the order of their eviction."""
    evicted: list[int] = []
    allocator.on_evict = evicted.append
    allocator.allocate(allocator.num_available)
    return evicted


def test_pinned_blocks_are_evicted_last_and_in_the_order_in_which_their_pins_end():
    allocator = BlockAllocator(9)
    blocks = cached_blocks(allocator, 8)
    allocator.pin(blocks[:2], 60.0, "a")
    allocator.pin(blocks[6:], 30.0, "b")
    assert evicted_blocks(allocator) == [6, 5, 4, 3, 8, 7, 2, 1]
    assert allocator.num_pinned_evicted == 4
    assert allocator.num_pinned == 0


def test_block_whose_pin_has_ended_is_evicted_like_a_block_without_a_pin():
    now_s = 0.0
    allocator = BlockAllocator(9, lambda: now_s)
    blocks = cached_blocks(allocator, 4)
    allocator.pin(blocks[2:], 60.0)
    assert 2 in allocator.allocate(5)  # skips the pinned blocks 4 and 3
    assert allocator.num_pinned == 2
    now_s = 61.0
    assert allocator.num_pinned == 0
    assert evicted_blocks(allocator) == [4, 3, 1]
    assert allocator.num_pinned_evicted == 0


def test_owner_pins_at_most_its_share_and_the_end_of_a_prefix_is_refused():
    now_s = 0.0
    allocator = BlockAllocator(9, lambda: now_s)
    blocks = cached_blocks(allocator, 8)
    allocator.pin(blocks[:6], 60.0, "a")
    assert allocator.num_pinned == 4
    assert allocator.num_pins_refused == 2
    allocator.pin(blocks[4:], 60.0, "b")
    assert allocator.num_pinned == 8
    now_s = 30.0
    allocator.pin(blocks[:4], 60.0, "a")  # extends the owner's existing pins
    assert allocator.num_pins_refused == 2
    now_s = 61.0
    assert allocator.num_pinned == 4
    assert evicted_blocks(allocator) == [8, 7, 6, 5, 4, 3, 2, 1]


@dataclass
class ModelBlock:
    """A simple model of one block. It follows docs/design.md, not the code under
    test.
    """

    uses: int = 0
    leases: int = 0
    cached: bool = False
    exclusive: BlockState | None = None
    released_at: int = 0
    owner: str = ""
    pinned_until_s: float = 0.0

    @property
    def state(self) -> BlockState:
        if self.exclusive is not None:
            return self.exclusive
        if self.uses:
            return USED
        if self.leases:
            return LEASED
        return CACHED if self.cached else FREE


def holds_bytes(model_block: ModelBlock) -> bool:
    return model_block.state in (USED, LEASED, CACHED)


def is_exclusive(model_block: ModelBlock) -> bool:
    return (
        model_block.state is USED
        and model_block.uses == 1
        and not model_block.cached
        and not model_block.leases
    )


# A rule has a predicate (is the transition legal for this block?) and the effect on
# ModelBlock: numbers to add to `uses` and `leases`, and new values of other fields.
Rule = tuple[Callable[[ModelBlock], bool], dict[str, Any]]
TRANSITIONS: dict[str, Rule] = {
    "share": (holds_bytes, {"uses": 1}),
    "release": (lambda model_block: model_block.uses > 0, {"uses": -1}),
    "lease": (holds_bytes, {"leases": 1}),
    "end_lease": (lambda model_block: model_block.leases > 0, {"leases": -1}),
    "receive": (is_exclusive, {"uses": -1, "exclusive": RECEIVING}),
    "received": (
        lambda model_block: model_block.state is RECEIVING,
        {"uses": 1, "exclusive": None},
    ),
    "quarantine": (
        lambda model_block: model_block.exclusive is not None,
        {"exclusive": QUARANTINED},
    ),
    "drained": (
        lambda model_block: model_block.exclusive is not None,
        {"exclusive": None},
    ),
}
MARKS: dict[str, Rule] = {
    "mark_cached": (
        lambda model_block: (
            model_block.state in (USED, LEASED) and not model_block.cached
        ),
        {"cached": True},
    ),
    "unmark_cached": (
        lambda model_block: model_block.cached,
        {"cached": False, "pinned_until_s": 0.0},
    ),
}


class AllocatorMachine(RuleBasedStateMachine):
    """Random transitions of random blocks, legal or not, compared with ModelBlock."""

    # Most lists contain one id from 1 to 3, so that many transitions concern the same
    # block. Some ids do not exist.
    single = st.integers(1, 3).map(lambda block: [block])
    ids = single | single | st.lists(st.integers(-1, 13), min_size=1, max_size=5)

    @initialize(num_blocks=st.integers(2, 12))
    def start(self, num_blocks: int) -> None:
        self.now_s = 1.0
        self.num_refused = 0
        self.num_pinned_evicted = 0
        self.allocator = BlockAllocator(num_blocks, lambda: self.now_s)
        self.allocator.on_evict = self.on_evict
        self.model = {block: ModelBlock() for block in range(1, num_blocks)}
        self.clock = 0

    def is_pinned(self, block: int) -> bool:
        return self.model[block].pinned_until_s > self.now_s

    def num_pins(self, owner: str) -> int:
        owned = [b for b, m in self.model.items() if m.owner == owner]
        return sum(map(self.is_pinned, owned))

    def on_evict(self, block: int) -> None:
        """Checks that no other CACHED block had to be evicted before this one."""
        victim = self.model[block]
        assert victim.state is CACHED
        for other_block, other in self.model.items():
            if other.state is not CACHED or other_block == block:
                continue
            if self.is_pinned(block):
                assert self.is_pinned(other_block), "a block without a pin was left"
                assert victim.pinned_until_s <= other.pinned_until_s
            elif not victim.pinned_until_s and not self.is_pinned(other_block):
                assert victim.released_at < other.released_at, "not the oldest block"
        self.num_pinned_evicted += self.is_pinned(block)
        self.model[block] = ModelBlock()

    def apply(
        self,
        transition: Callable[[list[int]], None],
        ids: list[int],
        is_legal: Callable[[ModelBlock], bool],
        effect: dict[str, Any],
    ) -> None:
        """Applies a transition to the allocator and to the model.

        The transition must succeed if every id exists, occurs once and is in a legal
        state, and raise otherwise.
        """
        has_duplicates = len(set(ids)) < len(ids)
        all_legal = all(b in self.model and is_legal(self.model[b]) for b in ids)
        if has_duplicates or not all_legal:
            with pytest.raises(BlockStateError):
                transition(ids)
            return
        transition(ids)
        for block in reversed(ids):
            self.clock += 1
            model_block = self.model[block]
            previous = model_block.state
            for name, value in effect.items():
                is_count = name in ("uses", "leases")
                setattr(
                    model_block,
                    name,
                    getattr(model_block, name) + value if is_count else value,
                )
            if previous is not CACHED and model_block.state is CACHED:
                model_block.released_at = self.clock

    @rule(n=st.integers(0, 12))
    def allocate(self, n: int) -> None:
        counts = Counter(model_block.state for model_block in self.model.values())
        num_available = counts[FREE] + counts[CACHED]
        assert self.allocator.can_allocate(n) == (n <= num_available)
        if n > num_available:
            with pytest.raises(OutOfBlocks):
                self.allocator.allocate(n)
            assert counts[CACHED] == self.allocator.counts()[CACHED]
            return
        allocated = self.allocator.allocate(n)  # calls `on_evict` for each eviction
        num_evicted = counts[CACHED] - self.allocator.counts()[CACHED]
        assert num_evicted == max(0, n - counts[FREE])
        assert len(set(allocated)) == n
        for block in allocated:
            assert self.model[block].state is FREE
            self.model[block] = ModelBlock(uses=1)

    @rule(ids=ids, seconds=st.integers(1, 9), owner=st.sampled_from(["a", "b"]))
    def pin(self, ids: list[int], seconds: int, owner: str) -> None:
        is_legal = all(b in self.model and self.model[b].cached for b in ids)
        if len(set(ids)) < len(ids) or not is_legal:
            with pytest.raises(BlockStateError):
                self.allocator.pin(ids, seconds, owner)
            return
        self.allocator.pin(ids, seconds, owner)
        for block in ids:
            model_block = self.model[block]
            is_extended = self.is_pinned(block) and model_block.owner == owner
            if self.is_pinned(block) and (
                model_block.pinned_until_s >= self.now_s + seconds
            ):
                continue
            if is_extended or self.num_pins(owner) < int(len(self.model) * OWNER_SHARE):
                model_block.owner = owner
                model_block.pinned_until_s = self.now_s + seconds
            else:
                self.num_refused += 1

    @rule(seconds=st.integers(1, 9))
    def wait(self, seconds: int) -> None:
        self.now_s += seconds

    @rule(
        names=st.lists(st.sampled_from(sorted(TRANSITIONS)), min_size=1, max_size=4),
        ids=ids,
    )
    def transition(self, names: list[str], ids: list[int]) -> None:
        for name in names:
            self.apply(getattr(self.allocator, name), ids, *TRANSITIONS[name])

    @rule(
        name=st.sampled_from(sorted(MARKS)),
        block=st.integers(1, 3) | st.integers(-1, 13),
    )
    def mark(self, name: str, block: int) -> None:
        mark = getattr(self.allocator, name)
        if name == "unmark_cached" and block in self.model:
            is_lost = self.model[block].state is CACHED and self.is_pinned(block)
            self.num_pinned_evicted += is_lost
        self.apply(lambda ids: mark(ids[0]), [block], *MARKS[name])

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.allocator.check_integrity()
        for block, expected in self.model.items():
            assert self.allocator.state(block) is expected.state
            assert self.allocator.is_cached(block) == expected.cached
            if expected.exclusive is None:
                message = f"uses {expected.uses}, leases {expected.leases}, "
                with pytest.raises(BlockStateError, match=message):
                    self.allocator.drained([block])
        counts = Counter(model_block.state for model_block in self.model.values())
        assert self.allocator.counts() == {s: counts[s] for s in BlockState}
        assert sum(self.allocator.counts().values()) == self.allocator.capacity
        assert self.allocator.num_available == counts[FREE] + counts[CACHED]
        assert self.allocator.num_pinned == sum(map(self.is_pinned, self.model))
        assert self.allocator.num_pins_refused == self.num_refused
        assert self.allocator.num_pinned_evicted == self.num_pinned_evicted


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = examples(150, stateful_step_count=50)
