"""A model runner keeps the hidden states that a drafter needs, in any kind of step."""

import numpy as np
import torch

from engine.core.batch import StepInput
from engine.worker.runner import ModelRunner
from model.config import load_config
from model.decoder import StateCapture
from model.parallel import Parallel
from protocol.messages import SamplingParams
from tests.make_models import ensure_model
from tests.model.dense import DenseAttention
from tests.rigs.engines import make_config

_TOKENS = [40, 77, 301, 12, 9, 250, 33, 8, 410, 5, 96]
_LAYERS = (1, 2)
_GREEDY = SamplingParams(temperature=0.0)


def _step(start: int, stop: int, *, draws: bool) -> StepInput:
    """Returns a step that computes the tokens [start, stop) of one sequence."""
    num_draws = 1 if draws else 0
    return StepInput(
        token_ids=np.array(_TOKENS[start:stop], np.int64),
        query_lens=np.array([stop - start], np.int32),
        context_lens=np.array([stop], np.int32),
        block_tables=np.array([[3, 1]], np.int32),
        sampled_sequences=np.arange(num_draws, dtype=np.int32),
        sampling=[_GREEDY] * num_draws,
    )


def _runner() -> ModelRunner:
    folder = ensure_model("gqa")
    config = make_config(model_dir=str(folder), block_size=16)
    runner = ModelRunner(config, load_config(folder), Parallel())
    runner.allocate(8)
    return runner


def test_states_of_every_kind_of_step_equal_those_of_the_whole_sequence():
    runner = _runner()
    plain = runner.execute(_step(0, len(_TOKENS), draws=True))
    assert runner.captured_states is None
    runner.captured_layers = _LAYERS
    model = runner.model
    expected = torch.zeros(len(_TOKENS), len(_LAYERS) * model.config.hidden_size)
    with torch.inference_mode():
        model.forward(
            torch.tensor(_TOKENS),
            torch.arange(len(_TOKENS)),
            DenseAttention(model.attention_spec),
            capture=StateCapture(_LAYERS, expected),
        )
    num_prompt = len(_TOKENS) - 1
    for start, stop, draws in (
        (0, 4, False),
        (4, num_prompt, True),
        (num_prompt, len(_TOKENS), True),
    ):
        output = runner.execute(_step(start, stop, draws=draws))
        assert runner.captured_states is not None
        torch.testing.assert_close(
            runner.captured_states, expected[start:stop], rtol=1e-4, atol=1e-4
        )
    assert output.token_ids == plain.token_ids
