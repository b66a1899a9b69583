"""The simulator: every policy serves every request, and knowing what is cached pays."""

import json
import random
import statistics
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import routing
from benchmarks.loads import MIXES, Loaded, Request
from proxy.knowledge import Totals
from proxy.placement import Ask


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Sessions whose turns share their beginning, faster than two prefill servers can compute."""
    rng, lines = random.Random(1), []
    for turn in range(240):
        session = rng.randrange(12)
        blocks = [session * 1000 + i for i in range(10 + turn // 40)]
        lines.append({"timestamp": turn * 60, "input_length": len(blocks) * 512 + 100,
                      "output_length": 40, "hash_ids": [*blocks, 100_000 + turn]})  # fmt: skip
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_every_request_is_served_and_knowing_what_is_cached_pays(trace, capsys):
    assert routing.main(["--trace", str(trace), "--load", "6.0"]) == 0
    rows = {
        row["policy"]: row
        for row in json.loads(capsys.readouterr().out.splitlines()[-1])
    }
    assert rows.keys() == routing.POLICIES.keys()
    assert rows["always"]["computed"] < 0.6 * rows["round_robin"]["computed"]
    assert rows["auto"]["ttft_p50_s"] < 0.5 * rows["round_robin"]["ttft_p50_s"]
    assert rows["auto"]["good"] >= 0.95 * rows["known"]["good"]
    assert rows["never"]["alone"] == 1.0 and rows["always"]["alone"] == 0.0


class Uneven(routing.Engine):
    """One whose machine has other things to do: any step may take twice as long, or half."""

    rng = random.Random(1)

    def step(self, now: float) -> tuple[float, list[Request]]:
        before = self.totals.seconds
        end, computed = super().step(now)
        took = (end - now) * self.rng.lognormvariate(0, 0.7)
        self.totals = self.totals._replace(seconds=before + took)
        return now + took, computed


@pytest.mark.parametrize("pulls", [False, True])
@pytest.mark.parametrize("num_prefills", [2, 0])
def test_what_prompts_share_is_computed_once_by_slow_and_uneven_servers(
    num_prefills, pulls
):
    """Four beginnings of 512 tokens, each with 24 prompts of 48 more: eight come at once."""
    shares = []
    for seed in range(6):
        rng, token_s = (
            random.Random(seed),
            2e-4,
        )  # eight times what is believed at first
        times = routing.Times(
            token=token_s, step=50 * token_s, prompts=50 * token_s, handoff=0.02
        )
        engines = [Uneven(i, i < num_prefills, times, 0.5) for i in range(4)]
        fleet = routing.Fleet(engines, times, lambda request, now: None)
        fleet.router = routing.Knowing(fleet, "auto", "auto", 0.5, pulls)
        before = [Request(0.1 * i, 560, 16, (100 + i,)) for i in range(48)]
        at = [20 + n // 8 * 0.32 + rng.random() * 0.002 for n in range(96)]
        fleet.run([*before, *(Request(at[n], 560, 16, (n % 4,)) for n in range(96))])
        computed = sum(each.computed for each in fleet.requests) - 48 * 560
        shares.append(computed / (4 * (512 + 24 * 48)))
    assert statistics.mean(shares) <= 1.02 and max(shares) <= 1.1


class Split(routing.Knowing):
    """A fixed share of the prompts goes to the decode server alone."""

    share, turns = 0.0, 0.0

    def computes(self, request: Request) -> routing.Engine:
        ask = Ask(request.tokens, request.hashes, routing.BLOCK, request.answer)
        self.turns += self.share
        alone, self.turns = self.turns >= 1.0, self.turns % 1.0
        return self._take_both(request, ask, alone)


def served(
    shape: tuple[int, int], router: type[routing.Knowing], load: Loaded
) -> routing.Fleet:
    num, times = sum(shape), routing.Times()
    engines = [routing.Engine(i, i < shape[0], times, 0.025) for i in range(num)]
    fleet = routing.Fleet(engines, times, load[1])
    fleet.router = router(fleet, "auto", "auto")
    fleet.run(load[0])
    return fleet


def took_s(fleet: routing.Fleet) -> float:
    """From the burst's beginning to the end."""
    return fleet.now - max(each.arrival for each in fleet.requests)


def test_prompts_that_come_at_once_are_split_about_as_well_as_can_be():
    """Speeds are as believed at first, or as short prompts of a minute and long ones taught."""
    splits = [type("", (Split,), {"share": share}) for share in (0.2, 0.25, 0.3)]
    best = min(
        took_s(served((1, 1), split, MIXES["burst"](1.0, 256))) for split in splits
    )
    both = took_s(served((0, 2), routing.Knowing, MIXES["burst"](1.0, 256)))
    burst = [Request(30.0, 1024, 256, ()) for _ in range(256)]
    for lengths in ([], [8], [16, 128], [2048, 128], [8192, 30]):
        known = [Request(i * 0.1, n, 64, ()) for i in range(200) for n in lengths]
        alone = served(
            (1, 1), routing.Knowing, ([*known, *burst], lambda request, now: None)
        )
        assert took_s(alone) <= min(1.05 * best, 1.1 * both), lengths


def test_streams_are_left_alone_while_the_prefill_server_bears_the_prompts():
    fleet = served((1, 1), routing.Knowing, MIXES["documents"](1.0, 0))
    gaps, late = fleet.decodes[0].gaps, 100  # of 0.1 ms
    assert sum(n for gap, n in gaps.items() if gap > late) < 0.005 * gaps.total()
    assert not any(each.alone for each in fleet.requests if each.tokens == 8192)


@given(st.integers(0, 2**32))
@settings(max_examples=4, deadline=None)
def test_stale_or_wrong_knowledge_only_costs_time(seed):
    rng, times = random.Random(seed), routing.Times()
    requests, then = MIXES["agents"](4.0, 48)
    engines = [routing.Engine(index, index < 2, times, 0.025) for index in range(4)]
    fleet = routing.Fleet(engines, times, then)

    class Misled(routing.Knowing):
        def computes(self, request: Request) -> routing.Engine:
            engine, wrong = (
                rng.choice(engines),
                [rng.random() * 10**6 for _ in range(7)],
            )
            self.knowledge.told(engine, rng.randrange(1, 10**6), Totals(*wrong))
            if rng.random() < 0.3:
                self.knowledge.forget(engine)
            return super().computes(request)

    fleet.router = Misled(fleet, "auto", "auto")
    fleet.run(requests)
    assert len(fleet.requests) == 48 and all(
        each.done == each.answer for each in fleet.requests
    )
    assert all(1 <= each.computed <= each.tokens for each in fleet.requests)
