"""Defines where the KV of a draft model (draft KV) is stored, and records which tokens
have draft KV.

The draft model has its own KV pool, whose blocks have the same numbers as the engine's
blocks: the KV of a token is in the same block and slot of both pools. So draft KV needs
no allocator and no block tables. Draft KV is pulled together with the KV of the
engine's model from an engine with the same drafter (kvcache/transfer/draft.py).

- `Sequence.num_drafted` counts the tokens at the beginning of a sequence that have
  draft KV. The sequence holds the blocks of these tokens, so their draft KV is not
  overwritten. A sequence that loses its blocks starts again at 0.
- Blocks outlive sequences in the engine's prefix index. For each block, `DraftedBlocks`
  records the tokens whose draft KV fills the block. If a sequence later has the block
  for the same tokens after the same prefix, their draft KV is not computed again. A
  record depends only on what the draft model wrote, so it remains correct when the
  engine uses the block for other tokens.
- The engine allocates blocks for proposed tokens only after the round that proposes
  them. The draft KV of tokens for which the sequence has no block yet is written to
  scratch blocks, which follow the other blocks in the draft model's pool. The next
  round computes this KV again.
"""

import itertools
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Sequenceable
from dataclasses import dataclass

import numpy as np

from engine.core.batch import Int32s
from engine.core.sequence import Sequence
from kvcache.blocks import NULL_BLOCK
from kvcache.groups import KVGroups

# Maximum number of sequences with scratch blocks in one round. For further sequences,
# proposals stop at the end of the allocated blocks. This is rare: with blocks of 64
# tokens, few sequences reach the end of a block in the same round.
_MAX_SCRATCH_SEQS = 64


@dataclass(frozen=True)
class DraftPoolSizes:
    """The blocks of a draft model's pool, in relation to the engine's pool.

    Attributes:
        num_blocks: blocks of the engine's pool, including the null block.
        tokens_per_block: tokens of a block of the engine's block tables.
        blocks_per_block: draft blocks that hold the tokens of one block of the engine's
            block tables.
        scratch_per_seq: scratch blocks of a sequence.
        max_scratch_seqs: sequences of one round that can have scratch blocks.
    """

    num_blocks: int
    tokens_per_block: int
    blocks_per_block: int
    scratch_per_seq: int
    max_scratch_seqs: int

    @classmethod
    def make(
        cls,
        *,
        num_blocks: int,
        tokens_per_block: int,
        blocks_per_block: int,
        max_proposals: int,
        max_seqs: int,
    ) -> "DraftPoolSizes":
        # A round writes at most `max_proposals` tokens after the allocated blocks: the
        # last token of the sequence, and all proposals except the last.
        draft_block_size = tokens_per_block // blocks_per_block
        return cls(
            num_blocks=num_blocks,
            tokens_per_block=tokens_per_block,
            blocks_per_block=blocks_per_block,
            scratch_per_seq=-(-max_proposals // draft_block_size),
            max_scratch_seqs=min(max_seqs, _MAX_SCRATCH_SEQS),
        )

    @property
    def num_scratch_blocks(self) -> int:
        return self.scratch_per_seq * self.max_scratch_seqs

    @property
    def num_draft_blocks(self) -> int:
        """Blocks of the draft model's pool, including its null blocks."""
        return self.num_blocks * self.blocks_per_block + self.num_scratch_blocks

    def table(self, blocks: list[int], scratch: int | None) -> Int32s:
        """The draft model's block table of a sequence.

        Args:
            blocks: the blocks of the sequence.
            scratch: the index of the sequence among those with scratch blocks; None:
                the sequence has none.
        """
        numbers = np.array(blocks, np.int32)
        if self.blocks_per_block > 1:
            within = np.arange(self.blocks_per_block, dtype=np.int32)
            numbers = (numbers[:, None] * self.blocks_per_block + within).ravel()
        if scratch is None:
            return numbers
        first = self.num_blocks * self.blocks_per_block + scratch * self.scratch_per_seq
        last = first + self.scratch_per_seq
        return np.concatenate((numbers, np.arange(first, last, dtype=np.int32)))


class DraftedBlocks:
    """For each block, the tokens whose draft KV it stores.

    Args:
        block_size: tokens of a block.
        groups: the KV groups of the engine's model. A group without a window must be
            among them: only such a group keeps the blocks of all tokens.
    """

    def __init__(self, block_size: int, groups: KVGroups) -> None:
        self._block_size = block_size
        self._groups = groups
        self._group = groups.windows.index(None)
        # For each filled block, a hash of its tokens and of all tokens before them.
        self._hashes: dict[int, int] = {}

    def blocks_of(self, sequence: Sequence) -> list[int]:
        """The blocks that store the draft KV of a sequence, including blocks whose
        draft KV is not computed yet."""
        return self._blocks_in(sequence.block_ids)

    def _blocks_in(self, table: list[int]) -> list[int]:
        """The blocks of a table that store draft KV, including blocks whose draft KV is
        not computed yet."""
        blocks = list(self._groups.group_table(table, self._group))
        while blocks and blocks[-1] == NULL_BLOCK:
            blocks.pop()
        return blocks

    def num_drafted(self, token_ids: Sequenceable[int], table: list[int]) -> int:
        """The number of tokens at the beginning of `token_ids` that have draft KV in
        full blocks of a table."""
        blocks = self._blocks_in(table)
        return len(self._matching_hashes(token_ids, blocks)) * self._block_size

    def _matching_hashes(
        self, token_ids: Sequenceable[int], blocks: Sequenceable[int]
    ) -> list[int]:
        """The hashes of the first blocks, up to the first block that is not filled with
        draft KV of these tokens."""
        hashes = []
        for block, expected in zip(blocks, self._hashes_of(token_ids), strict=False):
            if self._hashes.get(block) != expected:
                break
            hashes.append(expected)
        return hashes

    def begin_pull(self, table: list[int], start: int) -> None:
        """Drops the records of the blocks of a table, from the block of token `start`
        on. Must be called before draft KV is pulled to these blocks."""
        self.forget(self._blocks_in(table)[start // self._block_size :])

    def finish_pull(
        self, token_ids: Sequenceable[int], table: list[int], start: int, stop: int
    ) -> None:
        """Records the blocks that the pulled draft KV of tokens [start, stop) fills."""
        first = -(-start // self._block_size)
        filled = zip(self._blocks_in(table), self._hashes_of(token_ids), strict=False)
        last = stop // self._block_size
        for block, hashed in itertools.islice(filled, first, max(first, last)):
            self._hashes[block] = hashed

    def _hashes_of(self, token_ids: Sequenceable[int]) -> Iterator[int]:
        """Yields a hash for each full block of these tokens, which includes all tokens
        before the block."""
        size = self._block_size
        hashed = 0
        for start in range(0, len(token_ids) - size + 1, size):
            hashed = hash((hashed, *token_ids[start : start + size]))
            yield hashed

    def extend(self, sequence: Sequence, blocks: list[int]) -> None:
        """Increases `sequence.num_drafted` by the next tokens whose blocks are already
        filled with their draft KV."""
        size = self._block_size
        while sequence.num_drafted % size == 0:
            index = sequence.num_drafted // size
            is_full = sequence.num_drafted + size <= len(sequence.token_ids)
            if not is_full or index >= len(blocks) or blocks[index] not in self._hashes:
                return
            if self._hash(sequence, blocks, index) != self._hashes[blocks[index]]:
                return
            sequence.num_drafted += size

    def forget(self, blocks: Iterable[int]) -> None:
        """Drops the records of blocks. Must be called before draft KV is written to
        these blocks."""
        for block in blocks:
            self._hashes.pop(block, None)

    def record(self, sequence: Sequence, blocks: list[int]) -> None:
        """Records the blocks that are filled with draft KV of the first
        `sequence.num_drafted` tokens."""
        num_full = sequence.num_drafted // self._block_size
        first = num_full
        while first and blocks[first - 1] not in self._hashes:
            first -= 1
        for index in range(first, num_full):
            hashed = self._hash(sequence, blocks, index)
            assert hashed is not None, "the block before was not recorded"
            self._hashes[blocks[index]] = hashed

    def _hash(self, sequence: Sequence, blocks: list[int], index: int) -> int | None:
        """The hash of a sequence's tokens up to the end of a block; None if the
        previous block is not recorded."""
        previous: int | None = 0
        if index:
            previous = self._hashes.get(blocks[index - 1])
        if previous is None:
            return None
        start = index * self._block_size
        return hash((previous, *sequence.token_ids[start : start + self._block_size]))
