"""References that are lent: who sent them ends their leases, or offers them to another engine."""

from typing import Any

import msgspec

from kvcache.transfer.pulls.messages import PullDone
from tests.rigs.memory_pair import ENDINGS, Decode, Prefill


def test_an_engine_that_ends_leaves_lent_leases_that_it_has_not_read_to_others(rig: Any) -> None:
    prefill, ending, other = rig(Prefill), rig(Decode), rig(Decode)
    remotes = [prefill.lease([block], 8) for block in (5, 6, 7)]
    read, queued = (msgspec.structs.replace(r, sender_releases=True) for r in remotes[:2])
    ending.agents[0].stall()
    ending.coordinator.pull("read", read, 0, 8, [3])
    while not ending.agents[0].active:
        ending.woken.wait(0.01)
    ending.coordinator.hold("queued", queued)
    ending.coordinator.hold("its own", remotes[2])
    ending.settle()
    ending.coordinator.close()
    assert prefill.outcomes(2) == ["aborted", "aborted"]
    assert prefill.server.counters()["held"] == 1
    other.coordinator.pull("queued", queued, 0, 8, [4])
    assert isinstance(other.wait(*ENDINGS), PullDone)
    assert prefill.outcomes() == ["completed"]
    ending.agents[0].resume()
