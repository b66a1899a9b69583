"""The bootstrap and the verdicts of `baton bench compare`, for known results."""

import random
from typing import Any

import numpy as np
import pytest

from benchmarks.bench.endpoint import Timeline
from benchmarks.bench.generator import RequestRecord, Side, SideResult
from benchmarks.bench.results.statistics import block_length, bootstrap_mean
from benchmarks.bench.results.verdict import Verdict, compare
from benchmarks.bench.slo import Slo, parse_slo

SLO = Slo(ttft=0.5)


def test_interval_of_independent_values_is_that_of_the_normal_distribution():
    rng = np.random.default_rng(1)
    values = rng.normal(3.0, 2.0, 900)
    interval = bootstrap_mean(values.tolist())
    assert interval.mean == pytest.approx(values.mean())
    half_width = 1.96 * values.std() / 30
    assert interval.high - interval.mean == pytest.approx(half_width, rel=0.15)
    assert interval.mean - interval.low == pytest.approx(half_width, rel=0.15)


def test_interval_contains_the_true_mean_19_times_in_20():
    rng = np.random.default_rng(2)
    num_samples = 200
    num_hits = 0
    for seed in range(num_samples):
        interval = bootstrap_mean(rng.exponential(1.0, 100).tolist(), seed)
        num_hits += interval.low <= 1.0 <= interval.high
    assert 0.88 <= num_hits / num_samples <= 0.98


def test_interval_of_dependent_values_is_wider():
    """The results of neighbouring requests in a queue depend on each other. So they
    count as fewer independent values.
    """
    rng = np.random.default_rng(3)
    groups = np.repeat(rng.normal(0.0, 1.0, 100), 9)
    shuffled = rng.permutation(groups)
    dependent = bootstrap_mean(groups.tolist())
    independent = bootstrap_mean(shuffled.tolist())
    ratio = (dependent.high - dependent.low) / (independent.high - independent.low)
    assert ratio > 1.7
    assert block_length(900) == 15


def test_equal_values_have_an_interval_without_width():
    assert bootstrap_mean([2.0] * 10) == pytest.approx((2.0, 2.0, 2.0))
    with pytest.raises(ValueError):
        bootstrap_mean([])


def side(name: str, ttfts_s: list[float | None]) -> SideResult:
    """Returns a side with one request for each of these times to the first token.

    None stands for a request that failed.
    """
    records = []
    for index, ttft_s in enumerate(ttfts_s):
        timeline = Timeline(0.0, error="lost")
        if ttft_s is not None:
            timeline = Timeline(0.0, token_at=[ttft_s, ttft_s + 0.1], done=True)
            timeline.ended_at = ttft_s + 0.1
            timeline.output_tokens = 2
        records.append(RequestRecord(index, index, 0, "", timeline))
    return SideResult(Side(name, ()), "m", records, 1.0)


def verdict(a: list[Any], b: list[Any], metric: str = "ttft") -> Verdict:
    return compare(side("A", a), side("B", b), metric, SLO)


def test_pairing_detects_a_small_difference_under_large_variation():
    """Requests take from 0.1 to 10 s. On side A, they take 5 % longer on average."""
    rng = random.Random(1)
    b = [10 ** rng.uniform(-1, 1) for _ in range(100)]
    a = [1.05 * seconds * rng.uniform(0.97, 1.03) for seconds in b]
    result = verdict(a, b)
    assert result.winner == "B"
    assert result.sentence.startswith("B won: the time to first token of A is 1.04"), (
        result.sentence
    )
    assert verdict(b, a).winner == "A"


def test_no_difference_is_reported_as_such():
    rng = random.Random(3)
    a = [10 ** rng.uniform(-1, 1) for _ in range(100)]
    b = [10 ** rng.uniform(-1, 1) for _ in range(100)]
    result = verdict(a, b)
    assert result.winner is None
    assert result.sentence.startswith("No difference seen: ")
    assert verdict(a, a, "goodput").winner is None


def test_goodput_counts_failed_requests_as_bad():
    a = [0.1] * 50
    b = [0.1] * 30 + [None] * 10 + [0.9] * 10
    result = verdict(a, b, "goodput")
    assert result.winner == "A"
    assert result.difference is not None
    assert result.difference.mean == pytest.approx(0.4)
    assert "A served 100.0% of its requests within ttft=0.5, B 60.0%" in result.sentence


def test_request_that_one_side_never_got_counts_as_failed_there():
    b = side("B", [0.1] * 40)
    b.records = b.records[:20]
    result = compare(side("A", [0.1] * 40), b, "goodput", SLO)
    assert result.winner == "A"
    assert result.num_pairs == 40


def test_latencies_of_failed_requests_do_not_count():
    result = verdict([0.1] * 20, [0.2] * 15 + [None] * 5)
    assert result.num_pairs == 15
    assert "requests that failed do not count: 0 of A, 5 of B" in result.sentence


def test_few_pairs_give_no_verdict():
    result = verdict([0.1] * 5, [0.2] * 5)
    assert result.winner is None
    assert "a comparison needs 8; send more requests" in result.sentence


def test_slo_is_parsed():
    assert parse_slo("ttft=2, itl=0.025") == Slo(ttft=2.0, itl=0.025)
    assert str(parse_slo("e2e=3")) == "e2e=3"
    assert parse_slo("e2e=3").is_met(ttft_s=9.0, itl_s=9.0, e2e_s=3.0)
    assert not parse_slo("e2e=3").is_met(ttft_s=0.0, itl_s=0.0, e2e_s=3.1)
