"""SpeculationPolicy on synthetic devices, whose steps have known durations.

A gain is the throughput with the policy, divided by the throughput without proposals.
"""

import random
from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.speculation.batch_times import MIN_PLAIN_STEPS
from engine.speculation.policy import (
    MAX_CREDIT_STEPS,
    MAX_LOSS,
    PROBE_INTERVAL,
    START_CREDIT_STEPS,
    AcceptanceRate,
    SpeculationPolicy,
)

MAX_PROPOSALS = 4
MIN_GAIN = 0.98  # the minimum that users are promised
NEAR_BEST = 0.9  # minimum share of the gain of the best fixed number of proposals
Device = Callable[[int], float]
GRAPH_SIZES = (1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 2048, 32))


def flat_to_64(num_rows: int) -> float:
    """The duration of a step that is memory-bound up to 64 rows."""
    return max(1.0, num_rows / 64)


def linear(num_rows: int) -> float:
    return 0.3 + 0.02 * num_rows


def graphs(num_rows: int) -> float:
    """The duration of a step that is padded to a captured size."""
    padded = GRAPH_SIZES[bisect_left(GRAPH_SIZES, num_rows)]
    return 2.3 + 0.03 * min(padded, 64) + 0.045 * max(0, padded - 64)


DEVICES = [flat_to_64, linear, graphs]


class Run(NamedTuple):
    """Attributes:
    gain: the throughput, relative to the throughput without proposals.
    proposals: average number of proposals of a stream in a step.
    """

    gain: float
    proposals: float


def simulate(
    device: Device,
    num_streams: int,
    acceptance: Callable[[int], float],
    num_steps: int,
    *,
    noise: float = 0.1,
    scale: Callable[[int], float] = lambda step: 1.0,
    synchronous_s: float = 0.0,
    policy: SpeculationPolicy | None = None,
    seed: int = 0,
) -> Run:
    """Decodes with a drafter that always proposes MAX_PROPOSALS tokens for a stream.

    Args:
        acceptance: the probability that a proposal is right, by step.
        noise: standard deviation of the measured durations, relative to the true ones.
        scale: factor of all durations, by step.
        synchronous_s: additional duration of steps with proposals, and of the step
            after each of them.
    """
    rng = np.random.default_rng(seed)
    policy = policy or SpeculationPolicy()
    rates = [AcceptanceRate() for _ in range(num_streams)]
    lengths = [MAX_PROPOSALS] * num_streams
    spent_s = 0.0
    plain_s = 0.0
    num_proposals = 0
    is_synchronous = False
    for step in range(num_steps):
        limits = policy.limits([rate.value for rate in rates], lengths, num_streams)
        accepted = [0] * num_streams
        if any(limits):
            draws = rng.geometric(max(1 - acceptance(step), 1e-9), num_streams) - 1
            accepted = np.minimum(draws, limits).tolist()
            for rate, limit, count in zip(rates, limits, accepted, strict=True):
                rate.record(limit, count)
        num_rows = num_streams + sum(limits)
        num_tokens = num_streams + sum(accepted)
        seconds = device(num_rows) * scale(step)
        if is_synchronous or any(limits):
            seconds += synchronous_s
        is_synchronous = any(limits)
        spent_s += seconds
        plain_s += device(num_streams) * scale(step) * num_tokens / num_streams
        num_proposals += sum(limits)
        measured_s = seconds * max(0.2, 1 + noise * rng.standard_normal())
        policy.record_step(num_streams, num_rows, num_tokens, measured_s)
    return Run(plain_s / spent_s, num_proposals / num_steps / num_streams)


def best_fixed_gain(device: Device, num_streams: int, acceptance: float) -> float:
    """The gain of the best number of proposals that is the same for all streams."""
    gains = []
    for count in range(MAX_PROPOSALS + 1):
        tokens = sum(acceptance**position for position in range(count + 1))
        gains.append(tokens / device(num_streams * (count + 1)))
    return max(gains) * device(num_streams)


def check_gain(
    device: Device, num_streams: int, acceptance: float, num_steps: int, seed: int = 0
) -> None:
    run = simulate(device, num_streams, lambda _: acceptance, num_steps, seed=seed)
    assert run.gain >= MIN_GAIN
    best = best_fixed_gain(device, num_streams, acceptance)
    if best >= 1.3:
        assert run.gain >= NEAR_BEST * best


@pytest.mark.parametrize("acceptance", [0.0, 0.6, 0.9])
@pytest.mark.parametrize("num_streams", [1, 8, 48, 256])
@pytest.mark.parametrize("device", DEVICES)
def test_policy_never_loses_and_is_near_the_best_where_speculation_pays(
    device, num_streams, acceptance
):
    check_gain(device, num_streams, acceptance, 1_000)


@pytest.mark.slow
@pytest.mark.parametrize("num_streams", [*range(1, 9), *range(12, 257, 12), 64, 65])
@pytest.mark.parametrize("device", DEVICES)
def test_policy_never_loses_at_any_batch_size(device, num_streams):
    for acceptance in np.linspace(0, 1, 9).tolist():
        check_gain(device, num_streams, acceptance, 1_500, seed=num_streams)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "scale",
    [
        lambda step: 1 + step / 1_000,
        lambda step: 2 - step / 1_000,
        lambda step: (1.0, 2.0, 0.7)[step // 350 % 3],
    ],
    ids=["contexts grow", "contexts shrink", "durations jump"],
)
def test_policy_does_not_lose_when_durations_change(device, scale):
    run = simulate(device, 8, lambda _: 0.1, 1_000, scale=scale)
    assert run.gain >= MIN_GAIN


@pytest.mark.parametrize("device", [flat_to_64, graphs])
def test_policy_follows_a_drafter_that_becomes_better_and_worse(device):
    run = simulate(device, 2, lambda step: (0.0, 0.9)[step // 300 % 2], 1_200)
    # In half of the steps, all proposals are wrong and the gain is about 1.
    assert run.gain > 1 + 0.8 * (best_fixed_gain(device, 2, 0.9) - 1) / 2


def test_steps_that_are_not_launched_ahead_count_as_loss():
    """A step with proposals takes 30 % longer whatever its number of proposals."""
    extra_s = 0.3 * graphs(1)
    useless = simulate(graphs, 1, lambda _: 0.1, 1_000, synchronous_s=extra_s)
    assert useless.gain >= MIN_GAIN and useless.proposals < 0.1
    useful = simulate(graphs, 1, lambda _: 0.9, 1_000, synchronous_s=extra_s)
    assert useful.gain > 2.5


def test_proposals_of_steps_with_prompts_lose_as_little_as_those_of_other_steps():
    """The duration of a step with prompts does not measure the cost of proposals, but
    proposals cost time in such steps too. In this test, they are never right."""
    num_streams = 4
    policy = SpeculationPolicy()
    simulate(linear, num_streams, lambda _: 0.0, 100, policy=policy)
    num_steps = 1_000
    num_probes = 0
    loss = 0.0
    for _ in range(num_steps):
        limits = policy.limits([0.0] * num_streams, [4] * num_streams, num_streams)
        num_rows = num_streams + sum(limits)
        num_probes += num_rows > num_streams
        loss += linear(num_rows) / linear(num_streams) - 1
        policy.record_step(num_streams, num_rows, num_streams, None)
    assert 0 < num_probes <= num_steps / PROBE_INTERVAL
    assert loss <= 2 * MAX_LOSS * num_steps


def test_each_batch_size_is_measured_by_itself():
    policy = SpeculationPolicy()
    few = simulate(linear, 1, lambda _: 0.9, 500, policy=policy)
    many = simulate(linear, 200, lambda _: 0.9, 500, policy=policy)
    assert few.gain > 2.5 and many.gain >= MIN_GAIN
    again = simulate(linear, 1, lambda _: 0.9, 100, policy=policy)
    assert again.gain > few.gain and again.proposals > 3.5


def test_batch_size_that_changes_with_each_step_is_served():
    policy = SpeculationPolicy()
    rng = random.Random(0)
    num_proposals = 0
    for _ in range(1_000):
        num_streams = rng.randrange(10, 17)
        limits = policy.limits([0.8] * num_streams, [4] * num_streams, num_streams)
        num_rows = num_streams + sum(limits)
        num_tokens = num_streams + round(0.7 * sum(limits))
        policy.record_step(num_streams, num_rows, num_tokens, flat_to_64(num_rows))
        num_proposals += sum(limits) / num_streams
    assert num_proposals > 2_000


# -- limits -----------------------------------------------------------------------


def measured_policy(num_streams: int, device: Device = flat_to_64) -> SpeculationPolicy:
    """Returns a policy that has measured steps with `num_streams` streams."""
    policy = SpeculationPolicy()
    simulate(device, num_streams, lambda _: 0.9, 50, noise=0, policy=policy)
    policy.record_step(num_streams, num_streams, num_streams, device(num_streams))
    policy.record_step(num_streams, num_streams, num_streams, device(num_streams))
    return policy


def test_nothing_is_proposed_until_plain_steps_were_measured():
    policy = SpeculationPolicy()
    for _ in range(MIN_PLAIN_STEPS):
        assert policy.limits([0.9], [4], 1) == [0]
        policy.record_step(1, 1, 1, 1.0)
    assert policy.limits([0.9], [4], 1) != [0]
    assert policy.limits([0.9, 0.9], [4, 4], 2) == [0, 0]


def test_sequences_with_higher_rates_get_more_proposals():
    policy = measured_policy(32)
    limits = policy.limits([0.9] * 16 + [0.2] * 16, [4] * 32, 32)
    assert min(limits[:16]) >= 2 and max(limits[16:]) == 0


def test_streams_without_proposals_count_as_streams():
    assert measured_policy(32).limits([0.9], [4], 32) == [4]


@given(
    num_streams=st.integers(1, 40),
    proposals=st.lists(
        st.tuples(st.floats(0, 1), st.integers(0, 16)), min_size=1, max_size=40
    ),
    num_measured=st.integers(1, 40),
)
def test_limits_do_not_exceed_lengths_and_calls_change_nothing(
    num_streams, proposals, num_measured
):
    rates, lengths = map(list, zip(*proposals[:num_streams], strict=True))
    policy = SpeculationPolicy()
    simulate(graphs, num_streams, lambda _: 0.7, num_measured, policy=policy)
    limits = policy.limits(rates, lengths, num_streams)
    assert len(limits) == len(lengths)
    assert all(0 <= n <= length for n, length in zip(limits, lengths, strict=True))
    assert policy.limits(rates, lengths, num_streams) == limits
    # A drafter may propose fewer tokens than it was allowed to propose.
    fewer = [min(length, length // 2 + 1) for length in lengths]
    if any(policy.limits(rates, fewer, num_streams)):
        assert policy.may_propose(rates, lengths, num_streams)


@given(
    num_streams=st.integers(1, 8),
    rates=st.lists(st.floats(0, 1), min_size=8, max_size=8),
    slowdowns=st.lists(st.floats(0, 1), min_size=33, max_size=33),
    outcomes=st.lists(st.floats(0, 1), min_size=30, max_size=300),
)
def test_loss_is_bounded_whatever_is_accepted(num_streams, rates, slowdowns, outcomes):
    """Durations grow arbitrarily with the number of rows, but at most in proportion to
    it. The number of accepted proposals is independent of the rates."""
    durations = [1.0]
    for rows, share in enumerate(slowdowns, num_streams):
        durations.append(durations[-1] * (1 + share / rows))
    policy = SpeculationPolicy()
    loss = 0.0
    largest_loss = 0.0
    for outcome in outcomes:
        limits = policy.limits(rates[:num_streams], [4] * num_streams, num_streams)
        num_tokens = num_streams + int(outcome * sum(limits))
        seconds = durations[sum(limits)]
        policy.record_step(num_streams, num_streams + sum(limits), num_tokens, seconds)
        step_loss = seconds - num_tokens / num_streams
        loss = max(loss + step_loss, -MAX_CREDIT_STEPS)
        largest_loss = max(largest_loss, step_loss)
    num_steps = len(outcomes)
    assert loss <= START_CREDIT_STEPS + MAX_LOSS * num_steps + largest_loss + 1e-9


# -- acceptance rates -------------------------------------------------------------


def test_rate_begins_with_the_given_value_and_approaches_the_outcomes():
    rate = AcceptanceRate(0.3)
    assert rate.value == 0.3
    rate.record(0, 0)
    assert rate.value == 0.3
    for _ in range(100):
        rate.record(4, 4)
    assert rate.value > 0.99
    for _ in range(200):
        rate.record(1, 0)
    assert rate.value < 0.01


def test_only_the_first_rejected_proposal_has_an_outcome():
    long = AcceptanceRate()
    short = AcceptanceRate()
    long.record(8, 2)
    short.record(3, 2)
    assert long.value == short.value


@given(st.lists(st.tuples(st.integers(0, 16), st.integers(0, 16)), max_size=50))
def test_rate_is_a_probability(counts):
    rate = AcceptanceRate()
    for pair in counts:
        rate.record(max(pair), min(pair))
        assert 0 <= rate.value <= 1


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_rate_is_near_the_probability_of_acceptance(probability):
    rng = random.Random(0)
    average = AcceptanceRate(window=1_000)
    for _ in range(2_000):
        accepted = 0
        while accepted < 4 and rng.random() < probability:
            accepted += 1
        average.record(4, accepted)
    assert average.value == pytest.approx(probability, abs=0.05)
