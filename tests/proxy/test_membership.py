"""Servers that come and go: who is a member, what is kept of each, and what ends with it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ModelNotFound
from proxy.health import (
    LONG_SILENCE,
    MAX_PAUSE,
    Health,
    Said,
    SideChannel,
    pause_s,
    polled,
    silent,
)
from proxy.knowledge import Knowledge
from proxy.legs.request_profile import ask_of
from proxy.membership import Fleet, Kind, Server, Watch

YES = Said(True)
ASK = ask_of(b"", b"x" * 4096, 1)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["join", "leave", "begin", "end"]),
        st.sampled_from("abcdef"),
        st.sampled_from(["file", "dns"]),
    ),
    max_size=60,
)


@given(STEPS)
def test_a_member_stays_until_nobody_names_it_and_it_has_nothing_to_do(steps):
    knowledge, left = Knowledge("auto"), list[Server]()

    def on_left(server: Server) -> None:
        left.append(server)
        knowledge.left(server)

    fleet = Fleet(watch=Watch(on_left=on_left))
    named: dict[str, set[str]] = {}
    works: dict[Server, list[object]] = {}
    most = 0
    for step, url, source in steps:
        server = fleet.find(Kind.DECODE, url)
        match step:
            case "join":
                named.setdefault(url, set()).add(source)
                fleet.polled(fleet.join(Kind.DECODE, url, source), YES, 0.0)
            case "leave" if server is not None:
                named[url].discard(source)
                fleet.leave(server, source)
            case "begin" if server is not None and server.accepts:
                fleet.works(server, 1)
                begun = knowledge.begin(server, ASK, computes=True, generates=True)
                works.setdefault(server, []).append(begun)
            case "end" if server is not None and works.get(server):
                knowledge.ended(works[server].pop())  # type: ignore[arg-type]
                fleet.works(server, -1)
        members = fleet.of[Kind.DECODE]
        most = max(most, len(members))
        busy = {server.url for server, some in works.items() if some}
        assert {each.url for each in members} == {u for u in named if named[u]} | busy
        assert {each.url for each in fleet.ready(Kind.DECODE)} == {
            u for u in named if named[u]
        }
        assert len({each.index for each in members}) == len(members)
        assert all(each.index < most for each in members)
        assert not set(left) & set(members) & set(knowledge.loads)
        assert all(load.index < most for load in knowledge.loads.values())


def test_who_comes_takes_the_place_that_another_left():
    fleet = Fleet({Kind.DECODE: "abc"})
    fleet.name_members("listed", {Kind.DECODE: "ac"})
    assert [each.name for each in fleet.servers] == ["decode-0", "decode-2"]
    assert str(fleet.join(Kind.DECODE, "d", "file")) == "decode-1 d"
    for server in fleet.servers:
        fleet.polled(server, YES, 0.0)
    turns = [fleet.choose(Kind.DECODE) for _ in range(4)]
    assert [each and each.url for each in turns] == ["a", "d", "c", "a"]


@pytest.mark.parametrize("kind", Kind)
def test_a_server_of_both_roles_is_a_member_of_both_kinds_as_long_as_it_is_one(kind):
    fleet, both = Fleet({kind: "a"}), Said(True, is_both=True)
    (server,) = fleet.servers

    def members() -> list[tuple[Kind, str]]:
        return [(each.kind, each.url) for each in fleet.servers]

    def says(said: Said) -> None:
        for each in list(fleet.servers):
            fleet.polled(each, said, 0.0)

    for _ in range(2):
        says(both)
        says(both)
        assert members() == [(each, "a") for each in Kind]
        assert all(len(fleet.ready(each)) == 1 for each in Kind)
        says(Said(False, "busy"))
        assert members() == [(each, "a") for each in Kind], "it may be back at once"
        says(YES)  # it was started anew, with one role
        assert members() == [(kind, "a")]
    says(both)
    fleet.leave(server, "listed")
    assert members() == []


def test_a_url_given_twice_is_one_server_and_one_of_two_addresses_is_given_requests_at_one():
    fleet = Fleet({Kind.DECODE: "aba"})
    first, second = fleet.servers
    assert list(map(str, fleet.servers)) == ["decode-0 a", "decode-1 b"]
    said = Said(True, side_channel=SideChannel("engine", "start", "host", 1))
    for server in (first, second, first, second):
        fleet.polled(server, said, 0.0)
        assert fleet.ready(Kind.DECODE) == [first]
    assert second.health.reason == "it is decode-0, by another address"
    fleet.leave(first, "listed")
    fleet.polled(second, said, 0.0)
    assert fleet.ready(Kind.DECODE) == [second]


def test_who_answers_nothing_for_a_while_is_asked_less_often():
    health, pauses = Health(), list[float]()
    for _ in range(LONG_SILENCE + 6):
        health = silent(health, "no answer")
        pauses.append(pause_s(health, 2.0))
    assert pauses[:LONG_SILENCE] == [2.0] * LONG_SILENCE
    assert pauses == sorted(pauses) and pauses[-1] == 2.0 * MAX_PAUSE
    assert (
        pause_s(polled(health, Said(False, "refused", answered=False), 1.0), 1.0)
        == MAX_PAUSE
    )
    assert pause_s(polled(health, Said(False, "it starts"), 1.0), 2.0) == 2.0


def test_a_circuit_is_told_when_it_changes():
    now, told = 0.0, list[str]()
    watch = Watch(on_circuit=lambda server: told.append(server.circuit))
    fleet = Fleet({Kind.DECODE: "a"}, watch, clock=lambda: now)
    (server,) = fleet.servers
    for _ in range(6):
        fleet.failed(server)
    now = 5.0
    fleet.polled(server, YES, 5.0)
    fleet.succeeded(server)
    assert told == ["open", "half_open", "closed"]


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xyz*-")), max_size=30)
)
def test_a_pool_is_of_those_that_serve_its_model_now(steps):
    fleet = Fleet({Kind.DECODE: "abc"})
    serves: dict[str, str] = {}  # by URL; none: not ready, or it has not told
    for url, model in steps:
        server = fleet.find(Kind.DECODE, url)
        assert server is not None
        fleet.drain(server, model == "-")
        if model not in "*-":
            serves[url] = model
        fleet.polled(server, Said(model != "*", models=tuple(serves.get(url, ""))), 0.0)
        for name in "xyzu":
            wanted = {u for u in "abc" if serves.get(u, name) == name}
            try:
                found = fleet.pool(name)
            except ModelNotFound:
                assert not wanted
                continue
            if serves:
                assert {each.url for each in found.of[Kind.DECODE]} == wanted
            assert found.ready(Kind.DECODE) == [
                s for s in found.of[Kind.DECODE] if s.accepts
            ]


def test_names_that_clients_make_up_are_not_kept():
    fleet = Fleet({Kind.DECODE: "ab"})
    fleet.polled(fleet.servers[0], Said(True, models=("m",)), 0.0)
    assert len({id(fleet.pool(f"made up {number}")) for number in range(9)}) == 1
