"""Groups of layers that share blocks, and the blocks of a sequence that each group still needs.

Layers with different attention windows are kept in *groups* of equal size: the layers of one group
have one window, and a block holds the KV of one group's layers for block_size tokens. So all blocks
are alike, and one pool, one layout and one plan serve any model. The block table of a sequence has,
for each block_size tokens, a block of each group, side by side:

    tokens     0..15   16..31  32..47  48..63
    table     [ 7 0  |  9 0  | 12 4  | 13 5 ]     two groups; the second looks 32 tokens back

The null block stands where a group needs no block yet or any more. With one group that sees all
tokens, a table is a list of blocks without gaps.

No torch here: processes that only plan or only talk use this too.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from kvcache.blocks import NULL_BLOCK
from protocol.handshake import MAX_GROUPS

_MAX_WASTE = 0.05  # of the memory of a sequence that is as long as the model takes


def held(blocks: Iterable[int]) -> list[int]:
    """The blocks of a table, without null blocks."""
    return [block for block in blocks if block != NULL_BLOCK]


@dataclass(frozen=True)
class KVGroups:
    """
    Attributes:
        windows: of each group, how many tokens a token sees, itself included; None: all.
    """

    windows: tuple[int | None, ...] = (None,)

    @classmethod
    def from_wire(cls, windows: Sequence[int]) -> "KVGroups":
        return cls(tuple(window or None for window in windows) or (None,))

    def to_wire(self) -> tuple[int, ...]:
        """As of CompatRecord."""
        return (
            tuple(window or 0 for window in self.windows) if self != ONE_GROUP else ()
        )

    @cached_property
    def count(self) -> int:
        return len(self.windows)

    @cached_property
    def drops(self) -> bool:
        """Whether blocks of a sequence are given back while it grows."""
        return any(self.windows)

    def first_token(self, group: int, num_tokens: int) -> int:
        """The first of `num_tokens` tokens that the group needs for computing the next one."""
        window = self.windows[group]
        return 0 if window is None else max(0, num_tokens - window)

    def kept_from(self, num_tokens: int, block_size: int) -> list[int]:
        """For each group, the index of the first block that a sequence of `num_tokens` tokens
        keeps: enough also to compute the last token anew."""
        return [
            self.first_token(g, num_tokens - 1) // block_size for g in range(self.count)
        ]

    def of_prefix(
        self,
        table: Sequence[int],
        num_tokens: int,
        block_size: int,
        reach: int | None = None,
    ) -> list[int]:
        """The table of a prefix of `num_tokens` tokens, with the blocks needed to go on from
        `reach` tokens of it or more; None: from all of them."""
        blocks = list(table[: -(-num_tokens // block_size) * self.count])
        if self.drops:
            firsts = self.kept_from(num_tokens if reach is None else reach, block_size)
            for group, first in enumerate(firsts):
                blocks[group : first * self.count : self.count] = [NULL_BLOCK] * first
        return blocks

    def of_group(self, table: Sequence[int], group: int) -> Sequence[int]:
        return table if self.count == 1 else table[group :: self.count]

    def spans(self, start: int, stop: int, reach: int) -> list[range]:
        """For each group, the tokens of [start, stop) that are needed to go on from `reach` tokens
        or more."""
        firsts = (self.first_token(g, reach) for g in range(self.count))
        return [range(min(max(start, first), stop), stop) for first in firsts]

    def missing(
        self, table: Sequence[int], spans: Sequence[range], block_size: int
    ) -> list[int]:
        """The places in a table that still need a block for these tokens of each group, sorted."""
        count, size = self.count, len(table)
        places = [
            at
            for group, span in enumerate(spans)
            if span
            for block in range(span.start // block_size, -(-span.stop // block_size))
            if (at := block * count + group) >= size or table[at] == NULL_BLOCK
        ]
        return sorted(places)

    def fill(
        self, table: list[int], places: Sequence[int], blocks: Iterable[int]
    ) -> None:
        """Puts blocks into these places of a table, which grows if it is too short."""
        needed = (places[-1] // self.count + 1) * self.count if places else 0
        table += [NULL_BLOCK] * (needed - len(table))
        for at, block in zip(places, blocks, strict=True):
            table[at] = block

    def num_blocks_for(self, num_tokens: int, step_tokens: int, block_size: int) -> int:
        """The most blocks that a sequence of `num_tokens` tokens takes at a time, if it is computed
        in steps of `step_tokens`."""
        whole = -(-num_tokens // block_size)
        most = (
            whole if w is None else -(-(w + 1 + step_tokens) // block_size) + 1
            for w in self.windows
        )
        return sum(min(whole, blocks) for blocks in most)

    def longest_in(
        self, num_blocks: int, max_len: int, step_tokens: int, block_size: int
    ) -> int:
        """Tokens of the longest sequence that `num_blocks` can hold; if windows drop blocks, at
        most `max_len`, rounded up to whole blocks."""
        if not self.drops:
            return num_blocks // self.count * block_size

        def needed(blocks: int) -> int:
            return self.num_blocks_for(blocks * block_size, step_tokens, block_size)

        sizes = range(-(-max_len // block_size) + 1)
        return (bisect_right(sizes, num_blocks, key=needed) - 1) * block_size


ONE_GROUP = KVGroups()


def deal(
    windows: Sequence[int | None], max_len: int
) -> tuple[KVGroups, list[tuple[int, ...]]]:
    """Deals a model's layers into groups of equal size: the fewest groups whose padding (places
    without a layer) costs at most _MAX_WASTE.

    Args:
        windows: of each layer, as in KVGroups.
        max_len: tokens of the longest sequence that the model takes.

    Returns:
        The groups, and the layers of each; the last group of a window may have fewer.
    """
    windows = [window if window and window < max_len else None for window in windows]
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)

    def cost(size: int) -> int:
        return sum(
            -(-len(of) // size) * size * (w or max_len) for w, of in kinds.items()
        )

    longest = max(map(len, kinds.values()))
    sizes = range(longest, 0, -1)
    few = [
        s for s in sizes if sum(-(-len(of) // s) for of in kinds.values()) <= MAX_GROUPS
    ]
    cheap = (s for s in few if cost(s) <= cost(1) * (1 + _MAX_WASTE))
    size = next(cheap, min(few, key=cost))
    dealt = [
        (window, tuple(of[at : at + size]))
        for window, of in sorted(kinds.items(), key=lambda kind: kind[0] or 0)
        for at in range(0, len(of), size)
    ]
    return KVGroups(tuple(window for window, _ in dealt)), [
        layers for _, layers in dealt
    ]
