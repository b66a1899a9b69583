"""Triton kernels that send one token through its experts, in 16 bits or FP8.

The first kernel computes the gated products, the second kernel the down projections and
their sum. No kernel uses atomic additions, so the same input always gives the same
sums.
"""

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.kernels.launch import PDL, let_next_begin, let_next_begin_and_wait, wait
from model.fused_kernels import FOLD
from model.quantization.quantized import FP8, Quantized, Weight

# How programs divide the matrices: rows of a program, columns at a time, warps.
_GATED_TILE: Final = (4, 1024, 8)
_GATED_FP8_TILE: Final = (8, 512, 4)
_DOWN_TILE: Final = (8, 256, 8)


def _fold_products(  # type: ignore[no-untyped-def]
    tile,
    value,
    scales,
    row,
    start,
    FOLD: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Multiplies a tile by a row, and returns the sums of FOLD neighboring products.

    A thread loads FOLD columns of x at once, which are 16 bytes, and sums their
    products. If a row has several groups, the sums are multiplied by the scales of
    their groups.

    Args:
        tile: elements of the matrix, in the columns from `start` on.
        row: the rows of the tile [...].
        GROUP: columns that share a scale.
        GROUPS: groups in a row; 0: the matrix is not quantised.
    """
    product = tile.to(tl.float32) * value
    PARTS: tl.constexpr = product.shape[-1] // FOLD
    # Triton has no unpacking with *.
    shape: tl.constexpr = product.shape[:-1] + (PARTS, FOLD)  # noqa: RUF005
    sums = tl.sum(tl.reshape(product, shape), len(product.shape))
    if GROUPS > 1:
        group = (start + tl.arange(0, PARTS) * FOLD) // GROUP
        sums *= tl.load(scales + tl.expand_dims(row * GROUPS, len(row.shape)) + group)
    return sums


_folded_products: Any = triton.jit(_fold_products)


def _one_gated(  # type: ignore[no-untyped-def]
    x,
    weight,
    scales,
    norm,
    chosen,
    inner,
    eps,
    num_experts,
    NUM_OUT: tl.constexpr,
    WIDTH: tl.constexpr,
    NORM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FOLD: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Computes some rows of the gated product of one token with one of its experts."""
    slot = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    if NORM:
        factor = tl.load(norm + column)
    wait()
    expert = tl.load(chosen + slot)
    let_next_begin()  # not earlier, because _one_down reads the choice without a wait
    value = tl.load(x + column)
    if expert < num_experts:
        gate_row = expert * 2 * NUM_OUT + row
        at = weight + gate_row[:, None] * WIDTH + column[None, :]
        gate_scale = tl.load(scales + gate_row) if GROUPS == 1 else 1.0
        up_scale = tl.load(scales + gate_row + NUM_OUT) if GROUPS == 1 else 1.0
        gate = tl.zeros((ROWS, COLUMNS // FOLD), tl.float32)
        up = tl.zeros((ROWS, COLUMNS // FOLD), tl.float32)
        squares = tl.zeros((COLUMNS,), tl.float32)
        for start in tl.static_range(0, WIDTH, COLUMNS):
            gates = tl.load(at + start, eviction_policy="evict_first")
            ups = tl.load(at + start + NUM_OUT * WIDTH, eviction_policy="evict_first")
            wide = value.to(tl.float32)
            if NORM:
                squares += wide * wide
                wide *= factor.to(tl.float32)
            if start + COLUMNS < WIDTH:
                value = tl.load(x + start + COLUMNS + column)
                if NORM:
                    factor = tl.load(norm + start + COLUMNS + column)
            wide_row = wide[None, :]
            gate += _folded_products(
                gates, wide_row, scales, gate_row, start, FOLD, GROUP, GROUPS
            )
            up += _folded_products(
                ups, wide_row, scales, gate_row + NUM_OUT, start, FOLD, GROUP, GROUPS
            )
        size = tl.sqrt(tl.sum(squares) / WIDTH + eps) if NORM else 1.0
        gate_sum = tl.sum(gate, 1) * gate_scale / size
        up_sum = tl.sum(up, 1) * up_scale / size
        gated = gate_sum / (1 + tl.exp(-gate_sum)) * up_sum
        tl.store(inner + slot * NUM_OUT + row, gated.to(inner.dtype.element_ty))


def _one_down(  # type: ignore[no-untyped-def]
    inner,
    weight,
    scales,
    weights,
    chosen,
    residual,
    out,
    num_experts,
    NUM_OUT: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    SLOTS: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FOLD: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Computes some rows of the weighted sum of one token's down projections.

    When this kernel begins, all programs of the previous kernel have read the choice of
    experts. So this kernel reads the choice, and loads the first tile of the matrices,
    before it waits for the previous kernel to end.
    """
    slot = tl.arange(0, SLOTS)
    column = tl.arange(0, COLUMNS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = tl.load(chosen + slot, mask=slot < NUM_CHOSEN, other=num_experts)
    is_here = expert < num_experts
    expert_row = tl.where(is_here, expert, 0)[:, None] * NUM_OUT + row[None, :]
    at = weight + expert_row[:, :, None] * WIDTH + column[None, None, :]
    tile_mask = is_here[:, None, None]
    tile = tl.load(at, mask=tile_mask, other=0.0, eviction_policy="evict_first")
    share = tl.load(weights + slot, mask=is_here, other=0.0)[:, None]
    if GROUPS == 1:
        share *= tl.load(scales + expert_row)
    let_next_begin_and_wait()
    added = tl.load(residual + row).to(tl.float32) if ADD else 0.0
    sums = tl.zeros((SLOTS, ROWS, COLUMNS // FOLD), tl.float32)
    for start in tl.static_range(0, WIDTH, COLUMNS):
        x_at = inner + slot[:, None] * WIDTH + start + column[None, :]
        x = tl.load(x_at, mask=is_here[:, None], other=0.0).to(tl.float32)
        sums += _folded_products(
            tile, x[:, None, :], scales, expert_row, start, FOLD, GROUP, GROUPS
        )
        if start + COLUMNS < WIDTH:
            tile = tl.load(
                at + start + COLUMNS,
                mask=tile_mask,
                other=0.0,
                eviction_policy="evict_first",
            )
    result = tl.sum(tl.sum(sums, 2) * share, 0) + added
    tl.store(out + row, result.to(out.dtype.element_ty))


_one_gated_kernel: Any = triton.jit(_one_gated)
_one_down_kernel: Any = triton.jit(_one_down)


def _row_constants(weight: Weight, max_columns: int) -> dict[str, int]:
    """Returns the kernels' constants for the rows of a weight; see _fold_products."""
    width = weight.shape[2]
    group = 1
    groups = 0
    if isinstance(weight, Quantized):
        group = weight.group
        groups = weight.scales.shape[2]
    return {
        "WIDTH": width,
        "COLUMNS": min(width & -width, max_columns),
        "FOLD": FOLD,
        "GROUP": group,
        "GROUPS": groups,
    }


def has_one_token_kernel(*weights: Weight) -> bool:
    """Returns whether `mixture_of_one` accepts these weights, which are on a GPU.

    The GPU must be of the Hopper generation. FP8 is the only accepted quantisation.
    """
    for weight in weights:
        if isinstance(weight, Quantized) and (
            weight.kind != "fp8"
            or weight.scales.dtype != torch.float32
            or weight.group % FOLD
        ):
            return False
    is_hopper = torch.cuda.get_device_capability(weights[0].device)[0] == 9
    return is_hopper and all(weight.shape[2] % 64 == 0 for weight in weights)


def _matrix_and_scales(weight: Weight) -> tuple[Tensor, Tensor | None]:
    if isinstance(weight, Tensor):
        return weight, None
    return weight.codes.view(FP8), weight.scales


def mixture_of_one(
    x: Tensor,
    gate_up: Weight,
    down: Weight,
    weights: Tensor,
    chosen: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
) -> Tensor:
    """Computes `mixture` (model/kernels/experts.py) for one token.

    Args:
        norm: weight of a norm that is applied to x first.
        residual: [1, hidden], to which the result is added in place.

    Returns:
        the residual if given, else a new tensor.
    """
    count, hidden, inner_width = down.shape
    num_chosen = chosen.shape[1]
    inner = x.new_empty(num_chosen, inner_width)
    out = torch.empty_like(x) if residual is None else residual
    is_plain = isinstance(gate_up, Tensor)
    rows, max_columns, warps = _GATED_TILE if is_plain else _GATED_FP8_TILE
    _one_gated_kernel[(inner_width // rows, num_chosen)](
        x,
        *_matrix_and_scales(gate_up),
        norm,
        chosen,
        inner,
        eps,
        count,
        NUM_OUT=inner_width,
        ROWS=rows,
        NORM=norm is not None,
        **_row_constants(gate_up, max_columns),
        num_warps=warps,
        launch_pdl=PDL,
    )
    rows, max_columns, warps = _DOWN_TILE
    _one_down_kernel[(hidden // rows,)](
        inner,
        *_matrix_and_scales(down),
        weights,
        chosen,
        residual,
        out,
        count,
        NUM_OUT=hidden,
        NUM_CHOSEN=num_chosen,
        SLOTS=triton.next_power_of_2(num_chosen),
        ADD=residual is not None,
        ROWS=rows,
        **_row_constants(down, max_columns),
        num_warps=warps,
        launch_pdl=PDL,
    )
    return out
