"""Kernels of products by quantised weights, in Triton's interpreter, against their definition."""

import importlib

import pytest
import torch

import tests.rigs.interpreted  # noqa: F401
from model.quantization.products import example, takes_one_row
from model.quantization.quantized import FP8, quantise
from tests.gpu.test_quantization import BF16, LIKE

kernels = importlib.import_module("model.quantization.kernels")


def assert_near(found, expected):
    assert (found.double() - expected).norm() < 0.005 * expected.norm()


@pytest.mark.parametrize("like", LIKE, ids=str)
@pytest.mark.parametrize(("rows", "num_out"), [(8, 67), (13, 17), (40, 80), (70, 1)])
def test_a_product_is_that_of_float64_however_it_is_divided(like, rows, num_out):
    weight = example((*like, BF16, torch.device("cpu"))).each(
        lambda part: part[:num_out].contiguous()
    )
    x = torch.randn(rows, weight.shape[1]).to(BF16)
    out = kernels.multiply(weight, x)
    for splits in (False, True):  # what one product leaves behind is no other's
        kernels.multiply(weight, x, residual=out, splits=splits)
    assert_near(out, 3 * x.double() @ weight.dequantise().double().t())


@pytest.mark.parametrize("like", LIKE[::2] + LIKE[-1:], ids=str)
@pytest.mark.parametrize("ends", [[0, 3, 3, 9], [0, 1, 70, 75, 75]], ids=str)
def test_experts_multiply_rows_of_their_own(like, ends):
    weight = example((*like, BF16, torch.device("cpu"))).each(lambda part: part[:40])
    each = [weight.each(lambda part, n=n: part.roll(n, 0)) for n in range(len(ends))]
    joined = weight.made_of(
        map(torch.stack, zip(*(one.parts for one in each), strict=True))
    )
    x = torch.randn(ends[-1] + 5, weight.shape[1]).to(BF16)  # the last are no expert's
    found = kernels.multiply(joined, x, torch.tensor(ends, dtype=torch.int32))
    own = zip(each, [0, *ends], ends, strict=False)
    products = [x[i:j].double() @ one.dequantise().double().t() for one, i, j in own]
    assert_near(found[: ends[-1]], torch.cat(products))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("width", [128, 384, 4096])
def test_one_row_is_normed_multiplied_and_added(width):
    weight = quantise(torch.randn(16, width).to(BF16))
    assert takes_one_row(weight) and takes_one_row(weight, gated=True)


@pytest.mark.parametrize("width", [128, 200, 1040])
def test_rows_are_quantised_and_sums_get_their_scales(width):
    x = torch.randn(9, width).mul(torch.logspace(-3, 3, 9)[:, None]).to(BF16)
    x[4] = 0
    (codes, scales), expected = kernels.quantised(x), quantise(x)
    assert torch.equal(scales, expected.scales)
    assert torch.equal(codes.float(), expected.codes.view(FP8).float())
    columns, sums = torch.rand(width, 1), torch.randn(9, width).to(BF16)
    of_all = sums.double() * scales * columns.t()
    assert_near(kernels.rescaled(sums, scales, columns, x.clone()), x.double() + of_all)
