"""Corrections of the simulated servers, derived from closed loops on real servers."""

from dataclasses import replace

import pytest

from benchmarks.advice.client import ClosedLoop
from benchmarks.advice.constants import Correction
from benchmarks.advice.deployments import arrangements, deployments, split
from benchmarks.advice.predict import predict
from benchmarks.advice.saturation import (
    closed_loops,
    correction_of,
    fit_correction,
    simulated_s,
)
from benchmarks.bench.slo import Slo
from tests.benchmarks.test_advice import HOST, REPLICAS, TIMES, workload_of

SLOWDOWNS = tuple(max(1.0, count / 2) for count in range(1, 9))
BUSY_HOST = replace(
    HOST,
    times=replace(
        TIMES,
        request_work_s=0.005,
        delivery_s=5e-4,
        handoff_work_s=0.005,
        handoff_step_s=0.003,
        decode_slowdown=SLOWDOWNS,
        prompt_slowdown=SLOWDOWNS,
        shares_processors=True,
    ),
)
LOOPS = (
    ClosedLoop(256, 8, 48, 16, is_mixed=True),
    ClosedLoop(64, 48, 48, 16, is_mixed=True),
)


def test_closed_loop_of_one_request_at_a_time_is_the_sum_of_their_times():
    loop = ClosedLoop(prompt_tokens=100, output_tokens=11, count=3, in_flight=1)
    one = predict(HOST, REPLICAS, workload_of((0.0, 100, 11)), Slo())
    seconds = simulated_s(HOST, REPLICAS, loop)
    assert seconds == pytest.approx(3 / one.goodput, rel=1e-6)


def test_closed_loop_fills_all_servers():
    """Four servers without anything in common are four times as fast."""
    one = simulated_s(HOST, REPLICAS, ClosedLoop(100, 11, 8, 1))
    four = simulated_s(HOST, REPLICAS, ClosedLoop(100, 11, 32, 4))
    assert four == pytest.approx(one, rel=0.01)


@pytest.mark.parametrize("deployment", arrangements(4))
def test_correction_makes_the_simulation_as_slow_as_the_real_servers(deployment):
    """In this test, a simulation with other factors takes the place of the real
    servers.
    """
    real = Correction(request=1.4, step=0.9)
    name = deployment.arrangement
    real_host = replace(BUSY_HOST, corrections={name: real})
    measured_s = [simulated_s(real_host, deployment, loop) for loop in LOOPS]
    correction = correction_of(BUSY_HOST, deployment, LOOPS, measured_s)
    corrected = replace(BUSY_HOST, corrections={name: correction})
    for loop, seconds in zip(LOOPS, measured_s, strict=True):
        assert simulated_s(corrected, deployment, loop) == pytest.approx(
            seconds, rel=0.04
        )


def test_correction_is_bounded():
    correction = correction_of(BUSY_HOST, REPLICAS, LOOPS, [1e4, 1e4])
    assert correction == Correction(4.0, 4.0)


def test_factor_that_changes_no_duration_stays_one():
    def simulate(_loop: ClosedLoop, correction: Correction) -> float:
        return 2.0 * correction.step

    correction = fit_correction(simulate, LOOPS, [3.0, 3.0])
    assert correction.request == 1.0
    assert correction.step == pytest.approx(1.5, rel=0.01)


def test_correction_of_one_arrangement_changes_no_other():
    corrections = {"1P3D": Correction(2.0, 2.0), "2P2D": Correction()}
    host = replace(BUSY_HOST, corrections=corrections)
    replicas, one_prefill, two_prefills, _ = arrangements(4)
    for deployment, is_slower in [
        (replicas, False),
        (one_prefill, True),
        (two_prefills, False),
    ]:
        before = simulated_s(BUSY_HOST, deployment, LOOPS[0])
        after = simulated_s(host, deployment, LOOPS[0])
        assert (after > before) == is_slower


def test_loads_that_saturate_fit_the_context_of_the_model():
    for max_model_len in (128, 4096):
        for loop in closed_loops(replace(HOST, max_model_len=max_model_len)):
            lengths = [loop.lengths(index) for index in range(loop.count)]
            assert len(lengths) == 80
            assert max(map(sum, lengths)) <= max_model_len
            means = (loop.prompt_tokens, loop.output_tokens)
            for of_kind, mean in zip(zip(*lengths, strict=True), means, strict=True):
                assert min(of_kind) < 0.6 * mean
                assert max(of_kind) > 1.4 * mean
                assert sum(of_kind) / len(of_kind) == pytest.approx(mean, rel=0.05)


def test_split_that_was_not_measured_gets_the_correction_of_a_similar_one():
    corrections = {"8 replicas": Correction(2.0), "1P7D": Correction(3.0)}
    corrections |= {"4P4D": Correction(0.5), "7P1D": Correction(4.0)}
    assert [each.arrangement for each in arrangements(8)] == list(corrections)
    host = replace(BUSY_HOST, corrections=corrections)
    for deployment in deployments(8):
        factor = host.times_of(deployment).token_s / TIMES.token_s
        nearest = {0: 2.0, 1: 3.0, 2: 3.0, 3: 0.5, 4: 0.5, 5: 0.5, 6: 4.0, 7: 4.0}
        assert factor == pytest.approx(nearest[deployment.prefills])
    assert host.times_of(REPLICAS) == BUSY_HOST.times  # four servers, not eight
    # A correction of exactly this split has precedence.
    host = replace(host, corrections={**corrections, "3P5D": Correction(9.0)})
    times = host.times_of(split(3, 5, "always"))
    assert times.token_s == pytest.approx(9.0 * TIMES.token_s)
