"""Conversion of KV to FP8: rounding, clamping and NaN."""

import math

import pytest
import torch

from kvcache import fp8
from kvcache.layout import KVLayout
from kvcache.pool import KVPool


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_values_are_clamped_to_the_largest_number(dtype):
    values = [447.0, 449.0, 465.0, 1e6, -1e30, math.inf, -math.inf]
    stored = fp8.to_stored(torch.tensor(values, dtype=dtype), fp8.DTYPE)
    expected = [448.0, 448.0, 448.0, 448.0, -448.0, 448.0, -448.0]
    assert stored.float().tolist() == expected


def test_nan_stays_nan():
    assert fp8.to_stored(torch.tensor([math.nan]), fp8.DTYPE).isnan().all()


def test_other_dtypes_are_not_clamped():
    values = torch.tensor([1e30, math.inf])
    assert torch.equal(fp8.to_stored(values, torch.float32), values)


def test_every_stored_number_survives_reading_and_storing():
    stored = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(fp8.DTYPE)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        read = fp8.from_stored(fp8.addressable(stored), dtype)
        again = fp8.to_stored(read, fp8.DTYPE)
        assert torch.equal(
            again.float().nan_to_num(1e9), stored.float().nan_to_num(1e9)
        )


def test_scales_of_a_pool_are_ordered_by_layer_and_component():
    layout = KVLayout("BHLCND", 2, 1, 3, 2, 4, 8, "float8_e4m3fn")
    pool = KVPool(layout, scales=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    scales = [
        pool.scale(layer, component) for layer in range(3) for component in range(2)
    ]
    assert scales == list(pool.scales)
    assert KVPool(layout).scale(2, 1) == 1.0
