"""Groups of layers that share blocks, and the blocks that each group needs.

A model's layers are divided into *groups* of equal size. The layers of one group have
the same attention window, and a block holds the KV of one group's layers for block_size
tokens. So all blocks have the same shape, and one pool, one layout and one plan serve
any model. For every block_size tokens, the block table of a sequence has one entry per
group, side by side:

    tokens     0..15   16..31  32..47  48..63
    table     [ 7 0  |  9 0  | 12 4  | 13 5 ]     two groups; the second sees 32 tokens

An entry is the null block if the group needs no block for these tokens, for example
because the tokens have left the group's window. With one group that sees all tokens, a
table has no null blocks.

This module does not import torch, because processes that only plan or communicate use
it.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from kvcache.blocks import NULL_BLOCK
from protocol.handshake import MAX_GROUPS

# Preferred limit on the memory that padding layers add, as a fraction of the KV of the
# longest sequence. If no group size satisfies this limit, the group size that takes the
# least memory is chosen.
_MAX_PADDING_SHARE = 0.05


def without_null_blocks(blocks: Iterable[int]) -> list[int]:
    """Returns the blocks of a table, without its null blocks."""
    return [block for block in blocks if block != NULL_BLOCK]


@dataclass(frozen=True)
class KVGroups:
    """The groups of a model's layers.

    Attributes:
        windows: For each group, the number of tokens that a token attends to, including
            itself; None: there is no limit.
    """

    windows: tuple[int | None, ...] = (None,)

    @classmethod
    def from_wire(cls, windows: Sequence[int]) -> "KVGroups":
        """The groups that a value of CompatRecord.kv_windows describes."""
        return cls(tuple(window or None for window in windows) or (None,))

    def to_wire(self) -> tuple[int, ...]:
        """The value of CompatRecord.kv_windows: one window per group, 0 for None.

        It is empty for one group that sees all tokens.
        """
        if self == ONE_GROUP:
            return ()
        return tuple(window or 0 for window in self.windows)

    @cached_property
    def count(self) -> int:
        return len(self.windows)

    @cached_property
    def drops_blocks(self) -> bool:
        """True if a growing sequence frees blocks that have left a group's window."""
        return any(self.windows)

    def first_token(self, group: int, num_tokens: int) -> int:
        """The first token of the group's KV that is needed to compute the next token.

        The next token has the number `num_tokens`, because token numbers start at 0.
        The result may be one token before the first token of the window.
        """
        window = self.windows[group]
        return 0 if window is None else max(0, num_tokens - window)

    def first_needed_blocks(self, num_tokens: int, block_size: int) -> list[int]:
        """For each group, the index of the first block that a sequence needs.

        The sequence has `num_tokens` tokens. The blocks from this index on suffice to
        compute the sequence's last token again.
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
        min_resume_tokens: int | None = None,
    ) -> list[int]:
        """The part of `table` for a sequence's first `num_tokens` tokens, as a copy.

        Args:
            table: The table of the whole sequence.
            min_resume_tokens: The result must suffice to continue the sequence after
                this number of tokens, and after any larger number of tokens up to
                `num_tokens`. Blocks that this does not require become null blocks.
                None means `num_tokens`.
        """
        blocks = list(table[: -(-num_tokens // block_size) * self.count])
        if self.drops_blocks:
            start = num_tokens if min_resume_tokens is None else min_resume_tokens
            firsts = self.first_needed_blocks(start, block_size)
            for group, first in enumerate(firsts):
                blocks[group : first * self.count : self.count] = [NULL_BLOCK] * first
        return blocks

    def group_table(self, table: Sequence[int], group: int) -> Sequence[int]:
        """The entries of one group in a table, in order."""
        return table if self.count == 1 else table[group :: self.count]

    def token_ranges(
        self, start: int, stop: int, min_resume_tokens: int
    ) -> list[range]:
        """For each group, the tokens of [start, stop) that the group needs.

        Args:
            min_resume_tokens: The KV must suffice to continue the sequence after this
                number of tokens, and after any larger number of tokens up to `stop`.
        """
        ranges = []
        for group in range(self.count):
            first = self.first_token(group, min_resume_tokens)
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
            first_position = tokens.start // block_size
            stop_position = -(-tokens.stop // block_size)
            for position in range(first_position, stop_position):
                index = position * count + group
                if index >= size or table[index] == NULL_BLOCK:
                    missing.append(index)
        return sorted(missing)

    def fill_entries(
        self, table: list[int], entries: Sequence[int], blocks: Iterable[int]
    ) -> None:
        """Sets entries of `table` to blocks. Extends `table` if it is too short.

        Args:
            entries: The sorted indices of the entries to set, as from
                `missing_entries`.
            blocks: One block for each of `entries`.
        """
        min_length = (entries[-1] // self.count + 1) * self.count if entries else 0
        table += [NULL_BLOCK] * (min_length - len(table))
        for index, block in zip(entries, blocks, strict=True):
            table[index] = block

    def num_blocks_for(self, num_tokens: int, step_tokens: int, block_size: int) -> int:
        """The largest number of blocks that a sequence holds at any time.

        Args:
            num_tokens: Length of the complete sequence.
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
        """The length in tokens of the longest sequence that fits into `num_blocks`.

        If `drops_blocks`, the result is at most `max_len`, rounded up to full blocks.

        Args:
            max_len: The model's maximum length in tokens.
            step_tokens: The sequence is computed in steps of this many tokens.
        """
        if not self.drops_blocks:
            return num_blocks // self.count * block_size

        def blocks_needed(length: int) -> int:
            return self.num_blocks_for(length * block_size, step_tokens, block_size)

        lengths = range(-(-max_len // block_size) + 1)  # in units of block_size tokens
        num_fitting = bisect_right(lengths, num_blocks, key=blocks_needed)
        return (num_fitting - 1) * block_size


ONE_GROUP = KVGroups()


def make_groups(
    windows: Sequence[int | None], max_len: int
) -> tuple[KVGroups, list[tuple[int, ...]]]:
    """Divides a model's layers into groups of equal size.

    The last group of each window may have fewer layers; the missing layers are padding,
    which takes memory in every block. The chosen size is the largest size with at most
    MAX_GROUPS groups and at most _MAX_PADDING_SHARE of padding. If no size satisfies
    both bounds, the size that takes the least memory is chosen from the sizes with at
    most MAX_GROUPS groups.

    Args:
        windows: The window of each layer, as in KVGroups. A window of at least
            `max_len` tokens counts as None.
        max_len: Length in tokens of the model's longest sequence.

    Returns:
        The groups, and the indices of each group's layers.
    """
    layers_by_window: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        is_limiting = window and window < max_len
        layers_by_window.setdefault(window if is_limiting else None, []).append(layer)

    def num_groups(size: int) -> int:
        return sum(-(-len(layers) // size) for layers in layers_by_window.values())

    def memory(size: int) -> int:
        """Memory of the longest sequence, in units of one token's KV in one layer.

        Padding layers are included.
        """
        total = 0
        for window, layers in layers_by_window.items():
            num_padded_layers = -(-len(layers) // size) * size
            total += num_padded_layers * (window or max_len)
        return total

    largest = max(map(len, layers_by_window.values()))
    sizes = [s for s in range(largest, 0, -1) if num_groups(s) <= MAX_GROUPS]
    max_memory = memory(1) * (1 + _MAX_PADDING_SHARE)
    small_sizes = (size for size in sizes if memory(size) <= max_memory)
    size = next(small_sizes, min(sizes, key=memory))
    group_windows = []
    group_layers = []
    for window, layers in sorted(layers_by_window.items(), key=lambda kv: kv[0] or 0):
        for start in range(0, len(layers), size):
            group_windows.append(window)
            group_layers.append(tuple(layers[start : start + size]))
    return KVGroups(tuple(group_windows)), group_layers
