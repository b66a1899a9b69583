"""The link to a peer is connected and measured before the first pull from it is
planned.
"""

import logging
from typing import Any

import pytest

from kvcache.transfer.move.place import Placer
from kvcache.transfer.plan.block_copy import Transfer
from kvcache.transfer.plan.cost import CostModel
from kvcache.transfer.plan.plan import Planner
from kvcache.transfer.pulls.messages import PullDrained, PullFailed
from protocol.errors import PeerUnreachable
from tests.rigs.memory_agent import MemoryAgent
from tests.rigs.memory_pair import (
    DEADLINE_S,
    ENDINGS,
    Decode,
    Prefill,
    nixl_agent,
    pulled,
)

BLOCK_TABLE = [3, 1, 7]


def measured(decode: Decode) -> Any:
    """Returns the measured costs of the only peer, or None if it was not measured."""
    (peer,) = decode.workers[0]._peers.values()
    return peer.link.costs if peer.link else None


@pytest.fixture
def costs_of_plans(monkeypatch: Any) -> list[CostModel]:
    """A list to which the costs of each plan are appended."""
    used_costs: list[CostModel] = []
    plan = Planner.plan

    def record_plan(planner: Planner, transfer: Transfer, costs: CostModel) -> Any:
        used_costs.append(costs)
        return plan(planner, transfer, costs)

    monkeypatch.setattr(Planner, "plan", record_plan)
    return used_costs


def stalled_probe(
    rig: Any, pull_ids: list[str], **options: Any
) -> tuple[Prefill, Decode]:
    """Returns both sides. D has pulls that wait for a probe. The probe hangs until
    `resume` of D's agent is called.
    """
    prefill = rig(Prefill)
    decode = rig(Decode, staging_bytes=4 << 20, **options)
    decode.agents[0].stall()
    for number, pull_id in enumerate(pull_ids):
        block = 3 * number + 1
        remote = prefill.lease([block, block + 1, block + 2], 20)
        decode.coordinator.pull(pull_id, remote, 0, 20, [block, block + 1, block + 2])
    decode.until(lambda: decode.agents[0].active)  # the probe has begun
    return prefill, decode


def test_pull_that_waits_for_the_probe_can_be_cancelled(rig):
    _, decode = stalled_probe(rig, ["a", "b"], connect_timeout_s=DEADLINE_S)
    decode.coordinator.cancel("a")
    decode.wait(PullDrained, pull_id="a")
    decode.agents[0].resume()
    decode.done("b")
    assert decode.settle() == []


def test_peer_with_an_unanswered_probe_is_unreachable_until_it_answers(rig):
    prefill, decode = stalled_probe(rig, ["a"], connect_timeout_s=0.05)
    failed = decode.wait(*ENDINGS, pull_id="a")
    # The pull is drained, because it had posted no READ.
    assert isinstance(failed, PullFailed) and failed.drained
    assert isinstance(failed.error, PeerUnreachable)
    (peer,) = decode.workers[0]._peers.values()
    decode.until(lambda: peer.link is None or peer.link.is_closing)
    decode.agents[0].resume()
    while peer.link is not None:  # until the link is closed
        decode.has_event.wait(0.001)
    decode.workers[0]._rank.connect_timeout_s = DEADLINE_S
    pulled(decode, prefill, "b", BLOCK_TABLE)


@pytest.mark.parametrize("make_agent", [MemoryAgent, nixl_agent])
def test_costs_are_measured_and_logged_once_and_used_for_plans(
    rig, make_agent, costs_of_plans, caplog
):
    caplog.set_level(logging.INFO)
    prefill = rig(Prefill, make_agent)
    decode = rig(Decode, make_agent, staging_bytes=4 << 20)
    decode.fill(-1.0)
    pulled(decode, prefill, "a", BLOCK_TABLE)
    # Measuring writes nothing into the pool.
    assert decode.is_only_written_at(BLOCK_TABLE, 0, 24)
    costs = measured(decode)
    assert costs is not None
    assert 1e-9 < costs.per_descriptor_s < 0.1 and 1e5 < costs.bytes_per_s < 1e14
    pulled(decode, prefill, "b", BLOCK_TABLE)
    assert costs_of_plans == [costs] * 2
    lines = [r.message for r in caplog.records if "us per descriptor" in r.message]
    assert len(lines) == 1 and "prefill server P" in lines[0] and "placing" in lines[0]
    assert decode.settle() == []


def test_configured_costs_are_logged_and_used_without_measuring(
    rig, costs_of_plans, caplog
):
    caplog.set_level(logging.INFO)
    costs = CostModel.configured((3, 8, 7), "cpu")
    prefill = rig(Prefill)
    decode = rig(Decode, staging_bytes=4 << 20, costs=costs)
    pulled(decode, prefill, "a", BLOCK_TABLE)
    assert costs_of_plans == [costs] and measured(decode) is None
    assert (
        "costs of every link: 3.00 us per descriptor, 8.00 GB/s, placing 7.00 GB/s"
        in caplog.text
    )


def test_failing_probe_fails_only_the_pulls_that_wait_for_it(rig):
    prefill = rig(Prefill)
    decode = rig(Decode, staging_bytes=4 << 20)
    decode.agents[0].stall()
    decode.agents[0].fail()
    decode.coordinator.pull("a", prefill.lease([5, 2, 9], 20), 0, 20, [3, 1, 7])
    decode.until(lambda: decode.workers[0]._jobs)
    decode.agents[0].resume()
    failed = decode.wait(*ENDINGS, pull_id="a")
    assert isinstance(failed, PullFailed) and isinstance(failed.error, PeerUnreachable)
    assert "UCX_NET_DEVICES" in failed.error.message
    pulled(decode, prefill, "b", BLOCK_TABLE)


@pytest.mark.parametrize(
    "options",
    [{}, {"staging_bytes": 1 << 16}, {"staging_bytes": 4 << 20, "make_placer": Placer}],
)
def test_nothing_is_measured_with_little_staging_memory_or_mapped_peers(rig, options):
    prefill = rig(Prefill)
    decode = rig(Decode, **options)
    pulled(decode, prefill, "a", BLOCK_TABLE)
    assert measured(decode) is None
    assert bool(decode.workers[0]._rank.links) is ("make_placer" not in options)
