"""Proposes the tokens that a draft model draws.

The draft model draws a token with the sampling parameters and the noise of the draw
that verifies it. The noise is a function of seed, choice, position and token, so both
models prefer the same tokens, and sampled requests accept almost as many proposals as
greedy ones. Penalties, bias and grammars are not applied to proposals.

One round proposes tokens for all given sequences:

1. One step computes the tokens without draft KV. Usually these are the last one or two
   tokens of each sequence. The tokens of long prompts are computed in pieces; see
   catch_up.py. A sequence gets no proposals before its draft KV is complete.
2. Each further step computes the token that the previous step has drawn, which is still
   on the device.
3. The draws of a step are copied to the host while the next step runs.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as Sequenceable
from dataclasses import dataclass

from engine.core.batch import Executor
from engine.core.sequence import Sequence
from engine.speculation.catch_up import CatchUpBudget
from engine.speculation.draft_kv import DraftedBlocks, DraftPoolSizes
from engine.speculation.draft_round import DraftRound, DraftStream
from engine.speculation.run_round import run_round
from kvcache.groups import KVGroups


@dataclass(frozen=True)
class DraftLimits:
    """The limits of a draft model's steps.

    Attributes:
        sizes: the sizes of the draft model's pool, in blocks.
        groups: the KV groups of the engine's model.
        max_proposals: the largest number of tokens to propose for a sequence.
        max_len: the largest number of tokens of a sequence.
        max_step_tokens: the largest number of tokens of a step.
        max_graph_rows: sequences of the largest step that runs as a CUDA graph; 0 if no
            step does.
        vocab_size: vocabulary size of the draft model.
        target_vocab_size: vocabulary size of the engine's model.
        max_catch_up_s: target duration for the prompt tokens that one round computes.
    """

    sizes: DraftPoolSizes
    groups: KVGroups
    max_proposals: int
    max_len: int
    max_step_tokens: int
    max_graph_rows: int
    vocab_size: int
    target_vocab_size: int
    max_catch_up_s: float


class ModelDrafter:
    """Implements drafter.Drafter with a draft model.

    Args:
        executor: runs steps of the draft model on all ranks.
    """

    name = "model"
    uses_device = True

    def __init__(
        self,
        executor: Executor,
        limits: DraftLimits,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._executor = executor
        self._limits = limits
        self._clock = clock
        self._block_size = limits.sizes.tokens_per_block
        # Largest number of tokens without draft KV of a sequence that took part in the
        # last round. These are the accepted proposals, the token before them, whose
        # draft KV may be in a scratch block, and the token that was drawn after them.
        self._max_usual = limits.max_proposals + 2
        self.drafted_blocks = DraftedBlocks(self._block_size, limits.groups)
        self._budget = CatchUpBudget(limits.max_catch_up_s, limits.max_step_tokens)
        # For each sequence of the last round: the number of its tokens in that round,
        # and the proposals that have draft KV in the sequence's blocks.
        self._speculated: dict[Sequence, tuple[int, list[int]]] = {}

    @property
    def catch_up_token_s(self) -> float:
        return self._budget.token_s

    def propose(
        self, sequences: Sequenceable[Sequence], limits: Sequenceable[int]
    ) -> list[list[int]]:
        streams = [
            self._make_stream(sequence, limit)
            for sequence, limit in zip(sequences, limits, strict=True)
        ]
        self._speculated.clear()
        planned = self._plan([stream for stream in streams if stream.limit > 0])
        if planned:
            self._run(planned)
        for stream in planned:
            self._record(stream)
        return [self._usable(stream.proposals) for stream in streams]

    def _make_stream(self, sequence: Sequence, limit: int) -> DraftStream:
        num_tokens = len(sequence.token_ids)
        blocks = self.drafted_blocks.blocks_of(sequence)
        self._accept(sequence)
        self.drafted_blocks.extend(sequence, blocks)
        max_limit = min(
            self._limits.max_proposals, self._limits.max_len - num_tokens + 1
        )
        # The last token is computed even if it has draft KV, because the first proposal
        # is drawn from its logits.
        return DraftStream(
            sequence,
            blocks,
            limit=min(limit, max_limit),
            start=min(sequence.num_drafted, num_tokens - 1),
        )

    def _accept(self, sequence: Sequence) -> None:
        """Adds to `sequence.num_drafted` the proposals of the last round that have
        draft KV and have become tokens of the sequence."""
        start, proposals = self._speculated.get(sequence, (0, []))
        if start != sequence.num_drafted:
            return  # the sequence has lost its blocks
        for token, proposal in zip(sequence.token_ids[start:], proposals, strict=False):
            if token != proposal:
                break
            sequence.num_drafted += 1

    # -- the plan of a round ------------------------------------------------------

    def _plan(self, streams: list[DraftStream]) -> list[DraftStream]:
        """Decides which tokens the first step computes. Returns the streams of this
        step, those with the fewest tokens first."""
        num_left = self._limits.max_step_tokens
        num_catch_up = self._budget.num_tokens
        num_scratch = 0
        written: set[int] = set()
        planned: list[DraftStream] = []
        for stream in sorted(streams, key=lambda stream: stream.num_missing):
            is_behind = stream.num_missing > self._max_usual
            budget = min(num_left, num_catch_up) if is_behind else num_left
            stream.num_tokens = min(stream.num_missing, budget)
            if stream.is_complete and self._needs_scratch(stream):
                self._limit_to_blocks(stream, num_scratch)
                num_scratch += 1
            blocks = self._written_blocks(stream)
            # If another sequence of this round computes the same shared block, this
            # sequence waits. It can use that draft KV in the next round.
            is_shared = not written.isdisjoint(blocks)
            if is_shared or not self._can_compute(stream):
                continue
            planned.append(stream)
            written.update(blocks)
            num_left -= stream.num_tokens
            if is_behind:
                num_catch_up -= stream.num_tokens
        self.drafted_blocks.forget(written)
        return sorted(planned, key=lambda stream: stream.num_tokens)

    def _needs_scratch(self, stream: DraftStream) -> bool:
        """Whether the round writes draft KV beyond the blocks of a complete stream."""
        stop = len(stream.sequence.token_ids) + stream.limit - 1
        return stop > len(stream.blocks) * self._block_size

    def _limit_to_blocks(self, stream: DraftStream, num_scratch: int) -> None:
        """Gives a stream scratch blocks. If `num_scratch` streams already have all
        scratch blocks, limits the proposals of this stream to those that fit into its
        own blocks."""
        if num_scratch < self._limits.sizes.max_scratch_seqs:
            stream.scratch = num_scratch
            return
        num_tokens = len(stream.sequence.token_ids)
        num_free = len(stream.blocks) * self._block_size - num_tokens
        stream.limit = num_free + 1

    def _written_blocks(self, stream: DraftStream) -> list[int]:
        """The blocks of the sequence to which the round writes draft KV."""
        stop = stream.start + stream.num_tokens
        if stream.is_complete:
            stop += stream.limit - 1
        first = stream.start // self._block_size
        return stream.blocks[first : -(-stop // self._block_size)]

    def _can_compute(self, stream: DraftStream) -> bool:
        if not stream.num_tokens or stream.limit <= 0:
            return False
        if self._limits.vocab_size >= self._limits.target_vocab_size:
            return True
        return max(stream.first_tokens) < self._limits.vocab_size

    # -- the steps of a round -----------------------------------------------------

    def _run(self, streams: list[DraftStream]) -> None:
        """Runs the steps of a round, and stores the draws as proposals."""
        is_usual = all(stream.num_missing <= self._max_usual for stream in streams)
        num_tokens = sum(stream.num_tokens for stream in streams)
        draft_round = DraftRound(streams, self._limits.sizes)
        started_s = self._clock()
        step = draft_round.first_step(
            as_rows=is_usual
            and num_tokens <= self._limits.max_graph_rows
            and all(stream.is_complete for stream in streams)
        )
        for _ in run_round(self._executor, draft_round, step):
            if not is_usual:
                self._budget.record(num_tokens, self._clock() - started_s)
                is_usual = True  # later steps compute no missing tokens

    def _record(self, stream: DraftStream) -> None:
        """Records which tokens of a stream now have draft KV in its blocks."""
        sequence = stream.sequence
        num_in_blocks = len(stream.blocks) * self._block_size
        computed = min(stream.start + stream.num_tokens, num_in_blocks)
        sequence.num_drafted = max(sequence.num_drafted, computed)
        self.drafted_blocks.record(sequence, stream.blocks)
        num_tokens = len(sequence.token_ids)
        if sequence.num_drafted == num_tokens:
            # The last proposal was drawn, but not computed.
            stop = min(len(stream.proposals) - 1, num_in_blocks - num_tokens)
            self._speculated[sequence] = (num_tokens, stream.proposals[:stop])

    def _usable(self, proposals: list[int]) -> list[int]:
        """The proposals before the first token that the engine's model does not
        have."""
        for index, token_id in enumerate(proposals):
            if token_id >= self._limits.target_vocab_size:
                return proposals[:index]
        return proposals
