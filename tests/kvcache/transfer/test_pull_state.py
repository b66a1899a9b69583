"""One pull by itself: what it asks for and tells, whatever happens in whatever order."""

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
RIGHT = bytes(range(8))  # a digest
ERROR = ErrorInfo("transfer_failed", "broken")
ORDER = pull_command("a", REMOTE, 0, 16, [1])
LEASE = {"incarnation": REMOTE.incarnation, "lease_id": REMOTE.lease_id}
RENEW = Renew(nonce="renew-attempt", **LEASE)
COMPLETE = Complete(nonce="complete-attempt", attempt_id="attempt", **LEASE)
ABORT = AbortLease(nonce="abort-attempt", **LEASE)
STOP, SUSPECT = StopPull("a"), RecordPeerFailure()
DRAINED, STUCK = PullDrained("a"), PullStuck("a")
FAILING = RankFailing("a", 0, ERROR)
FENCED, RENEWED = Ok(nonce=COMPLETE.nonce), Ok(nonce=RENEW.nonce)
FENCE_GONE, RENEW_GONE = (
    LeaseEnded(nonce=each.nonce, reason="expired") for each in (COMPLETE, RENEW)
)


def state(
    ranks: int = 2, now: float = 0.0, remote: RemotePrefill = REMOTE
) -> PullState:
    return PullState("a", remote, ranks, SETTINGS, "attempt", now)


def reading(ranks: int = 2) -> PullState:
    pull = state(ranks)
    assert pull.tick(0.0) == [RENEW]
    pull.pull(ORDER, now=1.0)
    assert pull.on_peer_ready(now=1.0) == [ORDER]
    return pull


def fencing() -> PullState:
    """One that has asked."""
    pull = reading(1)
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
        descriptors=2,
        path=path,
    )


def failure(actions: list[Action]) -> PullFailed:
    (failed,) = (action for action in actions if isinstance(action, PullFailed))
    return failed


def test_the_fence_waits_for_every_rank():
    pull = reading()
    assert pull.on_report(ended(1), now=2.0) == []
    assert pull.on_report(ended(1), now=2.0) == []  # a report counts once
    assert pull.on_report(ended(0), now=3.0) == [COMPLETE]
    assert pull.on_reply(FENCED, now=3.5) == [
        PullDone("a", 20, 4, 2.5, "direct", 0.5, 16)
    ]
    assert pull.phase is Phase.ENDED and pull.deadline() == float("inf")


@pytest.mark.parametrize(
    ("first", "second", "whole"),
    [
        ("staged", "staged", "staged"),
        ("none", "mapped", "mapped"),  # a rank that has all it needs
        ("none", "none", "none"),
        ("direct", "staged", "mixed"),
        ("mixed", "mapped", "mixed"),
    ],
)
def test_a_pull_whose_ranks_read_by_several_paths_is_mixed(first, second, whole):
    pull = reading()
    pull.on_report(ended(0, path=first), now=2.0)
    pull.on_report(ended(1, path=second), now=2.0)
    (done,) = pull.on_reply(FENCED, now=2.0)
    assert isinstance(done, PullDone) and done.path == whole


def test_gone_at_the_fence_is_a_drained_failure_without_an_abort():
    (failed,) = fencing().on_reply(FENCE_GONE, now=2.0)
    assert isinstance(failed, PullFailed) and failed.drained
    assert isinstance(failed.error, LeaseGone)


def test_a_lost_fence_is_repeated_with_the_same_attempt_until_its_timeout():
    pull = fencing()
    assert pull.tick(2.9) == []
    for now in (3.0, 4.0, 5.0, 6.0):
        assert pull.deadline() == now
        assert pull.tick(now) == [COMPLETE]
    actions = pull.tick(7.0)
    failed = failure(actions)
    assert isinstance(failed.error, PeerUnreachable) and failed.drained
    assert actions == [SUSPECT, failed, ABORT]
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


def test_a_renewal_answered_gone_fails_early_but_not_once_fencing():
    pull = reading(1)
    assert pull.on_reply(RENEWED, now=2.0) == []
    assert pull.on_reply(RENEW_GONE, now=2.0) == [STOP]
    assert isinstance(
        failure(pull.on_report(ended(0, complete=False), now=2.1)).error, LeaseGone
    )
    asked = fencing()
    assert asked.on_reply(RENEW_GONE, now=2.0) == []
    assert asked.on_reply(FENCED, now=2.0) != []


@pytest.mark.parametrize(
    "error", [InternalError("a bug"), PullCircuitOpen("no staging memory")]
)
def test_a_peer_is_not_suspected_of_what_failed_here(error):
    info = ErrorInfo.of(error)
    for report in (ended(0, complete=False, error=info), RankFailing("a", 0, info)):
        actions = reading(1).on_report(report, now=2.0)
        assert actions and SUSPECT not in actions


def test_the_pull_timeout_counts_from_the_first_read():
    pull = reading(1)
    pull.tick(30.9)
    assert {STOP, SUSPECT} <= set(pull.tick(31.0))
    failed = failure(pull.tick(31.25))
    assert isinstance(failed.error, PullTimeout) and not failed.drained


def test_a_lent_lease_is_left_alone_until_a_read_is_ordered():
    lent = msgspec.structs.replace(REMOTE, sender_releases=True)
    for remote, end in ((REMOTE, [ABORT]), (lent, [])):
        held, waiting, ordered = (state(remote=remote) for _ in range(3))
        waiting.pull(ORDER, now=1.0)
        ordered.pull(ORDER, now=1.0)
        ordered.on_peer_ready(now=1.0)
        for unread in (held, waiting):
            assert unread.is_untouched is (remote is lent)
            assert unread.cancel(2.0, lend=True) == [DRAINED, *end]
            assert unread.phase is Phase.ENDED and unread.deadline() == float("inf")
        assert not ordered.is_untouched
        assert ordered.cancel(2.0, lend=True) == [STOP]
    assert state(remote=lent).cancel(2.0) == [DRAINED, ABORT]


class PullMachine(RuleBasedStateMachine):
    """Property: whatever happens in whatever order, the promises of messages.py hold."""

    @initialize(
        ranks=st.integers(1, 3),
        begun=st.sampled_from([True, True, False]),
        verified=st.sampled_from(["off", "all", "sample", "peer"]),
    )
    def begin(self, ranks: int, begun: bool, verified: str) -> None:
        self.verified, self.held = verified, set[bytes]()  # the digests of ranks
        self.asked: GetDigest | None = None
        self.theirs: bytes | None = None
        self.now = 0.0
        self.pull = state(ranks)
        self.reading: set[int] = set()
        self.incomplete = False
        self.fence_asked = False
        self.cancelled = False
        self.told: list[Any] = []
        self.stopped = False
        if begun:
            self.ask()
            self.ready()

    def perform(self, actions: list[Action], fence_ok: bool = False) -> None:
        for action in actions:
            match action:
                case GetDigest():
                    assert not self.fence_asked
                    self.asked = action
                case Pull():
                    assert not self.stopped
                    assert (action.scope is not None) == (
                        self.verified in ("all", "sample")
                    )
                    self.reading = set(range(self.pull._num_ranks))
                case StopPull():
                    self.stopped = True
                case Complete():
                    assert action == COMPLETE
                    assert (
                        not self.reading and not self.incomplete and not self.cancelled
                    )
                    assert self.asked is None or self.held == {self.theirs}
                    self.fence_asked = True
                case AbortLease():
                    assert (
                        not self.reading
                    )  # P's memory is left alone only after the last READ
                case PullDone() | PullFailed() | PullDrained() | PullStuck():
                    self.check(action, fence_ok)
                    self.told.append(action)

    def check(self, event: Any, fence_ok: bool) -> None:
        verdicts = [e for e in self.told if isinstance(e, PullDone | PullFailed)]
        if isinstance(event, PullDone):
            assert not verdicts and not self.cancelled and not self.reading
            assert not self.incomplete and fence_ok
        elif isinstance(event, PullFailed):
            assert not verdicts and not self.cancelled
            assert event.drained == (not self.reading)
        elif isinstance(event, PullStuck):
            assert event not in self.told and self.cancelled and self.reading
        else:
            assert event not in self.told and not self.reading
            undrained = any(
                isinstance(e, PullFailed) and not e.drained for e in self.told
            )
            assert self.cancelled or undrained

    @rule()
    def ask(self) -> None:
        self.pull.pull(ORDER, self.now)

    @rule()
    def ready(self) -> None:
        self.perform(self.pull.on_peer_ready(self.now, self.verified))

    @precondition(lambda self: self.asked)
    @rule(sums=st.sampled_from([RIGHT, RIGHT, RIGHT[::-1], b"", None]))
    def lender_says(self, sums: bytes | None) -> None:
        self.lender_tells(sums)

    def lender_tells(self, sums: bytes | None) -> None:
        nonce = self.asked.nonce
        reply = (
            LeaseEnded(nonce=nonce) if sums is None else Digest(nonce=nonce, sums=sums)
        )
        if not self.fence_asked:
            self.theirs = sums
        self.perform(self.pull.on_reply(reply, self.now))

    @precondition(lambda self: self.reading)
    @rule(
        data=st.data(),
        complete=st.sampled_from([True, True, True, False]),
        broken=st.booleans(),
        sums=st.sampled_from([RIGHT, RIGHT, RIGHT, RIGHT[::-1]]),
    )
    def rank_ends(
        self, data: st.DataObject, complete: bool, broken: bool, sums: bytes
    ) -> None:
        self.end(
            data.draw(st.sampled_from(sorted(self.reading))), complete, broken, sums
        )

    @precondition(lambda self: self.reading)
    @rule()
    def all_goes_well(self) -> None:
        for rank in sorted(self.reading):
            self.end(rank)
        if self.asked:
            self.lender_tells(RIGHT)

    def end(
        self,
        rank: int,
        complete: bool = True,
        broken: bool = False,
        sums: bytes = RIGHT,
    ) -> None:
        self.reading.discard(rank)
        self.incomplete |= not complete
        error = ERROR if broken and not complete else None
        report = ended(rank, complete, error)
        if self.asked:
            report = msgspec.structs.replace(report, part=DigestPart(rank, 0, sums))
            self.held.add(sums)
        self.perform(self.pull.on_report(report, self.now))

    @precondition(lambda self: self.reading)
    @rule(data=st.data())
    def rank_fails(self, data: st.DataObject) -> None:
        rank = data.draw(st.sampled_from(sorted(self.reading)))
        self.incomplete = True
        self.perform(self.pull.on_report(RankFailing("a", rank, ERROR), self.now))

    @precondition(lambda self: self.fence_asked)
    @rule(ok=st.booleans())
    def fenced(self, ok: bool) -> None:
        self.perform(
            self.pull.on_reply(FENCED if ok else FENCE_GONE, self.now), fence_ok=ok
        )

    @rule(what=st.sampled_from(["renewed", "renewed", "gone", "peer fails"]))
    def disturb(self, what: str) -> None:
        if what == "peer fails":
            self.perform(self.pull.fail(PeerUnreachable("x"), self.now))
        else:
            self.perform(
                self.pull.on_reply(
                    RENEWED if what == "renewed" else RENEW_GONE, self.now
                )
            )

    @rule()
    def cancel(self) -> None:
        self.cancelled |= self.pull.phase is not Phase.ENDED
        self.perform(self.pull.cancel(self.now))

    @rule(seconds=st.sampled_from([0.1, 1.0, 6.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.perform(self.pull.tick(self.now))

    @invariant()
    def reads_of_nobody_are_stopped_and_told_if_they_hang(self) -> None:
        """Their blocks must count as out of reach, whoever gave the pull up."""
        assert self.stopped or self.pull.phase is not Phase.DRAINING
        if self.pull.phase is Phase.DRAINING and self.pull.deadline() == float("inf"):
            hung = PullStuck if self.cancelled else PullFailed
            assert any(isinstance(event, hung) for event in self.told)

    @invariant()
    def an_ended_pull_has_told_its_end(self) -> None:
        if self.pull.phase is Phase.ENDED:
            assert self.told and not self.reading
            if self.cancelled:
                assert PullDrained("a") in self.told
            last = self.told[-1]
            assert not (isinstance(last, PullFailed) and not last.drained)

    def teardown(self) -> None:
        """Once every READ has ended, time alone ends any pull that was begun."""
        for rank in sorted(self.reading):
            self.reading.discard(rank)
            self.incomplete = True
            self.perform(self.pull.on_report(ended(rank, False), self.now))
        if self.pull.phase in (
            Phase.HELD,
            Phase.WAITING,
        ):  # the engine and peers.py see to these
            self.cancel()
        for _ in range(4):
            self.wait(40.0)
        assert self.pull.phase is Phase.ENDED
        self.an_ended_pull_has_told_its_end()


TestPullProperties = PullMachine.TestCase
TestPullProperties.settings = examples(400, stateful_step_count=25)
