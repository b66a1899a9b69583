"""Verification of proposals by a real model in float32 whose KV is stored in 8 bits.

The KV of a token is rounded when it is stored. Rows of a verification must attend to
the rounded KV, as steps without proposals do. Otherwise, different tokens are drawn.
"""

import random
from collections.abc import Sequence

import pytest

from engine.core.sequence import Sequence as EngineSequence
from protocol.messages import SamplingParams
from tests.rigs.drafters import RandomDrafter, VerifyEverything
from tests.rigs.rank_threads import Ranks, ranks
from tests.rigs.shadow import MemoryTransport, add, make_core, run_until_idle

BLOCK_SIZE = 4
NUM_BLOCKS = 60
NUM_TOKENS = 30
VOCAB_SIZE = 512
FP8 = "float8_e4m3fn"
PROMPTS = [[(37 * i * i + 11 * start) % 251 for i in range(20)] for start in range(3)]
SAMPLINGS = [
    SamplingParams(temperature=0.0, num_logprobs=2),
    SamplingParams(temperature=1.0, seed=3, num_logprobs=2),
    SamplingParams(temperature=1.0, seed=4, num_logprobs=2, frequency_penalty=0.5),
]


def _run(executor: Ranks, drafters: Sequence[RandomDrafter] = ()) -> MemoryTransport:
    """Runs all requests concurrently."""
    executor.allocate(NUM_BLOCKS, BLOCK_SIZE)
    core, _, out = make_core(
        executor=executor,  # type: ignore[arg-type]
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        drafters=drafters,
        policy=VerifyEverything(),
    )
    requests = [
        add(f"r{index}", prompt, NUM_TOKENS, sampling)
        for index, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True))
    ]
    run_until_idle(core, *requests)
    return out


@pytest.mark.parametrize("share_right", [0.5, 1.0])
def test_tokens_and_logprobs_are_those_without_a_drafter(share_right):
    with ranks(1, kv_cache_dtype=FP8) as executor:
        expected = _run(executor)

        def next_token(sequence: EngineSequence, tokens: Sequence[int]) -> int:
            outputs = expected.tokens(sequence.request_id)
            index = len(tokens) - sequence.num_prompt_tokens
            return outputs[index] if index < len(outputs) else 0

        rng = random.Random(1)
        out = _run(executor, [RandomDrafter(share_right, rng, next_token, VOCAB_SIZE)])
    with ranks(1) as executor:
        unrounded = _run(executor)
    is_rounded = False
    for index in range(len(PROMPTS)):
        name = f"r{index}"
        assert out.tokens(name) == expected.tokens(name)
        assert out.terminals(name)[0].accepted_tokens > 0
        logprobs = _logprobs(out, name)
        assert logprobs == pytest.approx(_logprobs(expected, name), abs=1e-4)
        is_rounded |= _logprobs(expected, name) != pytest.approx(
            _logprobs(unrounded, name), abs=1e-3
        )
    assert is_rounded, "the KV of this engine is not rounded"


def _logprobs(out: MemoryTransport, name: str) -> list[float]:
    return [
        entry.logprob
        for delta in out.deltas
        if delta.request_id == name
        for entry in delta.logprobs or []
    ]
