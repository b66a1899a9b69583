"""A batch as compressed rows of pages."""

import numpy as np

from attention.base import AttentionBatch


def test_only_the_blocks_of_the_context_are_kept():
    tables = np.array([[7, 8, 9], [3, 0, 0], [4, 5, 0]], np.int32)
    lens = (np.array(each, np.int32) for each in ([1, 1, 3], [9, 1, 8]))
    batch = AttentionBatch(*lens, tables, np.zeros(5, np.int64))
    whole, part = batch.pages(block_size=4), batch.part(1, 3).pages(block_size=4)
    assert [x.tolist() for x in whole] == [[0, 3, 4, 6], [7, 8, 9, 3, 4, 5], [1, 1, 4]]
    assert [x.tolist() for x in part] == [[0, 1, 3], [3, 4, 5], [1, 4]]


def test_a_window_leaves_out_the_blocks_that_no_query_sees() -> None:
    rng = np.random.default_rng(0)
    for _ in range(100):
        size, window = int(rng.integers(1, 6)), int(rng.integers(1, 20))
        query_lens = rng.integers(1, 8, 3).astype(np.int32)
        context_lens = query_lens + rng.integers(0, 30, 3).astype(np.int32)
        tables = 1 + rng.permutation(120).astype(np.int32).reshape(3, 40)
        slots = np.zeros(int(query_lens.sum()), np.int64)
        batch = AttentionBatch(query_lens, context_lens, tables, slots)
        whole, seen = batch.pages(size), batch.within(window, size).pages(size)
        for seq in range(3):
            old, new = (
                x.indices[x.indptr[seq] : x.indptr[seq + 1]] for x in (whole, seen)
            )
            assert new.tolist() == old[len(old) - len(new) :].tolist()
            kept = len(new) * size - size + seen.last_page_lens[seq]
            needed = min(context_lens[seq], window + query_lens[seq] - 1)
            assert needed <= kept < needed + size
        assert (seen.last_page_lens == whole.last_page_lens).all()
