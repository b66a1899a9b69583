"""The borrower component of an engine: admits prompts that have KV on another engine,
and pulls that KV.

    add -> connect (first contact only) -> queue -> blocks -> pull -> fence -> run
                       |                                |        |
                       `------- failure policy: recompute here, or fail

All waiting happens on the transfer thread of rank 0. In each round of the core, the
borrower handles the events that the transfer thread has queued, and changes the states
of sequences and blocks. The id of a pull is the request id of its sequence. A pull from
the KV store has the request id with a random suffix.
"""

import logging
import secrets
import time
from collections.abc import Callable

import msgspec

from engine.core.connector import CoreServices, KVConnector
from engine.core.sequence import Phase, Sequence
from engine.core.state.prompt_pull import PromptPull
from engine.kv.borrower_counters import BorrowerCounters
from engine.kv.draft_pulls import DraftPulls
from engine.kv.prefix_lookups import PrefixLookups
from engine.kv.rates import Rates
from engine.kv.stalls import DeadlockTimer, QuarantineTimer, pulls_without_capacity
from engine.kv.store_link import StoreRegion
from kvcache.transfer.pulls.coordinator import PullCoordinator
from kvcache.transfer.pulls.messages import (
    LookedUp,
    PeerDecided,
    PullBegun,
    PullDone,
    PullDrained,
    PullFailed,
    PullSealed,
    PullStuck,
    key_of,
)
from protocol import kv_params
from protocol.errors import (
    BatonError,
    KVCorrupt,
    KVParamsRejected,
    Overloaded,
    PullCircuitOpen,
    from_code,
)
from protocol.messages import RemotePrefill
from protocol.metrics import stat_key

logger = logging.getLogger("baton.kv")


class Borrower(KVConnector):
    """Connects to other engines, pulls KV, and recovers from failed pulls.

    Args:
        policy: the reaction to a failed pull. With "recompute", this engine computes
            the prompt. With "fail", the client receives the error, unless the pull came
            from a lookup. No token is ever computed from the bytes of a failed pull.
        quarantine_timeout_s: longest time that a request waits for blocks that only
            the end of hanging READs can free.
        rates: decides from measurements whether to look up and pull a prefix that
            another engine may have.
        engine_id: the id of this engine.
        get_region: returns the region of this host's KV store; None while no region
            can be read.

    Attributes:
        on_promoted: called when a lookup has found a prefix of a sequence in the KV
            store, with the sequence and the number of tokens of the prefix.
    """

    def __init__(
        self,
        coordinator: PullCoordinator,
        policy: str,
        quarantine_timeout_s: float,
        rates: Rates,
        engine_id: str,
        get_region: Callable[[], StoreRegion | None] = lambda: None,
    ) -> None:
        self._coordinator = coordinator
        self._policy = policy
        self._rates = rates
        self._num_releases = 0  # references that were released unused
        # Sequences with a pull that has not ended, by the id of the pull.
        self._pulling: dict[str, Sequence] = {}
        # Blocks that READs of an ended pull may still write to, by the id of the pull.
        self._undrained: dict[str, list[int]] = {}
        self._deadlock = DeadlockTimer()
        self._quarantine = QuarantineTimer(quarantine_timeout_s)
        self._counters = BorrowerCounters(policy)
        self._lookups = PrefixLookups(
            coordinator, rates, self._counters, engine_id, get_region
        )
        self._draft_pulls = DraftPulls(coordinator, rates)
        self.on_promoted: Callable[[Sequence, int], None] = lambda *_: None

    def bind(self, core: CoreServices) -> None:
        super().bind(core)
        self._lookups.bind(core)
        self._draft_pulls.bind(core)

    # -- requests -----------------------------------------------------------------

    def on_add(self, sequence: Sequence) -> None:
        request = sequence.request
        if request.kv_rejected is not None:
            self._counters.count_rejected_params()
            logger.warning(
                "request %s: %s (computing the prompt here)",
                sequence.request_id,
                request.kv_rejected,
            )
            if request.kv_unused is not None:
                self.on_release(request.kv_unused)
        if self._lookups.begin(sequence):
            return
        if sequence.pull is None:
            self.core.enqueue(sequence)
            return
        remote = sequence.pull.remote
        # engine/http/legs/decode_leg.py has checked the reference against the request.
        assert len(remote.first_tokens) in (0, len(sequence.choices))
        assert not sequence.is_scoring
        # The first tokens of an offer arrive later, when the offer is sealed.
        needs_first_token = request.max_tokens and not request.resumed_choices
        if needs_first_token and not (remote.first_tokens or sequence.pull.is_offer):
            self._counters.count_redrawn_first_token()
        self._hold_and_enqueue(sequence, sequence.pull)

    def _on_looked_up(self, event: LookedUp) -> None:
        result = self._lookups.on_looked_up(event)
        if result is None:
            return
        sequence = result.sequence
        remote = result.remote
        if sequence is None:  # the request was aborted during the lookup
            if remote is not None:
                self.on_release(remote)
            return
        if remote is not None:
            self._use_prefix(sequence, remote, is_in_store=result.is_in_store)
        if sequence.pull is None:
            self.core.enqueue(sequence)
        else:
            self._hold_and_enqueue(sequence, sequence.pull)

    def _use_prefix(
        self, sequence: Sequence, remote: RemotePrefill, *, is_in_store: bool
    ) -> None:
        """Lets a sequence pull the prefix that a lookup has found. If the sequence has
        a reference already, which only a resumed request has, releases its lease."""
        if sequence.pull is not None:
            self.on_release(sequence.pull.remote)
        if sequence.request.remote is not None:
            # The client did not request this pull, so a failure of this pull must not
            # fail the request (`_may_recompute`).
            for choice in sequence.choices:
                choice.request = msgspec.structs.replace(choice.request, remote=None)
        pull_id = sequence.request_id
        if is_in_store:
            # The request's id may already be the id of a pull that was given up.
            pull_id = f"{sequence.request_id}-{secrets.token_hex(8)}"
        sequence.pull = PromptPull(remote, sequence.request, pull_id)
        if is_in_store:
            self.on_promoted(sequence, remote.num_tokens)

    def _hold_and_enqueue(self, sequence: Sequence, pull: PromptPull) -> None:
        """Starts to renew the lease on the remote KV regularly. Enqueues the sequence
        as soon as this KV can be pulled."""
        self._pulling[pull.pull_id] = sequence
        self._coordinator.hold(pull.pull_id, pull.remote)
        self._enqueue_when_ready(sequence, pull.remote)

    def _enqueue_when_ready(self, sequence: Sequence, remote: RemotePrefill) -> None:
        """Enqueues the sequence if the handshake is complete and the lease exists.

        Otherwise starts the handshake, or waits for the lease: an offer gets a lease
        once a part of its prompt is computed. Before the lease exists, the sequence
        must not hold blocks.
        """
        if not self._coordinator.can_pull_from(remote):
            self._coordinator.connect(remote)
        elif remote.lease_id:
            self.core.enqueue(sequence)

    def on_receive(self, sequence: Sequence) -> None:
        assert sequence.pull is not None
        scheduler = self.core.scheduler
        start = sequence.num_computed
        stop = sequence.pull.num_to_pull(len(sequence.token_ids))
        if start >= stop:
            # The prefix cache had all tokens, so there is nothing to pull.
            self._release_remote(sequence)
            scheduler.finish_pull(sequence)
            return
        num_blocks = -(-stop // scheduler.limits.block_size)
        self._draft_pulls.begin(sequence, start)
        self._coordinator.pull(
            sequence.pull.pull_id,
            sequence.pull.remote,
            start,
            stop,
            scheduler.tables.first_blocks(sequence, num_blocks),
            min_resume_tokens=scheduler.tables.resume_limit(sequence, stop),
            has_draft_kv=sequence.pull.has_draft_kv,
        )

    def on_finish(self, sequence: Sequence) -> None:
        times = sequence.times
        if times.drawn is not None and times.admitted is not None:
            # `times.pulled` may be the end of a failed pull, long before the admission.
            began_s = max(times.pulled or 0.0, times.admitted)
            seconds = times.drawn - began_s
            self._rates.record_compute(sequence.accounting.num_computed_here, seconds)
        if sequence.pull is not None:
            # The request has ended with its first token, before its pull began.
            self._release_remote(sequence)

    def on_abort(self, sequence: Sequence) -> bool:
        pull = sequence.pull
        if self._lookups.forget(sequence) and pull is not None:
            self.on_release(pull.remote)
        if pull is None or self._pulling.get(pull.pull_id) is not sequence:
            return False
        self._release_remote(sequence)
        if sequence.phase is Phase.RECEIVING:
            fresh_blocks = self.core.scheduler.abandon_pull(sequence)
            self._undrained[pull.pull_id] = fresh_blocks
            return True
        return False

    def on_release(self, remote: RemotePrefill) -> None:
        # The lease is released by a pull that is canceled before it begins.
        self._num_releases += 1
        pull_id = f"refused-{self._num_releases}"
        self._coordinator.hold(pull_id, remote)
        self._coordinator.cancel(pull_id)

    def _release_remote(self, sequence: Sequence, *, keep_lease: bool = False) -> None:
        """Gives up the pull of a sequence, whether or not the pull has begun. The lease
        on the prefill server is released once no READ of the pull is in flight.

        Args:
            keep_lease: whether the lease is kept, so that another decode server may use
                it.
        """
        assert sequence.pull is not None
        pull_id = sequence.pull.pull_id
        del self._pulling[pull_id]
        self._coordinator.cancel(pull_id, keep_lease=keep_lease)

    # -- events -------------------------------------------------------------------

    def poll(self) -> None:
        allocator = self.core.scheduler.allocator
        for event in self._coordinator.drain():
            match event:
                case PeerDecided():
                    self._on_decided(event)
                case PullBegun():
                    self._on_begun(event)
                case PullSealed():
                    self._on_sealed(event)
                case LookedUp():
                    self._on_looked_up(event)
                case PullDone():
                    self._on_done(event)
                case PullFailed():
                    self._on_failed(event)
                case PullStuck():
                    # The sequence was aborted, and its READs hang.
                    allocator.quarantine(self._undrained.get(event.pull_id, []))
                case PullDrained():
                    allocator.drained(self._undrained.pop(event.pull_id, []))
        self._give_up_pulls_without_capacity()
        self._break_deadlock()
        self._fail_blocked_on_quarantine()

    def _give_up_pulls_without_capacity(self) -> None:
        """Gives up the waiting pulls that cannot start because of hanging READs. This
        engine then computes the prompts, or the requests fail."""
        scheduler = self.core.scheduler
        num_quarantined = scheduler.allocator.num_quarantined
        for sequence in pulls_without_capacity(scheduler):
            error = PullCircuitOpen(
                f"pulls that do not end hold {num_quarantined} KV blocks, so this pull "
                "would exceed the limit on blocks that pulls may write to"
            )
            self._give_up_waiting_pull(sequence, error)

    def _break_deadlock(self) -> None:
        """Gives up one waiting pull if the scheduler has been deadlocked for too long,
        because this engine and another engine may wait for each other's blocks."""
        victim = self._deadlock.find_victim(self.core.scheduler)
        if victim is not None:
            error = PullCircuitOpen(self._deadlock.explanation())
            self._give_up_waiting_pull(victim, error)

    def _fail_blocked_on_quarantine(self) -> None:
        """Fails requests that have waited too long for quarantined blocks."""
        scheduler = self.core.scheduler
        for sequence in self._quarantine.find_overdue(scheduler):
            if sequence.phase is not Phase.WAITING:
                # The failure of an earlier sequence in this loop ended this sequence.
                continue
            if sequence.pull is not None:
                self._release_remote(sequence, keep_lease=True)
            self._counters.count_quarantine_timeout()
            explanation = self._quarantine.explanation(scheduler)
            self.core.fail(sequence, Overloaded(explanation))

    def _on_decided(self, event: PeerDecided) -> None:
        """Handles the end of a handshake: enqueues the sequences that waited for the
        handshake, or gives up their pulls if the handshake failed."""
        new_sequences = [s for s in self._pulling.values() if s.phase is Phase.NEW]
        for sequence in new_sequences:
            pull = sequence.pull
            if pull is None or key_of(pull.remote) != event.peer:
                continue
            if event.error is None:
                self._enqueue_when_ready(sequence, pull.remote)
            else:
                self._give_up_waiting_pull(sequence, event.error)

    def _on_begun(self, event: PullBegun) -> None:
        """Records the lease that the other engine has granted for an offer after it has
        computed the first part of the prompt. Enqueues the sequence if possible."""
        sequence = self._pulling.get(event.pull_id)
        if sequence is None or sequence.pull is None:
            return  # the request was aborted
        sequence.pull.begin(event.lease_id)
        self._enqueue_when_ready(sequence, sequence.pull.remote)

    def _on_sealed(self, event: PullSealed) -> None:
        """Accepts the first tokens of an offer once the prefill server has drawn them.
        The client receives the tokens before all KV has been pulled."""
        sequence = self._pulling.get(event.pull_id)
        if sequence is None:
            return
        request = sequence.request
        try:
            params = kv_params.parse(msgspec.json.decode(event.reference))
        except (KVParamsRejected, msgspec.DecodeError) as error:
            # The first tokens are not usable, but the KV is still pulled.
            logger.warning(
                "request %s: %s (drawing its first token here)", event.pull_id, error
            )
            self._counters.count_redrawn_first_token()
            return
        # The client of a resumed request already has the first tokens.
        needs_first_token = bool(request.max_tokens and not request.resumed_choices)
        is_usable = needs_first_token and kv_params.can_use_first_tokens(
            params, request, request.sampling.seed
        )
        if needs_first_token and not is_usable:
            self._counters.count_redrawn_first_token()
        sealed = kv_params.to_remote_prefill(params)
        sequence.seal_prompt(sealed, is_usable=is_usable)
        if sequence.phase in (Phase.WAITING, Phase.RECEIVING):
            self.core.accept_first_tokens(sequence)

    def _on_done(self, event: PullDone) -> None:
        sequence = self._pulling.pop(event.pull_id, None)
        if sequence is None:
            return  # the request was aborted; PullDrained follows
        self._counters.count_transfer(event)
        if sequence.pull is not None:
            peer = key_of(sequence.pull.remote)
            self._counters.count_pulled_tokens(
                self._source_of(sequence), event.num_tokens
            )
            self._rates.record_pull(peer, event.nbytes, event.seconds)
        times = sequence.times
        if times.admitted is not None:  # the pull began at the admission
            times.pulled = times.admitted + event.seconds
            times.read = times.pulled - event.fence_s
        self._draft_pulls.finish(sequence)
        self.core.scheduler.finish_pull(sequence, is_converted=event.is_converted)

    def _source_of(self, sequence: Sequence) -> str:
        """The label `source` of baton_kv_pulled_tokens for a sequence with a pull."""
        assert sequence.pull is not None
        if sequence.pull.is_from_store:
            return "host"
        return "peer" if sequence.request.remote is None else "prefill"

    def _on_failed(self, event: PullFailed) -> None:
        """Recomputes or fails the sequence of a failed pull. Quarantines the blocks
        that READs may still write to."""
        if isinstance(event.error, KVCorrupt):
            self._counters.count_verify_failure()
        sequence = self._pulling.pop(event.pull_id, None)
        if sequence is None:
            return
        sequence.times.pulled = time.monotonic()
        scheduler = self.core.scheduler
        if sequence.phase is Phase.RECEIVING:
            if event.drained and self._may_recompute(sequence):
                self._report_failure(sequence, event.error)
                scheduler.recompute_in_place(sequence)
                return
            fresh_blocks = scheduler.abandon_pull(
                sequence, quarantine=not event.drained
            )
            if event.drained:
                scheduler.allocator.drained(fresh_blocks)
            else:
                self._undrained[event.pull_id] = fresh_blocks
        self._give_up_remote(sequence, event.error)

    def _give_up_waiting_pull(self, sequence: Sequence, error: BatonError) -> None:
        """Gives up a pull before its first READ. If the request then fails, the lease
        is kept, so that another server may use it."""
        may_recompute = self._may_recompute(sequence)
        self._release_remote(sequence, keep_lease=not may_recompute)
        self._give_up_remote(sequence, error)

    def _give_up_remote(self, sequence: Sequence, error: BatonError) -> None:
        """Recomputes or fails a sequence that holds no blocks, after its pull was given
        up with `error`. Before the prompt is computed, it may be looked up in the KV
        store."""
        was_from_store = sequence.pull is not None and sequence.pull.is_from_store
        # Undoes `enqueue`, because the sequence may wait for a lookup next.
        self.core.grammars.forget(sequence)
        if sequence.phase is Phase.WAITING:
            self.core.scheduler.withdraw(sequence)
        self._report_failure(sequence, error)
        # Without a handshake nothing proves that the peer runs the same model, so the
        # peer's first token may not be in this model's vocabulary. Tokens that were
        # already sent to the client are kept, because they came from a verified peer.
        sequence.discard_remote_results()
        if not self._may_recompute(sequence):
            self.core.fail(sequence, _without_address(error, sequence.request.remote))
        elif sequence.accounting.was_admitted:
            # The sequence has had blocks, so it has already waited in the queue.
            self.core.scheduler.requeue(sequence)
        elif was_from_store or not self._lookups.begin_in_store(sequence):
            self.core.enqueue(sequence)

    def _may_recompute(self, sequence: Sequence) -> bool:
        """Whether this engine computes the prompt after a failed pull. Always true for
        a prefix that a lookup found, because the client did not request this pull."""
        return self._policy == "recompute" or sequence.request.remote is None

    def _report_failure(self, sequence: Sequence, error: BatonError) -> None:
        is_recomputed = self._may_recompute(sequence)
        self._counters.count_failure(error, is_recomputed=is_recomputed)
        logger.warning(
            "request %s: %s (%s)",
            sequence.request_id,
            error.message,
            "recomputing" if is_recomputed else "failing",
        )

    # -- statistics ---------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        values = self._counters.values()
        for outcome, count in self._coordinator.handshake_counts().items():
            values[stat_key("baton_handshakes", outcome=outcome)] = float(count)
        return values


def _without_address(error: BatonError, remote: RemotePrefill | None) -> BatonError:
    """Returns the error for the client, without the prefill server's address. Only the
    log may contain the address."""
    if remote is None:
        return error
    message = error.message.replace(f"{remote.host}:{remote.port}", "its address")
    return from_code(error.code, message, error.param)
