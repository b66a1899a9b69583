"""Attention of decode steps by Baton's own kernels, which cut contexts into pieces.

This method is also known as split KV. FlashInfer's decode kernels are slower, above all
for few sequences, and read FP8 no faster than 16 bits. docs/performance.md has the
measurements.
"""

from typing import Final

import numpy as np
import torch
from torch import Tensor

from attention.base import AttentionKind, Int32s, Pages
from attention.flashinfer_base import CapturedBuffers, pinned

SPARE_PIECES: Final = 16  # pieces beyond one per sequence, for long contexts
TILE: Final = 64  # tokens; the length of a piece is a multiple of TILE
_BLOCKS_PER_SM: Final = 3  # thread blocks that fill a streaming multiprocessor


def max_num_pieces(num_seqs: int, num_kv_heads: int, num_sms: int) -> int:
    """Returns the maximum number of context pieces of a step.

    The pieces of all KV heads together are enough to fill the GPU. There are at least
    SPARE_PIECES more pieces than sequences, so that long contexts can be cut.
    """
    return max(num_seqs + SPARE_PIECES, _BLOCKS_PER_SM * num_sms // num_kv_heads)


def plan_size(max_seqs: int, num_kv_heads: int, num_sms: int) -> int:
    """Returns the number of elements of the largest plan for up to `max_seqs`
    sequences; see `plan_pieces`."""
    return 1 + max_num_pieces(max_seqs, num_kv_heads, num_sms) + max_seqs + 1


def plan_pieces(lens: Int32s, max_pieces: int) -> Int32s:
    """Cuts contexts into at most `max_pieces` pieces, which are as short as possible.

    All pieces have the same length, except the last piece of a context.

    Args:
        lens: int32 [S], tokens of the contexts; S <= max_pieces.

    Returns:
        int32 [1 + max_pieces + S + 1], in this order:
        - 1: the number of tokens of a piece,
        - max_pieces: the sequence of each piece, -1 for pieces that are not used,
        - S + 1: the first piece of each sequence, then the number of used pieces.
    """
    tiles = -(-lens // TILE)
    # The number of pieces is at least total / length, and less than total / length plus
    # one for each sequence.
    total = int(tiles.sum())
    low = max(1, -(-total // max_pieces))
    high = max(low, int(tiles.max(initial=1)))
    spare_pieces = max_pieces - len(lens)
    if spare_pieces:
        high = max(low, min(high, -(-total // spare_pieces)))
    while low < high:
        middle = (low + high) // 2
        if int((-(-tiles // middle)).sum()) <= max_pieces:
            high = middle
        else:
            low = middle + 1
    counts = -(-tiles // low)
    plan = np.full(1 + max_pieces + len(lens) + 1, -1, np.int32)
    plan[0] = low * TILE
    plan[1 + max_pieces] = 0
    np.cumsum(counts, out=plan[2 + max_pieces :])
    plan[1 : 1 + plan[-1]] = np.repeat(np.arange(len(lens)), counts)
    return plan


class PieceDecode:
    """Attends for one query token of each sequence.

    `run` accepts the arguments that Baton passes to FlashInfer's wrappers.

    Args:
        heads: Number of query heads, number of KV heads, elements of one head.
        block_size: Tokens of a block.
        kind: The window and the soft cap.
        scale: Factor of the scores, without the scale of FP8 keys.
        workspace: Memory for partial results, at least `partial_bytes`.
        num_sms: Streaming multiprocessors of the GPU.
        captured: The buffers with the pages and plans of steps that run as CUDA graphs;
            None: steps do not run as graphs.
        num_seqs: Number of sequences of a captured step; only used with `captured`.
    """

    def __init__(
        self,
        heads: tuple[int, int, int],
        block_size: int,
        kind: AttentionKind,
        scale: float,
        workspace: Tensor,
        num_sms: int,
        captured: CapturedBuffers | None = None,
        num_seqs: int = 0,
    ) -> None:
        # Imported here, because it needs Triton, which only GPU machines have.
        from attention.kernels import decode

        self._attend = decode.attend
        self._heads = heads
        self._block_size = block_size
        self._kind = kind
        self._scale = scale
        self._workspace = workspace.view(torch.float32)
        self._num_sms = num_sms
        # With heads of more than 128 elements, tiles of TILE tokens do not fit into
        # shared memory.
        self._tile = min(TILE, TILE * 128 // heads[2])
        self._planned: list[Tensor] = []
        if captured is not None:
            self._planned = [
                captured.plan,
                captured.indptr[: num_seqs + 1],
                captured.indices,
                captured.last_page_lens,
            ]

    def plan_for_graph(self, pages: Pages) -> Int32s:
        """Plans a captured step with the contexts in `pages`.

        Returns:
            The plan. The caller must copy it and `pages` to the captured buffers.
        """
        lens = (np.diff(pages.indptr) - 1) * self._block_size + pages.last_page_lens
        self._max_pieces = max_num_pieces(len(lens), self._heads[1], self._num_sms)
        return plan_pieces(lens.astype(np.int32, copy=False), self._max_pieces)

    def plan(self, pages: Pages) -> None:
        """Plans a step that is not captured, with the contexts in `pages`."""
        plan = self.plan_for_graph(pages)
        arrays = (plan, *pages)
        host = pinned(np.concatenate(arrays))
        uploaded = host.to(self._workspace.device, non_blocking=True)
        sizes = [len(array) for array in arrays]
        self._planned = list(torch.split_with_sizes(uploaded, sizes))

    def run(
        self,
        q: Tensor,
        caches: tuple[Tensor, Tensor],
        *,
        out: Tensor,
        k_scale: float,
        v_scale: float,
        lse: Tensor | None = None,
        return_lse: bool = False,
        sinks: Tensor | None = None,
        small_programs: bool | None = None,
    ) -> None:
        """Attends for the planned step; see attention.kernels.decode.attend.

        `return_lse` exists only for compatibility with FlashInfer's wrappers. It is
        ignored: `lse` is filled whenever it is given.
        """
        if lse is None:
            lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        size = self._max_pieces * self._heads[0] * self._heads[2]
        self._attend(
            q,
            caches,
            self._planned,
            self._max_pieces,
            out,
            lse,
            (self._workspace[:size], self._workspace[size:]),
            self._kind,
            scale=self._scale * k_scale,
            value_scale=v_scale,
            tile=self._tile,
            sinks=sinks,
            small_programs=small_programs,
        )


def partial_bytes(heads: tuple[int, int, int], num_seqs: int, num_sms: int) -> int:
    """Returns the bytes of the partial results of a step of `num_seqs` sequences.

    Args:
        heads: Number of query heads, number of KV heads, elements of one head.
    """
    num_q_heads, num_kv_heads, head_dim = heads
    max_pieces = max_num_pieces(num_seqs, num_kv_heads, num_sms)
    # A piece has an output of head_dim floats and a log-sum-exp for each query head.
    return max_pieces * num_q_heads * (head_dim + 1) * 4
