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

from kvcache.lease import LeaseState, LeaseTable
from kvcache.lease_server import LeaseServer
from kvcache.transfer.pulls.lease_client import Address, LeaseClient, new_id
from kvcache.transfer.pulls.messages import PullDrained, PullSettings
from kvcache.transfer.pulls.pull_state import PullState
from protocol.handshake import (
    AbortLease,
    Complete,
    GetMetadata,
    Gone,
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
from protocol.process.lifecycle import VitalThread
from tests.kvcache.transfer.test_peers import metadata
from tests.rigs.clock import Clock
from tests.rigs.memory_pair import DEADLINE_S, REMOTE

SECRET, MAC = b"cluster secret", 32  # bytes


class Client(LeaseClient):
    """With a thread to wait in."""

    def __init__(
        self, secret: bytes = SECRET, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.selector, self.replies = DefaultSelector(), list[Reply]()
        take = self.replies.append
        super().__init__(secret, self.selector, lambda _, reply: take(reply), clock)

    def go_on(self, timeout_s: float = 0.05) -> None:
        for key, _ in self.selector.select(timeout_s):
            key.data()
        self.tick()

    def reply(self, timeout_s: float = DEADLINE_S) -> Reply:
        until = time.monotonic() + timeout_s
        while not self.replies:
            if time.monotonic() > until:
                raise TimeoutError("no reply")
            self.go_on()
        return self.replies.pop(0)


def ask(address: Address, request: Request, secret: bytes = SECRET) -> Reply:
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

    def ask(self, request: Request, secret: bytes = SECRET) -> Reply:
        return ask(self.address, request, secret)

    def outcomes(self) -> list[LeaseState]:
        assert self.ended.wait(DEADLINE_S)
        self.ended.clear()
        return [lease.outcome for lease in self.drain_ended()]


@pytest.fixture
def clock() -> Clock:
    (clock := Clock()).stand(True)
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
    reply = server.ask(GetMetadata(nonce="n"))
    assert isinstance(reply, Metadata)
    assert msgspec.to_builtins(reply.engine) == msgspec.to_builtins(metadata())


def test_the_fence_says_ok_once_and_repeats_it_to_the_same_attempt_only(server):
    lease = server.grant("r", [3, 4], 30.0)
    assert isinstance(server.ask(complete(lease)), Ok)
    assert isinstance(server.ask(complete(lease)), Ok)
    assert isinstance(server.ask(complete(lease, "b")), Gone)
    assert server.outcomes() == [LeaseState.COMPLETED]
    counters = server.counters()
    assert (counters["completed"], counters["gone"], counters["held"]) == (1, 1, 0)


def test_unknown_leases_and_other_incarnations_are_gone(server):
    lease = server.grant("r", [3], 30.0)
    restarted = server.ask(complete(lease, incarnation="older"))
    assert isinstance(restarted, Gone) and "restarted" in restarted.reason
    assert isinstance(server.ask(renew(lease, incarnation="older")), Gone)
    assert isinstance(server.ask(complete(new_id())), Gone)
    assert server.counters()["gone"] == 3


@pytest.mark.parametrize(
    "how", ["expired", "aborted by its reader", "aborted by the engine"]
)
def test_leases_end_without_a_fence(server, clock, how):
    lease = server.grant("r", [3], 30.0)
    if how == "expired":
        clock.skip(31.0)
    elif how == "aborted by the engine":
        assert server.abort(lease) and not server.abort(lease)
    else:
        request = AbortLease(nonce="n", incarnation="i", lease_id=lease)
        assert isinstance(server.ask(request), Ok)
        assert isinstance(server.ask(request), Gone)
    assert server.outcomes() == [LeaseState(how.split()[0])]
    assert isinstance(server.ask(complete(lease)), Gone)


@pytest.mark.parametrize("comes_first", [False, True])
def test_who_gives_a_prompt_up_before_it_hears_of_a_lease_has_that_end(
    server, comes_first
):
    """P has told of all there is, and counts it among the readers no more; or hears of it, and that
    nobody wants it, before the prompt comes."""
    about = {"transfer_id": "x-0", "prompt_digest": "d"}
    remote = replace(REMOTE, lease_id="", block_ids=[], **about)
    reader = PullState("p", remote, 1, PullSettings(), "a", 0.0)
    lease = server.grant("r", [3], 30.0)

    def compute() -> None:
        with server.offers() as (offers, now):
            offers.expect("x-0", "r", "d", 30.0, 16, now)
            offers.finish("x-0", lease, [3], b"{}", now)

    if comes_first:
        compute()
    for told in reader.cancel(0.0):
        if not isinstance(told, PullDrained):
            server.ask(told)
    if not comes_first:
        compute()
    assert server.outcomes() == [LeaseState.ABORTED]


def test_another_secret_is_refused_counted_and_changes_nothing(server):
    lease = server.grant("r", [3], 30.0)
    for request in (
        complete(lease),
        AbortLease(nonce="n", incarnation="i", lease_id=lease),
    ):
        reply = server.ask(request, secret=b"other")
        assert isinstance(reply, Refused) and "secret" in reply.reason
    assert server.counters()["refused"] == 2
    assert isinstance(server.ask(complete(lease)), Ok)


def raw_exchange(server: Server, *messages: bytes) -> Any:
    """The answer to the last of these."""
    with socket.create_connection(server.address, DEADLINE_S) as raw:
        wire = Wire(raw, 1 << 20)
        for message in messages:
            wire.send(message)
        while not (found := wire.receive()):
            select.select([wire], [], [], DEADLINE_S)
        return msgspec.msgpack.decode(found[-1][MAC:])


def signed(payload: bytes) -> bytes:
    """Any payload with a right MAC: what a newer or broken, but trusted, peer may send."""
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
    seal_reply(Ok(nonce="n"), SECRET),  # a reply is no request
]


@pytest.mark.parametrize("message", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_is_answered_and_counted(server, message):
    assert raw_exchange(server, message)["type"] == "refused"
    assert (
        server.counters()["refused"] == 1 and server.counters()["internal_errors"] == 0
    )
    assert isinstance(server.ask(GetMetadata(nonce="n")), Metadata)


def test_our_own_bug_costs_a_connection_and_no_lease(server, monkeypatch):
    lease_id = server.grant("r", [1], 30.0)
    usual = Wire.receive
    with socket.create_connection(server.address, DEADLINE_S) as raw:
        name = raw.getsockname()

        def broken(wire: Wire) -> list[bytes]:  # and what has come stays where it is
            if wire._socket.getpeername() == name:
                raise RuntimeError("it is broken")
            return usual(wire)

        monkeypatch.setattr(Wire, "receive", broken)
        raw.sendall(b"x")
        with suppress(ConnectionResetError):
            assert raw.recv(1) == b""
    assert isinstance(server.ask(renew(lease_id)), Ok)
    assert server.counters()["internal_errors"] == 1


def test_a_server_whose_leases_cannot_be_ended_any_more_ends(server, monkeypatch):
    ended: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", ended.append)
    monkeypatch.setattr(LeaseTable, "expire", lambda *args: 1 / 0)
    server._thread.join(DEADLINE_S)
    assert [type(args.thread) for args in ended] == [VitalThread]


def test_bytes_that_are_no_message_and_messages_too_long_end_the_connection(server):
    for garbage in (
        b"GET / HTTP/1.1\r\n\r\n" + os.urandom(5000),
        framed(bytes(1 << 20)),
    ):
        with socket.create_connection(server.address, DEADLINE_S) as raw:
            with suppress(
                ConnectionResetError, BrokenPipeError
            ):  # what it did not read any more
                raw.sendall(garbage)
                assert raw.recv(1) == b""
    assert isinstance(server.ask(GetMetadata(nonce="n")), Metadata)


def test_a_message_may_come_in_pieces_and_several_at_once(server):
    message = framed(seal_request(GetMetadata(nonce="n"), SECRET))
    with socket.create_connection(server.address, DEADLINE_S) as raw:
        for byte in message:
            raw.sendall(bytes([byte]))
        raw.sendall(message + message)
        wire, found = Wire(raw, 1 << 20), 0
        while found < 3:
            select.select([wire], [], [], DEADLINE_S)
            found += len(wire.receive())
    assert server.counters()["metadata_sent"] == 3


def test_strangers_who_say_nothing_do_not_keep_others_out(server, monkeypatch):
    monkeypatch.setattr("kvcache.lease_server._MAX_UNAUTHENTICATED", 3)
    request = framed(seal_request(GetMetadata(nonce="n"), SECRET))
    with ExitStack() as stack:
        known = stack.enter_context(
            socket.create_connection(server.address, DEADLINE_S)
        )
        known.sendall(request)
        assert known.recv(1)
        strangers = [
            stack.enter_context(socket.create_connection(server.address, DEADLINE_S))
            for _ in range(5)
        ]
        for gone in strangers[:2]:
            assert gone.recv(1) == b"", "the oldest make room"
        assert isinstance(server.ask(GetMetadata(nonce="n")), Metadata)
        known.sendall(request)
        strangers[4].sendall(request)
        assert known.recv(1) and strangers[4].recv(1)


def _flood(address: tuple[str, int], data: bytes, over: threading.Event) -> None:
    """Sends this over one connection after the other."""
    while not over.is_set():
        with suppress(OSError), socket.create_connection(address, DEADLINE_S) as raw:
            raw.sendall(data)


@pytest.mark.parametrize(
    "data", [bytes(1_600_000), framed(b"x" * 100) * 10_000, framed(bytes(4000))[:-1]]
)
def test_fences_are_answered_while_strangers_send_what_they_like(server, data):
    over = threading.Event()
    strangers = [
        threading.Thread(target=_flood, args=(server.address, data, over))
        for _ in range(2)
    ]
    known = Client()
    try:
        for stranger in strangers:
            stranger.start()
        while data == bytes(len(data)) and not server.counters()["refused"]:
            over.wait(0.001)
        for block in range(10):
            assert isinstance(
                server.ask(complete(server.grant("r", [block], 60.0))), Ok
            )
            known.post(server.address, complete(server.grant("r", [block], 60.0)))
            assert isinstance(known.reply(), Ok)
    finally:
        over.set()
        for stranger in strangers:
            stranger.join()
        known.close()
    assert server.counters()["completed"] == 20


def test_the_first_bad_message_ends_the_connection(server):
    """Of a peer that was authentic as well: one refusal is all that it is told."""
    good = framed(seal_request(GetMetadata(nonce="n"), SECRET))
    with socket.create_connection(server.address, DEADLINE_S) as raw:
        raw.sendall(good + framed(b"bad") * 3 + good)
        wire, found = Wire(raw, 1 << 20), []
        with pytest.raises(WireClosed):
            while len(found) < 5:
                select.select([wire], [], [], DEADLINE_S)
                found += wire.receive()
    kinds = [msgspec.msgpack.decode(message[MAC:])["type"] for message in found]
    assert kinds == ["metadata", "refused"]
    assert server.counters()["refused"] == 1


def test_what_was_said_before_the_connection_broke_is_heard(server):
    """A socket closed with an answer unread breaks at once, and with it what P would answer."""
    leases = [server.grant("r", [block], 60.0) for block in (1, 2)]
    frames = [seal_request(renew(leases[0]), SECRET)]
    for lease_id in leases:
        abort = AbortLease(nonce=new_id(), incarnation="i", lease_id=lease_id)
        frames.append(seal_request(abort, SECRET))
    asking, *aborting = [framed(frame) for frame in frames]
    with socket.create_connection(server.address) as asker:
        asker.sendall(asking)
        select.select([asker], [], [], DEADLINE_S)
        with server._lock:  # its thread cannot answer before all is said
            asker.sendall(asking + b"".join(aborting))
            asker.close()
    ended: list[LeaseState] = []
    while len(ended) < 2:
        ended += server.outcomes()
    assert ended == [LeaseState.ABORTED] * 2


def test_a_client_knows_to_whom_it_has_no_connection_and_since_when_it_is_missed(clock):
    server, client = Server(clock), Client(clock=clock)
    client.post(server.address, GetMetadata(nonce="n"))
    assert isinstance(client.reply(), Metadata)
    assert client.unconnected() == {}
    clock.skip(234.0)
    server.close()
    while not client.unconnected():
        client.go_on()
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


@pytest.mark.parametrize("lack", ["descriptors", "threads"])
def test_a_client_without_what_a_connection_takes_connects_later(
    server, monkeypatch, lack
):
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    client, limits = Client(), resource.getrlimit(resource.RLIMIT_NOFILE)
    with monkeypatch.context() as patch:
        if lack == "threads":
            patch.setattr(threading.Thread, "start", refused)
        else:
            resource.setrlimit(
                resource.RLIMIT_NOFILE, (3, limits[1])
            )  # which are in use
        try:
            client.post(server.address, GetMetadata(nonce="n"))
            while not client.unconnected():
                client.go_on()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert isinstance(client.reply(), Metadata)
    client.close()


def fake_server(answer: Callable[[bytes], bytes]) -> tuple[threading.Thread, int]:
    """Answers one request as it likes: an attacker at a known address."""
    listener = listen("127.0.0.1", 0)

    def serve() -> None:
        select.select([listener], [], [], DEADLINE_S)
        with listener, listener.accept()[0] as sock:
            wire = Wire(sock, 1 << 20)
            while not (found := wire.receive()):
                select.select([wire], [], [], DEADLINE_S)
            wire.send(answer(found[0]))
            with suppress(WireClosed):
                while True:  # until the client has gone
                    select.select([wire], [], [], DEADLINE_S)
                    wire.receive()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return thread, int(listener.getsockname()[1])


def test_replies_that_are_not_authentic_are_dropped_and_end_the_connection():
    request = complete(new_id())
    forged, reflected = (
        seal_reply(Ok(nonce="n"), b"other"),
        seal_request(request, SECRET),
    )
    for answer in (forged, reflected, b"", b"x" * 40):
        thread, port = fake_server(lambda _, answer=answer: answer)
        client = Client()
        client.post(("127.0.0.1", port), request)
        while not (client.unconnected() or client.replies):
            client.go_on()
        assert not client.replies
        client.close()
        thread.join()


def test_an_address_in_use_is_named(server):
    with pytest.raises(OSError, match=str(server.address[1])):
        LeaseServer("127.0.0.1", server.address[1], metadata(), SECRET)


def test_names_and_ipv6_addresses_can_be_bound(clock):
    for host in ("localhost", "::1"):
        try:
            server = LeaseServer(host, 0, metadata(), SECRET, clock)
        except OSError:
            assert host == "::1"  # this machine has no IPv6
            continue
        server.start()
        assert server.address[0] == host
        assert isinstance(ask(server.address, GetMetadata(nonce="n")), Metadata)
        server.close()
