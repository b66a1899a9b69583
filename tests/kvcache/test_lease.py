"""Each lease ends exactly once, and only held leases can be renewed or completed."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvcache.lease import LeaseOutcome, LeaseTable
from tests.rigs.examples import examples


def test_tombstones_are_bounded_by_count_and_age(monkeypatch):
    monkeypatch.setattr("kvcache.lease._MAX_TOMBSTONES", 2)
    monkeypatch.setattr("kvcache.lease._TOMBSTONE_S", 50.0)
    table = LeaseTable()
    for name in "abc":
        table.grant(name, name, [1], 10.0, now=0.0)
        assert table.complete(name, "t", now=1.0)
    assert not table.complete("a", "t", now=1.0)
    assert table.complete("b", "t", now=1.0)
    assert table.complete("c", "t", now=51.0)
    assert not table.complete("c", "t", now=51.5)


class LeaseMachine(RuleBasedStateMachine):
    """Random calls of LeaseTable: every lease ends once, and `complete` succeeds only
    for held leases (invariants I3 to I5 in docs/design.md).
    """

    @initialize()
    def begin(self) -> None:
        self.table = LeaseTable()
        self.now = 0.0
        # The expected state: deadlines of held leases.
        self.deadlines: dict[str, float] = {}
        self.lease_s: dict[str, float] = {}
        self.completed_by: dict[str, str] = {}
        self.aborted: set[str] = set()
        self.blocks: dict[str, tuple[int, ...]] = {}
        self.collected: list[str] = []

    def is_held(self, lease_id: str) -> bool:
        return self.now < self.deadlines.get(lease_id, -1.0)

    @rule(lease_s=st.floats(0.1, 20.0), size=st.integers(1, 4))
    def grant(self, lease_s: float, size: int) -> None:
        lease_id = f"L{len(self.blocks)}"
        self.blocks[lease_id] = tuple(range(size))
        self.lease_s[lease_id] = lease_s
        self.deadlines[lease_id] = self.now + lease_s
        self.table.grant(lease_id, "r", self.blocks[lease_id], lease_s, self.now)

    def latest(self, index: int) -> str:
        """Returns the id of a recent lease, or an unknown id if there are too few."""
        return f"L{len(self.blocks) - 1 - index}"

    @rule(
        seconds=st.floats(0.0, 8.0), index=st.integers(0, 3), to_deadline=st.booleans()
    )
    def wait(self, seconds: float, index: int, to_deadline: bool) -> None:
        """Advances the time by some seconds, or exactly to the deadline of a lease."""
        deadline = self.deadlines.get(self.latest(index), 0.0)
        self.now = max(self.now, deadline) if to_deadline else self.now + seconds

    @rule(index=st.integers(0, 3), attempt=st.sampled_from("ab"))
    def complete(self, index: int, attempt: str) -> None:
        lease_id = self.latest(index)
        expected = self.is_held(lease_id) or self.completed_by.get(lease_id) == attempt
        if self.is_held(lease_id):
            self.completed_by[lease_id] = attempt
            del self.deadlines[lease_id]
        assert self.table.complete(lease_id, attempt, self.now) == expected

    @rule(index=st.integers(0, 3))
    def renew(self, index: int) -> None:
        lease_id = self.latest(index)
        expected = self.is_held(lease_id)
        if expected:
            self.deadlines[lease_id] = self.now + self.lease_s[lease_id]
        assert self.table.renew(lease_id, self.now) == expected

    @rule(index=st.integers(0, 3))
    def abort(self, index: int) -> None:
        lease_id = self.latest(index)
        expected = self.is_held(lease_id)
        assert self.table.abort(lease_id, self.now) == expected
        if expected:
            self.aborted.add(lease_id)
            del self.deadlines[lease_id]

    @rule()
    def sweep(self) -> None:
        self.table.expire(self.now)
        held = {lease_id for lease_id in self.deadlines if self.is_held(lease_id)}
        assert self.table.num_held == len(held)

    def collect(self) -> None:
        for lease in self.table.drain_ended():
            lease_id = lease.lease_id
            assert lease.request_id == "r"
            assert lease.block_ids == self.blocks[lease_id]
            is_completed = lease.outcome is LeaseOutcome.COMPLETED
            assert is_completed == (lease_id in self.completed_by)
            is_aborted = lease.outcome is LeaseOutcome.ABORTED
            assert is_aborted == (lease_id in self.aborted)
            assert not self.is_held(lease_id)
            self.collected.append(lease_id)

    @invariant()
    def every_lease_is_held_or_collected_once(self) -> None:

        self.collect()
        assert len(set(self.collected)) == len(self.collected)
        assert self.table.num_held + len(self.collected) == len(self.blocks)


TestLeaseProperties = LeaseMachine.TestCase
TestLeaseProperties.settings = examples(150)
