"""Prefill servers whose pulls fail or hang get no more of them, for a while."""

from kvcache.transfer.pulls.messages import PeerFailed, PullDrained, PullFailed
from protocol.errors import PeerUnreachable, PullWithheld, TransferFailed
from tests.rigs.memory_pair import ENDINGS, Decode, Prefill, assert_pulled


def test_a_peer_whose_reads_hang_gets_no_pull_until_they_have_ended(rig):
    prefill, decode = rig(Prefill), rig(Decode, settings={"drain_grace_s": 0.01})
    remote = prefill.lease([5], 8)
    decode.agents[0].stall()
    decode.coordinator.pull("hung", remote, 0, 8, [3])
    decode.until(lambda: decode.agents[0].active)
    decode.skip(30.0)
    assert not decode.wait(PullFailed).drained
    other = prefill.lease([6], 8)
    assert decode.coordinator.knows(other) is False
    decode.coordinator.connect(other)
    assert isinstance(decode.wait(PeerFailed).error, PullWithheld)
    decode.coordinator.pull("other", other, 0, 8, [4])
    withheld = decode.wait(*ENDINGS)
    assert isinstance(withheld, PullFailed) and withheld.drained
    assert isinstance(withheld.error, PullWithheld) and "hang" in withheld.error.message
    decode.agents[0].resume()
    assert decode.wait(PullDrained) == PullDrained("hung")
    decode.pull("again", prefill.lease([7], 8), 0, 8, [4])


def test_a_peer_that_fails_twice_is_tried_again_later_by_one_pull(rig, caplog):
    prefill, decode = rig(Prefill), rig(Decode, settings={"backoff_min_s": 100.0})
    decode.pull("a", prefill.lease([5], 8), 0, 8, [3])
    for number in range(2):
        decode.agents[0].fail()
        decode.coordinator.pull(f"fails {number}", prefill.lease([5], 8), 0, 8, [3])
        failed = decode.wait(*ENDINGS)  # its READ, or one at first contact with the next link
        assert isinstance(failed.error, TransferFailed | PeerUnreachable)
    told = [line for line in caplog.records if line.name.endswith("coordinator")]
    assert [("UCX_TCP_PORT_RANGE" in line.message) for line in told].count(True) == 1
    for number in range(2):
        lease = prefill.lease([5], 8)
        decode.coordinator.pull(f"withheld {number}", lease, 0, 8, [3])
        assert isinstance(decode.wait(*ENDINGS).error, PullWithheld)
    decode.skip(100.0)
    decode.agents[0].stall()
    decode.coordinator.pull("trial", trial := prefill.lease([6], 8), 0, 8, [3])
    decode.until(lambda: decode.agents[0].active)
    decode.coordinator.pull("beside", prefill.lease([7], 8), 0, 8, [4])
    assert isinstance(decode.wait(*ENDINGS, pull_id="beside").error, PullWithheld)
    decode.agents[0].resume()
    decode.done()
    assert_pulled(decode, trial, [3], 0, 8)
    decode.pull("trusted", prefill.lease([7], 8), 0, 8, [4])
