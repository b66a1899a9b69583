"""Experts in CUDA graphs on a GPU equal the CPU, for any number of tokens."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.core.batch import StepInput
from model.mixture.experts import Experts
from model.quantization.quantized import quantise
from tests.gpu.test_runner import GREEDY, LOGIT_TOLERANCE, runner_for
from tests.make_models import ensure_model
from tests.model.quantised_files import in_groups

pytestmark = pytest.mark.gpu

HIDDEN = 256
WIDTH = 128
NUM_EXPERTS = 16
EXPERTS_PER_TOKEN = 3
NUM_SEQS = 200
F16 = torch.float16
BF16 = torch.bfloat16
# For each implementation of experts: the dtype and the activation that select it.
IMPLEMENTATIONS = {
    "kernels": (BF16, "silu"),
    "grouped": (BF16, "gelu"),
    "each": (F16, "gelu"),
}


@contextmanager
def forbid_waiting() -> Iterator[None]:
    """Raises an error if the host waits for the GPU within the `with` block."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("num_tokens", [1, 7, 128, 129, 256, 5000, 9000])
@pytest.mark.parametrize(
    "rank_experts", [range(NUM_EXPERTS), range(4, 8), range(14, 16)], ids=str
)
@torch.inference_mode()
def test_experts_in_a_graph_equal_the_cpu(rank_experts, implementation, num_tokens):
    """Only the experts of one rank are computed. The model's last two experts get no
    tokens.
    """
    torch.manual_seed(num_tokens)
    dtype, activation = IMPLEMENTATIONS[implementation]
    gate_up = torch.randn(NUM_EXPERTS, 2 * WIDTH, HIDDEN).div(HIDDEN**0.5).to(dtype)
    down = torch.randn(NUM_EXPERTS, HIDDEN, WIDTH).div(WIDTH**0.5).to(dtype)
    x = torch.randn(num_tokens, HIDDEN).to(dtype)
    weights = torch.rand(num_tokens, EXPERTS_PER_TOKEN)
    odds = torch.tensor([1.0] * (NUM_EXPERTS - 2) + [0.0, 0.0])
    expert_ids = torch.multinomial(odds.expand(num_tokens, -1), EXPERTS_PER_TOKEN)
    gate_up = gate_up[rank_experts.start : rank_experts.stop]
    down = down[rank_experts.start : rank_experts.stop]
    options = {
        "first": rank_experts.start,
        "total": NUM_EXPERTS,
        "activation": activation,
        "num_chosen": EXPERTS_PER_TOKEN,
    }
    on_cpu = Experts(gate_up.float(), down.float(), **options)
    expected = on_cpu(x.float(), weights, expert_ids)
    inputs = [tensor.cuda() for tensor in (x, weights, expert_ids)]
    experts = Experts(gate_up.cuda(), down.cuda(), **options)
    assert experts.has_one_token_kernel == (implementation == "kernels")
    experts(*inputs)  # loads all kernels
    with forbid_waiting():
        eager = experts(*inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = experts(*inputs)
    captured.zero_()
    graph.replay()
    torch.testing.assert_close(captured, eager)
    torch.testing.assert_close(captured.float().cpu(), expected, atol=0.05, rtol=0.02)


@pytest.mark.parametrize("size", [None, 64])
@torch.inference_mode()
def test_one_token_through_fp8_experts_in_a_graph_equals_the_cpu(size):
    gate_up = torch.randn(16, 2 * WIDTH, HIDDEN) / 16
    down = torch.randn(16, HIDDEN, WIDTH) / 11
    quantised = []
    for weight in (gate_up, down):
        small = weight.to(BF16)
        quantised.append(quantise(small) if size is None else in_groups(small, size))
    plain = Experts(*(weight.dequantise().float() for weight in quantised))
    on_gpu = [weight.map_parts(Tensor.cuda) for weight in quantised]
    experts = Experts(*on_gpu, num_chosen=EXPERTS_PER_TOKEN)
    assert experts.has_one_token_kernel
    x = torch.randn(1, HIDDEN).to(BF16)
    weights = torch.rand(1, EXPERTS_PER_TOKEN)
    gpu_x = x.cuda()
    gpu_weights = weights.cuda()
    expert_ids = torch.randperm(16)[None, :EXPERTS_PER_TOKEN].cuda()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = experts(gpu_x, gpu_weights, expert_ids)
    for _ in range(3):
        expert_ids.copy_(torch.randperm(16)[None, :EXPERTS_PER_TOKEN])
        graph.replay()
        expected = plain(x.float(), weights, expert_ids.cpu())
        error = captured.float().cpu() - expected
        assert error.norm() <= 0.01 * expected.norm()


def one_token_each() -> StepInput:
    ones = np.ones(NUM_SEQS, np.int32)
    return StepInput(
        token_ids=np.arange(5, 5 + NUM_SEQS, dtype=np.int64),
        query_lens=ones,
        context_lens=ones,
        block_tables=1 + np.arange(NUM_SEQS, dtype=np.int32)[:, None],
        sampled_sequences=np.arange(NUM_SEQS, dtype=np.int32),
        sampling=[GREEDY] * NUM_SEQS,
    )


@torch.inference_mode()
def test_step_of_many_sequences_in_a_graph_equals_an_eager_step():
    logits = []
    for enforce_eager in (False, True):
        options = {"max_num_seqs": 256, "enforce_eager": enforce_eager}
        with runner_for(ensure_model("moe"), num_blocks=256, **options) as runner:
            assert (runner.graphs is None) is enforce_eager
            logits.append(runner.compute(one_token_each()).logits.clone())
    torch.testing.assert_close(*logits, atol=LOGIT_TOLERANCE, rtol=0.02)
