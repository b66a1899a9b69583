"""A Triton kernel that reads latents of FP8 for kernels which take 16 bits only."""

from typing import Any, Final

import triton
import triton.language as tl
from torch import Tensor

from attention.kernels.launch import PDL, let_next_begin_and_wait
from attention.support import LATENT_DIM, ROPE_DIM

_TOKENS: Final = 16  # of one turn of a program
_PROGRAMS: Final = 1024  # each takes blocks in turn: a captured step may list any number of them


def _widen_columns(  # type: ignore[no-untyped-def]
    source, target, own, scale, FIRST: tl.constexpr, COUNT: tl.constexpr
):
    column = FIRST + tl.arange(0, COUNT)[None, :]
    x = tl.load(source + column, mask=own, other=0.0).to(tl.float32) * scale
    tl.store(target + column, x.to(target.dtype.element_ty), mask=own)


_columns: Any = triton.jit(_widen_columns)


def _widen(  # type: ignore[no-untyped-def]
    latents, wide, blocks, count, scale, block_stride, token_stride,
    PAGE: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    parts: tl.constexpr = (PAGE + TOKENS - 1) // TOKENS
    turns = tl.load(count) * parts
    let_next_begin_and_wait()
    for turn in range(tl.program_id(0), turns, tl.num_programs(0)):
        block = tl.load(blocks + turn // parts).to(tl.int64)
        token = (turn % parts * TOKENS + tl.arange(0, TOKENS))[:, None]
        source = latents + block * block_stride + token * token_stride
        target = wide + (block * PAGE + token) * (LATENT + ROPE)
        _columns(source, target, token < PAGE, scale, 0, LATENT)
        _columns(source, target, token < PAGE, scale, LATENT, ROPE)


_kernel: Any = triton.jit(_widen)


def widen(latents: Tensor, wide: Tensor, blocks: Tensor, count: Tensor, scale: float) -> None:
    """Copies the listed blocks of `latents`, times `scale`, to the same blocks of `wide`.

    Args:
        latents: float8_e4m3fn [B, N, 576], elements contiguous.
        wide: 16 bits, contiguous [B, N, 576].
        blocks: int32; one may be listed more than once.
        count: int32 [1 or more], the first: how many of `blocks` are.
    """
    assert latents.stride(2) == 1 and wide.is_contiguous()
    strides = latents.stride()[:2]
    _kernel[(_PROGRAMS,)](
        latents, wide, blocks, count, scale, *strides, PAGE=latents.shape[1], LATENT=LATENT_DIM,
        ROPE=ROPE_DIM, TOKENS=_TOKENS, num_warps=4, launch_pdl=PDL,
    )  # fmt: skip
