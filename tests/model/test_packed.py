"""Weights packed for oneDNN give the same products and tokens as unpacked weights."""

import resource
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from model.layers import Columns, Linear, RowParallelLinear, can_pack
from model.parallel import Parallel
from tests.make_models import ensure_model
from tests.model.dense import greedy
from tests.model.random_models import load

pytestmark = pytest.mark.skipif(
    not can_pack(torch.zeros(2, 2)), reason="this torch has no oneDNN"
)


@pytest.mark.parametrize("num_rows", [1, 2, 7, 64, 300])
@pytest.mark.parametrize("shape", [(96, 64), (33, 17), (1, 5)])
def test_packed_products_equal_products_of_the_plain_weight(num_rows, shape):
    torch.manual_seed(0)
    weight = torch.randn(shape)
    bias = torch.randn(shape[0])
    x = torch.randn(num_rows, shape[1])
    expected = F.linear(x, weight, bias)
    assert torch.allclose(Linear(weight, bias, pack=True)(x), expected, atol=1e-4)
    residual = torch.ones(num_rows, shape[0])
    row = RowParallelLinear(weight, bias, Parallel(), pack=True)
    assert torch.allclose(row(x, residual), expected + 1, atol=1e-4)


def test_any_number_of_rows_is_computed_with_few_kernels():
    """oneDNN caches a kernel for each number of rows, so Baton rounds this number up.

    The products of this test take 17 MB with rounding, and 133 MB without it.
    """

    def resident_mb() -> int:
        return (
            int(Path("/proc/self/statm").read_text().split()[1])
            * resource.getpagesize()
            >> 20
        )

    product = Linear(torch.randn(3072, 576), pack=True)
    x = torch.randn(256, 576)
    product(x)
    before = resident_mb()
    for num_rows in range(len(x), 32, -1):
        product(x[:num_rows])
    assert resident_mb() - before < 60


def test_joined_projections_are_split_again():
    torch.manual_seed(0)
    parts = [Linear(torch.randn(rows, 32)) for rows in (48, 16, 16)]
    x = torch.randn(5, 32)
    expected = [part(x) for part in parts]
    outputs = Columns(parts, pack=True)(x)
    for output, expected_output in zip(outputs, expected, strict=True):
        assert torch.allclose(output, expected_output, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_not_packed(dtype):
    weight = torch.ones(8, 8, dtype=dtype)
    assert not Linear(weight, pack=True).is_packed


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_a_packed_model_generates_the_same_tokens(kind):
    mapped = load(ensure_model(kind), pack=False)
    packed = load(ensure_model(kind), pack=True)
    prompt = list(range(3, 40))
    assert greedy(mapped, prompt, 30) == greedy(packed, prompt, 30)
