"""A model's draws follow from sequence and position: preempted sequences go on as they were, and
two ranks of a model, each in a thread, get from a step's bytes all that shapes its draws, each with
half the heads or (dcp) with half the tokens.

Whatever one rank would miss (a copied block, a prompt to score, a penalty's counts) either changes
what rank 0 answers, because both share every sum, or leaves a collective without its partner.
"""

import pytest
import torch

from engine.text.grammar import GrammarCompiler
from protocol.messages import Grammar, SamplingParams, TokenLogprobs
from tests.make_models import ensure_model
from tests.rigs.rank_threads import Ranks, ranks
from tests.rigs.shadow import (
    MemoryTransport,
    add,
    assert_all_blocks_home,
    make_core,
    run_until_idle,
)

BLOCKS, BLOCK_SIZE = 80, 4
_SHAPED = SamplingParams(
    temperature=1.2,
    seed=5,
    num_logprobs=2,
    frequency_penalty=0.6,
    repetition_penalty=1.3,
    logit_bias={7: 3.0},
)
_PROMPTS = [(13 * at) % 200 for at in range(30)], [(7 * at * at) % 300 for at in range(33)]
REQUESTS = [
    add("choices", _PROMPTS[0], 10, _SHAPED, num_choices=3, num_prompt_logprobs=2),
    add("scored", _PROMPTS[1], 0, num_prompt_logprobs=0),
    add("plain", [9, 8, 7], 12, SamplingParams(temperature=0.0, presence_penalty=1.0)),
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


_GRAMMAR = Grammar("regex", "([a-z]{1,6} ){8}")
_SAMPLING = [
    SamplingParams(temperature=1.3, seed=1),
    SamplingParams(temperature=0.9, seed=2, top_k=40, top_p=0.9, min_p=0.01),
    SamplingParams(temperature=1.1, seed=3, frequency_penalty=0.7, repetition_penalty=1.2),
    SamplingParams(temperature=1.0, seed=4, grammar=_GRAMMAR),
]


def _drawn(executor: Ranks, num_blocks: int) -> tuple[list[list[int]], int]:
    """The tokens of two choices of each, and how often one was preempted."""
    executor.allocate(num_blocks, BLOCK_SIZE)
    core, _, out = make_core(
        executor=executor,  # type: ignore[arg-type]
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        prefix_caching=False,
    )
    core.grammars.compiler = compiler = GrammarCompiler(ensure_model("gqa"), 512, lambda: None)
    compiler.compiled(_GRAMMAR).exception()
    prompts = [[(at * 17 + i) % 200 + 20 for i in range(9)] for at in range(len(_SAMPLING))]
    asked = enumerate(zip(prompts, _SAMPLING, strict=True))
    core.round([add(str(at), prompt, 20, how, num_choices=2) for at, (prompt, how) in asked])
    run_until_idle(core)
    compiler.close()
    assert_all_blocks_home(core)
    told = [out.tokens(str(at), choice) for at in range(len(_SAMPLING)) for choice in range(2)]
    return told, core.scheduler.num_preemptions


@pytest.mark.parametrize("num_blocks", [9, 15, 24])
def test_draws_are_the_same_with_and_without_preemption(num_blocks: int) -> None:
    with ranks(1) as one:
        expected, none = _drawn(one, 120)
        told, some = _drawn(one, num_blocks)
    assert none == 0 and some > 0
    assert told == expected
    assert all(first != second for first, second in zip(told[::2], told[1::2], strict=True))
