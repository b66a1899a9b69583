"""Computes the rows of the pool that each query of a step reads and writes.

This happens once per step and uses numpy only.

The pool is one allocation, and D is the innermost axis of every layout. So the pool can
be viewed as a matrix of rows of D elements. The elements of token t of a sequence, KV
head h, layer l, component c are row

    block_table[t // N] * stride_B + (t % N) * stride_N
    + h * stride_H + l * stride_L + c * stride_C

(strides in rows). The terms of layer and component are the same for all tokens. Row
indices in this module leave these two terms out, so that the indices are valid for
every layer. The backend shifts its view of the matrix instead (`RowMap.shift`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from attention.base import AttentionBatch
from kvcache.layout import KVLayout

Indices = npt.NDArray[np.int64]

# Padding a sequence by at most this many tokens costs less than starting a new group.
_SMALL_PADDING_TOKENS = 32


@dataclass(frozen=True, eq=False)
class DecodeGroup:
    """G sequences of one query token each, with contexts padded to the same width.

    Padding repeats the sequence's own last token, so that no KV of another sequence is
    read. The scores of padding are masked.
    """

    query_rows: Indices  # [G] the step's row of each query token
    pool_rows: Indices  # [G, H, width] the pool's rows of each context
    context_lens: Indices  # [G] tokens that the query sees, each <= width
    width: int  # tokens of a padded context

    @property
    def has_padding(self) -> bool:
        return bool((self.context_lens < self.width).any())


class RowMap:
    """Maps tokens to rows of the pool, for one layout.

    The returned row indices leave out the terms of layer and component, as the module's
    docstring explains.
    """

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
        # Number of rows of a view of the pool. A view may start at the first row of any
        # layer and component.
        self.num_shared_rows = (
            layout.nbytes // layout.itemsize // layout.head_dim
            - (layout.num_layers - 1) * self._layer_stride
            - (layout.num_components - 1) * self._component_stride
        )

    def shift(self, layer: int, component: int) -> int:
        """Returns the first row of a layer's view of the pool for one component."""
        return layer * self._layer_stride + component * self._component_stride

    def of_slots(self, slots: Indices) -> Indices:
        """Returns the rows [T, H] of slots [T]."""
        blocks = slots // self.block_size * self._block_stride
        tokens = blocks + slots % self.block_size * self._token_stride
        return tokens[:, None] + self._heads

    def of_context(self, tables: npt.NDArray[np.int32], positions: Indices) -> Indices:
        """Returns the rows of tokens of G sequences: [G, H, W].

        Args:
            tables: [G, max_blocks] block tables.
            positions: [G, W] token positions in each sequence.
        """
        blocks = np.take_along_axis(tables, positions // self.block_size, axis=1)
        tokens = blocks.astype(np.int64) * self._block_stride
        tokens += positions % self.block_size * self._token_stride
        return tokens[:, None, :] + self._heads[:, None]


def prefill_chunks(
    batch: AttentionBatch, rows: RowMap, window: int | None = None
) -> Iterator[tuple[slice, Indices]]:
    """Plans the sequences that have several query tokens.

    Yields:
        For each of these sequences, its rows of the step, and the pool's rows [H, n] of
        the n cached tokens that at least one of its queries sees.
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
    """Limits for dividing sequences of one query token into groups.

    Attributes:
        max_padding: Largest share of a group's width that padding of a sequence may
            take.
        max_tokens: Largest number of tokens of a group: sequences times width.
        multiple: Tokens; the width of a group is a multiple of this number.
    """

    max_padding: float
    max_tokens: int
    multiple: int = 1


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
        # If there is only one group, its sequences keep the order of the step, so that
        # _Plan.is_decode_in_order can be true.
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
        The first index, the last index + 1, and the width of each group.
    """
    first = 0
    for i in range(1, len(lens) + 1):
        width = -(-lens[first] // grouping.multiple) * grouping.multiple
        if i < len(lens):
            min_len = min(
                width * (1 - grouping.max_padding), width - _SMALL_PADDING_TOKENS
            )
            has_capacity = (i + 1 - first) * width <= grouping.max_tokens
            if lens[i] >= min_len and has_capacity:
                continue
        yield first, i, width
        first = i
