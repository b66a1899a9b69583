"""Verification of proposals by real models in float32.

Each request first runs without a drafter, which gives the expected tokens. With
drafters of a chosen accuracy, the tokens and logprobs must be the same.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from engine.core.sequence import Sequence as EngineSequence
from engine.speculation.speculator import Speculator
from protocol.messages import AddRequest, SamplingParams, TokenLogprobs
from tests.model.random_models import make
from tests.model.test_against_transformers import CASES
from tests.rigs.drafters import RandomDrafter, VerifyEverything
from tests.rigs.engine_pair import RealPair
from tests.rigs.engines import Engine
from tests.rigs.shadow import MemoryTransport, add

PROMPT = [(37 * i * i + 11) % 131 for i in range(60)]
NUM_TOKENS = 24
VOCAB_SIZE = 131
# Full attention, latents with a mixture, windows of 40 tokens, capped scores.
MODELS = ["llama", "deepseek-moe", "mistral-window", "gemma3"]
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0, num_logprobs=3),
    "sampled": SamplingParams(temperature=1.0, top_p=0.95, seed=7, num_logprobs=0),
    "penalties": SamplingParams(
        temperature=0.8,
        seed=8,
        presence_penalty=0.7,
        frequency_penalty=0.5,
        repetition_penalty=1.2,
        logit_bias={3: 1.5, 8: -2.0},
        num_logprobs=1,
    ),
    "stop tokens": SamplingParams(temperature=1.0, seed=9, min_tokens=9),
}


def _requests(num_choices: int = 1) -> list[AddRequest]:
    return [
        add(
            name,
            PROMPT,
            NUM_TOKENS,
            sampling,
            num_choices=num_choices,
            stop_token_ids=list(range(20)) if name == "stop tokens" else [],
        )
        for name, sampling in SAMPLINGS.items()
    ]


class _Results:
    """The tokens and logprobs of all choices of a request."""

    def __init__(self, request: AddRequest, out: MemoryTransport) -> None:
        name = request.request_id
        choices = range(request.num_choices)
        self.tokens = [out.tokens(name, choice) for choice in choices]
        self.logprobs: list[list[TokenLogprobs]] = [
            [
                logprobs
                for delta in out.deltas
                if delta.choice == choice
                for logprobs in delta.logprobs or []
            ]
            for choice in choices
        ]
        ends = sorted(out.terminals(name), key=lambda end: end.choice)
        self.reasons = [end.finish_reason for end in ends]
        self.num_accepted = sum(end.accepted_tokens for end in ends)
        self.num_rejected = sum(end.rejected_tokens for end in ends)

    def assert_equal(self, other: "_Results") -> None:
        assert self.tokens == other.tokens
        assert self.reasons == other.reasons
        for logprobs, expected in zip(self.logprobs, other.logprobs, strict=True):
            assert [entry.top_ids for entry in logprobs] == [
                entry.top_ids for entry in expected
            ]
            assert [entry.logprob for entry in logprobs] == pytest.approx(
                [entry.logprob for entry in expected], abs=1e-4
            )


def _use_drafter(engine: Engine, share_right: float, results: _Results) -> None:
    """Let an engine use a drafter that copies `results` of the same request.

    Args:
        share_right: the share of proposals that are copied, and therefore right.
    """

    def next_token(sequence: EngineSequence, tokens: Sequence[int]) -> int:
        outputs = results.tokens[sequence.choice]
        index = len(tokens) - sequence.num_prompt_tokens
        return outputs[index] if index < len(outputs) else 0

    rng = random.Random(11)
    drafter = RandomDrafter(share_right, rng, next_token, VOCAB_SIZE)
    limits = replace(engine.core.scheduler.limits, max_proposals=16)
    engine.core.speculator = Speculator(limits, [drafter], policy=VerifyEverything())


def _stop_using_drafters(engine: Engine) -> None:
    engine.core.speculator = Speculator(engine.core.scheduler.limits)


@pytest.mark.parametrize("name", MODELS)
def test_tokens_and_logprobs_are_those_without_a_drafter(name: str, tmp_path: Path):
    architecture, options = CASES[name]
    make(architecture, tmp_path, **options)
    with RealPair(tmp_path, p_block_size=8, block_size=4) as pair:
        for request in _requests():
            _stop_using_drafters(pair.d)
            expected = _Results(request, pair.decode_only(request))
            for share_right in (0.3, 0.8, 1.0):
                _use_drafter(pair.d, share_right, expected)
                results = _Results(request, pair.decode_only(request))
                results.assert_equal(expected)
                assert results.num_accepted > 0


@pytest.mark.parametrize("name", MODELS)
def test_pulled_requests_and_several_choices_use_drafters(name: str, tmp_path: Path):
    architecture, options = CASES[name]
    make(architecture, tmp_path, **options)
    with RealPair(tmp_path, p_block_size=8, block_size=4, p_order="LBCNHD") as pair:
        for request in _requests(num_choices=3):
            _stop_using_drafters(pair.d)
            expected = _Results(request, pair.prefill_and_decode(request))
            _use_drafter(pair.d, 0.8, expected)
            results = _Results(request, pair.prefill_and_decode(request))
            results.assert_equal(expected)
            assert results.num_accepted > 0
