"""The state machine of one pull: its actions, for events in any order."""

from typing import Any

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvcache.transfer.pulls.messages import (
    Pull,
    PullDone,
    PullDrained,
    PullFailed,
    PullSettings,
    PullStuck,
    RankEnded,
    RankFailing,
    StopPull,
)
from kvcache.transfer.pulls.pull_state import (
    Action,
    Phase,
    PullState,
    RecordPeerFailure,
)
from kvcache.verify.scope import DigestPart
from protocol.errors import (
    InternalError,
    LeaseGone,
    PeerUnreachable,
    PullCircuitOpen,
    PullTimeout,
)
from protocol.handshake import (
    AbortLease,
    Complete,
    Digest,
    GetDigest,
    LeaseEnded,
    Ok,
    Renew,
)
from protocol.messages import ErrorInfo, RemotePrefill
from tests.rigs.examples import examples
from tests.rigs.memory_pair import REMOTE, pull_command

SETTINGS = PullSettings(
    pull_timeout_s=30, fence_timeout_s=5, fence_retry_s=1, drain_grace_s=0.25
)
RIGHT_DIGEST = bytes(range(8))  # the digest of correct KV
ERROR = ErrorInfo("transfer_failed", "broken")
ORDER = pull_command("a", REMOTE, 0, 16, [1])
LEASE = {"incarnation": REMOTE.incarnation, "lease_id": REMOTE.lease_id}
RENEW = Renew(nonce="renew-attempt", **LEASE)
COMPLETE = Complete(nonce="complete-attempt", attempt_id="attempt", **LEASE)
ABORT = AbortLease(nonce="abort-attempt", **LEASE)
STOP = StopPull("a")
PEER_FAILURE = RecordPeerFailure()
DRAINED = PullDrained("a")
STUCK = PullStuck("a")
FAILING = RankFailing("a", 0, ERROR)
FENCED = Ok(nonce=COMPLETE.nonce)
RENEWED = Ok(nonce=RENEW.nonce)
FENCE_LEASE_ENDED, RENEW_LEASE_ENDED = (
    LeaseEnded(nonce=each.nonce, reason="expired") for each in (COMPLETE, RENEW)
)


def state(
    ranks: int = 2, now: float = 0.0, remote: RemotePrefill = REMOTE
) -> PullState:
    return PullState("a", remote, ranks, SETTINGS, "attempt", now)


def reading_pull(ranks: int = 2) -> PullState:
    pull = state(ranks)
    assert pull.tick(0.0) == [RENEW]
    pull.pull(ORDER, now=1.0)
    assert pull.on_peer_ready(now=1.0) == [ORDER]
    return pull


def fencing_pull() -> PullState:
    """Returns a pull that has requested the fence."""
    pull = reading_pull(1)
    assert pull.on_report(ended(0), now=2.0) == [COMPLETE]
    return pull


def ended(
    rank: int,
    complete: bool = True,
    error: ErrorInfo | None = None,
    path: str = "direct",
) -> RankEnded:
    return RankEnded(
        pull_id="a",
        rank=rank,
        complete=complete,
        error=error,
        nbytes=10,
        num_descriptors=2,
        path=path,
    )


def failure(actions: list[Action]) -> PullFailed:
    (failed,) = (action for action in actions if isinstance(action, PullFailed))
    return failed


def test_the_fence_waits_for_every_rank():
    pull = reading_pull()
    assert pull.on_report(ended(1), now=2.0) == []
    assert pull.on_report(ended(1), now=2.0) == []  # a repeated report is ignored
    assert pull.on_report(ended(0), now=3.0) == [COMPLETE]
    assert pull.on_reply(FENCED, now=3.5) == [
        PullDone("a", 20, 4, 2.5, "direct", 0.5, 16)
    ]
    assert pull.phase is Phase.ENDED and pull.deadline() == float("inf")


@pytest.mark.parametrize(
    ("first", "second", "expected_path"),
    [
        ("staged", "staged", "staged"),
        ("none", "mapped", "mapped"),  # "none": the rank needed no bytes
        ("none", "none", "none"),
        ("direct", "staged", "mixed"),
        ("mixed", "mapped", "mixed"),
    ],
)
def test_path_is_mixed_if_ranks_read_by_several_paths(first, second, expected_path):
    pull = reading_pull()
    pull.on_report(ended(0, path=first), now=2.0)
    pull.on_report(ended(1, path=second), now=2.0)
    (done,) = pull.on_reply(FENCED, now=2.0)
    assert isinstance(done, PullDone) and done.path == expected_path


def test_ended_lease_at_the_fence_fails_drained_without_an_abort():
    (failed,) = fencing_pull().on_reply(FENCE_LEASE_ENDED, now=2.0)
    assert isinstance(failed, PullFailed) and failed.drained
    assert isinstance(failed.error, LeaseGone)


def test_a_lost_fence_is_repeated_with_the_same_attempt_until_its_timeout():
    pull = fencing_pull()
    assert pull.tick(2.9) == []
    for now in (3.0, 4.0, 5.0, 6.0):
        assert pull.deadline() == now
        assert pull.tick(now) == [COMPLETE]
    actions = pull.tick(7.0)
    failed = failure(actions)
    assert isinstance(failed.error, PeerUnreachable) and failed.drained
    assert actions == [PEER_FAILURE, failed, ABORT]
    assert pull.on_reply(FENCED, now=7.1) == []  # too late


def test_renewals_come_every_third_of_the_lease_while_holding_and_reading():
    pull = state()
    for now in (0.0, 10.0, 20.0):
        assert pull.deadline() == now and pull.tick(now) == [RENEW]
    pull.pull(ORDER, now=21.0)
    pull.on_peer_ready(now=21.0)
    assert pull.tick(30.0) == [RENEW]
    for rank in range(2):
        pull.on_report(ended(rank), now=31.0)
    assert RENEW not in pull.tick(40.0)


def test_ended_lease_at_a_renewal_fails_early_but_not_while_fencing():
    pull = reading_pull(1)
    assert pull.on_reply(RENEWED, now=2.0) == []
    assert pull.on_reply(RENEW_LEASE_ENDED, now=2.0) == [STOP]
    assert isinstance(
        failure(pull.on_report(ended(0, complete=False), now=2.1)).error, LeaseGone
    )
    pull = fencing_pull()
    assert pull.on_reply(RENEW_LEASE_ENDED, now=2.0) == []
    assert pull.on_reply(FENCED, now=2.0) != []


@pytest.mark.parametrize(
    "error", [InternalError("a bug"), PullCircuitOpen("no staging memory")]
)
def test_local_failures_are_not_counted_against_the_peer(error):
    info = ErrorInfo.from_error(error)
    for report in (ended(0, complete=False, error=info), RankFailing("a", 0, info)):
        actions = reading_pull(1).on_report(report, now=2.0)
        assert actions and PEER_FAILURE not in actions


def test_the_pull_timeout_counts_from_the_first_read():
    pull = reading_pull(1)
    pull.tick(30.9)
    assert {STOP, PEER_FAILURE} <= set(pull.tick(31.0))
    failed = failure(pull.tick(31.25))
    assert isinstance(failed.error, PullTimeout) and not failed.drained


def test_untouched_lent_lease_is_not_aborted():
    lent = msgspec.structs.replace(REMOTE, sender_releases=True)
    for remote, end in ((REMOTE, [ABORT]), (lent, [])):
        held, waiting, ordered = (state(remote=remote) for _ in range(3))
        waiting.pull(ORDER, now=1.0)
        ordered.pull(ORDER, now=1.0)
        ordered.on_peer_ready(now=1.0)
        for unread in (held, waiting):
            assert unread.is_untouched is (remote is lent)
            assert unread.cancel(2.0, keep_lease=True) == [DRAINED, *end]
            assert unread.phase is Phase.ENDED and unread.deadline() == float("inf")
        assert not ordered.is_untouched
        assert ordered.cancel(2.0, keep_lease=True) == [STOP]
    assert state(remote=lent).cancel(2.0) == [DRAINED, ABORT]


class PullMachine(RuleBasedStateMachine):
    """Property: the rules in kvcache/transfer/pulls/messages.py hold for events in any
    order.
    """

    @initialize(
        ranks=st.integers(1, 3),
        is_begun=st.sampled_from([True, True, False]),
        verified=st.sampled_from(["off", "all", "sample", "peer"]),
    )
    def begin(self, ranks: int, is_begun: bool, verified: str) -> None:
        self.verified = verified
        self.rank_digests = set[bytes]()  # digests of this engine's ranks
        self.digest_request: GetDigest | None = None
        self.lender_digest: bytes | None = None
        self.now = 0.0
        self.pull = state(ranks)
        self.reading: set[int] = set()
        self.is_incomplete = False
        self.is_fence_requested = False
        self.is_cancelled = False
        self.events: list[Any] = []
        self.is_stopped = False
        if is_begun:
            self.order_pull()
            self.ready()

    def perform(self, actions: list[Action], fence_ok: bool = False) -> None:
        for action in actions:
            match action:
                case GetDigest():
                    assert not self.is_fence_requested
                    self.digest_request = action
                case Pull():
                    assert not self.is_stopped
                    assert (action.scope is not None) == (
                        self.verified in ("all", "sample")
                    )
                    self.reading = set(range(self.pull._num_ranks))
                case StopPull():
                    self.is_stopped = True
                case Complete():
                    assert action == COMPLETE
                    assert (
                        not self.reading
                        and not self.is_incomplete
                        and not self.is_cancelled
                    )
                    assert self.digest_request is None or self.rank_digests == {
                        self.lender_digest
                    }
                    self.is_fence_requested = True
                case AbortLease():
                    # The lease may only be aborted after the last READ has ended.
                    assert not self.reading
                case PullDone() | PullFailed() | PullDrained() | PullStuck():
                    self.check(action, fence_ok)
                    self.events.append(action)

    def check(self, event: Any, fence_ok: bool) -> None:
        verdicts = [e for e in self.events if isinstance(e, PullDone | PullFailed)]
        if isinstance(event, PullDone):
            assert not verdicts and not self.is_cancelled and not self.reading
            assert not self.is_incomplete and fence_ok
        elif isinstance(event, PullFailed):
            assert not verdicts and not self.is_cancelled
            assert event.drained == (not self.reading)
        elif isinstance(event, PullStuck):
            assert event not in self.events and self.is_cancelled and self.reading
        else:
            assert event not in self.events and not self.reading
            undrained = any(
                isinstance(e, PullFailed) and not e.drained for e in self.events
            )
            assert self.is_cancelled or undrained

    @rule()
    def order_pull(self) -> None:
        self.pull.pull(ORDER, self.now)

    @rule()
    def ready(self) -> None:
        self.perform(self.pull.on_peer_ready(self.now, self.verified))

    @precondition(lambda self: self.digest_request)
    @rule(
        sums=st.sampled_from(
            [RIGHT_DIGEST, RIGHT_DIGEST, RIGHT_DIGEST[::-1], b"", None]
        )
    )
    def lender_replies(self, sums: bytes | None) -> None:
        self.reply_with_digest(sums)

    def reply_with_digest(self, sums: bytes | None) -> None:
        nonce = self.digest_request.nonce
        reply = (
            LeaseEnded(nonce=nonce) if sums is None else Digest(nonce=nonce, sums=sums)
        )
        if not self.is_fence_requested:
            self.lender_digest = sums
        self.perform(self.pull.on_reply(reply, self.now))

    @precondition(lambda self: self.reading)
    @rule(
        data=st.data(),
        complete=st.sampled_from([True, True, True, False]),
        has_error=st.booleans(),
        sums=st.sampled_from(
            [RIGHT_DIGEST, RIGHT_DIGEST, RIGHT_DIGEST, RIGHT_DIGEST[::-1]]
        ),
    )
    def rank_ends(
        self, data: st.DataObject, complete: bool, has_error: bool, sums: bytes
    ) -> None:
        self.end(
            data.draw(st.sampled_from(sorted(self.reading))), complete, has_error, sums
        )

    @precondition(lambda self: self.reading)
    @rule()
    def all_goes_well(self) -> None:
        for rank in sorted(self.reading):
            self.end(rank)
        if self.digest_request:
            self.reply_with_digest(RIGHT_DIGEST)

    def end(
        self,
        rank: int,
        complete: bool = True,
        has_error: bool = False,
        sums: bytes = RIGHT_DIGEST,
    ) -> None:
        self.reading.discard(rank)
        self.is_incomplete |= not complete
        error = ERROR if has_error and not complete else None
        report = ended(rank, complete, error)
        if self.digest_request:
            report = msgspec.structs.replace(report, part=DigestPart(rank, 0, sums))
            self.rank_digests.add(sums)
        self.perform(self.pull.on_report(report, self.now))

    @precondition(lambda self: self.reading)
    @rule(data=st.data())
    def rank_fails(self, data: st.DataObject) -> None:
        rank = data.draw(st.sampled_from(sorted(self.reading)))
        self.is_incomplete = True
        self.perform(self.pull.on_report(RankFailing("a", rank, ERROR), self.now))

    @precondition(lambda self: self.is_fence_requested)
    @rule(is_ok=st.booleans())
    def fenced(self, is_ok: bool) -> None:
        self.perform(
            self.pull.on_reply(FENCED if is_ok else FENCE_LEASE_ENDED, self.now),
            fence_ok=is_ok,
        )

    @rule(event=st.sampled_from(["renewed", "renewed", "gone", "peer fails"]))
    def disturb(self, event: str) -> None:
        if event == "peer fails":
            self.perform(self.pull.fail(PeerUnreachable("x"), self.now))
        else:
            self.perform(
                self.pull.on_reply(
                    RENEWED if event == "renewed" else RENEW_LEASE_ENDED, self.now
                )
            )

    @rule()
    def cancel(self) -> None:
        self.is_cancelled |= self.pull.phase is not Phase.ENDED
        self.perform(self.pull.cancel(self.now))

    @rule(seconds=st.sampled_from([0.1, 1.0, 6.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.perform(self.pull.tick(self.now))

    @invariant()
    def draining_reads_are_stopped_and_reported_if_they_hang(self) -> None:
        """A hang is reported, so that the engine quarantines the pull's blocks."""
        assert self.is_stopped or self.pull.phase is not Phase.DRAINING
        if self.pull.phase is Phase.DRAINING and self.pull.deadline() == float("inf"):
            hung = PullStuck if self.is_cancelled else PullFailed
            assert any(isinstance(event, hung) for event in self.events)

    @invariant()
    def ended_pull_has_reported_its_end(self) -> None:
        if self.pull.phase is Phase.ENDED:
            assert self.events and not self.reading
            if self.is_cancelled:
                assert PullDrained("a") in self.events
            last = self.events[-1]
            assert not (isinstance(last, PullFailed) and not last.drained)

    def teardown(self) -> None:
        """Check that every pull that has begun ends by its timeouts after its last READ
        has ended.
        """
        for rank in sorted(self.reading):
            self.reading.discard(rank)
            self.is_incomplete = True
            self.perform(self.pull.on_report(ended(rank, False), self.now))
        if self.pull.phase in (
            Phase.HELD,
            Phase.WAITING,
        ):  # timeouts of the engine and of peers.py end pulls in these phases
            self.cancel()
        for _ in range(4):
            self.wait(40.0)
        assert self.pull.phase is Phase.ENDED
        self.ended_pull_has_reported_its_end()


TestPullProperties = PullMachine.TestCase
TestPullProperties.settings = examples(400, stateful_step_count=25)
