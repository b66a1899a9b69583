"""How contexts are cut into pieces for the decode kernels."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from attention.pieces import TILE, num_pieces, pieces_of
from tests.rigs.examples import examples


@examples(60)
@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=40),
    st.integers(1, 32),
    st.integers(1, 140),
)
def test_pieces_cover_each_context_once_and_are_as_short_as_there_is_room_for(
    lens, heads, sms
):
    most = num_pieces(len(lens), heads, sms)
    plan = pieces_of(np.array(lens, np.int32), most)
    tokens, seqs, begins = int(plan[0]), plan[1 : 1 + most], plan[1 + most :]
    assert len(begins) == len(lens) + 1 and begins[-1] <= most and tokens % TILE == 0
    for seq, length in enumerate(lens):
        count = begins[seq + 1] - begins[seq]
        assert (count - 1) * tokens < length <= count * tokens
        assert (seqs[begins[seq] : begins[seq + 1]] == seq).all()
    assert (seqs[begins[-1] :] == -1).all()
    shorter = tokens - TILE
    assert shorter == 0 or sum(-(-length // shorter) for length in lens) > most
