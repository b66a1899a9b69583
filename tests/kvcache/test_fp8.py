"""Storing KV in 8 bits: what is rounded, what is cut off, and what stays no number."""

import math

import pytest
import torch

from kvcache import fp8
from kvcache.layout import KVLayout
from kvcache.pool import KVPool


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_too_large_becomes_the_largest_number(dtype):
    values = torch.tensor(
        [447.0, 449.0, 465.0, 1e6, -1e30, math.inf, -math.inf], dtype=dtype
    )
    stored = fp8.stored_as(values, fp8.DTYPE)
    assert stored.float().tolist() == [
        448.0,
        448.0,
        448.0,
        448.0,
        -448.0,
        448.0,
        -448.0,
    ]


def test_what_is_no_number_stays_none():
    assert fp8.stored_as(torch.tensor([math.nan]), fp8.DTYPE).isnan().all()


def test_other_dtypes_are_not_cut_off():
    values = torch.tensor([1e30, math.inf])
    assert torch.equal(fp8.stored_as(values, torch.float32), values)


def test_every_stored_number_is_read_as_it_is():
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(fp8.DTYPE)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        read = fp8.numbers(fp8.addressable(every), dtype)
        again = fp8.stored_as(read, fp8.DTYPE)
        assert torch.equal(again.float().nan_to_num(1e9), every.float().nan_to_num(1e9))


def test_a_pools_scales_go_by_layer_and_component():
    layout = KVLayout("BHLCND", 2, 1, 3, 2, 4, 8, "float8_e4m3fn")
    pool = KVPool(layout, scales=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert [pool.scale(layer, c) for layer in range(3) for c in range(2)] == list(
        pool.scales
    )
    assert KVPool(layout).scale(2, 1) == 1.0
