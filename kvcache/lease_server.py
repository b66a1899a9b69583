"""The prefill engine's end of the side channel.

Over the side channel, decode engines request metadata and digests, look up prefixes,
and renew and complete leases. On the prefill server (P) a separate thread answers, so
that no answer waits for a forward step. The engine grants leases, announces blocks and
collects ended leases under a lock. The thread holds the lock only while it handles the
messages of one read from a connection. On the decode server (D), lease_client.py sends
requests and receives replies without blocking. A reply repeats the nonce of its
request. On the wire, a message is a MAC followed by a payload.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from selectors import EVENT_READ, DefaultSelector

from kvcache.lease import EndedLease, LeaseOutcome, LeaseTable
from kvcache.offers import Offers
from kvcache.transfer.pulls.lease_client import Address, new_id
from kvcache.verify.scope import OnSums, Scope
from protocol.handshake import (
    Complete,
    Demote,
    Digest,
    EngineMetadata,
    GetDigest,
    GetMetadata,
    LeaseEnded,
    LeaseRequest,
    Lookup,
    LookupResult,
    MessageError,
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
    exchange,
    listen,
    tune_socket,
    update_selector,
)
from protocol.process.logging import get_logger
from protocol.process.vital_threads import VitalThread

logger = get_logger(__name__)

_SWEEP_S = 0.1  # longest sleep of the thread between two checks for expired leases
# Largest size of a request, not counting the tokens and blocks of a Lookup or Demote: a
# request has at most 12 ids of 128 bytes each. One read from a connection also takes at
# most this number of bytes.
_MAX_REQUEST_BYTES = 4 << 10
# Largest number of lookups that wait for the engine. Further lookups are answered at
# once, as if no prefix matched.
_MAX_LOOKUPS = 64
# Largest number of demotions (offers of KV) that wait for the KV store. If there are
# more, the oldest demotion is dropped, and its lease expires.
_MAX_DEMOTIONS = 256
_MAX_UNSENT_BYTES = 64 << 20  # limit on the unsent replies to one peer
_MAX_UNAUTHENTICATED = 256  # limit on connections that have sent no authentic message
_MAX_ACCEPTED = 16  # limit on connections accepted in one call of `_accept`
# Limit on the digests that are computed concurrently. Above the limit, a request for a
# digest gets no answer, and the peer repeats the request.
_MAX_DIGESTS = 64
# Any host on the network can cause warnings about refused requests, so these warnings
# are rate-limited.
_MIN_WARNING_INTERVAL_S = 10.0
_ACCEPT_RETRY_S = 0.01  # pause after a connection could not be accepted
_NO_LEASE = "the lease is unknown or has ended"

StartDigest = Callable[[Scope, tuple[int, ...], OnSums], None]


def _no_digest(scope: Scope, blocks: tuple[int, ...], on_sums: OnSums) -> None:
    on_sums(b"")


class LeaseServer:
    """A thread that serves the metadata and the leases of a prefill engine.

    Args:
        host: The address that peers connect to.
        port: The port to listen on; 0: any free port, which `address` then contains.
        on_event: Called by the thread when `drain_ended`, `lookups` or `demotions` has
            entries; must not block.
        bind_host: The local address to listen on; None: `host`.
        start_digest: Starts to compute a digest of the KV in blocks, and later calls
            `on_sums` from any thread.
        max_lookup_tokens: Largest number of tokens in a lookup.
        max_demoted_ids: Largest number of token ids and block ids in a Demote; 0: KV
            cannot be demoted to this engine.

    Attributes:
        lookups: Lookups that the engine must answer with `answer_lookup`, each with the
            connection for the answer.
        demotions: Offers of KV to this engine, if it is a KV store. The store must end
            the lease of each offer.
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
        start_digest: StartDigest = _no_digest,
        max_lookup_tokens: int = 0,
        max_demoted_ids: int = 0,
    ) -> None:
        self._host = host
        self._metadata = metadata
        self._secret = secret
        self._clock = clock
        self._on_event = on_event
        self._lock = threading.RLock()  # guards leases, offers and wires
        self._table = LeaseTable()
        self._offers: Offers[Wire] = Offers(self._table)
        self._counters = Counter[str]()
        self._listener = listen(bind_host or host, port, "--side-channel-port")
        self._port = int(self._listener.getsockname()[1])
        self._selector = DefaultSelector()  # the data of a key is the function to call
        self._selector.register(self._listener, EVENT_READ, self._accept)
        self._waker = Waker()
        self._selector.register(self._waker, EVENT_READ, self._waker.clear)
        self._compute_digest = start_digest
        # The connections that wait for a digest, by the nonce of the request.
        self._digesting: dict[str, Wire] = {}
        self._takes_demotions = max_demoted_ids > 0
        # A token id or block id takes at most 5 bytes.
        max_ids = max(max_lookup_tokens, max_demoted_ids)
        self._max_long_request_bytes = _MAX_REQUEST_BYTES + 5 * max_ids
        self.lookups: deque[tuple[Lookup, Wire]] = deque()
        self.demotions: deque[Demote] = deque(maxlen=_MAX_DEMOTIONS)
        # Calls that any thread has queued for the server's thread.
        self._calls: deque[Callable[[], None]] = deque()
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

    # -- calls from any thread

    def grant(self, request_id: str, block_ids: Iterable[int], lease_s: float) -> str:
        """Leases blocks for `lease_s` seconds from now. Returns the id of the lease."""
        lease_id = new_id()
        with self._lock:
            self._table.grant(lease_id, request_id, block_ids, lease_s, self._clock())
        return lease_id

    @contextmanager
    def offers(self) -> Iterator[tuple[Offers[Wire], float]]:
        """Yields the offers and the current time, and holds the lock until exit.

        At exit, changes to the offers are sent to readers.
        """
        with self._lock:
            yield self._offers, self._clock()
            self._send_to_readers()
        if self._table.has_ended_leases:
            self._waker.wake()

    def abort(self, lease_id: str) -> bool:
        """Ends a lease. Returns False if the lease was gone already."""
        with self._lock:
            return self._table.abort(lease_id, self._clock())

    def drain_ended(self) -> list[EndedLease]:
        """Returns the leases that ended since the last call.

        Their blocks belong to the engine again. Also marks their offers as ended.
        """
        with self._lock:
            ended = self._table.drain_ended()
            for lease in ended:
                self._offers.on_lease_ended(lease.lease_id)
            return ended

    def answer_lookup(self, reader: Wire, reply: LookupResult) -> None:
        """Makes the server's thread send the reply to a lookup from `lookups`.

        Returns at once.
        """
        self._call_later(partial(self._push, reader, reply))

    def _call_later(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        self._waker.wake()

    def counters(self) -> Counter[str]:
        """Counts of events since the start; `held` is the number of leases held now."""
        with self._lock:
            ended_counts = self._table.ended_counts
            num_held = self._table.num_held
            counters = Counter(self._counters)
            for outcome in LeaseOutcome:
                counters[outcome.value] = ended_counts[outcome]
            counters["held"] = num_held
            counters["granted"] = num_held + ended_counts.total()
            return counters

    def close(self) -> None:
        """Stops the thread. Held leases end as ABORTED; `drain_ended` returns them."""
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
                has_ended_leases = self._table.has_ended_leases
                self._send_to_readers()
            has_requests = bool(self.lookups or self.demotions)
            if (has_ended_leases or has_requests) and self._on_event is not None:
                self._on_event()

    def _accept(self) -> None:
        for _ in range(_MAX_ACCEPTED):
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:
                # The peer has disconnected, or no file descriptor is free. The listener
                # stays readable, so without a pause this thread would spin.
                time.sleep(_ACCEPT_RETRY_S)
                return
            tune_socket(sock)
            wire = Wire(sock, _MAX_REQUEST_BYTES, read_bytes=_MAX_REQUEST_BYTES)
            self._wires.add(wire)
            self._selector.register(wire, EVENT_READ, partial(self._serve, wire))
            self._unauthenticated[wire] = None
            # Without a limit, unauthenticated connections could use up all file
            # descriptors.
            if len(self._unauthenticated) > _MAX_UNAUTHENTICATED:
                with self._lock:
                    self._drop(next(iter(self._unauthenticated)))

    def _serve(self, wire: Wire) -> None:
        """Reads once from a connection and answers the messages, under the lock.

        The size of a read is limited, because the engine and all other peers may wait
        for the lock.
        """
        with self._lock:
            if wire in self._wires:  # an earlier call may have dropped the connection
                self._read_and_answer(wire)

    def _read_and_answer(self, wire: Wire) -> None:
        try:
            for message in exchange(self._selector, wire):
                self._reply(wire, message)
            update_selector(self._selector, wire)
        except WireClosed as error:
            logger.debug("side channel: %s", error)
            self._drop(wire)
        # A bug in the handling of one message must not end this thread, which serves
        # all leases.
        except Exception:
            logger.exception("side channel: a message failed; closing its connection")
            self._counters["internal_errors"] += 1
            self._drop(wire)  # else the same message might fail again and again

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
        """Sends a reply over a connection, unless the connection has been dropped."""
        if wire in self._wires:
            try:
                wire.send(seal_reply(reply, self._secret))
                update_selector(self._selector, wire)
            except WireClosed:
                self._drop(wire)

    def _start_digest(self, request: GetDigest, wire: Wire) -> LeaseEnded | None:
        """Starts the requested digest, unless it is being computed already.

        Returns:
            LeaseEnded if the lease is gone. None if `_send_digest` will answer, or if
            too many digests are being computed.
        """
        blocks = self._table.blocks(request.lease_id, self._clock())
        if blocks is None:
            return LeaseEnded(nonce=request.nonce, reason=_NO_LEASE)
        if request.nonce in self._digesting:
            self._digesting[request.nonce] = wire  # the peer has repeated the request
            return None
        if len(self._digesting) >= _MAX_DIGESTS:
            return None
        self._digesting[request.nonce] = wire
        scope = Scope(
            lease_id=request.lease_id,
            start=request.token_start,
            stop=request.token_stop,
            is_sample=request.samples,
            min_resume_tokens=request.min_resume_tokens,
        )

        def on_sums(sums: bytes) -> None:
            self._call_later(partial(self._send_digest, request, sums))

        self._compute_digest(scope, blocks, on_sums)
        return None

    def _send_digest(self, request: GetDigest, sums: bytes) -> None:
        """Answers with the digest if the lease is still held, else with LeaseEnded."""
        reply: Reply
        if self._table.blocks(request.lease_id, self._clock()) is not None:
            reply = Digest(nonce=request.nonce, sums=sums)
        else:
            reason = "the lease ended while the digest of its KV was computed"
            reply = LeaseEnded(nonce=request.nonce, reason=reason)
        self._push(self._digesting.pop(request.nonce), reply)

    def _drop(self, wire: Wire) -> None:
        self._offers.remove_reader(wire)
        self._wires.discard(wire)
        self._unauthenticated.pop(wire, None)
        self._selector.unregister(wire)
        wire.close()

    def _reply(self, wire: Wire, message: bytes) -> None:
        if wire.unsent_bytes > _MAX_UNSENT_BYTES:
            raise WireClosed("the peer sends requests but does not read replies")
        reply = self._answer(message, wire)
        # A peer may send several messages and then close the connection. All of the
        # messages are handled, although no reply can be sent.
        with suppress(WireClosed):
            if reply is not None:
                wire.send(seal_reply(reply, self._secret))
        if isinstance(reply, Refused):
            raise WireClosed(reply.reason)
        self._unauthenticated.pop(wire, None)
        wire.max_bytes = self._max_long_request_bytes

    def _answer(self, message: bytes, wire: Wire) -> Reply | None:
        try:
            request = open_request(message, self._secret)
        except MessageError as error:
            self._counters["refused"] += 1
            if time.monotonic() - self._warned_at > _MIN_WARNING_INTERVAL_S:
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
        if isinstance(request, Demote):
            if not self._takes_demotions:
                return LeaseEnded(nonce=request.nonce, reason="not a KV store")
            self.demotions.append(request)
            return Ok(nonce=request.nonce)
        if not self._apply(request, self._clock()):
            self._counters["gone"] += 1
            return LeaseEnded(nonce=request.nonce, reason=_NO_LEASE)
        self._counters["renewed"] += isinstance(request, Renew)
        return Ok(nonce=request.nonce)

    def _apply(self, request: LeaseRequest, now: float) -> bool:
        """Renews, completes or aborts a lease. AbortLease also ends a subscription.

        Returns:
            False if the lease is gone, or if `request` would complete a lease that
            still grows.
        """
        if isinstance(request, Renew):
            return self._table.renew(request.lease_id, now)
        if isinstance(request, Complete):
            return self._table.complete(request.lease_id, request.attempt_id, now)
        # The nonce of an AbortLease is `<verb>-<attempt id>`; see lease_messages.py.
        verb, _, attempt_id = request.nonce.partition("-")
        self._offers.unsubscribe(
            f"subscribe-{attempt_id}", request.lease_id, now, keeps_offer=verb == "lend"
        )
        return self._table.abort(request.lease_id, now)
