"""The thread of a decode engine's rank 0 that runs all pulls of the engine.

All it decides is in pull_state.py (one pull) and peers.py (handshakes); here are the sockets, the
clock and the bookkeeping of who is waiting for which answer.
"""

import selectors
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from kvcache.stripe import Stripe
from kvcache.transfer.pulls.messages import (
    AddPeer,
    DropPeer,
    Event,
    PeerFailed,
    PeerKey,
    PeerReady,
    Pull,
    PullDone,
    PullDrained,
    PullFailed,
    PullSettings,
    PullStuck,
    RankEnded,
    Report,
    StopPull,
    pull_command,
)
from kvcache.transfer.pulls.peers import (
    DISTRUSTED,
    Peer,
    PeerStatus,
    PeerTable,
    Trust,
    address_of,
    check_reference,
    key_of,
    unreachable,
)
from kvcache.transfer.pulls.pull_state import (
    Action,
    Deadlines,
    Emit,
    EndedPulls,
    FanOut,
    Phase,
    PullState,
    SendAbort,
    SendComplete,
    SendRenew,
    StopRanks,
    SuspectPeer,
)
from kvcache.transfer.pulls.rank_links import RankLinks
from kvcache.transfer.session.lease_client import Address, LeaseClient
from kvcache.transfer.session.lease_server import new_id
from protocol.errors import BatonError, InternalError, LeaseGone, PeerUnreachable, PullWithheld
from protocol.handshake import CompatRecord, GetMetadata, Gone, Metadata, Ok, Refused, Reply
from protocol.ipc.waker import Waker
from protocol.messages import RemotePrefill
from protocol.process.logging import get_logger
from protocol.process.vital_threads import VitalThread

logger = get_logger(__name__)

_CLOSE_LINGER_S = 0.2


class PullCoordinator:
    """Handshakes, renewals, fan-out, the fence. All public methods may be called by any thread;
    what they ask for is done by the coordinator's own.

    Args:
        worker_address: to listen on for the ranks' workers: `ipc://PATH`, in a directory of this
            user's own.
        compat: of this engine.
        on_event: called from the thread when `drain` has something; must not block.
        convert: accept peers with another KV dtype.
        stripe: of any rank, where ranks share tokens: peers must have blocks to cut it from.

    Raises:
        OSError: the worker address cannot be bound.
    """

    def __init__(
        self,
        worker_address: str,
        num_ranks: int,
        compat: CompatRecord,
        secret: bytes,
        settings: PullSettings | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_event: Callable[[], None] | None = None,
        convert: bool = False,
        stripe: Stripe | None = None,
    ) -> None:
        self._num_ranks = num_ranks
        self._settings = settings or PullSettings()
        self._clock = clock
        self._on_event = on_event or (lambda: None)
        self._events: deque[Event] = deque()
        self._untold = False  # an event has come since `on_event` was called
        self._counters: Counter[str] = Counter()
        self._side_channel = LeaseClient(secret, clock)
        self._calls: deque[Callable[[], None]] = deque()
        self._waker = Waker()
        self._selector = selectors.DefaultSelector()  # its data are calls
        for source, call in ((self._waker, self._obey), (self._side_channel, self._take_replies)):
            self._selector.register(source, selectors.EVENT_READ, call)
        on_report = partial(self._try, self._take_report)
        self._ranks = RankLinks(worker_address, num_ranks, self._selector, on_report)
        self._stopping = threading.Event()
        self._thread = VitalThread(self._run, "pull-coordinator")
        self._peers = PeerTable(compat, self._settings, convert, stripe)
        self._trust = Trust(self._settings)
        self._pulls: dict[str, PullState] = {}
        self._attempts: dict[str, PullState] = {}  # by attempt id: whose answer it is
        self._orders: dict[str, Pull] = {}  # of pulls begun
        self._deadlines = Deadlines()
        self._ended = EndedPulls()
        self._metadata_asked: dict[Address, str] = {}  # the nonce
        self._awaiting_connect: set[PeerKey] = set()
        self._announced: dict[PeerKey, Address] = {}  # peers that the ranks know

    def start(self) -> None:
        self._thread.start()

    def knows(self, remote: RemotePrefill) -> bool:
        """Whether hands were shaken with its engine, so that `connect` would tell PeerReady."""
        peer = self._peers.get(key_of(remote))
        is_trusted = not self._trust.refuses(key_of(remote), self._clock())
        return peer is not None and peer.status is PeerStatus.READY and is_trusted

    def connect(self, remote: RemotePrefill) -> None:
        """Shakes hands unless that was done; PeerReady or PeerFailed tells the outcome."""
        self._call(lambda: self._do_connect(remote))

    def hold(self, pull_id: str, remote: RemotePrefill) -> None:
        """Keeps the lease alive from now on, before there are blocks to read into."""
        self._call(lambda: self._do_hold(pull_id, remote))

    def pull(
        self,
        pull_id: str,
        remote: RemotePrefill,
        token_start: int,
        token_stop: int,
        local_block_ids: Sequence[int],
    ) -> None:
        """Reads tokens [token_start, token_stop) into blocks of this engine, on every rank.

        Args:
            local_block_ids: from token 0 of the sequence on, each of this engine's block size
                times its dcp.
        """
        order = pull_command(pull_id, remote, token_start, token_stop, list(local_block_ids))
        self._call(lambda: self._do_pull(remote, order))

    def cancel(self, pull_id: str, *, lend: bool = False) -> None:
        """Gives up a pull in any state; one PullDrained follows. `lend`: see PullState.cancel."""
        self._call(lambda: self._do_cancel(pull_id, lend))

    def drain(self) -> list[Event]:
        """Events since the last call, in order."""
        return [self._events.popleft() for _ in range(len(self._events))]

    def counters(self) -> Counter[str]:
        more = self._side_channel.counters
        return Counter({**self._counters, **more, "pulls_open": len(self._pulls)})

    def handshakes(self) -> dict[str, int]:
        """Ended handshakes by outcome: "ok", or the code of the error."""
        return dict(self._peers.outcomes)

    def close(self) -> None:
        """Ends the thread; open pulls' leases, unless untouched, are aborted without an answer."""

        if self._stopping.is_set():
            return
        self._stopping.set()
        self._waker.wake()
        if self._thread.is_alive():
            self._thread.join()
        for state in filter(lambda pull: not pull.is_untouched, self._states()):
            self._send(state, SendAbort())
        self._side_channel.close(_CLOSE_LINGER_S)
        self._ranks.close()
        self._selector.close()
        self._waker.close()

    # -- the thread

    def _call(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        self._waker.wake()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._round()

    def _round(self) -> None:
        """Waits until there is something to do, and does all of it."""
        wait_s = self._wait_s()
        for key, _ in self._selector.select(None if wait_s == float("inf") else wait_s):
            self._try(key.data)
        self._tell()
        self._try(self._take_replies)  # connections that are due to be made anew
        self._try(self._tick)
        self._tell()

    def _tell(self) -> None:
        if self._untold:
            self._untold = False
            self._on_event()

    def _obey(self) -> None:
        """What was asked for by other threads."""
        self._waker.clear()
        for _ in range(len(self._calls)):
            self._try(self._calls.popleft())

    def _take_replies(self) -> None:
        for address, reply in self._side_channel.receive_all():
            self._try(self._take_reply, address, reply)

    def _wait_s(self) -> float:
        """Until there is something to do, whatever comes; infinity for ever."""
        due = min(self._peers.deadline(), self._deadlines.next)
        lost_s = self._settings.connection_timeout_s
        due = min([due, *(since + lost_s for since in self._cut_off().values())])
        return max(0.0, min(due - self._clock(), self._side_channel.retry_in_s()))

    def _try(self, part: Callable[..., Any], *what: Any) -> Any:
        """A part of a round. If it fails the others are done: nobody says again what has come."""
        try:
            return part(*what)
        except Exception:
            self._survive()

    def _survive(self) -> None:
        """After a bug of our own: no pull may hang for it, and later ones shall work."""
        logger.exception("pull coordinator")
        self._counters["internal_errors"] += 1
        for state in self._states():
            try:
                error = InternalError("the pull coordinator failed")
                self._perform(state, state.fail(error, self._clock()))
            except Exception:
                logger.exception("pull coordinator, giving up pull %s", state.pull_id)

    def _tick(self) -> None:
        now, lost_s = self._clock(), self._settings.connection_timeout_s
        asking, late = self._peers.due(now)
        for peer in asking:
            nonce = self._metadata_asked.setdefault(peer.address, new_id())
            self._side_channel.post(peer.address, GetMetadata(nonce=nonce))
        for peer in late:
            self._peer_decided(peer)
        for address, since in self._cut_off().items():
            if now - since >= lost_s:
                self._lost(address)
        for pull_id in self._deadlines.due(now):
            if state := self._pulls.get(pull_id):
                self._perform(state, state.tick(now))

    def _emit(self, event: Event) -> None:
        self._counters["pulls_failed"] += isinstance(event, PullFailed)
        self._events.append(event)
        self._untold = True

    # -- connections

    def _is_used(self, address: Address) -> bool:
        """Whether somebody waits for what will come from there."""
        pulled = any(address_of(state.remote) == address for state in self._pulls.values())
        return pulled or bool(self._peers.fetching_from(address))

    def _cut_off(self) -> dict[Address, float]:
        """Addresses without a connection that are used or that the ranks know, and since when."""
        found, known = self._side_channel.unconnected(), set(self._announced.values())
        return {a: since for a, since in found.items() if a in known or self._is_used(a)}

    def _refresh_connection(self, address: Address) -> None:
        """A connection lost while nobody used it must not be held against its next user."""
        since = self._side_channel.unconnected().get(address)
        if since is not None and not self._is_used(address):
            if self._clock() - since > self._settings.connection_timeout_s / 2:
                self._side_channel.forget(address)  # sooner, an abort may be queued

    def _lost(self, address: Address) -> None:
        """Nothing listens there: whatever waits for an answer from there fails now, and the ranks
        forget the peer, whose memory is not freed while it is mapped."""
        self._counters["connections_lost"] += 1
        now, error = self._clock(), unreachable(address, "cannot be connected to")
        for key in [key for key, at in self._announced.items() if at == address]:
            self._forget(key)
        self._side_channel.forget(address)
        for state in self._states():
            if address_of(state.remote) == address:
                self._forget(key_of(state.remote))
                self._perform(state, state.fail(error, now))
        self._fail_handshakes(address, error)

    def _fail_handshakes(self, address: Address, error: PeerUnreachable) -> None:
        for peer in self._peers.fetching_from(address):
            self._peers.fail(peer, error, self._clock())
            self._peer_decided(peer)

    def _forget(self, key: PeerKey) -> None:
        self._peers.forget(key)
        if self._announced.pop(key, None):
            self._ranks.broadcast(DropPeer(*key))

    # -- what the engine asks for

    def _do_connect(self, remote: RemotePrefill) -> None:
        if withheld := self._withheld(remote):
            self._emit(PeerFailed(*key_of(remote), withheld))
            return
        self._refresh_connection(address_of(remote))
        peer = self._peers.connect(remote, self._clock())
        self._awaiting_connect.add(peer.key)
        self._peer_decided(peer)

    def _do_hold(self, pull_id: str, remote: RemotePrefill) -> None:
        if pull_id in self._ended or pull_id in self._pulls:
            return
        self._refresh_connection(address_of(remote))
        now, attempt_id = self._clock(), new_id()
        state = PullState(pull_id, remote, self._num_ranks, self._settings, attempt_id, now)
        self._pulls[pull_id] = self._attempts[attempt_id] = state
        self._counters["pulls"] += 1
        self._perform(state, state.tick(now))

    def _do_pull(self, remote: RemotePrefill, order: Pull) -> None:
        self._do_hold(order.pull_id, remote)
        if (state := self._pulls.get(order.pull_id)) is None or order.pull_id in self._orders:
            return
        now = self._clock()
        self._orders[order.pull_id] = order
        state.pull(now)
        if state.phase is Phase.WAITING:
            self._offer(state, self._peers.connect(remote, now))

    def _do_cancel(self, pull_id: str, lend: bool) -> None:
        state = self._pulls.get(pull_id)
        if state is not None:
            self._perform(state, state.cancel(self._clock(), lend=lend))
        elif not self._ended.drained_told(pull_id):
            self._ended.add(pull_id, drained_told=True)
            self._emit(PullDrained(pull_id))

    # -- peers

    def _take_metadata(self, address: Address, reply: Metadata) -> None:
        if reply.nonce != self._metadata_asked.get(address):
            return
        self._supersede((reply.engine.engine_id, reply.engine.incarnation), address)
        for peer in self._peers.fetching_from(address):
            self._peers.metadata_came(peer, reply.engine, self._clock())
            self._peer_decided(peer)

    def _supersede(self, current: PeerKey, address: Address) -> None:
        """What other engines at this address leased is not there any more. A restarted server
        has a new engine id as well as a new incarnation."""
        known = {
            **self._announced,
            **{key_of(s.remote): address_of(s.remote) for s in self._states() if s.is_undecided},
        }
        for key, at in known.items():
            if key == current or at != address:
                continue
            self._counters["peer_restarts"] += 1
            self._forget(key)
            gone = LeaseGone(f"prefill server {key[0]} was restarted")
            for state in self._states():
                if key_of(state.remote) == key:
                    self._perform(state, state.fail(gone, self._clock()))

    def _states(self) -> list[PullState]:
        return list(self._pulls.values())

    def _peer_decided(self, peer: Peer) -> None:
        """Tells whoever waits for this peer, if there is something to tell."""
        if peer.status is PeerStatus.FETCHING:
            return
        self._metadata_asked.pop(peer.address, None)
        if peer.key in self._awaiting_connect:
            self._awaiting_connect.discard(peer.key)
            if peer.error is not None:
                self._emit(PeerFailed(*peer.key, peer.error))
            else:
                self._emit(PeerReady(*peer.key))
        for state in self._states():
            if key_of(state.remote) == peer.key:
                self._offer(state, peer)
        if peer.error and not any(address_of(s.remote) == peer.address for s in self._states()):
            self._side_channel.forget(peer.address)  # or it would try to reconnect for ever

    def _offer(self, state: PullState, peer: Peer) -> None:
        """Lets a waiting pull go on, or fail, when its peer is known."""
        if state.phase is not Phase.WAITING or peer.status is PeerStatus.FETCHING:
            return
        now = self._clock()
        if peer.metadata is None:
            error = peer.error or PeerUnreachable("the handshake failed")
            self._perform(state, state.fail(error, now))
            return
        try:
            check_reference(state.remote, peer.metadata)
            if withheld := self._withheld(state.remote):
                raise withheld
        except BatonError as error:
            self._perform(state, state.fail(error, now))
            return
        if peer.key not in self._announced:
            self._announced[peer.key] = peer.address
            self._ranks.broadcast(AddPeer(peer.metadata))
        self._perform(state, state.peer_ready(now))

    def _withheld(self, remote: RemotePrefill) -> PullWithheld | None:
        """Why nothing shall be pulled from there now: it would only be lost as well, and blocks
        with it."""
        key = key_of(remote)
        if key not in self._trust:
            return None
        others = [s for s in self._pulls.values() if s.reads and key_of(s.remote) == key]
        hangs = any(state.hangs for state in others)
        if not hangs and not self._trust.refuses(key, self._clock(), busy=bool(others)):
            return None
        why = "READs from it hang" if hangs else "the latest pulls failed"
        return PullWithheld(f"nothing is pulled from prefill server {key[0]} for now: {why}")

    def _suspect(self, remote: RemotePrefill) -> None:
        """A pull from there failed: shake hands anew, and do not try for ever."""
        self._peers.forget(key_of(remote))
        if self._trust.failed(key_of(remote), self._clock()):
            logger.warning(DISTRUSTED, remote.engine_id, *address_of(remote))

    # -- actions

    def _perform(self, state: PullState, actions: Iterable[Action]) -> None:
        try:
            for action in actions:
                self._send(state, action)
        finally:
            if state.phase is not Phase.ENDED:
                self._deadlines.plan(state.pull_id, state.deadline())
            elif self._pulls.pop(state.pull_id, None) is not None:
                del self._attempts[state.attempt_id]
                self._orders.pop(state.pull_id, None)
                self._deadlines.forget(state.pull_id)
                self._ended.add(state.pull_id, state.drained_told)

    def _send(self, state: PullState, action: Action) -> None:
        remote = state.remote
        match action:
            case SendRenew() | SendComplete() | SendAbort():
                self._side_channel.post(address_of(remote), state.request(action))
            case FanOut():
                self._ranks.broadcast(self._orders[state.pull_id])
            case StopRanks():
                self._ranks.broadcast(StopPull(state.pull_id))
            case SuspectPeer():
                self._suspect(remote)
            case Emit(event):
                if isinstance(event, PullDone):
                    self._trust.done(key_of(remote))
                elif isinstance(event, PullStuck):
                    self._suspect(remote)
                self._emit(event)

    # -- what comes in

    def _take_report(self, report: Report) -> None:
        if (state := self._pulls.get(report.pull_id)) is None:
            return
        if isinstance(report, RankEnded):
            self._perform(state, state.rank_ended(report, self._clock()))
        else:
            self._perform(state, state.rank_failing(report, self._clock()))

    def _take_reply(self, address: Address, reply: Reply) -> None:
        if isinstance(reply, Metadata):
            self._take_metadata(address, reply)
        elif isinstance(reply, Refused):
            self._counters["refused"] += 1
            where = f"{address[0]}:{address[1]}"
            error = PeerUnreachable(f"{where} refused us: {reply.reason}")
            self._fail_handshakes(address, error)
        elif state := self._attempts.get(reply.nonce.partition("-")[2]):
            reason = reply.reason if isinstance(reply, Gone) else ""
            answered = state.answered(reply.nonce, isinstance(reply, Ok), reason, self._clock())
            self._perform(state, answered)
