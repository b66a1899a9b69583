"""Attention's own kernels in Triton's interpreter equal plain attention."""

import importlib

import pytest
import torch

import tests.rigs.interpreted  # noqa: F401

dcp = importlib.import_module("attention.kernels.dcp")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("size", "own_heads", "dim"), [(2, 3, 64), (4, 1, 96)])
def test_what_ranks_found_apart_is_put_together(size, own_heads, dim, dtype):
    rows, heads = 5, size * own_heads
    found = torch.randn(size, rows, heads, dim).to(dtype)
    lses = 3 * torch.randn(size, rows, heads)
    absent = torch.rand(size, rows) < 0.5
    absent[torch.arange(rows) % size, torch.arange(rows)] = False  # some rank has tokens
    found[absent] = float("nan")
    packed = [dcp.pack(*parts, size) for parts in zip(found, lses, absent, strict=True)]
    weights = lses.masked_fill(absent[..., None], float("-inf")).softmax(0)
    expected = (found.nan_to_num().float() * weights[..., None]).sum(0)
    for rank, theirs in enumerate(expected.split(own_heads, dim=1)):
        merged = dcp.merge(torch.stack([part[rank] for part in packed]))
        torch.testing.assert_close(merged.float(), theirs, atol=5e-3, rtol=8e-3)
