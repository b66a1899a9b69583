"""Computes the values of rows of KV, which digest.py defines, on a GPU.

This is the only file of verify/ that imports Triton.

One variant of the kernel is compiled for each width of rows, which depends on the
model. As in transfer/move/place_kernel.py, only a few programs (thread blocks) run.
Each program processes one tile of rows after another. So most multiprocessors remain
free for the engine.
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
        i64 [T, R], with T and R as in digest.Rows.
    """
    num_tokens = len(rows[0])
    rows_per_token = rows[3].shape[1]
    out = torch.empty(
        num_tokens, rows_per_token, dtype=torch.int64, device=words.device
    )
    width = words.shape[1]
    lanes = min(64, triton.next_power_of_2(width))
    _kernel[(_NUM_PROGRAMS,)](
        words,
        word_keys,
        *rows,
        out,
        out.numel(),
        rows_per_token,
        WIDTH=width,
        LANES=lanes,
        TILE=_TILE_WORDS // lanes,
    )
    return out


@triton.jit(  # type: ignore[untyped-decorator, unused-ignore]
    do_not_specialize=["num_rows", "rows_per_token"]
)
def _kernel(  # type: ignore[no-untyped-def]
    words,
    word_keys,
    first_rows,
    token_keys,
    chunks,
    row_offsets,
    row_keys,
    out,
    num_rows: tl.int32,
    rows_per_token: tl.int32,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
):
    for first in tl.range(tl.program_id(0) * TILE, num_rows, tl.num_programs(0) * TILE):
        row = first + tl.arange(0, TILE)
        is_row = row < num_rows
        token = row // rows_per_token
        chunk = tl.load(chunks + token, mask=is_row, other=0)
        entry = chunk * rows_per_token + row % rows_per_token
        start = tl.load(first_rows + token, mask=is_row, other=0)
        start = (start + tl.load(row_offsets + entry, mask=is_row, other=0)) * WIDTH
        value = tl.load(token_keys + token, mask=is_row, other=0)
        value += tl.load(row_keys + entry, mask=is_row, other=0)
        for lane in tl.static_range(0, WIDTH, LANES):
            lanes = lane + tl.arange(0, LANES)
            keys = tl.load(word_keys + lanes, mask=lanes < WIDTH, other=0)
            is_word = is_row[:, None] & (lanes < WIDTH)[None, :]
            addresses = words + start[:, None] + lanes[None, :]
            word = tl.load(addresses, mask=is_word, other=0)
            value += tl.sum(word.to(tl.int64) * keys[None, :], axis=1)
        mixed = value.to(tl.uint64, bitcast=True)
        mixed = (mixed ^ (mixed >> 33)) * _FIRST
        mixed = (mixed ^ (mixed >> 33)) * _SECOND
        mixed = mixed ^ (mixed >> 33)
        tl.store(out + row, mixed.to(tl.int64, bitcast=True), mask=is_row)
