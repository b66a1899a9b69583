"""A model's draws follow from sequence and position: preempted sequences go on as they were."""

from typing import Any

import pytest

from engine.core.batch import PendingStep, StepInput
from engine.text.grammar import GrammarCompiler
from engine.worker.runner import ModelRunner
from model.config import load_config
from model.parallel import Parallel
from protocol.messages import Grammar, SamplingParams
from tests.make_models import ensure_model
from tests.rigs.engine_pair import make_config
from tests.rigs.shadow import add, assert_all_blocks_home, make_core, run_until_idle

BLOCK_SIZE = 4
_GRAMMAR = Grammar("regex", "([a-z]{1,6} ){8}")
_SAMPLING = [
    SamplingParams(temperature=1.3, seed=1),
    SamplingParams(temperature=0.9, seed=2, top_k=40, top_p=0.9, min_p=0.01),
    SamplingParams(temperature=1.1, seed=3, frequency_penalty=0.7, repetition_penalty=1.2),
    SamplingParams(temperature=1.0, seed=4, grammar=_GRAMMAR),
]


class _Model:
    """Executes steps on a real model."""

    depth = 0

    def __init__(self, num_blocks: int) -> None:
        model = ensure_model("gqa")
        config = make_config(model_dir=str(model), block_size=BLOCK_SIZE)
        self.runner = ModelRunner(config, load_config(model), Parallel())
        self.runner.allocate(num_blocks)

    def blocks_under_way(self) -> set[int]:
        return set()

    def launch(self, step: StepInput) -> PendingStep:
        return self.runner.launch(step)


def _answers(num_blocks: int, compiler: GrammarCompiler) -> tuple[dict[Any, list[int]], int]:
    core, _, out = make_core(
        executor=_Model(num_blocks),  # type: ignore[arg-type]
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        prefix_caching=False,
    )
    core.grammars.compiler = compiler
    core.round(
        [
            add(str(at), [(at * 17 + i) % 200 + 20 for i in range(9)], 20, params, num_choices=2)
            for at, params in enumerate(_SAMPLING)
        ]
    )
    run_until_idle(core)
    assert_all_blocks_home(core)
    told = {(at, c): out.tokens(str(at), c) for at in range(len(_SAMPLING)) for c in range(2)}
    return told, core.scheduler.num_preemptions


@pytest.mark.parametrize("num_blocks", [9, 15, 24])
def test_draws_are_the_same_with_and_without_preemption(num_blocks: int) -> None:
    compiler = GrammarCompiler(ensure_model("gqa"), 512, lambda: None)
    compiler.compiled(_GRAMMAR).exception()
    expected, none = _answers(120, compiler)
    told, some = _answers(num_blocks, compiler)
    compiler.close()
    assert none == 0 and some > 0
    assert told == expected
    assert all(told[at, 0] != told[at, 1] for at in range(len(_SAMPLING)))
