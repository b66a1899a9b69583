"""The thread of a decode engine's rank 0 that runs all pulls of the engine.

All it decides is in pull_state.py (one pull) and peers.py (handshakes); here are the sockets, the
clock and the bookkeeping of who is waiting for which answer.

What an engine or a worker in this process has to say is obeyed in their own threads, in turns
(turns.py): a pull of 128 tokens takes less time than waking a thread twice.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kvcache.stripe import Stripe
from kvcache.transfer.event_queue import EventQueue
from kvcache.transfer.peers import (
    Peer,
    PeerStatus,
    PeerTable,
    address_of,
    check_reference,
    key_of,
    unreachable,
)
from kvcache.transfer.pull import (
    AddPeer,
    DropPeer,
    Event,
    PeerFailed,
    PeerKey,
    PeerReady,
    PullDrained,
    PullSettings,
    RankEnded,
    Report,
    StopPull,
    pull_command,
)
from kvcache.transfer.pull_state import (
    Action,
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
from kvcache.transfer.questions import OpenQuestions
from kvcache.transfer.rank_links import InsideLink, RankLinks
from kvcache.transfer.side_channel import new_id
from kvcache.transfer.side_client import Address, SideChannelClient
from kvcache.transfer.turns import Turns
from protocol.errors import BatonError, InternalError, LeaseGone, PeerUnreachable
from protocol.handshake import CompatRecord, Gone, Metadata, Ok, Refused, Reply
from protocol.logging import get_logger
from protocol.messages import RemotePrefill

logger = get_logger(__name__)

_CLOSE_LINGER_S = 0.2
_LOOK_S = 0.25
_Span = tuple[int, int, list[int]]  # of a pull: first token, the one after the last, D's blocks


class PullCoordinator:
    """Handshakes, renewals, fan-out, the fence. All public methods may be called by any thread.

    Args:
        worker_address: to listen on for the ranks' workers: `ipc://PATH` in a directory of this
            user's own, or `tcp://127.0.0.1:0` for a free port.
        compat: of this engine.
        on_event: called from any thread when `drain` has something; must not block.
        convert: accept peers with another KV dtype.
        stripe: of any rank, where ranks share tokens: peers must have blocks to cut it from.
        inside: links to the workers of this process, by rank.

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
        inside: Mapping[int, InsideLink] | None = None,
    ) -> None:
        self._num_ranks = num_ranks
        self._settings = settings or PullSettings()
        self._clock = clock
        self._events = EventQueue(on_event)
        self._counters = self._events.counters
        self._ranks = RankLinks(worker_address, num_ranks, inside or {})
        self._side_channel = SideChannelClient(secret, clock)
        self._turns = Turns(
            "pull-coordinator",
            (self._ranks, self._side_channel),
            turn=self._turn,
            failed=self._survive,
            after=(self._events.tell,),
            deadline=self._deadline,
            clock=clock,
        )
        for link in (inside or {}).values():
            link.on_report = self._turns.take
        self._peers = PeerTable(compat, self._settings, convert, stripe)
        self._pulls: dict[str, PullState] = {}
        self._spans: dict[str, _Span] = {}  # of pulls begun
        self._ended = EndedPulls()
        self._questions = OpenQuestions()
        self._awaiting_connect: set[PeerKey] = set()
        self._announced: dict[PeerKey, Address] = {}  # peers that the ranks know

    @property
    def worker_address(self) -> str:
        """What the ranks' PullWorkers connect to."""
        return self._ranks.address

    def start(self) -> None:
        self._turns.start()

    def knows(self, remote: RemotePrefill) -> bool:
        """Whether hands were shaken with its engine, so that `connect` would tell PeerReady."""
        peer = self._peers.get(key_of(remote))
        return peer is not None and peer.status is PeerStatus.READY

    def connect(self, remote: RemotePrefill) -> None:
        """Shakes hands unless that was done; PeerReady or PeerFailed tells the outcome."""
        self._turns.call(lambda: self._do_connect(remote))

    def hold(self, pull_id: str, remote: RemotePrefill) -> None:
        """Keeps the lease alive from now on, before there are blocks to read into."""
        self._turns.call(lambda: self._do_hold(pull_id, remote))

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
        span = (token_start, token_stop, list(local_block_ids))
        self._turns.call(lambda: self._do_pull(pull_id, remote, span))

    def cancel(self, pull_id: str, *, lend: bool = False) -> None:
        """Gives up a pull in any state; one PullDrained follows. `lend`: see PullState.cancel."""
        self._turns.call(lambda: self._do_cancel(pull_id, lend))

    def drain(self) -> list[Event]:
        """Events since the last call, in order."""
        return self._events.drain()

    def counters(self) -> dict[str, int]:
        return {**self._counters, **self._side_channel.counters, "pulls_open": len(self._pulls)}

    def handshakes(self) -> dict[str, int]:
        """Ended handshakes by outcome: "ok", or the code of the error."""
        return dict(self._peers.outcomes)

    def close(self) -> None:
        """Ends the thread; open pulls' leases, unless untouched, are aborted without an answer."""

        def last() -> None:
            for state in filter(lambda pull: not pull.is_untouched, self._states()):
                self._send(state, SendAbort())
            self._side_channel.close(_CLOSE_LINGER_S)
            self._ranks.close()

        self._turns.close(last)

    def _deadline(self) -> float:
        """When there will be something to do, whatever comes; infinity for never."""
        in_use_s = _LOOK_S if self._pulls else float("inf")  # no waking for each new timeout then
        due = self._clock() + min(self._side_channel.retry_in_s(), in_use_s)
        due = min(due, self._peers.deadline(), *(s.deadline() for s in self._pulls.values()))
        if self._side_channel.all_connected:
            return due
        lost_s = self._settings.connection_timeout_s
        unconnected = {**self._unconnected_in_use(), **self._gone_peers()}
        return min([due, *(since + lost_s for since in unconnected.values())])

    def _turn(self) -> None:
        for report in self._try(self._ranks.receive) or ():
            self._try(self._take_report, report)
        self._events.tell()  # a passed fence: what follows can wait, the engine need not
        for address, reply in self._try(self._side_channel.receive_all) or ():
            self._try(self._take_reply, address, reply)
        self._try(self._tick)

    def _try(self, part: Callable[..., Any], *what: Any) -> Any:
        """A part of a turn. If it fails the others are done: nobody says again what has come."""
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
            self._ask_metadata(peer)
        for peer in late:
            self._peer_decided(peer)
        for address, since in self._unconnected_in_use().items():
            if now - since >= lost_s:
                self._lost(address)
        for address, since in self._gone_peers().items():
            if now - since >= lost_s:
                self._bury(address)
        for state in self._states():
            if state.deadline() <= now:
                self._perform(state, state.tick(now))

    def _unconnected_in_use(self) -> dict[Address, float]:
        """Addresses that somebody waits for and that have no connection, and since when."""
        found = self._side_channel.unconnected()
        used = {address_of(state.remote) for state in self._pulls.values()} if found else set()
        return {a: t for a, t in found.items() if a in used or self._peers.fetching_from(a)}

    def _gone_peers(self) -> dict[Address, float]:
        """Addresses of peers that the ranks know and that have no connection, and since when."""
        known = set(self._announced.values())
        return {a: t for a, t in self._side_channel.unconnected().items() if a in known}

    def _bury(self, address: Address) -> None:
        """Lets the ranks forget a peer that is gone: its memory is not freed while it is mapped."""
        for key in [key for key, at in self._announced.items() if at == address]:
            del self._announced[key]
            self._peers.forget(key)
            self._ranks.broadcast(DropPeer(*key))
        self._side_channel.forget(address)

    def _refresh_connection(self, address: Address) -> None:
        """A connection lost while nobody used it must not be held against its next user."""
        unconnected = self._side_channel.unconnected()
        if address in unconnected and address not in self._unconnected_in_use():
            unused_s = self._clock() - unconnected[address]
            if unused_s > self._settings.connection_timeout_s / 2:  # else an abort may be queued
                self._side_channel.forget(address)

    def _lost(self, address: Address) -> None:
        """Nothing listens there: whatever waits for an answer from there fails now."""
        self._counters["connections_lost"] += 1
        self._bury(address)
        self._fail_address(address, unreachable(address, "cannot be connected to"))

    def _fail_address(self, address: Address, error: PeerUnreachable) -> None:
        now = self._clock()
        for state in self._states():
            if address_of(state.remote) == address:
                self._peers.forget(key_of(state.remote))
                self._perform(state, state.fail(error, now))
        for peer in self._peers.fetching_from(address):
            self._peers.fail(peer, error, now)
            self._peer_decided(peer)

    # -- what the engine asks for

    def _do_connect(self, remote: RemotePrefill) -> None:
        self._refresh_connection(address_of(remote))
        peer = self._peers.connect(remote, self._clock())
        self._awaiting_connect.add(peer.key)
        self._peer_decided(peer)

    def _do_hold(self, pull_id: str, remote: RemotePrefill) -> None:
        if pull_id not in self._ended and pull_id not in self._pulls:
            self._refresh_connection(address_of(remote))
            self._pulls[pull_id] = PullState(
                pull_id,
                remote,
                self._num_ranks,
                self._settings,
                new_id(),
                self._clock(),
            )
            self._counters["pulls"] += 1

    def _do_pull(self, pull_id: str, remote: RemotePrefill, span: _Span) -> bool:
        """Whether nothing is due sooner than before."""
        if not (was_held := pull_id in self._pulls):
            self._do_hold(pull_id, remote)
        if (state := self._pulls.get(pull_id)) is None or pull_id in self._spans:
            return False
        now = self._clock()
        self._spans[pull_id] = span
        state.pull(now)
        if state.phase is Phase.WAITING:
            self._offer(state, self._peers.connect(remote, now))
        return was_held and state.phase is Phase.READING

    def _do_cancel(self, pull_id: str, lend: bool) -> None:
        state = self._pulls.get(pull_id)
        if state is not None:
            self._counters["cancelled"] += 1
            self._perform(state, state.cancel(self._clock(), lend=lend))
        elif not self._ended.drained_told(pull_id):
            self._ended.add(pull_id, drained_told=True)
            self._events.append(PullDrained(pull_id))

    # -- peers

    def _ask_metadata(self, peer: Peer) -> None:
        self._side_channel.post(peer.address, self._questions.metadata(peer.address))

    def _take_metadata(self, reply: Metadata) -> None:
        address = self._questions.metadata_answered(reply.nonce)
        if address is None:
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
            if key != current and at == address:
                self._drop(key)

    def _drop(self, key: PeerKey) -> None:
        self._counters["peer_restarts"] += 1
        self._peers.forget(key)
        if self._announced.pop(key, None):
            self._ranks.broadcast(DropPeer(*key))
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
        self._questions.forget_metadata(peer.address)
        if peer.key in self._awaiting_connect:
            self._awaiting_connect.discard(peer.key)
            if peer.error is not None:
                self._events.append(PeerFailed(*peer.key, peer.error))
            else:
                self._events.append(PeerReady(*peer.key))
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
        except BatonError as error:
            self._perform(state, state.fail(error, now))
            return
        if peer.key not in self._announced:
            self._announced[peer.key] = peer.address
            self._ranks.broadcast(AddPeer(peer.metadata))
        self._perform(state, state.peer_ready(now))

    # -- actions

    def _perform(self, state: PullState, actions: Iterable[Action]) -> None:
        try:
            for action in actions:
                self._send(state, action)
        finally:
            if state.phase is Phase.ENDED and self._pulls.pop(state.pull_id, None) is not None:
                self._spans.pop(state.pull_id, None)
                self._questions.forget_pull(state.pull_id)
                self._ended.add(state.pull_id, state.drained_told)

    def _send(self, state: PullState, action: Action) -> None:
        remote = state.remote
        match action:
            case SendRenew() | SendComplete() | SendAbort():
                request = self._questions.lease(state.pull_id, remote, action)
                self._side_channel.post(address_of(remote), request)
            case FanOut():
                span = self._spans[state.pull_id]
                self._ranks.broadcast(pull_command(state.pull_id, remote, *span))
            case StopRanks():
                self._ranks.broadcast(StopPull(state.pull_id))
            case SuspectPeer():
                self._peers.forget(key_of(remote))
            case Emit(event):
                self._events.append(event)

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
            self._take_metadata(reply)
        elif isinstance(reply, Refused):
            self._refused(address, reply)
        else:
            self._lease_answered(reply)

    def _refused(self, address: Address, reply: Refused) -> None:
        self._counters["refused"] += 1
        error = PeerUnreachable(f"{address[0]}:{address[1]} refused us: {reply.reason}")
        for peer in self._peers.fetching_from(address):
            self._peers.fail(peer, error, self._clock())
            self._peer_decided(peer)

    def _lease_answered(self, reply: Ok | Gone) -> None:
        asked = self._questions.lease_answered(reply.nonce)
        state = self._pulls.get(asked[1]) if asked else None
        if asked is None or state is None:
            return
        reason = reply.reason if isinstance(reply, Gone) else ""
        answered = state.renew_answered if asked[0] == "renew" else state.fence_answered
        self._perform(state, answered(isinstance(reply, Ok), reason, self._clock()))
