"""For decode kernels, contexts are cut into pieces that are computed in parallel."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from attention.pieces import TILE, max_num_pieces, plan_pieces
from tests.rigs.examples import examples


@examples(60)
@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=40),
    st.integers(1, 32),
    st.integers(1, 140),
)
def test_pieces_cover_each_context_once_and_are_as_short_as_possible(lens, heads, sms):
    max_pieces = max_num_pieces(len(lens), heads, sms)
    plan = plan_pieces(np.array(lens, np.int32), max_pieces)
    tokens = int(plan[0])
    seqs = plan[1 : 1 + max_pieces]
    begins = plan[1 + max_pieces :]
    assert len(begins) == len(lens) + 1
    assert begins[-1] <= max_pieces
    assert tokens % TILE == 0
    for seq, length in enumerate(lens):
        count = begins[seq + 1] - begins[seq]
        assert (count - 1) * tokens < length <= count * tokens
        assert (seqs[begins[seq] : begins[seq + 1]] == seq).all()
    assert (seqs[begins[-1] :] == -1).all()
    shorter = tokens - TILE
    if shorter:
        assert sum(-(-length // shorter) for length in lens) > max_pieces
