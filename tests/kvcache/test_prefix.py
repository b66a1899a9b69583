"""The prefix index: longest exact prefix, no wrong hit, no entry left behind."""

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
from kvcache.groups import KVGroups, held
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


def test_a_sequence_publishes_its_own_copies_once_anothers_are_gone():
    allocator, index = make(10)
    tokens, cursor = list(range(16)), PrefixCursor()
    theirs, ours = published(index, tokens[:8]), allocator.allocate(4)
    index.publish(tokens, ours[:3], cursor=cursor)
    assert index.match(tokens) == [*theirs, ours[2]] and not allocator.is_cached(
        ours[0]
    )
    allocator.release(theirs)
    allocator.allocate(allocator.num_available)
    assert not (
        index.match(tokens) or allocator.is_cached(ours[2])
    )  # it went with its parent
    index.publish(tokens, ours, cursor=cursor)
    assert index.match(tokens) == ours
    index.check_integrity()


def test_a_block_that_is_receiving_can_not_be_published_or_found():
    allocator, index = make()
    tokens, blocks = list(range(8)), allocator.allocate(2)
    allocator.receive(blocks)
    with pytest.raises(BlockStateError):
        index.publish(tokens, blocks, cursor=PrefixCursor())
    assert index.match(tokens) == []
    allocator.received(blocks)
    index.publish(tokens, blocks, cursor=PrefixCursor())
    assert index.match(tokens) == blocks


@pytest.mark.parametrize("tokens", [[], list(range(7)), list(range(50, 58))])
def test_a_block_stands_for_all_its_tokens_and_for_no_others(tokens):
    _, index = make()
    blocks = published(index, list(range(8)))
    with pytest.raises(BlockStateError, match="cannot"):
        index.publish(tokens, blocks, cursor=PrefixCursor())
    index.check_integrity()


def test_integrity_check_sees_marks_and_entries_that_differ():
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


class Running:
    """A sequence as the engine has it; `content` is what its blocks really hold."""

    def __init__(
        self, tokens: list[int], salt: bytes, blocks: list[int], num_published: int
    ) -> None:
        self.tokens, self.salt = tokens, salt
        self.blocks, self.num_published = blocks, num_published
        self.cursor = PrefixCursor()


class LookUps(RuleBasedStateMachine):
    """Some ask again and again, for more or fewer of their tokens."""

    asked = Bundle("asked")
    # Two tokens only, so that prefixes collide, diverge and recur.
    tokens = st.lists(st.integers(0, 1), min_size=1, max_size=14)
    # One salt begins like another, and one is the bytes of a token.
    salts = st.sampled_from([b"", b"salt", b"salted", bytes(8)])

    @rule(target=asked, tokens=tokens, salt=salts)
    def ask(self, tokens: list[int], salt: bytes) -> object:
        return tokens, salt, PrefixCursor()

    @rule(one=asked, limit=st.integers(0, 14))
    def look_up(self, one: tuple[list[int], bytes, PrefixCursor], limit: int) -> None:
        tokens, salt, cursor = one
        found = self.index.match(tokens, max_tokens=limit, cursor=cursor, salt=salt)
        assert found == self.expected(tokens, min(limit, len(tokens)), salt)

    @invariant()
    def books_balance(self) -> None:
        self.allocator.check_integrity()
        self.index.check_integrity()


class PrefixMachine(LookUps):
    """Sequences come, grow, publish, lease and go in a small pool that evicts all the time.

    `content` records for every block the salt and the exact token prefix whose KV was last
    written to it. Every match is compared with it, and with the longest prefix among the
    published ones by brute force.
    """

    index_type = PrefixIndex
    sequences = Bundle("sequences")
    leases = Bundle("leases")
    tokens = LookUps.tokens

    @initialize(num_blocks=st.integers(4, 14), block_size=st.integers(1, 3))
    def start(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.allocator = BlockAllocator(num_blocks)
        self.index = self.index_type(self.allocator, block_size)
        self.content: dict[int, tuple[bytes, tuple[int, ...]]] = {}

    def cached_contents(self) -> dict[tuple[bytes, tuple[int, ...]], int]:
        marked = [b for b in self.content if self.allocator.is_cached(b)]
        by_content = {self.content[block]: block for block in marked}
        assert len(by_content) == len(marked)  # each content is published once
        return by_content

    def expected(self, tokens: list[int], limit: int, salt: bytes) -> list[int]:
        """Brute force: grow the prefix for as long as some marked block holds exactly it."""
        cached = self.cached_contents()
        found: list[int] = []
        for stop in range(
            self.block_size, min(limit, len(tokens)) + 1, self.block_size
        ):
            if (salt, tuple(tokens[:stop])) not in cached:
                break
            found.append(cached[salt, tuple(tokens[:stop])])
        return found

    @rule(target=sequences, tokens=tokens, salt=LookUps.salts)
    def admit(self, tokens: list[int], salt: bytes) -> object:
        limit = len(tokens) - 1
        hits = self.index.match(tokens, max_tokens=limit, salt=salt)
        assert hits == self.expected(tokens, limit, salt)
        for at, block in enumerate(hits):
            assert self.content[block] == (
                salt,
                tuple(tokens[: (at + 1) * self.block_size]),
            )
        need = -(-len(tokens) // self.block_size) - len(hits)
        self.allocator.share(hits)
        if not self.allocator.can_allocate(need):
            self.allocator.release(hits)
            return multiple()
        sequence = Running(
            tokens, salt, hits + self.allocator.allocate(need), len(hits)
        )
        self.write(sequence, len(hits))
        return sequence

    def write(self, sequence: Running, first: int) -> None:
        """Records what the blocks of a sequence hold, from block number `first` on."""
        for at in range(first, len(sequence.blocks)):
            prefix = tuple(sequence.tokens[: (at + 1) * self.block_size])
            self.content[sequence.blocks[at]] = sequence.salt, prefix

    @rule(sequence=sequences, num_blocks=st.integers(0, 14), from_start=st.booleans())
    def publish(self, sequence: Running, num_blocks: int, from_start: bool) -> None:
        if from_start:
            sequence.cursor = PrefixCursor()
        full = min(
            len(sequence.tokens) // self.block_size, sequence.num_published + num_blocks
        )
        salt = sequence.salt
        blocks = sequence.blocks[:full]
        self.index.publish(sequence.tokens, blocks, cursor=sequence.cursor, salt=salt)
        sequence.num_published = full
        # all of a sequence that was just published can be found
        assert len(self.index.match(sequence.tokens, salt=salt)) >= full

    @rule(sequence=sequences, more=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def grow(self, sequence: Running, more: list[int]) -> None:
        tokens = sequence.tokens + more
        need = -(-len(tokens) // self.block_size) - len(sequence.blocks)
        if not self.allocator.can_allocate(need):
            return
        sequence.tokens = tokens
        sequence.blocks = sequence.blocks + self.allocator.allocate(need)
        self.write(sequence, sequence.num_published)

    @rule(target=leases, sequence=consumes(sequences), leased=st.booleans())
    def finish(self, sequence: Running, leased: bool) -> object:
        if leased:
            self.allocator.lease(sequence.blocks)
        self.allocator.release(sequence.blocks)
        return sequence.blocks if leased else multiple()

    @rule(blocks=consumes(leases))
    def end_lease(self, blocks: list[int]) -> None:
        self.allocator.end_lease(blocks)

    @rule(now=st.sampled_from([False] * 9 + [True]))
    def clear(self, now: bool) -> None:
        if now:
            self.index._drop_below(self.index._root)
            assert not any(
                map(self.allocator.is_cached, range(self.allocator.num_blocks))
            )

    def teardown(self) -> None:
        if hasattr(self, "index"):
            self.index._drop_below(self.index._root)
            assert not any(
                map(self.allocator.is_cached, range(self.allocator.num_blocks))
            )
            self.allocator.check_integrity()


class SameHash(bytes):
    """Keys that all collide in every hash table."""

    def __hash__(self) -> int:
        return 1


class CollidingIndex(PrefixIndex):
    def _key(self, token_ids: Sequence[int], at: int, salt: bytes) -> bytes:
        return SameHash(super()._key(token_ids, at, salt))


class CollidingMachine(PrefixMachine):
    """The same laws when all hashes are equal: a hit depends on the tokens alone."""

    index_type = CollidingIndex


MACHINE_SETTINGS = examples(60, stateful_step_count=40)
TestPrefixMachine = PrefixMachine.TestCase
TestPrefixMachine.settings = MACHINE_SETTINGS
TestCollidingMachine = CollidingMachine.TestCase
TestCollidingMachine.settings = MACHINE_SETTINGS


class WindowMachine(LookUps):
    """Tables of several groups, whose windows drop blocks: a hit is the longest prefix that has all
    blocks that whoever goes on from it needs, found by brute force, and none but those."""

    tokens = LookUps.tokens

    @initialize(
        num_blocks=st.integers(8, 30),
        size=st.integers(1, 3),
        windows=st.sampled_from([(None, 3), (None, 2, 5), (4,), (3, 3)]),
    )
    def start(self, num_blocks: int, size: int, windows: tuple[int | None, ...]):
        self.size, self.groups = size, KVGroups(windows)
        self.allocator = BlockAllocator(num_blocks)
        self.index = PrefixIndex(self.allocator, size, self.groups)
        self.content: dict[int, tuple[int, bytes, tuple[int, ...]]] = {}

    def expected(self, tokens: list[int], limit: int, salt: bytes) -> list[int]:
        marked = {
            self.content[b]: b for b in self.content if self.allocator.is_cached(b)
        }
        for count in range(limit // self.size, 0, -1):
            prefixes = [tuple(tokens[: (at + 1) * self.size]) for at in range(count)]
            table = [0] * (count * self.groups.count)
            wanted = [
                (at * self.groups.count + g, (g, salt, prefixes[at]))
                for g, span in enumerate(
                    self.groups.spans(0, count * self.size, count * self.size)
                )
                for at in range(span.start // self.size, count)
            ]
            if all(content in marked for _, content in wanted):
                for at, content in wanted:
                    table[at] = marked[content]
                return table
        return []

    @rule(
        tokens=tokens,
        salt=LookUps.salts,
        more=st.lists(st.integers(0, 1), max_size=6),
        step=st.integers(1, 6),
    )
    def compute(self, tokens: list[int], salt: bytes, more: list[int], step: int):
        """One sequence, from its hit to its end, as the scheduler leads it."""
        groups, size, cursor = self.groups, self.size, PrefixCursor()
        table = self.index.match(tokens, max_tokens=len(tokens) - 1, salt=salt)
        assert table == self.expected(tokens, len(tokens) - 1, salt)
        self.allocator.share(held(table))
        num = len(table) // groups.count * size
        for stop in range(num + 1, len(tokens := tokens + more) + 1, step):
            places = groups.missing(table, [range(num, stop)] * groups.count, size)
            if not self.allocator.can_allocate(len(places)):
                break
            groups.fill(table, places, fresh := self.allocator.allocate(len(places)))
            for at, block in zip(places, fresh, strict=True):
                prefix = tuple(tokens[: (at // groups.count + 1) * size])
                self.content[block] = at % groups.count, salt, prefix
            num = stop
            full = num // size * groups.count
            # what is not full yet holds what it will hold
            self.index.publish(tokens, table[:full], cursor=cursor, salt=salt)
            kept = groups.of_prefix(table, num, size)
            self.allocator.release(b for b in held(table) if b not in kept)
            table = kept
        self.allocator.release(held(table))


TestWindowMachine = WindowMachine.TestCase
TestWindowMachine.settings = MACHINE_SETTINGS


def test_where_all_layers_have_a_window_the_index_has_a_bound():
    """Paths to what is left of long sequences have nodes without blocks."""
    allocator, groups = BlockAllocator(10), KVGroups((4,))
    index, blocks = PrefixIndex(allocator, BLOCK, groups), allocator.allocate(1)
    index.publish(range(4000), [0] * 999 + blocks, cursor=PrefixCursor())
    assert not (index.match(range(4000)) or allocator.is_cached(blocks[0]))
    index.publish(range(200), [0] * 49 + blocks, cursor=PrefixCursor())
    assert index.match(range(200)) == [0] * 49 + blocks
    index.check_integrity()
