"""A layer of experts computes without a look at the values: what a CUDA graph needs."""

import pytest
import torch

from model.config import parse_config
from model.layers import RMSNorm
from model.moe import MoELayer
from model.parallel import Parallel
from model.weights import DummySource, WeightLoader
from tests.model.test_config import DEEPSEEK

# Rows of 23 elements are none that a grouped product takes: every expert sees every token then.
WIDTHS = {"grouped": 24, "each": 23}


@pytest.mark.parametrize("way", WIDTHS)
@pytest.mark.parametrize("topk_method", ["greedy", "group_limited_greedy"])
@pytest.mark.parametrize("num_tokens", [1, 128, 129, 256])
def test_a_layer_reads_no_value_back(way, topk_method, num_tokens):
    """On the device `meta` there are none."""
    changes = {"moe_intermediate_size": WIDTHS[way], "topk_method": topk_method}
    config = parse_config({**DEEPSEEK, **changes, "n_group": 4, "topk_group": 2})
    there = {"dtype": torch.bfloat16, "device": "meta"}
    layer = MoELayer(WeightLoader(DummySource(0, "cpu"), **there), "mlp", config, Parallel())
    hidden = torch.empty(num_tokens, config.hidden_size, **there)
    norm = RMSNorm(torch.empty(config.hidden_size, **there), 1e-6)
    assert layer(hidden, norm).shape == hidden.shape
