"""Triton kernels before and after the exchange of partial attention results (DCP).

In torch, these two kernels would be a dozen launches per layer, which take 30 us on an
H200. A partial result is sent as D elements of 16 bits, followed by its float32
log-sum-exp in the space of two more elements.
"""

from typing import Any, Final

import triton
import triton.language as tl
from torch import Tensor

_LSE_ELEMENTS: Final = 2  # of 16 bits


def _pack(  # type: ignore[no-untyped-def]
    out,
    lse,
    absent,
    packed,
    num_rows,
    num_heads,
    rank_heads,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1)
    source = row * num_heads + head
    target = ((head // rank_heads) * num_rows + row) * rank_heads + head % rank_heads
    offsets = tl.arange(0, BLOCK)
    x = tl.load(out + source * D + offsets, mask=offsets < D)
    tl.store(packed + target * (D + 2) + offsets, x, mask=offsets < D)
    row_lse = tl.where(tl.load(absent + row), float("-inf"), tl.load(lse + source))
    as_floats = packed.to(tl.pointer_type(tl.float32))
    tl.store(as_floats + (target * (D + 2) + D) // 2, row_lse)


def _merge(  # type: ignore[no-untyped-def]
    packed,
    out,
    num_rows,
    rank_heads,
    SIZE: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1)
    offsets = tl.arange(0, BLOCK)
    as_floats = packed.to(tl.pointer_type(tl.float32))
    highest = tl.full((), float("-inf"), tl.float32)
    for rank in tl.static_range(SIZE):
        source = (rank * num_rows + row) * rank_heads + head
        highest = tl.maximum(highest, tl.load(as_floats + (source * (D + 2) + D) // 2))
    total = tl.full((), 0.0, tl.float32)
    summed = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(SIZE):
        source = (rank * num_rows + row) * rank_heads + head
        weight = tl.exp(tl.load(as_floats + (source * (D + 2) + D) // 2) - highest)
        x = tl.load(packed + source * (D + 2) + offsets, mask=offsets < D, other=0.0)
        # For a rank without tokens, x may be NaN, and 0 * NaN would not be 0.
        summed += tl.where(weight > 0, x.to(tl.float32) * weight, 0.0)
        total += weight
    target = row * rank_heads + head
    result = (summed / total).to(out.dtype.element_ty)
    tl.store(out + target * D + offsets, result, mask=offsets < D)


_pack_kernel: Any = triton.jit(_pack, do_not_specialize=["num_rows"])
_merge_kernel: Any = triton.jit(_merge, do_not_specialize=["num_rows"])


def pack(out: Tensor, lse: Tensor, absent: Tensor, size: int) -> Tensor:
    """Packs partial results with their log-sum-exps, in the order of receiving ranks.

    Args:
        out: 16 bits, contiguous [n, size * heads, D].
        lse: float32, contiguous [n, size * heads].
        absent: bool [n]: whether this rank has no tokens of the sequence.
        size: Number of ranks in the group.

    Returns:
        [size, n, heads, D + 2] in out's dtype: D output elements, then the float32
        log-sum-exp in the space of two elements.
    """
    num_rows, num_heads, dim = out.shape
    packed = out.new_empty(size, num_rows, num_heads // size, dim + _LSE_ELEMENTS)
    _pack_kernel[(num_rows, num_heads)](
        out,
        lse,
        absent,
        packed,
        num_rows,
        num_heads,
        num_heads // size,
        D=dim,
        BLOCK=triton.next_power_of_2(dim),
    )
    return packed


def merge(packed: Tensor) -> Tensor:
    """Merges the partial results of all ranks.

    Args:
        packed: [size, n, heads, D + 2], by source rank, each part as `pack` makes it.

    Returns:
        [n, heads, D]: attention over the tokens of all ranks.
    """
    size, num_rows, heads, width = packed.shape
    dim = width - _LSE_ELEMENTS
    out = packed.new_empty(num_rows, heads, dim)
    _merge_kernel[(num_rows, heads)](
        packed,
        out,
        num_rows,
        heads,
        SIZE=size,
        D=dim,
        BLOCK=triton.next_power_of_2(dim),
    )
    return out
