"""The coordinator runs all pulls of a decode engine, on rank 0.

pull_state.py (for one pull), handshakes.py and lookups.py make the decisions. This file
has the sockets and the clock. It passes replies of prefill servers and reports of ranks
to the right pull. The coordinator has no thread: the thread of rank 0's TransferWorker
drives it by calling `receive`.
"""

import selectors
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from socket import socket
from typing import Any

from kvcache.stripe import Stripe
from kvcache.transfer.pulls.digest_orders import DigestOrders, OnSums, Scope
from kvcache.transfer.pulls.handshakes import Handshakes
from kvcache.transfer.pulls.lease_client import Address, LeaseClient, new_id
from kvcache.transfer.pulls.lookups import Lookups
from kvcache.transfer.pulls.messages import (
    Command,
    DigestOrder,
    Event,
    PeerDecided,
    PeerPrepared,
    Pull,
    PullDone,
    PullDrained,
    PullFailed,
    PullSettings,
    PullStuck,
    RankEnded,
    Report,
    key_of,
)
from kvcache.transfer.pulls.peers import (
    CIRCUIT_OPENED,
    PeerRecord,
    PeerTable,
    is_converted,
    reference_error,
    verification_of,
)
from kvcache.transfer.pulls.pull_state import (
    Action,
    Phase,
    PullState,
    RecordPeerFailure,
)
from kvcache.transfer.pulls.pull_table import PullTable
from kvcache.transfer.pulls.rank_links import RankLinks
from protocol.errors import BatonError, InternalError, PullCircuitOpen
from protocol.handshake import (
    CompatRecord,
    Demote,
    DraftKV,
    LeaseRequest,
    Lookup,
    LookupResult,
    Metadata,
    Refused,
    Reply,
    Subscribe,
)
from protocol.ipc.wire import Waker, nap_if_short
from protocol.messages import KVHint, RemotePrefill
from protocol.process.logging import get_logger

logger = get_logger(__name__)

_CLOSE_LINGER_S = 0.2  # longest wait of `close` for aborts to be sent


class PullCoordinator:
    """Runs handshakes, renewals, the orders to all ranks, and the fence of every pull.

    Only the thread of rank 0's worker calls `receive`, `report` and `close`. Any thread
    may call all other methods. Methods such as `connect`, `pull` and `cancel` only
    queue a call, which the thread of rank 0's worker then makes.

    Args:
        sockets: sockets to the workers of ranks 1 and up.
        compat: the compatibility record of this engine.
        secret: the cluster secret, for messages on the side channel.
        convert: accept peers with a different KV dtype or KV scales.
        dcp, block_size: as in Endpoint and KVLayout of this engine's ranks. With a dcp
            above 1, block_size must be a multiple of the peer's block size.
        verify: KV to verify with digests before the fence: "off", "sample" or "all".
        draft: as in EngineMetadata of this engine.

    Attributes:
        on_event: called by the worker's thread when `drain` has events; must not block.
        wake: ends a wait in `receive`; any thread may call it.
    """

    def __init__(
        self,
        sockets: Sequence[socket],
        compat: CompatRecord,
        secret: bytes,
        settings: PullSettings | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        convert: bool = False,
        dcp: int = 1,
        block_size: int = 1,
        verify: str = "off",
        draft: DraftKV | None = None,
    ) -> None:
        self._num_ranks = len(sockets) + 1
        self._settings = settings or PullSettings()
        self._clock = clock
        self._compat = compat
        self._verify = verify
        self.on_event: Callable[[], None] = lambda: None
        self._events: deque[Event] = deque()
        self._counters: Counter[str] = Counter()
        self._pulls = PullTable()
        self._calls: deque[Callable[[], object]] = deque()
        self._waker = Waker()
        self.wake = self._waker.wake
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._waker, selectors.EVENT_READ, self._run_calls)
        self._ranks = RankLinks(sockets, self._selector, self.report)
        self._commands: list[Command] = []  # commands that rank 0 has not received
        on_reply = partial(self._try, self._take_reply)
        self._leases = LeaseClient(secret, self._selector, on_reply, clock)
        self._due = 0.0  # when to call `_tick` next, by `clock`
        stripe = Stripe(0, dcp, block_size)
        self._tokens_per_block = stripe.tokens_per_block
        self._peers = PeerTable(compat, self._settings, convert, stripe, draft)
        self._handshakes = Handshakes(
            self._peers,
            self._leases,
            self._settings.side_channel_timeout_s,
            clock,
            broadcast=self._broadcast,
            pulls_from=self._pulls.pulls_from,
            fail_pull=self._fail_pull,
            on_decided=self._on_peer_decided,
        )
        self._lookups = Lookups(
            self._settings, self._peers, self._leases.post, self._emit
        )
        self._digests = DigestOrders(
            self._num_ranks, compat.total_kv_heads, self._broadcast
        )

    def can_pull_from(self, remote: RemotePrefill) -> bool:
        """True if the handshake is complete and the circuit breaker allows a pull."""
        peer = self._peers.get(key_of(remote))
        return peer is not None and peer.allows_pull(self._clock())

    def is_prepared(self, hint: KVHint) -> bool:
        """True if every rank has mapped the engine's memory or has connected to it, so
        that a pull begins at once."""
        peer = self._peers.get(key_of(hint))
        return peer is not None and len(peer.prepared_ranks) == self._num_ranks

    def shares_draft_kv(self, remote: RemotePrefill) -> bool:
        """True if pulls from the engine also bring the KV of a drafter."""
        return self._peers.shares_draft_kv(key_of(remote))

    def connect(self, remote: RemotePrefill | KVHint) -> None:
        """Begins a handshake with an engine, unless its outcome is already known.

        A PeerDecided always follows. It follows at once if no handshake is needed, or
        if the circuit breaker or the backoff of a failed handshake allows none now.
        """
        self._call(lambda: self._do_connect(remote))

    def look_up(
        self, pull_id: str, hint: KVHint, request: Lookup, timeout_s: float
    ) -> None:
        """Looks up the longest prefix cached on the engine. A LookedUp follows."""
        begin = partial(self._lookups.begin, pull_id, hint, request)
        self._call(lambda: begin(self._clock(), timeout_s))

    def demote(self, address: Address, offer: Demote) -> None:
        """Offers KV of this engine to the KV store at an address."""
        self._call(lambda: self._lookups.post_long(address, offer))

    def hold(self, pull_id: str, remote: RemotePrefill) -> None:
        """Begins to renew the lease, before this engine has blocks to read into.

        While the prefill server still computes the prompt, subscribes to the offer.
        """
        self._call(lambda: self._begin(pull_id, remote))

    def pull(
        self,
        pull_id: str,
        remote: RemotePrefill,
        token_start: int,
        token_stop: int,
        local_block_ids: Sequence[int],
        min_resume_tokens: int = 0,
        *,
        has_draft_kv: bool = True,
    ) -> None:
        """Reads tokens [token_start, token_stop) into blocks of this engine.

        Every rank reads its share. Like `hold`, this begins to renew the lease. For the
        arguments see Pull.
        """
        order = Pull(
            pull_id=pull_id,
            peer=key_of(remote),
            lease_id=remote.lease_id,
            token_start=token_start,
            token_stop=token_stop,
            local_block_ids=list(local_block_ids),
            remote_block_ids=remote.block_ids,
            min_resume_tokens=min_resume_tokens,
            has_draft_kv=has_draft_kv,
        )
        self._call(lambda: self._do_pull(remote, order))

    def cancel(self, pull_id: str, *, keep_lease: bool = False) -> None:
        """Gives up a pull in any state. One PullDrained follows.

        Args:
            keep_lease: as in PullState.cancel.
        """
        self._call(lambda: self._do_cancel(pull_id, keep_lease))

    def digest(self, scope: Scope, blocks: tuple[int, ...], reply: OnSums) -> None:
        """Computes a digest of this engine's KV in `blocks`, on every rank. The
        worker's thread calls `reply` with the sums; `reply` must not block."""
        order = DigestOrder(new_id(), scope, blocks)
        self._call(lambda: self._digests.begin(order, reply))

    def drain(self) -> list[Event]:
        """Returns the events since the last call, in order."""
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def counters(self) -> Counter[str]:
        return Counter({**self._counters, "pulls_open": len(self._pulls)})

    def handshake_counts(self) -> dict[str, int]:
        """The number of ended handshakes by outcome: "ok" or the code of the error."""
        return dict(self._peers.outcomes)

    # -- called by rank 0's worker

    def receive(self, timeout_s: float) -> list[Command]:
        """Handles timers, sockets and calls of other threads.

        Args:
            timeout_s: longest wait for something to do.

        Returns:
            The commands for rank 0.
        """
        if self._clock() >= self._due:
            self._try(self._tick)
        timeout_s = min(timeout_s, self._due - self._clock())
        if self._commands or timeout_s < 0:
            timeout_s = 0.0
        for key, _ in self._selector.select(nap_if_short(timeout_s)):
            self._try(key.data)
            self._due = 0.0
        commands = self._commands
        self._commands = []
        return commands

    def report(self, report: Report) -> None:
        self._due = 0.0
        self._try(self._take_report, report)

    def close(self) -> None:
        """Aborts the leases of open pulls, and closes all sockets.

        Does not abort the lease of a pull with a true `PullState.is_untouched`. Does
        not wait for answers of prefill servers.
        """
        self._ranks.close()
        for state in self._pulls:
            if not state.is_untouched:
                self._leases.post(state.address, state.abort_message())
        deadline = time.monotonic() + _CLOSE_LINGER_S
        while self._leases.has_unsent and time.monotonic() < deadline:
            for key, _ in self._selector.select(deadline - time.monotonic()):
                self._try(key.data)
            self._leases.tick()
        self._leases.close()
        self._selector.close()
        self._waker.close()

    def _call(self, call: Callable[[], object]) -> None:
        """Queues a call for the worker's thread."""
        self._calls.append(call)
        self.wake()

    def _run_calls(self) -> None:
        """Makes the queued calls."""
        self._waker.clear()
        for _ in range(len(self._calls)):
            self._try(self._calls.popleft())

    def _try(self, call: Callable[..., Any], *args: Any) -> None:
        """Makes a call. If the call raises, all pulls fail, but `_try` does not raise.

        So the caller can continue with its other calls. It must make them, because the
        messages that those calls handle arrive only once.
        """
        try:
            call(*args)
        except Exception:  # a bug here: no pull may hang, and later pulls must work
            logger.exception("the pull coordinator failed")
            self._counters["internal_errors"] += 1
            for state in self._pulls:
                try:
                    self._fail_pull(state, InternalError("the pull coordinator failed"))
                except Exception:
                    logger.exception("cannot end pull %s", state.pull_id)

    def _tick(self) -> None:
        now = self._clock()
        self._leases.tick()
        self._handshakes.send_requests(now)
        self._lookups.tick(now)
        self._handshakes.fail_unconnected(now)
        while (state := self._pulls.pop_due(now)) is not None:
            self._perform(state, state.tick(now))
        self._due = min(
            self._leases.deadline(),
            self._handshakes.deadline(),
            self._lookups.deadline(),
            self._pulls.next_tick(),
        )

    def _emit(self, event: Event) -> None:
        self._counters["pulls_failed"] += isinstance(event, PullFailed)
        self._events.append(event)
        # If there are earlier events, the engine was notified and will call `drain`.
        if len(self._events) == 1:
            self.on_event()

    def _broadcast(self, command: Command) -> None:
        """Sends a command to every rank, including rank 0."""
        self._commands.append(command)
        self._ranks.broadcast(command)

    # -- calls of the engine

    def _do_connect(self, remote: RemotePrefill | KVHint) -> None:
        error = self._circuit_error(remote)
        if error is not None:
            self._emit(PeerDecided(key_of(remote), error))
            return
        peer = self._peers.connect(remote, self._clock())
        peer.is_awaited = True
        self._on_peer_decided(peer)

    def _begin(self, pull_id: str, remote: RemotePrefill) -> PullState | None:
        """Begins a pull if it is new. Returns the open pull; None if it has ended."""
        open_state = self._pulls.get(pull_id)
        if open_state is not None or self._pulls.has_ended(pull_id):
            return open_state
        state = PullState(
            pull_id,
            remote,
            self._num_ranks,
            self._settings,
            attempt_id=new_id(),
            now=self._clock(),
            tokens_per_block=self._tokens_per_block,
        )
        self._pulls.add(state)
        self._perform(state, [])  # schedules the first renewal
        return state

    def _do_pull(self, remote: RemotePrefill, order: Pull) -> None:
        state = self._begin(order.pull_id, remote)
        now = self._clock()
        if state is not None and state.phase is Phase.HELD:
            state.pull(order, now)
            self._start_or_fail(state, self._peers.connect(remote, now))

    def _do_cancel(self, pull_id: str, keep_lease: bool) -> None:
        state = self._pulls.get(pull_id)
        if state is not None:
            self._perform(state, state.cancel(self._clock(), keep_lease=keep_lease))
        elif not self._pulls.is_drained_reported(pull_id):
            self._pulls.remember_ended(pull_id, is_drained_reported=True)
            self._emit(PullDrained(pull_id))

    # -- peers

    def _on_peer_decided(self, peer: PeerRecord) -> None:
        """Continues pulls and lookups that wait for a handshake which has ended."""
        if peer.is_handshaking:
            return
        self._lookups.on_peer_decided(peer, self._clock())
        if peer.is_awaited:
            peer.is_awaited = False
            self._announce(peer)
            self._emit(PeerDecided(peer.key, peer.error))
        for state in self._pulls:
            if state.key == peer.key:
                self._start_or_fail(state, peer)

    def _start_or_fail(self, state: PullState, peer: PeerRecord) -> None:
        """Starts or fails a waiting pull, if the handshake with its peer has ended."""
        if state.phase is not Phase.WAITING or peer.is_handshaking:
            return
        now = self._clock()
        metadata = peer.metadata
        mismatch = metadata and reference_error(state.remote, metadata)
        error = peer.error or mismatch or self._circuit_error(state.remote)
        if error:
            self._perform(state, state.fail(error, now))
            return
        assert metadata is not None, peer.key
        verified = verification_of(self._compat, metadata, self._verify)
        self._announce(peer)
        converts = is_converted(self._compat, metadata.compat)
        actions = state.on_peer_ready(now, verified, is_converted=converts)
        self._perform(state, actions)

    def _announce(self, peer: PeerRecord) -> None:
        """Makes the ranks map the memory of a peer, or connect to the peer, once."""
        if peer.metadata is not None:
            verified = verification_of(self._compat, peer.metadata, self._verify)
            self._handshakes.announce(peer, peer.metadata, verified)

    def _circuit_error(self, remote: RemotePrefill | KVHint) -> PullCircuitOpen | None:
        """The error if a circuit breaker refuses a pull from the engine, else None."""
        reading_from = self._pulls.reading_from
        return self._peers.circuit_error(key_of(remote), self._clock(), reading_from)

    def _record_failure(self, state: PullState, peer: PeerRecord) -> None:
        """Counts a failed pull. The next pull from the peer repeats the handshake."""
        if peer.record_pull_failure(self._clock()):
            num_failures = peer.circuit.num_failures
            logger.warning(CIRCUIT_OPENED, peer.key[0], *state.address, num_failures)

    # -- actions

    def _fail_pull(self, state: PullState, error: BatonError) -> None:
        self._perform(state, state.fail(error, self._clock()))

    def _perform(self, state: PullState, actions: Iterable[Action]) -> None:
        """Carries out actions of a pull; then schedules its tick, or removes it."""
        try:
            for action in actions:
                self._perform_one(state, action)
        finally:
            if state.phase is not Phase.ENDED:
                self._pulls.schedule(state)
            else:
                self._pulls.end(state)

    def _perform_one(self, state: PullState, action: Action) -> None:
        peer = self._peers.find_or_add(state.remote)
        if isinstance(action, RecordPeerFailure | PullStuck):
            self._record_failure(state, peer)
        elif isinstance(action, PullDone):
            # A success does not close the circuit breaker while READs of any other pull
            # from the peer hang.
            pulls = self._pulls.reading_from(peer.key)
            if not any(pull.hangs for pull in pulls):
                peer.circuit.record_success()
        if isinstance(action, LeaseRequest | Subscribe):
            self._leases.post(state.address, action)
        elif isinstance(action, Command):
            self._broadcast(action)
        elif not isinstance(action, RecordPeerFailure):
            self._emit(action)

    # -- reports and replies

    def _take_report(self, report: Report) -> None:
        if isinstance(report, PeerPrepared):
            self._peers.on_prepared(report.peer, report.rank)
            return
        state = self._pulls.get(report.pull_id)
        if state is not None:
            self._perform(state, state.on_report(report, self._clock()))
        elif isinstance(report, RankEnded):
            self._digests.on_report(report)

    def _take_reply(self, address: Address, reply: Reply) -> None:
        if isinstance(reply, LookupResult):
            self._lookups.on_reply(address, reply, self._clock())
        elif isinstance(reply, Metadata):
            self._handshakes.on_metadata(address, reply)
        elif isinstance(reply, Refused):
            self._handshakes.on_refused(address, reply.reason)
        else:
            state = self._pulls.find_by_nonce(reply.nonce)
            if state is not None:
                self._perform(state, state.on_reply(reply, self._clock()))
