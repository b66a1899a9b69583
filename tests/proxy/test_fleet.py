"""Health, circuit breakers, retries and round robin of servers, without I/O."""

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
    HealthReport,
    RequestLimits,
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
READY_REPORT = HealthReport(True)
STARTING = HealthReport(False, "the engine is starting")


def after_failures(n: int, health: Health = READY) -> Health:
    for _ in range(n):
        health = failed(health, 0.0)
    return health


def test_limits_of_a_server_are_those_of_its_last_report_with_limits():
    reported = polled(READY, HealthReport(True, limits=RequestLimits(300, 8)), 1.0)
    starting = polled(reported, STARTING, 2.0)
    assert starting.limits == RequestLimits(300, 8)
    report = HealthReport(True, limits=RequestLimits(max_num_seqs=4))
    assert polled(starting, report, 3.0).limits == RequestLimits(None, 4)


def test_health_check_that_started_before_a_connection_error_is_void():
    down = unreachable(READY, "refused", now=5.0)
    assert not down.ready
    assert not polled(down, READY_REPORT, 4.9).ready
    assert polled(down, READY_REPORT, 5.1).ready


def test_server_that_misses_few_health_checks_stays_ready():
    health = READY
    for _ in range(SILENCES - 1):
        health = silent(health, "no answer")
        assert health.ready
    assert polled(health, READY_REPORT, 1.0) == READY
    health = silent(health, "no answer")
    assert (health.ready, health.reason) == (False, "no answer")
    assert not silent(Health(), "no answer").ready


def test_failures_open_the_circuit_and_failed_trials_double_the_cooldown():
    assert admits(after_failures(FAILURES - 1), 0.0)
    recovered = succeeded(after_failures(FAILURES - 1))
    assert admits(after_failures(FAILURES - 1, recovered), 0.0)
    health = after_failures(FAILURES)
    now = 0.0
    cooldowns = []
    for _ in range(6):
        assert health.open_until is not None
        assert not admits(health, health.open_until - 0.1)
        # A request that was sent before the circuit opened changes nothing.
        assert failed(health, now).open_until == health.open_until
        cooldowns.append(health.open_until - now)
        now = health.open_until
        assert admits(health, now)
        trying = began(health, now)
        assert not admits(trying, now + 0.1)
        assert admits(succeeded(trying), now + 0.1)
        # If a trial has no result, the next trial is allowed after the cooldown.
        assert admits(trying, now + COOLDOWN_S)
        health = failed(trying, now)
    assert cooldowns == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0]


EVENTS: dict[str, Any] = {
    "failed": lambda health, now: failed(health, now),
    "succeeded": lambda health, _: succeeded(health),
    "began": began,
    "unreachable": lambda health, now: unreachable(health, "gone", now),
    "polled": lambda health, now: polled(health, READY_REPORT, now),
}


@given(st.lists(st.tuples(st.sampled_from([*EVENTS]), st.floats(0, 20))))
def test_server_that_works_again_is_used_again_after_any_events(events):
    health = Health()
    now = 0.0
    for event, passed in events:
        now += passed
        health = EVENTS[event](health, now)
    later = now + MAX_COOLDOWN_S
    health = polled(health, READY_REPORT, later)
    assert health.ready and admits(health, later)
    closed = replace(READY, unreachable_at=health.unreachable_at)
    assert succeeded(began(health, later)) == closed


# -- failures


@pytest.mark.parametrize(
    ("status", "code", "failure"),
    [
        (200, "", None),
        (302, "", None),
        (400, "", None),
        (429, "", None),
        (500, "", Failure.ERROR),
        (502, "", Failure.ERROR),
        (503, "", Failure.BUSY),
        (504, "", Failure.ERROR),
        (503, "engine_died", Failure.DIED),
        (503, "overloaded", Failure.BUSY),
        (500, "engine_died", Failure.ERROR),
    ],
)
def test_5xx_is_a_failure_and_only_500_counts_for_the_circuit(status, code, failure):
    """503 is the answer of a full server. 502 and 504 report failures of a server's
    peer.
    """
    assert failure_of(status, b'{"error": {"code": "%s"}}' % code.encode()) is failure
    if failure in (Failure.ERROR, Failure.BUSY):
        assert trips_breaker(failure, status) is (status == 500)
    assert trips_breaker(Failure.TIMEOUT, None)


@pytest.mark.parametrize("failure", Failure)
def test_prefill_is_always_retried_but_decode_not_after_a_timeout_or_error(failure):
    assert may_retry(Kind.PREFILL, [failure])
    expected = failure not in (Failure.TIMEOUT, Failure.ERROR)
    assert may_retry(Kind.DECODE, [failure]) is expected


@pytest.mark.parametrize("kind", Kind)
def test_request_that_was_not_delivered_may_be_retried_at_every_server(kind):
    assert may_retry(kind, [Failure.UNREACHABLE, Failure.BUSY] * 10)
    assert not may_retry(kind, [Failure.LOST, Failure.UNREACHABLE, Failure.LOST])
    assert not may_retry(kind, [Failure.DIED, Failure.BUSY, Failure.LOST])


# -- the fleet


def fleet_of(prefill: str, decode: str = "", ready: str = "", **options: Any) -> Fleet:
    """Return a fleet of servers with one-letter URLs.

    Args:
        ready: URLs of the servers that are ready. If it is empty, all are ready.
    """
    fleet = Fleet(
        {Kind.PREFILL: prefill, Kind.DECODE: decode},
        **{"clock": lambda: 0.0, **options},
    )
    for server in fleet.servers:
        if not ready or server.url in ready:
            fleet.polled(server, READY_REPORT, 0.0)
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
        ("a", "ac", "abc", "c"),  # a server that is not ready is skipped
        ("a", "a", "abc", "a"),
        # Servers with an open circuit are only used if there are no others.
        ("a", "abc", "a", "a"),
        ("a", "abc", "", "b"),
        ("a", "a", "b", "a"),
        ("a", "", "abc", None),
    ],
)
def test_usable_servers_take_turns(last, ready, admitted, chosen):
    fleet = fleet_of("abc")
    if last:
        index = "abc".index(last)
        server = fleet.choose(Kind.PREFILL, choose_server=lambda s: s[index])
        assert server is not None
    for server in fleet.servers:
        if server.url not in ready:
            fleet.unreachable(server, "gone")
        if server.url not in admitted:
            trip(fleet, server)
    server = fleet.choose(Kind.PREFILL)
    assert (server and server.url) == chosen


@given(st.integers(1, 6), st.data())
def test_usable_servers_get_equal_shares(num_servers, data):
    urls = "abcdef"[:num_servers]
    working = "".join(data.draw(st.sets(st.sampled_from(urls), min_size=1)))
    fleet = fleet_of(urls, ready=working)
    chosen = [fleet.choose(Kind.PREFILL) for _ in range(3 * len(working))]
    assert sorted(server.url for server in chosen if server) == sorted(3 * working)


def test_choice_is_among_untried_servers_of_one_kind():
    # The same URL may be listed as a prefill server and as a decode server.
    fleet = fleet_of("ab", "a")
    p1, p2 = fleet.by_kind[Kind.PREFILL]
    (d1,) = fleet.by_kind[Kind.DECODE]
    assert [fleet.choose(Kind.PREFILL) for _ in range(3)] == [p1, p2, p1]
    assert fleet.choose(Kind.DECODE) == d1
    assert (fleet.ready(Kind.PREFILL), fleet.ready(Kind.DECODE)) == ([p1, p2], [d1])
    assert fleet.choose(Kind.PREFILL, [p1]) == p2
    assert fleet.choose(Kind.PREFILL, [p1, p2]) is None
    fleet.unreachable(d1, "refused")
    assert fleet.choose(Kind.DECODE) is None
    assert fleet.choose(Kind.PREFILL) == p1


def test_each_change_of_readiness_or_its_reason_is_reported_once():
    changes: list[tuple[bool, bool, str]] = []

    def on_change(_: Server, old: Health, new: Health) -> None:
        changes.append((old.ready, new.ready, new.reason))

    fleet = fleet_of("a", watch=Watch(on_change=on_change))
    for reason in ("refused", "refused", "loading"):
        fleet.unreachable(fleet.servers[0], reason)
    assert changes == [
        (False, True, ""),
        (True, False, "refused"),
        (False, False, "loading"),
    ]


def test_failing_server_is_the_last_choice_until_its_trial():
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
