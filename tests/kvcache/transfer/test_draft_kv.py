"""The KV of a drafter is pulled with the model's KV, for any pair of geometries."""

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from kvcache.transfer.plan.endpoint import heads_of
from protocol.errors import PeerIncompatible
from protocol.handshake import DraftKV
from protocol.messages import RemotePrefill
from tests.rigs.memory_agent import MemoryAgent
from tests.rigs.memory_pair import Decode, Prefill, assert_pulled, nixl_agent, value
from tests.rigs.memory_placer import MemoryPlacer

TWO_HEADS = {"heads": 2}


def draft_kv(
    decode: Decode, heads: int, blocks: list[int], start: int, stop: int
) -> Any:
    """Return the draft KV in D's pools: [token, head, component, element]."""
    rows = []
    for token in range(start, stop):
        by_head: dict[int, Any] = {}
        for rank, pool in enumerate(decode.draft_pools):
            assert pool is not None
            size = pool.layout.block_size
            block = blocks[token // size]
            for index, head in enumerate(heads_of(rank, decode.tp, heads)):
                stored = pool.canonical[block, index, 0, :, token % size]
                by_head[head] = stored.numpy()
        rows.append([by_head[head] for head in range(heads)])
    return np.array(rows)


def expected_kv(
    prefill: Prefill, heads: int, remote: RemotePrefill, start: int, stop: int
) -> Any:
    """Return the draft KV in P's pool: [token, head, component, element]."""
    size = remote.block_size
    token, head, component, element = np.meshgrid(
        np.arange(start, stop),
        np.arange(heads),
        np.arange(2),
        np.arange(4),
        indexing="ij",
    )
    block = np.array(remote.block_ids)[token // size]
    return value(head, 0, component, block, token % size, element)


@pytest.mark.parametrize(
    ("p_options", "d_options", "heads"),
    [
        ({}, {}, 2),
        ({"tp": 2, "block_size": 4}, {"order": "LBCNHD"}, 2),
        ({"order": "BLCHND"}, {"tp": 2, "block_size": 2}, 2),
        ({"tp": 4}, {"tp": 2, "order": "LCBHND"}, 1),
        ({"tp": 2, "order": "LBCHND"}, {"tp": 4, "block_size": 16}, 3),
    ],
    ids=["equal", "ranks and order", "blocks", "copied heads", "uneven heads"],
)
@pytest.mark.parametrize("path", ["direct", "staged", "mapped", "nixl", "converted"])
def test_draft_kv_is_pulled_with_the_kv_of_the_model(
    rig, p_options, d_options, heads, path
):
    if path == "converted":
        # Only the model's KV is converted.
        d_options = {**d_options, "dtype": "float16", "convert": True}
    if path in ("staged", "converted"):
        d_options = {**d_options, "staging_bytes": 1 << 16}
    if path == "mapped":
        d_options = {**d_options, "make_placer": MemoryPlacer}
    make_agent = nixl_agent if path == "nixl" else MemoryAgent
    drafter = {"heads": heads}
    prefill = rig(Prefill, make_agent, drafter=drafter, **p_options)
    decode = rig(Decode, make_agent, drafter=drafter, **d_options)
    size = prefill.layouts[0].block_size
    table = [5, 2, 9, 30, 11, 4][: -(-20 // size)]
    remote = prefill.lease(table, 20)
    blocks = [3, 1, 7, 8, 12, 21, 22, 23, 24, 25]
    decode.coordinator.hold("a", remote)
    decode.coordinator.pull("a", remote, 3, 19, blocks)
    decode.done("a")
    if path != "converted":
        assert_pulled(decode, remote, blocks, 3, 19)
    np.testing.assert_array_equal(
        draft_kv(decode, heads, blocks, 3, 19),
        expected_kv(prefill, heads, remote, 3, 19),
    )


@pytest.mark.parametrize(
    "drafter", [None, {"heads": 2, "fingerprint": "other"}, {"heads": 4}]
)
def test_draft_kv_of_another_drafter_is_not_pulled(rig, drafter):
    prefill = rig(Prefill, drafter=drafter)
    decode = rig(Decode, drafter=TWO_HEADS)
    remote = prefill.lease([5, 2, 9], 20)
    decode.pull("a", remote, 0, 20, [3, 1, 7])
    assert not draft_kv(decode, 2, [3, 1, 7], 0, 20).any()
    assert not decode.coordinator.shares_draft_kv(remote)


def test_pull_may_leave_out_draft_kv(rig):
    prefill = rig(Prefill, drafter=TWO_HEADS)
    decode = rig(Decode, drafter=TWO_HEADS)
    remote = prefill.lease([5, 2, 9], 20)
    decode.coordinator.hold("a", remote)
    decode.coordinator.pull("a", remote, 0, 20, [3, 1, 7], has_draft_kv=False)
    done = decode.done("a")
    assert done.nbytes == 20 * decode.layouts[0].token_bytes
    assert_pulled(decode, remote, [3, 1, 7], 0, 20)
    assert not draft_kv(decode, 2, [3, 1, 7], 0, 20).any()


def test_engine_without_a_drafter_pulls_from_one_that_has_one(rig):
    prefill = rig(Prefill, drafter=TWO_HEADS)
    decode = rig(Decode)
    done = decode.pull("a", prefill.lease([5, 2, 9], 20), 0, 20, [3, 1, 7])
    assert done.nbytes == 20 * decode.layouts[0].token_bytes


@pytest.mark.parametrize(
    ("edit", "field"),
    [
        ({"draft": None}, "draft"),
        ({"base": 0}, "base"),
        ({"base": 1 << 40}, "base"),
        ({"num_blocks": 1 << 20}, "size in bytes"),
        ({"num_heads": 0}, "num_heads"),
        ({"num_blocks": 1}, "num_blocks"),
        ({"block_size": 1}, "block_size"),
    ],
)
def test_draft_pool_outside_of_the_memory_is_refused(rig, edit, field):
    def edited(metadata: Any) -> Any:
        (rank,) = metadata.ranks
        draft = rank.draft
        if "draft" in edit:
            draft = None
        elif "base" in edit:
            draft = replace(draft, **edit)
        else:
            draft = replace(draft, layout=replace(draft.layout, **edit))
        return replace(metadata, ranks=[replace(rank, draft=draft)])

    prefill = rig(Prefill, drafter=TWO_HEADS, edit=edited)
    decode = rig(Decode, drafter=TWO_HEADS)
    remote = prefill.lease([5], 8)
    decode.coordinator.hold("a", remote)
    decode.coordinator.pull("a", remote, 0, 8, [3])
    error = decode.wait_for_error()
    assert isinstance(error, PeerIncompatible) and field in error.message


def test_drafters_of_one_fingerprint_with_unequal_layouts_share_nothing(rig):
    """No plan for the draft KV is possible. Pulls of the model's KV must not fail."""
    prefill = rig(Prefill, drafter={"heads": 2, "head_dim": 8})
    decode = rig(Decode, drafter=TWO_HEADS)
    decode.pull("a", prefill.lease([5], 8), 0, 8, [3])
    assert not draft_kv(decode, 2, [3], 0, 8).any()
    assert DraftKV(fingerprint="d", total_kv_heads=2) == prefill.metadata.draft
