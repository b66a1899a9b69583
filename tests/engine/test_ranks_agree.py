"""Two ranks of a model, each in a thread, get from a step's bytes all that shapes its draws, each
with half the heads or (dcp) with half the tokens.

Whatever one rank would miss (a copied block, a prompt to score, a penalty's counts) either changes
what rank 0 answers, because both share every sum, or leaves a collective without its partner.
"""

import pytest
import torch

from protocol.messages import AddRequest, SamplingParams, TokenLogprobs
from tests.rigs.rank_threads import Ranks, ranks
from tests.rigs.shadow import MemoryTransport, make_core, run_until_idle

BLOCKS, BLOCK_SIZE = 80, 4


REQUESTS = [
    AddRequest(
        request_id="choices",
        token_ids=[(13 * at) % 200 for at in range(30)],
        sampling=SamplingParams(
            temperature=1.2,
            seed=5,
            num_logprobs=2,
            frequency_penalty=0.6,
            repetition_penalty=1.3,
            logit_bias={7: 3.0},
        ),
        max_tokens=10,
        num_choices=3,
        num_prompt_logprobs=2,
    ),
    AddRequest(
        request_id="scored",
        token_ids=[(7 * at * at) % 300 for at in range(33)],
        sampling=SamplingParams(temperature=0.0),
        max_tokens=0,
        num_prompt_logprobs=0,
    ),
    AddRequest(
        request_id="plain",
        token_ids=[9, 8, 7],
        sampling=SamplingParams(temperature=0.0, presence_penalty=1.0),
        max_tokens=12,
    ),
]


def _answers(executor: Ranks, dcp: int = 1) -> MemoryTransport:
    executor.allocate(BLOCKS, BLOCK_SIZE // dcp)
    core, _, out = make_core(
        num_blocks=BLOCKS,
        block_size=BLOCK_SIZE,
        executor=executor,  # type: ignore[arg-type]
    )
    core.round(REQUESTS)
    run_until_idle(core)
    return out


def _values(rows: list[TokenLogprobs | None]) -> torch.Tensor:
    return torch.tensor([row.logprob for row in rows if row is not None])


@pytest.mark.parametrize("dcp", [1, 2])
def test_two_ranks_answer_like_one_and_both_draw_the_same(dcp: int) -> None:
    with ranks(1) as one:
        expected = _answers(one)
    with ranks(2, dcp) as two:
        answered = _answers(two, dcp)
    for name, choice in (("choices", 0), ("choices", 1), ("choices", 2), ("plain", 0)):
        assert answered.tokens(name, choice) == expected.tokens(name, choice)
    for name in ("choices", "scored"):
        torch.testing.assert_close(
            _values(answered.prompt_logprobs(name)),
            _values(expected.prompt_logprobs(name)),
            atol=1e-4,
            rtol=0,
        )
    assert two.outputs, "steps were taken"
    assert all(first.token_ids == second.token_ids for first, second in two.outputs)
