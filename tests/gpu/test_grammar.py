"""Grammars on a GPU: masks reach the draw, beside rows that have none, in graphs and without."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.text.grammar import GrammarCompiler, GrammarState
from engine.text.tokenizer import Tokenizer
from engine.worker.runner import ModelRunner
from protocol.messages import Grammar, SamplingParams
from tests.gpu.test_runner import MODELS, PROMPTS, SERVED, runner_for, step_at
from tests.rigs.shadow import add, masks_of

pytestmark = pytest.mark.gpu

_PATTERN = "[a-z]{3}( [a-z]{2,6})*[.]"
_GREEDY = SamplingParams(temperature=0.0)
_NUM_STEPS = 24


def _states(compiler: GrammarCompiler, stop: Sequence[int]) -> list[GrammarState | None]:
    """Every other sequence has a grammar."""
    sampling = SamplingParams(grammar=Grammar("regex", _PATTERN))
    request = add("a", [1], _NUM_STEPS, sampling, stop_token_ids=list(stop))
    return [compiler.state(request) if row % 2 == 0 else None for row in range(len(PROMPTS))]


def _continue(
    runner: ModelRunner,
    compiler: GrammarCompiler,
    states: list[GrammarState | None],
    sampling: SamplingParams,
) -> list[list[int]]:
    """Each sequence's outputs."""
    outputs: list[list[int]] = [[] for _ in PROMPTS]
    for index in range(_NUM_STEPS):
        step = step_at(index, [done[-1:] for done in outputs], sampling, is_masked=True)
        launched = runner.launch(step)
        launched.draw(masks_of(compiler, states))
        for row, token in enumerate(launched.result().token_ids):
            outputs[row].append(token)
            if (state := states[row]) is not None:
                state.follow(outputs[row], 0)
    return outputs


def _check(folder: Path, **options: Any) -> None:
    tokenizer = Tokenizer(folder)
    with runner_for(folder, **options) as runner:
        compiler = GrammarCompiler(folder, runner.model_config.vocab_size, lambda: None)
        free = _continue(runner, compiler, [None] * len(PROMPTS), _GREEDY)
        for sampling in (_GREEDY, SamplingParams(temperature=1.0, top_p=0.9, seed=4)):
            states = _states(compiler, tokenizer.eos_ids)
            outputs = _continue(runner, compiler, states, sampling)
            for row, state in enumerate(states):
                if state is not None:
                    assert state.ending is None or state.ending.error is None
                    text = tokenizer.decode(outputs[row]).partition(".")
                    assert re.fullmatch("[a-z ]{3,}", text[0]), text
                elif sampling is _GREEDY:
                    assert outputs[row] == free[row], "a mask beside it changes nothing"
        compiler.close()


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("name", SERVED)
def test_masked_rows_match_and_free_rows_are_as_ever(name: str, enforce_eager: bool) -> None:
    _check(MODELS[name], enforce_eager=enforce_eager)
