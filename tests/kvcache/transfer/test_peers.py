from typing import Any

import msgspec

from kvcache.stripe import Stripe
from kvcache.transfer.pulls.messages import PullSettings
from kvcache.transfer.pulls.peers import PeerTable
from protocol.errors import PeerUnreachable
from protocol.handshake import EngineMetadata, RankMetadata
from tests.rigs import memory_pair
from tests.rigs.memory_pair import REMOTE, compat, layout

SETTINGS = PullSettings(handshake_timeout_s=4.0, backoff_min_s=1.0, backoff_max_s=60.0)
COMPAT = compat()


def metadata(**changes: Any) -> EngineMetadata:
    record = layout(block_size=16)
    rank = RankMetadata(
        rank=0, agent_metadata=b"a", base_address=1, nbytes=record.nbytes, device_id=0,
        device_kind="cpu", layout=record,
    )  # fmt: skip
    return memory_pair.metadata(
        rank, **{"incarnation": "i", "compat": COMPAT, **changes}
    )


def table() -> PeerTable:
    return PeerTable(COMPAT, SETTINGS, False, Stripe(0, 1, 8))


def test_silent_peer_gets_repeated_requests_until_the_timeout():
    peers = table()
    peer = peers.connect(REMOTE, 0.0)
    request_times = [
        now for now in (0.0, 0.5, 1.0, 2.0, 3.0, 3.9) if peers.take_due(now)[0]
    ]
    assert request_times == [0.0, 1.0, 2.0, 3.0]
    assert peers.deadline() == 4.0
    assert peers.take_due(4.0) == ([], [peer])
    assert isinstance(peer.error, PeerUnreachable)
    assert "did not answer" in str(peer.error) and "--side-channel-host" in str(
        peer.error
    )


def test_handshake_backoff_doubles_up_to_a_bound():
    peers = table()
    now = 0.0
    waits = []
    for _ in range(9):
        peer = peers.connect(REMOTE, now)
        assert peer.is_handshaking
        now += 4.0
        peers.take_due(now)
        assert peers.connect(REMOTE, now).error
        waits.append(peer.deadline - now)
        assert peers.connect(REMOTE, peer.deadline - 0.01).error
        now = peer.deadline
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    peers.on_metadata(peers.connect(REMOTE, now), metadata(), now)
    peers.fail(peers.connect(REMOTE, now), PeerUnreachable("x"), now)
    # A successful handshake resets the backoff.
    assert peers.connect(REMOTE, now).deadline == now + 1.0
    assert +peers.outcomes == {"ok": 1, "peer_unreachable": 10}


def test_failed_pull_repeats_the_handshake_but_does_not_end_a_backoff():
    peers = table()
    peer = peers.connect(REMOTE, 0.0)
    peers.on_metadata(peer, metadata(), 0.0)
    assert not peer.record_pull_failure(0.5)
    again = peers.connect(REMOTE, 1.0)
    assert again.is_handshaking
    peers.fail(again, PeerUnreachable("x"), 1.0)
    again.record_pull_failure(1.0)
    assert peers.connect(REMOTE, 1.5).error


def test_number_of_remembered_peers_is_bounded():
    peers = table()
    for index in range(3000):
        remote = msgspec.structs.replace(REMOTE, incarnation=str(index))
        peers.fail(peers.connect(remote, 0.0), PeerUnreachable("x"), 0.0)
    assert len(peers._peers) < 1100


def test_circuit_opens_after_two_failures_and_its_open_time_doubles():
    peer = table().find_or_add(REMOTE)
    now = 0.0
    waits = []
    assert not peer.record_pull_failure(now) and peer.circuit.allows_pull(
        now, is_busy=True
    )
    assert peer.record_pull_failure(now), "the second failure did not open the circuit"
    for _ in range(9):
        assert not peer.record_pull_failure(now), (
            "counted a pull that had begun before the circuit opened"
        )
        waits.append(
            next(
                s for s in (1, 2, 4, 8, 16, 32, 60) if peer.circuit.allows_pull(now + s)
            )
        )
        assert not peer.circuit.allows_pull(now + waits[-1] - 0.01)
        now += waits[-1]
        assert not peer.circuit.allows_pull(now, is_busy=True), (
            "a half-open circuit allowed a second pull"
        )
        assert not peer.record_pull_failure(now), (
            "reported an open circuit as newly opened"
        )
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]
