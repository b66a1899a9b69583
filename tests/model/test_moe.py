"""Experts sum what each chosen one makes of a token, in any number of tokens, and without a look
at the values: what a CUDA graph needs."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from model import moe
from model.config import MoEConfig, parse_config
from model.layers import RMSNorm
from model.moe import Experts, MoELayer
from model.parallel import Parallel
from model.weights import DummySource, WeightLoader

HIDDEN = 32
NUM_EXPERTS = 6
CHOSEN = 2
CONFIG = parse_config(
    {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 64,
        "max_position_embeddings": 64,
    }
)
# Rows of 3 floats are none that a grouped product takes: every expert sees every token then.
WIDTHS = {"grouped": 16, "each": 3}


def _expected(x, weights, experts, gate_up, down):
    out = torch.zeros_like(x)
    for row, (some_weights, some) in enumerate(zip(weights, experts, strict=True)):
        for weight, expert in zip(some_weights, some, strict=True):
            gate, up = (gate_up[expert] @ x[row]).chunk(2)
            out[row] += weight * (down[expert] @ (F.silu(gate) * up))
    return out


@pytest.mark.parametrize("way", WIDTHS)
@pytest.mark.parametrize("num_tokens", [0, 1, 128, 129, 300])
@pytest.mark.parametrize("pattern", ["all", "few", "one"])
def test_every_token_gets_the_weighted_sum_of_its_experts(way, num_tokens, pattern, monkeypatch):
    monkeypatch.setattr(moe, "_MAX_TOKENS", 200)  # 300 are taken in two parts
    torch.manual_seed(num_tokens)
    width = WIDTHS[way]
    gate_up = torch.randn(NUM_EXPERTS, 2 * width, HIDDEN) / HIDDEN**0.5
    down = torch.randn(NUM_EXPERTS, HIDDEN, width) / width**0.5
    x = torch.randn(num_tokens, HIDDEN)
    likely = {"all": [1.0] * 6, "few": [0, 1.0, 0, 1, 0, 1], "one": [0, 0, 1.0, 1e-9, 0, 0]}
    odds = torch.tensor(likely[pattern]).expand(num_tokens, -1)
    experts = torch.multinomial(odds, CHOSEN) if num_tokens else torch.zeros(0, CHOSEN).long()
    weights = torch.rand(num_tokens, CHOSEN)
    got = Experts(gate_up, down)(x, weights, experts)
    torch.testing.assert_close(got, _expected(x, weights, experts, gate_up, down))


@pytest.mark.parametrize("way", WIDTHS)
@pytest.mark.parametrize("topk_method", ["greedy", "group_limited_greedy"])
@pytest.mark.parametrize("num_tokens", [1, 128, 129, 256])
def test_a_layer_reads_no_value_back(way, topk_method, num_tokens):
    """On the device `meta` there are none."""
    mixture = MoEConfig(
        num_experts=NUM_EXPERTS,
        num_shared_experts=1,
        experts_per_token=CHOSEN,
        expert_intermediate_size=WIDTHS[way],
        first_dense_layers=0,
        topk_method=topk_method,
        num_groups=3,
        topk_groups=2,
        routed_scaling_factor=1.0,
    )
    there = {"dtype": torch.bfloat16, "device": "meta"}
    loader = WeightLoader(DummySource(0, "cpu"), **there)
    layer = MoELayer(loader, "mlp", replace(CONFIG, moe=mixture), Parallel())
    hidden = torch.empty(num_tokens, HIDDEN, **there)
    norm = RMSNorm(torch.empty(HIDDEN, **there), 1e-6)
    assert layer(hidden, norm).shape == hidden.shape
