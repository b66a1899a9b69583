"""Triton kernel that merges the partial results of decode kernels."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from attention.kernels.launch import PDL, let_next_begin_and_wait
from attention.kernels.sinks import with_sinks


def _merge(  # type: ignore[no-untyped-def]
    work, partials, partial_lses, out, lse, sinks, num_pieces, num_rows, num_heads,
    DIM: tl.constexpr, HEADS: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Merges the partial results of a row, for some query heads.

    If the row's context has a single piece, the kernel of decode.py has stored the
    result already.
    """
    row = tl.program_id(0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    of_row = work + 1 + num_pieces + row
    run_rows = tl.load(of_row)
    num_parts = tl.load(of_row + 2 * num_rows)
    first_result = tl.load(of_row + 3 * num_rows)
    let_next_begin_and_wait()
    if num_parts == 1:
        return
    is_head = head < num_heads
    column = tl.arange(0, DIM)
    top = tl.full((HEADS,), -1e30, tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    acc = tl.zeros((HEADS, DIM), tl.float32)
    for start in range(0, num_parts, PIECES):
        index = (start + tl.arange(0, PIECES))[:, None]
        result = first_result + index * run_rows
        piece_heads = (result * num_heads + head[None, :]).to(tl.int64)
        is_partial = (index < num_parts) & is_head[None, :]
        piece_lse = tl.load(partial_lses + piece_heads, mask=is_partial, other=-1e30)
        pointers = partials + piece_heads[:, :, None] * DIM + column[None, None, :]
        part = tl.load(pointers, mask=is_partial[:, :, None], other=0.0)
        new_top = tl.maximum(top, tl.max(piece_lse, 0))
        decay = tl.exp2(top - new_top)
        weight = tl.exp2(piece_lse - new_top[None, :])
        acc = acc * decay[:, None] + tl.sum(part * weight[:, :, None], 0)
        total = total * decay + tl.sum(weight, 0)
        top = new_top
    row_heads = row.to(tl.int64) * num_heads + head
    target = out + row_heads[:, None] * DIM + column[None, :]
    tl.store(lse + row_heads, top + tl.log2(total), mask=is_head)
    total = with_sinks(total, top, sinks, head, is_head)
    result = acc / total[:, None]
    tl.store(target, result.to(out.dtype.element_ty), mask=is_head[:, None])


# Triton does not specialize the kernel by these arguments, so that steps of any size
# use the same compiled kernel.
_merge_kernel: Any = triton.jit(
    _merge,
    do_not_specialize=["num_pieces", "num_rows"],
    do_not_specialize_on_alignment=["work"],
)


def merge(
    plan: Tensor,
    num_pieces: int,
    partials: tuple[Tensor, Tensor],
    out: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
    *,
    many_programs: bool,
) -> None:
    """Merges the partial results of each row with several pieces of context.

    Args:
        plan: int32, the result of attention.pieces.plan_pieces.
        num_pieces: `max_pieces` of plan_pieces.
        partials: The partial outputs and log-sum-exps.
        out: [S, HQ, D], filled with the merged outputs.
        lse: float32 [S, HQ], filled with base-2 log-sum-exps, without sinks.
        sinks: float32 [HQ], a logit for each head.
        many_programs: Whether programs fill the GPU even if each of them merges several
            heads.
    """
    num_rows, num_q_heads, dim = out.shape
    heads, pieces, warps = _tile(dim, many_programs)
    _merge_kernel[(num_rows, triton.cdiv(num_q_heads, heads))](
        plan,
        *partials,
        out,
        lse,
        sinks,
        num_pieces,
        num_rows,
        num_q_heads,
        DIM=dim,
        HEADS=heads,
        PIECES=pieces,
        num_warps=warps,
        launch_pdl=PDL,
    )


def _tile(dim: int, many_programs: bool) -> tuple[int, int, int]:
    """Returns the heads that a program merges, the pieces that it reads at a time, and
    its warps."""
    if many_programs:
        return 4, 1024 // dim, 2
    return 1, 4096 // dim, 1
