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
