"""Readiness and the circuit breaker as a table of moves, the clock in hand."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.health import (
    Circuit,
    Health,
    HealthPolicy,
    Room,
    admits,
    began,
    circuit,
    failed,
    polled,
    silent,
    succeeded,
    unreachable,
)

POLICY = HealthPolicy(failures=3, cooldown_s=10.0, max_cooldown_s=35.0)
READY = Health(ready=True, reason="")


def failed_times(n: int, now: float, health: Health = READY) -> Health:
    for _ in range(n):
        health = failed(health, now, POLICY)
    return health


def test_a_server_is_not_ready_before_it_was_asked() -> None:
    assert not Health().ready
    assert polled(Health(), ready=True, reason="", started_at=0.0).ready


def test_a_server_says_why_it_is_not_ready() -> None:
    health = polled(READY, ready=False, reason="the engine is starting", started_at=1.0)
    assert (health.ready, health.reason) == (False, "the engine is starting")
    assert polled(health, ready=True, reason="", started_at=2.0) == READY


def test_the_room_of_a_server_is_what_it_said_last() -> None:
    told = polled(READY, ready=True, reason="", started_at=1.0, room=Room(300, 8))
    starting = polled(told, ready=False, reason="the engine is starting", started_at=2.0)
    assert starting.room == Room(300, 8)
    again = polled(starting, ready=True, reason="", started_at=3.0, room=Room(max_num_seqs=4))
    assert again.room == Room(None, 4)


def test_a_connection_error_outweighs_a_health_check_begun_before_it() -> None:
    down = unreachable(READY, "refused", now=5.0)
    assert not down.ready
    assert not polled(down, ready=True, reason="", started_at=4.9).ready
    assert polled(down, ready=True, reason="", started_at=5.1).ready


def test_a_server_that_is_merely_slow_to_answer_stays_ready_for_a_while() -> None:
    health = READY
    for _ in range(POLICY.silences - 1):
        health = silent(health, "no answer", POLICY)
        assert health.ready
    assert polled(health, ready=True, reason="", started_at=1.0) == READY
    health = silent(health, "no answer", POLICY)
    assert (health.ready, health.reason) == (False, "no answer")


def test_silence_makes_no_server_ready() -> None:
    assert not silent(Health(), "no answer", POLICY).ready


def test_failures_in_a_row_open_the_circuit() -> None:
    assert circuit(failed_times(2, 0.0), 0.0) is Circuit.CLOSED
    assert circuit(failed_times(3, 0.0), 0.0) is Circuit.OPEN
    assert circuit(failed_times(2, 0.0, succeeded(failed_times(2, 0.0))), 0.0) is Circuit.CLOSED


def test_after_the_cooldown_one_trial_is_let_through() -> None:
    opened = failed_times(3, 0.0)
    assert not admits(opened, 9.9)
    assert circuit(opened, 10.0) is Circuit.HALF_OPEN
    assert admits(opened, 10.0)
    trying = began(opened, 10.0, POLICY)
    assert not admits(trying, 10.1)
    assert circuit(succeeded(trying), 10.1) is Circuit.CLOSED


def test_a_trial_that_never_reports_does_not_block_the_next() -> None:
    trying = began(failed_times(3, 0.0), 10.0, POLICY)
    assert admits(trying, 10.0 + POLICY.cooldown_s)


def test_each_failed_trial_doubles_the_cooldown_up_to_the_limit() -> None:
    health, now, cooldowns = failed_times(3, 0.0), 0.0, []
    for _ in range(4):
        assert health.open_until is not None
        cooldowns.append(health.open_until - now)
        now = health.open_until
        health = failed(began(health, now, POLICY), now, POLICY)
    assert cooldowns == [10.0, 20.0, 35.0, 35.0]


def test_failures_of_requests_sent_earlier_do_not_prolong_an_open_circuit() -> None:
    opened = failed_times(3, 0.0)
    assert failed(opened, 5.0, POLICY).open_until == opened.open_until


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["failed", "succeeded", "began", "unreachable", "polled"]),
        st.floats(0, 20),
    )
)


@settings(deadline=None)
@given(EVENTS)
def test_whatever_happened_a_server_that_works_again_is_used_again(
    events: list[tuple[str, float]],
) -> None:
    health, now = Health(), 0.0
    for event, passed in events:
        now += passed
        match event:
            case "failed":
                health = failed(health, now, POLICY)
            case "succeeded":
                health = succeeded(health)
            case "began":
                health = began(health, now, POLICY)
            case "unreachable":
                health = unreachable(health, "gone", now)
            case _:
                health = polled(health, ready=True, reason="", started_at=now)
    later = now + POLICY.max_cooldown_s
    health = polled(health, ready=True, reason="", started_at=later)
    assert health.ready
    assert admits(health, later)
    closed = replace(READY, changed_at=health.changed_at)
    assert succeeded(began(health, later, POLICY)) == closed
