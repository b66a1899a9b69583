"""Kernels of products with quantised weights, run by Triton's interpreter.

Results are compared with products of the dequantised weights.
"""

import importlib

import pytest
import torch

import tests.rigs.interpreted  # noqa: F401
from model.quantization.products import example_weight, has_one_row_kernel
from model.quantization.quantized import FP8, quantise
from tests.gpu.test_quantization import BF16, WEIGHT_FORMATS

kernels = importlib.import_module("model.quantization.kernels")


def assert_near(actual, expected):
    assert (actual.double() - expected).norm() < 0.005 * expected.norm()


@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS, ids=str)
@pytest.mark.parametrize(("rows", "num_out"), [(8, 67), (13, 17), (40, 80), (70, 1)])
def test_product_equals_float64_with_and_without_splits(weight_format, rows, num_out):
    """Several products run in sequence. A product must not read data that an earlier
    product has left in buffers.
    """
    weight = example_weight((*weight_format, BF16, torch.device("cpu"))).map_parts(
        lambda part: part[:num_out].contiguous()
    )
    x = torch.randn(rows, weight.shape[1]).to(BF16)
    out = kernels.multiply(weight, x)
    for splits in (False, True):
        kernels.multiply(weight, x, residual=out, splits=splits)
    assert_near(out, 3 * x.double() @ weight.dequantise().double().t())


@pytest.mark.parametrize(
    "weight_format", WEIGHT_FORMATS[::2] + WEIGHT_FORMATS[-1:], ids=str
)
@pytest.mark.parametrize("ends", [[0, 3, 3, 9], [0, 1, 70, 75, 75]], ids=str)
def test_each_expert_multiplies_only_its_rows(weight_format, ends):
    weight = example_weight((*weight_format, BF16, torch.device("cpu"))).map_parts(
        lambda part: part[:40]
    )
    experts = [
        weight.map_parts(lambda part, n=n: part.roll(n, 0)) for n in range(len(ends))
    ]
    parts = zip(*(expert.parts for expert in experts), strict=True)
    joined = weight.with_parts(map(torch.stack, parts))
    # The last five rows belong to no expert.
    x = torch.randn(ends[-1] + 5, weight.shape[1]).to(BF16)
    actual = kernels.multiply(joined, x, torch.tensor(ends, dtype=torch.int32))
    products = [
        x[start:end].double() @ expert.dequantise().double().t()
        for expert, start, end in zip(experts, [0, *ends], ends, strict=False)
    ]
    assert_near(actual[: ends[-1]], torch.cat(products))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("width", [128, 384, 4096])
def test_one_row_kernel_passes_its_self_test(width):
    weight = quantise(torch.randn(16, width).to(BF16))
    assert has_one_row_kernel(weight)
    assert has_one_row_kernel(weight, gated=True)


@pytest.mark.parametrize("width", [128, 200, 1040])
def test_rows_are_quantised_and_sums_are_rescaled(width):
    x = torch.randn(9, width).mul(torch.logspace(-3, 3, 9)[:, None]).to(BF16)
    x[4] = 0
    codes, scales = kernels.quantise_rows(x)
    expected = quantise(x)
    assert torch.equal(scales, expected.scales)
    assert torch.equal(codes.float(), expected.codes.view(FP8).float())
    columns = torch.rand(width, 1)
    sums = torch.randn(9, width).to(BF16)
    rescaled = sums.double() * scales * columns.t()
    actual = kernels.rescale(sums, scales, columns, x.clone())
    assert_near(actual, x.double() + rescaled)
