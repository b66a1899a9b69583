"""Fused operations equal their plain definitions in float32. One GPU is needed."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from attention.base import AttentionKind, LayerAttention
from attention.pieces import max_run_rows
from engine.sampling.sampler import LastSampledTokens, greedy
from kvcache.layout import KVLayout
from kvcache.pool import KVPool
from model import fused_ops
from model.architectures.rotation import RopeConfig
from model.layers import Columns, Linear
from model.rope import Rope

self_test = pytest.importorskip("attention.self_test", reason="needs triton")

pytestmark = pytest.mark.gpu
BF16 = {"device": "cuda", "dtype": torch.bfloat16}


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.float(), expected.float(), atol=2e-2, rtol=1e-2)


@pytest.mark.parametrize("rows", [1, 3, 256, 700])
@pytest.mark.parametrize("width", [96, 1024, 14336])
def test_silu_and_mul(rows, width):
    gate_up = torch.randn(rows, 2 * width, **BF16)
    gate, up = gate_up.float().split(width, dim=1)
    assert_close(fused_ops.kernels().silu_and_mul(gate_up), F.silu(gate) * up)


@pytest.mark.parametrize("rows", [1, 5, 300])
def test_rms_norm_of_rows_and_heads(rows):
    weight = torch.randn(128, **BF16)
    wide = torch.randn(rows, 3 * 128, **BF16)
    for x in (wide[:, 128:256], wide.view(rows, 3, 128)[:, :2]):
        expected = F.rms_norm(x.float(), (128,), weight.float(), 1e-5)
        assert_close(fused_ops.kernels().rms_norm(x, weight, 1e-5), expected)


_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position": 8192}


@pytest.mark.parametrize("scaling", [{}, _LLAMA3])
@pytest.mark.parametrize("dim", [64, 128])
def test_rotation_in_place_equals_the_cpu(dim, scaling):
    config = RopeConfig(dim=dim, theta=500000.0, **scaling)
    positions = torch.tensor([0, 1, 77, 4095, 100_000])
    qkv = torch.randn(5, 6 * dim)
    heads = qkv.view(5, 6, dim)
    plain = Rope(config, dtype=torch.float32, device="cpu", head_dim=dim)
    expected = plain.rotate_pair(heads[:, :4], heads[:, 4:5], plain.angles(positions))
    fused = Rope(config, dtype=torch.bfloat16, device="cuda", head_dim=dim)
    on_gpu = heads.to(**BF16)
    rotated = fused.rotate_pair(
        on_gpu[:, :4], on_gpu[:, 4:5], fused.angles(positions.cuda())
    )
    for actual, right in zip(rotated, expected, strict=True):
        torch.testing.assert_close(actual.float().cpu(), right, atol=5e-2, rtol=2e-2)
    torch.testing.assert_close(
        on_gpu[:, 5].float().cpu(), heads[:, 5], atol=2e-2, rtol=1e-2
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_takes_the_first_of_the_largest_logits(dtype):
    logits = torch.randn(5, 30_001, device="cuda").to(dtype)
    logits[0, [20_000, 11, 30_000]] = 9.0
    logits[1, 7] = float("nan")
    logits[1, [300, 29_000]] = float("inf")
    logits[2] = float("-inf")
    logits[3] = float("nan")
    expected = [11, 300, 0, 0, int(logits[4].argmax())]
    assert greedy(logits).tolist() == expected


def test_tokens_sampled_on_the_device_are_filled_in():
    last = LastSampledTokens(600, 32, torch.device("cuda"))
    last.store(torch.arange(100, 700, device="cuda"))
    complements = last.complements(np.array([5, -1, -600, 0, 31, *range(-1, -500, -1)]))
    token_ids = last.resolve(torch.from_numpy(complements).cuda())
    assert token_ids.tolist() == [5, 100, 699, 0, 31, *range(100, 599)]
    with pytest.raises(AssertionError, match="no token has the id 32"):
        last.complements(np.array([0, 32]))


@pytest.mark.parametrize(
    ("num_out", "width"), [(6144, 4096), (4096, 14336), (256, 384)]
)
def test_consecutive_products_of_one_row_read_complete_results(num_out, width):
    """Each product reads the result of the previous product. A kernel may start before
    the previous kernel ends, but must wait for its complete result.
    """
    kernels = fused_ops.kernels()
    product = kernels.one_row
    weights = [torch.randn(num_out, width, **BF16) / width**0.5 for _ in range(2)]
    back = torch.randn(width, num_out // 2, **BF16) / num_out**0.5
    norm = torch.randn(width, **BF16)
    x = torch.randn(1, width, **BF16)
    assert kernels.has_one_row_kernel(weights[0], gated=True)
    assert kernels.has_one_row_kernel(back)
    for weight in weights * 3:
        normed = F.rms_norm(x.float(), (width,), norm.float(), 1e-5)
        gate, up = (normed @ weight.float().t()).chunk(2, dim=1)
        expected = x.float() + (F.silu(gate) * up) @ back.float().t()
        gated = product(x, weight, norm=norm, eps=1e-5, gated=True)
        assert product(gated, back, residual=x) is x
        assert_close(x, expected)
        plain = product(x, weight)
        assert_close(plain, x.float() @ weight.float().t())


@pytest.mark.parametrize("rows", [2, 5, 8, 16])
@pytest.mark.parametrize(
    ("num_out", "width"), [(6144, 4096), (4096, 14336), (512, 384)]
)
def test_consecutive_products_of_few_rows_read_complete_results(num_out, width, rows):
    """Products of 2 to 16 rows wait for the complete result of the previous product.

    Results of the first rows do not depend on the number of rows.
    """
    kernels = fused_ops.few_rows()
    weights = [torch.randn(num_out, width, **BF16) / width**0.5 for _ in range(2)]
    back = torch.randn(width, num_out // 2, **BF16) / num_out**0.5
    norm = torch.randn(width, **BF16)
    x = torch.randn(16, width, **BF16)
    few = x[:rows].clone()
    assert kernels.has_kernel(weights[0], gated=True)
    assert kernels.has_kernel(back)
    for weight in weights * 3:
        normed = F.rms_norm(x.float(), (width,), norm.float(), 1e-5)
        gate, up = (normed @ weight.float().t()).chunk(2, dim=1)
        expected = x.float() + (F.silu(gate) * up) @ back.float().t()
        for part in (x, few):
            gated = kernels.few_rows(part, weight, norm=norm, eps=1e-5, gated=True)
            assert kernels.few_rows(gated, back, residual=part) is part
        assert_close(x, expected)
        assert torch.equal(few, x[:rows])
        plain = kernels.few_rows(few, weight, norm=norm, eps=1e-5)
        normed = F.rms_norm(few.float(), (width,), norm.float(), 1e-5)
        assert_close(plain, normed @ weight.float().t())


@pytest.mark.parametrize("order", ["BHLCND", "LCBNHD"])
@pytest.mark.parametrize(
    ("num_q", "num_kv", "dim"), [(32, 8, 128), (3, 1, 64), (20, 10, 256), (0, 9, 64)]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_attention_kernels_pass_their_self_tests(num_q, num_kv, dim, order, dtype):
    """These self-tests also run when a server starts. tests/kernels has more cases,
    without a GPU.
    """
    pool = KVPool(KVLayout(order, 6, num_kv, 2, 2, 16, dim, dtype), device="cuda")
    caches = (pool.component(1, 0), pool.component(1, 1))
    scales = (1.0, 1.0) if dtype == "bfloat16" else (0.03, 0.002)
    self_test.check_storing(caches, scales, torch.bfloat16, num_q)
    if num_q:
        sinks = torch.linspace(-2.0, 3.0, num_q, device="cuda")
        layers = [
            LayerAttention(),
            LayerAttention(AttentionKind(100)),
            LayerAttention(AttentionKind(None, 0.7)),
            LayerAttention(AttentionKind(3000, 2.0)),
            LayerAttention(AttentionKind(100), sinks),
        ]
        for rows in {1, max_run_rows(num_q, num_kv)}:
            self_test.check_decoding(caches, torch.bfloat16, num_q, layers, rows)
    is_changed = any(cache.float().any() for cache in caches)
    assert not is_changed, "the null blocks were not restored"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [(1024, 14336, 4096), (1, 256, 64), (3001, 384, 576)])
def test_gated_product_of_many_rows_equals_float64(sizes, dtype):
    rows, num_out, width = sizes
    weight = (torch.randn(2 * num_out, width, device="cuda") / width**0.5).to(dtype)
    x = torch.randn(rows, width, device="cuda").to(dtype)
    assert fused_ops.kernels().has_gated_rows_kernel(weight)
    x_before = x.clone()
    weight_before = weight.clone()
    actual = fused_ops.kernels().gated_rows(x, weight)
    gate, up = (x.double() @ weight.double().t()).chunk(2, dim=1)
    # Two separate kernels would round gate and up between them. The tolerance is
    # smaller than the resulting error.
    torch.testing.assert_close(
        actual.double(), F.silu(gate) * up, atol=1e-3, rtol=4.1e-3
    )
    assert torch.equal(x, x_before)
    assert torch.equal(weight, weight_before)
    assert actual.dtype == dtype


def test_gated_product_refuses_shapes_that_its_tiles_do_not_fit():
    assert not fused_ops.kernels().has_gated_rows_kernel(
        torch.randn(2 * 100, 128, **BF16)
    )
    assert not fused_ops.kernels().has_gated_rows_kernel(torch.randn(256, 96, **BF16))
    assert not fused_ops.kernels().has_gated_rows_kernel(
        torch.randn(64, 512, **BF16).t()
    )


def test_feed_forward_of_many_rows_equals_that_of_few_rows():
    """A step of many rows uses one kernel, a step of few rows uses two."""
    columns = Columns([Linear(torch.randn(512, 256, **BF16) / 16) for _ in range(2)])
    x = torch.randn(1030, 256, **BF16)
    assert_close(columns.gated(x)[1000:], columns.gated(x[1000:]))
