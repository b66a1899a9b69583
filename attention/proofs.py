"""Attention's own kernels prove themselves before they serve, by the pool's null block: compilers,
drivers and GPUs differ, and what none of them reports would be wrong text."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np
import torch
from torch import Tensor

from attention.base import Kind, Pages, Turn
from attention.kernels.store import store
from attention.kernels.widen import widen
from attention.pieces import PieceDecode, partial_bytes
from attention.support import UnsupportedPool
from kvcache import fp8

_TOLERANCE: Final = 0.01  # outputs have 8 bits
# Tokens of sequences: less than a tile, one, and several pieces of several tiles.
_CONTEXTS: Final = (5, 64, 4500)
_SMS: Final = 1  # of a GPU that cuts contexts into the fewest pieces
_SCALES: Final = (2.0, 0.5)
_NEARLY_ZERO: Final = 1e-20


def prove_storing(
    caches: tuple[Tensor, ...],
    scales: tuple[float, ...],
    dtype: torch.dtype,
    num_q_heads: int = 0,
) -> None:
    """By keys and values of `dtype`, rotated where there are query heads; see `store`.

    Raises:
        UnsupportedPool: something else is stored.
    """
    _prove("stores KV", lambda: _wrongly_stored(caches, scales, dtype, num_q_heads))


def prove_decoding(
    caches: tuple[Tensor, Tensor],
    dtype: torch.dtype,
    num_q_heads: int,
    kinds: Sequence[Kind],
) -> None:
    """By queries of `dtype`; see PieceDecode.

    Raises:
        UnsupportedPool: it finds something else than plain attention.
    """

    def most() -> str | None:
        errors = [
            error
            for kind in kinds
            for error in _errors(caches, dtype, num_q_heads, kind)
        ]
        found = torch.stack(errors).max().item()  # NaN, if one is
        return None if found < _TOLERANCE else f"deviates by {found:.2g}"

    _prove("decodes", most)


def prove_widening(stored: Tensor, wide: Tensor, *, packed: bool = False) -> None:
    """Of FP8, both [B, H, N, D]; see `widen`.

    Raises:
        UnsupportedPool: something else is read.
    """

    def wrongly_read() -> str | None:
        null, one = (
            torch.tensor([n], dtype=torch.int32, device=wide.device) for n in (0, 1)
        )
        with _borrowed([stored]) as (block,):
            block.copy_(torch.randn(block.shape, device=wide.device))
            widen(stored, wide, null, one, _SCALES[0], packed=packed)
            wrong = (wide[0].float() != block.float() * _SCALES[0]).sum()
        return f"deviates in {int(wrong)} elements" if wrong else None

    _prove("reads KV of FP8", wrongly_read)


def _prove(verb: str, proof: Callable[[], str | None]) -> None:
    """Raises UnsupportedPool for what the proof of a kernel that `verb` finds wrong."""
    try:
        problem = proof()
    except Exception as error:  # of any kind, from compilers and drivers
        problem = f"raises {type(error).__name__}: {str(error).strip()[:200]}"
    if problem is not None:
        told = f"attention_backend flashinfer: the kernel that {verb} {problem} on this GPU"
        raise UnsupportedPool(f"{told}: use --attention-backend torch")


@contextmanager
def _borrowed(caches: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The null blocks [H, N, D]; their content comes back."""
    blocks = [cache[0] for cache in caches]
    before = [block.clone() for block in blocks]
    try:
        yield blocks
    finally:
        for block, content in zip(blocks, before, strict=True):
            block.copy_(content)


def _wrongly_stored(
    caches: tuple[Tensor, ...],
    scales: tuple[float, ...],
    dtype: torch.dtype,
    num_q_heads: int,
) -> str | None:
    num_heads, num_tokens, dim = caches[0].shape[1:]
    device, sizes = caches[0].device, [num_q_heads, *[num_heads] * len(caches)]
    slots = torch.arange(num_tokens, dtype=torch.int32, device=device)
    # By a quarter, and norms of what is -1 or 1 by powers of two: nothing is rounded.
    turns: list[Turn | None] = [None]
    if num_q_heads:
        cos_sin = (
            (torch.arange(dim, device=device) >= dim // 2).float().repeat(num_tokens, 1)
        )
        norms = tuple(
            torch.full((dim,), weight, device=device, dtype=dtype)
            for weight in (2, 0.5)
        )
        turns = [Turn(cos_sin), Turn(cos_sin, (norms[0], norms[1]), _NEARLY_ZERO)]
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for turn in turns:
        drawn = (torch.randn(num_tokens, n, dim, device=device) for n in sizes)
        factors = (2.0, 0.5) if turn is not None and turn.norms else None
        q, *new = (
            (x if factors is None else 1 - 2.0 * (x < 0)).to(dtype) for x in drawn
        )
        turned, kept = q, [*new]
        if turn is not None:
            turned, kept[0] = (
                torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], -1) * factor
                for x, factor in zip((q, new[0]), factors or (1.0, 1.0), strict=True)
            )
        with _borrowed(caches) as blocks:
            store(
                new[0],
                new[1] if len(new) > 1 else None,
                slots,
                caches,
                scales,
                q=q,
                turn=turn,
            )
            wrong += (q != turned).sum()
            for block, part, scale in zip(blocks, kept, scales, strict=False):
                stored = fp8.stored_as(part, block.dtype, scale).float()
                wrong += (block.transpose(0, 1).float() != stored).sum()
    return f"deviates in {int(wrong)} elements" if wrong else None


def _errors(
    caches: tuple[Tensor, Tensor], dtype: torch.dtype, num_q_heads: int, kind: Kind
) -> list[Tensor]:
    """Of each context's output and log-sum-exp: norm of the difference by the norm."""
    (num_heads, num_tokens, dim), device = caches[0].shape[1:], caches[0].device
    heads, num_seqs = (num_q_heads, num_heads, dim), len(_CONTEXTS)
    counts = -(-np.array(_CONTEXTS, np.int32) // num_tokens)
    indptr = np.cumsum([0, *counts], dtype=np.int32)
    pages = Pages(
        indptr, np.zeros(indptr[-1], np.int32), _CONTEXTS - (counts - 1) * num_tokens
    )
    workspace = torch.empty(
        partial_bytes(heads, num_seqs, _SMS), dtype=torch.uint8, device=device
    )
    decode = PieceDecode(
        heads, num_tokens, kind, dim**-0.5 / _SCALES[0], workspace, _SMS
    )
    q = torch.randn(num_seqs, num_q_heads, dim, device=device).to(dtype)
    runs = [
        (torch.empty_like(q), torch.empty(q.shape[:2], device=device)) for _ in range(2)
    ]
    errors = []
    with _borrowed(caches) as (key, value):
        for block in (key, value):
            block.copy_(torch.randn(block.shape, device=device))
        decode.plan(pages)
        for crowded, (out, lse) in enumerate(runs):
            decode.run(
                q, caches, out=out, k_scale=_SCALES[0], v_scale=_SCALES[1], lse=lse,
                crowded=bool(crowded),
            )  # fmt: skip
        for row, length in enumerate(_CONTEXTS):  # the block again and again
            tokens = torch.arange(length, device=device) % num_tokens
            scores = (
                q[row].float().view(num_heads, -1, dim) @ key.float().mT * dim**-0.5
            )
            if kind.soft_cap:
                scores = (scores / kind.soft_cap).tanh() * kind.soft_cap
            scores = scores[..., tokens]
            scores[..., : -(kind.window or length)] = float("-inf")
            shares = scores.new_zeros(*scores.shape[:2], num_tokens)
            shares.index_add_(-1, tokens, scores.softmax(-1))
            values = shares @ value.float() * _SCALES[1]
            expected = (values, scores.logsumexp(-1) / np.log(2))
            pairs = [
                (run[i][row], right) for run in runs for i, right in enumerate(expected)
            ]
            for found, right in pairs:
                difference = found.float() - right.view(found.shape)
                errors.append(difference.norm() / right.norm())
    return errors
