"""Pulls through staging memory, also while other pulls read directly."""

from typing import Any

import pytest

from kvcache.transfer import job as pull_job
from kvcache.transfer.agent import PostLimits
from kvcache.transfer.move import place as placing
from kvcache.transfer.pulls.messages import PullDone, PullDrained, PullFailed, PullStuck
from tests.rigs.memory_agent import MemoryAgent
from tests.rigs.memory_pair import (
    ENDINGS,
    HEADS,
    PATIENT,
    Decode,
    Prefill,
    assert_pulled,
    layout,
    nixl_agent,
)


@pytest.mark.parametrize(("tp", "count"), [(2, 5), (1, 48)])
@pytest.mark.parametrize("make_agent", [MemoryAgent, nixl_agent])
def test_pulls_share_one_small_buffer_and_none_fails(rig, make_agent, tp, count):
    prefill = rig(Prefill, make_agent, order="LBCNHD", block_size=16, num_blocks=512)
    staging_bytes = 2 * 16 * layout().token_bytes  # for two blocks of P
    decode = rig(Decode, make_agent, tp=tp, staging_bytes=staging_bytes, num_blocks=512)
    pulls = {}
    for index in range(count):
        remote = prefill.lease([3 * index + 1, 3 * index + 3, 3 * index + 2], 41)
        blocks = [6 * index + 1 + i for i in (5, 1, 4, 0, 2, 3)]
        pulls[str(index)] = (remote, blocks)
        decode.coordinator.pull(str(index), remote, 3, 41, blocks)
    for pull_id, (remote, blocks) in pulls.items():
        done = decode.done(pull_id)
        assert done.path == "staged", done
        assert_pulled(decode, remote, blocks, 3, 41)
    assert prefill.outcomes(count) == ["completed"] * count


@pytest.mark.parametrize(
    ("p_tp", "d_tp"), [(1, 1), (1, 2), (2, 1), (2, 2), (4, 2), (1, 4), (8, 1)]
)
@pytest.mark.parametrize("make_agent", [MemoryAgent, nixl_agent])
def test_every_rank_gets_its_heads_and_a_partial_block_is_one_descriptor(
    rig, make_agent, p_tp, d_tp
):
    prefill = rig(Prefill, make_agent, tp=p_tp)
    decode = rig(Decode, make_agent, tp=d_tp, staging_bytes=1 << 20)
    remote = prefill.lease([5, 2, 9], 21)
    done = decode.pull("a", remote, 0, 21, [3, 1, 7])
    assert done.path == "direct", done
    assert done.num_descriptors == 3 * min(max(p_tp, d_tp), HEADS)


def _hung_owner(rig: Any, monkeypatch: Any) -> tuple[Prefill, Decode]:
    """Makes a decode side on which a pull with hanging READs owns the staging memory.

    Returns:
        A prefill side from which READs do not hang, and the decode side.
    """
    monkeypatch.setattr(pull_job, "HANGS_S", 0.05)
    hung = rig(Prefill, engine_id="hung", order="LBCNHD", block_size=16)
    other = rig(Prefill, order="LBCNHD", block_size=16, num_blocks=64)
    settings = {"drain_grace_s": 0.05}
    decode = rig(Decode, staging_bytes=2 * 16 * layout().token_bytes, settings=settings)
    decode.agents[0].stall(hung.agents[0].name)
    remote = hung.lease([1, 3, 2], 41)
    decode.coordinator.pull("hung", remote, 3, 41, [6, 2, 5, 1, 3, 4])
    decode.until(lambda: decode.agents[0].active)
    return other, decode


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_hanging_owner_of_staging_memory_blocks_no_other_peer(
    rig, monkeypatch, is_cancelled
):
    other, decode = _hung_owner(rig, monkeypatch)
    if is_cancelled:
        decode.coordinator.cancel("hung")
        assert isinstance(decode.wait(PullStuck), PullStuck)
    pulls = {}
    for number in range(3):
        remote = other.lease([5 * number + i for i in (5, 1, 3)], 41)
        blocks = [7 + 6 * number + i for i in (5, 1, 4, 0, 2, 3)]
        pulls[str(number)] = remote, blocks
        decode.coordinator.pull(str(number), remote, 3, 41, blocks)
    for pull_id, (remote, blocks) in pulls.items():
        decode.done(pull_id)
        assert_pulled(decode, remote, blocks, 3, 41)
    decode.agents[0].resume()
    assert isinstance(decode.wait(*ENDINGS), PullDrained if is_cancelled else PullDone)
    decode.pull("last", other.lease([9, 2], 32), 0, 32, [9, 12, 10, 11])


def test_pull_that_waits_for_a_hanging_peer_does_not_block_staging_memory(
    rig, monkeypatch
):
    monkeypatch.setattr(pull_job, "HANGS_S", 0.05)
    hung = rig(Prefill, engine_id="hung", order="LCBNHD")
    other = rig(Prefill)
    limits = PostLimits(max_bytes=64, max_runs=1, max_active=2)
    decode = rig(Decode, staging_bytes=1 << 16, limits=limits, order="LCBNHD")
    decode.agents[0].stall(hung.agents[0].name)
    decode.coordinator.pull("direct", hung.lease([5, 6], 16), 0, 16, [3, 4])
    decode.until(lambda: decode.agents[0].active >= 2)
    decode.coordinator.pull("staged", hung.lease([7, 8], 16), 0, 16, [6, 5])
    decode.until(lambda: decode.workers[0]._rank.staging.owner == "staged")
    decode.pull("a", other.lease([5, 2, 9], 21), 0, 21, [1, 2, 7])
    decode.agents[0].resume()
    assert {decode.wait(PullDone).pull_id for _ in range(2)} == {"direct", "staged"}


def test_pull_fails_soon_if_a_hanging_pull_owns_the_staging_memory(rig, monkeypatch):
    monkeypatch.setattr(pull_job, "HANGS_S", 0.05)
    options: dict[str, Any] = {"order": "LBCNHD", "block_size": 16, "dtype": "bfloat16"}
    hung = rig(Prefill, engine_id="hung", **options)
    other = rig(Prefill, **options)
    decode = rig(Decode, staging_bytes=1 << 18, convert=True, settings=PATIENT)
    decode.agents[0].stall(hung.agents[0].name)
    decode.coordinator.pull("hung", hung.lease([1, 3], 32), 0, 32, [6, 2, 5, 1])
    decode.until(lambda: decode.agents[0].active)
    decode.coordinator.cancel("hung")
    remote = other.lease([1, 3], 32)
    decode.coordinator.pull("a", remote, 0, 32, [7, 8, 9, 10])
    assert "staging memory" in decode.wait_for_error("a").message
    decode.agents[0].resume()
    assert decode.wait(PullDrained) == PullDrained("hung")
    decode.coordinator.pull("b", other.lease([1, 3], 32), 0, 32, [7, 8, 9, 10])
    decode.done("b")


def test_failed_copy_fails_the_pull(rig, monkeypatch):
    prefill = rig(Prefill, order="LBCNHD")
    decode = rig(Decode, staging_bytes=1 << 20)

    def fail_to_place(*args: Any) -> None:
        raise RuntimeError("the copy broke")

    monkeypatch.setattr(placing, "place", fail_to_place)
    decode.coordinator.pull("a", prefill.lease([5, 2, 9], 24), 0, 24, [3, 1, 7])
    failed = decode.wait(PullFailed)
    assert "the copy broke" in failed.error.message
    monkeypatch.undo()
    remote = prefill.lease([5, 2, 9], 24)
    decode.coordinator.pull("b", remote, 0, 24, [3, 1, 7])
    assert isinstance(decode.wait(PullDone, PullFailed), PullDone)
    assert_pulled(decode, remote, [3, 1, 7], 0, 24)
