"""Self-tests of Baton's own attention kernels, run before the kernels serve requests.

Compilers, drivers and GPUs differ. A kernel that computes wrong numbers without raising
an error would produce wrong text. The self-tests read and write only the pool's null
block, and restore its content.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np
import torch
from torch import Tensor

from attention.base import (
    AttentionBatch,
    LayerAttention,
    RopeNormArgs,
    scale_for_sinks,
)
from attention.kernels.store import store
from attention.kernels.widen import widen
from attention.pieces import PieceDecode, partial_bytes
from attention.support import UnsupportedPool
from kvcache import fp8

_TOLERANCE: Final = 0.01  # relative; outputs have 8 bits of precision
# Tokens of contexts: less than a tile, one tile, and several pieces of several tiles.
_CONTEXTS: Final = (5, 64, 4500)
_NUM_SMS: Final = 1  # plans for one multiprocessor have the fewest pieces
_SCALES: Final = (2.0, 0.5)  # FP8 scales of keys, and of values
_NORM_WEIGHTS: Final = (2.0, 0.5)  # of the norms of queries, and of keys
_SMALL_EPS: Final = 1e-20  # of the norms; too small to change their results
_MAX_ERROR_CHARS: Final = 200
_is_ignored = False  # see `ignore_self_tests`


def check_storing(
    caches: tuple[Tensor, ...],
    scales: tuple[float, ...],
    dtype: torch.dtype,
    num_q_heads: int = 0,
) -> None:
    """Checks the kernel `store` with random keys and values of `dtype`.

    Args:
        caches: The keys' cache and the values' cache, or only one: [B, H, N, D].
        scales: FP8 scales of the caches.
        num_q_heads: If not 0, norms and rotation of queries and keys are checked too.

    Raises:
        UnsupportedPool: The kernel stores wrong elements.
    """
    _run_check("stores KV", lambda: _check_store(caches, scales, dtype, num_q_heads))


def check_decoding(
    caches: tuple[Tensor, Tensor],
    dtype: torch.dtype,
    num_q_heads: int,
    layers: Sequence[LayerAttention],
    max_rows: int,
) -> None:
    """Checks PieceDecode against plain attention, with queries of `dtype`.

    Args:
        caches: The keys' cache and the values' cache: [B, H, N, D].
        layers: The layers that the backend serves. Of layers that use the same kernels,
            only one is checked.
        max_rows: The maximum number of rows of a run; see attention/pieces.py.

    Raises:
        UnsupportedPool: The results differ by more than the tolerance.
    """

    def compare() -> str | None:
        errors = []
        different = {(layer.kind, layer.sinks is None): layer for layer in layers}
        for layer in different.values():
            errors += _decode_errors(caches, dtype, num_q_heads, layer, max_rows)
        max_error = torch.stack(errors).max().item()  # NaN if any error is NaN
        if max_error < _TOLERANCE:
            return None
        return f"has a relative error of {max_error:.2g}"

    _run_check("decodes", compare)


def check_widening(stored: Tensor, wide: Tensor, *, packed: bool = False) -> None:
    """Checks the kernel `widen`, which copies FP8 blocks to 16 bits.

    Args:
        stored: FP8 blocks [B, H, N, D].
        wide: 16-bit blocks [B, H, N, D] that `widen` fills.
        packed: As for `widen`.

    Raises:
        UnsupportedPool: `widen` writes wrong elements.
    """

    def compare() -> str | None:
        null_block = torch.tensor([0], dtype=torch.int32, device=wide.device)
        count = torch.tensor([1], dtype=torch.int32, device=wide.device)
        with _null_blocks([stored]) as (block,):
            block.copy_(torch.randn(block.shape, device=wide.device))
            widen(stored, wide, null_block, count, _SCALES[0], packed=packed)
            num_wrong = (wide[0].float() != block.float() * _SCALES[0]).sum()
        return f"computes {int(num_wrong)} wrong elements" if num_wrong else None

    _run_check("reads KV of FP8", compare)


def ignore_self_tests() -> None:
    """Makes all checks in this process pass; for a process that launches no kernels."""
    global _is_ignored
    _is_ignored = True


def _run_check(action: str, check: Callable[[], str | None]) -> None:
    """Runs the check of one kernel.

    Args:
        action: What the kernel does, such as "stores KV"; part of the error message.
        check: Returns the problem, such as "computes 3 wrong elements", or None.

    Raises:
        UnsupportedPool: The check raised an error or returned a problem.
    """
    try:
        problem = check()
    except Exception as error:  # compilers and drivers raise errors of any class
        text = str(error).strip()[:_MAX_ERROR_CHARS]
        problem = f"raises {type(error).__name__}: {text}"
    if problem is not None and not _is_ignored:
        raise UnsupportedPool(
            "attention_backend flashinfer failed its self-test on this GPU: the kernel "
            f"that {action} {problem}; use --attention-backend torch"
        )


@contextmanager
def _null_blocks(caches: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yields the null block [H, N, D] of each cache; restores their content at exit."""
    blocks = [cache[0] for cache in caches]
    saved = [block.clone() for block in blocks]
    try:
        yield blocks
    finally:
        for block, content in zip(blocks, saved, strict=True):
            block.copy_(content)


def _check_store(
    caches: tuple[Tensor, ...],
    scales: tuple[float, ...],
    dtype: torch.dtype,
    num_q_heads: int,
) -> str | None:
    cases: list[RopeNormArgs | None] = [None]
    if num_q_heads:
        cases += _exact_rope_norms(caches[0], dtype)
    num_wrong = torch.zeros((), dtype=torch.int64, device=caches[0].device)
    for rope_norm in cases:
        num_wrong += _count_wrong(caches, scales, dtype, num_q_heads, rope_norm)
    return f"computes {int(num_wrong)} wrong elements" if num_wrong else None


def _exact_rope_norms(cache: Tensor, dtype: torch.dtype) -> list[RopeNormArgs]:
    """Returns arguments with which rotation and norms are exact in any dtype.

    The rotation is by a quarter turn. The weights of the norms are powers of two. With
    norms, the caller must pass only elements that are -1 or 1.
    """
    num_tokens, dim = cache.shape[2:]
    is_sine = torch.arange(dim, device=cache.device) >= dim // 2
    cos_sin = is_sine.float().repeat(num_tokens, 1)
    q_norm, k_norm = (
        torch.full((dim,), weight, device=cache.device, dtype=dtype)
        for weight in _NORM_WEIGHTS
    )
    return [
        RopeNormArgs(cos_sin),
        RopeNormArgs(cos_sin, (q_norm, k_norm), _SMALL_EPS),
    ]


def _count_wrong(
    caches: tuple[Tensor, ...],
    scales: tuple[float, ...],
    dtype: torch.dtype,
    num_q_heads: int,
    rope_norm: RopeNormArgs | None,
) -> Tensor:
    """Stores random keys and values, and counts wrong results.

    Returns:
        The number of wrong elements in q and in the null blocks.
    """
    num_heads, num_tokens, dim = caches[0].shape[1:]
    device = caches[0].device
    has_norms = rope_norm is not None and rope_norm.norms is not None
    tensors = []
    for heads in [num_q_heads, *[num_heads] * len(caches)]:
        tensor = torch.randn(num_tokens, heads, dim, device=device)
        if has_norms:
            tensor = 1 - 2.0 * (tensor < 0)
        tensors.append(tensor.to(dtype))
    q, *components = tensors
    expected_q = q
    expected = list(components)
    if rope_norm is not None:
        q_weight, k_weight = _NORM_WEIGHTS if has_norms else (1.0, 1.0)
        expected_q = _quarter_turn(q) * q_weight
        expected[0] = _quarter_turn(components[0]) * k_weight
    slots = torch.arange(num_tokens, dtype=torch.int32, device=device)
    values = components[1] if len(components) > 1 else None
    with _null_blocks(caches) as blocks:
        store(components[0], values, slots, caches, scales, q=q, rope_norm=rope_norm)
        num_wrong = (q != expected_q).sum()
        for block, component, scale in zip(blocks, expected, scales, strict=False):
            stored = fp8.to_stored(component, block.dtype, scale).float()
            num_wrong += (block.transpose(0, 1).float() != stored).sum()
    return num_wrong


def _quarter_turn(x: Tensor) -> Tensor:
    """Rotates the first half of `x` [..., D] by 90 degrees, towards its second half."""
    half = x.shape[-1] // 2
    return torch.cat([-x[..., half:], x[..., :half]], -1)


def _decode_errors(
    caches: tuple[Tensor, Tensor],
    dtype: torch.dtype,
    num_q_heads: int,
    layer: LayerAttention,
    max_rows: int,
) -> list[Tensor]:
    """Returns the relative errors of each row's output and log-sum-exp.

    An error is the norm of the difference divided by the norm of the expected tensor.
    """
    kind, sinks = layer
    num_heads, block_size, dim = caches[0].shape[1:]
    device = caches[0].device
    heads = (num_q_heads, num_heads, dim)
    # Contexts with one row each, then contexts with runs of rows.
    lens = [*_CONTEXTS, *(n + row for n in _CONTEXTS for row in range(max_rows))]
    num_seqs = len(lens)
    workspace_bytes = partial_bytes(heads, num_seqs, _NUM_SMS, max_rows)
    workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device=device)
    # PieceDecode multiplies scores by the keys' scale. The softmax scale is therefore
    # divided by the keys' scale, so that the two cancel out.
    scale = dim**-0.5 / _SCALES[0]
    decode = PieceDecode(
        heads, block_size, kind, scale, workspace, _NUM_SMS, max_rows=max_rows
    )
    q = torch.randn(num_seqs, num_q_heads, dim, device=device).to(dtype)
    results = []
    errors = []
    with _null_blocks(caches) as (key, value):
        for block in (key, value):
            block.copy_(torch.randn(block.shape, device=device))
        batch = _null_batch(lens, block_size)
        decode.plan(batch, batch.pages(block_size))
        for small_programs in (False, True):
            out = torch.empty_like(q)
            lse = torch.empty(q.shape[:2], device=device)
            decode.run(
                q,
                caches,
                out=out,
                k_scale=_SCALES[0],
                v_scale=_SCALES[1],
                lse=lse,
                sinks=sinks,
                small_programs=small_programs,
            )
            results.append((out, lse))
        for row, length in enumerate(lens):
            expected = _attend_repeated_block(q[row], key, value, length, layer)
            for result in results:
                for tensor, right in zip(result, expected, strict=True):
                    difference = tensor[row].float() - right.view(tensor[row].shape)
                    errors.append(difference.norm() / right.norm())
    return errors


def _null_batch(lens: Sequence[int], block_size: int) -> AttentionBatch:
    """Returns a decode step of contexts of these lengths.

    Every block of these contexts is the null block.
    """
    num_blocks = -(-max(lens) // block_size)
    return AttentionBatch(
        query_lens=np.ones(len(lens), np.int32),
        context_lens=np.array(lens, np.int32),
        block_tables=np.zeros((len(lens), num_blocks), np.int32),
        slot_mapping=np.zeros(len(lens), np.int64),
    )


def _attend_repeated_block(
    q: Tensor, key: Tensor, value: Tensor, length: int, layer: LayerAttention
) -> tuple[Tensor, Tensor]:
    """Computes plain attention over a context that repeats one block.

    Args:
        q: [Hq, D], one token's query.
        key, value: [H, N, D], the block's keys and values.
        length: Tokens of the context.

    Returns:
        The output [H, Hq/H, D], and the base-2 log-sum-exp without sinks [H, Hq/H].
    """
    kind, sinks = layer
    num_heads, block_size, dim = key.shape
    tokens = torch.arange(length, device=q.device) % block_size
    scores = q.float().view(num_heads, -1, dim) @ key.float().mT * dim**-0.5
    if kind.soft_cap:
        scores = (scores / kind.soft_cap).tanh() * kind.soft_cap
    scores = scores[..., tokens]
    scores[..., : -(kind.window or length)] = float("-inf")
    weights = scores.new_zeros(*scores.shape[:2], block_size)
    weights.index_add_(-1, tokens, scores.softmax(-1))
    out = weights @ value.float() * _SCALES[1]
    lse = scores.logsumexp(-1)
    if sinks is not None:
        scale_for_sinks(out, lse, sinks.view(num_heads, -1))
    return out, lse / np.log(2)
