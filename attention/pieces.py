"""Attention of decode steps by Baton's own kernels, which cut contexts into pieces.

This method is also known as split KV. FlashInfer's decode kernels are slower, above all
for few sequences, and read FP8 no faster than 16 bits. docs/performance.md has the
measurements.

A step that verifies proposals has several rows for a sequence, one for each proposal.
Each row sees one token more than the row before it. Such rows form a run: they share
the loads of the context, which take most of the time. A run has at most as many rows as
cost nothing: a program computes at least COLUMNS query heads anyway. With twice as many
columns, steps without proposals would be slower.
"""

from typing import Final

import numpy as np
import torch
from torch import Tensor

from attention.base import AttentionKind, Int32s, Pages
from attention.flashinfer_base import CapturedBuffers, pinned

SPARE_PIECES: Final = 16  # pieces beyond one per sequence, for long contexts
TILE: Final = 64  # tokens; the length of a piece is a multiple of TILE
COLUMNS: Final = 8  # columns of the smallest matrix products of the GPU
_BLOCKS_PER_SM: Final = 3  # thread blocks that fill a streaming multiprocessor


def max_run_rows(num_q_heads: int, num_kv_heads: int) -> int:
    """Returns the maximum number of rows of a run."""
    return max(1, COLUMNS * num_kv_heads // num_q_heads)


def max_num_pieces(num_seqs: int, num_kv_heads: int, num_sms: int) -> int:
    """Returns the maximum number of context pieces of a step.

    The pieces of all KV heads together are enough to fill the GPU. There are at least
    SPARE_PIECES more pieces than sequences, so that long contexts can be cut.
    """
    return max(num_seqs + SPARE_PIECES, _BLOCKS_PER_SM * num_sms // num_kv_heads)


def max_num_results(
    num_rows: int, num_q_heads: int, num_kv_heads: int, num_sms: int
) -> int:
    """Returns the maximum number of partial results of a step, for each query head.

    Each row of a run has a partial result for each piece of the run's context.
    """
    num_pieces = max_num_pieces(0, num_kv_heads, num_sms)
    run_rows = max_run_rows(num_q_heads, num_kv_heads)
    return max(num_rows + SPARE_PIECES * run_rows, num_pieces * run_rows)


def rows_of_runs(pages: Pages, lens: Int32s, max_rows: int) -> Int32s:
    """Divides the rows of a step into runs.

    A row belongs to the run of the row before it if it sees the same blocks and one
    token more. It may also see one block more.

    Args:
        lens: int32 [S], tokens that each row sees.
        max_rows: The maximum number of rows of a run.

    Returns:
        int32 [R], the number of rows of each run, in the order of the rows.
    """
    num_rows = len(lens)
    starts = pages.indptr[:-1]
    counts = np.diff(pages.indptr)
    candidates = np.flatnonzero(np.diff(lens) == 1)
    # The last block is compared first, because contexts of different sequences differ
    # there: comparing all blocks of long contexts takes long.
    last = counts[candidates] - 1
    same_last = (
        pages.indices[starts[candidates] + last]
        == pages.indices[starts[candidates + 1] + last]
    )
    candidates = candidates[same_last]
    if max_rows == 1 or not len(candidates):
        return np.ones(num_rows, np.int32)
    counts = counts[candidates]
    ends = np.cumsum(counts)
    within = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
    blocks = pages.indices[np.repeat(starts[candidates], counts) + within]
    next_blocks = pages.indices[np.repeat(starts[candidates + 1], counts) + within]
    follows = np.zeros(num_rows, bool)
    follows[candidates + 1] = np.logical_and.reduceat(
        blocks == next_blocks, ends - counts
    )
    run_starts = np.flatnonzero(~follows)
    run_lens = np.diff(np.append(run_starts, num_rows))
    index_in_run = np.arange(num_rows) - np.repeat(run_starts, run_lens)
    run_starts = np.flatnonzero(index_in_run % max_rows == 0)
    return np.diff(np.append(run_starts, num_rows)).astype(np.int32)


def plan_pieces(
    lens: Int32s, run_rows: Int32s, max_pieces: int, max_results: int
) -> Int32s:
    """Cuts the contexts of runs into pieces, which are as short as possible.

    All pieces have the same length, except the last piece of a context.

    Args:
        lens: int32 [S], tokens that each row sees; S <= max_pieces.
        run_rows: int32 [R], the number of rows of each run.
        max_pieces: The maximum number of pieces.
        max_results: The maximum number of partial results of rows; at least S.

    Returns:
        int32 [1 + max_pieces + 4 * S], in this order:
        - 1: the number of tokens of a piece,
        - max_pieces: the first row of each piece's run, -1 for pieces that are not
          used,
        - S: the number of rows of each row's run,
        - S: the first piece of each row's run,
        - S: the number of pieces of each row's run,
        - S: the index of each row's partial result for the first of these pieces. The
          next piece's result has an index that is higher by the run's number of rows.
    """
    last_rows = np.cumsum(run_rows) - 1
    tiles = -(-lens[last_rows] // TILE)
    low = 1
    high = int(tiles.max(initial=1))
    while low < high:
        middle = (low + high) // 2
        counts = -(-tiles // middle)
        num_results = int((counts * run_rows).sum())
        if int(counts.sum()) <= max_pieces and num_results <= max_results:
            high = middle
        else:
            low = middle + 1
    counts = -(-tiles // low)
    first_rows = last_rows + 1 - run_rows
    first_pieces = np.cumsum(counts) - counts
    first_results = np.cumsum(counts * run_rows) - counts * run_rows
    num_rows = len(lens)
    plan = np.full(1 + max_pieces + 4 * num_rows, -1, np.int32)
    plan[0] = low * TILE
    plan[1 : 1 + counts.sum()] = np.repeat(first_rows, counts)
    of_rows = plan[1 + max_pieces :].reshape(4, num_rows)
    of_rows[0] = np.repeat(run_rows, run_rows)
    of_rows[1] = np.repeat(first_pieces, run_rows)
    of_rows[2] = np.repeat(counts, run_rows)
    of_rows[3] = np.repeat(first_results - first_rows, run_rows) + np.arange(num_rows)
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
        captured: The buffers with the pages of steps that run as CUDA graphs; None:
            steps do not run as graphs.
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
        self._max_run_rows = max_run_rows(heads[0], heads[1])
        # With heads of more than 128 elements, tiles of TILE tokens do not fit into
        # shared memory.
        self._tile = min(TILE, TILE * 128 // heads[2])
        self._captured: list[Tensor] = []
        if captured is not None:
            size = 1 + max_num_pieces(num_seqs, heads[1], num_sms) + 4 * num_seqs
            plan = torch.zeros(size, dtype=torch.int32, device=workspace.device)
            indptr = captured.indptr[: num_seqs + 1]
            self._captured = [plan, indptr, captured.indices, captured.last_page_lens]

    def plan(self, pages: Pages) -> None:
        """Plans a step with the contexts in `pages`.

        For captured steps, the caller must copy `pages` to the captured buffers.
        """
        lens = (np.diff(pages.indptr) - 1) * self._block_size + pages.last_page_lens
        lens = lens.astype(np.int32)
        num_q_heads, num_kv_heads, _ = self._heads
        self._max_pieces = max_num_pieces(len(lens), num_kv_heads, self._num_sms)
        self._max_results = max_num_results(
            len(lens), num_q_heads, num_kv_heads, self._num_sms
        )
        run_rows = rows_of_runs(pages, lens, self._max_run_rows)
        plan = plan_pieces(lens, run_rows, self._max_pieces, self._max_results)
        self._planned = self._captured
        if self._captured:
            self._captured[0].copy_(pinned(plan), non_blocking=True)
            return
        arrays = (plan, *pages)
        host = pinned(np.concatenate(arrays))
        uploaded = host.to(self._workspace.device, non_blocking=True)
        lengths = [len(array) for array in arrays]
        self._planned = list(torch.split_with_sizes(uploaded, lengths))

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
        small_programs: bool | None = None,
    ) -> None:
        """Attends for the planned step; see attention.kernels.decode.attend.

        `return_lse` exists only for compatibility with FlashInfer's wrappers. It is
        ignored: `lse` is filled whenever it is given.
        """
        if lse is None:
            lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        size = self._max_results * self._heads[0] * self._heads[2]
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
            min_columns=COLUMNS,
            small_programs=small_programs,
        )


def partial_bytes(heads: tuple[int, int, int], num_seqs: int, num_sms: int) -> int:
    """Returns the bytes of the partial results of a step of `num_seqs` sequences.

    Args:
        heads: Number of query heads, number of KV heads, elements of one head.
    """
    num_q_heads, num_kv_heads, head_dim = heads
    max_results = max_num_results(num_seqs, num_q_heads, num_kv_heads, num_sms)
    # A result has an output of head_dim floats and a log-sum-exp for each query head.
    return max_results * num_q_heads * (head_dim + 1) * 4
