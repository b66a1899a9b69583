"""The half of an engine that borrows: it admits a prompt whose KV is elsewhere, and pulls it.

    add -> connect (first contact only) -> queue -> blocks -> pull -> fence -> go on
                       |                                |        |
                       `------------ failure policy: recompute here, or fail

Rank 0's transfer thread does all waiting; this half moves sequences and blocks, each round,
according to the events they left. A sequence's id is the id of its pull.
"""

import logging
import math
import time
from collections import defaultdict

import msgspec
from msgspec.structs import replace

from engine.core.connector import KVConnector
from engine.core.sequence import Phase, Sequence
from engine.kv.rates import Rates
from kvcache.transfer.pulls.coordinator import PullCoordinator
from kvcache.transfer.pulls.lease_client import new_id
from kvcache.transfer.pulls.messages import (
    PATHS,
    UNVERIFIED,
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
    InternalError,
    KVCorrupt,
    KVParamsRejected,
    Overloaded,
    PullCircuitOpen,
    RemoteKVError,
    from_code,
)
from protocol.handshake import Lookup
from protocol.messages import RemotePrefill
from protocol.metrics import EngineHistogram, stat_key

logger = logging.getLogger("baton.kv")

_STANDS_S = 5.0  # for which nobody gets blocks, until a sequence that waits for KV lets go of it


def _zeros(policy: str) -> dict[str, float]:
    """Counters that are exposed from the start: a rate does not show the event with which its
    counter appeared, and what should not happen may happen once."""
    kinds: list[type[BatonError]] = [*RemoteKVError.__subclasses__(), InternalError]
    names = (
        "baton_kv_params_rejected",
        "baton_kv_first_tokens_redrawn",
        "baton_requests_locked_out",
        "baton_kv_transfer_bytes",
        "baton_kv_transfer_descriptors",
        "baton_kv_verified_tokens",
        *(
            stat_key("baton_kv_unverified_tokens", reason=reason)
            for reason in UNVERIFIED
        ),
        "baton_kv_verify_failures",
        *(
            stat_key("baton_kv_lookups", outcome=o)
            for o in ("found", "none", "late", "computed")
        ),
        stat_key("baton_kv_recoveries", policy=policy),
        stat_key("baton_kv_transfers", outcome="failed", path="none"),
        *(stat_key("baton_kv_transfer_failures", code=kind.code) for kind in kinds),
        *(stat_key("baton_kv_transfers", outcome="done", path=path) for path in PATHS),
    )
    return dict.fromkeys(names, 0.0)


class Borrower(KVConnector):
    """Connects, pulls, recovers.

    Args:
        policy: when a pull fails, `recompute`: the prompt is computed here; `fail`: the client gets
            the error. Either way nobody receives text from the bytes that failed.
        quarantine_timeout_s: longest wait of a request for blocks that only the end of hanging
            READs can give it.
        rates: say whether a prefix that is hinted at is pulled.
        engine_id: its own.
    """

    def __init__(
        self,
        coordinator: PullCoordinator,
        policy: str,
        quarantine_timeout_s: float,
        rates: Rates,
        engine_id: str,
    ) -> None:
        self._coordinator, self._policy = coordinator, policy
        self._quarantine_timeout_s = quarantine_timeout_s
        self._rates, self._engine_id = rates, engine_id
        self._looking: dict[str, Sequence] = {}  # while somebody is asked for a prefix
        self._locked_out: dict[Sequence, float] = {}  # and since when
        self._stands_since = (
            math.inf
        )  # while nobody has blocks to run, or to receive, here
        self._remote: dict[
            str, Sequence
        ] = {}  # all whose KV is still to come from elsewhere
        self._undrained: dict[
            str, list[int]
        ] = {}  # blocks that READs may still write to
        self._totals: defaultdict[str, float] = defaultdict(float, _zeros(policy))
        self._transfer_seconds = EngineHistogram("baton_kv_transfer_seconds")

    # -- requests ----------------------------------------------------------------------------

    def on_add(self, sequence: Sequence) -> None:
        remote, request = sequence.remote, sequence.request
        if request.kv_rejected is not None:
            self._totals["baton_kv_params_rejected"] += 1
            told = "request %s: %s (computing the prompt here)"
            logger.warning(told, sequence.request_id, request.kv_rejected)
            if request.kv_unused is not None:
                self.on_release(request.kv_unused)
        if remote is None:
            if not self._looks_up(sequence):
                self.core.enqueue(sequence)
            return
        # DecodeLeg checks that a reference has what the request asks for.
        assert (
            len(remote.first_tokens) in (0, len(sequence.choices))
            and not sequence.is_scoring
        )
        is_offer = remote.transfer_id is not None  # then they come later
        draws = request.max_tokens and not request.known
        if draws and not (remote.first_tokens or is_offer):
            self._totals["baton_kv_first_tokens_redrawn"] += 1
        self._await(sequence, remote)

    def _looks_up(self, sequence: Sequence) -> bool:
        """Asks who is said to hold the prompt's beginning, where that is worth while."""
        hint, rates, scheduler = sequence.request.hint, self._rates, self.core.scheduler
        if hint is None or sequence.is_scoring or hint.engine_id == self._engine_id:
            return False
        tables, index, tokens = scheduler.tables, scheduler.prefix, sequence.token_ids
        wanted = tables.reach(sequence, sequence.num_prompt_tokens - 1)
        salt = sequence.request.cache_salt
        here = index.match(tokens, max_tokens=wanted, salt=salt) if index else []
        cached, least = tables.num_tokens(here), rates.least_tokens(key_of(hint))
        is_asked = min(hint.num_tokens, wanted) - cached >= least
        told = "request %s: %d tokens here, perhaps %d on %s; a pull is quicker from %g on: %s"
        found = sequence.request_id, cached, hint.num_tokens, hint.engine_id, least
        logger.debug(told, *found, "asking" if is_asked else "computing")
        if not is_asked:
            self._totals[stat_key("baton_kv_lookups", outcome="computed")] += 1
            return False
        self._looking[sequence.request_id] = sequence
        asked = Lookup(
            nonce=f"lookup-{new_id()}",
            incarnation=hint.incarnation,
            token_ids=tokens[:wanted],
            min_tokens=cached + math.ceil(least),
            cache_salt=salt,
        )
        self._coordinator.look_up(sequence.request_id, hint, asked)
        return True

    def _on_looked_up(self, event: LookedUp) -> None:
        self._totals[stat_key("baton_kv_lookups", outcome=event.outcome)] += 1
        sequence, remote = self._looking.pop(event.pull_id, None), event.remote
        if sequence is None:  # aborted meanwhile
            if remote is not None:
                self.on_release(remote)
        elif remote is None:
            self.core.enqueue(sequence)
        else:
            self._rates.looked_up(key_of(remote), event.seconds)
            sequence.remote = remote
            self._await(sequence, remote)

    def _await(self, sequence: Sequence, remote: RemotePrefill) -> None:
        """Has it wait for its turn, its lease held."""
        self._remote[sequence.request_id] = sequence
        self._coordinator.hold(sequence.request_id, remote)
        self._enqueue_begun(sequence, remote)

    def _enqueue_begun(self, sequence: Sequence, remote: RemotePrefill) -> None:
        """Once hands are shaken, and some of its prompt is computed: it shall hold no blocks before
        that."""
        if not self._coordinator.can_pull_from(remote):
            self._coordinator.connect(remote)
        elif remote.lease_id:
            self.core.enqueue(sequence)

    def on_receive(self, sequence: Sequence) -> None:
        assert sequence.remote is not None
        stop, scheduler = sequence.num_to_pull, self.core.scheduler
        if sequence.num_computed >= stop:
            # Every block was cached here: nothing to read, so nothing to fence.
            self._release_remote(sequence)
            scheduler.received(sequence)
            return
        blocks = scheduler.tables.full(
            sequence, -(-stop // scheduler.limits.block_size)
        )
        span, reach = (
            (sequence.num_computed, stop),
            scheduler.tables.reach(sequence, stop),
        )
        self._coordinator.pull(
            sequence.request_id, sequence.remote, *span, blocks, reach=reach
        )

    def on_finish(self, sequence: Sequence) -> None:
        times = sequence.times
        if times.drawn is not None and times.admitted is not None:
            seconds = times.drawn - (times.pulled or times.admitted)
            self._rates.computed(sequence.num_recomputed, seconds)
        if (
            sequence.remote is not None
        ):  # it ended with the first token, before any pull
            self._release_remote(sequence)

    def on_abort(self, sequence: Sequence) -> bool:
        self._looking.pop(sequence.request_id, None)
        if self._remote.get(sequence.request_id) is not sequence:
            return False
        self._release_remote(sequence)
        if sequence.phase is Phase.RECEIVING:
            fresh = self.core.scheduler.abandon(sequence)
            self._undrained[sequence.request_id] = fresh
            return True
        return False

    def on_release(self, remote: RemotePrefill) -> None:
        pull_id = f"refused-{remote.lease_id}"
        self._coordinator.hold(pull_id, remote)
        self._coordinator.cancel(pull_id)

    def _release_remote(self, sequence: Sequence, *, lend: bool = False) -> None:
        """Lets the prefill server have its blocks back, as soon as no read is under way; with
        `lend` another decode server, if one may be asked."""
        del self._remote[sequence.request_id]
        self._coordinator.cancel(sequence.request_id, lend=lend)

    # -- events ------------------------------------------------------------------------------

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
                case PullStuck():  # of an aborted sequence: as of a pull that failed
                    allocator.quarantine(self._undrained.get(event.pull_id, []))
                case PullDrained():
                    allocator.drained(self._undrained.pop(event.pull_id, []))
        self._compute_beside_hung()
        self._compute_where_all_wait()
        self._fail_locked_out()

    def _compute_beside_hung(self) -> None:
        """What could be pulled only when READs that hang have ended, and can be computed before."""
        scheduler, quarantined = (
            self.core.scheduler,
            self.core.scheduler.allocator.num_quarantined,
        )
        for sequence in list(scheduler.waiting) if quarantined else ():
            if sequence.remote is None or scheduler.is_locked_out(sequence):
                continue
            needed = scheduler.tables.num_blocks_for(sequence, sequence.num_to_hold)
            if not scheduler.allocator.can_receive(needed, ignore_receiving=True):
                told = f"READs that hang hold {quarantined} blocks: there is no room for more"
                self._give_up_untouched(sequence, PullCircuitOpen(told))

    def _compute_where_all_wait(self) -> None:
        """Who has this engine's blocks may wait for blocks of an engine whose blocks are held for
        who waits here, and both would for ever: the last of these lets go, one a round, or beside
        streams one in so long."""
        scheduler, now = self.core.scheduler, time.monotonic()
        self._stands_since = (
            min(self._stands_since, now) if scheduler.stands else math.inf
        )
        if now - self._stands_since >= _STANDS_S:
            self._stands_since = now if scheduler.running else self._stands_since
            for sequence in [s for s in scheduler.waiting if s.remote is not None][-1:]:
                told = f"nobody who waits got KV blocks for {_STANDS_S} s: others have them"
                self._give_up_untouched(sequence, PullCircuitOpen(told))

    def _fail_locked_out(self) -> None:
        scheduler, now = self.core.scheduler, time.monotonic()
        hung, total = scheduler.allocator.num_quarantined, scheduler.allocator.capacity
        found = (
            [s for s in scheduler.waiting if scheduler.is_locked_out(s)] if hung else []
        )
        self._locked_out = {s: self._locked_out.get(s, now) for s in found}
        for sequence, since in self._locked_out.items():
            if (
                now - since < self._quarantine_timeout_s
                or sequence.phase is not Phase.WAITING
            ):
                continue
            if sequence.remote is not None:
                self._release_remote(sequence, lend=True)
            self._totals["baton_requests_locked_out"] += 1
            told = (
                f"this request needs more KV blocks than are left: {hung} of {total} are held by "
                "reads from a prefill server that hangs, for longer than "
                f"{self._quarantine_timeout_s:g} s (--quarantine-timeout-s)"
            )
            self.core.fail(sequence, Overloaded(told))

    def _on_decided(self, event: PeerDecided) -> None:
        """Who is to pull from there and does not wait for blocks yet goes on, or does without."""
        for sequence in [s for s in self._remote.values() if s.phase is Phase.NEW]:
            remote = sequence.remote
            if remote is None or key_of(remote) != event.peer:
                continue
            if event.error is None:
                self._enqueue_begun(sequence, remote)
            else:
                self._give_up_untouched(sequence, event.error)

    def _on_begun(self, event: PullBegun) -> None:
        sequence = self._remote.get(event.pull_id)
        if sequence is None or sequence.remote is None:
            return  # aborted meanwhile
        sequence.remote = replace(sequence.remote, lease_id=event.lease_id)
        self._enqueue_begun(sequence, sequence.remote)

    def _on_sealed(self, event: PullSealed) -> None:
        """P has the first tokens: a stream begins before the rest of its KV is here."""
        sequence = self._remote.get(event.pull_id)
        if sequence is None:
            return
        request = sequence.request
        try:
            params = kv_params.parse(msgspec.json.decode(event.reference))
        except (
            KVParamsRejected,
            msgspec.DecodeError,
        ) as error:  # its KV is pulled all the same
            logger.warning(
                "request %s: %s (drawing its first token here)", event.pull_id, error
            )
            self._totals["baton_kv_first_tokens_redrawn"] += 1
            return
        draws = bool(
            request.max_tokens and not request.known
        )  # else its client has them
        is_usable = draws and kv_params.are_first_tokens_of(
            params, request, request.sampling.seed
        )
        self._totals["baton_kv_first_tokens_redrawn"] += draws and not is_usable
        sequence.find_first(kv_params.to_remote_prefill(params), is_usable=is_usable)
        if sequence.phase in (Phase.WAITING, Phase.RECEIVING):
            self.core.found(sequence)

    def _on_done(self, event: PullDone) -> None:
        sequence = self._remote.pop(event.pull_id, None)
        if sequence is None:
            return  # aborted meanwhile; PullDrained follows
        self._totals[
            stat_key("baton_kv_transfers", outcome="done", path=event.path)
        ] += 1
        self._totals["baton_kv_transfer_bytes"] += event.nbytes
        self._totals["baton_kv_transfer_descriptors"] += event.descriptors
        if event.verified in UNVERIFIED:
            told = stat_key("baton_kv_unverified_tokens", reason=event.verified)
            self._totals[told] += event.num_tokens
        elif event.verified != "off":
            self._totals["baton_kv_verified_tokens"] += event.num_tokens
        self._transfer_seconds.observe(event.seconds)
        if sequence.remote is not None:
            self._rates.pulled(key_of(sequence.remote), event.nbytes, event.seconds)
        times = sequence.times
        if times.admitted is not None:  # the pull began with that
            times.pulled = times.admitted + event.seconds
            times.read = times.pulled - event.fence_s
        self.core.scheduler.received(sequence, is_converted=event.is_converted)

    def _on_failed(self, event: PullFailed) -> None:
        """Blocks that a read may still write to are quarantined."""
        if isinstance(event.error, KVCorrupt):
            self._totals["baton_kv_verify_failures"] += 1
        sequence = self._remote.pop(event.pull_id, None)
        if sequence is None:
            return
        sequence.times.pulled = time.monotonic()
        scheduler = self.core.scheduler
        if sequence.phase is Phase.RECEIVING:
            if event.drained and self._may_recompute(sequence):
                self._count_failure(sequence, event.error)
                scheduler.recompute_in_place(sequence)
                return
            fresh = scheduler.abandon(sequence, quarantine=not event.drained)
            if event.drained:
                scheduler.allocator.drained(fresh)
            else:
                self._undrained[event.pull_id] = fresh
        self._give_up_remote(sequence, event.error)

    def _give_up_untouched(self, sequence: Sequence, error: BatonError) -> None:
        """Before any READ: where the request fails, another server may have its KV."""
        self._release_remote(sequence, lend=not self._may_recompute(sequence))
        self._give_up_remote(sequence, error)

    def _give_up_remote(self, sequence: Sequence, error: BatonError) -> None:
        """No KV will come to a sequence that holds no block."""
        if sequence.phase is Phase.WAITING:
            self.core.scheduler.withdraw(sequence)
        self._count_failure(sequence, error)
        # Nothing proves that a peer without a handshake runs this model: its token may be no
        # token of ours. What has been sent came from a proven one, and stays.
        sequence.forget_remote()
        if not self._may_recompute(sequence):
            self.core.fail(sequence, _without_address(error, sequence.request.remote))
        elif sequence.was_admitted:  # it has waited its turn already
            self.core.scheduler.requeue(sequence)
        else:
            self.core.enqueue(sequence)

    def _may_recompute(self, sequence: Sequence) -> bool:
        """Nobody asked for the pull of a prefix: that it failed is no client's concern."""
        return self._policy == "recompute" or sequence.request.remote is None

    def _count_failure(self, sequence: Sequence, error: BatonError) -> None:
        self._totals[stat_key("baton_kv_transfers", outcome="failed", path="none")] += 1
        self._totals[stat_key("baton_kv_transfer_failures", code=error.code)] += 1
        action = "recomputing" if self._may_recompute(sequence) else "failing"
        if self._may_recompute(sequence):
            self._totals[stat_key("baton_kv_recoveries", policy=self._policy)] += 1
        logger.warning(
            "request %s: %s (%s)", sequence.request_id, error.message, action
        )

    # -- the rest ----------------------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        handshakes = self._coordinator.handshakes().items()
        counts = {
            stat_key("baton_handshakes", outcome=name): float(n)
            for name, n in handshakes
        }
        return {**self._totals, **counts, **self._transfer_seconds.values()}


def _without_address(error: BatonError, remote: RemotePrefill | None) -> BatonError:
    """As clients are told it: the log has the address of the prefill server."""
    if remote is None:
        return error
    told = error.message.replace(f"{remote.host}:{remote.port}", "its address")
    return from_code(error.code, told, error.param)
