"""What of decode graphs shows without a GPU: the sizes, and how a step is padded."""

import numpy as np
import pytest

from attention.base import AttentionBatch
from engine.worker.cuda_graph import captured_sizes


@pytest.mark.parametrize("max_seqs", [1, 2, 3, 8, 63, 64, 65, 256, 1000])
def test_every_step_has_a_graph_that_pads_it_little(max_seqs: int) -> None:
    sizes = captured_sizes(max_seqs)
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1 and sizes[-1] == max_seqs
    for num_seqs in range(1, max_seqs + 1):
        size = next(size for size in sizes if size >= num_seqs)
        assert size - num_seqs <= max(7, num_seqs // 4)
    assert len(sizes) < 40


def test_padding_rows_touch_the_null_block_only() -> None:
    batch = AttentionBatch(
        query_lens=np.ones(2, np.int32),
        context_lens=np.array([9, 3], np.int32),
        block_tables=np.array([[5, 6, 7], [8, 0, 0]], np.int32),
        slot_mapping=np.array([28, 34]),
    )
    padded = batch.padded_to(5, block_size=4)
    assert padded.num_seqs == padded.num_tokens == 5
    assert padded.context_lens.tolist() == [9, 3, 1, 1, 1]
    assert (padded.block_tables[2:] == 0).all()
    assert (padded.slot_mapping[2:] < 4).all()
    assert padded.slot_mapping[:2].tolist() == [28, 34]
    assert batch.padded_to(2, block_size=4) is batch
