"""Which rows of the pool each query of a step reads and writes: numpy only, once per step.

The pool is one allocation whose innermost axis is D, so whatever its layout it is also a matrix of
rows of D elements. Token t of a sequence, KV head h, layer l, component c is row

    block_table[t // N] * stride_B + (t % N) * stride_N + h * stride_H + l * stride_L + c * stride_C

(strides in rows). The last two terms are the same for all tokens, so the indices computed here
leave them out and serve every layer: the backend shifts the matrix instead.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from attention.base import AttentionBatch
from kvcache.layout import KVLayout

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class DecodeGroup:
    """Sequences of one query token and of similar context lengths, padded to one width.

    Padding repeats the sequence's own last token, so that nothing foreign is read, and is masked.
    """

    query_rows: Indices  # [G] rows of the step's query tokens
    pool_rows: Indices  # [G, H, width]
    context_lens: Indices  # [G] tokens that are seen, each <= width
    width: int  # tokens

    @property
    def is_padded(self) -> bool:
        return bool((self.context_lens < self.width).any())


class RowMap:
    """Pool rows of tokens, for one layout."""

    def __init__(self, layout: KVLayout) -> None:
        rows = {
            axis: stride // layout.head_dim for axis, stride in layout.strides.items()
        }
        self.block_size = layout.block_size
        self._block, self._token = rows["B"], rows["N"]
        self._heads = np.arange(layout.num_heads, dtype=np.int64) * rows["H"]
        self._layer, self._component = rows["L"], rows["C"]
        self.num_shared_rows = (  # rows that exist from every layer's and component's shift on
            layout.nbytes // layout.itemsize // layout.head_dim
            - (layout.num_layers - 1) * self._layer
            - (layout.num_components - 1) * self._component
        )

    def shift(self, layer: int, component: int) -> int:
        """What to add to a row index for this layer and component."""
        return layer * self._layer + component * self._component

    def of_slots(self, slots: Indices) -> Indices:
        """[T] slots -> [T, H] rows."""
        tokens = (
            slots // self.block_size * self._block
            + slots % self.block_size * self._token
        )
        return tokens[:, None] + self._heads

    def of_context(self, tables: npt.NDArray[np.int32], positions: Indices) -> Indices:
        """[G, max_blocks] block tables and [G, W] token positions -> [G, H, W] rows."""
        blocks = np.take_along_axis(tables, positions // self.block_size, axis=1)
        tokens = (
            blocks.astype(np.int64) * self._block
            + positions % self.block_size * self._token
        )
        return tokens[:, None, :] + self._heads[:, None]


def prefill_chunks(
    batch: AttentionBatch, rows: RowMap, window: int | None = None
) -> Iterator[tuple[slice, Indices]]:
    """For each sequence of several query tokens its rows of the step, and the pool's rows of its
    tokens from earlier steps [H, cached tokens], those that some query sees."""
    stops = np.cumsum(batch.query_lens)
    for seq in np.flatnonzero(batch.query_lens > 1):
        query_len, stop = int(batch.query_lens[seq]), int(stops[seq])
        num_cached = int(batch.context_lens[seq]) - query_len
        first = 0 if window is None else max(0, num_cached - window + 1)
        cached = np.arange(first, num_cached, dtype=np.int64)
        table = batch.block_tables[seq : seq + 1]
        yield slice(stop - query_len, stop), rows.of_context(table, cached[None])[0]


class Grouping(NamedTuple):
    """How sequences of one query token are put into groups."""

    max_padding: (
        float  # a sequence shorter than this part of the longest starts a new group
    )
    max_tokens: int  # of a group: sequences x width
    multiple: int = 1  # of tokens, which a group's width is


def decode_groups(
    batch: AttentionBatch, rows: RowMap, grouping: Grouping, window: int | None = None
) -> list[DecodeGroup]:
    """Groups the sequences of one query token, longest first."""
    seqs = np.flatnonzero(batch.query_lens == 1)
    seen = (
        batch.context_lens if window is None else np.minimum(batch.context_lens, window)
    )
    seqs = seqs[np.argsort(-seen[seqs], kind="stable")]
    starts = np.cumsum(batch.query_lens) - batch.query_lens
    groups = []
    lens = [int(n) for n in seen[seqs]]
    for first, last, width in _split(lens, grouping):
        members = np.sort(
            seqs[first:last]
        )  # so that a step of one group keeps its order
        context_lens = seen[members].astype(np.int64)
        positions = np.minimum(np.arange(width), context_lens[:, None] - 1)
        positions += (batch.context_lens[members] - context_lens)[:, None]
        pool_rows = rows.of_context(batch.block_tables[members], positions)
        groups.append(
            DecodeGroup(
                starts[members].astype(np.int64), pool_rows, context_lens, width
            )
        )
    return groups


_SMALL_PADDING_TOKENS = 32  # padding that costs less than one more group


def _split(lens: list[int], grouping: Grouping) -> Iterator[tuple[int, int, int]]:
    """Ranges of the descending `lens` that share a width, and that width."""
    first = 0
    for i in range(1, len(lens) + 1):
        width = -(-lens[first] // grouping.multiple) * grouping.multiple
        if i < len(lens):
            shortest = min(
                width * (1 - grouping.max_padding), width - _SMALL_PADDING_TOKENS
            )
            if lens[i] >= shortest and (i + 1 - first) * width <= grouping.max_tokens:
                continue
        yield first, i, width
        first = i
