"""Attention sinks in Triton kernels.

Baton's decode kernels include sinks in the softmax. Another kernel adds them to a
softmax that was computed without them.
"""

from typing import Any, Final

import triton
import triton.language as tl
from torch import Tensor

from attention.kernels.launch import PDL, let_next_begin_and_wait

_LOG2_E: Any = tl.constexpr(1.4426950408889634)


def _add_sinks(total, top, sinks, heads, exists):  # type: ignore[no-untyped-def]
    """Returns the sum of a softmax with the sinks of some heads, if there are any.

    `total` is the sum without the sinks, relative to the largest score, `top`.
    """
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=exists, other=0.0)
        total += tl.exp2(sink * _LOG2_E - top)
    return total


with_sinks: Any = triton.jit(_add_sinks)


# Maximum number of elements that one program processes.
_MAX_ELEMENTS: Final = 1024


def _scale_heads(  # type: ignore[no-untyped-def]
    out,
    lse,
    sinks,
    num_heads,
    LN_2: tl.constexpr,
    DIM: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Scales some heads of one token by the share of the softmax that sinks leave."""
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, COLUMNS)[None, :]
    is_head = head < num_heads
    sink = tl.load(sinks + head, mask=is_head, other=0.0)
    let_next_begin_and_wait()
    place = tl.program_id(0).to(tl.int64) * num_heads + head
    logit = tl.load(lse + place, mask=is_head, other=0.0) * LN_2 - sink
    at = out + place[:, None] * DIM + column
    inside = is_head[:, None] & (column < DIM)
    value = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    share = 1 / (1 + tl.exp(-logit))
    tl.store(at, (value * share[:, None]).to(out.dtype.element_ty), mask=inside)


_scale_kernel: Any = triton.jit(_scale_heads)
_LN_2: Final = 0.6931471805599453


def scale_for_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Computes `attention.base.scale_for_sinks` with base-2 log-sum-exps.

    Args:
        out: [T, H, D], contiguous, scaled in place.
        lse: float32 [T, H], base-2 log-sum-exps of the scores without sinks.
        sinks: float32 [H], a logit for each head.
    """
    num_tokens, num_heads, dim = out.shape
    columns = triton.next_power_of_2(dim)
    heads = min(triton.next_power_of_2(num_heads), max(1, _MAX_ELEMENTS // columns))
    _scale_kernel[(num_tokens, triton.cdiv(num_heads, heads))](
        out,
        lse,
        sinks,
        num_heads,
        LN_2=_LN_2,
        DIM=dim,
        HEADS=heads,
        COLUMNS=columns,
        num_warps=4,
        launch_pdl=PDL,
    )
