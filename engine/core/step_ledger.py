"""Accounting of launched steps: the work of each step, and the blocks that it may still
use.

Blocks return to the allocator only when every launched step that refers to them has
finished (invariant I8 of docs/design.md). Steps finish in the order of their launches.
"""

from collections import deque
from collections.abc import Sequence as Sequenceable

from engine.core.budget.prefill_budget import PrefillBudget
from engine.core.budget.step_times import Load
from engine.core.plan import Scheduled, load_of
from engine.core.sequence import Sequence
from kvcache.blocks import BlockAllocator


class StepLedger:
    """The launched steps of one scheduler.

    Args:
        prefill_budget: receives the durations of finished steps; None if prompt tokens
            are not limited.
    """

    def __init__(
        self, allocator: BlockAllocator, prefill_budget: PrefillBudget | None
    ) -> None:
        self._allocator = allocator
        self._prefill_budget = prefill_budget
        self._loads: deque[Load] = deque()  # of the unfinished steps
        self._num_finished = 0
        # Pairs of the number of a step and the blocks to release once this step has
        # finished.
        self.deferred_releases: list[tuple[int, list[int]]] = []

    def record_launch(self, scheduled: Sequenceable[Scheduled]) -> None:
        """Records that a step was launched. Updates the launched tokens and the awaited
        draws of its sequences."""
        self._loads.append(load_of(scheduled))
        number = self._num_finished + len(self._loads)
        row = 0
        for item in scheduled:
            sequence = item.sequence
            sequence.last_step = number
            sequence.num_launched += item.num_tokens
            if item.draws:
                sequence.num_awaited += item.num_drawing_tokens
                sequence.awaited_row = row
                row += len(item.draws)

    def record_finish(self, seconds: float | None) -> None:
        """Records that the oldest launched step no longer reads or writes any block, on
        any rank. Releases the blocks that only waited for the end of this step.

        Args:
            seconds: the duration of the step; None if it was not measured.
        """
        self._num_finished += 1
        load = self._loads.popleft()
        if self._prefill_budget is not None and seconds is not None:
            self._prefill_budget.record_step(load, seconds)
        deferred = self.deferred_releases
        self.deferred_releases = []
        for number, blocks in deferred:
            if number <= self._num_finished:
                self._allocator.release(blocks)
            else:
                self.deferred_releases.append((number, blocks))

    def is_in_launched_step(self, sequence: Sequence) -> bool:
        """Whether an unfinished step refers to the blocks of a sequence."""
        return sequence.last_step > self._num_finished

    def release(self, sequence: Sequence, blocks: list[int]) -> None:
        """Releases blocks now, or when the last launched step that refers to them has
        finished."""
        if blocks and self.is_in_launched_step(sequence):
            self.deferred_releases.append((sequence.last_step, blocks))
        else:
            self._allocator.release(blocks)
