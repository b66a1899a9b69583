"""The decisions of one scheduling round: which sequences compute which tokens."""

from collections.abc import Sequence as Sequenceable
from dataclasses import dataclass, field

from engine.core.pace import Load
from engine.core.sequence import Sequence


@dataclass(frozen=True)
class Scheduled:
    """`sequence` computes `num_tokens` tokens from index `start` on."""

    sequence: Sequence
    start: int
    num_tokens: int
    # Choices whose next token is drawn at the step's end: none unless that is the last token.
    draws: tuple[Sequence, ...]

    @classmethod
    def next_of(cls, sequence: Sequence, num_tokens: int) -> "Scheduled":
        start = sequence.num_computed + sequence.num_launched
        is_last = num_tokens == sequence.num_uncomputed
        return cls(sequence, start, num_tokens, sequence.draws_next if is_last else ())

    @property
    def is_prompt(self) -> bool:
        """Else it is a stream's: one token after the prompt."""
        return self.num_tokens > 1 or self.start < self.sequence.num_prompt_tokens

    @property
    def scored(self) -> range:
        """Prompt tokens whose logprobs the step finds: each from the KV of those before it."""
        sequence = self.sequence
        if sequence.prompt_logprobs is None:
            return range(0)
        stop = min(self.start + self.num_tokens + 1, sequence.num_prompt_tokens)
        return range(max(self.start + 1, len(sequence.prompt_logprobs)), stop)


@dataclass
class Plan:
    """One round of decisions."""

    budget: int  # tokens that the step has left
    scheduled: list[Scheduled] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)  # that got their blocks
    receiving: list[Sequence] = field(
        default_factory=list
    )  # those of them to be pulled
    preempted: list[Sequence] = field(default_factory=list)
    stuck: list[Sequence] = field(
        default_factory=list
    )  # that the whole pool cannot hold

    def add(self, sequence: Sequence, num_tokens: int) -> None:
        self.scheduled.append(Scheduled.next_of(sequence, num_tokens))
        self.budget -= num_tokens


def load_of(scheduled: Sequenceable[Scheduled]) -> Load:
    """What a step of these sequences costs: its streams, the KV that they read, prompt tokens."""
    prompts = [item.num_tokens for item in scheduled if item.is_prompt]
    held = sum(item.start + item.num_tokens for item in scheduled)
    return Load(len(scheduled) - len(prompts), held, sum(prompts))
