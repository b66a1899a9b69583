"""Builds the steps of a drafter that reads hidden states (state_drafter.py)."""

import dataclasses
from collections.abc import Sequence as Sequenceable
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace

from engine.core.batch import Int32s, StepInput
from engine.core.sequence import Sequence
from engine.speculation.draft_kv import DraftPoolSizes
from model.drafters.state_sizes import StateTableSizes
from protocol.messages import SamplingParams

# Parameters for the draw of a row that is not the last row of its stream. The drawn
# token is not used.
_UNUSED_DRAW = SamplingParams(temperature=0.0)


@dataclass(eq=False, slots=True)
class DraftRows:
    """Rows that the drafter computes for one sequence. The row of a position p reads
    token p + 1, and the hidden state of position p in the engine's model.

    Attributes:
        blocks: the blocks that store the draft KV of the drafter's context.
        num_skipped: number of positions that the drafter's context leaves out.
        start: the position of the first row to compute.
        table_rows: for each row to compute, the index of its hidden state in the table
            of states (StateTableSizes).
        limit: the largest number of tokens to propose; 0: only KV is computed.
        scratch: the index of the sequence among those with scratch blocks; None: the
            sequence has no scratch blocks.
        proposals: the tokens that the drafter has drawn.
    """

    sequence: Sequence
    blocks: list[int]
    num_skipped: int
    start: int
    table_rows: list[int]
    limit: int = 0
    scratch: int | None = None
    proposals: list[int] = field(default_factory=list)

    @property
    def stop(self) -> int:
        """The position after the last row to compute."""
        return self.start + len(self.table_rows)

    @property
    def context_len(self) -> int:
        """The number of positions of the context after the step that computes the
        rows."""
        return self.stop - self.num_skipped

    @property
    def num_written(self) -> int:
        """The number of positions of the context after the round."""
        return self.context_len + max(self.limit - 1, 0)

    @property
    def tokens(self) -> list[int]:
        return self.sequence.token_ids[self.start + 1 : self.stop + 1]

    @property
    def sampling(self) -> SamplingParams:
        """The parameters with which the engine draws the sequence's tokens."""
        params = self.sequence.sampling.params
        if params.num_logprobs is None:
            return params
        return replace(params, num_logprobs=None)


def make_tables(streams: Sequenceable[DraftRows], sizes: DraftPoolSizes) -> Int32s:
    """The block tables of streams in the drafter's pool."""
    lens = [-(-stream.num_written // sizes.tokens_per_block) for stream in streams]
    tables = np.zeros((len(streams), max(lens)), np.int32)
    for row, stream, length in zip(tables, streams, lens, strict=True):
        row[:length] = sizes.table(stream.blocks, stream.scratch)[:length]
    return tables


def kv_step(streams: Sequenceable[DraftRows], sizes: DraftPoolSizes) -> StepInput:
    """The step that computes the KV of rows, and draws nothing."""
    return _prompt_step(streams, make_tables(streams, sizes))


def _prompt_step(streams: Sequenceable[DraftRows], tables: Int32s) -> StepInput:
    tokens = [token for stream in streams for token in stream.tokens]
    table_rows = [row for stream in streams for row in stream.table_rows]
    return StepInput(
        token_ids=np.array(tokens, np.int64),
        query_lens=np.array([len(stream.table_rows) for stream in streams], np.int32),
        context_lens=np.array([stream.context_len for stream in streams], np.int32),
        block_tables=tables,
        sampled_sequences=np.zeros(0, np.int32),
        sampling=[],
        is_draft=True,
        input_states=np.array(table_rows, np.int32),
        skipped_lens=_skipped_lens(streams),
    )


def _skipped_lens(streams: Sequenceable[DraftRows]) -> Int32s:
    return np.array([stream.num_skipped for stream in streams], np.int32)


class StateRound:
    """The steps of one round.

    Args:
        streams: the sequences of the first step. All of them draw.

    Attributes:
        rows: for each stream that draws in the latest step, the index of its draw.
    """

    def __init__(
        self,
        streams: Sequenceable[DraftRows],
        sizes: DraftPoolSizes,
        states: StateTableSizes,
    ) -> None:
        self._streams = streams
        self._states = states
        self._tables = make_tables(streams, sizes)
        self._num_steps = 0
        self.rows: dict[DraftRows, int] = {}

    def first_step(self, *, as_rows: bool) -> StepInput:
        """The step that computes the missing rows of the streams.

        Args:
            as_rows: whether the step treats each row as a separate sequence of one
                token, so that it can run as a CUDA graph.
        """
        self._num_steps = 1
        step = _prompt_step(self._streams, self._tables)
        num_streams = len(self._streams)
        if not as_rows:
            self.rows = {stream: row for row, stream in enumerate(self._streams)}
            return self._with_draws(
                step,
                sampled=list(range(num_streams)),
                sampling=[stream.sampling for stream in self._streams],
                positions=[stream.stop + 1 for stream in self._streams],
            )
        last_rows = (np.cumsum(step.query_lens) - 1).tolist()
        self.rows = dict(zip(self._streams, last_rows, strict=True))
        num_rows = len(step.token_ids)
        sampling = [_UNUSED_DRAW] * num_rows
        for stream, row in self.rows.items():
            sampling[row] = stream.sampling
        context_lens = step.positions + 1
        skipped_lens = np.repeat(step.skipped_lens, step.query_lens)
        # A row sees the KV of the rows before it, because the layer stores the KV of
        # all rows before any row attends.
        rows_step = StepInput(
            token_ids=step.token_ids,
            query_lens=np.ones(num_rows, np.int32),
            context_lens=context_lens.astype(np.int32),
            block_tables=np.repeat(self._tables, step.query_lens, axis=0),
            sampled_sequences=step.sampled_sequences,
            sampling=[],
            is_draft=True,
            input_states=step.input_states,
            skipped_lens=skipped_lens,
        )
        return self._with_draws(
            rows_step,
            sampled=list(range(num_rows)),
            sampling=sampling,
            positions=(context_lens + skipped_lens + 1).tolist(),
        )

    def next_step(self) -> StepInput | None:
        """The step that computes the tokens that the previous step has drawn; None if
        no stream needs more proposals."""
        indices = [
            index
            for index, stream in enumerate(self._streams)
            if stream.limit > self._num_steps
        ]
        if not indices:
            return None
        streams = [self._streams[index] for index in indices]
        rows = [self.rows[stream] for stream in streams]
        lens = [stream.context_len + self._num_steps for stream in streams]
        stops = [stream.stop + self._num_steps for stream in streams]
        step = StepInput(
            # The id -1 - r stands for the token of draw r in the previous step.
            token_ids=np.array([-1 - row for row in rows], np.int64),
            query_lens=np.ones(len(streams), np.int32),
            context_lens=np.array(lens, np.int32),
            block_tables=self._tables[indices],
            sampled_sequences=np.zeros(0, np.int32),
            sampling=[],
            is_draft=True,
            input_states=np.array(
                [self._states.first_output + row for row in rows], np.int32
            ),
            skipped_lens=_skipped_lens(streams),
        )
        self._num_steps += 1
        self.rows = {stream: row for row, stream in enumerate(streams)}
        return self._with_draws(
            step,
            sampled=list(range(len(streams))),
            sampling=[stream.sampling for stream in streams],
            positions=[stop + 1 for stop in stops],
        )

    @staticmethod
    def _with_draws(
        step: StepInput,
        *,
        sampled: list[int],
        sampling: list[SamplingParams],
        positions: list[int],
    ) -> StepInput:
        return dataclasses.replace(
            step,
            sampled_sequences=np.array(sampled, np.int32),
            sampling=sampling,
            draw_positions=np.array(positions, np.int32),
        )
