"""Pulls with decode context parallelism (DCP): the ranks of D share a sequence's
tokens.
"""

from typing import Any

import numpy as np
import pytest
import torch

from kvcache import fp8
from kvcache.transfer.move.place import Placer
from kvcache.transfer.plan.cost import CostModel
from tests.rigs.memory_agent import MemoryAgent
from tests.rigs.memory_pair import (
    LAYERS,
    Decode,
    Prefill,
    assert_pulled,
    expected,
    nixl_agent,
)

SHARED = [(2, 2), (4, 2), (4, 4)]  # tp and dcp of D
MODELS = [{"heads": 1, "num_components": 1}, {"heads": 2}, {"heads": 8}]  # MLA, GQA
STAGE = CostModel(1e-3, 1e12, 1e15)  # expensive descriptors, so that pulls are staged


def table(tokens: int, size: int, max_id: int = 31) -> list[int]:
    """Returns a table of scattered blocks for this many tokens, with ids from 1 to
    `max_id`.
    """
    ids = np.random.default_rng(tokens).permutation(np.arange(1, max_id + 1))
    return ids[: -(-tokens // size)].tolist()


class SmallLaunches(Placer):
    launch_bytes = 4096


def check_pulls(
    prefill: Prefill, decode: Decode, token_ranges: list[tuple[int, int]], paths: str
) -> None:
    """Pulls token ranges, one after the other, and checks every byte. `paths` has the
    names of the allowed paths, separated by spaces.
    """
    sizes = [side.layouts[0].block_size for side in (prefill, decode)]
    for start, stop in token_ranges:
        remote = prefill.lease(table(stop, sizes[0]), stop)
        blocks = table(stop, sizes[1] * decode.dcp, 9)
        decode.fill(-1.0)
        done = decode.pull(f"{start}-{stop}", remote, start, stop, blocks)
        assert done.path in paths.split(), done
        assert decode.is_only_written_at(blocks, start, stop)
        layout = decode.layouts[0]
        copies = max(decode.tp // decode.dcp // decode.heads, 1)
        bytes_per_token = (
            LAYERS * layout.num_components * layout.head_dim * 4 * decode.heads * copies
        )
        # In a DCP group, every token is sent to one rank only.
        assert done.nbytes == (stop - start) * bytes_per_token
    assert prefill.outcomes(len(token_ranges)) == ["completed"] * len(token_ranges)


def token_ranges_of(tokens_per_block: int) -> list[tuple[int, int]]:
    """Returns token ranges (start, stop): a part of a block, a part of a stripe,
    complete blocks, ranges with odd ends, and ranges after a prefix hit.
    """
    whole = 2 * tokens_per_block
    return [
        (0, 3),
        (0, tokens_per_block - 1),
        (0, whole + 5),
        (0, whole),
        (tokens_per_block, whole + 7),
    ]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("tp", "dcp"), SHARED)
@pytest.mark.parametrize("p_tp", [1, 2, 4])
def test_every_rank_gets_its_tokens_of_its_heads(rig, p_tp, tp, dcp, model):
    prefill = rig(Prefill, tp=p_tp, **model)
    decode = rig(Decode, tp=tp, dcp=dcp, block_size=16, **model)
    check_pulls(prefill, decode, token_ranges_of(16 * dcp), "direct")


@pytest.mark.parametrize(("p_size", "d_size"), [(16, 16), (16, 32), (8, 24)])
@pytest.mark.parametrize(
    ("p_order", "d_order"), [("LBCNHD", "BHLCND"), ("BLCNHD", "LCBHND")]
)
@pytest.mark.parametrize("path", ["direct", "staged", "mapped"])
def test_any_layout_by_any_path(rig, path, p_order, d_order, p_size, d_size):
    options_by_path: dict[str, dict[str, Any]] = {
        "direct": {},
        "staged": {"staging_bytes": 1 << 20, "costs": STAGE},
        "mapped": {"make_placer": SmallLaunches},
    }
    prefill = rig(Prefill, tp=2, order=p_order, block_size=p_size)
    options = {"order": d_order, "block_size": d_size, **options_by_path[path]}
    decode = rig(Decode, tp=4, dcp=2, **options)
    check_pulls(prefill, decode, token_ranges_of(2 * d_size), path)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("costs", [None, STAGE])
def test_any_layout_over_nixl(rig, model, costs):
    prefill = rig(Prefill, nixl_agent, tp=2, order="LBCNHD", block_size=16, **model)
    staging_bytes = 1 << 20 if costs else None
    options = {"block_size": 32, "staging_bytes": staging_bytes, "costs": costs}
    decode = rig(Decode, nixl_agent, tp=4, dcp=4, **options, **model)
    check_pulls(prefill, decode, token_ranges_of(128), "direct staged")


@pytest.mark.parametrize("make_placer", [None, SmallLaunches])
def test_dtype_and_scales_are_converted(rig, make_placer):
    prefill = rig(Prefill, tp=2)
    scales = tuple(float(2**index) * 1e4 for index in range(LAYERS * 2))
    options = (
        {"make_placer": make_placer} if make_placer else {"staging_bytes": 1 << 20}
    )
    decode = rig(
        Decode,
        tp=4,
        dcp=2,
        dtype="float8_e4m3fn",
        scales=scales,
        convert=True,
        **options,
    )
    remote = prefill.lease(table(53, 8), 53)
    blocks = table(53, 16, 9)
    decode.fill(-1.0)
    decode.coordinator.pull("a", remote, 16, 53, blocks)
    decode.done()
    stored = expected(remote, 16, 53) / np.array(scales).reshape(LAYERS, 2, 1)
    expected_values = fp8.to_stored(
        torch.from_numpy(stored.astype(np.float32)), torch.float8_e4m3fn
    )
    np.testing.assert_array_equal(
        decode.tokens(blocks, 16, 53), expected_values.float().numpy()
    )
    assert decode.is_only_written_at(blocks, 16, 53)


def test_a_rank_without_a_token_ends_at_once(rig):
    """The first rank of each DCP group has all three tokens, so the other ranks have
    nothing to read.
    """
    prefill = rig(Prefill)
    decode = rig(Decode, MemoryAgent, tp=4, dcp=2)
    for agent in decode.agents[::2]:
        agent.stall()
    remote = prefill.lease([5], 3)
    decode.coordinator.pull("a", remote, 0, 3, [4])
    decode.until(lambda: [len(state._reports) for state in decode.pulls()] == [2])
    assert decode.settle() == []
    for agent in decode.agents[::2]:
        agent.resume()
    done = decode.done()
    assert done.path == "direct", done
    assert_pulled(decode, remote, [4], 0, 3)
    assert [worker.counters["posts"] > 0 for worker in decode.workers] == [
        True,
        False,
    ] * 2
    assert prefill.outcomes() == ["completed"]
