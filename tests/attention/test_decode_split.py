"""What the planner of captured decode steps is told."""

import pytest

from attention.decode_split import _thread_blocks_of_others
from attention.flashinfer_workspace import SPARE_PIECES

SMS = 132


@pytest.mark.parametrize("num_kv_heads", [1, 4, 8, 32])
@pytest.mark.parametrize("num_seqs", [1, 8, 17, 18, 33, 64, 256])
def test_there_is_a_piece_for_each_sequence_and_some_more(num_seqs: int, num_kv_heads: int) -> None:
    others = _thread_blocks_of_others(num_seqs, num_kv_heads, SMS)
    pieces = (2 * SMS - others) // num_kv_heads
    assert pieces == max(2 * SMS // num_kv_heads, num_seqs + SPARE_PIECES)
