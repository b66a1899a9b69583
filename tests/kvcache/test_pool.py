"""A KV pool is one allocation, and its views have the same content in every axis
order.
"""

import gc
import itertools
import mmap
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvcache.layout import AXES, NAMED_ORDERS, KVLayout
from kvcache.pool import KVPool
from protocol.handshake import ITEMSIZE
from tests.rigs.examples import examples

ALL_ORDERS = ["".join(head) + "D" for head in itertools.permutations("BHLCN")]
BASE = KVLayout("BHLCND", 3, 2, 3, 2, 4, 5, "float32")


def fill(pool: KVPool) -> None:
    """Sets each element to its index modulo 251, through the views of the layers."""
    sizes = pool.layout.sizes
    index = torch.arange(pool.tensor.numel()).view([sizes[axis] for axis in AXES])
    for layer in range(sizes["L"]):
        for component in range(sizes["C"]):
            view = pool.component(layer, component)
            view.copy_((index[:, :, layer, component] % 251).to(view.dtype))


@given(
    st.sampled_from(ALL_ORDERS),
    st.sampled_from(ALL_ORDERS),
    st.sampled_from(sorted(ITEMSIZE)),
    st.tuples(
        *[st.integers(1, 4)] * 3,
        st.integers(1, 2),
        st.integers(1, 5),
        st.integers(1, 4),
    ),
)
@examples(100)
def test_pools_of_any_two_orders_hold_the_same_content(order, other, dtype, sizes):
    pool = KVPool(KVLayout(order, *sizes, dtype))
    other_pool = KVPool(KVLayout(other, *sizes, dtype))
    fill(pool)
    fill(other_pool)
    assert torch.equal(pool.canonical.float(), other_pool.canonical.float())
    for layer in range(sizes[2]):
        view = pool.view(layer).float()
        assert torch.equal(view, other_pool.view(layer).float())
    if order == other:
        assert torch.equal(pool.flat_bytes, other_pool.flat_bytes)


@pytest.mark.parametrize("order", NAMED_ORDERS)
@pytest.mark.parametrize("dtype", sorted(ITEMSIZE))
def test_elements_of_views_lie_at_the_offsets_of_the_layout(order, dtype):
    pool = KVPool(replace(BASE, order=order, dtype=dtype))
    strides = pool.layout.byte_strides
    index = {"B": 2, "H": 1, "L": 1, "C": 1, "N": 3, "D": 0}
    offset = sum(index[axis] * strides[axis] for axis in AXES)
    view = pool.component(1, 1)[2, 1, 3]
    assert view.data_ptr() == pool.base_address + offset
    view.copy_(torch.arange(1, 6).to(view.dtype))
    row_bytes = pool.flat_bytes[offset : offset + 5 * pool.layout.itemsize]
    assert row_bytes.clone().view(view.dtype).float().tolist() == [1, 2, 3, 4, 5]
    num_nonzero = int(view.contiguous().view(torch.uint8).ne(0).sum())
    assert int(pool.flat_bytes.count_nonzero()) == num_nonzero


def test_item_sizes_equal_those_of_torch():
    assert {name: getattr(torch, name).itemsize for name in ITEMSIZE} == ITEMSIZE


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_unused_pool_costs_no_memory():
    large = replace(BASE, num_blocks=2**30 // BASE.block_bytes)  # 1 GiB
    before = resident_bytes()
    pool = KVPool(large)
    assert pool.base_address % mmap.PAGESIZE == 0
    assert not pool.view(0)[6].any()
    pool.view(0)[7].fill_(1.0)
    assert resident_bytes() - before < 64 * 2**20


def test_views_keep_the_memory_alive():
    view = KVPool(BASE).view(0)
    gc.collect()
    view.fill_(2.0)
    assert float(view.sum()) == 2.0 * view.numel()


def test_pool_that_does_not_fit_raises_an_error_with_its_size():
    impossible = replace(BASE, num_blocks=2**48 // BASE.block_bytes)
    with pytest.raises(MemoryError, match=f"{impossible.nbytes} bytes does not fit"):
        KVPool(impossible)
