"""Drafters for tests. A test chooses how often they are right, or lets them fail."""

import random
from collections.abc import Callable, Sequence

from engine.core.sequence import Sequence as EngineSequence
from engine.speculation.policy import SpeculationPolicy
from tests.rigs.shadow import VOCAB, allowed, next_token

NextToken = Callable[[EngineSequence, list[int]], int]


def shadow_token(sequence: EngineSequence, tokens: list[int]) -> int:
    """Return the token that the shadow (tests/rigs/shadow.py) draws after `tokens`.

    Args:
        sequence: the choice for which the token is drawn.
    """
    request = sequence.request
    num_outputs = len(tokens) - sequence.num_prompt_tokens
    is_banned = num_outputs < request.sampling.min_tokens
    token = next_token(tokens, sequence.sampling.params.choice_index)
    return allowed(token, request.stop_token_ids if is_banned else ())


class RandomDrafter:
    """A drafter that proposes a random number of tokens, right or wrong at random.

    Args:
        share_right: the probability that a proposed token is right.
        next_token: returns the right token.
    """

    uses_device = False

    def __init__(
        self,
        share_right: float,
        rng: random.Random,
        next_token: NextToken = shadow_token,
        vocab_size: int = VOCAB,
        name: str = "random",
    ) -> None:
        self.name = name
        self.share_right = share_right
        self._rng = rng
        self._next_token = next_token
        self._vocab_size = vocab_size

    def propose(
        self, sequences: Sequence[EngineSequence], limits: Sequence[int]
    ) -> list[list[int]]:
        return [
            self._propose(sequence, self._rng.randint(0, limit))
            for sequence, limit in zip(sequences, limits, strict=True)
        ]

    def _propose(self, sequence: EngineSequence, num_tokens: int) -> list[int]:
        tokens = list(sequence.token_ids)
        for _ in range(num_tokens):
            token = self._next_token(sequence, tokens)
            if self._rng.random() >= self.share_right:
                token = (token + self._rng.randrange(1, self._vocab_size)) % (
                    self._vocab_size
                )
            tokens.append(token)
        return tokens[len(sequence.token_ids) :]


class VerifyEverything(SpeculationPolicy):
    """A policy that lets steps verify all proposals, regardless of the cost."""

    def may_propose(
        self, rates: Sequence[float], max_lengths: Sequence[int], num_streams: int
    ) -> bool:
        return True

    def limits(
        self, rates: Sequence[float], lengths: Sequence[int], num_streams: int
    ) -> list[int]:
        return list(lengths)


class FailingDrafter:
    """A drafter that raises an error at every call."""

    name = "failing"
    uses_device = False

    def __init__(self) -> None:
        self.num_calls = 0

    def propose(
        self, sequences: Sequence[EngineSequence], limits: Sequence[int]
    ) -> list[list[int]]:
        self.num_calls += 1
        raise RuntimeError("this drafter is broken")
