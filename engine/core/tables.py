"""Where a sequence's block table lacks blocks, and which it needs no more: of several KV groups
(kvcache/groups.py) a table has a block of each for every block_size tokens. Those of groups with a
window come step by step, and go home once nobody who may go on from them looks back so far."""

from collections.abc import Sequence as Sequenceable
from dataclasses import dataclass

from engine.core.sequence import Sequence
from kvcache.blocks import NULL_BLOCK
from kvcache.groups import ONE_GROUP, KVGroups, without_null_blocks
from kvcache.layout import MAX_BLOCK_SIZE_TOKENS


@dataclass(frozen=True)
class SchedulerLimits:
    """What bounds a step and a sequence."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int  # tokens, prompt and outputs
    block_size: int  # tokens
    itl_target_s: float | None = (
        None  # of a step with streams; None: however long prompts make it
    )
    groups: KVGroups = ONE_GROUP


class BlockTables:
    """Of all sequences of an engine."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._groups, self._block_size = limits.groups, limits.block_size
        self._max_step_tokens = limits.max_num_batched_tokens

    def num_tokens(self, table: Sequenceable[int]) -> int:
        """That a table has room for."""
        return len(table) // self._groups.count * self._block_size

    def num_blocks_for(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks that a waiting sequence takes at most at a time for so many tokens."""
        pulled = 0 if sequence.remote is None else sequence.num_to_pull
        step = min(max(num_tokens - pulled, 0), self._max_step_tokens)
        return self._groups.num_blocks_for(num_tokens, step, self._block_size)

    def places_to_admit(
        self, sequence: Sequence, table: list[int], num_tokens: int, budget: int
    ) -> list[int]:
        """What a sequence that has `table` lacks: for so many tokens, but in groups with a window
        for those only that are pulled, or computed first."""
        groups, tokens = self._groups, range(self.num_tokens(table), num_tokens)
        first = [
            range(tokens.start, min(num_tokens, tokens.start + budget))
        ] * groups.count
        if sequence.remote is not None:
            stop = sequence.num_to_pull
            first = groups.token_ranges(tokens.start, stop, self.reach(sequence, stop))
        spans = [f if w else tokens for f, w in zip(first, groups.windows, strict=True)]
        return groups.missing_entries(table, spans, self._block_size)

    def places_for_next(self, sequence: Sequence, num_tokens: int) -> Sequenceable[int]:
        """What a running sequence lacks for so many tokens more."""
        groups, table = self._groups, sequence.block_ids
        start = sequence.num_computed + sequence.num_launched
        stop = start + num_tokens
        if not groups.drops_blocks:
            return range(len(table), groups.count * -(-stop // self._block_size))
        return groups.missing_entries(
            table, [range(start, stop)] * groups.count, self._block_size
        )

    def full(self, sequence: Sequence, num_full: int) -> list[int]:
        """The table of so many full blocks of each group."""
        return sequence.block_ids[: num_full * self._groups.count]

    def published(self, sequence: Sequence, num_full: int) -> list[int]:
        """The same, without blocks of which a pull has filled a part only."""
        table, count = self.full(sequence, num_full), self._groups.count
        for group, (window, first) in enumerate(
            zip(self._groups.windows, sequence.whole_from, strict=False)
        ):
            if window is not None:
                partial = min(first, num_full)
                table[group : partial * count : count] = [NULL_BLOCK] * partial
        return table

    def fresh(self, sequence: Sequence) -> list[int]:
        """The blocks that hold nothing yet."""
        num_cached = sequence.num_computed // self._block_size
        return without_null_blocks(
            sequence.block_ids[num_cached * self._groups.count :]
        )

    def reach(self, sequence: Sequence, num_tokens: int) -> int:
        """The fewest of so many tokens that anybody may go on from: of n choices all but the first
        compute the prompt's last block by themselves, and so does who borrows a lent one."""
        found = [num_tokens]
        if (
            self._groups.drops_blocks and sequence.request.retain_kv
        ):  # whatever a borrower's blocks
            of_last = MAX_BLOCK_SIZE_TOKENS if len(sequence.choices) > 1 else 0
            found.append(sequence.num_prompt_tokens - of_last)
        if self._groups.drops_blocks and sequence.children:
            found.append(
                (sequence.num_prompt_tokens - 1) // self._block_size * self._block_size
            )
        return max(0, min(found))

    def pulled(self, sequence: Sequence) -> None:
        """A pull has begun in the middle of a window's block: it is no block of the prefix."""
        stop, size = sequence.num_to_pull, self._block_size
        if self._groups.drops_blocks:
            spans = self._groups.token_ranges(
                sequence.num_computed, stop, self.reach(sequence, stop)
            )
            sequence.whole_from = [-(-span.start // size) for span in spans]

    def of_prompt(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """The table that is lent of so many tokens."""
        reach = num_tokens if sequence.is_moving else self.reach(sequence, num_tokens)
        return self._groups.prefix_table(
            sequence.block_ids, num_tokens, self._block_size, reach
        )

    def take_passed(self, sequence: Sequence) -> list[int]:
        """Takes out of the table the blocks before the windows of all who may go on from it."""
        groups = self._groups
        if not groups.drops_blocks:
            return []
        reach = self.reach(sequence, sequence.num_computed)
        before = sequence.kept_from or [0] * groups.count
        sequence.kept_from = groups.first_needed_blocks(reach, self._block_size)
        places = sorted(
            block * groups.count + group
            for group, kept in enumerate(zip(before, sequence.kept_from, strict=True))
            for block in range(*kept)
        )
        passed = without_null_blocks(sequence.block_ids[at] for at in places)
        for at in places:
            sequence.block_ids[at] = NULL_BLOCK
        return passed
