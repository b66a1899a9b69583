"""The coordinator runs all pulls of a decode engine, on rank 0.

It decides by pull_state.py (one pull) and peers.py (handshakes). This file has the sockets, the
clock, and the table of pulls that answers and reports belong to. It has no thread of its own: rank
0's TransferWorker drives it by asking it for commands.
"""

import heapq
import selectors
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from socket import socket
from typing import Any

from kvcache.stripe import Stripe
from kvcache.transfer.pulls.lease_client import Address, LeaseClient, new_id
from kvcache.transfer.pulls.messages import (
    UNVERIFIED,
    AddPeer,
    Command,
    DigestOrder,
    DropPeer,
    Event,
    PeerDecided,
    PeerKey,
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
    DISTRUSTED,
    Lookups,
    Peer,
    PeerTable,
    misfit_of,
    unreachable,
)
from kvcache.transfer.pulls.pull_state import Action, Phase, PullState, SuspectPeer
from kvcache.transfer.pulls.rank_links import RankLinks
from kvcache.verify.scope import DigestPart, Scope, Sums
from protocol.errors import InternalError, LeaseGone, PeerUnreachable, PullWithheld
from protocol.handshake import (
    DIGESTS,
    CompatRecord,
    EngineMetadata,
    Found,
    GetMetadata,
    LeaseRequest,
    Lookup,
    Metadata,
    Refused,
    Reply,
    Subscribe,
)
from protocol.ipc.wire import Waker, nap_if_short
from protocol.messages import KVHint, RemotePrefill
from protocol.process.logging import get_logger

logger = get_logger(__name__)

_CLOSE_LINGER_S = 0.2
_MAX_ENDED = (
    16384  # pulls remembered after their end, so that a late cancel is answered once
)
_NEVER = float("inf")


class PullCoordinator:
    """Handshakes, renewals, fan-out, the fence.

    `receive`, `report` and `close` are for the thread of rank 0's worker. Any thread may call the
    other methods; those that order something leave it to that thread.

    Args:
        ends: sockets to the other ranks' workers.
        compat: of this engine.
        convert: accept peers with another KV dtype.
        dcp, block_size: of this engine's ranks. With a dcp above 1, peers must have blocks from
            which the ranks' stripes can be cut.
        verify: which digests are compared before the fence: "off", "sample", "all".

    Attributes:
        on_event: called by the worker's thread when `drain` has events; must not block.
    """

    def __init__(
        self,
        ends: Sequence[socket],
        compat: CompatRecord,
        secret: bytes,
        settings: PullSettings | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        convert: bool = False,
        dcp: int = 1,
        block_size: int = 1,
        verify: str = "off",
    ) -> None:
        self._num_ranks = len(ends) + 1
        self._settings = settings or PullSettings()
        self._clock = clock
        self.on_event: Callable[[], None] = lambda: None
        self._events: deque[Event] = deque()
        self._counters: Counter[str] = Counter()
        self._calls: deque[Callable[[], object]] = deque()
        self._waker = Waker()
        self.wake = self._waker.wake
        self._selector = selectors.DefaultSelector()  # its data are calls
        self._selector.register(self._waker, selectors.EVENT_READ, self._obey)
        on_reply = partial(self._try, self._take_reply)
        self._ranks = RankLinks(ends, self._selector, self.report)
        self._commands: list[Command] = []  # for rank 0
        self._leases = LeaseClient(secret, self._selector, on_reply, clock)
        self._due = 0.0  # when `_tick` has something to do
        stripe = Stripe(0, dcp, block_size)
        self._tokens_per_block = stripe.tokens_per_block
        self._peers = PeerTable(compat, self._settings, convert, stripe)
        self._lookups = Lookups(
            self._settings, self._peers, self._leases.post, self._emit
        )
        self._compat, self._verify = compat, verify
        self._digests: dict[str, tuple[Scope, Sums, list[DigestPart | None]]] = {}
        self._pulls: dict[str, PullState] = {}
        self._attempts: dict[str, PullState] = {}  # by attempt id, which answers carry
        self._planned: list[
            tuple[float, str]
        ] = []  # heap of (when to tick it, pull id)
        self._ended: OrderedDict[str, bool] = (
            OrderedDict()
        )  # pull id -> PullDrained was emitted

    def knows(self, remote: RemotePrefill) -> bool:
        """Whether a handshake with its engine is done, so that pulls may begin."""
        peer = self._peers.get(key_of(remote))
        return (
            peer is not None and bool(peer.metadata) and not peer.refuses(self._clock())
        )

    def connect(self, remote: RemotePrefill) -> None:
        """Shakes hands unless that was done. Ends in PeerDecided."""
        self._call(lambda: self._do_connect(remote))

    def look_up(self, pull_id: str, hint: KVHint, asked: Lookup) -> None:
        """Asks the hinted engine for a reference to its longest prefix. Ends in LookedUp."""
        self._call(lambda: self._lookups.begin(pull_id, hint, asked, self._clock()))

    def hold(self, pull_id: str, remote: RemotePrefill) -> None:
        """Keeps the lease alive from now on, before there are blocks to read into; subscribes if
        there is no lease yet."""
        self._call(lambda: self._begin(pull_id, remote))

    def pull(
        self,
        pull_id: str,
        remote: RemotePrefill,
        token_start: int,
        token_stop: int,
        local_block_ids: Sequence[int],
        reach: int = 0,
    ) -> None:
        """Reads tokens [token_start, token_stop) into blocks of this engine, on every rank.

        Args:
            local_block_ids: from token 0 of the sequence on, each of this engine's block size
                times its dcp.
            reach: as in KVGroups.spans.
        """
        about, span = (key_of(remote), remote.lease_id), (token_start, token_stop)
        order = Pull(
            pull_id, *about, *span, list(local_block_ids), remote.block_ids, reach
        )
        self._call(lambda: self._do_pull(remote, order))

    def cancel(self, pull_id: str, *, lend: bool = False) -> None:
        """Gives up a pull in any state; one PullDrained follows. `lend`: see PullState.cancel."""
        self._call(lambda: self._do_cancel(pull_id, lend))

    def digest(self, scope: Scope, blocks: tuple[int, ...], reply: Sums) -> None:
        """Computes a digest of this engine's KV in `blocks`, on every rank. `reply` is called by
        the worker's thread; must not block."""
        order = DigestOrder(new_id(), scope, blocks)

        def begin() -> None:
            self._digests[order.pull_id] = scope, reply, []
            self._broadcast(order)

        self._call(begin)

    def drain(self) -> list[Event]:
        """Events since the last call, in order."""
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def counters(self) -> Counter[str]:
        return Counter({**self._counters, "pulls_open": len(self._pulls)})

    def handshakes(self) -> dict[str, int]:
        """Ended handshakes by outcome: "ok", or the code of the error."""
        return dict(self._peers.outcomes)

    # -- what rank 0's worker calls

    def receive(self, timeout_s: float) -> list[Command]:
        """Handles timers, sockets and calls, waiting at most `timeout_s` for them; returns the
        commands for rank 0."""
        if self._clock() >= self._due:
            self._try(self._tick)
        timeout_s = min(timeout_s, self._due - self._clock())
        if self._commands or timeout_s < 0:
            timeout_s = 0.0
        for key, _ in self._selector.select(nap_if_short(timeout_s)):
            self._try(key.data)
            self._due = 0.0
        commands, self._commands = self._commands, []
        return commands

    def report(self, report: Report) -> None:
        self._due = 0.0
        self._try(self._take_report, report)

    def close(self) -> None:
        """Open pulls' leases, unless untouched, are aborted without an answer."""
        self._ranks.close()
        for state in self._pulls.values():
            if not state.is_untouched:
                self._leases.post(state.address, state.abort())
        until = time.monotonic() + _CLOSE_LINGER_S
        while self._leases.has_unsent and time.monotonic() < until:
            for key, _ in self._selector.select(until - time.monotonic()):
                self._try(key.data)
            self._leases.tick()
        self._leases.close()
        self._selector.close()
        self._waker.close()

    def _call(self, call: Callable[[], object]) -> None:
        self._calls.append(call)
        self.wake()

    def _obey(self) -> None:
        """Carries out other threads' calls."""
        self._waker.clear()
        for _ in range(len(self._calls)):
            self._try(self._calls.popleft())

    def _try(self, part: Callable[..., Any], *args: Any) -> None:
        """Does one part of a round. If it raises, all pulls fail, and the other parts are still
        done: their messages come only once."""
        try:
            part(*args)
        except Exception:  # a bug of ours: no pull may hang, and later ones shall work
            logger.exception("pull coordinator")
            self._counters["internal_errors"] += 1
            for state in list(self._pulls.values()):
                try:
                    error = InternalError("the pull coordinator failed")
                    self._perform(state, state.fail(error, self._clock()))
                except Exception:
                    logger.exception(
                        "pull coordinator, giving up pull %s", state.pull_id
                    )

    def _tick(self) -> None:
        now = self._clock()
        self._leases.tick()
        asking, late = self._peers.due(now)
        for peer in asking:
            peer.nonce = peer.nonce or new_id()
            self._leases.post(peer.address, GetMetadata(nonce=peer.nonce))
        for peer in late:
            self._peer_decided(peer)
        self._lookups.tick(now)
        for address, since in self._leases.unconnected().items():
            if now - since >= self._settings.connection_timeout_s:
                self._lost(address)
        while self._planned and self._planned[0][0] <= now:
            at, pull_id = heapq.heappop(self._planned)
            state = self._pulls.get(pull_id)
            if state is not None and state.planned == at:
                state.planned = _NEVER
                self._perform(state, state.tick(now))
        lost_s = self._settings.connection_timeout_s
        lost = [since + lost_s for since in self._leases.unconnected().values()]
        planned = [at for at, _ in self._planned[:1]]
        waits = (
            self._peers.deadline(),
            self._leases.deadline(),
            self._lookups.deadline(),
        )
        self._due = min(*waits, *planned, *lost)

    def _emit(self, event: Event) -> None:
        self._counters["pulls_failed"] += isinstance(event, PullFailed)
        self._events.append(event)
        if (
            len(self._events) == 1
        ):  # else it was called, and `drain` has not followed yet
            self.on_event()

    def _broadcast(self, command: Command) -> None:
        self._commands.append(command)
        self._ranks.broadcast(command)

    # -- connections

    def _pulls_from(self, address: Address) -> list[PullState]:
        return [state for state in self._pulls.values() if state.address == address]

    def _asked_at(self, address: Address) -> list[Peer]:
        return [peer for peer in self._peers.at(address) if peer.is_asked]

    def _lost(self, address: Address) -> None:
        """Nothing listens there: pulls and handshakes that wait for an answer fail now, and the
        ranks forget the peer, as its memory is not freed while it is mapped here."""
        now, error = self._clock(), unreachable(address, "cannot be connected to")
        for peer in self._peers.at(address):
            self._forget(peer)
        self._leases.forget(address)
        for state in self._pulls_from(address):
            self._perform(state, state.fail(error, now))
        self._fail_handshakes(address, error)

    def _fail_handshakes(self, address: Address, error: PeerUnreachable) -> None:
        for peer in self._asked_at(address):
            self._peers.fail(peer, error, self._clock())
            self._peer_decided(peer)

    def _forget(self, peer: Peer) -> None:
        peer.metadata = None
        if peer.is_announced:
            peer.is_announced = False
            self._broadcast(DropPeer(peer.key))

    # -- what the engine asks for

    def _do_connect(self, remote: RemotePrefill) -> None:
        if withheld := self._withheld(remote):
            self._emit(PeerDecided(key_of(remote), withheld))
            return
        peer = self._peers.connect(remote, self._clock())
        peer.is_awaited = True
        self._peer_decided(peer)

    def _begin(self, pull_id: str, remote: RemotePrefill) -> PullState | None:
        """The pull, begun if it is new; None if it has ended."""
        if pull_id in self._ended or pull_id in self._pulls:
            return self._pulls.get(pull_id)
        attempt_id, now = new_id(), self._clock()
        ours = self._num_ranks, self._settings, attempt_id, now, self._tokens_per_block
        state = PullState(pull_id, remote, *ours)
        self._pulls[pull_id] = self._attempts[attempt_id] = state
        self._perform(state, [])  # the first renewal is planned
        return state

    def _do_pull(self, remote: RemotePrefill, order: Pull) -> None:
        state, now = self._begin(order.pull_id, remote), self._clock()
        if state is not None and state.phase is Phase.HELD:
            state.pull(order, now)
            self._offer(state, self._peers.connect(remote, now))

    def _do_cancel(self, pull_id: str, lend: bool) -> None:
        state = self._pulls.get(pull_id)
        if state is not None:
            self._perform(state, state.cancel(self._clock(), lend=lend))
        elif not self._ended.get(pull_id, False):
            self._remember(pull_id, drained_told=True)
            self._emit(PullDrained(pull_id))

    # -- peers

    def _take_metadata(self, address: Address, reply: Metadata) -> None:
        asked = [peer for peer in self._asked_at(address) if peer.nonce == reply.nonce]
        if asked:
            self._supersede((reply.engine.engine_id, reply.engine.incarnation), address)
        for peer in asked:
            self._peers.metadata_came(peer, reply.engine, self._clock())
            self._peer_decided(peer)

    def _supersede(self, current: PeerKey, address: Address) -> None:
        """Fails the pulls from earlier engines at this address: their leases are gone. A restarted
        server has a new engine id as well as a new incarnation."""
        for peer in self._peers.at(address):
            if peer.key != current:
                self._forget(peer)
        for state in self._pulls_from(address):
            if state.key != current:
                error = LeaseGone(f"prefill server {state.key[0]} was restarted")
                self._perform(state, state.fail(error, self._clock()))

    def _peer_decided(self, peer: Peer) -> None:
        """After a handshake, lets everything go on that waits for this peer."""
        if peer.is_asked:
            return
        self._lookups.peer_decided(peer, self._clock())
        if peer.is_awaited:
            peer.is_awaited = False
            self._emit(PeerDecided(peer.key, peer.error))
        for state in [state for state in self._pulls.values() if state.key == peer.key]:
            self._offer(state, peer)

    def _offer(self, state: PullState, peer: Peer) -> None:
        """Starts or fails a waiting pull once its peer's handshake has ended."""
        if state.phase is not Phase.WAITING or peer.is_asked:
            return
        now, metadata = self._clock(), peer.metadata
        misfit = metadata and misfit_of(state.remote, metadata)
        if error := peer.error or misfit or self._withheld(state.remote):
            self._perform(state, state.fail(error, now))
            return
        assert metadata is not None, peer.key
        verified = self._verified(metadata)
        if not peer.is_announced:
            peer.is_announced = True
            self._broadcast(AddPeer(metadata))
            if verified in UNVERIFIED:
                logger.warning(
                    "KV of %s is not verified: %s", peer.key[0], UNVERIFIED[verified]
                )
        is_converted = self._is_converted(metadata)
        self._perform(state, state.peer_ready(now, verified, is_converted=is_converted))

    def _verified(self, metadata: EngineMetadata) -> str:
        """PullDone.verified of pulls from this engine."""
        if self._verify == "off":
            return "off"
        if self._is_converted(metadata):
            return "converted"
        return self._verify if metadata.digests == DIGESTS else "peer"

    def _is_converted(self, metadata: EngineMetadata) -> bool:
        """Whether the KV of this engine has another dtype than ours, or other scales."""
        ours, theirs = self._compat, metadata.compat
        return (ours.kv_dtype, ours.kv_scales) != (theirs.kv_dtype, theirs.kv_scales)

    def _reading_from(self, key: PeerKey) -> list[PullState]:
        return [
            state for state in self._pulls.values() if state.reads and state.key == key
        ]

    def _withheld(self, remote: RemotePrefill) -> PullWithheld | None:
        """Why nothing is pulled from there now; None if it may be. A pull that hangs as well would
        take blocks with it."""
        peer = self._peers.get(key_of(remote))
        if peer is None or not peer.pulls_failed:
            return None
        others = self._reading_from(peer.key)
        hangs = any(state.hangs for state in others)
        if not hangs and not peer.refuses(self._clock(), busy=bool(others)):
            return None
        why = "READs from it hang" if hangs else "the latest pulls failed"
        return PullWithheld(
            f"nothing is pulled from prefill server {peer.key[0]} for now: {why}"
        )

    # -- actions

    def _perform(self, state: PullState, actions: Iterable[Action]) -> None:
        try:
            for action in actions:
                self._send(state, action)
        finally:
            if state.phase is not Phase.ENDED:
                if (at := state.deadline()) < state.planned:
                    state.planned = at
                    heapq.heappush(self._planned, (at, state.pull_id))
            elif self._pulls.pop(state.pull_id, None) is not None:
                del self._attempts[state.attempt_id]
                self._remember(state.pull_id, state.drained_told)

    def _remember(self, pull_id: str, drained_told: bool) -> None:
        self._ended[pull_id] = drained_told
        if len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)

    def _send(self, state: PullState, action: Action) -> None:
        peer = self._peers.of(state.remote)
        if isinstance(
            action, SuspectPeer | PullStuck
        ):  # the next pull shakes hands anew
            if peer.pull_failed(self._clock()):
                logger.warning(DISTRUSTED, peer.key[0], *state.address)
        elif isinstance(action, PullDone):  # trusted again, unless another pull hangs
            if not any(other.hangs for other in self._reading_from(peer.key)):
                peer.pulls_failed, peer.no_pulls_until = 0, 0.0
        if isinstance(action, LeaseRequest | Subscribe):
            self._leases.post(state.address, action)
        elif isinstance(action, Command):
            self._broadcast(action)
        elif not isinstance(action, SuspectPeer):
            self._emit(action)

    # -- what comes in

    def _take_report(self, report: Report) -> None:
        if state := self._pulls.get(report.pull_id):
            self._perform(state, state.reported(report, self._clock()))
        elif report.pull_id in self._digests and isinstance(report, RankEnded):
            scope, reply, parts = self._digests[report.pull_id]
            parts.append(report.part)
            if len(parts) == self._num_ranks:
                del self._digests[report.pull_id]
                reply(scope.merged(parts, self._compat.total_kv_heads))

    def _take_reply(self, address: Address, reply: Reply) -> None:
        if isinstance(reply, Found):
            self._lookups.answered(address, reply, self._clock())
        elif isinstance(reply, Metadata):
            self._take_metadata(address, reply)
        elif isinstance(reply, Refused):
            message = f"{address[0]}:{address[1]} refused us: {reply.reason}"
            self._fail_handshakes(address, PeerUnreachable(message))
        elif state := self._attempts.get(reply.nonce.partition("-")[2]):
            self._perform(state, state.answered(reply, self._clock()))
