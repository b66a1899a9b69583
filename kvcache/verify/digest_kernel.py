"""Computes the values of rows (digest.py) on a GPU.

This is the only file of verify/ that imports Triton.

One variant of the kernel is compiled for each width of rows, which depends on the
model. As in transfer/move/place_kernel.py, only a few programs (thread blocks) process
tiles of rows in turn, so that the engine can use most multiprocessors.
"""

import torch
import triton
import triton.language as tl

from kvcache.verify.scope import MULTIPLIERS

_NUM_PROGRAMS = 48
_TILE_WORDS = 2048
_FIRST, _SECOND = map(tl.constexpr, MULTIPLIERS)


def values(
    words: torch.Tensor, word_keys: torch.Tensor, rows: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """Computes the value of each row, like digest._values, on the current stream.

    Args:
        words: [rows of the pool, words of a row].
        word_keys: i64 [words of a row], odd.
        rows: A digest.Rows.

    Returns:
        i64 [T, G], with T and G as in digest.Rows.
    """
    num_tokens = len(rows[0])
    num_groups = rows[3].shape[1]
    out = torch.empty(num_tokens, num_groups, dtype=torch.int64, device=words.device)
    width = words.shape[1]
    lanes = min(64, triton.next_power_of_2(width))
    _kernel[(_NUM_PROGRAMS,)](
        words,
        word_keys,
        *rows,
        out,
        out.numel(),
        num_groups,
        WIDTH=width,
        LANES=lanes,
        TILE=_TILE_WORDS // lanes,
    )
    return out


@triton.jit(  # type: ignore[untyped-decorator, unused-ignore]
    do_not_specialize=["num_rows", "num_groups"]
)
def _kernel(  # type: ignore[no-untyped-def]
    words,
    word_keys,
    tokens,
    token_keys,
    chunks,
    groups,
    group_keys,
    out,
    num_rows: tl.int32,
    num_groups: tl.int32,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
):
    for first in tl.range(tl.program_id(0) * TILE, num_rows, tl.num_programs(0) * TILE):
        row = first + tl.arange(0, TILE)
        is_row = row < num_rows
        token = row // num_groups
        chunk = tl.load(chunks + token, mask=is_row, other=0)
        group = chunk * num_groups + row % num_groups
        start = tl.load(tokens + token, mask=is_row, other=0)
        start = (start + tl.load(groups + group, mask=is_row, other=0)) * WIDTH
        value = tl.load(token_keys + token, mask=is_row, other=0)
        value += tl.load(group_keys + group, mask=is_row, other=0)
        for lane in tl.static_range(0, WIDTH, LANES):
            lanes = lane + tl.arange(0, LANES)
            keys = tl.load(word_keys + lanes, mask=lanes < WIDTH, other=0)
            is_word = is_row[:, None] & (lanes < WIDTH)[None, :]
            places = words + start[:, None] + lanes[None, :]
            word = tl.load(places, mask=is_word, other=0)
            value += tl.sum(word.to(tl.int64) * keys[None, :], axis=1)
        mixed = value.to(tl.uint64, bitcast=True)
        mixed = (mixed ^ (mixed >> 33)) * _FIRST
        mixed = (mixed ^ (mixed >> 33)) * _SECOND
        mixed = mixed ^ (mixed >> 33)
        tl.store(out + row, mixed.to(tl.int64, bitcast=True), mask=is_row)
