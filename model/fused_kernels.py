"""Triton kernels for the decoder's small operations: norms, the product in a feed-forward, tokens.

Sizes that differ from step to step are not specialised (`do_not_specialize`): one variant serves
all, so that what has run once before a server is ready compiles nothing more.
"""

from typing import Any, Final

import torch
import triton
import triton.language as tl

AHEAD = True  # False in an interpreter, which knows no launches
_NORM_ELEMENTS: Final = 1024  # of one program, at least: rows of few elements share one
_ELEMENTS_OF_A_WARP: Final = 512
_MAX_WARPS: Final = 16
_SILU_COLUMNS: Final = 1024  # of one program
_SEARCHED_COLUMNS: Final = 8192  # of one program of `first_largest`


def _rms_norm(  # type: ignore[no-untyped-def]
    x, weight, out, eps, token_stride, head_stride, num_heads, num_rows,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """A row is a head of a token; names of the form x_stride are in elements."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row < num_rows) & (column < WIDTH)
    scales = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    if AHEAD:  # it begins while the kernel before it ends, and lets its successor do so
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    at = (row // num_heads).to(tl.int64) * token_stride + row % num_heads * head_stride
    value = tl.load(x + at + column, mask=inside, other=0.0).to(tl.float32)
    size = tl.sqrt(tl.sum(value * value, 1) / WIDTH + eps)
    result = value / size[:, None] * scales
    place = out + row.to(tl.int64) * WIDTH + column
    tl.store(place, result.to(out.dtype.element_ty), mask=inside)


_norm_kernel: Any = triton.jit(_rms_norm, do_not_specialize=["num_rows"])


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See fused_ops."""
    width, num_heads = x.shape[-1], x.shape[1] if x.dim() == 3 else 1
    num_rows = x.shape[0] * num_heads
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    columns = triton.next_power_of_2(width)
    rows = max(1, _NORM_ELEMENTS // columns)
    _norm_kernel[(triton.cdiv(num_rows, rows),)](
        x, weight, out, eps, x.stride(0), x.stride(1) if x.dim() == 3 else 0, num_heads, num_rows,
        WIDTH=width, ROWS=rows, COLUMNS=columns, AHEAD=AHEAD,
        num_warps=min(_MAX_WARPS, rows * columns // _ELEMENTS_OF_A_WARP),
        **({"launch_pdl": True} if AHEAD else {}),
    )  # fmt: skip
    return out


def _silu_and_mul(gate_up, out, width, COLUMNS: tl.constexpr, AHEAD: tl.constexpr):  # type: ignore[no-untyped-def]
    if AHEAD:  # it begins while the matrix product before it ends
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=inside).to(tl.float32)
    result = gate / (1 + tl.exp(-gate)) * up
    tl.store(out + row * width + column, result.to(out.dtype.element_ty), mask=inside)


_silu_kernel: Any = triton.jit(_silu_and_mul)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[T, 2 n] -> silu of the first half times the second, [T, n]."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    grid = (rows, triton.cdiv(width, _SILU_COLUMNS))
    options = {"launch_pdl": True} if AHEAD else {}
    _silu_kernel[grid](
        gate_up, out, width, COLUMNS=_SILU_COLUMNS, AHEAD=AHEAD, num_warps=4, **options
    )
    return out


def _fill_in(token_ids, drawn, out, num_tokens, TOKENS: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = index < num_tokens
    token = tl.load(token_ids + index, mask=inside, other=0)
    filled = tl.load(drawn + (-1 - token), mask=inside & (token < 0), other=0)
    tl.store(out + index, tl.where(token < 0, filled, token), mask=inside)


_fill_in_kernel: Any = triton.jit(_fill_in, do_not_specialize=["num_tokens"])


def fill_in(token_ids: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """int64 [T] with every -1 - r replaced by drawn[r]."""
    out = torch.empty_like(token_ids)
    grid = (triton.cdiv(len(out), 256),)
    _fill_in_kernel[grid](token_ids, drawn, out, len(out), TOKENS=256, num_warps=4)
    return out


def _first_largest(logits, values, indices, width, stride, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    value = tl.load(logits + row * stride + column, mask=column < width, other=float("-inf"))
    value = tl.where(value == value, value, float("-inf")).to(tl.float32)
    largest, first = tl.max(value, axis=0, return_indices=True, return_indices_tie_break_left=True)
    at = row * tl.num_programs(1) + part
    tl.store(values + at, largest)
    tl.store(indices + at, part * COLUMNS + first)


def _first_largest_part(values, indices, out, num_parts, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    at = row * num_parts + part
    value = tl.load(values + at, mask=part < num_parts, other=float("-inf"))
    best = tl.argmax(value, axis=0, tie_break_left=True)
    tl.store(out + row, tl.load(indices + row * num_parts + best).to(tl.int64))


_first_largest_kernel: Any = triton.jit(_first_largest)
_first_largest_part_kernel: Any = triton.jit(_first_largest_part)


def first_largest(logits: torch.Tensor) -> torch.Tensor:
    """[R, V], rows contiguous -> int64 [R], see fused_ops."""
    rows, width = logits.shape
    parts = triton.cdiv(width, _SEARCHED_COLUMNS)
    values = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    indices = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _first_largest_kernel[(rows, parts)](
        logits, values, indices, width, logits.stride(0), COLUMNS=_SEARCHED_COLUMNS, num_warps=8
    )
    PARTS = triton.next_power_of_2(parts)
    _first_largest_part_kernel[(rows,)](values, indices, out, parts, PARTS=PARTS, num_warps=1)
    return out
