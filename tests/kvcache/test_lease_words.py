import uuid
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvcache.lease import LeaseState, LeaseTable
from kvcache.lease_words import TABLE_BYTES, WORD_BYTES, LeaseWords, is_held

A, B = "ab" * 16, "cd" * 16


def same_bucket(count: int) -> list[str]:
    return [f"00000007{index:08x}" + "11" * 8 for index in range(1, count + 1)]


def test_a_lease_is_held_from_put_to_clear() -> None:
    memory = bytearray(TABLE_BYTES)
    words = LeaseWords(memory)
    assert not is_held(memory, A)
    assert words.put(A) and words.put(B)
    assert is_held(memory, A) and is_held(memory, B)
    words.clear(A)
    assert not is_held(memory, A) and is_held(memory, B)
    words.clear(A)
    words.clear(B)
    assert memory == bytearray(TABLE_BYTES)


def test_an_id_whose_bucket_is_full_is_not_published_and_takes_no_place_of_others() -> None:
    memory = bytearray(TABLE_BYTES)
    words = LeaseWords(memory)
    *fitting, late = same_bucket(5)
    assert all(words.put(lease_id) for lease_id in fitting)
    assert not words.put(late) and not is_held(memory, late)
    words.clear(late)
    assert all(is_held(memory, lease_id) for lease_id in fitting)
    words.clear(fitting[1])
    assert words.put(late) and is_held(memory, late) and not is_held(memory, fitting[1])


def test_a_slot_that_is_being_changed_holds_no_lease() -> None:
    first, second = bytes.fromhex(A), bytes.fromhex(A[:8] + B[8:])
    for old, new in ((first, bytes(16)), (bytes(16), second)):
        for done in range(1, WORD_BYTES):
            memory = bytearray(TABLE_BYTES)
            LeaseWords(memory).put(A)
            at = memory.index(first)
            memory[at : at + WORD_BYTES] = new[:done] + old[done:]
            assert not is_held(memory, first.hex()) and not is_held(memory, second.hex())


class Spy(bytearray):
    """Memory that looks at the table while it is written to."""

    table: LeaseTable

    def __setitem__(self, where: Any, value: Any) -> None:
        if value == bytes(WORD_BYTES):
            lease_id = bytes(self[where]).hex()
            assert self.table.state(lease_id) is LeaseState.HELD, "cleared too late"
            assert lease_id not in {ended.lease_id for ended in self.table._ended}
        super().__setitem__(where, value)


class WordsMachine(RuleBasedStateMachine):
    """Property: at no moment does a word equal an id whose blocks are not leased."""

    @initialize()
    def begin(self) -> None:
        self.memory = Spy(TABLE_BYTES)
        self.table = self.memory.table = LeaseTable(words=LeaseWords(self.memory))
        self.now = 0.0
        self.ids = same_bucket(8) + [f"{index:032x}" for index in range(1, 9)]
        self.used: list[str] = []
        self.home: set[str] = set()

    @rule(index=st.integers(0, 15), lease_s=st.floats(0.1, 20.0))
    def grant(self, index: int, lease_s: float) -> None:
        lease_id = self.ids[index]
        if lease_id not in self.used:
            self.used.append(lease_id)
            self.table.grant(lease_id, "r", [index], lease_s, self.now)

    @rule(seconds=st.floats(0.0, 8.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(index=st.integers(0, 15), attempt=st.sampled_from("ab"))
    def complete(self, index: int, attempt: str) -> None:
        if self.table.complete(self.ids[index], attempt, self.now):
            assert not is_held(self.memory, self.ids[index])

    @rule(index=st.integers(0, 15))
    def renew(self, index: int) -> None:
        self.table.renew(self.ids[index], self.now)

    @rule(index=st.integers(0, 15))
    def abort(self, index: int) -> None:
        self.table.abort(self.ids[index], self.now)

    @rule()
    def sweep(self) -> None:
        self.table.expire(self.now)

    @rule()
    def go_away(self) -> None:
        self.table.abort_all(self.now)

    @rule()
    def collect(self) -> None:
        self.home |= {ended.lease_id for ended in self.table.drain_ended()}

    @invariant()
    def a_word_stands_only_for_a_held_lease(self) -> None:
        for lease_id in self.ids:
            if is_held(self.memory, lease_id):
                assert self.table.state(lease_id) is LeaseState.HELD
                assert lease_id not in self.home


TestWordsProperties = WordsMachine.TestCase
TestWordsProperties.settings = settings(deadline=None, max_examples=100)


def test_thousands_of_leases_find_room() -> None:
    words = LeaseWords(bytearray(TABLE_BYTES))
    assert sum(words.put(uuid.uuid4().hex) for _ in range(2000)) > 1980
