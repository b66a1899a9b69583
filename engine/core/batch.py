"""The input of one step, which rank 0 sends to every rank, and the result of the step.

The scheduler's plan becomes flat arrays on the host, from which each rank derives
positions and slots. Rank 0 uses the arrays directly; the other ranks receive them as
msgpack bytes.

If the step verifies proposals for a sequence, the last token of the sequence and each
proposal have one row each. The ranks compute these rows as separate decoding sequences
that share a block table. Every layer stores the KV of all rows before any row attends,
so each row sees the tokens of the rows before it.
"""

from collections.abc import Sequence as Sequenceable
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from attention.base import AttentionBatch
from engine.core.logits_processing import LogitChanges, RowAllocator
from engine.core.scheduler import Scheduled
from protocol.messages import SamplingParams, TokenLogprobs

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


def _no_rows() -> Int32s:
    return np.zeros(0, np.int32)


class ScoredRows(msgspec.Struct, frozen=True, array_like=True):
    """Prompt tokens of one sequence that need logprobs. The logprobs of targets[i] are
    computed from the hidden state of row first_row + i among the step's T rows.
    """

    first_row: int
    targets: list[int]
    num_top: int  # number of most likely tokens to report for each target


@dataclass(frozen=True, eq=False)
class StepInput:
    """A step that computes T tokens of S sequences, and draws R tokens at its end. Each
    row of a verification counts as one of the S sequences.

    Attributes:
        token_ids: [T]; -1 - r stands for the token of draw r in the previously launched
            step. The value of this token is still on the device.
        query_lens: [S] tokens to compute.
        context_lens: [S] tokens with KV after the step.
        block_tables: [S, max_blocks x groups], padded with the null block.
        sampled_sequences: [R] for each draw, the index in S of its sequence. If several
            choices draw from one sequence, the sequence's index is repeated.
        sampling: [R] parameters of each draw, without logit_bias and grammar.
        logit_changes: the changes to the logits of the draws; None if no draw has a
            bias, penalties or banned tokens.
        is_masked: whether a draw has a grammar. If so, all tokens of the step are drawn
            by PendingStep.draw.
        scores: the prompt tokens that need logprobs.
        is_draft: whether a drafter computes the step, instead of the model that the
            engine serves. Block numbers then refer to the drafter's pool.
        stored_rows: rows of the step with hidden states that a drafter needs later.
        stored_slots: for each of `stored_rows`, the slot in which each rank stores the
            hidden state.
        input_states: [T] for each token, the row of the state table that the drafter
            reads (see StateTableSizes). Only steps of a drafter that reads hidden
            states have input_states, skipped_lens and draw_positions.
        skipped_lens: [S] number of tokens of each sequence that its block table leaves
            out.
        draw_positions: [R] for each draw, the number of tokens before it.
    """

    token_ids: Int64s
    query_lens: Int32s
    context_lens: Int32s
    block_tables: Int32s
    sampled_sequences: Int32s
    sampling: list[SamplingParams]
    logit_changes: LogitChanges | None = None
    is_masked: bool = False
    scores: list[ScoredRows] = field(default_factory=list)
    is_draft: bool = False
    stored_rows: Int32s = field(default_factory=_no_rows)
    stored_slots: Int32s = field(default_factory=_no_rows)
    input_states: Int32s = field(default_factory=_no_rows)
    skipped_lens: Int32s = field(default_factory=_no_rows)
    draw_positions: Int32s = field(default_factory=_no_rows)

    @property
    def num_before_draws(self) -> list[int]:
        """For each draw, the number of tokens before it, [R]. This number determines
        the random noise of the draw."""
        positions = self.draw_positions
        if not len(positions):
            positions = self.context_lens[self.sampled_sequences]
        num_tokens: list[int] = positions.tolist()
        return num_tokens

    @property
    def rotary_positions(self) -> Int64s:
        """The index of each token in its sequence, [T]."""
        if not len(self.skipped_lens):
            return self.positions
        skipped_lens = np.repeat(self.skipped_lens, self.query_lens)
        positions: Int64s = self.positions + skipped_lens
        return positions

    @property
    def positions(self) -> Int64s:
        """The index of each token in the block table of its sequence, [T]."""
        if self._is_decode:
            last_positions: Int64s = self.context_lens.astype(np.int64) - 1
            return last_positions
        starts = self.context_lens - self.query_lens
        offsets = np.cumsum(self.query_lens) - self.query_lens
        within = np.arange(len(self.token_ids), dtype=np.int64)
        positions: Int64s = within + np.repeat(starts - offsets, self.query_lens)
        return positions

    def attention_batch(self, block_size: int, num_groups: int = 1) -> AttentionBatch:
        """The batch for the attention backend. For every block_size tokens, its block
        tables have one block of each KV group, side by side (kvcache/groups.py). The
        slots in `slot_mapping` belong to the first group.
        """
        positions = self.positions
        rows = np.arange(len(self.query_lens))
        if not self._is_decode:
            rows = np.repeat(rows, self.query_lens)
        block_indices, offsets = np.divmod(positions, block_size)
        blocks = self.block_tables[rows, block_indices * num_groups]
        return AttentionBatch(
            query_lens=self.query_lens,
            context_lens=self.context_lens,
            block_tables=self.block_tables,
            slot_mapping=blocks.astype(np.int64) * block_size + offsets,
        )

    @property
    def _is_decode(self) -> bool:
        """Whether each sequence computes one token."""
        return len(self.token_ids) == len(self.query_lens)

    @property
    def last_token_rows(self) -> Int64s:
        """For each draw, the index of its row among the step's T rows, [R]. The token
        is drawn from the hidden state of this row."""
        ends = np.cumsum(self.query_lens, dtype=np.int64) - 1
        return ends[self.sampled_sequences]


@dataclass(frozen=True, eq=False)
class StepOutput:
    """The results of a step. The draws are in the order of
    `StepInput.sampled_sequences`; the logprobs of prompt tokens (`scores`) are in the
    order of `StepInput.scores`."""

    token_ids: list[int]  # [R]
    logprobs: list[TokenLogprobs | None]  # [R]
    scores: list[list[TokenLogprobs]] = field(default_factory=list)


class StepFailed(Exception):
    """A step could not be launched, or its tokens could not be drawn.

    The device still works, and no rank other than rank 0 has begun the step. The step,
    or a part of it, may be launched again. The second launch overwrites all KV that the
    failed step wrote.
    """


class PendingStep(Protocol):
    """A launched step."""

    def draw(self, masks: Int32s) -> None:
        """Draws the tokens of a masked step. Must be called before the next launch.

        Args:
            masks: [R, ceil(V / 32)]; bit t % 32 of word t // 32 is set where a row may
                draw token t.

        Raises:
            StepFailed: no tokens were drawn. The step has ended, so `result` must not
                be called.
        """

    def has_ended(self) -> bool:
        """Whether `result` would return immediately."""

    def result(self) -> StepOutput:
        """Waits until the step has finished on every rank. Called once."""


class Executor(Protocol):
    """Runs steps on every rank, in the order of their launches."""

    @property
    def depth(self) -> int:
        """The number of launched steps that may be unfinished when the next step is
        launched."""

    def launch(self, step: StepInput) -> PendingStep:
        """Launches a step.

        Raises:
            StepFailed: the step was launched only in part or not at all. More steps may
                be launched.
        """


def build_step(
    scheduled: Sequenceable[Scheduled], row_allocator: RowAllocator
) -> StepInput:
    """Makes the arrays of a step.

    Args:
        scheduled: the sequences of the step; not empty.
        row_allocator: assigns state rows to the draws.
    """
    num_seqs = sum(1 + len(item.proposals) for item in scheduled)
    query_lens = np.ones(num_seqs, dtype=np.int32)
    context_lens = np.empty(num_seqs, dtype=np.int32)
    max_blocks = max(len(item.sequence.block_ids) for item in scheduled)
    tables = np.zeros((num_seqs, max_blocks), dtype=np.int32)
    tokens: list[int] = []
    sampled: list[int] = []
    proposed: list[tuple[int, ...]] = []
    index = 0
    for item in scheduled:
        rows = range(index, index + 1 + len(item.proposals))
        stop = item.start + item.num_tokens
        block_ids = item.sequence.block_ids
        tables[rows.start : rows.stop, : len(block_ids)] = block_ids
        context_lens[rows.start : rows.stop] = np.arange(stop - len(rows), stop) + 1
        tokens += item.sequence.token_ids[item.start : stop]
        if item.proposals:
            tokens += item.proposals
            sampled += rows
            proposed += [item.proposals[:count] for count in range(len(rows))]
        else:
            query_lens[index] = item.num_tokens
            sampled += [index] * len(item.draws)
            proposed += [()] * len(item.draws)
            if stop > len(item.sequence.token_ids):
                tokens.append(-1 - item.sequence.awaited_row)
        index = rows.stop
    draws = [sequence for item in scheduled for sequence in item.draws]
    return StepInput(
        token_ids=np.array(tokens, dtype=np.int64),
        query_lens=query_lens,
        context_lens=context_lens,
        block_tables=tables,
        sampled_sequences=np.array(sampled, dtype=np.int32),
        sampling=[sequence.sampling.params for sequence in draws],
        logit_changes=row_allocator.plan(
            draws, context_lens[sampled].tolist(), proposed
        ),
        is_masked=any(sequence.sampling.grammar is not None for sequence in draws),
        scores=_scores(scheduled),
    )


def _scores(scheduled: Sequenceable[Scheduled]) -> list[ScoredRows]:
    scores = []
    row = 0
    for item in scheduled:
        if scored := item.scored:
            sequence = item.sequence
            targets = sequence.token_ids[scored.start : scored.stop]
            first_row = row + scored.start - 1 - item.start
            num_top = sequence.request.num_prompt_logprobs or 0
            scores.append(ScoredRows(first_row, targets, num_top))
        row += item.num_tokens
    return scores


def _array_to_wire(array: Any) -> tuple[str, tuple[int, ...], bytes]:
    assert isinstance(array, np.ndarray), array
    return array.dtype.str, array.shape, array.tobytes()


def _array_from_wire(
    _kind: type, wire: tuple[str, list[int], bytes]
) -> npt.NDArray[Any]:
    dtype, shape, data = wire
    return np.frombuffer(data, dtype).reshape(shape)


step_to_bytes = msgspec.msgpack.Encoder(enc_hook=_array_to_wire).encode
step_from_bytes = msgspec.msgpack.Decoder(StepInput, dec_hook=_array_from_wire).decode
