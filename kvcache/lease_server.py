"""The prefill engine's end of the side channel.

Decode engines ask for metadata over it, and renew and complete leases. On the prefill
server (P) a thread of its own answers, so that no answer waits for a forward step. The
engine grants leases, announces blocks and collects ended leases under a lock that is
held for at most one message. On the decode server (D) a client (lease_client.py) sends
requests and receives replies without blocking; a reply has its request's nonce. A
message on the wire is its MAC and its payload.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from selectors import EVENT_READ, DefaultSelector

from kvcache.lease import EndedLease, LeaseState, LeaseTable
from kvcache.offers import Offers
from kvcache.transfer.pulls.lease_client import Address, new_id
from kvcache.verify.scope import OnSums, Scope
from protocol.handshake import (
    Complete,
    Digest,
    EngineMetadata,
    FrameError,
    GetDigest,
    GetMetadata,
    LeaseEnded,
    LeaseRequest,
    Lookup,
    LookupResult,
    Metadata,
    Ok,
    Refused,
    Renew,
    Reply,
    Subscribe,
    open_request,
    seal_reply,
)
from protocol.ipc.wire import (
    Waker,
    Wire,
    WireClosed,
    await_writable,
    exchange,
    listen,
    tune,
)
from protocol.process.lifecycle import VitalThread
from protocol.process.logging import get_logger

logger = get_logger(__name__)

_SWEEP_S = 0.1  # longest time until an expired lease is collected
# Also the number of bytes read at a time. A request has at most 5 ids of 128 bytes.
_MAX_REQUEST_BYTES = 4 << 10
# Lookups that wait for the engine. Others get the reply that no prefix matches.
_MAX_LOOKUPS = 64
_MAX_UNSENT_BYTES = 64 << 20  # of replies to one peer
_MAX_UNAUTHENTICATED = 256  # connections without an authentic message yet
_MAX_ACCEPTED = 16  # connections accepted at a time
# Digests computed concurrently. Further requests get no answer; the peer repeats them.
_MAX_DIGESTS = 64
# Interval between warnings of refused requests, which any network peer can cause.
_WARN_S = 10.0
_NO_DESCRIPTOR_S = 0.01

OnDigest = Callable[[Scope, tuple[int, ...], OnSums], None]


def _no_digest(scope: Scope, blocks: tuple[int, ...], on_sums: OnSums) -> None:
    on_sums(b"")


class LeaseServer:
    """A thread that serves the metadata and the leases of a prefill engine.

    Args:
        host: The address that peers connect to; `bind_host` is the local address, if it
            differs.
        port: 0 takes a free port; see `address`.
        on_event: Called by the thread when `drain_ended` or `lookups` has something;
            must not block.
        digest: Starts to compute the digest of blocks' KV. It may call back in any
            thread.
        max_tokens: Largest number of tokens in a lookup.

    Attributes:
        lookups: Lookups that the engine must answer by `answer_lookup`, each with its
            connection.
    """

    def __init__(
        self,
        host: str,
        port: int,
        metadata: EngineMetadata,
        secret: bytes,
        clock: Callable[[], float] = time.monotonic,
        on_event: Callable[[], None] | None = None,
        bind_host: str | None = None,
        digest: OnDigest = _no_digest,
        max_tokens: int = 0,
    ) -> None:
        self._host = host
        self._metadata = metadata
        self._secret = secret
        self._clock = clock
        self._on_event = on_event
        self._lock = threading.RLock()  # of leases, offers and wires
        self._table = LeaseTable()
        self._offers: Offers[Wire] = Offers(self._table)
        self._counters = Counter[str]()
        self._listener = listen(bind_host or host, port, "--side-channel-port")
        self._port = int(self._listener.getsockname()[1])
        self._selector = DefaultSelector()  # the data of a key is the function to call
        self._selector.register(self._listener, EVENT_READ, self._accept)
        self._waker = Waker()
        self._selector.register(self._waker, EVENT_READ, self._waker.clear)
        self._digest = digest
        # By nonce: the connections that wait for a digest.
        self._digesting: dict[str, Wire] = {}
        self._max_lookup_bytes = _MAX_REQUEST_BYTES + 5 * max_tokens
        self.lookups: deque[tuple[Lookup, Wire]] = deque()
        self._calls: deque[Callable[[], None]] = deque()  # from other threads
        self._wires: set[Wire] = set()
        # Connections without an authentic message yet, oldest first.
        self._unauthenticated: dict[Wire, None] = {}
        self._warned_at = float("-inf")
        self._stopping = threading.Event()
        self._thread = VitalThread(self._run, "lease-server")

    @property
    def address(self) -> Address:
        """Host and port for peers."""
        return self._host, self._port

    def start(self) -> None:
        self._thread.start()

    # -- calls of any thread

    def grant(self, request_id: str, block_ids: Iterable[int], lease_s: float) -> str:
        """Leases blocks for `lease_s` seconds from now and returns the lease id."""
        lease_id = new_id()
        with self._lock:
            self._table.grant(lease_id, request_id, block_ids, lease_s, self._clock())
        return lease_id

    @contextmanager
    def offers(self) -> Iterator[tuple[Offers[Wire], float]]:
        """The prompts that are lent while they are computed, and the time.

        At the end of the `with` block, changes to them are sent to readers.
        """
        with self._lock:
            yield self._offers, self._clock()
            self._send_to_readers()
        if self._table.has_ended:
            self._waker.wake()

    def abort(self, lease_id: str) -> bool:
        """Ends a lease; False if it was gone already."""
        with self._lock:
            return self._table.abort(lease_id, self._clock())

    def drain_ended(self) -> list[EndedLease]:
        """Leases that ended since the last call; the engine may reuse their blocks."""
        with self._lock:
            ended = self._table.drain_ended()
            for lease in ended:
                self._offers.lease_ended(lease.lease_id)
            return ended

    def answer_lookup(self, reader: Wire, reply: LookupResult) -> None:
        """Sends the reply to a lookup."""
        self._call_later(partial(self._push, reader, reply))

    def _call_later(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        self._waker.wake()

    def counters(self) -> Counter[str]:
        """Events since the start, and `held`: the leases held now."""
        with self._lock:
            ended_counts = self._table.ended_counts
            num_held = self._table.num_held
            counters = Counter(self._counters)
            for state in LeaseState:
                counters[state.value] = ended_counts[state]
            counters["held"] = num_held
            counters["granted"] = num_held + ended_counts.total()
            return counters

    def close(self) -> None:
        """Stops the thread; leases still held end as ABORTED and can be drained."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        with self._lock:
            self._table.abort_all(self._clock())
        for wire in self._wires:
            wire.close()
        self._listener.close()
        self._selector.close()
        self._waker.close()

    # -- the thread

    def _run(self) -> None:
        while not self._stopping.is_set():
            for key, _ in self._selector.select(_SWEEP_S):
                key.data()
            with self._lock:
                while self._calls:
                    call = self._calls.popleft()
                    call()
                self._table.expire(self._clock())
                has_ended = self._table.has_ended
                self._send_to_readers()
            if (has_ended or self.lookups) and self._on_event is not None:
                self._on_event()

    def _accept(self) -> None:
        for _ in range(_MAX_ACCEPTED):
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:
                # The peer has disconnected, or no descriptor is free. The listener
                # stays readable, so this thread must not retry at once.
                time.sleep(_NO_DESCRIPTOR_S)
                return
            tune(sock)
            wire = Wire(sock, _MAX_REQUEST_BYTES, read_bytes=_MAX_REQUEST_BYTES)
            self._wires.add(wire)
            self._selector.register(wire, EVENT_READ, partial(self._serve, wire))
            self._unauthenticated[wire] = None
            # Without this bound they could use up all descriptors.
            if len(self._unauthenticated) > _MAX_UNAUTHENTICATED:
                with self._lock:
                    self._drop(next(iter(self._unauthenticated)))

    def _serve(self, wire: Wire) -> None:
        """Reads and answers a few messages, while other peers and the engine wait."""
        with self._lock:
            if wire in self._wires:  # it may have been dropped in this round
                self._exchange(wire)

    def _exchange(self, wire: Wire) -> None:
        try:
            for message in exchange(self._selector, wire):
                self._reply(wire, message)
            await_writable(self._selector, wire)
        except WireClosed as error:
            logger.debug("side channel: %s", error)
            self._drop(wire)
        except Exception:  # one bad message must not end every lease
            logger.exception("side channel: a message failed; closing its connection")
            self._counters["internal_errors"] += 1
            self._drop(wire)  # the next round might fail in the same way

    def _send_to_readers(self) -> None:
        """Sends messages to readers in the calling thread.

        That is faster than waking the server's thread.
        """
        messages = self._offers.take_messages(
            self._clock(), lambda wire: wire.has_unsent
        )
        for wire, message in messages:
            self._push(wire, message)

    def _push(self, wire: Wire, reply: Reply) -> None:
        """Sends a reply, unless its connection has been dropped."""
        if wire in self._wires:
            try:
                wire.send(seal_reply(reply, self._secret))
                await_writable(self._selector, wire)
            except WireClosed:
                self._drop(wire)

    def _start_digest(self, request: GetDigest, wire: Wire) -> LeaseEnded | None:
        """Starts a digest; None: `_send_digest` will answer."""
        blocks = self._table.blocks(request.lease_id, self._clock())
        if blocks is None:
            return LeaseEnded(nonce=request.nonce, reason="unknown or ended")
        if request.nonce in self._digesting:
            self._digesting[request.nonce] = wire  # the request was repeated
            return None
        if len(self._digesting) >= _MAX_DIGESTS:
            return None
        self._digesting[request.nonce] = wire
        scope = Scope(
            lease_id=request.lease_id,
            start=request.token_start,
            stop=request.token_stop,
            samples=request.samples,
            reach=request.reach,
        )

        def on_sums(sums: bytes) -> None:
            self._call_later(partial(self._send_digest, request, sums))

        self._digest(scope, blocks, on_sums)
        return None

    def _send_digest(self, request: GetDigest, sums: bytes) -> None:
        """Answers with the digest if its lease is still held, else with LeaseEnded."""
        reply: Reply
        if self._table.blocks(request.lease_id, self._clock()) is not None:
            reply = Digest(nonce=request.nonce, sums=sums)
        else:
            reason = "it ended while its digest was computed"
            reply = LeaseEnded(nonce=request.nonce, reason=reason)
        self._push(self._digesting.pop(request.nonce), reply)

    def _drop(self, wire: Wire) -> None:
        self._offers.leave(wire)
        self._wires.discard(wire)
        self._unauthenticated.pop(wire, None)
        self._selector.unregister(wire)
        wire.close()

    def _reply(self, wire: Wire, message: bytes) -> None:
        if wire.unsent_bytes > _MAX_UNSENT_BYTES:
            raise WireClosed("the peer sends requests but does not read replies")
        reply = self._answer(message, wire)
        # If the peer has closed, messages that it sent before may still have to be
        # read.
        with suppress(WireClosed):
            if reply is not None:
                wire.send(seal_reply(reply, self._secret))
        if isinstance(reply, Refused):
            raise WireClosed(reply.reason)
        self._unauthenticated.pop(wire, None)
        wire.max_bytes = self._max_lookup_bytes

    def _answer(self, message: bytes, wire: Wire) -> Reply | None:
        try:
            request = open_request(message, self._secret)
        except FrameError as error:
            self._counters["refused"] += 1
            if time.monotonic() - self._warned_at > _WARN_S:
                self._warned_at = time.monotonic()
                logger.warning("side channel refused a request: %s", error)
            return Refused(reason=str(error))
        if isinstance(request, GetMetadata):
            self._counters["metadata_sent"] += 1
            return Metadata(nonce=request.nonce, engine=self._metadata)
        if request.incarnation != self._metadata.incarnation:
            self._counters["gone"] += 1
            reason = "this prefill server was restarted"
            return LeaseEnded(nonce=request.nonce, reason=reason)
        if isinstance(request, Subscribe):
            return self._offers.subscribe(request, wire, self._clock())
        if isinstance(request, GetDigest):
            return self._start_digest(request, wire)
        if isinstance(request, Lookup):
            if len(self.lookups) >= _MAX_LOOKUPS:
                return LookupResult(nonce=request.nonce, remote=None)
            self.lookups.append((request, wire))
            return None
        if not self._apply(request, self._clock()):
            self._counters["gone"] += 1
            return LeaseEnded(nonce=request.nonce, reason="unknown or ended")
        self._counters["renewed"] += isinstance(request, Renew)
        return Ok(nonce=request.nonce)

    def _apply(self, request: LeaseRequest, now: float) -> bool:
        """Renews, completes or aborts a lease; False if the lease is gone."""
        if isinstance(request, Renew):
            return self._table.renew(request.lease_id, now)
        if isinstance(request, Complete):
            return self._table.complete(request.lease_id, request.attempt_id, now)
        kind, _, attempt_id = request.nonce.partition("-")
        self._offers.unsubscribe(
            f"subscribe-{attempt_id}", request.lease_id, now, lends=kind == "lend"
        )
        return self._table.abort(request.lease_id, now)
