"""Block tables as the compressed rows that paged attention kernels take: numpy, once per step."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


class Pages(NamedTuple):
    """Blocks of S sequences, one after the other: sequence i has indices[indptr[i]:indptr[i+1]]."""

    indptr: Int32s  # [S + 1]
    indices: Int32s  # [indptr[S]] block ids
    last_page_lens: Int32s  # [S] tokens in a sequence's last block, 1..block_size

    def head(self, num_seqs: int) -> "Pages":
        """Of the first `num_seqs` sequences."""
        indptr = self.indptr[: num_seqs + 1]
        return Pages(indptr, self.indices[: indptr[-1]], self.last_page_lens[:num_seqs])

    def tail(self, first_seq: int) -> "Pages":
        """Of the sequences from `first_seq` on."""
        start = self.indptr[first_seq]
        indptr = self.indptr[first_seq:] - start
        return Pages(indptr, self.indices[start:], self.last_page_lens[first_seq:])


def pages_of(block_tables: Int32s, context_lens: Int32s, block_size: int) -> Pages:
    """The blocks that hold the first `context_lens` tokens of each sequence.

    Args:
        block_tables: [S, max_blocks].
        context_lens: [S] tokens, each >= 1.
    """
    counts = -(-context_lens // block_size)
    indptr = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=indptr[1:])
    used = np.arange(block_tables.shape[1]) < counts[:, None]
    return Pages(
        indptr,
        block_tables[used].astype(np.int32, copy=False),
        (context_lens - (counts - 1) * block_size).astype(np.int32, copy=False),
    )


def num_leading_decodes(query_lens: Int32s) -> int:
    """How many sequences at the head of a step compute one token each."""
    longer = np.flatnonzero(query_lens > 1)
    return int(longer[0]) if len(longer) else len(query_lens)
