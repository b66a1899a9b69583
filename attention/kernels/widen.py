"""A Triton kernel that copies KV of FP8 for kernels which read 16 bits only."""

from typing import Any, Final

import triton
import triton.language as tl
from torch import Tensor

from attention.kernels.launch import PDL, let_next_begin_and_wait

_TOKENS: Final = 32  # of one turn of a program
_PROGRAMS: Final = (
    1024  # each takes blocks in turn: a captured step may list any number of them
)


def _widen(  # type: ignore[no-untyped-def]
    stored, wide, blocks, count, scale,
    block_stride, head_stride, token_stride, wide_block, wide_head, wide_token,
    HEADS: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, TOKENS: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    parts: tl.constexpr = (PAGE + TOKENS - 1) // TOKENS
    turns = tl.load(count) * (parts * HEADS)
    let_next_begin_and_wait()
    for turn in range(tl.program_id(0), turns, tl.num_programs(0)):
        place = turn // (parts * HEADS)
        block, head = tl.load(blocks + place).to(tl.int64), turn % HEADS
        token = (turn // HEADS % parts * TOKENS + tl.arange(0, TOKENS))[:, None]
        own, column = token < PAGE, tl.arange(0, DIM)[None, :]
        source = (
            stored + block * block_stride + head * head_stride + token * token_stride
        )
        x = tl.load(source + column, mask=own, other=0.0).to(tl.float32) * scale
        into = place.to(tl.int64) if PACKED else block
        target = (
            wide + into * wide_block + head * wide_head + token * wide_token + column
        )
        tl.store(target, x.to(wide.dtype.element_ty), mask=own)


_kernel: Any = triton.jit(_widen)


def widen(
    stored: Tensor, wide: Tensor, blocks: Tensor, count: Tensor, scale: float,
    *, packed: bool = False,
) -> None:  # fmt: skip
    """Copies the listed blocks of `stored`, times `scale`, to the same blocks of `wide`, or, where
    they are packed, to its first ones in the order of the list.

    Args:
        stored: float8_e4m3fn [B, H, N, D], elements contiguous, D a power of two.
        wide: as `stored`, in 16 bits.
        blocks: int32; one may be listed more than once.
        count: int32 [1 or more], the first: how many of `blocks` are.
    """
    assert stored.stride(3) == wide.stride(3) == 1
    _, heads, page, dim = stored.shape
    _kernel[(_PROGRAMS,)](
        stored, wide, blocks, count, scale, *stored.stride()[:3], *wide.stride()[:3], HEADS=heads,
        PAGE=page, DIM=dim, TOKENS=_TOKENS, PACKED=packed, num_warps=4, launch_pdl=PDL,
    )  # fmt: skip
