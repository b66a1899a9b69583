"""The routing simulator serves every request with every policy, and prefix affinity
saves computation.
"""

import json
import random
import statistics
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import routing
from benchmarks.bench.traces import BLOCK_TOKENS
from benchmarks.loads import MIXES, Request, Workload
from benchmarks.routers import ProxyRouter
from benchmarks.simulation.engine import Engine
from benchmarks.simulation.fleet import Fleet
from benchmarks.simulation.times import EngineTimes
from proxy.placement.request_profile import RequestProfile
from proxy.placement.speed import StepTotals


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A trace with sessions that share prefixes, and more load than two prefill servers
    can take.
    """
    rng = random.Random(1)
    lines = []
    for turn in range(240):
        session = rng.randrange(12)
        blocks = [session * 1000 + i for i in range(10 + turn // 40)]
        row = {
            "timestamp": turn * 60,
            "input_length": len(blocks) * 512 + 100,
            "output_length": 40,
            "hash_ids": [*blocks, 100_000 + turn],
        }
        lines.append(json.dumps(row))
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines))
    return path


def test_every_policy_serves_the_trace_and_prefix_affinity_pays(trace, capsys):
    assert routing.main(["--trace", str(trace), "--load", "6.0"]) == 0
    output = capsys.readouterr().out
    rows = {row["policy"]: row for row in json.loads(output.splitlines()[-1])}
    assert rows.keys() == routing.POLICIES.keys()
    assert rows["always"]["computed"] < 0.6 * rows["round_robin"]["computed"]
    assert rows["auto"]["ttft_p50_s"] < 0.5 * rows["round_robin"]["ttft_p50_s"]
    assert rows["auto"]["good"] >= 0.95 * rows["known"]["good"]
    assert rows["never"]["alone"] == 1.0
    assert rows["always"]["alone"] == 0.0


def test_ideal_router_knows_the_requests_of_the_same_moment(tmp_path, capsys):
    """Two prefill servers compute eight prompts of one length that arrive together."""
    row = {"timestamp": 0, "input_length": 4096, "output_length": 4}
    rows = [{**row, "hash_ids": [8 * n + i for i in range(8)]} for n in range(8)]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    argv = ["--trace", str(path), "--shapes", "2P2D", "--policies", "known,round_robin"]
    assert routing.main(argv) == 0
    output = capsys.readouterr().out
    ideal, round_robin = json.loads(output.splitlines()[-1])
    assert ideal["ttft_p99_s"] <= round_robin["ttft_p99_s"]


def test_placement_finds_evicted_prefixes_in_the_stores_of_hosts(trace, capsys):
    """The servers' caches hold two of the twelve sessions."""
    computed = {}
    for policy, store_tokens in (
        ("never", 0),
        ("never", 10**6),
        ("round_robin", 10**6),
    ):
        argv = ["--trace", str(trace), "--shapes", "4D", "--policies", policy]
        argv += ["--hosts", "2", "--store-tokens", str(store_tokens)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(routing, "EngineTimes", lambda: EngineTimes(capacity=30_000))
            assert routing.main(argv) == 0
        (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])
        computed[policy, store_tokens] = row["computed"]
    assert computed["never", 10**6] < 0.5 * computed["never", 0]
    assert computed["never", 10**6] < computed["round_robin", 10**6]


class UnevenEngine(Engine):
    """An engine on a busy machine: a step takes between about half and twice its usual
    time.
    """

    rng = random.Random(1)

    def step(self, now: float) -> tuple[float, list[Request]]:
        end, computed = super().step(now)
        return now + (end - now) * self.rng.lognormvariate(0, 0.7), computed


@pytest.mark.parametrize("pulls", [False, True])
@pytest.mark.parametrize("num_prefills", [2, 0])
def test_slow_and_uneven_servers_of_a_role_compute_a_shared_prefix_once(
    num_prefills, pulls
):
    """Four prefixes of 512 tokens have 24 prompts each, which add 48 tokens.

    Eight prompts arrive at once. Servers are eight times slower than first estimated.
    An idle prefill server may compute a prefix that only a decode server has.
    """
    numbers_of_copies = []
    for seed in range(6):
        rng = random.Random(seed)
        token_s = 2e-4
        times = EngineTimes(
            token_s=token_s,
            step_s=50 * token_s,
            min_prompt_step_s=50 * token_s,
            handoff_s=0.02,
        )
        engines = [UnevenEngine(i, i < num_prefills, times, 0.5) for i in range(4)]
        fleet = Fleet(engines, times, lambda request, now: None)
        fleet.router = ProxyRouter(fleet, "auto", "auto", 0.5, pulls)
        unshared = [Request(0.1 * i, 560, 16, (100 + i,)) for i in range(48)]
        arrivals_s = [20 + n // 8 * 0.32 + rng.random() * 0.002 for n in range(96)]
        shared = [Request(arrivals_s[n], 560, 16, (n % 4,)) for n in range(96)]
        fleet.run([*unshared, *shared])
        prefixes = [
            (request.hashes, request.on_decode_server)
            for request in shared
            if request.computed_tokens > 48
        ]
        numbers_of_copies.append(len(prefixes) - len(set(prefixes)))
    assert statistics.mean(numbers_of_copies) <= 0.25
    assert max(numbers_of_copies) <= 1


class FixedShareRouter(ProxyRouter):
    """A router that sends a fixed share of the prompts to the decode server alone."""

    share = 0.0
    accumulated = 0.0

    def place_prompt(self, request: Request) -> Engine:
        profile = RequestProfile(
            request.prompt_tokens, request.hashes, BLOCK_TOKENS, request.output_tokens
        )
        self.accumulated += self.share
        on_decode_server = self.accumulated >= 1.0
        self.accumulated %= 1.0
        return self.begin_legs(request, profile, on_decode_server)


def run_fleet(
    num_prefills: int, num_decodes: int, router: type[ProxyRouter], workload: Workload
) -> Fleet:
    times = EngineTimes()
    engines = [
        Engine(index, index < num_prefills, times, 0.025)
        for index in range(num_prefills + num_decodes)
    ]
    requests, follow_up = workload
    fleet = Fleet(engines, times, follow_up)
    fleet.router = router(fleet, "auto", "auto")
    fleet.run(requests)
    return fleet


def burst_s(fleet: Fleet) -> float:
    """Returns the seconds from the start of the burst to the end of all requests."""
    return fleet.now - max(request.arrival_s for request in fleet.requests)


def test_burst_is_split_almost_as_well_as_possible():
    """One prefill and one decode server share the prompts of a burst.

    The estimated speeds of the servers are the initial estimates, or the estimates
    after 20 s of short and long prompts.
    """
    fixed_shares_s = []
    for share in (0.2, 0.25, 0.3):
        router = type("Router", (FixedShareRouter,), {"share": share})
        fleet = run_fleet(1, 1, router, MIXES["burst"](1.0, 256))
        fixed_shares_s.append(burst_s(fleet))
    best_s = min(fixed_shares_s)
    two_decodes_s = burst_s(run_fleet(0, 2, ProxyRouter, MIXES["burst"](1.0, 256)))
    for lengths in ([], [8], [16, 128], [2048, 128], [8192, 30]):
        earlier = [
            Request(index * 0.1, length, 64, ())
            for index in range(200)
            for length in lengths
        ]
        burst = [Request(30.0, 1024, 256, ()) for _ in range(256)]
        workload: Workload = ([*earlier, *burst], lambda request, now: None)
        burst_time_s = burst_s(run_fleet(1, 1, ProxyRouter, workload))
        # From short prompts alone, the speed of long ones cannot be estimated well.
        slack = 0.04 if lengths == [16, 128] else 0.0
        assert burst_time_s <= (1.05 + slack) * best_s, lengths
        # The pair is slower than two decode servers. Its prefill server is idle for a
        # part of the burst, whatever the split of the prompts.
        assert burst_time_s <= (1.25 + slack) * two_decodes_s, lengths


def test_streams_are_undisturbed_while_the_prefill_server_can_take_the_prompts():
    fleet = run_fleet(1, 1, ProxyRouter, MIXES["documents"](1.0, 0))
    gaps = fleet.decodes[0].gaps
    long_gap = 100  # 10 ms, in units of 0.1 ms
    num_long_gaps = sum(count for gap, count in gaps.items() if gap > long_gap)
    assert num_long_gaps < 0.005 * gaps.total()
    long_prompts = [each for each in fleet.requests if each.prompt_tokens == 8192]
    assert not any(request.on_decode_server for request in long_prompts)


@given(st.integers(0, 2**32))
@settings(max_examples=4, deadline=None)
def test_wrong_load_estimates_lose_no_request(seed):
    rng = random.Random(seed)
    times = EngineTimes()
    requests, follow_up = MIXES["agents"](4.0, 48)
    engines = [Engine(index, index < 2, times, 0.025) for index in range(4)]
    fleet = Fleet(engines, times, follow_up)

    class MisledRouter(ProxyRouter):
        def place_prompt(self, request: Request) -> Engine:
            engine = rng.choice(engines)
            wrong_totals = StepTotals(*(rng.random() * 10**6 for _ in range(7)))
            self.tracker.on_report(engine, rng.randrange(1, 10**6), wrong_totals)
            if rng.random() < 0.3:
                self.tracker.forget_cache(engine)
            return super().place_prompt(request)

    fleet.router = MisledRouter(fleet, "auto", "auto")
    fleet.run(requests)
    assert len(fleet.requests) == 48
    for request in fleet.requests:
        assert request.generated_tokens == request.output_tokens
        assert 1 <= request.computed_tokens <= request.prompt_tokens
