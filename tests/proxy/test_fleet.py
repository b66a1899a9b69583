"""The machines without I/O: readiness and circuit as moves, turns, retries, the fleet's books."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.health import (
    Circuit,
    Health,
    HealthPolicy,
    Room,
    Said,
    admits,
    began,
    circuit,
    failed,
    polled,
    silent,
    succeeded,
    unreachable,
)
from proxy.membership import Fleet, Kind, Server
from proxy.routing import usable
from proxy.upstream import Failure
from proxy.upstream_call import failure_of, may_retry, trips_breaker

POLICY = HealthPolicy(failures=3, cooldown_s=10.0, max_cooldown_s=35.0)
READY = Health(ready=True, reason="")
YES, STARTING = Said(True), Said(False, "the engine is starting")
P1, P2 = Server(Kind.PREFILL, "http://p1"), Server(Kind.PREFILL, "http://p2")
D1 = Server(Kind.DECODE, "http://d1")
URLS = ["a", "b", "c"]


def failed_times(n: int, now: float, health: Health = READY) -> Health:
    for _ in range(n):
        health = failed(health, now, POLICY)
    return health


def test_a_server_is_as_ready_as_it_says_and_not_before_it_was_asked() -> None:
    assert not Health().ready
    assert polled(Health(), YES, 0.0).ready
    health = polled(READY, STARTING, 1.0)
    assert (health.ready, health.reason) == (False, "the engine is starting")
    assert polled(health, YES, 2.0) == READY


def test_the_room_of_a_server_is_what_it_said_last() -> None:
    told = polled(READY, Said(True, room=Room(300, 8)), 1.0)
    starting = polled(told, STARTING, 2.0)
    assert starting.room == Room(300, 8)
    assert polled(starting, Said(True, room=Room(max_num_seqs=4)), 3.0).room == Room(None, 4)


def test_a_connection_error_outweighs_a_health_check_begun_before_it() -> None:
    down = unreachable(READY, "refused", now=5.0)
    assert not down.ready
    assert not polled(down, YES, 4.9).ready
    assert polled(down, YES, 5.1).ready


def test_a_server_that_is_merely_slow_to_answer_stays_ready_for_a_while() -> None:
    health = READY
    for _ in range(POLICY.silences - 1):
        health = silent(health, "no answer", POLICY)
        assert health.ready
    assert polled(health, YES, 1.0) == READY
    health = silent(health, "no answer", POLICY)
    assert (health.ready, health.reason) == (False, "no answer")
    assert not silent(Health(), "no answer", POLICY).ready


def test_failures_in_a_row_open_the_circuit() -> None:
    assert circuit(failed_times(2, 0.0), 0.0) is Circuit.CLOSED
    opened = failed_times(3, 0.0)
    assert circuit(opened, 0.0) is Circuit.OPEN
    assert circuit(failed_times(2, 0.0, succeeded(failed_times(2, 0.0))), 0.0) is Circuit.CLOSED
    assert failed(opened, 5.0, POLICY).open_until == opened.open_until  # it was sent earlier


def test_after_the_cooldown_one_trial_is_let_through() -> None:
    opened = failed_times(3, 0.0)
    assert not admits(opened, 9.9)
    assert circuit(opened, 10.0) is Circuit.HALF_OPEN and admits(opened, 10.0)
    trying = began(opened, 10.0, POLICY)
    assert not admits(trying, 10.1)
    assert circuit(succeeded(trying), 10.1) is Circuit.CLOSED
    assert admits(trying, 10.0 + POLICY.cooldown_s)  # it never reported


def test_each_failed_trial_doubles_the_cooldown_up_to_the_limit() -> None:
    health, now, cooldowns = failed_times(3, 0.0), 0.0, []
    for _ in range(4):
        assert health.open_until is not None
        cooldowns.append(health.open_until - now)
        now = health.open_until
        health = failed(began(health, now, POLICY), now, POLICY)
    assert cooldowns == [10.0, 20.0, 35.0, 35.0]


EVENTS = st.sampled_from(["failed", "succeeded", "began", "unreachable", "polled"])


@given(st.lists(st.tuples(EVENTS, st.floats(0, 20))))
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
                health = polled(health, YES, now)
    later = now + POLICY.max_cooldown_s
    health = polled(health, YES, later)
    assert health.ready and admits(health, later)
    closed = replace(READY, changed_at=health.changed_at)
    assert succeeded(began(health, later, POLICY)) == closed


@pytest.mark.parametrize(
    ("last", "ready", "admitted", "chosen"),
    [
        (None, "abc", "abc", "a"),
        ("a", "abc", "abc", "b"),
        ("c", "abc", "abc", "a"),
        ("a", "ac", "abc", "c"),  # who cannot be used is passed over
        ("a", "a", "abc", "a"),
        ("gone", "abc", "abc", "a"),  # the last one has left
        ("a", "abc", "a", "a"),  # an open circuit moves a server to the end, and no further
        ("a", "abc", "", "b"),
        ("a", "a", "b", "a"),
        ("a", "", "abc", None),
    ],
)
def test_turns(last: str | None, ready: str, admitted: str, chosen: str | None) -> None:
    conditions = {"ready": ready.__contains__, "admits": admitted.__contains__}
    assert [*usable(URLS, last, **conditions), None][0] == chosen
    assert usable([], last, **conditions) == []


@given(st.integers(1, 6), st.data())
def test_usable_servers_get_equal_shares(num_servers: int, data: st.DataObject) -> None:
    urls = [str(i) for i in range(num_servers)]
    working = data.draw(st.sets(st.sampled_from(urls), min_size=1))
    last, counts = None, dict.fromkeys(working, 0)
    for _ in range(3 * len(working)):
        last = usable(urls, last, ready=working.__contains__, admits=working.__contains__)[0]
        counts[last] += 1
    assert set(counts.values()) == {3}


@pytest.mark.parametrize(
    ("status", "code", "failure"),
    [(200, "", None), (302, "", None), (400, "", None), (429, "", None), (500, "", Failure.ERROR),
     (502, "", Failure.ERROR), (503, "", Failure.BUSY), (504, "", Failure.ERROR),
     (503, "engine_died", Failure.DIED), (503, "overloaded", Failure.BUSY),
     (500, "engine_died", Failure.ERROR)],
)  # fmt: skip
def test_only_5xx_is_a_failure(status: int, code: str, failure: Failure | None) -> None:
    assert failure_of(status, b'{"error": {"code": "%s"}}' % code.encode()) is failure


@pytest.mark.parametrize("failure", Failure)
def test_a_prefill_is_repeated_and_a_decode_only_when_it_costs_the_client_no_second_wait(
    failure: Failure,
) -> None:
    assert may_retry(Kind.PREFILL, [failure])
    expected = failure not in (Failure.TIMEOUT, Failure.ERROR)
    assert may_retry(Kind.DECODE, [failure]) is expected


@pytest.mark.parametrize("kind", Kind)
def test_what_was_not_delivered_may_be_tried_everywhere(kind: Kind) -> None:
    assert may_retry(kind, [Failure.UNREACHABLE, Failure.BUSY] * 10)
    assert not may_retry(kind, [Failure.LOST, Failure.UNREACHABLE, Failure.LOST])
    assert not may_retry(kind, [Failure.DIED, Failure.BUSY, Failure.LOST])


def test_a_full_server_or_a_failed_peer_does_not_count_against_a_server() -> None:
    assert trips_breaker(Failure.ERROR, 500) and trips_breaker(Failure.TIMEOUT, None)
    for failure, status in ((Failure.BUSY, 503), (Failure.ERROR, 502), (Failure.ERROR, 504)):
        assert not trips_breaker(failure, status)


def ready_fleet(*servers: Server, **options: object) -> Fleet:
    fleet = Fleet(**{"clock": lambda: 0.0, **options})  # type: ignore[arg-type]
    for server in servers:
        fleet.join(server)
        fleet.polled(server, YES, 0.0)
    return fleet


def test_kinds_do_not_mix_and_servers_tried_before_are_left_out() -> None:
    fleet = ready_fleet(P1, P2, D1)
    assert [fleet.choose(Kind.PREFILL) for _ in range(3)] == [P1, P2, P1]
    assert fleet.choose(Kind.DECODE) == D1
    assert (fleet.num_ready(Kind.PREFILL), fleet.num_ready(Kind.DECODE)) == (2, 1)
    assert fleet.choose(Kind.PREFILL, [P1]) == P2
    assert fleet.choose(Kind.PREFILL, [P1, P2]) is None


def test_one_url_may_play_both_parts() -> None:
    both = Server(Kind.DECODE, P1.url)
    fleet = ready_fleet(P1, both)
    fleet.unreachable(both, "refused")
    assert fleet.choose(Kind.PREFILL) == P1
    assert fleet.choose(Kind.DECODE) is None


def test_changes_of_readiness_and_of_what_bars_it_are_told_once() -> None:
    told: list[tuple[bool, bool, str]] = []
    fleet = ready_fleet(
        P1, on_change=lambda _server, old, new: told.append((old.ready, new.ready, new.reason))
    )
    for reason in ("refused", "refused", "loading"):
        fleet.unreachable(P1, reason)
    assert told == [(False, True, ""), (True, False, "refused"), (False, False, "loading")]


def test_a_failing_server_comes_last_until_its_trial() -> None:
    now = 0.0
    policy = HealthPolicy(failures=1, cooldown_s=5.0)
    fleet = ready_fleet(P1, P2, policy=policy, clock=lambda: now)
    fleet.failed(P1)
    assert {fleet.choose(Kind.PREFILL) for _ in range(3)} == {P2}
    assert fleet.choose(Kind.PREFILL, [P2]) == P1
    now = 5.0
    assert [fleet.choose(Kind.PREFILL) for _ in range(3)] == [P2, P1, P2]
    fleet.succeeded(P1)
    assert fleet.choose(Kind.PREFILL) == P1


def test_servers_may_join_and_leave_at_any_time() -> None:
    fleet = ready_fleet(P1)
    fleet.leave(P1)
    assert fleet.choose(Kind.PREFILL) is None
    fleet.failed(P1)  # a request that it still had
    fleet.polled(P1, YES, 0.0)
    assert fleet.servers() == []
    assert fleet.health(P1) == Health(reason="left")
    fleet.join(P2)
    assert fleet.choose(Kind.PREFILL) is None
    fleet.polled(P2, YES, 0.0)
    assert fleet.choose(Kind.PREFILL) == P2
