"""Layers of experts never read values from the device, because CUDA graphs forbid such
reads.
"""

import pytest
import torch

from model.config import parse_config
from model.layers import RMSNorm
from model.mixture.moe import MoELayer
from model.parallel import Parallel
from model.weights import DummySource, WeightLoader
from tests.model.test_config import DEEPSEEK, V3

# The grouped product does not accept rows of 23 elements. So every expert computes
# every token.
WIDTHS = {"grouped product": 24, "each expert": 23}
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


@pytest.mark.parametrize("method", WIDTHS)
@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("ep", [1, 2])
def test_layer_reads_no_value_from_the_device(
    method: str, router: str, ep: int
) -> None:
    """The tensors are on the device `meta`, so reading a value would raise."""
    width = dict.fromkeys(
        ("moe_intermediate_size", "intermediate_size"), WIDTHS[method] * 2 // ep
    )
    raw = {**DEEPSEEK, **ROUTERS[router], **width}
    config = parse_config(raw)
    placement = {"dtype": torch.bfloat16, "device": "meta"}
    loader = WeightLoader(DummySource(0, "cpu"), **placement)
    parallel = Parallel(1, 2, ep=ep)
    layer = MoELayer(loader, "mlp", config, parallel)
    norm = RMSNorm(torch.empty(config.hidden_size, **placement), 1e-6)
    for num_tokens in (1, 128, 129, 256):
        hidden = torch.empty(num_tokens, config.hidden_size, **placement)
        assert layer(hidden, norm).shape == hidden.shape
