"""Servers that join and leave the fleet, and the state that is removed with them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ModelNotFound
from proxy.health import (
    LONG_SILENCE,
    MAX_PAUSE,
    Health,
    HealthReport,
    SideChannel,
    pause_s,
    polled,
    silent,
)
from proxy.membership import Fleet, Kind, Server, Watch
from proxy.placement.assignment import Assignment
from proxy.placement.load_tracker import LoadTracker
from proxy.placement.request_profile import profile_prompt

READY_REPORT = HealthReport(True)
PROFILE = profile_prompt(b"", b"x" * 4096, 1)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["join", "leave", "begin", "end"]),
        st.sampled_from("abcdef"),
        st.sampled_from(["file", "dns"]),
    ),
    max_size=60,
)


@given(STEPS)
def test_member_stays_until_no_source_names_it_and_its_requests_have_ended(steps):
    load_tracker = LoadTracker("auto")
    left: list[Server] = []

    def on_left(server: Server) -> None:
        left.append(server)
        load_tracker.remove(server)

    fleet = Fleet(watch=Watch(on_left=on_left))
    named: dict[str, set[str]] = {}
    assignments: dict[Server, list[Assignment]] = {}
    max_members = 0
    for step, url, source in steps:
        server = fleet.find(Kind.DECODE, url)
        match step:
            case "join":
                named.setdefault(url, set()).add(source)
                fleet.polled(fleet.join(Kind.DECODE, url, source), READY_REPORT, 0.0)
            case "leave" if server is not None:
                named[url].discard(source)
                fleet.leave(server, source)
            case "begin" if server is not None and server.accepts:
                fleet.add_in_flight(server, 1)
                assignment = load_tracker.start(
                    server, PROFILE, computes=True, generates=True
                )
                assignments.setdefault(server, []).append(assignment)
            case "end" if server is not None and assignments.get(server):
                load_tracker.end(assignments[server].pop())
                fleet.add_in_flight(server, -1)
        members = fleet.by_kind[Kind.DECODE]
        max_members = max(max_members, len(members))
        busy = {server.url for server, legs in assignments.items() if legs}
        named_urls = {each for each in named if named[each]}
        assert {each.url for each in members} == named_urls | busy
        assert {each.url for each in fleet.ready(Kind.DECODE)} == named_urls
        assert len({each.index for each in members}) == len(members)
        assert all(each.index < max_members for each in members)
        assert not set(left) & set(members) & set(load_tracker.loads)
        loads = load_tracker.loads.values()
        assert all(load.index < max_members for load in loads)


def test_new_member_gets_the_smallest_free_index():
    fleet = Fleet({Kind.DECODE: "abc"})
    fleet.name_members("listed", {Kind.DECODE: "ac"})
    assert [each.name for each in fleet.servers] == ["decode-0", "decode-2"]
    assert str(fleet.join(Kind.DECODE, "d", "file")) == "decode-1 d"
    for server in fleet.servers:
        fleet.polled(server, READY_REPORT, 0.0)
    turns = [fleet.choose(Kind.DECODE) for _ in range(4)]
    assert [each and each.url for each in turns] == ["a", "d", "c", "a"]


@pytest.mark.parametrize("kind", Kind)
def test_server_of_role_both_is_a_member_of_both_kinds(kind):
    fleet = Fleet({kind: "a"})
    both = HealthReport(True, is_both=True)
    (server,) = fleet.servers

    def members() -> list[tuple[Kind, str]]:
        return [(each.kind, each.url) for each in fleet.servers]

    def poll(report: HealthReport) -> None:
        for each in list(fleet.servers):
            fleet.polled(each, report, 0.0)

    for _ in range(2):
        poll(both)
        poll(both)
        assert members() == [(each, "a") for each in Kind]
        assert all(len(fleet.ready(each)) == 1 for each in Kind)
        poll(HealthReport(False, "busy"))
        # A busy server may be ready again soon, so it stays a member of both kinds.
        assert members() == [(each, "a") for each in Kind]
        poll(READY_REPORT)  # it was restarted with one role
        assert members() == [(kind, "a")]
    poll(both)
    fleet.leave(server, "listed")
    assert members() == []


def test_server_with_two_addresses_receives_requests_at_one_of_them():
    fleet = Fleet({Kind.DECODE: "aba"})
    first, second = fleet.servers
    assert list(map(str, fleet.servers)) == ["decode-0 a", "decode-1 b"]
    channel = SideChannel("engine", "start", "host", 1)
    report = HealthReport(True, side_channel=channel)
    for server in (first, second, first, second):
        fleet.polled(server, report, 0.0)
        assert fleet.ready(Kind.DECODE) == [first]
    assert second.health.reason == "it is decode-0, at another address"
    fleet.leave(first, "listed")
    fleet.polled(second, report, 0.0)
    assert fleet.ready(Kind.DECODE) == [second]


def test_silent_server_is_polled_less_often():
    health = Health()
    pauses: list[float] = []
    for _ in range(LONG_SILENCE + 6):
        health = silent(health, "no answer")
        pauses.append(pause_s(health, 2.0))
    assert pauses[:LONG_SILENCE] == [2.0] * LONG_SILENCE
    assert pauses == sorted(pauses) and pauses[-1] == 2.0 * MAX_PAUSE
    refused = HealthReport(False, "refused", answered=False)
    assert pause_s(polled(health, refused, 1.0), 1.0) == MAX_PAUSE
    starting = HealthReport(False, "it starts")
    assert pause_s(polled(health, starting, 1.0), 2.0) == 2.0


def test_each_change_of_a_circuit_is_reported():
    now = 0.0
    states: list[str] = []
    watch = Watch(on_circuit=lambda server: states.append(server.circuit))
    fleet = Fleet({Kind.DECODE: "a"}, watch, clock=lambda: now)
    (server,) = fleet.servers
    for _ in range(6):
        fleet.failed(server)
    now = 5.0
    fleet.polled(server, READY_REPORT, 5.0)
    fleet.succeeded(server)
    assert states == ["open", "half_open", "closed"]


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xyz*-")), max_size=30)
)
def test_pool_has_the_servers_that_serve_its_model_now(steps):
    fleet = Fleet({Kind.DECODE: "abc"})
    # Maps a server's URL to the model that it last reported.
    serves: dict[str, str] = {}
    for url, model in steps:
        server = fleet.find(Kind.DECODE, url)
        assert server is not None
        fleet.drain(server, model == "-")
        if model not in "*-":
            serves[url] = model
        report = HealthReport(model != "*", models=tuple(serves.get(url, "")))
        fleet.polled(server, report, 0.0)
        for name in "xyzu":
            expected = {each for each in "abc" if serves.get(each, name) == name}
            try:
                pool = fleet.pool(name)
            except ModelNotFound:
                assert not expected
                continue
            servers = pool.by_kind[Kind.DECODE]
            if serves:
                assert {each.url for each in servers} == expected
            assert pool.ready(Kind.DECODE) == [each for each in servers if each.accepts]


def test_unknown_model_names_share_one_pool():
    fleet = Fleet({Kind.DECODE: "ab"})
    fleet.polled(fleet.servers[0], HealthReport(True, models=("m",)), 0.0)
    assert len({id(fleet.pool(f"made up {number}")) for number in range(9)}) == 1
