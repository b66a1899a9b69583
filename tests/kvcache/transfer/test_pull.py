"""Pulls end to end: coordinator, workers, side channel and an agent, with every byte compared."""

import re
from typing import Any

import msgspec
import pytest

from kvcache.transfer.agent import ReadWindow
from kvcache.transfer.pulls.messages import (
    PeerDecided,
    PullDone,
    PullDrained,
    PullFailed,
    PullStuck,
)
from protocol.errors import (
    LeaseGone,
    PeerIncompatible,
    PeerUnreachable,
    PullCircuitOpen,
    PullTimeout,
    TransferFailed,
)
from protocol.handshake import Complete, Ok, open_request
from tests.rigs.memory_agent import MemoryAgent
from tests.rigs.memory_pair import (
    ENDINGS,
    PATIENT,
    SECRET,
    Decode,
    Prefill,
    assert_pulled,
    layout,
    nixl_agent,
    run_round,
)


@pytest.mark.parametrize("make_agent", [MemoryAgent, nixl_agent])
def test_a_pull_moves_the_bytes_and_ends_the_lease(rig, make_agent):
    prefill, decode = rig(Prefill, make_agent), rig(Decode, make_agent)
    remote = prefill.lease([5, 2, 9], 20)
    decode.coordinator.connect(remote)
    assert decode.wait(PeerDecided) == PeerDecided(("P", remote.incarnation))
    decode.coordinator.hold("a", remote)
    done = decode.pull("a", remote, 0, 20, [3, 1, 7])
    assert done.path == "direct" and done.nbytes == 20 * layout().token_bytes
    assert decode.pools[0].highest_block == 7
    assert prefill.outcomes() == ["completed"]
    assert decode.settle() == []
    assert decode.coordinator.counters()["pulls_open"] == 0


def test_nothing_to_read_is_done_at_once_and_completes_the_lease(rig):
    prefill, decode = rig(Prefill), rig(Decode)
    remote = prefill.lease([5, 2, 9], 24)
    decode.coordinator.hold("a", remote)
    decode.coordinator.pull("a", remote, 24, 24, [3, 1, 7])
    done = decode.wait(*ENDINGS)
    assert isinstance(done, PullDone) and (done.nbytes, done.path) == (0, "none")
    assert prefill.outcomes() == ["completed"]


def test_many_pulls_at_once_from_two_peers(rig):
    sides = [rig(Prefill, engine_id=name) for name in ("P", "Q")]
    decode = rig(Decode, tp=2, num_blocks=128)
    pulls = {}
    for index in range(24):
        remote = sides[index % 2].lease(
            [1 + index, 2 + index], 16, request_id=str(index)
        )
        blocks = [1 + 2 * index, 2 + 2 * index]
        pulls[str(index)] = (remote, blocks)
        decode.coordinator.hold(str(index), remote)
        decode.coordinator.pull(str(index), remote, 0, 16, blocks)
    for pull_id, (remote, blocks) in pulls.items():
        decode.done(pull_id)
        assert_pulled(decode, remote, blocks, 0, 16)
    decode.pull("later", sides[0].lease([1], 8), 0, 8, [60])
    for side in sides:
        assert side.server.counters()["metadata_sent"] == 1  # one handshake, shared
        assert set(side.outcomes(12)) == {"completed"}


def test_a_table_that_does_not_fit_reads_nothing_and_the_next_one_is_read(rig):
    """Between alike pulls, whose plan is remembered."""
    prefill, decode = rig(Prefill), rig(Decode)
    decode.pull("fits", prefill.lease([5, 2], 16), 0, 16, [3, 1])
    decode.fill(-1.0)
    for number, (table, told) in enumerate(
        (([4, 32], "block 32; the pool"), ([4], "has 1 blocks"))
    ):
        decode.coordinator.pull(f"{number}", prefill.lease([5, 2], 16), 0, 16, table)
        error = decode.failed()
        assert isinstance(error, PeerIncompatible) and told in error.message
    assert decode.is_only_written_at([], 0, 0)
    decode.pull("fits too", prefill.lease([5, 2], 16), 0, 16, [6, 4])


# -- the lease is gone


def test_renewals_keep_a_lease_past_its_length(rig):
    prefill, decode = rig(Prefill), rig(Decode)
    remote = prefill.lease([5, 2, 9], 24)
    decode.coordinator.hold("a", remote)
    for renewals in range(1, 7):  # a third of the lease each
        while prefill.server.counters()["renewed"] < renewals:
            assert prefill.server.drain_ended() == []
            prefill.ended.wait(0.01)
        for side in (prefill.clock, decode):
            side.skip(remote.lease_s / 3)
    decode.pull("a", remote, 0, 24, [3, 1, 7])


def test_a_lease_that_is_gone_is_noticed_while_the_pull_still_queues(rig):
    prefill, decode = rig(Prefill), rig(Decode)
    remote = msgspec.structs.replace(prefill.lease([5], 8), lease_id="0" * 32)
    decode.coordinator.hold("a", remote)
    assert isinstance(decode.failed(), LeaseGone)
    decode.coordinator.pull("a", remote, 0, 8, [3])
    assert decode.settle() == []
    decode.coordinator.cancel("a")
    assert decode.wait(*ENDINGS) == PullDrained("a")


@pytest.mark.parametrize("engine_id", ["P", "P after its restart"])
def test_a_restart_fails_over_and_serves_again(rig, port, engine_id):
    late = ("connection_timeout_s", "pull_timeout_s", "renew_interval_s")
    settings = dict.fromkeys(
        late, 1000.0
    )  # nothing else tells that the first one has gone
    first, decode = rig(Prefill, port=port), rig(Decode, settings=settings)
    old = first.lease([5], 8)
    decode.pull("a", old, 0, 8, [3])
    decode.agents[0].stall()
    decode.coordinator.pull("b", first.lease([6], 8), 0, 8, [4])
    first.close()
    second = rig(Prefill, port=port, engine_id=engine_id)
    fresh = second.lease([7], 8)
    decode.coordinator.pull("c", fresh, 0, 8, [5])
    failed = decode.wait(*ENDINGS, pull_id="b")
    assert isinstance(failed, PullFailed) and not failed.drained
    assert "restarted" in failed.error.message
    for number in range(2):  # told who is there once more, while "b" still drains
        decode.coordinator.connect(old)
        assert isinstance(decode.wait(PeerDecided).error, LeaseGone)
        decode.coordinator.pull(f"old {number}", old, 0, 8, [6])
        gone = decode.wait(*ENDINGS, pull_id=f"old {number}")
        assert isinstance(gone, PullFailed) and isinstance(gone.error, LeaseGone)
    decode.agents[0].resume()
    assert decode.wait(PullDrained) == PullDrained("b")
    decode.done("c")
    assert_pulled(decode, fresh, [5], 0, 8)


# -- the handshake


def edited(rank: Any = None, compat: Any = None, **changes: Any) -> dict[str, Any]:
    """A prefill side that tells these of itself, of its first rank and of what must be alike."""

    def edit(metadata: Any) -> Any:
        first, others = metadata.ranks[0], metadata.ranks[1:]
        told = {"ranks": [msgspec.structs.replace(first, **(rank or {})), *others]}
        told["compat"] = msgspec.structs.replace(metadata.compat, **(compat or {}))
        return msgspec.structs.replace(metadata, **told, **changes)

    return {"edit": edit}


def edited_layout(**changes: Any) -> dict[str, Any]:
    return edited({"layout": msgspec.structs.replace(layout(), **changes)})


SHARED = {"tp": 2, "dcp": 2}  # of D


@pytest.mark.parametrize(
    ("p", "d", "said"),
    [
        (edited(compat={"model_fingerprint": "other"}), {}, "model_fingerprint"),
        (edited(compat={"rope": '{"theta":1}'}), {}, "rope"),
        (edited({"nbytes": 100}), {}, "layout"),
        (edited_layout(num_blocks=1 << 20), {}, "layout"),
        (edited_layout(num_heads=3), {}, "num_heads"),
        (edited_layout(block_size=4), {}, "remote_block_size"),
        (
            {"block_size": 32},
            {**SHARED, "block_size": 16},
            r"^block_size: .*is 16 here and 32 on",
        ),
        (
            {"block_size": 24},
            {**SHARED, "block_size": 32},
            r"^block_size: .*--block-size 24",
        ),
        (edited(dcp_size=2), {}, r"dcp_size.* 2.*divide tp_size 1"),
    ],
)
def test_what_does_not_add_up_or_cannot_be_bridged_reads_nothing(rig, p, d, said):
    prefill, decode = rig(Prefill, **p), rig(Decode, **d)
    remote = prefill.lease([5], 8)
    decode.coordinator.pull("a", remote, 0, 8, [3])
    error = decode.failed()
    assert isinstance(error, PeerIncompatible)
    assert re.search(said, f"{error.param}: {error.message}")
    assert not any(pool.tensor.any() for pool in decode.pools)
    if said.startswith("^"):  # which the handshake shows
        assert all(worker.counters["posts"] == 0 for worker in decode.workers)
    assert prefill.outcomes() == ["aborted"]  # P has its blocks back at once


@pytest.mark.parametrize(
    ("block", "tp", "field"),
    [(layout().num_blocks, 1, "remote_block_ids"), (5, 2, "tp_size")],
)
def test_a_reference_unlike_its_peer_is_not_read(rig, block, tp, field):
    prefill, decode = rig(Prefill), rig(Decode)
    remote = msgspec.structs.replace(prefill.lease([block], 8), tp_size=tp)
    decode.coordinator.pull("a", remote, 0, 8, [3])
    failed = decode.wait(*ENDINGS)
    assert isinstance(failed.error, PeerIncompatible)
    assert failed.error.param == f"kv_transfer_params.{field}"


def test_another_secret_fails_the_handshake_at_once(rig):
    prefill, decode = rig(Prefill, secret=b"other"), rig(Decode)
    decode.coordinator.connect(prefill.lease([5], 8))
    failed = decode.wait(PeerDecided)
    assert (
        isinstance(failed.error, PeerUnreachable) and "secret" in failed.error.message
    )
    assert prefill.server.counters()["refused"] >= 1


def test_a_silent_address_times_out_and_is_remembered_for_a_while(rig, port):
    settings = {"handshake_timeout_s": 0.3, "backoff_min_s": 1000.0}
    prefill, decode = rig(Prefill, port=port), rig(Decode, settings=settings)
    remote = prefill.lease([5], 8)
    prefill.server.close()
    decode.coordinator.connect(remote)
    failed = decode.wait(PeerDecided)
    assert isinstance(failed.error, PeerUnreachable)
    assert "--side-channel-host" in failed.error.message
    rig(Prefill, port=port, incarnation=remote.incarnation)  # it is back, but not asked
    decode.coordinator.connect(remote)
    assert decode.wait(PeerDecided) == failed
    decode.coordinator.pull("a", remote, 0, 8, [3])
    assert decode.wait(*ENDINGS).error is failed.error


# -- reads that fail or do not end


def test_while_a_read_does_not_end_its_pull_is_undrained_and_its_peer_gets_no_other(
    rig,
):
    settings = {"pull_timeout_s": 100.0, "drain_grace_s": 0.05}
    prefill, decode = rig(Prefill), rig(Decode, tp=2, settings=settings)
    decode.agents[1].stall()
    decode.coordinator.pull("a", prefill.lease([5], 8), 0, 8, [3])
    decode.until(lambda: decode.agents[1].active)
    decode.skip(100.0)
    failed = decode.wait(*ENDINGS)
    assert isinstance(failed, PullFailed) and not failed.drained
    assert isinstance(failed.error, PullTimeout)
    assert decode.settle() == [] and decode.agents[1].active == 1
    other = prefill.lease([6], 8)
    assert decode.coordinator.can_pull_from(other) is False
    decode.coordinator.connect(other)
    assert isinstance(decode.wait(PeerDecided).error, PullCircuitOpen)
    decode.coordinator.pull("other", other, 0, 8, [4])
    withheld = decode.failed("other")
    assert isinstance(withheld, PullCircuitOpen) and "hang" in withheld.message
    assert prefill.outcomes() == ["aborted"]
    decode.agents[1].resume()
    assert decode.wait(*ENDINGS) == PullDrained("a")
    assert decode.agents[1].active == 0
    assert prefill.outcomes() == ["aborted"]
    decode.coordinator.cancel("a")
    assert decode.settle() == []  # never a second PullDrained
    decode.pull("again", prefill.lease([7], 8), 0, 8, [4])


def test_a_peer_that_fails_twice_is_tried_again_later_by_one_pull(rig, caplog):
    prefill, decode = rig(Prefill), rig(Decode, settings={"backoff_min_s": 100.0})
    decode.pull("a", prefill.lease([5], 8), 0, 8, [3])
    for number in range(2):
        decode.agents[0].fail()
        decode.coordinator.pull(f"fails {number}", prefill.lease([5], 8), 0, 8, [3])
        failed = decode.wait(
            *ENDINGS
        )  # its READ, or one at first contact with the next link
        assert isinstance(failed.error, TransferFailed | PeerUnreachable)
    told = [line for line in caplog.records if line.name.endswith("coordinator")]
    assert [("UCX_TCP_PORT_RANGE" in line.message) for line in told].count(True) == 1
    for number in range(2):
        lease = prefill.lease([5], 8)
        decode.coordinator.pull(f"withheld {number}", lease, 0, 8, [3])
        assert isinstance(decode.wait(*ENDINGS).error, PullCircuitOpen)
    decode.skip(100.0)
    decode.agents[0].stall()
    decode.coordinator.pull("trial", trial := prefill.lease([6], 8), 0, 8, [3])
    decode.until(lambda: decode.agents[0].active)
    decode.coordinator.pull("beside", prefill.lease([7], 8), 0, 8, [4])
    assert isinstance(decode.wait(*ENDINGS, pull_id="beside").error, PullCircuitOpen)
    decode.agents[0].resume()
    decode.done()
    assert_pulled(decode, trial, [3], 0, 8)
    decode.pull("trusted", prefill.lease([7], 8), 0, 8, [4])


def test_reads_that_hang_leave_others_room(rig):
    hung, other = rig(Prefill, engine_id="hung"), rig(Prefill)
    limits = ReadWindow(max_bytes=64, max_runs=1, max_active=2)
    decode = rig(Decode, limits=limits, settings={"drain_grace_s": 0.05})
    agent = decode.agents[0]
    agent.stall(hung.agents[0].name)
    decode.coordinator.pull("hung", hung.lease([5, 6], 16), 0, 16, [3, 4])
    decode.until(lambda: agent.active >= 2)
    remote = other.lease([6], 8)
    decode.pull("b", remote, 0, 8, [7])
    assert agent.active == 2  # so much at once from one peer
    decode.coordinator.cancel("hung")
    assert decode.wait(PullStuck) == PullStuck("hung")
    decode.coordinator.pull("c", remote := other.lease([7], 8), 0, 8, [1])
    assert isinstance(decode.wait(PullDone, PullFailed, pull_id="c"), PullDone)
    agent.resume()
    assert decode.wait(PullDrained) == PullDrained("hung")


@pytest.mark.parametrize(
    ("fence_s", "connection_s", "told"),
    [(0.1, 90.0, "did not confirm"), (90.0, 0.1, "cannot be connected to")],
)
def test_a_dead_side_channel_fails_the_fence(rig, fence_s, connection_s, told):
    settings = {
        "fence_timeout_s": fence_s,
        "connection_timeout_s": connection_s,
        **PATIENT,
    }
    prefill, decode = rig(Prefill), rig(Decode, settings=settings)
    decode.agents[0].stall()
    remote = prefill.lease([5], 8)
    decode.coordinator.pull("a", remote, 0, 8, [3])
    decode.until(lambda: decode.agents[0].active)
    prefill.server.close()
    decode.agents[0].resume()
    error = decode.failed()
    assert isinstance(error, PeerUnreachable) and told in error.message


def test_a_lost_answer_to_the_fence_is_asked_for_again(rig):
    prefill = rig(Prefill)
    decode = rig(Decode, settings={"fence_retry_s": 0.1})
    answer, asked = prefill.server._answer, []

    def lose_the_first(message: bytes, wire: Any) -> Any:
        reply, request = answer(message, wire), open_request(message, SECRET)
        if not isinstance(request, Complete):
            return reply
        asked.append(request.attempt_id)
        return reply if len(asked) > 1 else Ok(nonce="of somebody else")

    prefill.server._answer = lose_the_first
    decode.pull("a", prefill.lease([5], 8), 0, 8, [3])
    decode.until(lambda: not decode.coordinator.counters()["pulls_open"])
    assert asked[0] == asked[1]
    assert prefill.outcomes() == ["completed"]


def test_a_connection_lost_while_unused_is_not_held_against_the_next_pull(rig, port):
    settings = {
        f"{name}_timeout_s": 20.0 for name in ("connection", "handshake", "fence")
    }
    first, decode = rig(Prefill, port=port), rig(Decode, settings=settings)
    decode.pull("a", first.lease([5], 8), 0, 8, [3])
    # Its lease goes home over the connection.
    decode.until(lambda: not decode.coordinator.counters()["pulls_open"])
    first.close()
    leases = decode.coordinator._leases
    decode.until(lambda: leases.unconnected())

    def wait_for_a_user() -> None:  # or there may be a new one by then
        for link in leases._links.values():
            link.retry_at = decode.clock() + 13.0

    decode.coordinator._call(wait_for_a_user)
    run_round(decode.coordinator)
    second = rig(Prefill, port=port)
    decode.clock.skip(12.0)  # in all of which nobody waited
    decode.coordinator.pull("b", fresh := second.lease([6], 8), 0, 8, [4])
    decode.clock.skip(12.0)
    decode.done()
    assert_pulled(decode, fresh, [4], 0, 8)
