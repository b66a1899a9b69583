"""Experts on a GPU: the CPU's sums, in graphs, for any number of tokens, waiting for nothing."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.core.batch import StepInput
from model.moe import Experts
from model.quantization.quantized import quantise
from tests.gpu.test_runner import GREEDY, LOGIT_TOLERANCE, runner_for
from tests.make_models import ensure_model
from tests.model.quantised_files import in_groups

pytestmark = pytest.mark.gpu

HIDDEN, WIDTH, NUM_EXPERTS, CHOSEN = 256, 128, 16, 3
NUM_SEQS = 200
F16, BF16 = torch.float16, torch.bfloat16
WAYS = {"kernels": (BF16, "silu"), "grouped": (BF16, "gelu"), "each": (F16, "gelu")}


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_tokens", [1, 7, 128, 129, 256, 5000, 9000])
@pytest.mark.parametrize(
    "own", [range(NUM_EXPERTS), range(4, 8), range(14, 16)], ids=str
)
@torch.inference_mode()
def test_experts_in_a_graph_sum_what_the_cpu_sums(own, way, num_tokens):
    """Those of one rank, of which the last two get nothing at all."""
    torch.manual_seed(num_tokens)
    dtype, activation = WAYS[way]
    gate_up = torch.randn(NUM_EXPERTS, 2 * WIDTH, HIDDEN).div(HIDDEN**0.5).to(dtype)
    down = torch.randn(NUM_EXPERTS, HIDDEN, WIDTH).div(WIDTH**0.5).to(dtype)
    x = torch.randn(num_tokens, HIDDEN).to(dtype)
    weights = torch.rand(num_tokens, CHOSEN)
    odds = torch.tensor([1.0] * (NUM_EXPERTS - 2) + [0.0, 0.0])  # two get nothing
    chosen = torch.multinomial(odds.expand(num_tokens, -1), CHOSEN)
    gate_up, down = gate_up[own.start : own.stop], down[own.start : own.stop]
    part = {
        "first": own.start,
        "total": NUM_EXPERTS,
        "activation": activation,
        "chosen": CHOSEN,
    }
    expected = Experts(gate_up.float(), down.float(), **part)(
        x.float(), weights, chosen
    )
    inputs = [tensor.cuda() for tensor in (x, weights, chosen)]
    experts = Experts(gate_up.cuda(), down.cuda(), **part)
    assert experts.takes_one == (way == "kernels")
    experts(*inputs)  # loads what there is to load
    with waiting_is_an_error():
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
def test_one_token_through_experts_of_fp8_in_a_graph(size):
    both = torch.randn(16, 2 * WIDTH, HIDDEN) / 16, torch.randn(16, HIDDEN, WIDTH) / 11
    small = [
        quantise(w.to(BF16)) if size is None else in_groups(w.to(BF16), size)
        for w in both
    ]
    plain = Experts(*(w.dequantise().float() for w in small))
    experts = Experts(*(w.each(Tensor.cuda) for w in small), chosen=CHOSEN)
    assert experts.takes_one
    x, weights = torch.randn(1, HIDDEN).to(BF16), torch.rand(1, CHOSEN)
    inputs = [each.cuda() for each in (x, weights, torch.randperm(16)[None, :CHOSEN])]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = experts(*inputs)
    for _ in range(3):
        inputs[2].copy_(torch.randperm(16)[None, :CHOSEN])
        graph.replay()
        expected = plain(x.float(), weights, inputs[2].cpu())
        assert (captured.float().cpu() - expected).norm() <= 0.01 * expected.norm()


def one_token_each() -> StepInput:
    ones = np.ones(NUM_SEQS, np.int32)
    return StepInput(
        token_ids=np.arange(5, 5 + NUM_SEQS, dtype=np.int64),
        query_lens=ones,
        context_lens=ones,
        block_tables=1 + np.arange(NUM_SEQS, dtype=np.int32)[:, None],
        sample_rows=np.arange(NUM_SEQS, dtype=np.int32),
        sampling=[GREEDY] * NUM_SEQS,
    )


@torch.inference_mode()
def test_a_step_of_many_sequences_runs_in_a_graph_like_eagerly():
    logits = []
    for enforce_eager in (False, True):
        options = {"max_num_seqs": 256, "enforce_eager": enforce_eager}
        with runner_for(ensure_model("moe"), num_blocks=256, **options) as runner:
            assert (runner.graphs is None) is enforce_eager
            logits.append(runner.compute(one_token_each()).logits.clone())
    torch.testing.assert_close(*logits, atol=LOGIT_TOLERANCE, rtol=0.02)
