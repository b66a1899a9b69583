"""The side channel: decode engines ask a prefill engine for metadata and renew and complete leases.

On P a thread of its own answers, so that no answer waits for a forward step. The engine grants
leases, announces blocks and collects ended leases under a lock that is held for one message at
most. On D a client (lease_client.py) sends requests and takes replies without blocking; a reply has
its request's nonce. A message on the wire is its MAC and its payload.
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
from kvcache.verify.scope import Scope, Sums
from protocol.handshake import (
    AskDigest,
    Complete,
    Digest,
    EngineMetadata,
    Found,
    FrameError,
    GetMetadata,
    Gone,
    LeaseRequest,
    Lookup,
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
    await_room,
    exchange,
    listen,
    tune,
)
from protocol.process.lifecycle import VitalThread
from protocol.process.logging import get_logger

logger = get_logger(__name__)

_SWEEP_S = 0.1  # expired leases are collected at most this late
_MAX_REQUEST_BYTES = (
    4 << 10
)  # and bytes read at a time; a request has at most 5 ids of 128
_MAX_LOOKUPS = 64  # waiting for the engine; others are answered with no prefix
_MAX_UNSENT_BYTES = 64 << 20  # of answers to one peer
_MAX_STRANGERS = 256  # connections without an authentic message yet
_MAX_ACCEPTED = 16  # connections at a time
_MAX_DIGESTS = (
    64  # computed at a time; a request beyond is not answered, and comes again
)
_WARN_S = 10.0  # between warnings of refused requests, which anybody can cause
_NO_DESCRIPTOR_S = 0.01


class LeaseServer:
    """P's end: a thread with the engine's metadata and its leases.

    Args:
        host: the address that peers connect to; `bind_host` is the local one, if another.
        port: 0 takes a free one, see `address`.
        on_event: called by the thread when `drain_ended` or `asked` has something; must not block.
        digest: begins to compute the digest of blocks' KV; may call back in any thread.
        max_tokens: bound of a lookup. Those in `asked` are the engine's to answer by `found`.
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
        digest: Callable[[Scope, tuple[int, ...], Sums], None] = lambda *asked: asked[
            2
        ](b""),
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
        own = bind_host or host
        self._listener = listen(own, port, "--side-channel-port")
        self._port = int(self._listener.getsockname()[1])
        self._selector = DefaultSelector()  # the data of its keys are calls
        self._selector.register(self._listener, EVENT_READ, self._accept)
        self._waker = Waker()
        self._selector.register(self._waker, EVENT_READ, self._waker.clear)
        self._digest = digest
        self._digesting: dict[str, Wire] = {}  # by nonce: the connection to answer over
        self._max_lookup_bytes = _MAX_REQUEST_BYTES + 5 * max_tokens
        self.asked: deque[tuple[Lookup, Wire]] = deque()
        self._calls: deque[Callable[[], None]] = deque()  # of other threads
        self._wires: set[Wire] = set()
        self._strangers: dict[
            Wire, None
        ] = {}  # wires without an authentic message, oldest first
        self._warned_at = float("-inf")
        self._stopping = threading.Event()
        self._thread = VitalThread(self._run, "lease-server")

    @property
    def address(self) -> Address:
        """Host and port for peers."""
        return self._host, self._port

    def start(self) -> None:
        self._thread.start()

    def grant(self, request_id: str, block_ids: Iterable[int], lease_s: float) -> str:
        """Leases blocks for `lease_s` seconds from now and returns the lease id. Any thread."""
        lease_id = new_id()
        with self._lock:
            self._table.grant(lease_id, request_id, block_ids, lease_s, self._clock())
        return lease_id

    @contextmanager
    def offers(self) -> Iterator[tuple[Offers[Wire], float]]:
        """The prompts that are lent while they are computed, and the time. Changes to them are sent
        to readers at the end of the block. Any thread."""
        with self._lock:
            yield self._offers, self._clock()
            self._tell_readers()
        if self._table.has_ended:
            self._waker.wake()

    def abort(self, lease_id: str) -> bool:
        """Ends a lease; False when it was gone already. Any thread."""
        with self._lock:
            return self._table.abort(lease_id, self._clock())

    def drain_ended(self) -> list[EndedLease]:
        """Leases ended since the last call; their blocks are the engine's again. Any thread."""
        with self._lock:
            ended = self._table.drain_ended()
            for lease in ended:
                self._offers.lease_ended(lease.lease_id)
            return ended

    def found(self, reader: Wire, reply: Found) -> None:
        """Answers a lookup. Any thread."""
        self._later(partial(self._push, reader, reply))

    def _later(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        self._waker.wake()

    def counters(self) -> Counter[str]:
        """Events since the start, and `held`, the leases held now. Any thread."""
        with self._lock:
            ended = {
                state.value: self._table.ended_counts[state] for state in LeaseState
            }
            held, total = self._table.num_held, self._table.ended_counts.total()
            return Counter(
                {**self._counters, **ended, "held": held, "granted": held + total}
            )

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

    def _run(self) -> None:
        while not self._stopping.is_set():
            for key, _ in self._selector.select(_SWEEP_S):
                key.data()
            with self._lock:
                while self._calls:
                    self._calls.popleft()()
                self._table.expire(self._clock())
                ended = self._table.has_ended
                self._tell_readers()
            if (ended or self.asked) and self._on_event is not None:
                self._on_event()

    def _accept(self) -> None:
        for _ in range(_MAX_ACCEPTED):
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # the connection is gone again, or no descriptor is free
                time.sleep(_NO_DESCRIPTOR_S)  # the listener stays readable: do not spin
                return
            tune(sock)
            wire = Wire(sock, _MAX_REQUEST_BYTES, read_bytes=_MAX_REQUEST_BYTES)
            self._wires.add(wire)
            self._selector.register(wire, EVENT_READ, partial(self._serve, wire))
            self._strangers[wire] = None
            if (
                len(self._strangers) > _MAX_STRANGERS
            ):  # else they could use up the descriptors
                with self._lock:
                    self._drop(next(iter(self._strangers)))

    def _serve(self, wire: Wire) -> None:
        """Reads and answers a few messages: other peers and the engine wait meanwhile."""
        with self._lock:
            if wire in self._wires:  # else it was dropped in this round
                self._exchange(wire)

    def _exchange(self, wire: Wire) -> None:
        try:
            for message in exchange(self._selector, wire):
                self._reply(wire, message)
            await_room(self._selector, wire)
        except WireClosed as error:
            logger.debug("side channel: %s", error)
            self._drop(wire)
        except Exception:  # one bad message must not end every lease
            logger.exception("side channel")
            self._counters["internal_errors"] += 1
            self._drop(wire)  # else the next round might fail in the same way

    def _tell_readers(self) -> None:
        """Sends news to readers, in the calling thread: faster than waking the server's."""
        for wire, reply in self._offers.take(
            self._clock(), lambda wire: wire.has_unsent
        ):
            self._push(wire, reply)

    def _push(self, wire: Wire, reply: Reply) -> None:
        """Sends a reply, unless its connection was dropped meanwhile."""
        if wire in self._wires:
            try:
                wire.send(seal_reply(reply, self._secret))
                await_room(self._selector, wire)
            except WireClosed:
                self._drop(wire)

    def _begin_digest(self, asked: AskDigest, wire: Wire) -> Gone | None:
        """Begins a digest; None: `_tell_digest` will answer."""
        blocks = self._table.blocks(asked.lease_id, self._clock())
        if blocks is None:
            return Gone(nonce=asked.nonce, reason="unknown or ended")
        is_begun = asked.nonce in self._digesting
        if is_begun or len(self._digesting) < _MAX_DIGESTS:
            self._digesting[asked.nonce] = wire
        if not is_begun and asked.nonce in self._digesting:
            span = asked.token_start, asked.token_stop
            scope = Scope(asked.lease_id, *span, asked.samples, reach=asked.reach)
            tell = partial(self._tell_digest, asked)
            self._digest(scope, blocks, lambda sums: self._later(partial(tell, sums)))
        return None

    def _tell_digest(self, asked: AskDigest, sums: bytes) -> None:
        """Answers with the digest if its lease is still held, else with Gone."""
        is_held = self._table.blocks(asked.lease_id, self._clock()) is not None
        gone = Gone(nonce=asked.nonce, reason="ended meanwhile")
        reply = Digest(nonce=asked.nonce, sums=sums) if is_held else gone
        self._push(self._digesting.pop(asked.nonce), reply)

    def _drop(self, wire: Wire) -> None:
        self._offers.leave(wire)
        self._wires.discard(wire)
        self._strangers.pop(wire, None)
        self._selector.unregister(wire)
        wire.close()

    def _reply(self, wire: Wire, message: bytes) -> None:
        if wire.unsent_bytes > _MAX_UNSENT_BYTES:
            raise WireClosed("the peer asks but does not read")
        reply = self._answer(message, wire)
        with suppress(
            WireClosed
        ):  # messages that it sent before may still have to be read
            if reply is not None:
                wire.send(seal_reply(reply, self._secret))
        if isinstance(reply, Refused):
            raise WireClosed(reply.reason)
        self._strangers.pop(wire, None)
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
            return Gone(nonce=request.nonce, reason="this prefill server was restarted")
        if isinstance(request, Subscribe):
            return self._offers.subscribe(request, wire, self._clock())
        if isinstance(request, AskDigest):
            return self._begin_digest(request, wire)
        if isinstance(request, Lookup):
            if len(self.asked) >= _MAX_LOOKUPS:
                return Found(nonce=request.nonce, remote=None)
            self.asked.append((request, wire))
            return None
        if not self._decide(request, self._clock()):
            self._counters["gone"] += 1
            return Gone(nonce=request.nonce, reason="unknown or ended")
        self._counters["renewed"] += isinstance(request, Renew)
        return Ok(nonce=request.nonce)

    def _decide(self, request: LeaseRequest, now: float) -> bool:
        if isinstance(request, Renew):
            return self._table.renew(request.lease_id, now)
        if isinstance(request, Complete):
            return self._table.complete(request.lease_id, request.attempt_id, now)
        how, _, attempt_id = request.nonce.partition("-")
        about = f"subscribe-{attempt_id}", request.lease_id, now
        self._offers.unsubscribe(*about, lends=how == "lend")
        return self._table.abort(request.lease_id, now)
