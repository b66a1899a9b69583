"""Records which blocks have KV of a drafter that reads hidden states, and of which
tokens.

Unlike a draft model, such a drafter cannot compute draft KV of arbitrary tokens,
because hidden states may be missing. So some blocks of a sequence can have draft KV
although earlier blocks have none.

A block is recognized by a hash of its tokens and of all tokens before them. The draft
KV of the last position of a block also depends on the first token after the block. If
two sequences share a block and continue with different tokens, this draft KV is wrong
for one of the sequences. A proposal may then be rejected that would have been accepted.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Sequenceable

from engine.core.sequence import Sequence
from engine.speculation.draft_kv import DraftedBlocks
from kvcache.groups import KVGroups


class StateBlocks(DraftedBlocks):
    """For each block, the tokens whose draft KV the block stores. These may be only the
    first tokens of the block.

    The argument `hashes` belongs to a sequence: element i is the hash of all tokens up
    to the end of the i-th block of the sequence.
    """

    def __init__(self, block_size: int, groups: KVGroups) -> None:
        super().__init__(block_size, groups)
        # For each block in which only the first tokens have draft KV: a hash of these
        # tokens and of all tokens before them, and the number of these tokens.
        self._beginnings: dict[int, tuple[int, int]] = {}

    def forget(self, blocks: Iterable[int]) -> None:
        blocks = list(blocks)
        super().forget(blocks)
        for block in blocks:
            self._beginnings.pop(block, None)

    def num_drafted(self, token_ids: Sequenceable[int], table: list[int]) -> int:
        blocks = self._blocks_in(table)
        hashes = self._matching_hashes(token_ids, blocks)
        num_full = len(hashes) * self._block_size
        return num_full + self.num_at_beginning(token_ids, blocks, hashes)

    def finish_pull(
        self, token_ids: Sequenceable[int], table: list[int], start: int, stop: int
    ) -> None:
        super().finish_pull(token_ids, table, start, stop)
        first = stop // self._block_size * self._block_size
        if start <= first:
            hashes = list(self._hashes_of(token_ids[:first]))
            self.record_beginning(token_ids[:stop], self._blocks_in(table), hashes)

    def record_beginning(
        self,
        token_ids: Sequenceable[int],
        blocks: Sequenceable[int],
        hashes: Sequenceable[int],
    ) -> None:
        """Records that the tokens of `token_ids` after the last full block have draft
        KV."""
        size = self._block_size
        index = len(token_ids) // size
        tokens = token_ids[index * size :]
        if tokens and index < len(blocks):
            hashed = hash((hashes[index - 1] if index else 0, *tokens))
            self._beginnings[blocks[index]] = (hashed, len(tokens))

    def num_at_beginning(
        self,
        token_ids: Sequenceable[int],
        blocks: Sequenceable[int],
        hashes: Sequenceable[int],
    ) -> int:
        """How many tokens have draft KV at the beginning of the block with the index
        len(hashes)."""
        index = len(hashes)
        if index >= len(blocks):
            return 0
        expected, count = self._beginnings.get(blocks[index], (0, 0))
        start = index * self._block_size
        tokens = token_ids[start : start + count]
        hashed = hash((hashes[-1] if hashes else 0, *tokens))
        return count if len(tokens) == count and hashed == expected else 0

    def add_hashes(
        self, hashes: list[int], sequence: Sequence, num_blocks: int
    ) -> None:
        """Adds the hashes of a sequence's first `num_blocks` blocks to `hashes`."""
        size = self._block_size
        for index in range(len(hashes), num_blocks):
            previous = hashes[-1] if hashes else 0
            tokens = sequence.token_ids[index * size : (index + 1) * size]
            hashes.append(hash((previous, *tokens)))

    def filled(self, blocks: Sequenceable[int], hashes: Sequenceable[int]) -> list[int]:
        """The indices of a sequence's blocks that have draft KV of the sequence's
        tokens."""
        return [
            index
            for index, (block, expected) in enumerate(zip(blocks, hashes, strict=False))
            if self._hashes.get(block) == expected
        ]

    def record_blocks(
        self,
        blocks: Sequenceable[int],
        hashes: Sequenceable[int],
        indices: Iterable[int],
    ) -> None:
        """Records that the blocks with these indices have draft KV."""
        for index in indices:
            self._hashes[blocks[index]] = hashes[index]
