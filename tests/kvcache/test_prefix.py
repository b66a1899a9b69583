"""The prefix index finds the longest prefix with equal tokens, and never returns
evicted blocks.
"""

from collections.abc import Sequence

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from kvcache.blocks import BlockAllocator, BlockStateError, IntegrityError
from kvcache.groups import KVGroups, without_null_blocks
from kvcache.prefix import PrefixCursor, PrefixIndex
from tests.rigs.examples import examples

BLOCK = 4


def make(num_blocks: int = 20) -> tuple[BlockAllocator, PrefixIndex]:
    allocator = BlockAllocator(num_blocks)
    return allocator, PrefixIndex(allocator, BLOCK)


def published(index: PrefixIndex, tokens: list[int]) -> list[int]:
    blocks = index.allocator.allocate(len(tokens) // BLOCK)
    index.publish(tokens, blocks, cursor=PrefixCursor())
    return blocks


def test_second_sequence_publishes_its_blocks_after_those_of_the_first_are_evicted():
    allocator, index = make(10)
    tokens = list(range(16))
    cursor = PrefixCursor()
    first_blocks = published(index, tokens[:8])
    second_blocks = allocator.allocate(4)
    index.publish(tokens, second_blocks[:3], cursor=cursor)
    assert index.match(tokens) == [*first_blocks, second_blocks[2]]
    assert not allocator.is_cached(second_blocks[0])
    allocator.release(first_blocks)
    allocator.allocate(allocator.num_available)
    assert not index.match(tokens)
    assert not allocator.is_cached(second_blocks[2]), (
        "still cached although its parent was evicted"
    )
    index.publish(tokens, second_blocks, cursor=cursor)
    assert index.match(tokens) == second_blocks
    index.check_integrity()


def test_receiving_block_cannot_be_published_or_matched():
    allocator, index = make()
    tokens = list(range(8))
    blocks = allocator.allocate(2)
    allocator.receive(blocks)
    with pytest.raises(BlockStateError):
        index.publish(tokens, blocks, cursor=PrefixCursor())
    assert index.match(tokens) == []
    allocator.received(blocks)
    index.publish(tokens, blocks, cursor=PrefixCursor())
    assert index.match(tokens) == blocks


def test_pinned_prefix_is_found_after_all_other_blocks_were_evicted():
    allocator, index = make(10)
    tokens = list(range(20))
    blocks = published(index, tokens)
    other_blocks = published(index, list(range(50, 66)))
    allocator.release(blocks)
    allocator.release(other_blocks)
    index.pin(tokens, 10, 60.0)  # two full blocks
    assert allocator.num_pinned == 2
    allocator.allocate(7)
    assert index.match(tokens) == blocks[:2]
    allocator.allocate(1)  # only pinned blocks are left: evicts the prefix's last block
    assert index.match(tokens) == blocks[:1]
    index.check_integrity()


def test_pin_counts_only_for_the_published_block_of_the_same_salt():
    allocator, index = make()
    tokens = list(range(8))
    published(index, tokens)
    index.pin(tokens, 8, 60.0, salt=b"salt")
    assert allocator.num_pinned == 0
    duplicates = allocator.allocate(2)
    cursor = PrefixCursor()
    index.publish(tokens, duplicates, cursor=cursor)
    index.pin(tokens, 8, 60.0, cursor=cursor)
    assert allocator.num_pinned == 2
    allocator.release(duplicates)
    allocator.check_integrity()


def test_only_the_window_that_a_hit_needs_is_pinned():
    allocator = BlockAllocator(20)
    index = PrefixIndex(allocator, BLOCK, KVGroups((None, 4)))
    tokens = list(range(16))
    index.publish(tokens, allocator.allocate(8), cursor=PrefixCursor())
    index.pin(tokens, 16, 60.0)
    # Four blocks of the first group, and the last block of the second group, which has
    # a window of 4 tokens.
    assert allocator.num_pinned == 5
    index.check_integrity()


@pytest.mark.parametrize("tokens", [[], list(range(7)), list(range(50, 58))])
def test_published_block_cannot_be_published_for_other_tokens(tokens):
    _, index = make()
    blocks = published(index, list(range(8)))
    with pytest.raises(BlockStateError, match="cannot"):
        index.publish(tokens, blocks, cursor=PrefixCursor())
    index.check_integrity()


def test_integrity_check_detects_marks_that_differ_from_entries():
    allocator, index = make()
    (block,) = allocator.allocate(1)
    allocator.mark_cached(block)
    with pytest.raises(IntegrityError, match=f"{block}"):
        index.check_integrity()
    allocator.unmark_cached(block)
    published(index, list(range(8)))
    index._root.children.clear()
    with pytest.raises(IntegrityError):
        index.check_integrity()


class RunningSequence:
    """The state that an engine stores for a running sequence."""

    def __init__(
        self, tokens: list[int], salt: bytes, blocks: list[int], num_published: int
    ) -> None:
        self.tokens = tokens
        self.salt = salt
        self.blocks = blocks
        self.num_published = num_published
        self.cursor = PrefixCursor()


class LookUpMachine(RuleBasedStateMachine):
    """Waiting sequences are looked up repeatedly, for varying numbers of tokens."""

    waiting = Bundle("waiting")
    # There are only two different token ids, so that prefixes often recur and diverge.
    tokens = st.lists(st.integers(0, 1), min_size=1, max_size=14)
    # One salt is a prefix of another salt, and one salt equals the bytes of a token id.
    salts = st.sampled_from([b"", b"salt", b"salted", bytes(8)])
    now_s = 0.0

    @rule(target=waiting, tokens=tokens, salt=salts)
    def wait(self, tokens: list[int], salt: bytes) -> object:
        return tokens, salt, PrefixCursor()

    @rule(sequence=waiting, limit=st.integers(0, 14))
    def look_up(
        self, sequence: tuple[list[int], bytes, PrefixCursor], limit: int
    ) -> None:
        tokens, salt, cursor = sequence
        table = self.index.match(tokens, max_tokens=limit, cursor=cursor, salt=salt)
        assert table == self.expected(tokens, min(limit, len(tokens)), salt)

    @rule(
        sequence=waiting,
        num_tokens=st.integers(0, 14),
        seconds=st.integers(1, 9),
        owner=st.sampled_from(["a", "b"]),
    )
    def pin(
        self,
        sequence: tuple[list[int], bytes, PrefixCursor],
        num_tokens: int,
        seconds: int,
        owner: str,
    ) -> None:
        tokens, salt, cursor = sequence
        node = cursor.node
        self.index.pin(
            tokens, num_tokens, seconds, owner=owner, cursor=cursor, salt=salt
        )
        assert cursor.node is node

    @rule(seconds=st.integers(1, 9))
    def skip(self, seconds: int) -> None:
        self.now_s += seconds

    @invariant()
    def integrity(self) -> None:
        self.allocator.check_integrity()
        self.index.check_integrity()


class PrefixMachine(LookUpMachine):
    """Random sequences arrive, grow, publish blocks, lease them and end. The pool is so
    small that it often evicts blocks.

    `content` records, for each block, the salt and all tokens up to the block's end, as
    of the last write. `expected` finds the longest published prefix in `content` by
    brute force.
    """

    index_type = PrefixIndex
    sequences = Bundle("sequences")
    leases = Bundle("leases")
    tokens = LookUpMachine.tokens

    @initialize(num_blocks=st.integers(4, 14), block_size=st.integers(1, 3))
    def start(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.allocator = BlockAllocator(num_blocks, lambda: self.now_s)
        self.index = self.index_type(self.allocator, block_size)
        self.content: dict[int, tuple[bytes, tuple[int, ...]]] = {}

    def cached_contents(self) -> dict[tuple[bytes, tuple[int, ...]], int]:
        marked = [b for b in self.content if self.allocator.is_cached(b)]
        by_content = {self.content[block]: block for block in marked}
        assert len(by_content) == len(marked), "two cached blocks have the same content"
        return by_content

    def expected(self, tokens: list[int], limit: int, salt: bytes) -> list[int]:
        """Returns the blocks of the longest cached prefix. The recorded content of each
        block must equal the salt and the tokens up to the block's end.
        """
        cached = self.cached_contents()
        blocks: list[int] = []
        max_stop = min(limit, len(tokens))
        for stop in range(self.block_size, max_stop + 1, self.block_size):
            content = (salt, tuple(tokens[:stop]))
            if content not in cached:
                break
            blocks.append(cached[content])
        return blocks

    @rule(target=sequences, tokens=tokens, salt=LookUpMachine.salts)
    def admit(self, tokens: list[int], salt: bytes) -> object:
        limit = len(tokens) - 1
        hits = self.index.match(tokens, max_tokens=limit, salt=salt)
        assert hits == self.expected(tokens, limit, salt)
        for index, block in enumerate(hits):
            prefix = tuple(tokens[: (index + 1) * self.block_size])
            assert self.content[block] == (salt, prefix)
        num_missing = -(-len(tokens) // self.block_size) - len(hits)
        self.allocator.share(hits)
        if not self.allocator.can_allocate(num_missing):
            self.allocator.release(hits)
            return multiple()
        blocks = hits + self.allocator.allocate(num_missing)
        sequence = RunningSequence(tokens, salt, blocks, len(hits))
        self.write(sequence, len(hits))
        return sequence

    def write(self, sequence: RunningSequence, first: int) -> None:
        """Records the content of a sequence's blocks, from index `first` on."""
        for index in range(first, len(sequence.blocks)):
            prefix = tuple(sequence.tokens[: (index + 1) * self.block_size])
            self.content[sequence.blocks[index]] = sequence.salt, prefix

    @rule(sequence=sequences, num_blocks=st.integers(0, 14), from_start=st.booleans())
    def publish(
        self, sequence: RunningSequence, num_blocks: int, from_start: bool
    ) -> None:
        if from_start:
            sequence.cursor = PrefixCursor()
        num_full = len(sequence.tokens) // self.block_size
        num_published = min(num_full, sequence.num_published + num_blocks)
        salt = sequence.salt
        blocks = sequence.blocks[:num_published]
        self.index.publish(sequence.tokens, blocks, cursor=sequence.cursor, salt=salt)
        sequence.num_published = num_published
        # All blocks that were just published must be found.
        assert len(self.index.match(sequence.tokens, salt=salt)) >= num_published

    @rule(sequence=sequences, more=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def grow(self, sequence: RunningSequence, more: list[int]) -> None:
        tokens = sequence.tokens + more
        num_missing = -(-len(tokens) // self.block_size) - len(sequence.blocks)
        if not self.allocator.can_allocate(num_missing):
            return
        sequence.tokens = tokens
        sequence.blocks = sequence.blocks + self.allocator.allocate(num_missing)
        self.write(sequence, sequence.num_published)

    @rule(target=leases, sequence=consumes(sequences), is_leased=st.booleans())
    def finish(self, sequence: RunningSequence, is_leased: bool) -> object:
        if is_leased:
            self.allocator.lease(sequence.blocks)
        self.allocator.release(sequence.blocks)
        return sequence.blocks if is_leased else multiple()

    @rule(blocks=consumes(leases))
    def end_lease(self, blocks: list[int]) -> None:
        self.allocator.end_lease(blocks)

    @rule(clears=st.sampled_from([False] * 9 + [True]))
    def clear(self, clears: bool) -> None:
        if clears:
            self.clear_index()

    def clear_index(self) -> None:
        self.index._remove_descendants(self.index._root)
        all_blocks = range(self.allocator.num_blocks)
        assert not any(map(self.allocator.is_cached, all_blocks))

    def teardown(self) -> None:
        if hasattr(self, "index"):
            self.clear_index()
            self.allocator.check_integrity()


class SameHash(bytes):
    """A key with the same hash as all other keys, so that all keys collide in a hash
    table.
    """

    def __hash__(self) -> int:
        return 1


class CollidingIndex(PrefixIndex):
    def _key(self, token_ids: Sequence[int], index: int, salt: bytes) -> bytes:
        return SameHash(super()._key(token_ids, index, salt))


class CollidingMachine(PrefixMachine):
    """PrefixMachine with colliding keys: the index must compare the tokens too."""

    index_type = CollidingIndex


MACHINE_SETTINGS = examples(60, stateful_step_count=40)
TestPrefixMachine = PrefixMachine.TestCase
TestPrefixMachine.settings = MACHINE_SETTINGS
TestCollidingMachine = CollidingMachine.TestCase
TestCollidingMachine.settings = MACHINE_SETTINGS


class WindowMachine(LookUpMachine):
    """Random sequences with several KV groups, which drop blocks before their windows.

    A hit is the longest prefix for which all blocks that the next token needs are
    cached. The hit's table has only these blocks. `expected` finds the table by brute
    force.
    """

    tokens = LookUpMachine.tokens

    @initialize(
        num_blocks=st.integers(8, 30),
        size=st.integers(1, 3),
        windows=st.sampled_from([(None, 3), (None, 2, 5), (4,), (3, 3)]),
    )
    def start(self, num_blocks: int, size: int, windows: tuple[int | None, ...]):
        self.size = size
        self.groups = KVGroups(windows)
        self.allocator = BlockAllocator(num_blocks, lambda: self.now_s)
        self.index = PrefixIndex(self.allocator, size, self.groups)
        self.content: dict[int, tuple[int, bytes, tuple[int, ...]]] = {}

    def expected(self, tokens: list[int], limit: int, salt: bytes) -> list[int]:
        marked = {
            self.content[b]: b for b in self.content if self.allocator.is_cached(b)
        }
        for num_full in range(limit // self.size, 0, -1):
            needed = self.needed_contents(tokens, num_full, salt)
            if all(content in marked for content in needed.values()):
                table = [0] * (num_full * self.groups.count)
                for entry, content in needed.items():
                    table[entry] = marked[content]
                return table
        return []

    def needed_contents(
        self, tokens: list[int], num_full: int, salt: bytes
    ) -> dict[int, tuple[int, bytes, tuple[int, ...]]]:
        """Returns the content (group, salt, tokens) that a prefix of `num_full` blocks
        needs, by index in the block table.
        """
        num_tokens = num_full * self.size
        needed = {}
        ranges = self.groups.token_ranges(0, num_tokens, num_tokens)
        for group, token_range in enumerate(ranges):
            for index in range(token_range.start // self.size, num_full):
                prefix = tuple(tokens[: (index + 1) * self.size])
                needed[index * self.groups.count + group] = (group, salt, prefix)
        return needed

    @rule(
        tokens=tokens,
        salt=LookUpMachine.salts,
        more=st.lists(st.integers(0, 1), max_size=6),
        step=st.integers(1, 6),
    )
    def compute(self, tokens: list[int], salt: bytes, more: list[int], step: int):
        """Computes one sequence in steps, as the scheduler does, from the end of its
        prefix hit to its last token.
        """
        groups = self.groups
        count = groups.count
        size = self.size
        cursor = PrefixCursor()
        table = self.index.match(tokens, max_tokens=len(tokens) - 1, salt=salt)
        assert table == self.expected(tokens, len(tokens) - 1, salt)
        self.allocator.share(without_null_blocks(table))
        tokens = tokens + more
        num_computed = len(table) // count * size
        for stop in range(num_computed + 1, len(tokens) + 1, step):
            ranges = [range(num_computed, stop)] * count
            entries = groups.missing_entries(table, ranges, size)
            if not self.allocator.can_allocate(len(entries)):
                break
            blocks = self.allocator.allocate(len(entries))
            groups.fill_entries(table, entries, blocks)
            for entry, block in zip(entries, blocks, strict=True):
                # This will be the content when the block is full.
                prefix = tuple(tokens[: (entry // count + 1) * size])
                self.content[block] = entry % count, salt, prefix
            num_computed = stop
            full_entries = num_computed // size * count
            self.index.publish(tokens, table[:full_entries], cursor=cursor, salt=salt)
            next_table = groups.prefix_table(table, num_computed, size)
            dropped = [b for b in without_null_blocks(table) if b not in next_table]
            self.allocator.release(dropped)
            table = next_table
        self.allocator.release(without_null_blocks(table))


TestWindowMachine = WindowMachine.TestCase
TestWindowMachine.settings = MACHINE_SETTINGS


def test_index_is_bounded_if_all_layers_have_a_window():
    """With a window, only the last node on the path of a long sequence has a block. The
    index must also bound the number of nodes without blocks.
    """
    allocator = BlockAllocator(10)
    index = PrefixIndex(allocator, BLOCK, KVGroups((4,)))
    (block,) = allocator.allocate(1)
    index.publish(range(4000), [0] * 999 + [block], cursor=PrefixCursor())
    assert not index.match(range(4000))
    assert not allocator.is_cached(block)
    index.publish(range(200), [0] * 49 + [block], cursor=PrefixCursor())
    assert index.match(range(200)) == [0] * 49 + [block]
    index.check_integrity()
