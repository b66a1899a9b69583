"""Triton kernels for a mixture of experts in 16 bits: choice, sorting, products of groups of rows.

No kernel adds by atomics: the same input gives the same sums. Each begins while another ends.
"""

import math
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from attention.kernels.launch import PDL, let_next_begin, let_next_begin_and_wait, wait
from model.architectures.experts import MoEConfig
from model.quantization.kernels import tile_of
from model.quantization.quantized import FP8, Quantized, Weight


def _of_kept_groups(  # type: ignore[no-untyped-def]
    choice, index, GROUPS: tl.constexpr, SIZE: tl.constexpr, KEPT: tl.constexpr,
    BEST: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """What experts are chosen by, less those outside the groups whose best add up to the most."""
    group, of_expert = tl.arange(0, PADDED), index // SIZE
    members = tl.where(of_expert[None, :] == group[:, None], choice[None, :], float("-inf"))
    sums = tl.where(group < GROUPS, 0.0, float("-inf"))
    for _ in tl.static_range(BEST):
        sums += tl.max(members, 1)
        best = tl.argmax(members, 1)
        members = tl.where(index[None, :] == best[:, None], float("-inf"), members)
    kept = index < 0
    for _ in tl.static_range(KEPT):
        best_group = tl.argmax(sums, 0)
        kept = kept | (of_expert == best_group)
        sums = tl.where(group == best_group, float("-inf"), sums)
    return tl.where(kept, choice, float("-inf"))


_kept_groups: Any = triton.jit(_of_kept_groups)


def _choose(  # type: ignore[no-untyped-def]
    logits, correction, weights, chosen, num_experts, scale,
    CHOSEN: tl.constexpr, SLOTS: tl.constexpr, EXPERTS: tl.constexpr, SIGMOID: tl.constexpr,
    NORMALIZED: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, KEPT: tl.constexpr,
    BEST: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    row, index, slot = tl.program_id(0).to(tl.int64), tl.arange(0, EXPERTS), tl.arange(0, SLOTS)
    let_next_begin_and_wait()
    is_one = index < num_experts
    logit = tl.load(logits + row * num_experts + index, mask=is_one, other=float("-inf"))
    score = tl.sigmoid(logit) if SIGMOID else tl.exp(logit - tl.max(logit, 0))
    if not SIGMOID and (correction is not None or not NORMALIZED):
        score = score / tl.sum(score, 0)
    left = score
    if correction is not None:
        left += tl.load(correction + index, mask=is_one, other=0.0)
    elif GROUPS == 1 and not SIGMOID:
        left = logit  # the same order, without scores that are too small to differ
    left = tl.where(is_one, left, float("-inf"))
    if GROUPS > 1:
        left = _kept_groups(left, index, GROUPS, SIZE, KEPT, BEST, PADDED)
    # Its place is how many are ahead: all at once, where one after the other takes twice as long.
    ties = (left[None, :] == left[:, None]) & (index[None, :] < index[:, None])
    place = tl.sum(((left[None, :] > left[:, None]) | ties).to(tl.int32), 1)
    is_its = (place[:, None] == slot[None, :]) & (slot < CHOSEN)[None, :]
    expert = tl.sum(tl.where(is_its, index[:, None], 0), 0)
    expert = tl.minimum(expert, num_experts - 1)  # of no numbers, too
    weight = tl.sum(tl.where(is_its, score[:, None], 0.0), 0)
    if NORMALIZED:
        weight = weight / (tl.sum(weight, 0) + 1e-20)
    tl.store(weights + row * CHOSEN + slot, weight * scale, mask=slot < CHOSEN)
    tl.store(chosen + row * CHOSEN + slot, expert, mask=slot < CHOSEN)


_choose_kernel: Any = triton.jit(_choose)


def choose(
    logits: Tensor, correction: Tensor | None, config: MoEConfig, group_best: int
) -> tuple[Tensor, Tensor]:
    """See Router.choose: of float32 [T, experts] and of [experts]; of equal ones the first."""
    (num_rows, num_experts), num = logits.shape, config.experts_per_token
    weights = logits.new_empty(num_rows, num)
    ids = logits.new_empty(num_rows, num, dtype=torch.int64)
    groups, padded = config.num_groups, triton.next_power_of_2(num_experts)
    _choose_kernel[(num_rows,)](
        logits, correction, weights, ids, num_experts, config.routed_scaling_factor, CHOSEN=num,
        SLOTS=triton.next_power_of_2(num), EXPERTS=padded, SIGMOID=config.scoring == "sigmoid",
        NORMALIZED=config.is_normalized, GROUPS=groups, SIZE=num_experts // groups,
        KEPT=config.topk_groups, BEST=group_best, PADDED=triton.next_power_of_2(groups),
        num_warps=max(1, min(8, padded // 32)), launch_pdl=PDL,
    )  # fmt: skip
    return weights, ids


def _sort(chosen, order, ends, pairs, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A program finds the pairs of one expert, and how many are of those before it."""
    own, none = tl.program_id(0), 1 << 30
    let_next_begin_and_wait()
    before = tl.zeros((SIZE,), tl.int32)
    for begin in range(0, pairs, SIZE):
        pair = begin + tl.arange(0, SIZE)
        expert = tl.load(chosen + pair, mask=pair < pairs, other=none)
        before += (expert < own).to(tl.int32)
    place = tl.sum(before, 0)
    for begin in range(0, pairs, SIZE):
        pair = begin + tl.arange(0, SIZE)
        found = tl.load(chosen + pair, mask=pair < pairs, other=none) == own
        rank = tl.cumsum(found.to(tl.int32), 0)
        tl.store(order + place + rank - 1, pair, mask=found)
        place += tl.sum(found.to(tl.int32), 0)
    tl.store(ends + own, place)


_sort_kernel: Any = triton.jit(_sort, do_not_specialize=["pairs"])


def _grouped(  # type: ignore[no-untyped-def]
    x, weight, order, ends, out, num_experts, num_out,
    WIDTH: tl.constexpr, CHOSEN: tl.constexpr, GATED: tl.constexpr, SWAPPED: tl.constexpr,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """GATED: rows of x are tokens, and the result's are sorted; else those of x are sorted, and
    the result's are pairs. SWAPPED: the matrix on the left, whose tiles may not be small."""
    across = tl.cdiv(num_out, COLUMNS)
    column = tl.program_id(0) % across * COLUMNS
    let_next_begin_and_wait()
    first, last, expert = tile_of(ends, tl.program_id(0) // across, 0, num_experts, EXPERTS, ROWS)
    if first < last:
        row = first + tl.arange(0, ROWS)
        pair = tl.load(order + row, mask=row < last, other=0)
        source = pair // CHOSEN if GATED else tl.minimum(row, last - 1)
        at = x + source[:, None].to(tl.int64) * WIDTH + tl.arange(0, DEPTH)[None, :]
        HALVES: tl.constexpr = 2 if GATED else 1
        HEIGHT: tl.constexpr = HALVES * COLUMNS
        sums = tl.zeros((HEIGHT, ROWS) if SWAPPED else (ROWS, HEIGHT), tl.float32)
        for step in range(WIDTH // DEPTH):
            left = tl.load(at + step * DEPTH)
            right = tl.reshape(
                weight.load([HALVES * expert, column, step * DEPTH]), (HEIGHT, DEPTH)
            )
            if SWAPPED:
                sums = tl.dot(right, left.T, sums)
            else:
                sums = tl.dot(left, right.T, sums)
        sums = sums.T if SWAPPED else sums
        if GATED:
            gate, up = tl.split(tl.permute(tl.reshape(sums, (ROWS, 2, COLUMNS)), (0, 2, 1)))
            sums = gate / (1 + tl.exp(-gate)) * up
        place = row if GATED else pair
        columns = column + tl.arange(0, COLUMNS)
        target = out + place[:, None].to(tl.int64) * num_out + columns[None, :]
        inside = (row < last)[:, None] & (columns < num_out)[None, :]
        tl.store(target, sums.to(out.dtype.element_ty), mask=inside)


_grouped_kernel: Any = triton.jit(_grouped)

# By the rows of an expert, at most: of the gated product and of the one after it rows of x, columns
# of the result, elements of a row multiplied at a time, whether the matrix is on the left, warps
# and stages; the fastest of some on an H200, with 128 experts of 768 in a model of 2,048.
TILES: Final = (
    (8, ((16, 64, 128, True, 4, 3), (16, 128, 64, True, 4, 4))),
    (32, ((32, 64, 128, True, 4, 3), (32, 128, 64, True, 4, 4))),
    (128, ((64, 128, 64, False, 4, 4), (64, 256, 64, False, 4, 4))),
    (math.inf, ((128, 128, 64, False, 8, 4), (128, 256, 64, False, 8, 4))),
)


def works(gate_up: Tensor, down: Tensor) -> bool:
    """Whether `mixture` takes them, on a GPU: by whole depths of each tile."""
    is_hopper = torch.cuda.get_device_capability(down.device)[0] == 9
    are_whole = gate_up.shape[2] % 128 == down.shape[2] % 64 == 0
    return is_hopper and are_whole and gate_up.is_contiguous() and down.is_contiguous()


def _combine(  # type: ignore[no-untyped-def]
    shares, weights, chosen, out, num_experts,
    WIDTH: tl.constexpr, CHOSEN: tl.constexpr, SLOTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token, slot = tl.program_id(0).to(tl.int64), tl.arange(0, SLOTS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    let_next_begin_and_wait()
    pair = token * CHOSEN + slot
    is_here = tl.load(chosen + pair, mask=slot < CHOSEN, other=num_experts) < num_experts
    weight = tl.load(weights + pair, mask=is_here, other=0.0)
    inside = is_here[:, None] & (column < WIDTH)[None, :]
    each = tl.load(shares + pair[:, None] * WIDTH + column[None, :], mask=inside, other=0.0)
    result = tl.sum(each.to(tl.float32) * weight[:, None], 0)
    tl.store(out + token * WIDTH + column, result.to(out.dtype.element_ty), mask=column < WIDTH)


_combine_kernel: Any = triton.jit(_combine)


# Of codes, groups of columns have scales: of each, GROUP columns of a tile are summed (0: of no
# codes), and a row has GROUPS of them.
def _products(  # type: ignore[no-untyped-def]
    tile, value, scales, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr
):
    """[ROWS, COLUMNS] by [ROWS or 1, COLUMNS], scaled and summed by groups, if they have scales."""
    product = tile.to(tl.float32) * value
    if GROUP:
        product = tl.sum(tl.reshape(product, (ROWS, COLUMNS // GROUP, GROUP)), 2) * scales
    return product


_scaled_products: Any = triton.jit(_products)


def _one_gated(  # type: ignore[no-untyped-def]
    x, weight, scales, norm, chosen, inner, eps, num_experts, NUM_OUT: tl.constexpr,
    WIDTH: tl.constexpr, NORM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Some rows of one token's gate and up products, by one of its experts."""
    slot, row = tl.program_id(1), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    wait()
    expert = tl.load(chosen + slot)
    let_next_begin()  # not before: see _one_down
    if expert < num_experts:
        of_expert = expert * 2 * NUM_OUT + row[:, None]
        at = weight + of_expert * WIDTH + column[None, :]
        sums: tl.constexpr = COLUMNS // GROUP if GROUP else COLUMNS
        gate, up = tl.zeros((ROWS, sums), tl.float32), tl.zeros((ROWS, sums), tl.float32)
        by_gate, by_up, group = 1.0, 1.0, tl.arange(0, sums)[None, :]
        squares = tl.zeros((COLUMNS,), tl.float32)
        for start in tl.static_range(0, WIDTH, COLUMNS):
            gates = tl.load(at + start, eviction_policy="evict_first")
            ups = tl.load(at + start + NUM_OUT * WIDTH, eviction_policy="evict_first")
            value = tl.load(x + start + column).to(tl.float32)
            if NORM:
                squares += value * value
                value *= tl.load(norm + start + column).to(tl.float32)
            if GROUP:
                of_tile = scales + of_expert * GROUPS + (start // GROUP + group) % GROUPS
                by_gate, by_up = tl.load(of_tile), tl.load(of_tile + NUM_OUT * GROUPS)
            gate += _scaled_products(gates, value[None, :], by_gate, ROWS, COLUMNS, GROUP)
            up += _scaled_products(ups, value[None, :], by_up, ROWS, COLUMNS, GROUP)
        size = tl.sqrt(tl.sum(squares) / WIDTH + eps) if NORM else 1.0
        gated, other = tl.sum(gate, 1) / size, tl.sum(up, 1) / size
        gated = gated / (1 + tl.exp(-gated)) * other
        tl.store(inner + slot * NUM_OUT + row, gated.to(inner.dtype.element_ty))


def _one_down(  # type: ignore[no-untyped-def]
    inner, weight, scales, weights, chosen, residual, out, num_experts, NUM_OUT: tl.constexpr,
    WIDTH: tl.constexpr, CHOSEN: tl.constexpr, SLOTS: tl.constexpr, ADD: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Some rows of one token's result. All programs of the kernel before it have seen the choice,
    which is read without waiting for them, and so is the first of the matrices."""
    slot, column = tl.arange(0, SLOTS), tl.arange(0, COLUMNS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = tl.load(chosen + slot, mask=slot < CHOSEN, other=num_experts)
    is_here = expert < num_experts
    own = is_here[:, None, None]
    place = expert[:, None, None] * NUM_OUT + row[None, :, None]
    at = weight + place * WIDTH + column[None, None, :]
    tile = tl.load(at, mask=own, other=0.0, eviction_policy="evict_first")
    let_next_begin_and_wait()
    count: tl.constexpr = COLUMNS // GROUP if GROUP else COLUMNS
    sums = tl.zeros((SLOTS, ROWS, count), tl.float32)
    for start in tl.static_range(0, WIDTH, COLUMNS):
        of_x = inner + slot[:, None] * WIDTH + start + column[None, :]
        value = tl.load(of_x, mask=is_here[:, None], other=0.0).to(tl.float32)
        if GROUP:
            group = (start // GROUP + tl.arange(0, count)) % GROUPS
            by = tl.load(scales + place * GROUPS + group[None, None, :], mask=own, other=0.0)
            product = tile.to(tl.float32) * value[:, None, :]
            sums += tl.sum(tl.reshape(product, (SLOTS, ROWS, count, GROUP)), 3) * by
        else:
            sums += tile.to(tl.float32) * value[:, None, :]
        if start + COLUMNS < WIDTH:
            after = at + start + COLUMNS
            tile = tl.load(after, mask=own, other=0.0, eviction_policy="evict_first")
    share = tl.load(weights + slot, mask=is_here, other=0.0)
    result = tl.sum(tl.sum(sums, 2) * share[:, None], 0)
    if ADD:
        result += tl.load(residual + row).to(tl.float32)
    tl.store(out + row, result.to(out.dtype.element_ty))


_one_gated_kernel: Any = triton.jit(_one_gated)
_one_down_kernel: Any = triton.jit(_one_down)
_GATED_OF_ONE: Final = 2, 1024, 2  # rows of a program, columns at a time, warps
_GATED_OF_CODES: Final = 8, 512, 4
_DOWN_OF_ONE: Final = 8, 256, 8


def _tile_of(weight: Weight, most: int) -> dict[str, int]:
    """Columns of a row that a program takes at a time; see _products for their groups."""
    width, group, groups = weight.shape[2], 0, 1
    columns = min(width & -width, most)
    if isinstance(weight, Quantized):
        group, groups = min(weight.group, columns), weight.scales.shape[2]
    return {"WIDTH": width, "COLUMNS": columns, "GROUP": group, "GROUPS": groups}


def takes_one(*weights: Weight) -> bool:
    """Whether `mixture_of_one` takes these, on a GPU: on Hopper, and of codes those of FP8."""
    for weight in weights:
        if isinstance(weight, Quantized):
            tile = _tile_of(weight, 256)
            is_whole = tile["GROUPS"] == 1 or tile["COLUMNS"] % weight.group == 0
            if weight.kind != "fp8" or weight.scales.dtype != torch.float32 or not is_whole:
                return False
    is_hopper = torch.cuda.get_device_capability(weights[0].device)[0] == 9
    return is_hopper and all(weight.shape[2] % 64 == 0 for weight in weights)


def _matrix(weight: Weight) -> tuple[Tensor, Tensor | None]:
    if isinstance(weight, Tensor):
        return weight, None
    return weight.codes.view(FP8), weight.scales


def mixture_of_one(
    x: Tensor, gate_up: Weight, down: Weight, weights: Tensor, chosen: Tensor,
    *, norm: Tensor | None = None, eps: float = 0.0, residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`mixture` of one token, normed first; `residual` [1, hidden] is added to, and returned."""
    (count, width, num), each = down.shape, chosen.shape[1]
    inner = x.new_empty(each, num)
    out = torch.empty_like(x) if residual is None else residual
    rows, most, warps = _GATED_OF_ONE if isinstance(gate_up, Tensor) else _GATED_OF_CODES
    _one_gated_kernel[(num // rows, each)](
        x, *_matrix(gate_up), norm, chosen, inner, eps, count, NUM_OUT=num, ROWS=rows,
        NORM=norm is not None, **_tile_of(gate_up, most), num_warps=warps, launch_pdl=PDL,
    )  # fmt: skip
    rows, most, warps = _DOWN_OF_ONE
    _one_down_kernel[(width // rows,)](
        inner, *_matrix(down), weights, chosen, residual, out, count, NUM_OUT=width, CHOSEN=each,
        SLOTS=triton.next_power_of_2(each), ADD=residual is not None, ROWS=rows,
        **_tile_of(down, most), num_warps=warps, launch_pdl=PDL,
    )  # fmt: skip
    return out


def mixture(
    x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, chosen: Tensor, total: int,
    tiles: Any = None,
) -> Tensor:  # fmt: skip
    """x [T, hidden] through `chosen` experts int64 [T, k], summed by weights float32 [T, k]: by
    gate_up [experts, 2 n, hidden], silu of the first half times the second, by down [experts,
    hidden, n]. Ids from `experts` on are another rank's; all are below `total`."""
    (num_tokens, each), (count, width, _), pairs = chosen.shape, down.shape, chosen.numel()
    order, ends = (x.new_empty(size, dtype=torch.int32) for size in (pairs, count))
    size = 512 if pairs <= 4096 else 4096  # pairs looked at at a time
    _sort_kernel[(count,)](chosen, order, ends, pairs, size, num_warps=size // 256, launch_pdl=PDL)
    tiles, found = tiles or next(t for most, t in TILES if pairs // total <= most), x
    for weight, tile, halves in zip((gate_up, down), tiles, (2, 1), strict=True):
        rows, columns, depth, is_swapped, warps, stages = tile
        num_out, own = weight.shape[1] // halves, weight.shape[2]
        shape, strides = [count * halves, num_out, own], [num_out * own, own, 1]
        programs = min(pairs, count + pairs // rows) * triton.cdiv(num_out, columns)
        before, found = found, x.new_empty(pairs, num_out)
        _grouped_kernel[(programs,)](
            before, TensorDescriptor(weight, shape, strides, [halves, columns, depth]),
            order, ends, found, count, num_out, WIDTH=own, CHOSEN=each, GATED=halves == 2,
            SWAPPED=is_swapped, EXPERTS=triton.next_power_of_2(count), ROWS=rows, COLUMNS=columns,
            DEPTH=depth, num_warps=warps, num_stages=stages, launch_pdl=PDL,
        )  # fmt: skip
    out, columns = torch.empty_like(x), 512
    _combine_kernel[(num_tokens, triton.cdiv(width, columns))](
        found, weights, chosen, out, count, WIDTH=width, CHOSEN=each,
        SLOTS=triton.next_power_of_2(each), COLUMNS=columns, num_warps=4, launch_pdl=PDL,
    )  # fmt: skip
    return out
