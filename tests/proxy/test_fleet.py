"""The machines without I/O: readiness and circuit as moves, turns, retries, the fleet's books."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.health import (
    COOLDOWN_S,
    FAILURES,
    MAX_COOLDOWN_S,
    SILENCES,
    Health,
    Room,
    Said,
    admits,
    began,
    failed,
    polled,
    silent,
    succeeded,
    unreachable,
)
from proxy.legs.failures import failure_of, may_retry, trips_breaker
from proxy.membership import Fleet, Kind, Server, Watch
from proxy.upstream import Failure

READY = Health(ready=True, reason="")
YES, STARTING = Said(True), Said(False, "the engine is starting")


def failed_times(n: int, health: Health = READY) -> Health:
    for _ in range(n):
        health = failed(health, 0.0)
    return health


def test_the_room_of_a_server_is_what_it_said_last():
    told = polled(READY, Said(True, room=Room(300, 8)), 1.0)
    starting = polled(told, STARTING, 2.0)
    assert starting.room == Room(300, 8)
    assert polled(starting, Said(True, room=Room(max_num_seqs=4)), 3.0).room == Room(
        None, 4
    )


def test_a_connection_error_outweighs_a_health_check_begun_before_it():
    down = unreachable(READY, "refused", now=5.0)
    assert not down.ready
    assert not polled(down, YES, 4.9).ready
    assert polled(down, YES, 5.1).ready


def test_a_server_that_is_merely_slow_to_answer_stays_ready_for_a_while():
    health = READY
    for _ in range(SILENCES - 1):
        health = silent(health, "no answer")
        assert health.ready
    assert polled(health, YES, 1.0) == READY
    health = silent(health, "no answer")
    assert (health.ready, health.reason) == (False, "no answer")
    assert not silent(Health(), "no answer").ready


def test_failures_in_a_row_open_the_circuit_and_each_failed_trial_doubles_the_cooldown():
    assert admits(failed_times(FAILURES - 1), 0.0)
    assert admits(
        failed_times(FAILURES - 1, succeeded(failed_times(FAILURES - 1))), 0.0
    )
    health, now, cooldowns = failed_times(FAILURES), 0.0, []
    for _ in range(6):
        assert health.open_until is not None and not admits(
            health, health.open_until - 0.1
        )
        assert (
            failed(health, now).open_until == health.open_until
        )  # it was sent earlier
        cooldowns.append(health.open_until - now)
        now = health.open_until
        assert admits(health, now)
        trying = began(health, now)
        assert not admits(trying, now + 0.1)
        assert admits(succeeded(trying), now + 0.1)
        assert admits(trying, now + COOLDOWN_S)  # it never reported
        health = failed(trying, now)
    assert cooldowns == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0]


MOVES: dict[str, Any] = {
    "failed": lambda health, now: failed(health, now),
    "succeeded": lambda health, _: succeeded(health),
    "began": began,
    "unreachable": lambda health, now: unreachable(health, "gone", now),
    "polled": lambda health, now: polled(health, YES, now),
}


@given(st.lists(st.tuples(st.sampled_from([*MOVES]), st.floats(0, 20))))
def test_whatever_happened_a_server_that_works_again_is_used_again(events):
    health, now = Health(), 0.0
    for event, passed in events:
        now += passed
        health = MOVES[event](health, now)
    later = now + MAX_COOLDOWN_S
    health = polled(health, YES, later)
    assert health.ready and admits(health, later)
    closed = replace(READY, changed_at=health.changed_at)
    assert succeeded(began(health, later)) == closed


# -- what a failure means


@pytest.mark.parametrize(
    ("status", "code", "failure"),
    [(200, "", None), (302, "", None), (400, "", None), (429, "", None), (500, "", Failure.ERROR),
     (502, "", Failure.ERROR), (503, "", Failure.BUSY), (504, "", Failure.ERROR),
     (503, "engine_died", Failure.DIED), (503, "overloaded", Failure.BUSY),
     (500, "engine_died", Failure.ERROR)],
)  # fmt: skip
def test_only_5xx_is_a_failure_and_not_that_of_a_full_server_or_of_its_peer(
    status, code, failure
):
    assert failure_of(status, b'{"error": {"code": "%s"}}' % code.encode()) is failure
    if failure in (Failure.ERROR, Failure.BUSY):
        assert trips_breaker(failure, status) is (status == 500)
    assert trips_breaker(Failure.TIMEOUT, None)


@pytest.mark.parametrize("failure", Failure)
def test_a_prefill_is_repeated_and_a_decode_only_when_it_costs_the_client_no_second_wait(
    failure,
):
    assert may_retry(Kind.PREFILL, [failure])
    expected = failure not in (Failure.TIMEOUT, Failure.ERROR)
    assert may_retry(Kind.DECODE, [failure]) is expected


@pytest.mark.parametrize("kind", Kind)
def test_what_was_not_delivered_may_be_tried_everywhere(kind):
    assert may_retry(kind, [Failure.UNREACHABLE, Failure.BUSY] * 10)
    assert not may_retry(kind, [Failure.LOST, Failure.UNREACHABLE, Failure.LOST])
    assert not may_retry(kind, [Failure.DIED, Failure.BUSY, Failure.LOST])


# -- the fleet


def fleet_of(prefill: str, decode: str = "", ready: str = "", **options: Any) -> Fleet:
    """Servers of one-letter URLs, those of `ready` ready: all, where none is named."""
    fleet = Fleet(
        {Kind.PREFILL: prefill, Kind.DECODE: decode},
        **{"clock": lambda: 0.0, **options},
    )
    for server in fleet.servers:
        if not ready or server.url in ready:
            fleet.polled(server, YES, 0.0)
    return fleet


def trip(fleet: Fleet, server: Server) -> None:
    for _ in range(FAILURES):
        fleet.failed(server)


@pytest.mark.parametrize(
    ("last", "ready", "admitted", "chosen"),
    [
        (None, "abc", "abc", "a"),
        ("a", "abc", "abc", "b"),
        ("c", "abc", "abc", "a"),
        ("a", "ac", "abc", "c"),  # who cannot be used is passed over
        ("a", "a", "abc", "a"),
        (
            "a",
            "abc",
            "a",
            "a",
        ),  # an open circuit moves a server to the end, and no further
        ("a", "abc", "", "b"),
        ("a", "a", "b", "a"),
        ("a", "", "abc", None),
    ],
)
def test_turns(last, ready, admitted, chosen):
    fleet = fleet_of("abc")
    if last:
        assert (
            fleet.choose(Kind.PREFILL, first=lambda s: s["abc".index(last)]) is not None
        )
    for server in fleet.servers:
        if server.url not in ready:
            fleet.unreachable(server, "gone")
        if server.url not in admitted:
            trip(fleet, server)
    found = fleet.choose(Kind.PREFILL)
    assert (found and found.url) == chosen


@given(st.integers(1, 6), st.data())
def test_usable_servers_get_equal_shares(num_servers, data):
    urls = "abcdef"[:num_servers]
    working = "".join(data.draw(st.sets(st.sampled_from(urls), min_size=1)))
    fleet = fleet_of(urls, ready=working)
    chosen = [fleet.choose(Kind.PREFILL) for _ in range(3 * len(working))]
    assert sorted(server.url for server in chosen if server) == sorted(3 * working)


def test_kinds_do_not_mix_and_servers_tried_before_are_left_out():
    fleet = fleet_of("ab", "a")  # one URL may play both parts
    (p1, p2), (d1,) = fleet.of[Kind.PREFILL], fleet.of[Kind.DECODE]
    assert [fleet.choose(Kind.PREFILL) for _ in range(3)] == [p1, p2, p1]
    assert fleet.choose(Kind.DECODE) == d1
    assert (fleet.ready(Kind.PREFILL), fleet.ready(Kind.DECODE)) == ([p1, p2], [d1])
    assert fleet.choose(Kind.PREFILL, [p1]) == p2
    assert fleet.choose(Kind.PREFILL, [p1, p2]) is None
    fleet.unreachable(d1, "refused")
    assert fleet.choose(Kind.DECODE) is None
    assert fleet.choose(Kind.PREFILL) == p1


def test_changes_of_readiness_and_of_what_bars_it_are_told_once():
    told: list[tuple[bool, bool, str]] = []
    watch = Watch(
        on_change=lambda _, old, new: told.append((old.ready, new.ready, new.reason))
    )
    fleet = fleet_of("a", watch=watch)
    for reason in ("refused", "refused", "loading"):
        fleet.unreachable(fleet.servers[0], reason)
    assert told == [
        (False, True, ""),
        (True, False, "refused"),
        (False, False, "loading"),
    ]


def test_a_failing_server_comes_last_until_its_trial():
    now = 0.0
    fleet = fleet_of("ab", clock=lambda: now)
    first, second = fleet.servers
    trip(fleet, first)
    choose = partial(fleet.choose, Kind.PREFILL)
    assert {choose() for _ in range(3)} == {second}
    assert choose([second]) == first
    now = COOLDOWN_S
    assert [choose() for _ in range(3)] == [second, first, second]
    fleet.succeeded(first)
    assert choose() == first
