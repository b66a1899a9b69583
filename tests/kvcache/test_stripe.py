"""Which tokens of a sequence a rank keeps, against a count token by token."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.stripe import PlanError, Stripe

SIZES, BLOCK_SIZES = st.integers(1, 8), st.integers(1, 64)


def stripes(size: int, block_size: int) -> list[Stripe]:
    return [Stripe(rank, size, block_size) for rank in range(size)]


def owner(token: int, stripe: Stripe) -> int:
    return token // stripe.block_size % stripe.size


@given(SIZES, BLOCK_SIZES, st.integers(0, 3000))
def test_every_token_is_counted_by_the_one_rank_that_keeps_it(size, block_size, tokens):
    kept = [int(stripe.num_local(tokens)) for stripe in stripes(size, block_size)]
    for stripe, count in zip(stripes(size, block_size), kept, strict=True):
        assert count == sum(owner(token, stripe) == stripe.rank for token in range(tokens))
    assert sum(kept) == tokens


@given(SIZES, BLOCK_SIZES, st.lists(st.integers(0, 1 << 40), max_size=9))
def test_many_counts_at_once_are_the_same(size, block_size, tokens):
    for stripe in stripes(size, block_size):
        found = stripe.num_local(np.array(tokens, np.int64))
        assert found.tolist() == [int(stripe.num_local(count)) for count in tokens]


@given(SIZES, BLOCK_SIZES, st.integers(1, 6), st.randoms())
def test_the_slots_of_all_ranks_hold_every_token_once(size, block_size, num_blocks, random):
    """Slots are numbered as one block table numbers them; block 0 is nobody's."""
    table = list(range(1, num_blocks + 1))
    random.shuffle(table)
    per_block = size * block_size
    tokens = np.arange(num_blocks * per_block)
    slots = np.array(table)[tokens // per_block] * per_block + tokens % per_block
    for stripe in stripes(size, block_size):
        found = stripe.local_slots(slots)
        mine = tokens // block_size % size == stripe.rank
        assert (found[~mine] < block_size).all() and (found[~mine] >= 0).all()
        order = np.arange(int(stripe.num_local(len(tokens))))  # of its tokens, as it keeps them
        wanted = np.array(table)[order // block_size] * block_size + order % block_size
        assert found[mine].tolist() == wanted.tolist()
        assert sorted(wanted) == list(range(block_size, (num_blocks + 1) * block_size))


@given(SIZES, st.integers(1, 16), st.integers(1, 5), st.integers(0, 600), st.randoms())
def test_a_peers_blocks_hold_its_tokens_in_order(size, remote_block_size, ratio, tokens, random):
    table = list(range(1, -(-tokens // remote_block_size) + 1))
    random.shuffle(table)
    for stripe in stripes(size, remote_block_size * ratio):
        found = stripe.remote_blocks(table, remote_block_size).tolist()
        kept = [token for token in range(tokens) if owner(token, stripe) == stripe.rank]
        for place, token in enumerate(kept):
            assert place % remote_block_size == token % remote_block_size
            assert found[place // remote_block_size] == table[token // remote_block_size]
        assert len(found) == -(-len(kept) // remote_block_size)


@pytest.mark.parametrize(("ours", "theirs"), [(16, 32), (32, 24), (1, 2)])
def test_a_peer_whose_blocks_hold_tokens_of_two_ranks_is_refused(ours, theirs):
    said = rf"block_size is {ours} here and {theirs} on the peer.*--block-size {theirs}"
    with pytest.raises(PlanError, match=said):
        Stripe(1, 2, ours).check_remote(theirs)
    Stripe(0, 1, ours).check_remote(theirs)
    assert Stripe(0, 1, ours).remote_blocks([3, 4], theirs).tolist() == [3, 4]
