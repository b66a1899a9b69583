import os
import resource
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from selectors import DefaultSelector
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from kvcache.lease import LeaseOutcome, LeaseTable
from kvcache.lease_server import LeaseServer
from kvcache.transfer.pulls.lease_client import Address, LeaseClient, new_id
from kvcache.transfer.pulls.messages import PullDrained, PullSettings
from kvcache.transfer.pulls.pull_state import PullState
from protocol.handshake import (
    AbortLease,
    Complete,
    GetMetadata,
    LeaseEnded,
    Metadata,
    Ok,
    Refused,
    Renew,
    Reply,
    Request,
    seal_reply,
    seal_request,
)
from protocol.ipc.wire import Wire, WireClosed, framed, listen
from protocol.process.vital_threads import VitalThread
from tests.kvcache.transfer.test_peers import metadata
from tests.rigs.memory_pair import DEADLINE_S, REMOTE, Clock

SECRET = b"cluster secret"
MAC = 32  # bytes


class Client(LeaseClient):
    """A lease client that the test drives, one round at a time."""

    def __init__(
        self, secret: bytes = SECRET, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.selector = DefaultSelector()
        self.replies = list[Reply]()
        take = self.replies.append
        super().__init__(secret, self.selector, lambda _, reply: take(reply), clock)

    def run_round(self, timeout_s: float = 0.05) -> None:
        for key, _ in self.selector.select(timeout_s):
            key.data()
        self.tick()

    def reply(self, timeout_s: float = DEADLINE_S) -> Reply:
        until = time.monotonic() + timeout_s
        while not self.replies:
            if time.monotonic() > until:
                raise TimeoutError("no reply")
            self.run_round()
        return self.replies.pop(0)


def send_request(address: Address, request: Request, secret: bytes = SECRET) -> Reply:
    client = Client(secret)
    try:
        client.post(address, request)
        return client.reply()
    finally:
        client.close()


class Server(LeaseServer):
    def __init__(
        self, clock: Callable[[], float], port: int = 0, **options: str
    ) -> None:
        self.ended = threading.Event()
        super().__init__(
            "127.0.0.1", port, metadata(**options), SECRET, clock, self.ended.set
        )
        self.start()

    def send_request(self, request: Request, secret: bytes = SECRET) -> Reply:
        return send_request(self.address, request, secret)

    def outcomes(self) -> list[LeaseOutcome]:
        assert self.ended.wait(DEADLINE_S)
        self.ended.clear()
        return [lease.outcome for lease in self.drain_ended()]


@pytest.fixture
def clock() -> Clock:
    (clock := Clock()).set_stopped(True)
    return clock


@pytest.fixture
def server(clock: Clock) -> Iterator[Server]:
    server = Server(clock)
    yield server
    server.close()


def complete(lease_id: str, attempt_id: str = "a", incarnation: str = "i") -> Complete:
    return Complete(
        nonce=new_id(),
        incarnation=incarnation,
        lease_id=lease_id,
        attempt_id=attempt_id,
    )


def renew(lease_id: str, incarnation: str = "i") -> Renew:
    return Renew(nonce=new_id(), incarnation=incarnation, lease_id=lease_id)


def test_metadata_of_all_ranks_is_served(server):
    reply = server.send_request(GetMetadata(nonce="n"))
    assert isinstance(reply, Metadata)
    assert msgspec.to_builtins(reply.engine) == msgspec.to_builtins(metadata())


def test_fence_succeeds_once_and_repeats_ok_only_to_the_same_attempt(server):
    lease = server.grant("r", [3, 4], 30.0)
    assert isinstance(server.send_request(complete(lease)), Ok)
    assert isinstance(server.send_request(complete(lease)), Ok)
    assert isinstance(server.send_request(complete(lease, "b")), LeaseEnded)
    assert server.outcomes() == [LeaseOutcome.COMPLETED]
    counters = server.counters()
    assert (counters["completed"], counters["gone"], counters["held"]) == (1, 1, 0)


def test_unknown_leases_and_earlier_incarnations_are_answered_with_lease_ended(server):
    lease = server.grant("r", [3], 30.0)
    restarted = server.send_request(complete(lease, incarnation="older"))
    assert isinstance(restarted, LeaseEnded) and "restarted" in restarted.reason
    assert isinstance(
        server.send_request(renew(lease, incarnation="older")), LeaseEnded
    )
    assert isinstance(server.send_request(complete(new_id())), LeaseEnded)
    assert server.counters()["gone"] == 3


@pytest.mark.parametrize(
    "ending", ["expired", "aborted by its reader", "aborted by the engine"]
)
def test_leases_end_without_a_fence(server, clock, ending):
    lease = server.grant("r", [3], 30.0)
    if ending == "expired":
        clock.skip(31.0)
    elif ending == "aborted by the engine":
        assert server.abort(lease) and not server.abort(lease)
    else:
        request = AbortLease(nonce="n", incarnation="i", lease_id=lease)
        assert isinstance(server.send_request(request), Ok)
        assert isinstance(server.send_request(request), LeaseEnded)
    assert server.outcomes() == [LeaseOutcome(ending.split()[0])]
    assert isinstance(server.send_request(complete(lease)), LeaseEnded)


@pytest.mark.parametrize("offer_first", [False, True])
def test_lease_ends_if_its_reader_cancelled_before_it_received_the_lease(
    server, offer_first
):
    """The reader cancels its subscription before it has received the name of the lease.

    P completes the prompt before or after it gets the cancellation.
    """
    prompt_fields = {"transfer_id": "x-0", "prompt_digest": "d"}
    remote = replace(REMOTE, lease_id="", block_ids=[], **prompt_fields)
    reader = PullState("p", remote, 1, PullSettings(), "a", 0.0)
    lease = server.grant("r", [3], 30.0)

    def compute() -> None:
        with server.offers() as (offers, now):
            offers.expect("x-0", "r", "d", 30.0, 16, now)
            offers.finish("x-0", lease, [3], b"{}", now)

    if offer_first:
        compute()
    for action in reader.cancel(0.0):
        if not isinstance(action, PullDrained):
            server.send_request(action)
    if not offer_first:
        compute()
    assert server.outcomes() == [LeaseOutcome.ABORTED]


def test_wrong_secret_is_refused_and_counted_and_changes_nothing(server):
    lease = server.grant("r", [3], 30.0)
    for request in (
        complete(lease),
        AbortLease(nonce="n", incarnation="i", lease_id=lease),
    ):
        reply = server.send_request(request, secret=b"other")
        assert isinstance(reply, Refused) and "secret" in reply.reason
    assert server.counters()["refused"] == 2
    assert isinstance(server.send_request(complete(lease)), Ok)


def raw_exchange(server: Server, *messages: bytes) -> Any:
    """Sends raw messages. Returns the last answer that arrives."""
    with socket.create_connection(server.address, DEADLINE_S) as raw:
        wire = Wire(raw, 1 << 20)
        for message in messages:
            wire.send(message)
        while not (frames := wire.receive()):
            select.select([wire], [], [], DEADLINE_S)
        return msgspec.msgpack.decode(frames[-1][MAC:])


def signed(payload: bytes) -> bytes:
    """Returns a payload with a valid MAC, as a newer or a faulty peer might send it."""
    from protocol import handshake

    return handshake._mac(b"baton side channel request", payload, SECRET) + payload


GARBAGE = [
    b"",
    b"x" * 32 + os.urandom(64),
    signed(b"\xc1"),
    signed(msgspec.msgpack.encode({"type": "unknown", "nonce": "n"})),
    signed(
        msgspec.msgpack.encode(
            {"type": "renew", "nonce": 1, "lease_id": [], "incarnation": 0}
        )
    ),
    seal_reply(Ok(nonce="n"), SECRET),  # a reply is not a request
]


@pytest.mark.parametrize("message", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_is_answered_and_counted(server, message):
    assert raw_exchange(server, message)["type"] == "refused"
    assert (
        server.counters()["refused"] == 1 and server.counters()["internal_errors"] == 0
    )
    assert isinstance(server.send_request(GetMetadata(nonce="n")), Metadata)


def test_bug_closes_one_connection_but_ends_no_lease(server, monkeypatch):
    lease_id = server.grant("r", [1], 30.0)
    usual = Wire.receive
    with socket.create_connection(server.address, DEADLINE_S) as raw:
        name = raw.getsockname()

        def broken(wire: Wire) -> list[bytes]:  # does not read from the socket
            if wire._socket.getpeername() == name:
                raise RuntimeError("it is broken")
            return usual(wire)

        monkeypatch.setattr(Wire, "receive", broken)
        raw.sendall(b"x")
        with suppress(ConnectionResetError):
            assert raw.recv(1) == b""
    assert isinstance(server.send_request(renew(lease_id)), Ok)
    assert server.counters()["internal_errors"] == 1


def test_server_ends_when_it_cannot_expire_leases(server, monkeypatch):
    ended: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", ended.append)
    monkeypatch.setattr(LeaseTable, "expire", lambda *args: 1 / 0)
    server._thread.join(DEADLINE_S)
    assert [type(args.thread) for args in ended] == [VitalThread]


def test_invalid_bytes_and_too_long_messages_close_the_connection(server):
    for garbage in (
        b"GET / HTTP/1.1\r\n\r\n" + os.urandom(5000),
        framed(bytes(1 << 20)),
    ):
        with socket.create_connection(server.address, DEADLINE_S) as raw:
            with suppress(
                ConnectionResetError, BrokenPipeError
            ):  # the server closes before it has read everything
                raw.sendall(garbage)
                assert raw.recv(1) == b""
    assert isinstance(server.send_request(GetMetadata(nonce="n")), Metadata)


def test_a_message_may_come_in_pieces_and_several_at_once(server):
    message = framed(seal_request(GetMetadata(nonce="n"), SECRET))
    with socket.create_connection(server.address, DEADLINE_S) as raw:
        for byte in message:
            raw.sendall(bytes([byte]))
        raw.sendall(message + message)
        wire = Wire(raw, 1 << 20)
        num_replies = 0
        while num_replies < 3:
            select.select([wire], [], [], DEADLINE_S)
            num_replies += len(wire.receive())
    assert server.counters()["metadata_sent"] == 3


def test_silent_strangers_do_not_block_other_connections(server, monkeypatch):
    monkeypatch.setattr("kvcache.lease_server._MAX_UNAUTHENTICATED", 3)
    request = framed(seal_request(GetMetadata(nonce="n"), SECRET))
    with ExitStack() as stack:
        authentic = stack.enter_context(
            socket.create_connection(server.address, DEADLINE_S)
        )
        authentic.sendall(request)
        assert authentic.recv(1)
        strangers = [
            stack.enter_context(socket.create_connection(server.address, DEADLINE_S))
            for _ in range(5)
        ]
        for stranger in strangers[:2]:
            assert stranger.recv(1) == b"", "the oldest connection was not closed"
        assert isinstance(server.send_request(GetMetadata(nonce="n")), Metadata)
        authentic.sendall(request)
        strangers[4].sendall(request)
        assert authentic.recv(1) and strangers[4].recv(1)


def _flood(address: tuple[str, int], data: bytes, is_over: threading.Event) -> None:
    """Sends `data` over one new connection after the other, until `is_over` is set."""
    while not is_over.is_set():
        with suppress(OSError), socket.create_connection(address, DEADLINE_S) as raw:
            raw.sendall(data)


@pytest.mark.parametrize(
    "data", [bytes(1_600_000), framed(b"x" * 100) * 10_000, framed(bytes(4000))[:-1]]
)
def test_fences_are_answered_while_strangers_flood_the_server(server, data):
    is_over = threading.Event()
    strangers = [
        threading.Thread(target=_flood, args=(server.address, data, is_over))
        for _ in range(2)
    ]
    authentic = Client()
    try:
        for stranger in strangers:
            stranger.start()
        while data == bytes(len(data)) and not server.counters()["refused"]:
            is_over.wait(0.001)
        for block in range(10):
            assert isinstance(
                server.send_request(complete(server.grant("r", [block], 60.0))), Ok
            )
            authentic.post(server.address, complete(server.grant("r", [block], 60.0)))
            assert isinstance(authentic.reply(), Ok)
    finally:
        is_over.set()
        for stranger in strangers:
            stranger.join()
        authentic.close()
    assert server.counters()["completed"] == 20


def test_first_invalid_message_closes_the_connection(server):
    """An authentic message before the invalid one does not keep the connection open."""
    good = framed(seal_request(GetMetadata(nonce="n"), SECRET))
    with socket.create_connection(server.address, DEADLINE_S) as raw:
        raw.sendall(good + framed(b"bad") * 3 + good)
        wire = Wire(raw, 1 << 20)
        frames = []
        with pytest.raises(WireClosed):
            while len(frames) < 5:
                select.select([wire], [], [], DEADLINE_S)
                frames += wire.receive()
    kinds = [msgspec.msgpack.decode(message[MAC:])["type"] for message in frames]
    assert kinds == ["metadata", "refused"]
    assert server.counters()["refused"] == 1


def test_messages_sent_before_the_connection_broke_are_processed(server):
    """The reader has closed its socket, so P cannot answer. P must still process the
    messages.
    """
    leases = [server.grant("r", [block], 60.0) for block in (1, 2)]
    frames = [seal_request(renew(leases[0]), SECRET)]
    for lease_id in leases:
        abort = AbortLease(nonce=new_id(), incarnation="i", lease_id=lease_id)
        frames.append(seal_request(abort, SECRET))
    renewal, *aborts = [framed(frame) for frame in frames]
    with socket.create_connection(server.address) as connection:
        connection.sendall(renewal)
        select.select([connection], [], [], DEADLINE_S)
        # The lock keeps the server from answering before all messages are sent.
        with server._lock:
            connection.sendall(renewal + b"".join(aborts))
            connection.close()
    ended: list[LeaseOutcome] = []
    while len(ended) < 2:
        ended += server.outcomes()
    assert ended == [LeaseOutcome.ABORTED] * 2


def test_client_reports_lost_connections_and_when_they_were_lost(clock):
    server = Server(clock)
    client = Client(clock=clock)
    client.post(server.address, GetMetadata(nonce="n"))
    assert isinstance(client.reply(), Metadata)
    assert client.unconnected() == {}
    clock.skip(234.0)
    server.close()
    while not client.unconnected():
        client.run_round()
    assert client.unconnected() == {server.address: clock()}
    clock.skip(6.0)
    since = {server.address: clock()}
    for _ in range(2):
        client.post(server.address, GetMetadata(nonce="n"))
        assert client.unconnected() == since
        clock.skip(10.0)
    client.forget(server.address)
    assert client.unconnected() == {} and client.deadline() == float("inf")
    client.close()


@pytest.mark.parametrize("lacking", ["descriptors", "threads"])
def test_client_that_lacks_resources_connects_later(server, monkeypatch, lacking):
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    client = Client()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with monkeypatch.context() as patch:
        if lacking == "threads":
            patch.setattr(threading.Thread, "start", refused)
        else:
            # This limit allows only stdin, stdout and stderr, so nothing more can be
            # opened.
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            client.post(server.address, GetMetadata(nonce="n"))
            while not client.unconnected():
                client.run_round()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert isinstance(client.reply(), Metadata)
    client.close()


def fake_server(answer: Callable[[bytes], bytes]) -> tuple[threading.Thread, int]:
    """Starts a server that sends `answer(request)` once, as an attacker might. Returns
    the server's thread and port.
    """
    listener = listen("127.0.0.1", 0)

    def serve() -> None:
        select.select([listener], [], [], DEADLINE_S)
        with listener, listener.accept()[0] as sock:
            wire = Wire(sock, 1 << 20)
            while not (frames := wire.receive()):
                select.select([wire], [], [], DEADLINE_S)
            wire.send(answer(frames[0]))
            with suppress(WireClosed):
                while True:  # until the client closes the connection
                    select.select([wire], [], [], DEADLINE_S)
                    wire.receive()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return thread, int(listener.getsockname()[1])


def test_unauthentic_replies_are_dropped_and_close_the_connection():
    request = complete(new_id())
    forged = seal_reply(Ok(nonce="n"), b"other")
    reflected = seal_request(request, SECRET)
    for answer in (forged, reflected, b"", b"x" * 40):
        thread, port = fake_server(lambda _, answer=answer: answer)
        client = Client()
        client.post(("127.0.0.1", port), request)
        while not (client.unconnected() or client.replies):
            client.run_round()
        assert not client.replies
        client.close()
        thread.join()


def test_error_names_the_port_in_use(server):
    with pytest.raises(OSError, match=str(server.address[1])):
        LeaseServer("127.0.0.1", server.address[1], metadata(), SECRET)


def test_host_names_and_ipv6_addresses_can_be_bound(clock):
    for host in ("localhost", "::1"):
        try:
            server = LeaseServer(host, 0, metadata(), SECRET, clock)
        except OSError:
            assert host == "::1"  # this machine has no IPv6
            continue
        server.start()
        assert server.address[0] == host
        assert isinstance(
            send_request(server.address, GetMetadata(nonce="n")), Metadata
        )
        server.close()
