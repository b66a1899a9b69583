"""Decode steps: contexts are cut into pieces, which kernels of our own attend to.

FlashInfer's take longer, above all for few sequences, and read FP8 no faster than 16 bits:
docs/performance.md has the measurements.
"""

from typing import Final

import numpy as np
import torch
from torch import Tensor

from attention.base import Int32s, Kind, Pages
from attention.flashinfer_base import CapturedBuffers, pinned

SPARE_PIECES: Final = 16
TILE: Final = 64  # tokens that pieces are multiples of
_BLOCKS_PER_SM: Final = 3


def num_pieces(num_seqs: int, num_kv_heads: int, num_sms: int) -> int:
    """Of a step: enough to fill the GPU, and some for contexts that are longer than others."""
    return max(num_seqs + SPARE_PIECES, _BLOCKS_PER_SM * num_sms // num_kv_heads)


def pieces_of(lens: Int32s, most: int) -> Int32s:
    """int32 [1 + most + S + 1]: tokens of a piece, the fewest that make no more than `most` pieces;
    each piece's sequence, -1 where there are fewer; each sequence's first piece, and the end.

    Args:
        lens: [S] tokens of the contexts, S <= most.
    """
    tiles = -(-lens // TILE)
    low, high = 1, int(tiles.max(initial=1))
    while low < high:
        middle = (low + high) // 2
        fits = int((-(-tiles // middle)).sum()) <= most
        low, high = (low, middle) if fits else (middle + 1, high)
    counts = -(-tiles // low)
    plan = np.full(1 + most + len(lens) + 1, -1, np.int32)
    plan[0] = low * TILE
    plan[1 + most] = 0
    np.cumsum(counts, out=plan[2 + most :])
    plan[1 : 1 + plan[-1]] = np.repeat(np.arange(len(lens)), counts)
    return plan


class PieceDecode:
    """Attends for single queries; `run` is called as FlashInfer's.

    Args:
        heads: query heads, KV heads and elements of one.
        workspace: for partial results, of `partial_bytes` or more.
        captured: what graphs of steps of `num_seqs` sequences read beside what is planned here.
    """

    def __init__(
        self, heads: tuple[int, int, int], block_size: int, kind: Kind, scale: float,
        workspace: Tensor, num_sms: int, captured: CapturedBuffers | None = None, num_seqs: int = 0,
    ) -> None:  # fmt: skip
        from attention.kernels import (
            decode,  # needs Triton, which only GPU machines have
        )

        self._attend = decode.attend
        self._heads, self._block_size, self._kind, self._scale = (
            heads,
            block_size,
            kind,
            scale,
        )
        self._workspace, self._num_sms = workspace.view(torch.float32), num_sms
        self._tile = min(
            TILE, TILE * 128 // heads[2]
        )  # larger ones do not fit shared memory
        self._captured: list[Tensor] = []
        if captured is not None:
            size = num_pieces(num_seqs, heads[1], num_sms) + num_seqs + 2
            plan = torch.zeros(size, dtype=torch.int32, device=workspace.device)
            indptr = captured.indptr[: num_seqs + 1]
            self._captured = [plan, indptr, captured.indices, captured.last_page_lens]

    def plan(self, pages: Pages) -> None:
        """Takes the step's contexts; of captured ones the buffers hold the pages already."""
        lens = (np.diff(pages.indptr) - 1) * self._block_size + pages.last_page_lens
        self._most = num_pieces(len(lens), self._heads[1], self._num_sms)
        plan = pieces_of(lens.astype(np.int32), self._most)
        self._planned = self._captured
        if self._captured:
            self._captured[0].copy_(pinned(plan), non_blocking=True)
            return
        parts = (plan, *pages)
        uploaded = pinned(np.concatenate(parts)).to(
            self._workspace.device, non_blocking=True
        )
        self._planned = list(
            torch.split_with_sizes(uploaded, [len(part) for part in parts])
        )

    def run(
        self, q: Tensor, caches: tuple[Tensor, Tensor], *, out: Tensor, k_scale: float,
        v_scale: float, lse: Tensor | None = None, return_lse: bool = False,
        crowded: bool | None = None,
    ) -> None:  # fmt: skip
        if lse is None:
            lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        size = self._most * self._heads[0] * self._heads[2]
        partials = self._workspace[:size], self._workspace[size:]
        self._attend(
            q, caches, self._planned, self._most, out, lse, partials, self._kind,
            scale=self._scale * k_scale, value_scale=v_scale, tile=self._tile, crowded=crowded,
        )  # fmt: skip


def partial_bytes(heads: tuple[int, int, int], num_seqs: int, num_sms: int) -> int:
    """Of the partial results of a step of so many sequences."""
    return num_pieces(num_seqs, heads[1], num_sms) * heads[0] * (heads[2] + 1) * 4
