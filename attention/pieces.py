"""Attention of decode steps by Baton's own kernels, which cut contexts into pieces.

This method is also known as split KV. FlashInfer's decode kernels are slower, above all
for few sequences, and read FP8 no faster than 16 bits. docs/performance.md has the
measurements.

A step that verifies proposals has several rows for a sequence, one for each proposal.
Each row sees one token more than the row before it. Such rows form a run: a program
reads the context once for all of them.
"""

from typing import Final

import numpy as np
import torch
from torch import Tensor

from attention.base import AttentionBatch, AttentionKind, Int32s, Pages
from attention.flashinfer_base import CapturedBuffers, pinned

SPARE_PIECES: Final = 16  # pieces beyond one per sequence, for long contexts
TILE: Final = 64  # tokens; the length of a piece is a multiple of TILE
_BLOCKS_PER_SM: Final = 3  # thread blocks that fill a streaming multiprocessor
_MAX_COLUMNS: Final = 32  # maximum number of query heads of a run for one KV head


def max_num_pieces(num_seqs: int, num_kv_heads: int, num_sms: int) -> int:
    """Returns the maximum number of context pieces of a step.

    The pieces of all KV heads together are enough to fill the GPU. There are at least
    SPARE_PIECES more pieces than sequences, so that long contexts can be cut.
    """
    return max(num_seqs + SPARE_PIECES, _BLOCKS_PER_SM * num_sms // num_kv_heads)


def max_run_rows(num_q_heads: int, num_kv_heads: int) -> int:
    """Returns the maximum number of rows of a run."""
    return max(1, _MAX_COLUMNS * num_kv_heads // num_q_heads)


def max_num_results(
    num_rows: int, max_rows: int, num_kv_heads: int, num_sms: int
) -> int:
    """Returns the maximum number of partial results of a step, for each query head.

    Each row of a run has a partial result for each piece of the run's context.

    Args:
        num_rows: The rows of the step.
        max_rows: The maximum number of rows of a run.
    """
    num_pieces = max_num_pieces(0, num_kv_heads, num_sms)
    return max(num_rows + SPARE_PIECES * max_rows, num_pieces * max_rows)


def plan_size(max_seqs: int, num_kv_heads: int, num_sms: int) -> int:
    """Returns the number of elements of the largest plan for up to `max_seqs` rows; see
    `plan_pieces`."""
    return 1 + max_num_pieces(max_seqs, num_kv_heads, num_sms) + 4 * max_seqs


def rows_of_runs(batch: AttentionBatch, max_rows: int) -> Int32s:
    """Divides the rows of a decode step into runs.

    A row belongs to the run of the row before it if it has the same block table and
    sees one token more.

    Args:
        batch: S rows with one query token each.
        max_rows: The maximum number of rows of a run.

    Returns:
        int32 [R], the number of rows of each run, in the order of the rows.
    """
    num_rows = batch.num_seqs
    lens = batch.context_lens
    tables = batch.block_tables
    previous = np.flatnonzero(lens[1:] - lens[:-1] == 1)
    if max_rows > 1 and len(previous):
        has_same_blocks = (tables[previous] == tables[previous + 1]).all(1)
        previous = previous[has_same_blocks]
    if max_rows == 1 or not len(previous):
        return np.ones(num_rows, np.int32)
    is_first = np.ones(num_rows, bool)
    is_first[previous + 1] = False
    starts = np.flatnonzero(is_first)
    run_lens = np.diff(starts, append=num_rows)
    index_in_run = np.arange(num_rows) - np.repeat(starts, run_lens)
    starts = np.flatnonzero(index_in_run % max_rows == 0)
    return np.diff(starts, append=num_rows).astype(np.int32)


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
    num_rows = len(lens)
    last_rows = np.cumsum(run_rows) - 1
    first_rows = last_rows + 1 - run_rows
    tiles = -(-lens[last_rows] // TILE)
    piece_tiles = _tiles_of_pieces(tiles, run_rows, max_pieces, max_results)
    counts = -(-tiles // piece_tiles)
    first_pieces = np.cumsum(counts) - counts
    results = counts * run_rows
    first_results = np.cumsum(results) - results - first_rows
    plan = np.full(1 + max_pieces + 4 * num_rows, -1, np.int32)
    plan[0] = piece_tiles * TILE
    plan[1 : 1 + counts.sum()] = np.repeat(first_rows, counts)
    of_rows = plan[1 + max_pieces :].reshape(4, num_rows)
    run = np.repeat(np.arange(len(run_rows)), run_rows)  # the run of each row
    of_rows[0] = run_rows[run]
    of_rows[1] = first_pieces[run]
    of_rows[2] = counts[run]
    of_rows[3] = first_results[run] + np.arange(num_rows)
    return plan


def _tiles_of_pieces(
    tiles: Int32s, run_rows: Int32s, max_pieces: int, max_results: int
) -> int:
    """Returns the smallest number of tiles of a piece that `plan_pieces` allows.

    Args:
        tiles: int32 [R], the tiles of the context of each run.
    """

    def is_allowed(piece_tiles: int) -> bool:
        counts = -(-tiles // piece_tiles)
        num_results = int((counts * run_rows).sum())
        return int(counts.sum()) <= max_pieces and num_results <= max_results

    # A context has at least tiles / piece_tiles pieces, and less than one more.
    num_tiles = int(tiles.sum())
    low = max(1, -(-num_tiles // max_pieces))
    high = int(tiles.max(initial=1))
    spare_pieces = max_pieces - len(tiles)
    spare_results = max_results - int(run_rows.sum())
    if spare_pieces and spare_results:
        num_row_tiles = int((tiles * run_rows).sum())
        enough = max(-(-num_tiles // spare_pieces), -(-num_row_tiles // spare_results))
        high = min(high, enough)
    high = max(low, high)
    while low < high:
        middle = (low + high) // 2
        if is_allowed(middle):
            high = middle
        else:
            low = middle + 1
    return low


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
        max_rows: The maximum number of rows of a run.
        captured: The buffers with the pages and plans of steps that run as CUDA graphs;
            None: steps do not run as graphs.
        num_seqs: Number of sequences of a captured step; only used with `captured`.

    Attributes:
        has_runs: Whether the planned step has runs of several rows, or is captured for
            steps that have. If not, `run` does not launch the kernel for runs.
    """

    def __init__(
        self,
        heads: tuple[int, int, int],
        block_size: int,
        kind: AttentionKind,
        scale: float,
        workspace: Tensor,
        num_sms: int,
        *,
        max_rows: int,
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
        self._max_rows = max_rows
        # With heads of more than 128 elements, tiles of TILE tokens do not fit into
        # shared memory.
        self._tile = min(TILE, TILE * 128 // heads[2])
        self.has_runs = False
        self._planned: list[Tensor] = []
        if captured is not None:
            self._planned = [
                captured.plan,
                captured.indptr[: num_seqs + 1],
                captured.indices,
                captured.last_page_lens,
            ]

    def plan_for_graph(self, batch: AttentionBatch, pages: Pages) -> Int32s:
        """Plans a captured step of single tokens, which see the blocks in `pages`.

        Returns:
            The plan. The caller must copy it and `pages` to the captured buffers.
        """
        num_rows = batch.num_seqs
        num_kv_heads = self._heads[1]
        self._max_pieces = max_num_pieces(num_rows, num_kv_heads, self._num_sms)
        self._max_results = max_num_results(
            num_rows, self._max_rows, num_kv_heads, self._num_sms
        )
        run_rows = rows_of_runs(batch, self._max_rows)
        self.has_runs = len(run_rows) < num_rows
        lens = batch.context_lens.astype(np.int32, copy=False)
        return plan_pieces(lens, run_rows, self._max_pieces, self._max_results)

    def plan(self, batch: AttentionBatch, pages: Pages) -> None:
        """Plans a step that is not captured; see `plan_for_graph`."""
        plan = self.plan_for_graph(batch, pages)
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
        num_heads, _, head_dim = self._heads
        size = self._max_results * num_heads * head_dim
        num_lses = self._max_results * num_heads
        assert size + num_lses <= len(self._workspace), "the workspace is too small"
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
            max_run_rows=self._max_rows if self.has_runs else 1,
            sinks=sinks,
            small_programs=small_programs,
        )


def partial_bytes(
    heads: tuple[int, int, int], num_seqs: int, num_sms: int, max_rows: int
) -> int:
    """Returns the bytes of the partial results of a step of `num_seqs` rows.

    Args:
        heads: Number of query heads, number of KV heads, elements of one head.
        max_rows: The maximum number of rows of a run.
    """
    num_q_heads, num_kv_heads, head_dim = heads
    num_results = max_num_results(num_seqs, max_rows, num_kv_heads, num_sms)
    # A result has an output of head_dim floats and a log-sum-exp for each query head.
    return num_results * num_q_heads * (head_dim + 1) * 4
