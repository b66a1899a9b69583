"""The decisions of one scheduling round: which sequences compute which tokens."""

from collections.abc import Sequence as Sequenceable
from dataclasses import dataclass, field

from engine.core.budget.step_times import Load
from engine.core.sequence import Sequence


@dataclass(frozen=True)
class Scheduled:
    """`sequence` computes `num_tokens` tokens from index `start`."""

    sequence: Sequence
    start: int
    num_tokens: int
    # Choices that draw their next token at the end of the step. Empty unless the step
    # computes the last token of the sequence.
    draws: tuple[Sequence, ...]

    @classmethod
    def from_next_tokens(cls, sequence: Sequence, num_tokens: int) -> "Scheduled":
        """Schedules the next `num_tokens` tokens of a sequence."""
        start = sequence.num_computed + sequence.num_launched
        is_last = num_tokens == sequence.num_uncomputed
        return cls(
            sequence, start, num_tokens, sequence.drawing_choices if is_last else ()
        )

    @property
    def is_prompt(self) -> bool:
        """Whether the tokens are prompt tokens, or outputs that are recomputed after a
        preemption. Otherwise, a decoding sequence computes its one token."""
        return self.num_tokens > 1 or self.start < self.sequence.num_prompt_tokens

    @property
    def scored(self) -> range:
        """Indices of the prompt tokens that get logprobs in the step. The logprobs of a
        token follow from the hidden state of the preceding token."""
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

    def add(self, sequence: Sequence, num_tokens: int) -> None:
        self.scheduled.append(Scheduled.from_next_tokens(sequence, num_tokens))
        self.budget -= num_tokens

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence from the step."""
        for item in [item for item in self.scheduled if item.sequence is sequence]:
            self.scheduled.remove(item)
            self.budget += item.num_tokens


def load_of(scheduled: Sequenceable[Scheduled]) -> Load:
    """The work of a step with these sequences, from which its duration is estimated."""
    streams = 0
    context_tokens = 0
    prompt_tokens = 0
    weighted_starts = 0
    for item in scheduled:
        if item.is_prompt:
            prompt_tokens += item.num_tokens
            weighted_starts += item.num_tokens * item.start
        else:
            streams += 1
            context_tokens += item.start + item.num_tokens
    prompt_start = weighted_starts / max(prompt_tokens, 1)
    return Load(streams, context_tokens, prompt_tokens, prompt_start)
