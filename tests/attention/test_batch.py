"""The lists of pages (blocks) of a batch, with and without a sliding window."""

import numpy as np

from attention.base import AttentionBatch


def test_pages_list_only_the_blocks_of_the_context():
    batch = AttentionBatch(
        query_lens=np.array([1, 1, 3], np.int32),
        context_lens=np.array([9, 1, 8], np.int32),
        block_tables=np.array([[7, 8, 9], [3, 0, 0], [4, 5, 0]], np.int32),
        slot_mapping=np.zeros(5, np.int64),
    )
    all_pages = batch.pages(block_size=4)
    last_two = batch.select_sequences(1, 3).pages(block_size=4)
    assert [array.tolist() for array in all_pages] == [
        [0, 3, 4, 6],
        [7, 8, 9, 3, 4, 5],
        [1, 1, 4],
    ]
    assert [array.tolist() for array in last_two] == [[0, 1, 3], [3, 4, 5], [1, 4]]


def test_window_leaves_out_the_blocks_that_no_query_sees() -> None:
    rng = np.random.default_rng(0)
    for _ in range(100):
        size = int(rng.integers(1, 6))
        window = int(rng.integers(1, 20))
        query_lens = rng.integers(1, 8, 3).astype(np.int32)
        context_lens = query_lens + rng.integers(0, 30, 3).astype(np.int32)
        tables = 1 + rng.permutation(120).astype(np.int32).reshape(3, 40)
        slots = np.zeros(int(query_lens.sum()), np.int64)
        batch = AttentionBatch(query_lens, context_lens, tables, slots)
        all_pages = batch.pages(size)
        seen_pages = batch.limit_to_window(window, size).pages(size)
        for seq in range(3):
            all_blocks = blocks_of(all_pages, seq)
            seen_blocks = blocks_of(seen_pages, seq)
            assert seen_blocks == all_blocks[len(all_blocks) - len(seen_blocks) :]
            last_page_len = seen_pages.last_page_lens[seq]
            num_seen = len(seen_blocks) * size - size + last_page_len
            num_needed = min(context_lens[seq], window + query_lens[seq] - 1)
            assert num_needed <= num_seen < num_needed + size
        assert (seen_pages.last_page_lens == all_pages.last_page_lens).all()


def blocks_of(pages, seq):
    return pages.indices[pages.indptr[seq] : pages.indptr[seq + 1]].tolist()
