"""Proposes the tokens that an MTP layer or an EAGLE-3 drafter draws.

Such a drafter has one layer. Its row of position p reads token p + 1 and the hidden
state of position p in the engine's model, and predicts token p + 2. The drafter draws
tokens as a draft model does (model_drafter.py), and stores its KV as a draft model does
(draft_kv.py).

- Every step of the engine's model stores the hidden states of each sequence's last rows
  in slots of the table that each rank has (StateTableSizes). A sequence has
  `slots_per_sequence` slots, and position p uses slot p modulo this number.
- Rows of a prompt are computed in a *KV step*: a step of the drafter that directly
  follows the step that computed their states, and draws nothing. Rows of a decoding
  sequence are computed in the sequence's next round, or in the next KV step. When a
  decoding sequence has more than _MAX_BACKLOG missing rows, a KV step computes the
  missing rows of all sequences.
- In a round, the first step computes the missing rows of each sequence, whose tokens
  are all known. Each further step reads the draws and the outputs of the previous step,
  which are still on the device. The next round computes the rows of the further steps
  again, from states of the engine's model.

This server has no states of tokens whose KV was pulled or found in the prefix cache.
The drafter sees these tokens only where blocks have draft KV of the same tokens
(state_blocks.py). The drafter's block table leaves out all other blocks of such tokens.
If the first position with a state is in the middle of a block, its draft KV is stored
in the block's first slot without draft KV. No other sequence uses this slot, because
the engine's model has yet to write to the block. Positions for rotary embeddings are
always the positions of the tokens in the sequence.
"""

import math
from collections.abc import Iterator
from collections.abc import Sequence as Sequenceable
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from engine.config import EngineConfig
from engine.core.batch import Executor, PendingStep, StepInput
from engine.core.plan import Scheduled
from engine.core.sequence import Phase, Sequence
from engine.speculation.model_drafter import DraftLimits
from engine.speculation.run_round import run_round
from engine.speculation.states.state_blocks import StateBlocks
from engine.speculation.states.state_rounds import DraftRows, StateRound, kv_step
from model.drafters.state_sizes import StateTableSizes

# Maximum number of rows of a decoding sequence that wait for its next round (the
# backlog). If there are more, a KV step computes them.
_MAX_BACKLOG: Final = 8
# Number of rows by which a backlog may exceed _MAX_BACKLOG before it is computed. The
# causes are steps that were launched ahead, and the token limit of a step.
_SPARE_SLOTS: Final = 8


def slots_per_sequence(max_proposals: int) -> int:
    """The number of slots for the states of one sequence. A verification also stores
    states of the proposals that are then rejected."""
    return _MAX_BACKLOG + _SPARE_SLOTS + 1 + max_proposals


def state_table_sizes(config: EngineConfig, max_proposals: int) -> StateTableSizes:
    """The sizes of each rank's table of states."""
    return StateTableSizes(
        num_slots=config.max_num_seqs * slots_per_sequence(max_proposals),
        max_outputs=config.max_step_rows,
        max_tokens=max(config.max_num_batched_tokens, config.max_step_rows),
    )


@dataclass(eq=False, slots=True)
class _StoredStates:
    """The hidden states of a sequence that are stored in slots, and its draft KV.

    Attributes:
        first_slot: the first slot of the sequence.
        context: the indices of full blocks before `drafted_from` that have draft KV.
        num_beginning: number of tokens with draft KV at the beginning of the block that
            contains `drafted_from`.
        drafted_from: the position at which gapless draft KV begins: all positions from
            it up to `Sequence.num_drafted` have draft KV.
        hashes: see StateBlocks.
        start, stop: positions [start, stop) have states in slots.
        written_stop: the position after the last position whose state was ever stored.
    """

    first_slot: int
    context: list[int] = field(default_factory=list)
    num_beginning: int = 0
    drafted_from: int = 0
    start: int = -1
    stop: int = -1
    written_stop: int = -1
    hashes: list[int] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class _PlannedItem:
    """The drafter's work for one sequence of a step of the engine's model.

    Attributes:
        item: the tokens of a sequence that the step computes.
        first_row: the index of the first of these tokens in the step.
        computed: the positions in the sequence whose drafter rows are computed directly
            after the step.
    """

    item: Scheduled
    first_row: int
    states: _StoredStates
    computed: range

    @property
    def stored(self) -> range:
        """The positions whose states the step stores. Never empty: the KV step reads
        states of this step from the tables of the ranks, which receive them only if the
        step stores at least one state."""
        stop = self.item.start + self.item.num_tokens
        start = max(self.item.start, self.computed.stop)
        return range(min(start, stop - 1), stop)


class StateDrafter:
    """Implements drafter.StateReadingDrafter.

    Args:
        name: the value of the label `drafter` of the metrics.
        executor: runs steps of the drafter on all ranks.
        max_seqs: the largest number of running sequences.
    """

    uses_device = True
    # The drafter needs hidden states, which a pull does not transfer.
    catch_up_token_s = math.inf

    def __init__(
        self,
        name: str,
        executor: Executor,
        limits: DraftLimits,
        table: StateTableSizes,
        max_seqs: int,
    ) -> None:
        self.name = name
        self._executor = executor
        self._limits = limits
        self._table = table
        self._block_size = limits.sizes.tokens_per_block
        self._blocks = StateBlocks(self._block_size, limits.groups)
        self.drafted_blocks = self._blocks
        self._num_slots = slots_per_sequence(limits.max_proposals)
        self._free_slots = [index * self._num_slots for index in range(max_seqs)]
        self._stored: dict[Sequence, _StoredStates] = {}
        self._planned: list[_PlannedItem] = []
        self._kv_step: StepInput | None = None

    # -- steps of the engine's model ----------------------------------------------

    def prepare(
        self,
        scheduled: Sequenceable[Scheduled],
        step: StepInput,
        *,
        only_prompts: bool = False,
    ) -> StepInput:
        self._release_ended()
        self._planned = self._plan(scheduled, only_prompts=only_prompts)
        self._kv_step = self._build_kv_step()
        rows: list[int] = []
        slots: list[int] = []
        for planned in self._planned:
            offset = planned.first_row - planned.item.start
            for position in planned.stored:
                rows.append(position + offset)
                slots.append(self._slot(planned.states, position))
        return replace(
            step,
            stored_rows=np.array(rows, np.int32),
            stored_slots=np.array(slots, np.int32),
        )

    def follow(self) -> list[PendingStep]:
        for planned in self._planned:
            self._commit(planned)
        launched = []
        if self._kv_step is not None:
            # The records below do not wait for this step: it draws nothing, and steps
            # run in the order of their launches.
            launched.append(self._executor.launch(self._kv_step))
        for planned in self._planned:
            # A sequence may have ended since the step was prepared.
            is_running = planned.item.sequence.phase is Phase.RUNNING
            if planned.computed and is_running:
                self._record(
                    planned.item.sequence,
                    planned.computed,
                    records_partial_block=True,
                )
        self._planned = []
        self._kv_step = None
        return launched

    def _release_ended(self) -> None:
        """Frees the slots of sequences that no longer run. The slots can be reused
        immediately, because unfinished steps of an ended sequence run before the steps
        of the next owner."""
        ended = [s for s in self._stored if s.phase is not Phase.RUNNING]
        for sequence in ended:
            self._free_slots.append(self._stored.pop(sequence).first_slot)

    def _plan(
        self, scheduled: Sequenceable[Scheduled], *, only_prompts: bool
    ) -> list[_PlannedItem]:
        planned = [
            _PlannedItem(item, first_row, states, _missing_rows(item))
            for item, first_row in _with_first_rows(scheduled)
            if item.is_prompt or not only_prompts
            if (states := self._states_for(item)) is not None
        ]
        # A step of the drafter spends most of its time on reading the drafter's
        # weights, so one step for all sequences takes less time than one step for each.
        is_due = any(_is_due(entry) for entry in planned)
        # Sequences with rows that read states of this step come first, because these
        # states are not stored for later.
        planned.sort(key=lambda entry: entry.computed.stop <= entry.item.start)
        num_left = self._limits.max_step_tokens
        for entry in planned:
            if not is_due or len(entry.computed) > num_left:
                entry.computed = range(entry.computed.start, entry.computed.start)
            num_left -= len(entry.computed)
        return planned

    def _states_for(self, item: Scheduled) -> _StoredStates | None:
        """The stored states of a sequence, for a step that continues it. If the draft
        KV and the states before the step are incomplete, the drafter's context begins
        at the step. Returns None if no slots are free."""
        sequence = item.sequence
        states = self._stored.get(sequence)
        if states is None:
            if not self._free_slots:
                return None
            states = _StoredStates(self._free_slots.pop())
            self._stored[sequence] = states
        first = max(states.start, states.drafted_from)
        is_continued = first <= sequence.num_drafted <= item.start <= states.stop
        computes_known_tokens = _complete_stop(item) > item.start
        # The step might overwrite slots with earlier states before the drafter reads
        # them.
        if computes_known_tokens and sequence.num_drafted < item.start:
            is_continued = False
        if not is_continued:
            self._begin(sequence, states, item.start)
        return states

    def _begin(self, sequence: Sequence, states: _StoredStates, start: int) -> None:
        """Begins the draft KV of a sequence at the position `start`. The drafter's
        context also includes the earlier blocks that have draft KV."""
        num_full = start // self._block_size
        self._blocks.add_hashes(states.hashes, sequence, num_full)
        blocks = self._blocks.blocks_of(sequence)[:num_full]
        states.context = self._blocks.filled(blocks, states.hashes)
        states.num_beginning = min(
            start % self._block_size,
            self._blocks.num_at_beginning(
                sequence.token_ids,
                self._blocks.blocks_of(sequence),
                states.hashes[:num_full],
            ),
        )
        states.drafted_from = start
        states.start = start
        states.stop = start
        states.written_stop = start
        sequence.num_drafted = start

    def _build_kv_step(self) -> StepInput | None:
        streams = []
        for planned in self._planned:
            if not planned.computed:
                continue
            step_start = planned.item.start
            first_row = self._table.first_token + planned.first_row
            table_rows = [
                first_row + position - step_start
                if position >= step_start
                else self._slot(planned.states, position)
                for position in planned.computed
            ]
            stream = self._make_rows(
                planned.item.sequence,
                planned.states,
                planned.computed.start,
                table_rows,
            )
            self._blocks.forget(self._written_blocks(stream))
            streams.append(stream)
        if not streams:
            return None
        return kv_step(streams, self._limits.sizes)

    def _commit(self, planned: _PlannedItem) -> None:
        """Records the states that a launched step stores."""
        states = planned.states
        stored = planned.stored
        if planned.computed.stop > planned.item.start:
            states.start = stored.start
        states.stop = stored.stop
        states.written_stop = max(states.written_stop, stored.stop)
        states.start = max(states.start, states.written_stop - self._num_slots)

    # -- rounds ---------------------------------------------------------------------

    def propose(
        self, sequences: Sequenceable[Sequence], limits: Sequenceable[int]
    ) -> list[list[int]]:
        streams = [
            self._make_stream(sequence, limit)
            for sequence, limit in zip(sequences, limits, strict=True)
        ]
        planned = self._select([stream for stream in streams if stream is not None])
        if planned:
            self._run(planned)
        for stream in planned:
            self._record(stream.sequence, range(stream.start, stream.stop))
        return [stream.proposals if stream is not None else [] for stream in streams]

    def _make_stream(self, sequence: Sequence, limit: int) -> DraftRows | None:
        """The rows of a sequence in a round; None if a state is missing, or if no token
        may be proposed."""
        num_tokens = len(sequence.token_ids)
        # The last row is computed even if it has draft KV, because the first proposal
        # is drawn from its logits.
        start = min(sequence.num_drafted, num_tokens - 2)
        stop = num_tokens - 1
        limit = min(
            limit, self._limits.max_proposals, self._limits.max_len - num_tokens + 1
        )
        states = self._stored.get(sequence)
        if limit <= 0 or states is None:
            return None
        if start < max(states.start, states.drafted_from) or stop > states.stop:
            return None
        slots = [self._slot(states, position) for position in range(start, stop)]
        stream = self._make_rows(sequence, states, start, slots)
        stream.limit = limit
        return stream

    def _select(self, streams: list[DraftRows]) -> list[DraftRows]:
        """Returns the streams of a round, those with the fewest rows first. Gives
        scratch blocks to streams that need them."""
        num_left = self._limits.max_step_tokens
        num_scratch = 0
        selected: list[DraftRows] = []
        for stream in sorted(streams, key=lambda stream: len(stream.table_rows)):
            if len(stream.table_rows) > num_left:
                break
            num_allocated = len(stream.blocks) * self._block_size
            if stream.num_written > num_allocated:
                if num_scratch < self._limits.sizes.max_scratch_seqs:
                    stream.scratch = num_scratch
                    num_scratch += 1
                else:
                    stream.limit = num_allocated - stream.context_len + 1
            num_left -= len(stream.table_rows)
            self._blocks.forget(self._written_blocks(stream))
            selected.append(stream)
        return selected

    def _run(self, streams: list[DraftRows]) -> None:
        """Runs the steps of a round, and stores the draws as proposals."""
        draft_round = StateRound(streams, self._limits.sizes, self._table)
        num_rows = sum(len(stream.table_rows) for stream in streams)
        step = draft_round.first_step(as_rows=num_rows <= self._limits.max_graph_rows)
        for _ in run_round(self._executor, draft_round, step):
            pass

    # -- rows -------------------------------------------------------------------------

    def _slot(self, states: _StoredStates, position: int) -> int:
        return states.first_slot + position % self._num_slots

    def _make_rows(
        self,
        sequence: Sequence,
        states: _StoredStates,
        start: int,
        table_rows: list[int],
    ) -> DraftRows:
        """The rows of a sequence from the position `start` on."""
        blocks = self._blocks.blocks_of(sequence)
        context = [blocks[index] for index in states.context]
        new_blocks = blocks[states.drafted_from // self._block_size :]
        num_before = len(context) * self._block_size + states.num_beginning
        num_skipped = states.drafted_from - num_before
        return DraftRows(
            sequence,
            blocks=context + new_blocks,
            num_skipped=num_skipped,
            start=start,
            table_rows=table_rows,
        )

    def _written_blocks(self, stream: DraftRows) -> list[int]:
        """The blocks of the sequence to which the draft KV of its rows is written."""
        first = (stream.start - stream.num_skipped) // self._block_size
        return stream.blocks[first : -(-stream.num_written // self._block_size)]

    def _record(
        self,
        sequence: Sequence,
        computed: range,
        *,
        records_partial_block: bool = False,
    ) -> None:
        """Records that the positions `computed` have draft KV.

        Args:
            records_partial_block: also record the positions in the last block, if this
                block is not full.
        """
        sequence.num_drafted = max(sequence.num_drafted, computed.stop)
        states = self._stored[sequence]
        if states.drafted_from % self._block_size:
            return  # draft KV may be in other slots than the engine's KV
        num_full = sequence.num_drafted // self._block_size
        self._blocks.add_hashes(states.hashes, sequence, num_full)
        self._blocks.record_blocks(
            self._blocks.blocks_of(sequence),
            states.hashes,
            range(computed.start // self._block_size, num_full),
        )
        if records_partial_block:
            self._blocks.record_beginning(
                sequence.token_ids[: sequence.num_drafted],
                self._blocks.blocks_of(sequence),
                states.hashes,
            )


def _missing_rows(item: Scheduled) -> range:
    """The rows without draft KV that can be computed directly after the step that
    computes `item`."""
    start = item.sequence.num_drafted
    return range(start, max(start, _complete_stop(item)))


def _is_due(entry: _PlannedItem) -> bool:
    """Whether the rows of a sequence must be computed directly after the step, because
    some of their states are not going to be stored, or because too many rows wait."""
    computes_known_tokens = entry.computed.stop > entry.item.start
    return computes_known_tokens or len(entry.computed) > _MAX_BACKLOG


def _complete_stop(item: Scheduled) -> int:
    """The position after the last position of `item` whose next token is known. The
    token after a proposal is unknown."""
    num_complete = len(item.sequence.token_ids) - 1
    return min(item.start + item.num_tokens, num_complete)


def _with_first_rows(
    scheduled: Sequenceable[Scheduled],
) -> Iterator[tuple[Scheduled, int]]:
    first_row = 0
    for item in scheduled:
        yield item, first_row
        first_row += item.num_tokens
