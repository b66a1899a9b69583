"""Calculates which blocks a sequence's block table lacks, and which of its blocks the
sequence no longer needs.

With several KV groups (kvcache/groups.py), a table has one block of each group for
every block_size tokens. Blocks of groups with a window are allocated step by step. Such
a block is released when it lies before the windows of all sequences that may continue
from it.
"""

from collections.abc import Sequence as Sequenceable
from dataclasses import dataclass

from engine.core.budget.step_target import StepTarget
from engine.core.sequence import Sequence
from kvcache.blocks import NULL_BLOCK
from kvcache.groups import ONE_GROUP, KVGroups, without_null_blocks
from kvcache.layout import MAX_BLOCK_SIZE_TOKENS


@dataclass(frozen=True)
class SchedulerLimits:
    """The limits of a step and of a sequence.

    Attributes:
        max_num_seqs: largest number of running choices.
        max_num_batched_tokens: largest number of tokens of a step.
        max_model_len: largest number of tokens of a sequence, prompt and outputs.
        block_size: tokens of a block.
        step_target: target duration of a step that decodes. None: no target limits the
            prompt tokens of a step.
        groups: the KV groups of the model's layers.
        max_proposals: largest number of proposed tokens that a step verifies, for all
            sequences together.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    step_target: StepTarget | None = None
    groups: KVGroups = ONE_GROUP
    max_proposals: int = 0


class BlockTables:
    """Calculations on the block tables of all sequences of an engine."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._groups = limits.groups
        self._block_size = limits.block_size
        self._max_step_tokens = limits.max_num_batched_tokens

    def num_tokens(self, table: Sequenceable[int]) -> int:
        """The number of tokens for which a table has entries."""
        return len(table) // self._groups.count * self._block_size

    def num_blocks_for(self, sequence: Sequence, num_tokens: int) -> int:
        """The largest number of blocks that a waiting sequence needs at the same time
        until it has KV of `num_tokens` tokens."""
        pulled = 0
        if sequence.pull is not None:
            pulled = sequence.pull.num_to_pull(len(sequence.token_ids))
        step = min(max(num_tokens - pulled, 0), self._max_step_tokens)
        return self._groups.num_blocks_for(num_tokens, step, self._block_size)

    def entries_to_admit(
        self, sequence: Sequence, table: list[int], num_tokens: int, budget: int
    ) -> list[int]:
        """The entries of `table` that need a block before a sequence can be admitted.

        Groups without a window need blocks for all `num_tokens` tokens. Groups with a
        window need blocks for the tokens that are pulled. Without a pull, they need
        blocks for the tokens of the first step.

        Args:
            table: the cached blocks that the sequence starts from.
            budget: tokens that the sequence can compute in the first step.
        """
        groups = self._groups
        start = self.num_tokens(table)
        tokens = range(start, num_tokens)
        if sequence.pull is None:
            first_tokens = range(start, min(num_tokens, start + budget))
            window_ranges = [first_tokens] * groups.count
        else:
            stop = sequence.pull.num_to_pull(len(sequence.token_ids))
            limit = self.resume_limit(sequence, stop)
            window_ranges = groups.token_ranges(start, stop, limit)
        token_ranges = [
            window_range if window else tokens
            for window_range, window in zip(window_ranges, groups.windows, strict=True)
        ]
        return groups.missing_entries(table, token_ranges, self._block_size)

    def entries_for_next(
        self, sequence: Sequence, num_tokens: int
    ) -> Sequenceable[int]:
        """The entries of a running sequence's table that need a block before the
        sequence can compute its next `num_tokens` tokens.
        """
        groups = self._groups
        table = sequence.block_ids
        start = sequence.num_computed + sequence.num_launched
        stop = start + num_tokens
        if not groups.drops_blocks:
            return range(len(table), groups.count * -(-stop // self._block_size))
        return groups.missing_entries(
            table, [range(start, stop)] * groups.count, self._block_size
        )

    def drop_proposals_without_blocks(
        self, proposing: Sequenceable[Sequence], num_spare: int
    ) -> None:
        """Drops proposals that need more blocks than are spare, so that no sequence is
        preempted for a proposal.

        Args:
            num_spare: number of available blocks that steps without proposals leave.
        """
        for sequence in proposing:
            num_tokens = 1 + len(sequence.speculation.proposals)
            num_blocks = len(self.entries_for_next(sequence, num_tokens))
            num_blocks -= len(self.entries_for_next(sequence, 1))
            if num_blocks > num_spare:
                sequence.speculation.take_proposals()
            else:
                num_spare -= num_blocks

    def first_blocks(self, sequence: Sequence, num_blocks: int) -> list[int]:
        """The part of a sequence's table with the first `num_blocks` blocks of each
        group."""
        return sequence.block_ids[: num_blocks * self._groups.count]

    def publishable(self, sequence: Sequence, num_full: int) -> list[int]:
        """Returns the table of the first `num_full` blocks of each group, for the
        prefix index. In this table, the null block replaces each block that a pull has
        filled only partially.
        """
        count = self._groups.count
        table = self.first_blocks(sequence, num_full)
        for group, (window, first) in enumerate(
            zip(self._groups.windows, sequence.complete_from, strict=False)
        ):
            if window is not None:
                num_partial = min(first, num_full)
                partial_entries = slice(group, num_partial * count, count)
                table[partial_entries] = [NULL_BLOCK] * num_partial
        return table

    def fresh_blocks(self, sequence: Sequence) -> list[int]:
        """The blocks of a sequence that hold no KV yet."""
        num_cached = sequence.num_computed // self._block_size
        return without_null_blocks(
            sequence.block_ids[num_cached * self._groups.count :]
        )

    def resume_limit(self, sequence: Sequence, num_tokens: int) -> int:
        """The smallest number of tokens, at most `num_tokens`, after which any sequence
        may continue from the KV of this sequence: this sequence itself, its children,
        or a sequence of a borrower. Blocks in the windows before this position are
        still needed.

        If a request has several choices, each choice computes the last block of the
        prompt itself. On a borrower, this block may be larger than on this engine.
        """
        if not self._groups.drops_blocks:
            return max(0, num_tokens)
        limits = [num_tokens]
        if sequence.request.retain_kv:
            max_last_block = MAX_BLOCK_SIZE_TOKENS if len(sequence.choices) > 1 else 0
            limits.append(sequence.num_prompt_tokens - max_last_block)
        if sequence.choices.children:
            num_full = (sequence.num_prompt_tokens - 1) // self._block_size
            limits.append(num_full * self._block_size)
        return max(0, min(limits))

    def mark_partial_blocks(self, sequence: Sequence) -> None:
        """Records, in `sequence.complete_from`, where complete blocks begin after a
        pull. In a group with a window, a pull may begin in the middle of a block. This
        block must not be added to the prefix index.
        """
        if not self._groups.drops_blocks:
            return
        assert sequence.pull is not None
        stop = sequence.pull.num_to_pull(len(sequence.token_ids))
        token_ranges = self._groups.token_ranges(
            sequence.num_computed, stop, self.resume_limit(sequence, stop)
        )
        sequence.complete_from = [
            -(-token_range.start // self._block_size) for token_range in token_ranges
        ]

    def leased_table(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """Returns the table to lease for a sequence's first `num_tokens` tokens."""
        limit = num_tokens
        if sequence.choices.migrating is not sequence:
            limit = self.resume_limit(sequence, num_tokens)
        return self._groups.prefix_table(
            sequence.block_ids, num_tokens, self._block_size, limit
        )

    def take_passed_blocks(self, sequence: Sequence) -> list[int]:
        """Removes the blocks from a sequence's table that lie before the windows of all
        sequences that may continue from the table. Returns the removed blocks."""
        groups = self._groups
        if not groups.drops_blocks:
            return []
        limit = self.resume_limit(sequence, sequence.num_computed)
        released_until = sequence.retained_from or [0] * groups.count
        sequence.retained_from = groups.first_needed_blocks(limit, self._block_size)
        entries = sorted(
            block * groups.count + group
            for group, (start, stop) in enumerate(
                zip(released_until, sequence.retained_from, strict=True)
            )
            for block in range(start, stop)
        )
        passed = without_null_blocks(sequence.block_ids[entry] for entry in entries)
        for entry in entries:
            sequence.block_ids[entry] = NULL_BLOCK
        return passed
