"""The heads of each rank, and pairs of endpoints that are refused as incompatible."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.layout import KVLayout
from kvcache.transfer.plan.endpoint import (
    Endpoint,
    PlanError,
    check_endpoints,
    heads_of,
)


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
        Endpoint(
            KVLayout(num_heads=len(heads_of(rank, tp, total_heads)), **fields), rank, tp
        )
        for rank in range(tp)
    ]


@given(st.integers(1, 16), st.integers(1, 16))
def test_ranks_hold_every_head_in_order(tp, total):
    held = [heads_of(rank, tp, total) for rank in range(tp)]
    assert {head for heads in held for head in heads} == set(range(total))
    assert all(len(heads) >= 1 for heads in held)
    assert held == sorted(held, key=lambda heads: heads.start)
    if tp <= total:  # no head is on several ranks
        assert sum(len(heads) for heads in held) == total


LOCAL_ENDPOINT = endpoints(1, 4)[0]


@pytest.mark.parametrize(
    ("local", "peer", "message"),
    [
        (
            LOCAL_ENDPOINT,
            endpoints(2, 4, num_layers=3),
            "num_layers is 2 here and 3 on the peer",
        ),
        (
            LOCAL_ENDPOINT,
            endpoints(2, 4, num_components=1),
            "num_components is 2 here and 1 on the peer",
        ),
        (
            LOCAL_ENDPOINT,
            endpoints(2, 4, head_dim=16),
            "head_dim is 8 here and 16 on the peer",
        ),
        (
            LOCAL_ENDPOINT,
            endpoints(2, 4, dtype="bfloat16"),
            "KV dtype is float32 here and bfloat16 on the",
        ),
        (
            LOCAL_ENDPOINT,
            endpoints(2, 6),
            "num_heads is 3 on rank 0; with 4 KV heads and tp 2 it must be 2",
        ),
        (
            LOCAL_ENDPOINT,
            [endpoints(2, 4)[0], endpoints(2, 4, block_size=32)[1]],
            "ranks 0 and 1 differ in block_size: 16 and 32",
        ),
    ],
)
def test_incompatible_endpoints_are_refused(local, peer, message):
    with pytest.raises(PlanError, match=message):
        check_endpoints(local, peer, 4)
