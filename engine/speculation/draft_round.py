"""Builds the steps of a round of a draft model (model_drafter.py)."""

from collections.abc import Sequence as Sequenceable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from msgspec.structs import replace

from engine.core.batch import Int32s, StepInput
from engine.core.sequence import Sequence
from engine.speculation.draft_kv import DraftPoolSizes
from protocol.messages import SamplingParams

# Parameters for the draw of a row that is not the last row of its stream. The drawn
# token is not used.
_UNUSED_DRAW: Final = SamplingParams(temperature=0.0)


@dataclass(eq=False, slots=True)
class DraftStream:
    """A sequence that takes part in one round.

    Attributes:
        blocks: the blocks that store the sequence's draft KV.
        limit: the largest number of tokens to propose.
        start: the index of the first token that the round computes.
        num_tokens: how many tokens the first step of the round computes.
        scratch: the index of the sequence among those with scratch blocks; None: the
            sequence has no scratch blocks.
        proposals: the tokens that the draft model has drawn.
    """

    sequence: Sequence
    blocks: list[int]
    limit: int
    start: int
    num_tokens: int = 0
    scratch: int | None = None
    proposals: list[int] = field(default_factory=list)

    @property
    def num_missing(self) -> int:
        """The number of tokens to compute before the first proposal can be drawn."""
        return len(self.sequence.token_ids) - self.start

    @property
    def is_complete(self) -> bool:
        """Whether the first step computes all missing tokens."""
        return self.num_tokens == self.num_missing

    @property
    def first_tokens(self) -> list[int]:
        """The tokens that the first step computes."""
        return self.sequence.token_ids[self.start : self.start + self.num_tokens]

    @property
    def sampling(self) -> SamplingParams:
        """The parameters with which the engine draws the sequence's tokens."""
        params = self.sequence.sampling.params
        if params.num_logprobs is None:
            return params
        return replace(params, num_logprobs=None)


class DraftRound:
    """The steps of one round.

    Args:
        streams: the sequences of the first step.

    Attributes:
        rows: for each stream that draws in the latest step, the index of its draw.
    """

    def __init__(
        self, streams: Sequenceable[DraftStream], sizes: DraftPoolSizes
    ) -> None:
        self._streams = streams
        tables = [sizes.table(stream.blocks, stream.scratch) for stream in streams]
        self._tables = np.zeros((len(tables), max(map(len, tables))), np.int32)
        for row, table in zip(self._tables, tables, strict=True):
            row[: len(table)] = table
        self._num_steps = 0
        self.rows: dict[DraftStream, int] = {}

    def first_step(self, *, as_rows: bool) -> StepInput:
        """The step that computes the missing tokens of the streams.

        Args:
            as_rows: whether the step treats each token as a separate sequence of one
                token, so that it can run as a CUDA graph. All streams must then be
                complete.
        """
        query_lens = np.array([stream.num_tokens for stream in self._streams], np.int32)
        starts = np.array([stream.start for stream in self._streams], np.int32)
        token_ids = [token for stream in self._streams for token in stream.first_tokens]
        self._num_steps = 1
        if as_rows:
            return self._rows_step(query_lens, starts, token_ids)
        complete = [
            index for index, stream in enumerate(self._streams) if stream.is_complete
        ]
        drawing = [self._streams[index] for index in complete]
        self.rows = {stream: row for row, stream in enumerate(drawing)}
        return StepInput(
            token_ids=np.array(token_ids, np.int64),
            query_lens=query_lens,
            context_lens=starts + query_lens,
            block_tables=self._tables,
            sampled_sequences=np.array(complete, np.int32),
            sampling=[stream.sampling for stream in drawing],
            is_draft=True,
        )

    def _rows_step(
        self, query_lens: Int32s, starts: Int32s, token_ids: list[int]
    ) -> StepInput:
        """The step with a row for each token. A row sees the KV of the rows before it,
        because each layer stores the KV of all rows before any row attends."""
        num_rows = len(token_ids)
        ends = np.cumsum(query_lens)
        within = np.arange(num_rows, dtype=np.int32) - np.repeat(
            ends - query_lens, query_lens
        )
        last_rows = [int(end) - 1 for end in ends]
        sampling = [_UNUSED_DRAW] * num_rows
        for stream, row in zip(self._streams, last_rows, strict=True):
            sampling[row] = stream.sampling
        self.rows = dict(zip(self._streams, last_rows, strict=True))
        context_lens = np.repeat(starts, query_lens) + within + 1
        return StepInput(
            token_ids=np.array(token_ids, np.int64),
            query_lens=np.ones(num_rows, np.int32),
            context_lens=context_lens.astype(np.int32),
            block_tables=np.repeat(self._tables, query_lens, axis=0),
            sampled_sequences=np.arange(num_rows, dtype=np.int32),
            sampling=sampling,
            is_draft=True,
        )

    def next_step(self) -> StepInput | None:
        """The step that computes the tokens that the previous step has drawn; None if
        no stream needs more proposals."""
        indices = [
            index
            for index, stream in enumerate(self._streams)
            if stream in self.rows and stream.limit > self._num_steps
        ]
        if not indices:
            return None
        streams = [self._streams[index] for index in indices]
        # The id -1 - r stands for the token of draw r in the previous step.
        token_ids = [-1 - self.rows[stream] for stream in streams]
        context_lens = [
            len(stream.sequence.token_ids) + self._num_steps for stream in streams
        ]
        self._num_steps += 1
        self.rows = {stream: row for row, stream in enumerate(streams)}
        return StepInput(
            token_ids=np.array(token_ids, np.int64),
            query_lens=np.ones(len(streams), np.int32),
            context_lens=np.array(context_lens, np.int32),
            block_tables=self._tables[indices],
            sampled_sequences=np.arange(len(streams), dtype=np.int32),
            sampling=[stream.sampling for stream in streams],
            is_draft=True,
        )
