"""Triton kernels that send one token through its experts in MXFP4.

Tensor cores would multiply mostly by padding here. The threads multiply float32 numbers
instead, which they make from the codes with few instructions. The first kernel computes
the gated products, the second one the down projections and their sum. No kernel adds by
atomics, so the same input gives the same sums.
"""

from typing import Any, Final

import triton
import triton.language as tl
from torch import Tensor

from attention.kernels.launch import PDL, let_next_begin_and_wait
from model.quantization.packed_fp4 import PackedFP4

# How programs divide the matrices: rows of a program, words at a time, warps.
_GATED_TILE: Final = (8, 64, 4)
_DOWN_TILE: Final = (8, 64, 4)
# The numbers of words are too small by 2^126. So is the product of a scale and x, which
# are therefore multiplied by these two factors.
_X_FACTOR: Final = 2.0**63
_SUM_FACTOR: Final = 2.0**63
# Masks of 32 bits, as the signed numbers that have these bits.
_FLOAT_BITS: Any = tl.constexpr(0x81C081C0 - (1 << 32))
_SIGN_BITS: Any = tl.constexpr(0x80008000 - (1 << 32))
_UPPER_HALF: Any = tl.constexpr(0xFFFF0000 - (1 << 32))


def _columns_of_words(word, register: tl.constexpr, upper_half: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the columns of one code of each word. `packed_fp4.pack` has the order."""
    # A chunk has four times two words: the thread, and the half of the columns.
    chunk = word // 8
    thread = word % 8 // 2
    columns_half = word % 2
    return (
        chunk * 64
        + columns_half * 32
        + register // 2 * 16
        + register % 2 * 8
        + thread * 2
        + upper_half
    )


_column: Any = triton.jit(_columns_of_words)


def _register_of_words(words, register: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the bits of two codes of each word in their places of 16-bit floats."""
    if register == 0:
        bits = words & _FLOAT_BITS
    elif register == 1:
        bits = (words << 3) & _FLOAT_BITS
    elif register == 2:
        bits = (words << 6) & _FLOAT_BITS
    else:
        bits = (
            ((words << 1) & _SIGN_BITS)
            | ((words >> 5) & 0x01000100)
            | ((words >> 4) & 0x00C000C0)
        )
    return bits


_register: Any = triton.jit(_register_of_words)


def _multiply_words(  # type: ignore[no-untyped-def]
    words, scales, x, first_word, WIDTH: tl.constexpr, X_FACTOR: tl.constexpr
):
    """Returns the sums of the eight products of each word, multiplied by its scale.

    The sums are too small by 2^126 / X_FACTOR.

    Args:
        words: int32 [..., n].
        scales: uint8 [..., n], the scale of each word.
        x: one row.
        first_word: number of the first of n words in their row.
    """
    SIZE: tl.constexpr = words.shape[-1]
    word = first_word + tl.arange(0, SIZE)
    sums = tl.zeros(words.shape, tl.float32)
    for register in tl.static_range(4):
        bits = _register(words, register)
        for upper_half in tl.static_range(2):
            column = _column(word, register, upper_half)
            value = tl.load(x + column, mask=column < WIDTH, other=0.0)
            value = value.to(tl.float32) * X_FACTOR
            if upper_half:
                number = (bits & _UPPER_HALF).to(tl.float32, bitcast=True)
            else:
                number = (bits << 16).to(tl.float32, bitcast=True)
            sums += number * value
    scale = (scales.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return sums * scale


_multiplied: Any = triton.jit(_multiply_words)


def _one_gated_fp4(  # type: ignore[no-untyped-def]
    x,
    words,
    scales,
    biases,
    chosen,
    inner,
    num_experts,
    alpha,
    limit,
    NUM_OUT: tl.constexpr,
    WIDTH: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    ROW_SCALES: tl.constexpr,
    CLAMPED: tl.constexpr,
    BIASED: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    X_FACTOR: tl.constexpr,
    SUM_FACTOR: tl.constexpr,
):
    """Computes some rows of the gated product of one token with one of its experts."""
    slot = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    word = tl.arange(0, WORDS)
    let_next_begin_and_wait()
    expert = tl.load(chosen + slot)
    if expert < num_experts:
        gate_row = (expert * 2 * NUM_OUT + row)[:, None]
        gate_at = words + gate_row * ROW_WORDS
        up_at = gate_at + NUM_OUT * ROW_WORDS
        gate_scale_at = scales + gate_row * ROW_SCALES
        up_scale_at = gate_scale_at + NUM_OUT * ROW_SCALES
        gate = tl.zeros((ROWS, WORDS), tl.float32)
        up = tl.zeros((ROWS, WORDS), tl.float32)
        for start in tl.static_range(0, ROW_WORDS, WORDS):
            place = (start + word)[None, :]
            inside = place < ROW_WORDS
            group = place // 8 * 2 + place % 2
            gates = tl.load(gate_at + place, mask=inside, other=0)
            ups = tl.load(up_at + place, mask=inside, other=0)
            gate_scales = tl.load(gate_scale_at + group, mask=inside, other=0)
            up_scales = tl.load(up_scale_at + group, mask=inside, other=0)
            gate += _multiplied(gates, gate_scales, x, start, WIDTH, X_FACTOR)
            up += _multiplied(ups, up_scales, x, start, WIDTH, X_FACTOR)
        gate_sum = tl.sum(gate, 1) * SUM_FACTOR
        up_sum = tl.sum(up, 1) * SUM_FACTOR
        if BIASED:
            bias_at = biases + expert * 2 * NUM_OUT + row
            gate_sum += tl.load(bias_at).to(tl.float32)
            up_sum += tl.load(bias_at + NUM_OUT).to(tl.float32)
        if CLAMPED:
            gate_sum = tl.minimum(gate_sum, limit)
            up_sum = tl.minimum(tl.maximum(up_sum, -limit), limit) + 1
            gated = gate_sum / (1 + tl.exp(-alpha * gate_sum)) * up_sum
        else:
            gated = gate_sum / (1 + tl.exp(-gate_sum)) * up_sum
        tl.store(inner + slot * NUM_OUT + row, gated.to(inner.dtype.element_ty))


def _one_down_fp4(  # type: ignore[no-untyped-def]
    inner,
    words,
    scales,
    biases,
    weights,
    chosen,
    out,
    num_experts,
    NUM_OUT: tl.constexpr,
    WIDTH: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    ROW_SCALES: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    BIASED: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    X_FACTOR: tl.constexpr,
    SUM_FACTOR: tl.constexpr,
):
    """Computes some rows of the weighted sum of one token's down projections."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    word = tl.arange(0, WORDS)
    let_next_begin_and_wait()
    result = tl.load(out + row).to(tl.float32) if ADD else tl.zeros((ROWS,), tl.float32)
    for slot in range(NUM_CHOSEN):
        expert = tl.load(chosen + slot)
        if expert < num_experts:
            expert_row = (expert * NUM_OUT + row)[:, None]
            at = words + expert_row * ROW_WORDS
            scale_at = scales + expert_row * ROW_SCALES
            x = inner + slot * WIDTH
            sums = tl.zeros((ROWS, WORDS), tl.float32)
            for start in tl.static_range(0, ROW_WORDS, WORDS):
                place = (start + word)[None, :]
                inside = place < ROW_WORDS
                group = place // 8 * 2 + place % 2
                tile = tl.load(at + place, mask=inside, other=0)
                tile_scales = tl.load(scale_at + group, mask=inside, other=0)
                sums += _multiplied(tile, tile_scales, x, start, WIDTH, X_FACTOR)
            product = tl.sum(sums, 1) * SUM_FACTOR
            if BIASED:
                product += tl.load(biases + expert * NUM_OUT + row).to(tl.float32)
            result += product * tl.load(weights + slot)
    tl.store(out + row, result.to(out.dtype.element_ty))


_one_gated_kernel: Any = triton.jit(_one_gated_fp4)
_one_down_kernel: Any = triton.jit(_one_down_fp4)


def can_multiply(*weights: PackedFP4) -> bool:
    """Returns whether `mixture_of_one` divides the rows of the weights evenly."""
    gate_up, down = weights
    gated_rows = gate_up.shape[1] // 2
    return gated_rows % _GATED_TILE[0] == 0 and down.shape[1] % _DOWN_TILE[0] == 0


def mixture_of_one(
    x: Tensor,
    gate_up: PackedFP4,
    down: PackedFP4,
    weights: Tensor,
    chosen: Tensor,
    *,
    biases: tuple[Tensor, Tensor] | None,
    clamps: tuple[float, float] | None,
    out: Tensor,
    adds: bool,
    tiles: tuple[tuple[int, int, int], tuple[int, int, int]] | None = None,
) -> None:
    """Computes `fp4_experts.mixture` for one token."""
    count, hidden, inner_width = down.shape
    num_chosen = chosen.shape[1]
    inner = x.new_empty(num_chosen, inner_width)
    gated_bias, down_bias = biases or (None, None)
    alpha, limit = clamps or (0.0, 0.0)
    gated_tile, down_tile = tiles or (_GATED_TILE, _DOWN_TILE)
    rows, words, warps = gated_tile
    _one_gated_kernel[(inner_width // rows, num_chosen)](
        x,
        gate_up.words,
        gate_up.scales,
        gated_bias,
        chosen,
        inner,
        count,
        alpha,
        limit,
        NUM_OUT=inner_width,
        WIDTH=gate_up.width,
        ROW_WORDS=gate_up.words.shape[-1],
        ROW_SCALES=gate_up.scales.shape[-1],
        CLAMPED=clamps is not None,
        BIASED=gated_bias is not None,
        ROWS=rows,
        WORDS=words,
        X_FACTOR=_X_FACTOR,
        SUM_FACTOR=_SUM_FACTOR,
        num_warps=warps,
        launch_pdl=PDL,
    )
    rows, words, warps = down_tile
    _one_down_kernel[(hidden // rows,)](
        inner,
        down.words,
        down.scales,
        down_bias,
        weights,
        chosen,
        out,
        count,
        NUM_OUT=hidden,
        WIDTH=inner_width,
        ROW_WORDS=down.words.shape[-1],
        ROW_SCALES=down.scales.shape[-1],
        NUM_CHOSEN=num_chosen,
        BIASED=down_bias is not None,
        ADD=adds,
        ROWS=rows,
        WORDS=words,
        X_FACTOR=_X_FACTOR,
        SUM_FACTOR=_SUM_FACTOR,
        num_warps=warps,
        launch_pdl=PDL,
    )
