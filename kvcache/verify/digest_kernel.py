"""digest.py's sums on a GPU. The only file here that imports Triton.

One variant is compiled for a width of rows, which is the model's. As few programs as of the placing
kernel (place_kernel.py) take tiles of rows in turn.
"""

import torch
import triton
import triton.language as tl

from kvcache.verify.scope import FACTORS

_NUM_PROGRAMS = 48
_FIRST, _SECOND = map(tl.constexpr, FACTORS)


def values(
    words: torch.Tensor, word_keys: torch.Tensor, rows: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """i64[T, G], what each of digest.py's Rows adds. Queued on the current stream."""
    num_groups = rows[3].shape[1]
    made = torch.empty(len(rows[0]), num_groups, dtype=torch.int64, device=words.device)
    width = words.shape[1]
    lanes = min(64, triton.next_power_of_2(width))
    numbers = made.numel(), num_groups, width, lanes, 2048 // lanes
    _kernel[(_NUM_PROGRAMS,)](words, word_keys, *rows, made, *numbers)
    return made


@triton.jit(do_not_specialize=["num_rows", "num_groups"])  # type: ignore[untyped-decorator, unused-ignore]
def _kernel(  # type: ignore[no-untyped-def]
    words,
    word_keys,
    tokens,
    token_keys,
    chunks,
    groups,
    group_keys,
    made,
    num_rows: tl.int32,
    num_groups: tl.int32,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
):
    for first in tl.range(tl.program_id(0) * TILE, num_rows, tl.num_programs(0) * TILE):
        row = first + tl.arange(0, TILE)
        wanted = row < num_rows
        token = row // num_groups
        group = (
            tl.load(chunks + token, mask=wanted, other=0) * num_groups
            + row % num_groups
        )
        start = tl.load(tokens + token, mask=wanted, other=0)
        start = (start + tl.load(groups + group, mask=wanted, other=0)) * WIDTH
        value = tl.load(token_keys + token, mask=wanted, other=0)
        value += tl.load(group_keys + group, mask=wanted, other=0)
        for lane in tl.static_range(0, WIDTH, LANES):
            lanes = lane + tl.arange(0, LANES)
            keys = tl.load(word_keys + lanes, mask=lanes < WIDTH, other=0)
            some = wanted[:, None] & (lanes < WIDTH)[None, :]
            word = tl.load(words + start[:, None] + lanes[None, :], mask=some, other=0)
            value += tl.sum(word.to(tl.int64) * keys[None, :], axis=1)
        mixed = value.to(tl.uint64, bitcast=True)
        mixed = (mixed ^ (mixed >> 33)) * _FIRST
        mixed = (mixed ^ (mixed >> 33)) * _SECOND
        mixed = mixed ^ (mixed >> 33)
        tl.store(made + row, mixed.to(tl.int64, bitcast=True), mask=wanted)
