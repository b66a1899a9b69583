"""Pulls that are cancelled in any phase, and engines that close with open pulls."""

import msgspec
import pytest

from kvcache.transfer.agent import PostLimits
from kvcache.transfer.pulls.messages import PullDone, PullDrained
from tests.rigs.memory_agent import MemoryAgent
from tests.rigs.memory_pair import ENDINGS, PATIENT, Decode, Prefill, nixl_agent


def test_cancel_during_a_read_waits_for_the_read_and_posts_nothing_more(rig):
    limits = PostLimits(max_bytes=64, max_runs=1, max_active=2)
    prefill = rig(Prefill)
    decode = rig(Decode, limits=limits)
    decode.agents[0].stall()
    decode.coordinator.pull("a", prefill.lease([5, 6], 16), 0, 16, [3, 4])
    decode.until(lambda: decode.agents[0].active >= 2)
    decode.coordinator.cancel("a")
    assert decode.settle() == [] and prefill.server.counters()["held"] == 1
    job, *_ = decode.workers[0]._jobs.values()
    decode.until(lambda: job.is_stopping)  # the rank has received the command
    decode.agents[0].resume()
    assert decode.wait(*ENDINGS) == PullDrained("a")
    assert prefill.outcomes() == ["aborted"]
    assert decode.workers[0].counters["posts"] == 2
    assert decode.settle() == []


def test_cancel_of_an_ended_or_unknown_pull_is_answered_once(rig):
    prefill = rig(Prefill)
    decode = rig(Decode)
    decode.pull("a", prefill.lease([5], 8), 0, 8, [3])
    for pull_id in ("a", "never seen"):
        decode.coordinator.cancel(pull_id)
        assert decode.wait(*ENDINGS) == PullDrained(pull_id)
        decode.coordinator.cancel(pull_id)
        assert decode.settle() == []


@pytest.mark.parametrize("make_agent", [MemoryAgent, nixl_agent])
def test_every_cancelled_pull_ends_in_one_drained_event(rig, make_agent):
    limits = PostLimits(max_bytes=4096, max_runs=2, max_active=2)
    prefill = rig(Prefill, make_agent, num_blocks=256)
    # PATIENT, because otherwise PullStuck may precede PullDrained on busy machines.
    decode = rig(
        Decode, make_agent, tp=2, limits=limits, num_blocks=256, settings=PATIENT
    )
    for index in range(40):
        remote = prefill.lease(list(range(1, 33)), 256)
        decode.coordinator.hold(str(index), remote)
        decode.coordinator.pull(str(index), remote, 0, 256, list(range(1, 33)))
        decode.has_event.wait(0.0002 * index)
        decode.coordinator.cancel(str(index))
        while not isinstance(
            event := decode.wait(*ENDINGS, pull_id=str(index)), PullDrained
        ):
            assert isinstance(event, PullDone)  # the pull had ended before the cancel
        assert [
            e for e in decode.settle() if getattr(e, "pull_id", "") == str(index)
        ] == []
    assert set(prefill.outcomes(40)) <= {"aborted", "completed"}
    assert prefill.server.counters()["held"] == 0


def test_closing_engine_does_not_abort_untouched_lent_leases(rig):
    prefill = rig(Prefill)
    ending = rig(Decode)
    other = rig(Decode)
    remotes = [prefill.lease([block], 8) for block in (5, 6, 7)]
    read, queued = (
        msgspec.structs.replace(r, sender_releases=True) for r in remotes[:2]
    )
    ending.agents[0].stall()
    ending.coordinator.pull("read", read, 0, 8, [3])
    ending.until(lambda: ending.agents[0].active)
    ending.coordinator.hold("queued", queued)
    ending.coordinator.hold("its own", remotes[2])
    ending.settle()
    ending.close()
    ending.close = lambda: None
    assert prefill.outcomes(2) == ["aborted", "aborted"]
    assert prefill.server.counters()["held"] == 1
    other.pull("queued", queued, 0, 8, [4])
    assert prefill.outcomes() == ["completed"]
    ending.agents[0].resume()
