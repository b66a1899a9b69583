"""Heads and their owners: laws over all sizes."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.layout import KVLayout
from kvcache.transfer.plan.endpoint import (
    Endpoint,
    HeadGroup,
    PlanError,
    check_endpoints,
    head_groups,
    heads_of,
)

TPS = st.integers(1, 16)
HEADS = st.integers(1, 16)


def endpoints(tp: int, total_heads: int, **changes) -> list[Endpoint]:
    fields = {
        "order": "BHLCND",
        "num_blocks": 4,
        "num_layers": 2,
        "num_components": 2,
        "block_size": 16,
        "head_dim": 8,
        "dtype": "float32",
    } | changes
    return [
        Endpoint(KVLayout(num_heads=len(heads_of(rank, tp, total_heads)), **fields), rank, tp)
        for rank in range(tp)
    ]


@settings(deadline=None)
@given(TPS, HEADS)
def test_ranks_hold_every_head_in_order(tp: int, total: int) -> None:
    held = [heads_of(rank, tp, total) for rank in range(tp)]
    assert {head for heads in held for head in heads} == set(range(total))
    assert all(len(heads) >= 1 for heads in held)
    assert held == sorted(held, key=lambda heads: heads.start)
    if tp <= total:  # nothing is copied
        assert sum(len(heads) for heads in held) == total


def whose_turn(group: HeadGroup, shift: int, blocks: int) -> list[int]:
    """Index of the one owner that each block is read from."""
    found = []
    for block in range(blocks):
        turns = [group.turn(index, shift) for index in range(len(group.owners))]
        (index,) = [i for i, (rest, count) in enumerate(turns) if block % count == rest]
        found.append(index)
    return found


@settings(deadline=None)
@given(TPS, TPS, HEADS, st.integers(0, 9))
def test_every_wanted_head_of_every_block_has_exactly_one_source(
    d_tp: int, p_tp: int, total: int, lease_hash: int
) -> None:
    for d_rank in range(d_tp):
        wanted = heads_of(d_rank, d_tp, total)
        groups = head_groups(wanted, p_tp, total)
        assert [head for group in groups for head in group.heads] == list(wanted)
        for group in groups:
            for owner in group.owners:
                assert set(group.heads) <= set(heads_of(owner, p_tp, total))
            expected = [(d_rank + lease_hash + block) % len(group.owners) for block in range(12)]
            assert whose_turn(group, d_rank + lease_hash, 12) == expected


def test_non_dividing_pairs_are_cut_where_the_owner_changes() -> None:
    # 6 heads: P has 0-1 | 2-3 | 4-5, D has 0-2 | 3-5.
    groups = head_groups(heads_of(0, 2, 6), 3, 6)
    assert [(group.heads, group.owners) for group in groups] == [
        (range(2), (0,)),
        (range(2, 3), (1,)),
    ]


@pytest.mark.parametrize("rank, tp", [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_outside_its_group_is_refused(rank: int, tp: int) -> None:
    with pytest.raises(PlanError, match=f"rank is {rank} of tp {tp}"):
        heads_of(rank, tp, 4)


def test_unequal_dtypes_pass_when_conversion_is_allowed() -> None:
    peers = endpoints(2, 4, dtype="bfloat16")
    check_endpoints(endpoints(1, 4)[0], peers, 4, convert=True)


@given(st.integers(1, 4), st.integers(1, 4), HEADS)
def test_ranks_that_share_tokens_hold_the_heads_of_their_group(
    groups: int, dcp: int, heads: int
) -> None:
    tp = groups * dcp
    for rank in range(tp):
        end = Endpoint(endpoints(1, 4)[0].layout, rank, tp, dcp=dcp)
        assert end.heads(heads) == heads_of(rank // dcp, groups, heads)
        assert (end.stripe.rank, end.stripe.size) == (rank % dcp, dcp)


HERE = endpoints(1, 4)[0]
PEER = endpoints(2, 4)


@pytest.mark.parametrize(
    ("local", "peer", "message"),
    [
        (HERE, endpoints(2, 4, num_layers=3), "num_layers is 2 here and 3 on the peer"),
        (HERE, endpoints(2, 4, num_components=1), "num_components is 2 here and 1 on the peer"),
        (HERE, endpoints(2, 4, head_dim=16), "head_dim is 8 here and 16 on the peer"),
        (HERE, endpoints(2, 4, dtype="bfloat16"), "KV dtype is float32 here and bfloat16 on the"),
        (dataclasses.replace(HERE, tp=3, dcp=2), PEER, "dcp is 2 of tp 3; use a divisor"),
        (dataclasses.replace(HERE, tp=2, dcp=4), PEER, "dcp is 4 of tp 2; use a divisor"),
        (dataclasses.replace(HERE, dcp=0), PEER, "dcp is 0 of tp 1; use a divisor"),
        (HERE, PEER[:1], "peer's endpoint 0 is rank 0 of tp 2"),
        (HERE, PEER[::-1], "peer's endpoint 0 is rank 1 of tp 2"),
        (HERE, [], "peer has 0 ranks"),
        (
            HERE,
            [PEER[0], endpoints(2, 4, block_size=32)[1]],
            "ranks 0 and 1 differ in block_size: 16 and 32",
        ),
    ],
)
def test_what_no_plan_bridges_is_refused(local: Endpoint, peer: list, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_endpoints(local, peer, 4)


def test_a_head_count_that_does_not_follow_from_tp_is_refused() -> None:
    with pytest.raises(PlanError, match="num_heads is 4 on rank 0 of tp 1, where 8 heads"):
        check_endpoints(HERE, endpoints(2, 8), 8)
