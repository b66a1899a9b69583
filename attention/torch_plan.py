"""Computes the rows of the pool that each query of a step reads and writes.

This happens once per step and uses numpy only.

The pool is one allocation whose innermost axis is D, so whatever its layout it is also
a matrix of rows of D elements. Token t of a sequence, KV head h, layer l, component c
is row

    block_table[t // N] * stride_B + (t % N) * stride_N
    + h * stride_H + l * stride_L + c * stride_C

(strides in rows). The terms of layer and component are the same for all tokens, so the
indices computed here leave them out and serve every layer: the backend shifts the
matrix instead.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from attention.base import AttentionBatch
from kvcache.layout import KVLayout

Indices = npt.NDArray[np.int64]

_SMALL_PADDING_TOKENS = 32  # padding that costs less than one more group


@dataclass(frozen=True, eq=False)
class DecodeGroup:
    """Sequences of one query token and of similar context lengths, padded to one width.

    Padding repeats the sequence's own last token, so that no other sequence's KV is
    read, and is masked.
    """

    query_rows: Indices  # [G] rows of the step's query tokens
    pool_rows: Indices  # [G, H, width]
    context_lens: Indices  # [G] tokens that the query sees, each <= width
    width: int  # tokens

    @property
    def is_padded(self) -> bool:
        return bool((self.context_lens < self.width).any())


class RowMap:
    """Maps tokens to rows of the pool, for one layout."""

    def __init__(self, layout: KVLayout) -> None:
        row_strides = {
            axis: stride // layout.head_dim for axis, stride in layout.strides.items()
        }
        self.block_size = layout.block_size
        self._block_stride = row_strides["B"]
        self._token_stride = row_strides["N"]
        self._heads = np.arange(layout.num_heads, dtype=np.int64) * row_strides["H"]
        self._layer_stride = row_strides["L"]
        self._component_stride = row_strides["C"]
        # Rows that follow the first row of any layer and component.
        self.num_shared_rows = (
            layout.nbytes // layout.itemsize // layout.head_dim
            - (layout.num_layers - 1) * self._layer_stride
            - (layout.num_components - 1) * self._component_stride
        )

    def shift(self, layer: int, component: int) -> int:
        """The number of rows to add to a row index for this layer and component."""
        return layer * self._layer_stride + component * self._component_stride

    def of_slots(self, slots: Indices) -> Indices:
        """[T] slots -> [T, H] rows."""
        blocks = slots // self.block_size * self._block_stride
        tokens = blocks + slots % self.block_size * self._token_stride
        return tokens[:, None] + self._heads

    def of_context(self, tables: npt.NDArray[np.int32], positions: Indices) -> Indices:
        """[G, max_blocks] block tables and [G, W] token positions -> [G, H, W] rows."""
        blocks = np.take_along_axis(tables, positions // self.block_size, axis=1)
        tokens = blocks.astype(np.int64) * self._block_stride
        tokens += positions % self.block_size * self._token_stride
        return tokens[:, None, :] + self._heads[:, None]


def prefill_chunks(
    batch: AttentionBatch, rows: RowMap, window: int | None = None
) -> Iterator[tuple[slice, Indices]]:
    """The sequences of several query tokens.

    Yields:
        For each of them its rows of the step, and the pool's rows [H, cached tokens] of
        its tokens from earlier steps that some query sees.
    """
    stops = np.cumsum(batch.query_lens)
    for seq in np.flatnonzero(batch.query_lens > 1):
        query_len = int(batch.query_lens[seq])
        stop = int(stops[seq])
        num_cached = int(batch.context_lens[seq]) - query_len
        first = 0 if window is None else max(0, num_cached - window + 1)
        cached = np.arange(first, num_cached, dtype=np.int64)
        table = batch.block_tables[seq : seq + 1]
        yield slice(stop - query_len, stop), rows.of_context(table, cached[None])[0]


class Grouping(NamedTuple):
    """How sequences of one query token are put into groups."""

    # A sequence that is shorter than the longest one by this share starts a new group.
    max_padding: float
    max_tokens: int  # of a group: sequences x width
    multiple: int = 1  # tokens; a group's width is a multiple of it


def decode_groups(
    batch: AttentionBatch, rows: RowMap, grouping: Grouping, window: int | None = None
) -> list[DecodeGroup]:
    """Groups the sequences of one query token, longest first."""
    seqs = np.flatnonzero(batch.query_lens == 1)
    seen = batch.context_lens
    if window is not None:
        seen = np.minimum(batch.context_lens, window)
    seqs = seqs[np.argsort(-seen[seqs], kind="stable")]
    starts = np.cumsum(batch.query_lens) - batch.query_lens
    groups = []
    lens = [int(n) for n in seen[seqs]]
    for first, last, width in _split(lens, grouping):
        # Sorted, so that a step of a single group keeps its order.
        members = np.sort(seqs[first:last])
        context_lens = seen[members].astype(np.int64)
        positions = np.minimum(np.arange(width), context_lens[:, None] - 1)
        positions += (batch.context_lens[members] - context_lens)[:, None]
        group = DecodeGroup(
            query_rows=starts[members].astype(np.int64),
            pool_rows=rows.of_context(batch.block_tables[members], positions),
            context_lens=context_lens,
            width=width,
        )
        groups.append(group)
    return groups


def _split(lens: list[int], grouping: Grouping) -> Iterator[tuple[int, int, int]]:
    """Splits the descending `lens` into groups that share a width.

    Yields:
        The first index, the end and the width of each group.
    """
    first = 0
    for i in range(1, len(lens) + 1):
        width = -(-lens[first] // grouping.multiple) * grouping.multiple
        if i < len(lens):
            min_len = min(
                width * (1 - grouping.max_padding), width - _SMALL_PADDING_TOKENS
            )
            fits = (i + 1 - first) * width <= grouping.max_tokens
            if lens[i] >= min_len and fits:
                continue
        yield first, i, width
        first = i
