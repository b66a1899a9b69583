"""The state machine of one pull: (state, event, now) -> actions. No I/O, no clock.

    HELD --pull--> WAITING --peer ready--> READING --all read--> FENCING --ok--> ENDED
      |               |                       |                     |
      `---------------+-----------------------+- failure or cancel -'
                                              |
                                   DRAINING (READs still active) --all ended--> ENDED

The fence is P's answer to COMPLETE: it confirms that the lease was held until all READs
had ended. While P still computes the prompt, READING proceeds in cuts: each cut has the
tokens that P has announced since the previous cut, and READING then waits for more.
"""

from msgspec.structs import replace

from kvcache.transfer.pulls import lease_messages
from kvcache.transfer.pulls.messages import (
    Pull,
    PullBegun,
    PullDone,
    PullDrained,
    PullFailed,
    PullReport,
    PullSealed,
    PullSettings,
    PullStuck,
    RankEnded,
    StopPull,
    address_of,
    joint_path,
    key_of,
)
from kvcache.transfer.pulls.pull_actions import Action as Action
from kvcache.transfer.pulls.pull_actions import Phase as Phase
from kvcache.transfer.pulls.pull_actions import RecordPeerFailure as RecordPeerFailure
from kvcache.verify.scope import DigestPart, Scope
from protocol.errors import (
    BatonError,
    InternalError,
    KVCorrupt,
    LeaseGone,
    PeerIncompatible,
    PeerUnreachable,
    PullCircuitOpen,
    PullTimeout,
    TransferFailed,
)
from protocol.handshake import (
    AbortLease,
    Complete,
    Digest,
    GetDigest,
    LeaseEnded,
    Ok,
    Progress,
    Subscribe,
)
from protocol.messages import RemotePrefill

# Codes of errors that are not counted in the peer's circuit breaker.
_INNOCENT_CODES = (InternalError.code, PullCircuitOpen.code, PeerIncompatible.code)
_NEVER = float("inf")


class PullState:
    """One pull. Methods that take an event return the resulting actions, in order.

    Args:
        attempt_id: identifies this pull in messages to P; see lease_messages.py.
        tokens_per_block: tokens of one of this engine's blocks, on all ranks together.

    Attributes:
        scheduled_tick: when PullTable has scheduled a `tick`. Only PullTable uses it.
        is_drained_reported: a PullDrained was returned.
    """

    def __init__(
        self,
        pull_id: str,
        remote: RemotePrefill,
        num_ranks: int,
        settings: PullSettings,
        attempt_id: str,
        now: float,
        tokens_per_block: int = 1,
    ) -> None:
        self.pull_id = pull_id
        self.remote = remote
        self.attempt_id = attempt_id
        self.key = key_of(remote)
        self.address = address_of(remote)
        self._peer_address = f"{remote.host}:{remote.port}"
        self.phase = Phase.HELD
        self.scheduled_tick = _NEVER
        self.is_drained_reported = False
        self._num_ranks = num_ranks
        self._settings = settings
        self._tokens_per_block = tokens_per_block
        self._order: Pull | None = None
        # P still computes the prompt, and has not sent the reference.
        self._grows = remote.transfer_id is not None
        self._blocks = list(remote.block_ids)
        self._ordered_stop = 0  # ranks were ordered to read the tokens before this one
        self._reading: set[int] = set()  # ranks that have not reported their end
        self._reports: list[RankEnded] = []
        self._verified = "off"  # as in PullDone
        self._is_converted = False  # as in PullDone
        # Scope of the current cut's digests; None: not needed, or found to be equal.
        self._scope: Scope | None = None
        self._parts: list[DigestPart] = []  # the ranks' parts of D's digest of the cut
        self._sums: bytes | None = None  # P's digest of the cut
        # The two digests differed, and P's digest was requested again. If they differed
        # because the lease had ended, P now answers LeaseEnded.
        self._is_repeating_digest = False
        self._error: BatonError | None = None
        self._is_failure_reported = False
        self._is_cancelled = False
        self._began = now
        self._fence_began = now
        # The first renewal is sent at once, because the lease may have ended already.
        self._next_renewal = now
        self._timeout = _NEVER  # when the phase times out
        self._next_retry = _NEVER  # when to repeat COMPLETE or GetDigest
        # While P computes the prompt, the pull fails if P does not answer by this time.
        self._answer_deadline = _NEVER
        if self._grows:
            self._answer_deadline = now + settings.fence_timeout_s

    @property
    def is_reading(self) -> bool:
        """True if any rank has not reported the end of its share."""
        return bool(self._reading)

    @property
    def hangs(self) -> bool:
        """True if READs of a given-up pull are still active after `drain_grace_s`."""
        return self.phase is Phase.DRAINING and self._timeout == _NEVER

    @property
    def is_untouched(self) -> bool:
        """True if the lease need not be aborted when this pull is given up.

        This holds if no READ was ordered, and if the sender of the reference then ends
        the lease itself or gives the reference to a different engine.
        """
        return self.remote.sender_releases and self.phase in (Phase.HELD, Phase.WAITING)

    def deadline(self) -> float:
        """When `tick` next has something to do; infinity for never."""
        deadline = min(self._timeout, self._next_retry)
        if self._renews:
            deadline = min(deadline, self._next_renewal, self._answer_deadline)
        return deadline

    # -- events

    def pull(self, order: Pull, now: float) -> None:
        """Stores the engine's order to read; `on_peer_ready` begins to read."""
        if self.phase is Phase.HELD:
            self.phase = Phase.WAITING
            self._order = order
            self._began = now
            self._ordered_stop = order.token_start

    def on_peer_ready(
        self, now: float, verified: str = "off", *, is_converted: bool = False
    ) -> list[Action]:
        """Orders the first cut. Called once the handshake is complete.

        Args:
            verified, is_converted: as in PullDone.
        """
        if self.phase is not Phase.WAITING or self._order is None:
            return []
        self.phase = Phase.READING
        self._verified = verified
        self._is_converted = is_converted
        self._timeout = now + self._settings.pull_timeout_s
        return self._read_next_cut(now)

    def on_report(self, report: PullReport, now: float) -> list[Action]:
        """Handles the report of a rank: RankFailing or RankEnded."""
        if not isinstance(report, RankEnded):
            if self.phase is not Phase.READING:
                return []
            return self._fail_by_peer(report.error.to_error(), now)
        if report.rank not in self._reading:
            return []
        self._reading.discard(report.rank)
        self._reports.append(report)
        if self.phase is Phase.DRAINING:
            return [] if self._reading else self._end_drained()
        if not report.complete:
            error: BatonError = TransferFailed(f"rank {report.rank} stopped reading")
            if report.error:
                error = report.error.to_error()
            return self._fail_by_peer(error, now)
        if report.part:
            self._parts.append(report.part)
        return self._continue_when_verified(now)

    def on_reply(
        self, reply: Ok | LeaseEnded | Progress | Digest, now: float
    ) -> list[Action]:
        """Handles P's answer to a message of this pull."""
        if self._grows and self._renews:
            self._answer_deadline = now + self._settings.fence_timeout_s
        if isinstance(reply, Progress):
            return self._on_blocks_announced(reply, now) if self._renews else []
        if isinstance(reply, Digest):
            if reply.nonce != self._digest_nonce or self.phase is not Phase.READING:
                return []
            self._sums = reply.sums
            self._next_retry = _NEVER
            return self._continue_when_verified(now)
        is_fence = (
            reply.nonce == f"complete-{self.attempt_id}" and self.phase is Phase.FENCING
        )
        renewal = "subscribe" if self._grows else "renew"
        renewal_nonces = (f"{renewal}-{self.attempt_id}", self._digest_nonce)
        is_renewal = reply.nonce in renewal_nonces and self._renews
        if not (is_fence or is_renewal):
            return []
        if isinstance(reply, LeaseEnded):
            lease_name = f"lease {self.remote.lease_id} on {self.remote.engine_id}"
            return self.fail(LeaseGone(f"{lease_name} is gone: {reply.reason}"), now)
        return self._end(self._done(now)) if is_fence else []

    def fail(self, error: BatonError, now: float) -> list[Action]:
        """Fails an open pull that was not given up. Counts no failure of the peer."""
        if not (self._renews or self.phase is Phase.FENCING):
            return []
        self._error = error
        return self._stop(now)

    def cancel(self, now: float, *, keep_lease: bool = False) -> list[Action]:
        """Gives the pull up. One PullDrained follows, perhaps after a PullStuck.

        Neither PullDone nor PullFailed follows.

        Args:
            keep_lease: if the pull `is_untouched`, keep the lease for another engine.
        """
        if self._is_cancelled or self.phase is Phase.ENDED:
            return []
        self._is_cancelled = True
        if keep_lease and self.is_untouched:
            unsubscribe = [self.abort_message(keep_lease=True)] if self._grows else []
            return self._end(self._drained_event(), *unsubscribe)
        if self.phase is Phase.DRAINING:
            return [PullStuck(self.pull_id)] if self._is_failure_reported else []
        return self._stop(now)

    def tick(self, now: float) -> list[Action]:
        """Sends the messages that are due, and fails the pull at a timeout."""
        actions: list[Action] = []
        if self._renews and now >= self._next_renewal:
            self._next_renewal = now + self._renew_interval_s()
            if self._grows:
                actions.append(self._subscribe())
            else:
                actions.append(lease_messages.renew_lease(self.remote, self.attempt_id))
        if self._renews and now >= self._answer_deadline:
            error = PeerUnreachable(
                f"{self._peer_address} sent no answer for "
                f"{self._settings.fence_timeout_s:g} s while it computed the prompt"
            )
            return actions + self._fail_by_peer(error, now)
        if now >= self._timeout:
            return actions + self._on_timeout(now)
        if now >= self._next_retry:
            if self._scope:
                actions.append(self._request_digest(self._scope, now))
            else:
                actions.append(self._complete(now))
        return actions

    def _read_next_cut(self, now: float) -> list[Action]:
        """Orders the next cut, or requests the fence after the last cut.

        Does nothing while a cut is being read or verified. While P computes the prompt,
        a cut has all newly announced tokens, in full blocks of this engine.
        """
        order = self._order
        if self.phase is not Phase.READING or order is None:
            return []
        if self._reading or self._scope:
            return []
        stop = order.token_stop
        if self._grows:
            num_available = len(self._blocks) * self.remote.block_size
            stop = min(stop, num_available - num_available % self._tokens_per_block)
            if stop <= self._ordered_stop:
                return []
        elif self._ordered_stop == stop and self._reports:
            self.phase = Phase.FENCING
            self._fence_began = now
            self._timeout = now + self._settings.fence_timeout_s
            return [self._complete(now)]
        if self.remote.transfer_id is not None:
            order = replace(
                order,
                token_start=self._ordered_stop,
                token_stop=stop,
                lease_id=self.remote.lease_id,
                remote_block_ids=list(self._blocks),
            )
        self._ordered_stop = stop
        self._reading = set(range(self._num_ranks))
        self._timeout = now + self._settings.pull_timeout_s
        return self._order_cut(order, now)

    def _order_cut(self, order: Pull, now: float) -> list[Action]:
        """Begins a cut; returns the order and, with verification, a digest request."""
        self._parts = []
        self._sums = None
        self._is_repeating_digest = False
        is_empty = order.token_start == order.token_stop
        if self._verified not in ("sample", "all") or is_empty:
            return [order]
        self._scope = Scope(
            order.lease_id,
            order.token_start,
            order.token_stop,
            is_sample=self._verified == "sample",
            min_resume_tokens=order.min_resume_tokens,
        )
        request = self._request_digest(self._scope, now)
        return [replace(order, scope=self._scope), request]

    def _on_blocks_announced(self, progress: Progress, now: float) -> list[Action]:
        """Stores the blocks that P has announced, and orders the next cut.

        Ignores the message if an earlier announcement was missed. P then announces all
        missing blocks after the next Subscribe message.
        """
        if not self._grows or progress.first > len(self._blocks):
            return []
        actions: list[Action] = []
        if not self.remote.lease_id:
            self.remote = replace(
                self.remote,
                lease_id=progress.lease_id,
                lease_s=progress.lease_s,
                block_size=progress.block_size,
            )
            actions.append(PullBegun(self.pull_id, progress.lease_id))
        elif progress.lease_id != self.remote.lease_id:
            error = LeaseGone(
                f"{self.remote.engine_id} computes the prompt again, under a new lease"
            )
            return self.fail(error, now)
        self._blocks[progress.first :] = progress.block_ids
        if self.phase is Phase.READING:
            self._timeout = now + self._settings.pull_timeout_s
        if progress.reference:
            self._grows = False
            self._answer_deadline = _NEVER
            self._next_renewal = now + self._renew_interval_s()
            actions.append(PullSealed(self.pull_id, progress.reference))
        return actions + self._read_next_cut(now)

    @property
    def _digest_nonce(self) -> str:
        verb = "again" if self._is_repeating_digest else "digest"
        return f"{verb}{self._ordered_stop}-{self.attempt_id}"

    def _request_digest(self, scope: Scope, now: float) -> GetDigest:
        self._next_retry = now + self._settings.fence_retry_s
        return lease_messages.request_digest(self.remote, self._digest_nonce, scope)

    def _continue_when_verified(self, now: float) -> list[Action]:
        """When all ranks have read a cut, compares digests and orders the next cut."""
        scope = self._scope
        if self._reading or (scope is not None and self._sums is None):
            return []
        if scope is not None and self._sums is not None:
            engine = self.remote.engine_id
            if not self._sums:
                message = f"{engine} could not compute the digest of its KV"
                return self._fail_by_peer(TransferFailed(message), now)
            faults = scope.differences(self._parts, self._sums)
            if faults and not self._is_repeating_digest:
                self._is_repeating_digest = True
                self._sums = None
                return [self._request_digest(scope, now)]
            if faults:
                message = f"the pulled KV differs from the KV of {engine}: {faults}"
                return self._fail_by_peer(KVCorrupt(message), now)
            self._scope = None
        return self._read_next_cut(now)

    # -- messages to P

    @property
    def _renews(self) -> bool:
        """True while the lease is renewed: the phases before the fence."""
        return self.phase in (Phase.HELD, Phase.WAITING, Phase.READING)

    def _renew_interval_s(self) -> float:
        interval_s = self._settings.renew_interval_s
        return lease_messages.renew_interval_s(self.remote, interval_s, self._grows)

    def _subscribe(self) -> Subscribe:
        return lease_messages.subscribe(self.remote, self.attempt_id, len(self._blocks))

    def _complete(self, now: float) -> Complete:
        self._next_retry = now + self._settings.fence_retry_s
        return lease_messages.complete_lease(self.remote, self.attempt_id)

    def abort_message(self, *, keep_lease: bool = False) -> AbortLease:
        """The message that gives up the lease; see lease_messages.abort_lease."""
        return lease_messages.abort_lease(
            self.remote, self.attempt_id, keep_lease=keep_lease
        )

    # -- the end

    def _fail_by_peer(self, error: BatonError, now: float) -> list[Action]:
        """Fails the pull. Also counts a peer failure, except for _INNOCENT_CODES."""
        actions: list[Action] = []
        if error.code not in _INNOCENT_CODES:
            actions.append(RecordPeerFailure())
        return actions + self.fail(error, now)

    def _on_timeout(self, now: float) -> list[Action]:
        peer = self._peer_address
        limit_s = self._settings.pull_timeout_s
        if self.phase is Phase.READING:
            if self._reading:
                message = f"reading the KV from {peer} took longer than {limit_s:g} s"
            elif self._scope:
                message = f"{peer} sent no digest of its KV within {limit_s:g} s"
            else:  # P computes the prompt slowly, but no READ of P's memory has failed
                message = f"{peer} did not continue the prompt within {limit_s:g} s"
                return self.fail(PullTimeout(message), now)
            return self._fail_by_peer(PullTimeout(message), now)
        if self.phase is Phase.FENCING:
            limit_s = self._settings.fence_timeout_s
            message = f"{peer} did not confirm the lease within {limit_s:g} s"
            return self._fail_by_peer(PeerUnreachable(message), now)
        # In DRAINING, `drain_grace_s` has passed, but READs are still active.
        self._timeout = _NEVER
        if self._is_cancelled:
            return [PullStuck(self.pull_id)]
        return [self._failure_event(drained=False)]

    def _stop(self, now: float) -> list[Action]:
        """Stops the pull's READs; ends the pull at once if no READ can be active."""
        if not self._reading:
            return self._end_drained()
        self.phase = Phase.DRAINING
        self._next_retry = _NEVER
        self._timeout = now + self._settings.drain_grace_s
        return [StopPull(self.pull_id)]

    def _end_drained(self) -> list[Action]:
        """Ends a pull that has failed or was cancelled, and aborts its lease.

        The lease is aborted only now, because P must not unmap the memory or reuse the
        blocks while READs are active.
        """
        messages: list[Action] = []
        if not isinstance(self._error, LeaseGone):
            if self._grows and not self.remote.lease_id:
                # P ignores aborts of unknown offers. Subscribe makes this offer known.
                messages.append(self._subscribe())
            messages.append(self.abort_message())
        if self._is_cancelled or self._is_failure_reported:
            return self._end(self._drained_event(), *messages)
        return self._end(self._failure_event(drained=True), *messages)

    def _end(self, *actions: Action) -> list[Action]:
        self.phase = Phase.ENDED
        self._timeout = _NEVER
        self._next_retry = _NEVER
        return list(actions)

    def _failure_event(self, drained: bool) -> PullFailed:
        assert self._error is not None
        self._is_failure_reported = True
        return PullFailed(self.pull_id, self._error, drained)

    def _drained_event(self) -> PullDrained:
        self.is_drained_reported = True
        return PullDrained(self.pull_id)

    def _done(self, now: float) -> PullDone:
        assert self._order is not None
        return PullDone(
            pull_id=self.pull_id,
            nbytes=sum(report.nbytes for report in self._reports),
            num_descriptors=sum(report.num_descriptors for report in self._reports),
            seconds=now - self._began,
            path=joint_path([report.path for report in self._reports]),
            fence_s=now - self._fence_began,
            num_tokens=self._order.token_stop - self._order.token_start,
            verified=self._verified,
            is_converted=self._is_converted,
        )
