"""Groups of layers that share blocks, and the blocks that each group needs.

Layers with different attention windows are dealt into *groups* of equal size. The
layers of one group have one window, and a block holds the KV of one group's layers for
block_size tokens. So all blocks are alike, and one pool, one layout and one plan serve
any model. The block table of a sequence has, for each block_size tokens, a block of
each group, side by side:

    tokens     0..15   16..31  32..47  48..63
    table     [ 7 0  |  9 0  | 12 4  | 13 5 ]     two groups; the second sees 32 tokens

The null block fills entries for which a group needs no block yet or no longer. With one
group that sees all tokens, a table is a list of blocks without gaps.

This module does not import torch, because processes that only plan or communicate use
it.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from kvcache.blocks import NULL_BLOCK
from protocol.handshake import MAX_GROUPS

# Memory that padding may add to a sequence of the model's maximum length, as a share.
_MAX_PADDING_SHARE = 0.05


def without_null_blocks(blocks: Iterable[int]) -> list[int]:
    """The blocks of a table that are not the null block."""
    return [block for block in blocks if block != NULL_BLOCK]


@dataclass(frozen=True)
class KVGroups:
    """The groups of a model's layers.

    Attributes:
        windows: For each group, how many tokens a token sees, itself included; None:
            all.
    """

    windows: tuple[int | None, ...] = (None,)

    @classmethod
    def from_wire(cls, windows: Sequence[int]) -> "KVGroups":
        """The groups of a CompatRecord."""
        return cls(tuple(window or None for window in windows) or (None,))

    def to_wire(self) -> tuple[int, ...]:
        """The windows as in CompatRecord; empty for one group that sees all tokens."""
        if self == ONE_GROUP:
            return ()
        return tuple(window or 0 for window in self.windows)

    @cached_property
    def count(self) -> int:
        return len(self.windows)

    @cached_property
    def drops_blocks(self) -> bool:
        """Whether a sequence gives blocks back while it grows."""
        return any(self.windows)

    def first_token(self, group: int, num_tokens: int) -> int:
        """The first of `num_tokens` tokens that the group needs for the next token."""
        window = self.windows[group]
        return 0 if window is None else max(0, num_tokens - window)

    def first_needed_blocks(self, num_tokens: int, block_size: int) -> list[int]:
        """For each group, the first block index that a sequence of `num_tokens` keeps.

        The blocks from there on also allow computing the last token again.
        """
        return [
            self.first_token(group, num_tokens - 1) // block_size
            for group in range(self.count)
        ]

    def prefix_table(
        self,
        table: Sequence[int],
        num_tokens: int,
        block_size: int,
        reach: int | None = None,
    ) -> list[int]:
        """The table of a prefix of `num_tokens` tokens.

        Args:
            reach: The prefix must be continuable from `reach` tokens or more; None:
                from `num_tokens` only. Blocks that are not needed for this become null
                blocks.
        """
        blocks = list(table[: -(-num_tokens // block_size) * self.count])
        if self.drops_blocks:
            start = num_tokens if reach is None else reach
            firsts = self.first_needed_blocks(start, block_size)
            for group, first in enumerate(firsts):
                blocks[group : first * self.count : self.count] = [NULL_BLOCK] * first
        return blocks

    def group_table(self, table: Sequence[int], group: int) -> Sequence[int]:
        """The entries of one group."""
        return table if self.count == 1 else table[group :: self.count]

    def token_ranges(self, start: int, stop: int, reach: int) -> list[range]:
        """For each group, the tokens of [start, stop) that the group needs.

        The sequence can be continued from `reach` tokens or more then.
        """
        ranges = []
        for group in range(self.count):
            first = self.first_token(group, reach)
            ranges.append(range(min(max(start, first), stop), stop))
        return ranges

    def missing_entries(
        self, table: Sequence[int], ranges: Sequence[range], block_size: int
    ) -> list[int]:
        """The sorted indices of table entries that still need a block.

        Args:
            ranges: For each group, the tokens for which it needs blocks.
        """
        count = self.count
        size = len(table)
        missing = []
        for group, tokens in enumerate(ranges):
            if not tokens:
                continue
            first_block = tokens.start // block_size
            last_block = -(-tokens.stop // block_size)
            for block in range(first_block, last_block):
                index = block * count + group
                if index >= size or table[index] == NULL_BLOCK:
                    missing.append(index)
        return sorted(missing)

    def fill_entries(
        self, table: list[int], entries: Sequence[int], blocks: Iterable[int]
    ) -> None:
        """Sets entries of a table to blocks; extends a table that is too short."""
        needed = (entries[-1] // self.count + 1) * self.count if entries else 0
        table += [NULL_BLOCK] * (needed - len(table))
        for index, block in zip(entries, blocks, strict=True):
            table[index] = block

    def num_blocks_for(self, num_tokens: int, step_tokens: int, block_size: int) -> int:
        """The most blocks that a sequence of `num_tokens` tokens holds at one time.

        Args:
            step_tokens: The sequence is computed in steps of this many tokens.
        """
        all_blocks = -(-num_tokens // block_size)
        total = 0
        for window in self.windows:
            if window is None:
                total += all_blocks
            else:
                window_blocks = -(-(window + 1 + step_tokens) // block_size) + 1
                total += min(all_blocks, window_blocks)
        return total

    def max_tokens_in(
        self, num_blocks: int, max_len: int, step_tokens: int, block_size: int
    ) -> int:
        """Tokens of the longest sequence that `num_blocks` blocks can hold.

        If windows drop blocks, the result is at most `max_len`, rounded up to full
        blocks.
        """
        if not self.drops_blocks:
            return num_blocks // self.count * block_size

        def needed(blocks: int) -> int:
            return self.num_blocks_for(blocks * block_size, step_tokens, block_size)

        sizes = range(-(-max_len // block_size) + 1)
        return (bisect_right(sizes, num_blocks, key=needed) - 1) * block_size


ONE_GROUP = KVGroups()


def make_groups(
    windows: Sequence[int | None], max_len: int
) -> tuple[KVGroups, list[tuple[int, ...]]]:
    """Deals a model's layers into groups of equal size.

    The groups are as large, and so as few, as possible while padding (places without a
    layer) costs at most _MAX_PADDING_SHARE. If no size keeps both that bound and
    MAX_GROUPS, the size with the least memory within MAX_GROUPS is used.

    Args:
        windows: Of each layer, as in KVGroups.
        max_len: Tokens of the model's longest sequence.

    Returns:
        The groups, and the layers of each; the last group of a window may have fewer.
    """
    layers_by_window: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        is_limiting = window and window < max_len
        layers_by_window.setdefault(window if is_limiting else None, []).append(layer)

    def num_groups(size: int) -> int:
        return sum(-(-len(layers) // size) for layers in layers_by_window.values())

    def cost(size: int) -> int:
        total = 0
        for window, layers in layers_by_window.items():
            places = -(-len(layers) // size) * size
            total += places * (window or max_len)
        return total

    largest = max(map(len, layers_by_window.values()))
    sizes = [s for s in range(largest, 0, -1) if num_groups(s) <= MAX_GROUPS]
    max_cost = cost(1) * (1 + _MAX_PADDING_SHARE)
    cheap_sizes = (size for size in sizes if cost(size) <= max_cost)
    size = next(cheap_sizes, min(sizes, key=cost))
    group_windows = []
    group_layers = []
    for window, layers in sorted(layers_by_window.items(), key=lambda kv: kv[0] or 0):
        for start in range(0, len(layers), size):
            group_windows.append(window)
            group_layers.append(tuple(layers[start : start + size]))
    return KVGroups(tuple(group_windows)), group_layers
