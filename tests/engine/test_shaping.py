"""Bias, penalties, bans and masks follow their definitions, and change no other row.

The tests call RowAllocator and LogitShaper as the engine does, and draws are counted on
the device. After a preemption, or a first token from another engine, the row of counts
is initialized again.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.core.logits_processing import NO_ROW, LogitShaper, RowAllocator, Shaping
from engine.core.sequence import Phase, Sequence
from engine.sampling.sampler import sample
from engine.sampling.sampling_batch import SamplingBatch
from protocol.messages import SamplingParams
from tests.rigs.examples import examples
from tests.rigs.shadow import add

VOCAB = 70  # not a multiple of 32, the number of bits in a word of a mask


def _sequence(
    prompt: list[int], stop: list[int] | None = None, **sampling: Any
) -> Sequence:
    params = SamplingParams(temperature=0.0, **sampling)
    sequence = Sequence.from_request(
        add("a", prompt, 99, params, stop_token_ids=stop or [])
    )
    sequence.phase = Phase.RUNNING
    return sequence


def _expected(sequence: Sequence, logits: list[float]) -> list[float]:
    """Returns the logits by the definitions of bias, penalties and bans."""
    sampling = sequence.request.sampling
    shaped = []
    outputs = sequence.token_ids[sequence.num_prompt_tokens :]
    for token, given_logit in enumerate(logits):
        logit = given_logit + sampling.logit_bias.get(token, 0.0)
        if token in sequence.token_ids:
            penalty = sampling.repetition_penalty
            logit = logit / penalty if logit > 0 else logit * penalty
        logit -= sampling.frequency_penalty * outputs.count(token)
        logit -= sampling.presence_penalty * (token in outputs)
        if (
            len(outputs) < sampling.min_tokens
            and token in sequence.request.stop_token_ids
        ):
            logit = -math.inf
        shaped.append(logit)
    return shaped


class DrawingEngine:
    """Draws tokens for sequences as an engine does, greedily."""

    def __init__(self) -> None:
        self.book = RowAllocator()
        self.shaper = LogitShaper(VOCAB, 12)
        self.random = torch.Generator().manual_seed(1)

    def shaping(self, sequences: list[Sequence]) -> Shaping | None:
        positions = [len(s.token_ids) for s in sequences]
        return self.shaper.prepare(self.book.plan(sequences, positions))

    def check_step(self, sequences: list[Sequence]) -> None:
        """Draws a token for each sequence, and checks it against the definitions."""
        logits = 4 * torch.randn(len(sequences), VOCAB, generator=self.random)
        shaping = self.shaping(sequences)
        shaped = logits if shaping is None else shaping.apply(logits)
        expected = torch.tensor(
            [
                _expected(s, row)
                for s, row in zip(sequences, logits.tolist(), strict=True)
            ]
        )
        probabilities = (x.double().softmax(-1) for x in (shaped, expected))
        torch.testing.assert_close(*probabilities, rtol=1e-4, atol=1e-6)
        batch = SamplingBatch.from_params(
            [s.sampling.params for s in sequences],
            [len(s.token_ids) for s in sequences],
        )
        drawn = sample(logits, batch, shaping).token_ids.tolist()
        assert drawn == expected.argmax(-1).tolist()
        for sequence, token in zip(sequences, drawn, strict=True):
            sequence.token_ids.append(token)

    def check_verification(
        self, sequence: Sequence, proposals: list[int], num_kept: int
    ) -> None:
        """Draws after the last token and after each proposal, and checks each draw
        against the definitions. The sequence keeps `num_kept` proposals as its
        tokens."""
        draws = 1 + len(proposals)
        logits = 4 * torch.randn(draws, VOCAB, generator=self.random)
        start = len(sequence.token_ids)
        positions = list(range(start, start + draws))
        proposed = [tuple(proposals[:count]) for count in range(draws)]
        changes = self.book.plan([sequence] * draws, positions, proposed)
        shaping = self.shaper.prepare(changes)
        tokens = list(sequence.token_ids)
        expected = []
        for count, row in enumerate(logits.tolist()):
            sequence.token_ids = [*tokens, *proposals[:count]]
            expected.append(torch.tensor(_expected(sequence, row)).argmax().item())
        batch = SamplingBatch.from_params([sequence.sampling.params] * draws, positions)
        drawn = sample(logits, batch, shaping).token_ids.tolist()
        assert drawn == expected
        # The engine keeps the first draw, which is the first proposal or replaces it.
        proposals = [drawn[0], *proposals[1:]]
        sequence.token_ids = [*tokens, *proposals[: max(num_kept, 1)]]


_bias = st.dictionaries(
    st.integers(0, VOCAB - 1), st.floats(-100, 100, width=16), max_size=4
)
_params = st.fixed_dictionaries(
    {}, optional={"presence_penalty": st.sampled_from([-2.0, 0.5, 2.0]),
    "frequency_penalty": st.sampled_from([-1.0, 0.25, 2.0]),
    "repetition_penalty": st.sampled_from([0.5, 1.2, 2.0]), "logit_bias": _bias,
    "min_tokens": st.integers(1, 6)},
)  # fmt: skip
_prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20)


@examples(60)
@given(
    specs=st.lists(st.tuples(_prompts, _params), min_size=1, max_size=12),
    rounds=st.lists(
        st.tuples(st.sets(st.integers(0, 11), min_size=1), st.integers(0, 23)),
        max_size=14,
    ),
)
def test_any_mixture_over_any_steps_is_shaped_as_defined(specs, rounds):
    engine = DrawingEngine()
    sequences = [_sequence(prompt, [3, 4], **params) for prompt, params in specs]
    for indices, preempted in rounds:
        drawing = [sequences[i] for i in sorted(indices) if i < len(sequences)]
        if preempted < len(sequences):
            # The new row of a preempted sequence must include the drawn tokens.
            sequences[preempted].phase = Phase.WAITING
            engine.shaping([s for s in sequences if s.phase is Phase.RUNNING])
            sequences[preempted].phase = Phase.RUNNING
        if drawing:
            engine.check_step(drawing)


@examples(40)
@given(
    prompt=_prompts,
    params=_params,
    rounds=st.lists(
        st.tuples(
            st.lists(st.integers(0, VOCAB - 1), max_size=5),
            st.integers(0, 5),
            st.booleans(),
        ),
        max_size=8,
    ),
)
def test_verifications_are_shaped_as_the_draws_one_by_one(prompt, params, rounds):
    engine = DrawingEngine()
    sequence = _sequence(prompt, [3, 4], **params)
    other = _sequence([5], presence_penalty=1.0)
    for proposals, num_kept, is_between in rounds:
        if is_between:
            engine.check_step([other, sequence])
        engine.check_verification(sequence, proposals, num_kept)


def test_rows_without_options_stay_unchanged_and_cost_nothing():
    engine = DrawingEngine()
    plain = _sequence([1, 2])
    ends = _sequence([3], stop=[5], min_tokens=2)
    assert engine.shaping([plain]) is None
    for _ in range(2):
        engine.check_step([plain, ends])
    assert engine.shaping([plain, ends]) is None, "min_tokens has been reached"


def test_prompt_is_sent_once_with_the_tokens_that_another_engine_drew():
    book = RowAllocator()
    sequence = _sequence([7, 8], presence_penalty=1.0, logit_bias={1: 2.0})
    sequence.token_ids.append(9)
    first = book.plan([sequence], [3])
    assert first is not None
    assert (first.setups[0].prompt_ids, first.setups[0].output_ids) == ([7, 8], [9])
    sequence.token_ids.append(3)
    again = book.plan([sequence], [4])
    assert again is not None and again.setups == [] and again.rows == first.rows


def test_state_rows_of_sequences_that_no_longer_run_are_reused():
    book = RowAllocator()
    sequences = [_sequence([i], presence_penalty=1.0) for i in range(3)]
    plan = book.plan(sequences, [1, 1, 1])
    assert plan is not None and plan.rows == [0, 1, 2]
    sequences[1].phase = Phase.FINISHED
    another = _sequence([9], presence_penalty=1.0)
    plan = book.plan([_sequence([8]), another], [1, 1])
    assert plan is not None and plan.rows == [NO_ROW, 1]


def _mask(*rows: list[int]) -> Any:
    bits = np.zeros((len(rows), 96), np.uint8)
    for row, allowed in enumerate(rows):
        bits[row, allowed] = 1
    return np.packbits(bits, axis=1, bitorder="little").view("<i4").astype(np.int32)


@pytest.mark.parametrize("temperature", [0.0, 1e-3, 1.0])
@pytest.mark.parametrize("limits", [{}, {"top_k": 2}, {"top_p": 0.1}])
def test_only_allowed_tokens_are_drawn(temperature, limits):
    allowed = [[0, 31, 32, 69], [5], list(range(VOCAB))]
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    logits[1] = -math.inf  # the model is sure of token 6, which the mask bans
    logits[1, 6] = 0.0
    shaper = LogitShaper(VOCAB, 0)
    for seed in range(50):
        params = [SamplingParams(temperature=temperature, seed=seed, **limits)] * 3
        batch = SamplingBatch.from_params(params, [seed] * 3)
        drawn = sample(
            logits, batch, shaper.masked(None, _mask(*allowed))
        ).token_ids.tolist()
        assert all(token in row for token, row in zip(drawn, allowed, strict=True))


def test_grammar_that_allows_only_banned_tokens_overrides_the_ban():
    sequence = _sequence([1], stop=[2], min_tokens=5)
    plan = RowAllocator().plan([sequence], [1])
    batch = SamplingBatch.from_params([SamplingParams(seed=3)], [1])
    shaper = LogitShaper(VOCAB, 1)
    shaping = shaper.masked(shaper.prepare(plan), _mask([2]))
    drawn = sample(torch.zeros(1, VOCAB), batch, shaping)
    assert drawn.token_ids.tolist() == [2]
