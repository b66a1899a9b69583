"""Pulls with a real coordinator, workers, side channel and agent. All bytes are
compared.
"""

import re
from typing import Any

import msgspec
import pytest

from kvcache.transfer.agent import PostLimits
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
def test_pull_moves_the_bytes_and_ends_the_lease(rig, make_agent):
    prefill = rig(Prefill, make_agent)
    decode = rig(Decode, make_agent)
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


def test_empty_pull_is_done_at_once_and_completes_the_lease(rig):
    prefill = rig(Prefill)
    decode = rig(Decode)
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
        # All pulls share one handshake.
        assert side.server.counters()["metadata_sent"] == 1
        assert set(side.outcomes(12)) == {"completed"}


def test_invalid_block_table_reads_nothing_and_the_next_pull_succeeds(rig):
    """The valid pulls before and after the invalid pulls have the same shape, so the
    planner reuses the first plan.
    """
    prefill = rig(Prefill)
    decode = rig(Decode)
    decode.pull("fits", prefill.lease([5, 2], 16), 0, 16, [3, 1])
    decode.fill(-1.0)
    for number, (table, message) in enumerate(
        (([4, 32], "block 32; the pool"), ([4], "has 1 blocks"))
    ):
        decode.coordinator.pull(f"{number}", prefill.lease([5, 2], 16), 0, 16, table)
        error = decode.wait_for_error()
        assert isinstance(error, PeerIncompatible) and message in error.message
    assert decode.is_only_written_at([], 0, 0)
    decode.pull("fits too", prefill.lease([5, 2], 16), 0, 16, [6, 4])


# -- the lease has ended


def test_renewals_keep_a_lease_past_its_length(rig):
    prefill = rig(Prefill)
    decode = rig(Decode)
    remote = prefill.lease([5, 2, 9], 24)
    decode.coordinator.hold("a", remote)
    for renewals in range(1, 7):  # one in each third of the lease
        while prefill.server.counters()["renewed"] < renewals:
            assert prefill.server.drain_ended() == []
            prefill.ended.wait(0.01)
        for side in (prefill.clock, decode):
            side.skip(remote.lease_s / 3)
    decode.pull("a", remote, 0, 24, [3, 1, 7])


def test_ended_lease_fails_a_held_pull_before_it_reads(rig):
    prefill = rig(Prefill)
    decode = rig(Decode)
    remote = msgspec.structs.replace(prefill.lease([5], 8), lease_id="0" * 32)
    decode.coordinator.hold("a", remote)
    assert isinstance(decode.wait_for_error(), LeaseGone)
    decode.coordinator.pull("a", remote, 0, 8, [3])
    assert decode.settle() == []
    decode.coordinator.cancel("a")
    assert decode.wait(*ENDINGS) == PullDrained("a")


@pytest.mark.parametrize("engine_id", ["P", "P after its restart"])
def test_restarted_server_fails_old_pulls_and_serves_new_ones(rig, port, engine_id):
    unlimited = ("side_channel_timeout_s", "pull_timeout_s", "renew_interval_s")
    # No timeout may end the pulls: only the new metadata shows that P has restarted.
    settings = dict.fromkeys(unlimited, 1000.0)
    first = rig(Prefill, port=port)
    decode = rig(Decode, settings=settings)
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
    for number in range(2):  # while "b" still drains
        decode.coordinator.connect(old)
        assert isinstance(decode.wait(PeerDecided).error, LeaseGone)
        decode.coordinator.pull(f"old {number}", old, 0, 8, [6])
        failed = decode.wait(*ENDINGS, pull_id=f"old {number}")
        assert isinstance(failed, PullFailed) and isinstance(failed.error, LeaseGone)
    decode.agents[0].resume()
    assert decode.wait(PullDrained) == PullDrained("b")
    decode.done("c")
    assert_pulled(decode, fresh, [5], 0, 8)


# -- the handshake


def edited(rank: Any = None, compat: Any = None, **changes: Any) -> dict[str, Any]:
    """Returns the options of a prefill side that sends metadata with changed values.

    Args:
        rank: changed values of the first rank's RankMetadata.
        compat: changed values of the CompatRecord.
        changes: changed values of the EngineMetadata.
    """

    def edit(metadata: Any) -> Any:
        first = metadata.ranks[0]
        others = metadata.ranks[1:]
        message = {"ranks": [msgspec.structs.replace(first, **(rank or {})), *others]}
        message["compat"] = msgspec.structs.replace(metadata.compat, **(compat or {}))
        return msgspec.structs.replace(metadata, **message, **changes)

    return {"edit": edit}


def edited_layout(**changes: Any) -> dict[str, Any]:
    return edited({"layout": msgspec.structs.replace(layout(), **changes)})


SHARED = {"tp": 2, "dcp": 2}  # of D


@pytest.mark.parametrize(
    ("p", "d", "message"),
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
def test_inconsistent_or_incompatible_peers_are_not_read(rig, p, d, message):
    prefill = rig(Prefill, **p)
    decode = rig(Decode, **d)
    remote = prefill.lease([5], 8)
    decode.coordinator.pull("a", remote, 0, 8, [3])
    error = decode.wait_for_error()
    assert isinstance(error, PeerIncompatible)
    assert re.search(message, f"{error.param}: {error.message}")
    assert not any(pool.tensor.any() for pool in decode.pools)
    # Patterns with "^" match errors of the handshake, after which nothing may be read.
    if message.startswith("^"):
        assert all(worker.counters["posts"] == 0 for worker in decode.workers)
    # The lease is aborted at once, so that P can free its blocks.
    assert prefill.outcomes() == ["aborted"]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"block_ids": [layout().num_blocks]}, "remote_block_ids"),
        ({"block_ids": [-1]}, "remote_block_ids"),
        ({"block_ids": []}, "remote_block_ids"),
        ({"lease_id": "none"}, "lease_id"),
        ({"tp_size": 2}, "tp_size"),
    ],
)
def test_reference_that_contradicts_its_peer_is_not_read(rig, fields, name):
    prefill = rig(Prefill)
    decode = rig(Decode)
    remote = msgspec.structs.replace(prefill.lease([5], 8), **fields)
    decode.coordinator.pull("a", remote, 0, 8, [3])
    failed = decode.wait(*ENDINGS)
    assert isinstance(failed.error, PeerIncompatible)
    assert failed.error.param == f"kv_transfer_params.{name}"


def test_wrong_secret_fails_the_handshake_at_once(rig):
    prefill = rig(Prefill, secret=b"other")
    decode = rig(Decode)
    decode.coordinator.connect(prefill.lease([5], 8))
    failed = decode.wait(PeerDecided)
    assert (
        isinstance(failed.error, PeerUnreachable) and "secret" in failed.error.message
    )
    assert prefill.server.counters()["refused"] >= 1


def test_handshake_without_an_answer_fails_and_its_error_is_repeated_during_backoff(
    rig, port
):
    settings = {"handshake_timeout_s": 0.3, "backoff_min_s": 1000.0}
    prefill = rig(Prefill, port=port)
    decode = rig(Decode, settings=settings)
    remote = prefill.lease([5], 8)
    prefill.server.close()
    decode.coordinator.connect(remote)
    failed = decode.wait(PeerDecided)
    assert isinstance(failed.error, PeerUnreachable)
    assert "--side-channel-host" in failed.error.message
    # The peer is back, but during the backoff it gets no request.
    rig(Prefill, port=port, incarnation=remote.incarnation)
    decode.coordinator.connect(remote)
    assert decode.wait(PeerDecided) == failed
    decode.coordinator.pull("a", remote, 0, 8, [3])
    assert decode.wait(*ENDINGS).error is failed.error


# -- reads that fail or do not end


def test_hanging_read_keeps_its_pull_undrained_and_opens_the_circuit(rig):
    settings = {"pull_timeout_s": 100.0, "drain_grace_s": 0.05}
    prefill = rig(Prefill)
    decode = rig(Decode, tp=2, settings=settings)
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
    error = decode.wait_for_error("other")
    assert isinstance(error, PullCircuitOpen) and "hang" in error.message
    assert prefill.outcomes() == ["aborted"]
    decode.agents[1].resume()
    assert decode.wait(*ENDINGS) == PullDrained("a")
    assert decode.agents[1].active == 0
    assert prefill.outcomes() == ["aborted"]
    decode.coordinator.cancel("a")
    assert decode.settle() == []  # no second PullDrained
    decode.pull("again", prefill.lease([7], 8), 0, 8, [4])


def test_open_circuit_allows_a_single_pull_after_the_backoff(rig, caplog):
    prefill = rig(Prefill)
    decode = rig(Decode, settings={"backoff_min_s": 100.0})
    decode.pull("a", prefill.lease([5], 8), 0, 8, [3])
    for number in range(2):
        decode.agents[0].fail()
        decode.coordinator.pull(f"fails {number}", prefill.lease([5], 8), 0, 8, [3])
        failed = decode.wait(*ENDINGS)  # the READ fails, or the probe of the next link
        assert isinstance(failed.error, TransferFailed | PeerUnreachable)
    message = [line for line in caplog.records if line.name.endswith("coordinator")]
    assert [("UCX_TCP_PORT_RANGE" in line.message) for line in message].count(True) == 1
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


def test_hanging_reads_do_not_block_other_peers(rig):
    hung = rig(Prefill, engine_id="hung")
    other = rig(Prefill)
    limits = PostLimits(max_bytes=64, max_runs=1, max_active=2)
    decode = rig(Decode, limits=limits, settings={"drain_grace_s": 0.05})
    agent = decode.agents[0]
    agent.stall(hung.agents[0].name)
    decode.coordinator.pull("hung", hung.lease([5, 6], 16), 0, 16, [3, 4])
    decode.until(lambda: agent.active >= 2)
    remote = other.lease([6], 8)
    decode.pull("b", remote, 0, 8, [7])
    assert agent.active == 2  # the maximum number of active READs from one peer
    decode.coordinator.cancel("hung")
    assert decode.wait(PullStuck) == PullStuck("hung")
    decode.coordinator.pull("c", remote := other.lease([7], 8), 0, 8, [1])
    assert isinstance(decode.wait(PullDone, PullFailed, pull_id="c"), PullDone)
    agent.resume()
    assert decode.wait(PullDrained) == PullDrained("hung")


@pytest.mark.parametrize(
    ("fence_s", "connection_s", "message"),
    [(0.1, 90.0, "did not confirm"), (90.0, 0.1, "cannot be connected to")],
)
def test_a_dead_side_channel_fails_the_fence(rig, fence_s, connection_s, message):
    settings = {
        "fence_timeout_s": fence_s,
        "side_channel_timeout_s": connection_s,
        **PATIENT,
    }
    prefill = rig(Prefill)
    decode = rig(Decode, settings=settings)
    decode.agents[0].stall()
    remote = prefill.lease([5], 8)
    decode.coordinator.pull("a", remote, 0, 8, [3])
    decode.until(lambda: decode.agents[0].active)
    prefill.server.close()
    decode.agents[0].resume()
    error = decode.wait_for_error()
    assert isinstance(error, PeerUnreachable) and message in error.message


def test_fence_is_repeated_after_a_lost_answer(rig):
    prefill = rig(Prefill)
    decode = rig(Decode, settings={"fence_retry_s": 0.1})
    answer = prefill.server._answer
    attempt_ids = []

    def lose_first_reply(message: bytes, wire: Any) -> Any:
        reply = answer(message, wire)
        request = open_request(message, SECRET)
        if not isinstance(request, Complete):
            return reply
        attempt_ids.append(request.attempt_id)
        return reply if len(attempt_ids) > 1 else Ok(nonce="of another request")

    prefill.server._answer = lose_first_reply
    decode.pull("a", prefill.lease([5], 8), 0, 8, [3])
    decode.until(lambda: not decode.coordinator.counters()["pulls_open"])
    assert attempt_ids[0] == attempt_ids[1]
    assert prefill.outcomes() == ["completed"]


def test_connection_lost_while_unused_does_not_fail_the_next_pull(rig, port):
    settings = {
        f"{name}_timeout_s": 20.0 for name in ("side_channel", "handshake", "fence")
    }
    first = rig(Prefill, port=port)
    decode = rig(Decode, settings=settings)
    decode.pull("a", first.lease([5], 8), 0, 8, [3])
    # Wait until the lease is completed, which needs the connection.
    decode.until(lambda: not decode.coordinator.counters()["pulls_open"])
    first.close()
    leases = decode.coordinator._leases
    decode.until(lambda: leases.unconnected())

    # The next pull must connect, so the client must not reconnect before that pull.
    def delay_reconnect() -> None:
        for link in leases._links.values():
            link.retry_at = decode.clock() + 13.0

    decode.coordinator._call(delay_reconnect)
    run_round(decode.coordinator)
    second = rig(Prefill, port=port)
    # These 12 s must not count towards any timeout, because no pull is waiting.
    decode.clock.skip(12.0)
    decode.coordinator.pull("b", fresh := second.lease([6], 8), 0, 8, [4])
    decode.clock.skip(12.0)
    decode.done()
    assert_pulled(decode, fresh, [4], 0, 8)
