import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
import zmq

from kvcache.lease import LeaseState
from kvcache.transfer.side_channel import LeaseServer, SideChannelClient, ask, new_id
from protocol.errors import PeerUnreachable
from protocol.handshake import (
    PROTOCOL_VERSION,
    AbortLease,
    CompatRecord,
    Complete,
    EngineMetadata,
    GetMetadata,
    Gone,
    LayoutRecord,
    Metadata,
    Ok,
    RankMetadata,
    Refused,
    Renew,
    Reply,
    Request,
    seal_reply,
    seal_request,
)

SECRET = b"cluster secret"
DEADLINE_S = 20.0


def metadata(incarnation: str = "first") -> EngineMetadata:
    sizes = {"num_heads": 2, "num_layers": 2, "num_components": 2, "head_dim": 8}
    layout = LayoutRecord(order="BHLCND", num_blocks=4, block_size=16, dtype="float32", **sizes)
    compat = CompatRecord(
        model_fingerprint="m",
        kv_dtype="float32",
        num_layers=2,
        total_kv_heads=2,
        num_components=2,
        head_dim=8,
        rope="{}",
    )
    rank = RankMetadata(
        rank=0,
        agent_metadata=b"agent",
        base_address=4096,
        nbytes=layout.nbytes,
        device_id=0,
        device_kind="cpu",
        layout=layout,
    )
    return EngineMetadata(
        protocol_version=PROTOCOL_VERSION,
        engine_id="P",
        incarnation=incarnation,
        compat=compat,
        tp_size=1,
        ranks=[rank],
    )


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Server(LeaseServer):
    def __init__(self, clock: Callable[[], float], port: int = 0, **options: str) -> None:
        self.ended = threading.Event()
        super().__init__("127.0.0.1", port, metadata(**options), SECRET, clock, self.ended.set)
        self.start()

    def ask(self, request: Request, secret: bytes = SECRET) -> Reply:
        return ask(self.address, request, secret, DEADLINE_S)

    def outcomes(self) -> list[LeaseState]:
        assert self.ended.wait(DEADLINE_S)
        self.ended.clear()
        return [lease.outcome for lease in self.drain_ended()]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def server(clock: Clock) -> Iterator[Server]:
    server = Server(clock)
    yield server
    server.close()


def complete(lease_id: str, attempt_id: str = "a", incarnation: str = "first") -> Complete:
    return Complete(
        nonce=new_id(), incarnation=incarnation, lease_id=lease_id, attempt_id=attempt_id
    )


def renew(lease_id: str, incarnation: str = "first") -> Renew:
    return Renew(nonce=new_id(), incarnation=incarnation, lease_id=lease_id)


def test_metadata_of_all_ranks_is_served(server: Server) -> None:
    reply = server.ask(GetMetadata(nonce="n"))
    assert isinstance(reply, Metadata) and reply.engine == metadata()


def test_the_fence_says_ok_once_and_repeats_it_to_the_same_attempt_only(server: Server) -> None:
    lease = server.grant("r", [3, 4], 30.0)
    assert isinstance(server.ask(complete(lease)), Ok)
    assert isinstance(server.ask(complete(lease)), Ok)
    assert isinstance(server.ask(complete(lease, "b")), Gone)
    assert server.outcomes() == [LeaseState.COMPLETED]
    counters = server.counters()
    assert (counters["completed"], counters["gone"], counters["held"]) == (1, 1, 0)


def test_expired_unknown_and_other_incarnations_are_gone(server: Server, clock: Clock) -> None:
    lease = server.grant("r", [3], 30.0)
    assert isinstance(server.ask(complete(lease, incarnation="older")), Gone)
    assert isinstance(server.ask(renew(lease, incarnation="older")), Gone)
    assert isinstance(server.ask(complete(new_id())), Gone)
    clock.now += 30.0
    assert isinstance(server.ask(complete(lease)), Gone)
    assert server.outcomes() == [LeaseState.EXPIRED]
    assert server.counters()["gone"] == 4 and server.counters()["expired"] == 1


def test_renewals_keep_a_lease_past_its_length(server: Server, clock: Clock) -> None:
    lease = server.grant("r", [3], 30.0)
    for _ in range(4):
        clock.now += 29.0
        assert isinstance(server.ask(renew(lease)), Ok)
    assert server.drain_ended() == []
    assert isinstance(server.ask(complete(lease)), Ok)


def test_leases_expire_without_being_asked_about(server: Server, clock: Clock) -> None:
    server.grant("r", [3], 30.0)
    clock.now += 31.0
    assert server.outcomes() == [LeaseState.EXPIRED]


def test_abort_frees_the_blocks_early(server: Server) -> None:
    lease = server.grant("r", [3], 30.0)
    request = AbortLease(nonce="n", incarnation="first", lease_id=lease)
    assert isinstance(server.ask(request), Ok)
    assert isinstance(server.ask(request), Gone)
    assert server.outcomes() == [LeaseState.ABORTED]


def test_the_engine_can_end_a_lease_itself(server: Server) -> None:
    lease = server.grant("r", [3], 30.0)
    assert server.abort(lease) and not server.abort(lease)
    assert server.outcomes() == [LeaseState.ABORTED]
    assert isinstance(server.ask(complete(lease)), Gone)


def test_another_secret_is_refused_counted_and_changes_nothing(server: Server) -> None:
    lease = server.grant("r", [3], 30.0)
    for request in (complete(lease), AbortLease(nonce="n", incarnation="first", lease_id=lease)):
        reply = server.ask(request, secret=b"other")
        assert isinstance(reply, Refused) and "secret" in reply.reason
    assert server.counters()["refused"] == 2
    assert isinstance(server.ask(complete(lease)), Ok)


def raw_exchange(server: Server, frames: list[bytes]) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect("tcp://{}:{}".format(*server.address))
        dealer.send_multipart(frames)
        assert dealer.poll(int(DEADLINE_S * 1000))
        answer = msgspec.msgpack.decode(dealer.recv_multipart()[1])
        assert answer["type"] == "refused"
    context.destroy(linger=0)


def signed(payload: bytes) -> list[bytes]:
    """Any payload with a right MAC: what a newer or broken, but trusted, peer may send."""
    from protocol import handshake

    return [handshake._mac(b"baton side channel request", payload, SECRET), payload]


GARBAGE = [
    [b""],
    [b"x" * 32],
    [b"", b"", b""],
    [b"a", b"b", b"c", b"d"],
    [b"x" * 32, os.urandom(64)],
    [b"x" * 32, b"\xc1"],
    signed(b""),
    signed(b"\xc1"),
    signed(os.urandom(100)),
    signed(msgspec.msgpack.encode({"type": "unknown", "nonce": "n"})),
    signed(msgspec.msgpack.encode({"type": "renew", "nonce": "n"})),
    signed(msgspec.msgpack.encode({"type": "renew", "nonce": 1, "lease_id": [], "incarnation": 0})),
    signed(msgspec.msgpack.encode({"type": "get_metadata", "nonce": ""})),
    signed(msgspec.msgpack.encode({"type": "get_metadata", "nonce": "n" * 1000})),
    seal_reply(Ok(nonce="n"), SECRET),  # a reply is no request
]


@pytest.mark.parametrize("frames", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_is_answered_and_counted(server: Server, frames: list[bytes]) -> None:
    raw_exchange(server, frames)
    assert server.counters()["refused"] == 1 and server.counters()["internal_errors"] == 0
    assert isinstance(server.ask(GetMetadata(nonce="n")), Metadata)


def test_bytes_that_are_not_zmq_and_messages_too_long_do_no_harm(server: Server) -> None:
    with socket.create_connection(server.address) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n" + os.urandom(5000))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect("tcp://{}:{}".format(*server.address))
        dealer.send_multipart([b"x" * 32, bytes(1 << 20)])
        assert isinstance(server.ask(GetMetadata(nonce="n")), Metadata)
    context.destroy(linger=0)


def test_unknown_fields_are_ignored(server: Server) -> None:
    payload = msgspec.msgpack.encode({"type": "get_metadata", "nonce": "n", "new": [1, 2]})
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect("tcp://{}:{}".format(*server.address))
        dealer.send_multipart(signed(payload))
        assert dealer.poll(int(DEADLINE_S * 1000))
        assert msgspec.msgpack.decode(dealer.recv_multipart()[1])["type"] == "metadata"
    context.destroy(linger=0)


def test_answers_do_not_wait_for_the_engine(server: Server) -> None:
    lease = server.grant("r", [3], 30.0)  # the engine now computes and collects nothing
    for _ in range(50):
        assert isinstance(server.ask(renew(lease)), Ok)


def test_a_client_survives_a_restart_at_the_same_address(clock: Clock) -> None:
    first = Server(clock)
    lease = first.grant("r", [3], 30.0)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    client = SideChannelClient(context, SECRET)
    assert client.post(first.address, renew(lease))
    assert isinstance(next_reply(client), Ok)
    first.close()
    assert [ended.outcome for ended in first.drain_ended()] == [LeaseState.ABORTED]
    second = Server(clock, port=first.address[1], incarnation="second")
    assert client.post(second.address, complete(lease))
    reply = next_reply(client)
    assert isinstance(reply, Gone) and "restarted" in reply.reason
    client.close()
    context.destroy(linger=0)
    second.close()


def next_reply(client: SideChannelClient) -> Reply:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        zmq.select(client.sockets, [], [], 0.1)
        client.unconnected()
        for _, reply in client.receive_all():
            return reply
    raise AssertionError("no reply")


def test_a_client_knows_to_whom_it_has_no_connection(clock: Clock) -> None:
    server = Server(clock)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    client = SideChannelClient(context, SECRET, clock)
    client.post(server.address, GetMetadata(nonce="n"))
    assert client.unconnected() == {server.address: 1000.0}
    assert isinstance(next_reply(client), Metadata)
    assert client.unconnected() == {}
    clock.now = 1234.0
    server.close()
    deadline = time.monotonic() + DEADLINE_S
    while not client.unconnected():
        assert time.monotonic() < deadline
        zmq.select(client.sockets, [], [], 0.1)
    assert client.unconnected() == {server.address: 1234.0}
    client.forget(server.address)
    assert client.unconnected() == {} and client.sockets == []
    client.close()
    context.destroy(linger=0)


def fake_server(answer: Callable[[list[bytes]], list[bytes]]) -> tuple[threading.Thread, int]:
    """Answers one request as it likes: an attacker at a known address."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")

    def serve() -> None:
        identity, *frames = router.recv_multipart()
        router.send_multipart([identity, *answer(frames)])
        router.close(linger=1000)
        context.term()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return thread, port


def test_replies_without_the_secret_are_dropped() -> None:
    forged = seal_reply(Ok(nonce="n"), b"other")
    request = complete(new_id())
    reflected = seal_request(request, SECRET)
    for frames in (forged, reflected, [b""], [], [b"x", b"y", b"z"]):
        thread, port = fake_server(lambda _, frames=frames: frames or [b""])
        with pytest.raises(PeerUnreachable):
            ask(("127.0.0.1", port), request, SECRET, timeout_s=0.3)
        thread.join()


def test_a_late_reply_to_another_question_is_not_taken() -> None:
    thread, port = fake_server(lambda _: seal_reply(Ok(nonce="another"), SECRET))
    with pytest.raises(PeerUnreachable):
        ask(("127.0.0.1", port), complete(new_id()), SECRET, timeout_s=0.3)
    thread.join()


def test_an_address_in_use_is_named(server: Server) -> None:
    with pytest.raises(OSError, match=str(server.address[1])):
        LeaseServer("127.0.0.1", server.address[1], metadata(), SECRET)


def test_names_and_ipv6_addresses_can_be_bound(clock: Clock) -> None:
    for host in ("localhost", "::1"):
        try:
            server = LeaseServer(host, 0, metadata(), SECRET, clock)
        except OSError:
            assert host == "::1"  # this machine has no IPv6
            continue
        server.start()
        assert server.address[0] == host
        assert isinstance(ask(server.address, GetMetadata(nonce="n"), SECRET, DEADLINE_S), Metadata)
        server.close()
