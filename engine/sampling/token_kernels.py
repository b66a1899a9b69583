"""Tokens that stay on a GPU: those of the largest logits, and those that the step before drew.

Sizes that differ from step to step are not specialised, so that nothing is compiled late.
"""

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

_SEARCHED_COLUMNS: Final = 8192  # of one program of `first_largest`


def _fill_in(token_ids, drawn, out, num_tokens, TOKENS: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = index < num_tokens
    token = tl.load(token_ids + index, mask=inside, other=0)
    filled = tl.load(drawn + (-1 - token), mask=inside & (token < 0), other=0)
    tl.store(out + index, tl.where(token < 0, filled, token), mask=inside)


_fill_in_kernel: Any = triton.jit(_fill_in, do_not_specialize=["num_tokens"])


def fill_in(token_ids: Tensor, drawn: Tensor) -> Tensor:
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


def first_largest(logits: Tensor) -> Tensor:
    """[R, V] of any float dtype, rows contiguous -> int64 [R], the first of the largest; NaN is
    smaller than any number."""
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
