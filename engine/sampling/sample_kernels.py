"""Draws a step's tokens on a GPU, as engine/sampling/sampler.py specifies, in a few
Triton kernels.

No kernel sorts, and the host never waits for the device. A value is a logit minus the
row's largest logit, divided by the temperature, so it is at most 0. For top_k and
top_p, a search finds the smallest allowed value of a row. A token is allowed if all
tokens with larger values together weigh less than a limit. For top_k, each token weighs
1; for top_p, a token weighs its probability. The search is over keys. The key of a
value is the bit pattern of the float -value, so a smaller value has a larger key. Each
pass over the row tests seven keys, which reduces the range of possible keys to an
eighth. The search ends when one value is left, after at most eleven passes.

If the largest logit of a row is finite, it is subtracted from all logits. If it is
+inf, only tokens with a logit of +inf can be drawn. If a row has only NaN and -inf,
token 0 is drawn.
"""

from typing import Any, Final

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from attention.kernels.launch import PDL, let_next_begin_and_wait
from engine.sampling.sampling_batch import SamplingBatch

# The alignment of these tensors depends on the number of rows. By default, Triton would
# compile a variant of a kernel for each alignment.
_jit_any_alignment: Any = triton.jit(
    do_not_specialize_on_alignment=(
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "keys",
        "seed",
        "choice",
        "position",
    )
)
_TILE: Final = 4096  # logits that one program reads
_ALL: Final = 0x7FFFFFFF  # the key that allows every token
# Each pass finds three of the 31 bits of a key.
_PASSES: Final = tl.constexpr(11)
_GOLDEN: Final = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST: Final = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND: Final = tl.constexpr(0x94D049BB133111EB)
_LOWBIAS_1: Final = tl.constexpr(0x7FEB352D)
_LOWBIAS_2: Final = tl.constexpr(0x846CA68B)
_TO_UNIT: Final = tl.constexpr(2.0**-31 * (1 - 2.0**-24))
_MIN_TEMPERATURE: Final = tl.constexpr(1e-30)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _largest(  # type: ignore[no-untyped-def]
    logits, best, best_token, stride, vocab, parts, TILE: tl.constexpr
):
    """Stores the largest logit of each tile of each row in `best`, and the lowest token
    id with this logit in `best_token`. NaN counts as -inf."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    token = part * TILE + tl.arange(0, TILE)
    let_next_begin_and_wait()
    x = tl.load(logits + row * stride + token, mask=token < vocab, other=float("-inf"))
    x = tl.where(x == x, x, float("-inf")).to(tl.float32)
    value, index = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(best + row * parts + part, value)
    tl.store(best_token + row * parts + part, part * TILE + index)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _scaled(logits, token, vocab, largest, temperature):  # type: ignore[no-untyped-def]
    """Returns the logits of some tokens of a row, minus the row's largest logit and
    divided by the temperature. The results are at most 0. The module docstring
    specifies how NaN and infinities are replaced."""
    x = tl.load(logits + token, mask=token < vocab, other=float("-inf"))
    x = tl.where(x == x, x, float("-inf"))
    is_sure = largest == float("inf")
    is_empty = largest == float("-inf")
    x = tl.where(is_sure, tl.where(x == float("inf"), 0.0, float("-inf")), x)
    x = tl.where(is_empty, tl.where(token == 0, 0.0, float("-inf")), x)
    base = tl.where(is_sure | is_empty, 0.0, largest)
    return tl.div_rn(x - base, tl.maximum(temperature, _MIN_TEMPERATURE))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _search(  # type: ignore[no-untyped-def]
    scaled, vocab, max_key, limit, COUNTS: tl.constexpr, TILE: tl.constexpr
):
    """Returns the largest key such that all tokens with smaller keys together weigh
    less than `limit`.

    With COUNTS, each token weighs 1. Otherwise a token weighs its probability, and
    `limit` is a share of the total. Tokens with keys above `max_key` weigh nothing.
    Each lane adds few weights in float32; the sums of the lanes are added in float64.
    """
    low = max_key * 0
    step = max_key * 0 + (1 << 28)
    pivots = tl.arange(0, 8)
    number = max_key * 0
    while number < _PASSES:
        keys = low + pivots * step
        weights = tl.zeros((8, TILE), tl.float32)
        total = tl.zeros((TILE,), tl.float32)
        nearest = tl.full((TILE,), 0x7FFFFFFF, tl.int32)
        farthest = tl.zeros((TILE,), tl.int32)
        for start in range(0, vocab, TILE):
            token = start + tl.arange(0, TILE)
            value = tl.load(scaled + token, mask=token < vocab, other=float("-inf"))
            key = (-value).to(tl.int32, bitcast=True) & 0x7FFFFFFF
            weight = (
                tl.full((TILE,), 1.0, tl.float32) if COUNTS else libdevice.exp(value)
            )
            weight = tl.where((key <= max_key) & (token < vocab), weight, 0.0)
            weights += tl.where(key[None, :] < keys[:, None], weight[None, :], 0.0)
            total += weight
            is_inside = (key >= low) & ((key - low) >> 3 < step)
            nearest = tl.where(is_inside, tl.minimum(nearest, key), nearest)
            farthest = tl.where(is_inside, tl.maximum(farthest, key), farthest)
        bound = limit if COUNTS else limit * tl.sum(total.to(tl.float64), 0)
        larger = tl.sum(weights.to(tl.float64), 1)
        first = tl.min(nearest, 0)
        last = tl.max(farthest, 0)
        is_single = first == last  # one value is left; several tokens may have it
        low = tl.where(is_single, first, tl.max(tl.where(larger < bound, keys, low), 0))
        step = tl.where(number < 9, step >> 3, 1)
        number = tl.where(is_single, _PASSES, number + 1)
    return low


@_jit_any_alignment  # type: ignore[untyped-decorator, unused-ignore]
def _threshold(  # type: ignore[no-untyped-def]
    logits,
    largest,
    temperature,
    top_k,
    top_p,
    min_p,
    keys,
    work,
    stride,
    vocab,
    TILE: tl.constexpr,
):
    """Stores the key of the smallest allowed value of each row in `keys`. `work` is
    scratch memory, [S, V]."""
    row = tl.program_id(0).to(tl.int64)
    row_temperature = tl.load(temperature + row)
    max_key = tl.program_id(0) * 0 + 0x7FFFFFFF
    row_largest = tl.load(largest + row)
    row_work = work + row * vocab
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    min_share = tl.load(min_p + row)
    if row_temperature > 0:
        if (k > 0) | (p < 1):
            for start in range(0, vocab, TILE):
                token = start + tl.arange(0, TILE)
                value = _scaled(
                    logits + row * stride, token, vocab, row_largest, row_temperature
                )
                tl.store(row_work + token, value, mask=token < vocab)
            tl.debug_barrier()
        if k > 0:
            max_key = _search(row_work, vocab, max_key, k.to(tl.float64), True, TILE)
        if p < 1:
            by_p = _search(row_work, vocab, max_key, p.to(tl.float64), False, TILE)
            max_key = tl.minimum(max_key, by_p)
        if min_share > 0:
            key = (-libdevice.log(min_share)).to(tl.int32, bitcast=True) & 0x7FFFFFFF
            max_key = tl.minimum(max_key, key)
    tl.store(keys + row, max_key)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _splitmix(x):  # type: ignore[no-untyped-def]
    x = x + _GOLDEN
    x = (x ^ (x >> 30)) * _FIRST
    x = (x ^ (x >> 27)) * _SECOND
    return x ^ (x >> 31)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _noise(seed, choice, position, token):  # type: ignore[no-untyped-def]
    """Returns the noise of some tokens of one row, as `gumbel` of
    engine/sampling/counter_rng.py does."""
    row = _splitmix(seed.to(tl.uint64))
    row = _splitmix(row ^ choice.to(tl.uint64))
    row = _splitmix(row ^ position.to(tl.uint64))
    first = row.to(tl.uint32)
    second = (row >> 32).to(tl.uint32)
    x = (token + 1).to(tl.uint32)
    x = (x ^ (x >> 16)) * _LOWBIAS_1
    x = (x ^ (x >> 15)) * _LOWBIAS_2
    x = (x ^ (x >> 16)) ^ first
    x = (x ^ (x >> 16)) * _LOWBIAS_1 + second
    x = (x ^ (x >> 15)) * _LOWBIAS_2
    signed = x.to(tl.int32, bitcast=True)
    x = (signed ^ (signed >> 16)) & 0x7FFFFFFF
    exponential = -libdevice.log1p((x.to(tl.float32) + 0.5) * -_TO_UNIT)
    return -libdevice.log(exponential)


@_jit_any_alignment  # type: ignore[untyped-decorator, unused-ignore]
def _draw(  # type: ignore[no-untyped-def]
    logits, largest, temperature, keys, seed, choice, position, best, best_token,
    stride, vocab, parts, TILE: tl.constexpr,
):  # fmt: skip
    """Stores the highest score in each tile of each row in `best`, and the token with
    this score in `best_token`."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    token = part * TILE + tl.arange(0, TILE)
    row_temperature = tl.load(temperature + row)
    row_largest = tl.load(largest + row)
    score = _scaled(logits + row * stride, token, vocab, row_largest, row_temperature)
    if row_temperature > 0:
        key = (-score).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        is_allowed = (key <= tl.load(keys + row)) & (score > float("-inf"))
        row_seed = tl.load(seed + row)
        row_choice = tl.load(choice + row)
        row_position = tl.load(position + row)
        score += _noise(row_seed, row_choice, row_position, token)
        score = tl.where(is_allowed, score, float("-inf"))
    value, index = tl.max(
        score, 0, return_indices=True, return_indices_tie_break_left=True
    )
    tl.store(best + row * parts + part, value)
    tl.store(best_token + row * parts + part, part * TILE + index)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _finish(  # type: ignore[no-untyped-def]
    best, best_token, out, parts, PARTS: tl.constexpr
):
    """Stores the token with the highest score of each row, over all tiles, in `out`."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    let_next_begin_and_wait()
    score = tl.load(best + row * parts + part, mask=part < parts, other=float("-inf"))
    _, index = tl.max(score, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(out + row, tl.load(best_token + row * parts + index).to(tl.int64))


def draw(
    logits: torch.Tensor, batch: SamplingBatch | None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Draws a token for each row. Returns int64 [S], which is `out` if given.

    Args:
        logits: float32 [S, V] on a GPU, rows contiguous; may contain NaN and
            infinities. Without a batch, any float dtype.
        batch: the parameters of the S rows, on the same device. None: each row takes
            the token with the largest logit.
    """
    rows, vocab = logits.shape
    assert logits.stride(1) == 1
    # The stride of a single row is irrelevant. The row may be a view of another tensor.
    # A fixed value prevents Triton from compiling a variant for that tensor's stride.
    stride = logits.stride(0) if rows > 1 else vocab
    parts = triton.cdiv(vocab, _TILE)
    grid = (rows, parts)
    device = logits.device
    best = torch.empty(grid, dtype=torch.float32, device=device)
    best_token = torch.empty(grid, dtype=torch.int32, device=device)
    if out is None:
        out = torch.empty(rows, dtype=torch.int64, device=device)
    _largest[grid](
        logits,
        best,
        best_token,
        stride,
        vocab,
        parts,
        TILE=_TILE,
        num_warps=8,
        launch_pdl=PDL,
    )
    if batch is not None:
        largest = best.amax(-1)
        keys = _smallest_allowed(logits, batch, largest, stride)
        _draw[grid](
            logits, largest, batch.temperature, keys, batch.seed, batch.choice,
            batch.position, best, best_token, stride, vocab, parts,
            TILE=_TILE, num_warps=8,
        )  # fmt: skip
    _finish[(rows,)](
        best,
        best_token,
        out,
        parts,
        PARTS=triton.next_power_of_2(parts),
        launch_pdl=PDL,
    )
    return out


def _smallest_allowed(
    logits: torch.Tensor, batch: SamplingBatch, largest: torch.Tensor, stride: int
) -> torch.Tensor:
    """Returns the key of the smallest allowed value of each row, int32 [S]."""
    rows, vocab = logits.shape
    keys = torch.full((rows,), _ALL, dtype=torch.int32, device=logits.device)
    if batch.restricted_rows is not None:
        scaled = torch.empty_like(logits, memory_format=torch.contiguous_format)
        _threshold[(rows,)](
            logits,
            largest,
            batch.temperature,
            batch.top_k,
            batch.top_p,
            batch.min_p,
            keys,
            scaled,
            stride,
            vocab,
            TILE=2048,
            num_warps=32,
        )
    return keys
