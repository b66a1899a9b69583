"""The fleet's bookkeeping."""

from proxy.health import Health, HealthPolicy
from proxy.membership import Fleet, Server
from proxy.retry import Kind

P1, P2 = Server(Kind.PREFILL, "http://p1"), Server(Kind.PREFILL, "http://p2")
D1 = Server(Kind.DECODE, "http://d1")


def ready_fleet(*servers: Server, **options: object) -> Fleet:
    fleet = Fleet(clock=lambda: 0.0, **options)  # type: ignore[arg-type]
    for server in servers:
        fleet.join(server)
        fleet.polled(server, ready=True, reason="", started_at=0.0)
    return fleet


def test_kinds_do_not_mix() -> None:
    fleet = ready_fleet(P1, P2, D1)
    assert [fleet.choose(Kind.PREFILL) for _ in range(3)] == [P1, P2, P1]
    assert fleet.choose(Kind.DECODE) == D1
    assert (fleet.num_ready(Kind.PREFILL), fleet.num_ready(Kind.DECODE)) == (2, 1)


def test_servers_tried_before_are_left_out() -> None:
    fleet = ready_fleet(P1, P2)
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
    fleet = Fleet(policy=HealthPolicy(failures=1, cooldown_s=5.0), clock=lambda: now)
    for server in (P1, P2):
        fleet.join(server)
        fleet.polled(server, ready=True, reason="", started_at=0.0)
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
    fleet.polled(P1, ready=True, reason="", started_at=0.0)
    assert fleet.servers() == []
    assert fleet.health(P1) == Health(reason="left")
    fleet.join(P2)
    assert fleet.choose(Kind.PREFILL) is None
    fleet.polled(P2, ready=True, reason="", started_at=0.0)
    assert fleet.choose(Kind.PREFILL) == P2
