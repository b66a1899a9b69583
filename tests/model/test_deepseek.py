"""DeepSeek-V2 in its variants equals transformers: absorbed attention, experts, yarn, low ranks."""

import pytest
import torch

from model.config import load_config
from model.registry import load_model
from tests.model.random_models import make
from tests.model.test_llama import check_equal

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32,
    "beta_slow": 1,
}
CASES = {
    "dense": {"first_k_dense_replace": 3},
    "moe": {},
    "moe-groups": {"topk_method": "group_limited_greedy"},
    "q-lora": {"q_lora_rank": 24, "first_k_dense_replace": 3},
    "bias": {"q_lora_rank": 24, "attention_bias": True, "first_k_dense_replace": 3},
    "yarn": {"rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}},
    "yarn-mscale": {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8}},
    "yarn-plain": {"rope_parameters": YARN, "q_lora_rank": 24, "tie_word_embeddings": True},
}


@pytest.mark.parametrize("case", CASES)
def test_equals_transformers(case, tmp_path):
    reference = make("DeepseekV2ForCausalLM", tmp_path, **CASES[case])
    model = load_model(load_config(tmp_path), tmp_path, dtype=torch.float32)
    assert model.attention_spec.mla
    assert model.attention_spec.num_kv_heads == 1
    assert model.attention_spec.head_dim == 32 + 8
    check_equal(model, reference)
