"""A batch as compressed rows of pages."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.base import AttentionBatch


def batch_of(tables: np.ndarray, context_lens: list[int], query_lens: list[int]) -> AttentionBatch:
    lens = (np.array(each, np.int32) for each in (query_lens, context_lens))
    return AttentionBatch(*lens, tables, np.zeros(sum(query_lens), np.int64))


def test_only_the_blocks_of_the_context_are_kept() -> None:
    tables = np.array([[7, 8, 9], [3, 0, 0], [4, 5, 0]], np.int32)
    pages = batch_of(tables, [9, 1, 8], [1, 1, 3]).pages(block_size=4)
    assert pages.indptr.tolist() == [0, 3, 4, 6]
    assert pages.indices.tolist() == [7, 8, 9, 3, 4, 5]
    assert pages.last_page_lens.tolist() == [1, 1, 4]


@settings(deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.sampled_from([1, 4, 16]), st.data())
def test_head_and_tail_are_the_pages_of_their_sequences(
    lens: list[int], block_size: int, data: st.DataObject
) -> None:
    width = -(-max(lens) // block_size) + 1
    tables = np.random.default_rng(0).integers(1, 99, (len(lens), width)).astype(np.int32)
    whole = batch_of(tables, lens, [1] * len(lens)).pages(block_size)
    split = data.draw(st.integers(1, len(lens)))
    parts = [(whole.head(split), slice(split)), (whole.tail(split - 1), slice(split - 1, None))]
    for part, rows in parts:
        some = lens[rows]
        expected = batch_of(tables[rows], some, [1] * len(some)).pages(block_size)
        for got, want in zip(part, expected, strict=True):
            assert got.tolist() == want.tolist()
    full = (np.diff(whole.indptr) - 1) * block_size + whole.last_page_lens
    assert full.tolist() == lens
