"""Placement of sessions whose KV is in the KV store of a host.

Servers a1 and a2 use the store of host A. Servers b1 and b2 use the store of host B.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from protocol.messages import HostTierReport
from protocol.metrics import ENGINE_TOTALS
from proxy.membership import Kind
from proxy.placement.host_tiers import StoreLender
from proxy.placement.load_tracker import LoadTracker
from proxy.placement.request_profile import RequestProfile, profile_prompt
from proxy.placement.speed import StepTotals
from proxy.poller import _parse_ready
from tests.proxy.fakes import Fake, Rig, decodes, prefills, until

SERVERS = ("b1", "a1", "b2", "a2")
PREFILL = {"computes": True, "generates": False}
DECODE_ONLY = {"computes": True, "generates": True}
GPU_TOKENS = 12_000
STORE_TOKENS = 60_000
SESSION_BYTES = 40_000  # 10,000 tokens, so a GPU holds one session and a store six


def store(name: str, **changes: Any) -> HostTierReport:
    """Return a server's report about the store that it uses."""
    report = HostTierReport(
        store=name, num_tokens=STORE_TOKENS, start_s=0.005, token_s=1e-6
    )
    return msgspec.structs.replace(report, **changes)


def session(name: str, num_bytes: int = SESSION_BYTES) -> RequestProfile:
    return profile_prompt(b"", (name.encode() * num_bytes)[:num_bytes], 9)


def report(tracker: LoadTracker, server: str, tier: HostTierReport | None) -> None:
    tracker.on_report(server, GPU_TOKENS, StepTotals(), None, tier)


@pytest.fixture
def tracker() -> LoadTracker:
    tracker = LoadTracker("auto", "auto", clock=lambda: 1.0)
    for server in SERVERS:
        report(tracker, server, store(f"store-{server[0]}"))
    return tracker


def compute(tracker: LoadTracker, server: str, profile: RequestProfile) -> None:
    leg = tracker.start(server, profile, **PREFILL)
    tracker.on_answer(leg)
    tracker.end(leg)


def evict(tracker: LoadTracker, *servers: str) -> None:
    """Fill the GPU caches of servers with other sessions."""
    for server in servers:
        compute(tracker, server, session(f"other of {server}", 4 * GPU_TOKENS))


def choose(
    tracker: LoadTracker, profile: RequestProfile, servers: Sequence[str] = SERVERS
) -> str:
    """Return the chosen server for a prompt. It must be the same for a prefill leg and
    for a decode-only request.
    """
    chosen = {
        tracker.choose_server(servers, profile, **leg) for leg in (PREFILL, DECODE_ONLY)
    }
    assert len(chosen) == 1
    return chosen.pop()


def test_evicted_session_goes_to_a_server_of_its_host(tracker):
    compute(tracker, "a1", session("x"))
    assert choose(tracker, session("x")) == "a1"  # a1's GPU has it in its cache
    evict(tracker, "a1")
    assert choose(tracker, session("x")) in ("a1", "a2")
    assert choose(tracker, session("x"), ("b1", "b2", "a2")) == "a2"
    assert choose(tracker, session("y")) == "b1"  # the first of equal servers


def test_servers_of_other_hosts_pull_from_a_store_that_they_reach(tracker):
    tracker.pulls = True
    compute(tracker, "a1", session("x"))
    evict(tracker, "a1")
    assert tracker.lenders("b1", session("x")) == []
    at_a = store("store-a", host="10.0.0.1", port=7, incarnation="i")
    for server in ("a1", "a2"):
        report(tracker, server, at_a)
    ((lender, num_tokens),) = tracker.lenders("b1", session("x"))
    assert lender == StoreLender(at_a, ("a1", "a2"))
    assert num_tokens >= 0.9 * SESSION_BYTES / 4
    assert tracker.lenders("a2", session("x")) == [], "it pulls from its own store"
    assert tracker.lenders("b1", session("y")) == []
    compute(tracker, "b2", session("x"))
    evict(tracker, "b2")
    assert tracker.lenders("b1", session("x")) == [], "its own store has as much"


def test_session_in_the_gpu_goes_to_its_server_and_not_to_another_of_the_host(tracker):
    compute(tracker, "a1", session("x"))
    assert choose(tracker, session("x"), ("a2", "a1")) == "a1"


def test_much_more_loaded_server_of_the_host_loses(tracker):
    compute(tracker, "a1", session("x"))
    evict(tracker, "a1")
    for server in ("a1", "a2"):
        tracker.start(server, session("long", 4_000_000), **PREFILL)
    assert choose(tracker, session("x")) == "b1"


def test_session_is_computed_elsewhere_if_its_store_is_slow(tracker):
    """Computing takes 25 us per token (INITIAL_TOKEN_S)."""
    compute(tracker, "a1", session("x"))
    evict(tracker, "a1")
    for server in ("a1", "a2"):
        report(tracker, server, store("store-a", token_s=26e-6))
    assert choose(tracker, session("x")) == "b1"
    report(tracker, "a2", store("store-a", token_s=20e-6))
    assert choose(tracker, session("x")) == "a2"


def test_restarted_server_still_gets_the_sessions_of_its_host(tracker):
    compute(tracker, "a1", session("x"))
    tracker.forget_cache("a1")
    assert choose(tracker, session("x"), ("b1", "a1")) == "a1"
    # A restarted server's first reports name no store, because the server has not
    # opened its region yet.
    for server in ("a1", "a2"):
        report(tracker, server, None)
    assert choose(tracker, session("x")) == "b1"
    report(tracker, "a1", store("store-a"))
    assert choose(tracker, session("x"), ("b1", "a1")) == "a1"


def test_restarted_store_has_nothing(tracker):
    compute(tracker, "a1", session("x"))
    evict(tracker, "a1")
    for server in ("a1", "a2"):
        report(tracker, server, store("store-a after its restart"))
    assert choose(tracker, session("x")) == "b1"
    compute(tracker, "a2", session("x"))
    evict(tracker, "a2")
    assert choose(tracker, session("x"), ("b1", "a1")) == "a1"


def test_sessions_beyond_the_capacity_of_a_store_are_forgotten(tracker):
    """The two servers of a store share its capacity."""
    names = "pqrstuvw"
    for index, name in enumerate(names):
        compute(tracker, f"a{index % 2 + 1}", session(name))
    evict(tracker, "a1", "a2")
    on_host = [choose(tracker, session(name))[0] for name in names]
    assert on_host == ["b"] * 4 + ["a"] * 4  # the store also has two of `evict`


def test_prompt_without_an_answer_is_not_in_the_store(tracker):
    leg = tracker.start("a1", session("x"), **PREFILL)
    tracker.end(leg)
    assert choose(tracker, session("x")) == "b1"


def test_prompt_that_is_pulled_from_the_store_occupies_its_server_for_less_time(
    tracker,
):
    tracker.start("b2", session("x"), **PREFILL)
    compute(tracker, "a1", session("x"))
    tracker.start("a2", session("x"), **PREFILL)
    assert tracker.wait_s("a2") == pytest.approx(0.005 + 9_984 * 1e-6 + 16 * 25e-6)
    assert tracker.wait_s("b2") == pytest.approx(0.25)


def test_stores_of_servers_that_have_left_are_forgotten(tracker):
    compute(tracker, "a1", session("x"))
    assert len(tracker._host_tiers) == SESSION_BYTES // 512
    for number in range(100):
        tracker.remove("a1")
        tracker.remove("a2")
        report(tracker, "a1", store(f"store {number}"))
        compute(tracker, "a1", session("x"))
    assert len(tracker._host_tiers) <= 2 * (SESSION_BYTES // 512)
    assert len(tracker._host_tiers._stores) == 2  # of a1, and of host B


@pytest.mark.parametrize(
    "tier",
    [
        None,
        7,
        {"store": "s"},
        {"store": "s", "num_tokens": 0, "start_s": 0.1, "token_s": 0.1},
        {"store": "", "num_tokens": 9, "start_s": 0.1, "token_s": 0.1},
        {"store": "s", "num_tokens": 9, "start_s": -0.1, "token_s": 0.1},
        {"store": "s", "num_tokens": 9, "start_s": 0.1, "token_s": "0.1"},
    ],
)
def test_reports_without_a_usable_store_are_accepted(tier):
    body = msgspec.json.encode({"max_num_seqs": 8, "host_tier": tier})
    health = _parse_ready(Kind.DECODE, 200, body)
    assert health.ready and health.host_tier is None


async def test_proxy_sends_a_session_to_the_host_that_its_server_reported():
    """Both prefill servers of host A are restarted, so only the store of host A has the
    session.
    """
    totals = dict.fromkeys(ENGINE_TOTALS, 0)
    fakes = [
        Fake(prefills, details={**totals, "host_tier": msgspec.to_builtins(tier)})
        for tier in (store("store-b"), store("store-a"), store("store-a"))
    ]
    prompt = "some words that many have in common " * 400
    async with Rig(fakes, [Fake(decodes)]) as rig:
        loads = rig.app.load_tracker.loads
        servers = rig.app.fleet.servers[:3]
        await until(lambda: all(loads[server].host_tier for server in servers))
        on_b, *on_a = fakes
        on_b.ready = False
        await until(lambda: not rig.is_ready(0))
        await rig.complete(prompt=prompt)
        on_b.ready = True
        for fake in on_a:
            fake.ready = False
        await until(
            lambda: rig.is_ready(0) and not (rig.is_ready(1) or rig.is_ready(2))
        )
        for fake in on_a:
            fake.ready = True
        await until(lambda: rig.is_ready(1) and rig.is_ready(2))
        for turn in range(3):
            await rig.complete(prompt=prompt + f"turn {turn}")
        assert [len(fake.calls) for fake in on_a] in ([4, 0], [0, 4], [1, 3], [3, 1])
        assert not on_b.calls
