"""Kernels of products by quantised weights, in Triton's interpreter, against their definition."""

import importlib

import pytest
import torch
import torch.nn.functional as F

import tests.rigs.interpreted  # noqa: F401
from model.quantization.products import example
from model.quantization.quantized import FP8, quantise

kernels = importlib.import_module("model.quantization.kernels")
fused = importlib.import_module("model.fused_kernels")
CPU, BF16 = torch.device("cpu"), torch.bfloat16
# Kind, columns multiplied at a time, whether groups have scales, zeros, dtype of scales.
LIKE = [
    ("fp8", 128, False, False, torch.float32),
    ("fp8", 64, False, False, torch.float32),
    ("fp8", 32, True, False, torch.float32),
    ("int4", 128, True, True, torch.float16),
    ("int4", 32, False, False, BF16),
    ("fp4", 32, True, False, torch.uint8),
]


def error(found, expected):
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("like", LIKE, ids=str)
@pytest.mark.parametrize(("rows", "num_out"), [(8, 67), (13, 17), (40, 80), (70, 1)])
def test_a_product_is_that_of_float64_however_it_is_divided(like, rows, num_out):
    weight = example((*like, BF16, CPU)).each(lambda part: part[:num_out].contiguous())
    x = torch.randn(rows, weight.shape[1]).to(BF16)
    expected = x.double() @ weight.dequantise().double().t()
    out = kernels.multiply(weight, x)
    assert error(out, expected) < 0.005
    for splits in (False, True):  # what one product leaves behind is no other's
        kernels.multiply(weight, x, residual=out, splits=splits)
    assert error(out, 3 * expected) < 0.005


@pytest.mark.parametrize("like", LIKE[::2] + LIKE[-1:], ids=str)
@pytest.mark.parametrize("ends", [[0, 3, 3, 9], [0, 1, 70, 75, 75]], ids=str)
def test_experts_multiply_rows_of_their_own(like, ends):
    weight = example((*like, BF16, CPU)).each(lambda part: part[:40])
    each = [weight.each(lambda part, n=n: part.roll(n, 0)) for n in range(len(ends))]
    joined = weight.made_of(map(torch.stack, zip(*(one.parts for one in each), strict=True)))
    x = torch.randn(ends[-1] + 5, weight.shape[1]).to(BF16)  # the last are no expert's
    found = kernels.multiply(joined, x, torch.tensor(ends, dtype=torch.int32))
    own = [x[first:last] for first, last in zip([0, *ends], ends, strict=False)]
    products = (
        rows.double() @ one.dequantise().double().t() for rows, one in zip(own, each, strict=True)
    )
    assert error(found[: ends[-1]], torch.cat(list(products))) < 0.005


@pytest.mark.parametrize("width", [128, 384, 4096])
@pytest.mark.parametrize("gated", [True, False])
def test_one_row_is_normed_multiplied_and_added(width, gated):
    weight, norm = quantise(torch.randn(16, width).to(BF16)), torch.rand(width).to(BF16)
    assert fused.one_row_works(weight, gated=gated)
    x = torch.randn(1, width).to(BF16)
    normed = F.rms_norm(x.double(), norm.shape, norm.double(), 1e-5)
    exact = weight.to(CPU, torch.float32).dequantise().double()
    for matrix, rows in ((weight, exact), (exact.to(BF16), exact.to(BF16).double())):
        found = fused.one_row(x, matrix, norm=norm, eps=1e-5, gated=gated)
        expected = normed @ rows.t()
        gate, up = expected.chunk(2, dim=1)
        assert error(found, F.silu(gate) * up if gated else expected) < 0.005
        if not gated:
            fused.one_row(x, matrix, residual=found)
            assert error(found, expected + x.double() @ rows.t()) < 0.005


@pytest.mark.parametrize("width", [128, 200, 1040])
def test_rows_are_quantised_and_sums_get_their_scales(width):
    x = torch.randn(9, width).mul(torch.logspace(-3, 3, 9)[:, None]).to(BF16)
    x[4] = 0
    codes, scales = kernels.quantised(x)
    expected = quantise(x)
    assert torch.equal(scales, expected.scales)
    assert torch.equal(codes.float(), expected.codes.view(FP8).float())
    columns, sums = torch.rand(width, 1), torch.randn(9, width).to(BF16)
    of_all = sums.double() * scales.double() * columns.double().t()
    assert error(kernels.rescaled(sums, scales, columns, x.clone()), x.double() + of_all) < 0.005
    assert error(kernels.rescaled(sums, scales, columns, None), of_all) < 0.005
