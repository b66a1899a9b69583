"""The decisions of one scheduling round: which sequences compute which tokens."""

from collections.abc import Sequence as Sequenceable
from dataclasses import dataclass, field

from engine.core.budget.step_times import Load
from engine.core.sequence import Sequence


@dataclass(frozen=True)
class Scheduled:
    """An item of a step: `sequence` computes `num_tokens` tokens from index `start` on.

    Attributes:
        draws: for each draw at the end of the step, the choice that draws. Empty unless
            the step computes the last token of the sequence.
        proposals: proposed tokens that the step verifies. They are the last of the
            `num_tokens` tokens. The sequence draws after its own last token and after
            each proposal.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    draws: tuple[Sequence, ...]
    proposals: tuple[int, ...] = ()

    @classmethod
    def from_next_tokens(
        cls, sequence: Sequence, num_tokens: int, proposals: tuple[int, ...] = ()
    ) -> "Scheduled":
        """Schedules the next `num_tokens` tokens of a sequence, and the proposals for
        the tokens after them."""
        start = sequence.num_computed + sequence.num_launched
        is_last = num_tokens == sequence.num_uncomputed
        draws = sequence.drawing_choices if is_last else ()
        if proposals:
            assert draws == (sequence,), "proposals for a sequence that does not decode"
            draws *= 1 + len(proposals)
        return cls(sequence, start, num_tokens + len(proposals), draws, proposals)

    @property
    def num_drawing_tokens(self) -> int:
        """The number of tokens, at the end of the item, that are followed by a draw."""
        return 1 + len(self.proposals) if self.draws else 0

    def without_draws(self) -> "Scheduled":
        """The part of the item that remains if its draws are skipped. The tokens that
        a draw would follow are computed again in a later step, which then draws."""
        num_tokens = self.num_tokens - self.num_drawing_tokens
        return Scheduled(self.sequence, self.start, num_tokens, draws=())

    @property
    def is_prompt(self) -> bool:
        """True if the tokens are prompt tokens, or outputs that are recomputed after a
        preemption. False if a decoding sequence computes its last token, perhaps with
        proposals."""
        if self.proposals:
            return False
        return self.num_tokens > 1 or self.start < self.sequence.num_prompt_tokens

    @property
    def scored(self) -> range:
        """Indices of the prompt tokens that get logprobs in the step. The logprobs of a
        token are computed from the hidden state of the preceding token."""
        logprobs = self.sequence.prompt_logprobs
        if logprobs is None:
            return range(0)
        stop = min(self.start + self.num_tokens + 1, self.sequence.num_prompt_tokens)
        return range(max(self.start + 1, len(logprobs.values)), stop)


@dataclass
class Plan:
    """The outcome of one scheduling round.

    Attributes:
        budget: number of tokens that can still be added to the step.
        admitted: sequences that got their first blocks in this round.
        receiving: the sequences of `admitted` that wait for their pull.
        preempted: sequences that lost their blocks in this round.
        stuck: sequences that need more blocks than the whole pool has.
    """

    budget: int
    scheduled: list[Scheduled] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    receiving: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    stuck: list[Sequence] = field(default_factory=list)

    def add(
        self, sequence: Sequence, num_tokens: int, proposals: tuple[int, ...] = ()
    ) -> None:
        item = Scheduled.from_next_tokens(sequence, num_tokens, proposals)
        self.scheduled.append(item)
        self.budget -= item.num_tokens

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence from the step."""
        for item in [item for item in self.scheduled if item.sequence is sequence]:
            self.scheduled.remove(item)
            self.budget += item.num_tokens


def load_of(scheduled: Sequenceable[Scheduled]) -> Load:
    """The work of a step, from which the duration of the step is estimated."""
    streams = 0
    context_tokens = 0
    prompt_tokens = 0
    weighted_starts = 0
    for item in scheduled:
        if item.is_prompt:
            prompt_tokens += item.num_tokens
            weighted_starts += item.num_tokens * item.start
        else:
            # A proposal is computed and attends like the token of another decoding
            # sequence.
            for index in range(item.num_tokens):
                streams += 1
                context_tokens += item.start + index + 1
    prompt_start = weighted_starts / max(prompt_tokens, 1)
    return Load(streams, context_tokens, prompt_tokens, prompt_start)
