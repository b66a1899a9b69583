"""A Triton kernel that copies FP8 KV to 16 bits, for kernels that cannot read FP8."""

from typing import Any, Final

import triton
import triton.language as tl
from torch import Tensor

from attention.kernels.launch import PDL, let_next_begin_and_wait

_TOKENS: Final = 32  # tokens that a program copies at once
# The number of programs is fixed, because a captured step may list any number of
# blocks. The programs share these blocks.
_PROGRAMS: Final = 1024


def _widen(  # type: ignore[no-untyped-def]
    stored,
    wide,
    blocks,
    count,
    scale,
    block_stride,
    head_stride,
    token_stride,
    wide_block,
    wide_head,
    wide_token,
    HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    PACKED: tl.constexpr,
):
    parts: tl.constexpr = (PAGE + TOKENS - 1) // TOKENS
    num_copies = tl.load(count) * (parts * HEADS)
    let_next_begin_and_wait()
    for copy in range(tl.program_id(0), num_copies, tl.num_programs(0)):
        position = copy // (parts * HEADS)
        block = tl.load(blocks + position).to(tl.int64)
        head = copy % HEADS
        token = (copy // HEADS % parts * TOKENS + tl.arange(0, TOKENS))[:, None]
        in_block = token < PAGE
        column = tl.arange(0, DIM)[None, :]
        block_start = stored + block * block_stride
        source = block_start + head * head_stride + token * token_stride
        x = tl.load(source + column, mask=in_block, other=0.0).to(tl.float32) * scale
        into = position.to(tl.int64) if PACKED else block
        wide_start = wide + into * wide_block
        target = wide_start + head * wide_head + token * wide_token + column
        tl.store(target, x.to(wide.dtype.element_ty), mask=in_block)


_kernel: Any = triton.jit(_widen)


def widen(
    stored: Tensor,
    wide: Tensor,
    blocks: Tensor,
    count: Tensor,
    scale: float,
    *,
    packed: bool = False,
) -> None:
    """Copies the listed blocks of `stored`, times `scale`, to `wide`.

    Args:
        stored: float8_e4m3fn [B, H, N, D], elements contiguous, D a power of two.
        wide: [B, H, N, D] in 16 bits, elements contiguous; with `packed`, B may differ.
        blocks: int32, a list of block ids; a block may be listed more than once.
        count: int32 [1 or more]; the first element is the number of listed blocks.
        packed: Whether to copy to the first blocks of `wide`, in the order of the list.
            Otherwise block i of `stored` is copied to block i of `wide`.
    """
    assert stored.stride(3) == wide.stride(3) == 1
    _, heads, page, dim = stored.shape
    _kernel[(_PROGRAMS,)](
        stored,
        wide,
        blocks,
        count,
        scale,
        *stored.stride()[:3],
        *wide.stride()[:3],
        HEADS=heads,
        PAGE=page,
        DIM=dim,
        TOKENS=_TOKENS,
        PACKED=packed,
        num_warps=4,
        launch_pdl=PDL,
    )
