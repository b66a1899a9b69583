"""A layer of experts computes without a look at the values: what a CUDA graph needs."""

import pytest
import torch

from model.config import parse_config
from model.layers import RMSNorm
from model.moe import MoELayer
from model.parallel import Parallel
from model.weights import DummySource, WeightLoader
from tests.model.test_config import DEEPSEEK, V3

# Rows of 23 elements are none that a grouped product takes: every expert sees every token then.
WIDTHS = {"grouped": 24, "each": 23}
QWEN2 = {
    "architectures": ["Qwen2MoeForCausalLM"], "num_experts": 8, "norm_topk_prob": True,
    "shared_expert_intermediate_size": 48,
}  # fmt: skip
GPT_OSS = {"architectures": ["GptOssForCausalLM"], "num_local_experts": 8}
ROUTERS = {
    "greedy": {},
    "groups": {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    "sigmoid": V3, "normalised": QWEN2, "biased": GPT_OSS,
}  # fmt: skip


@pytest.mark.parametrize("way", WIDTHS)
@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("ep", [1, 2])
def test_a_layer_reads_no_value_back(way: str, router: str, ep: int) -> None:
    """On the device `meta` there are none."""
    width = dict.fromkeys(
        ("moe_intermediate_size", "intermediate_size"), WIDTHS[way] * 2 // ep
    )
    raw = {**DEEPSEEK, **ROUTERS[router], **width}
    config = parse_config(raw)
    there = {"dtype": torch.bfloat16, "device": "meta"}
    loader, parallel = (
        WeightLoader(DummySource(0, "cpu"), **there),
        Parallel(1, 2, ep=ep),
    )
    layer = MoELayer(loader, "mlp", config, parallel)
    norm = RMSNorm(torch.empty(config.hidden_size, **there), 1e-6)
    for num_tokens in (1, 128, 129, 256):
        hidden = torch.empty(num_tokens, config.hidden_size, **there)
        assert layer(hidden, norm).shape == hidden.shape
