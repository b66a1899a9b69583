"""Every architecture on a GPU in bfloat16.

Steps in CUDA graphs must equal eager steps. Eager steps must be close to a float32
model on the CPU, which tests/model compares with transformers. Weights are random.
Heads have sizes that the kernels support.
"""

from typing import Any

import pytest
import torch

from model.architectures.table import ARCHITECTURES
from model.config import load_config
from model.decoder import load_model
from tests.gpu.test_runner import PROMPTS, decode, runner_for
from tests.model.random_models import make
from tests.model.test_against_transformers import CASES
from tests.model.test_quantization import logits_of

pytestmark = pytest.mark.gpu

NUM_STEPS = 8
SIZES: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 512,
    "moe_intermediate_size": 64,
    # Only Gemma reads this field. With a smaller value, as in tests/model, attention
    # scores of random weights would vary so much that rounding changes tokens.
    "query_pre_attn_scalar": 256,
}
HEADS = {"head_dim": 64, "num_key_value_heads": 2}
LATENTS = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
}
MAX_MEAN_ERROR = 0.15  # of logits with magnitudes of about 1
# Minimum of the median cosine similarity of logits. The test uses the median, because
# rounding may change which of two equally good experts a token gets.
MIN_SIMILARITY = 0.995


@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.inference_mode()
def test_graphs_equal_eager_steps_and_the_cpu(name, tmp_path):
    architecture, options = CASES[ARCHITECTURES[name].test_case]
    shape = LATENTS if ARCHITECTURES[name].mla else HEADS
    make(architecture, tmp_path, **{**options, **SIZES, **shape})
    with runner_for(tmp_path) as runner:
        assert runner.graphs is not None or runner.device.type == "cpu"
        tokens, in_graphs = decode(runner, NUM_STEPS)
    with runner_for(tmp_path, enforce_eager=True) as runner:
        _, eager = decode(runner, NUM_STEPS, forced=tokens)
    assert (in_graphs - eager).abs().mean() < MAX_MEAN_ERROR
    on_cpu = load_model(load_config(tmp_path), tmp_path, dtype=torch.float32)
    similarities = []
    for row, prompt in enumerate(PROMPTS):
        sequence = torch.tensor([*prompt, *(step[row] for step in tokens[:-1])])
        expected = logits_of(on_cpu, sequence)[len(prompt) - 1 :]
        actual = eager[:, row].float().cpu()
        similarities.append(torch.cosine_similarity(actual, expected, dim=-1))
    assert torch.cat(similarities).median() > MIN_SIMILARITY
