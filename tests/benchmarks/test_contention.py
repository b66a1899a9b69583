"""Tasks on a shared device, and the frontends of simulated servers."""

import asyncio
import os
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial

import pytest

from benchmarks.advice import processors
from benchmarks.advice.fit import fit_deliveries, fit_mixed_slowdowns, fit_slowdowns
from benchmarks.advice.predict import predict, simulated_fleet
from benchmarks.advice.processors import OtherPrograms, children, processor_seconds
from benchmarks.bench.slo import Slo
from benchmarks.loads import Request
from benchmarks.simulation.contention import (
    Contention,
    Frontend,
    SharedDevice,
    slowdown,
)
from benchmarks.simulation.events import Events
from tests.benchmarks.test_advice import HOST, PAIR, REPLICAS, TIMES, workload_of

TWO_CORES = (1.0, 1.0, 1.5, 2.0)


def test_processor_time_of_other_programs_is_found():
    """A child counts as another program unless it is measured."""
    code = "print(flush=True)\nwhile True: pass"
    argv = [sys.executable, "-c", code]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            measured = OtherPrograms([child.pid])
            unmeasured = OtherPrograms([])
            before_s = processor_seconds([child.pid])
            deadline = time.monotonic() + 60.0
            while processor_seconds([child.pid]) < before_s + 0.3:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            assert child.pid in children(os.getpid())
            assert unmeasured.processors() > measured.processors()
        finally:
            child.kill()
    assert processor_seconds([child.pid]) < before_s + 0.3
    assert children(child.pid) == []


def test_mixed_slowdowns_never_decrease_and_have_no_upper_limit():
    assert fit_mixed_slowdowns([0.05, 0.04, 0.5], alone_s=0.01) == (1.0, 5.0, 5.0, 50.0)
    assert fit_mixed_slowdowns([0.009], alone_s=0.01) == (1.0, 1.0)


def test_slowdown_is_that_of_the_number_of_tasks_or_the_last():
    assert [slowdown(TWO_CORES, n) for n in (1, 3, 4, 9)] == [1.0, 1.5, 2.0, 2.0]


def test_tasks_that_overlap_partly_are_slowed_down_partly():
    """Three tasks of 1 s on two cores; the third one starts when the others are half
    done. Until the first two end, every task gets two thirds of a core.
    """
    events = Events()
    device = SharedDevice(events)
    ends: dict[str, float] = {}

    def start(name: str) -> None:
        device.start(
            1.0, Contention("step", TWO_CORES), lambda: ends.update({name: events.now})
        )

    events.schedule(0.0, partial(start, "first"))
    events.schedule(0.0, partial(start, "second"))
    events.schedule(0.5, partial(start, "third"))
    events.run()
    assert ends == pytest.approx({"first": 1.25, "second": 1.25, "third": 1.75})


def test_kinds_of_tasks_are_slowed_down_differently_by_each_other():
    """The device gives two thirds of its time to prompts, and one third to decoding."""
    prompt = Contention("prompt", alike=(1.0, 2.0, 3.0), mixed=(1.0, 1.5, 2.0))
    decode = Contention("decode", alike=(1.0, 2.0, 3.0), mixed=(1.0, 3.0, 6.0))
    events = Events()
    device = SharedDevice(events)
    ends: dict[str, float] = {}
    for name, contention in [("prompt", prompt), ("decode", decode)]:
        device.start(1.0, contention, lambda name=name: ends.update({name: events.now}))
    events.run()
    assert ends == pytest.approx({"prompt": 1.5, "decode": 2.0})
    # One of the two other tasks is of another kind.
    assert prompt.factor(num_alike=2, num_running=3) == pytest.approx(2.5)
    assert decode.factor(num_alike=2, num_running=3) == pytest.approx(4.5)
    assert decode.factor(num_alike=1, num_running=1) == 1.0


def test_split_on_one_gpu_is_predicted_with_mixed_slowdowns():
    """If decode steps hardly slow prompts down, prompts are computed sooner."""
    load = workload_of(*[(0.02 * index, 400, 40) for index in range(30)])
    slo = Slo(ttft=60.0)
    times = replace(TIMES, decode_slowdown=(1.0, 2.0), prompt_slowdown=(1.0, 2.0))
    mixed = replace(
        times, mixed_decode_slowdown=(1.0, 2.5), mixed_prompt_slowdown=(1.0, 1.2)
    )
    before = predict(replace(HOST, times=times), PAIR, load, slo)
    after = predict(replace(HOST, times=mixed), PAIR, load, slo)
    assert after.ttft_p99_s < 0.9 * before.ttft_p99_s
    assert after.itl_mean_s > before.itl_mean_s


def test_frontend_runs_one_task_after_another():
    events = Events()
    frontend = Frontend(SharedDevice(events), Contention("frontend", TWO_CORES))
    ends: list[tuple[str, float]] = []
    for name, seconds in [("first", 1.0), ("nothing", 0.0), ("second", 0.5)]:
        frontend.add(seconds, partial(ends.append, (name, seconds)))
    frontend.add(0.25, lambda: ends.append(("last", events.now)))
    events.run()
    assert [name for name, _ in ends] == ["first", "nothing", "second", "last"]
    assert ends[-1] == ("last", pytest.approx(1.75))


def test_task_without_work_ends_at_once_on_an_idle_frontend():
    events = Events()
    ended: list[float] = []
    Frontend(SharedDevice(events), Contention("frontend", TWO_CORES)).add(
        0.0, lambda: ended.append(events.now)
    )
    assert ended == [0.0]


@pytest.mark.parametrize("deployment", [REPLICAS, PAIR])
@pytest.mark.parametrize("work", ["request_work_s", "delivery_s", "handoff_work_s"])
def test_work_outside_of_engines_slows_engines_on_a_cpu(deployment, work):
    """The work slows no engine that has its own device. It delays no request that is
    alone on the servers.
    """
    burst = workload_of(*[(0.01 * index, 100, 20) for index in range(40)])
    one = workload_of((0.0, 100, 20))
    slo = Slo(ttft=60.0)
    slowdowns = tuple(max(1.0, count / 2) for count in range(1, 9))
    times = replace(TIMES, decode_slowdown=slowdowns, prompt_slowdown=slowdowns)
    busy = replace(times, **{work: 0.01})
    goodput = {}
    for name, each in [
        ("gpu", times),
        ("gpu, busy", busy),
        ("cpu", replace(times, shares_processors=True)),
        ("cpu, busy", replace(busy, shares_processors=True)),
    ]:
        host = replace(HOST, times=each)
        goodput[name] = predict(host, deployment, burst, slo).goodput
        idle = predict(host, deployment, one, slo)
        assert idle.ttft_p50_s == pytest.approx(
            predict(HOST, deployment, one, slo).ttft_p50_s, abs=0.006
        )
    assert goodput["gpu"] == goodput["cpu"]
    if deployment.is_split or work != "handoff_work_s":
        assert goodput["cpu, busy"] < 0.95 * goodput["cpu"]
        assert goodput["cpu, busy"] < goodput["gpu, busy"]
    else:
        assert goodput["cpu, busy"] == goodput["cpu"]


def test_work_of_a_hand_over_lengthens_a_step_of_the_decode_server():
    """If a request is alone on the servers, the work delays its second token, but not
    its first token.
    """
    one = workload_of((0.0, 100, 11))
    slo = Slo(ttft=60.0)
    busy = replace(HOST, times=replace(TIMES, handoff_step_s=0.05))
    for deployment, extra_s in [(REPLICAS, 0.0), (PAIR, 0.05)]:
        before = predict(HOST, deployment, one, slo)
        after = predict(busy, deployment, one, slo)
        assert after.ttft_p50_s == before.ttft_p50_s
        assert after.itl_mean_s - before.itl_mean_s == pytest.approx(extra_s / 10)


@pytest.mark.parametrize(
    ("shares_processors", "token_s"), [(False, (2.3, 4.5)), (True, (2.5, 4.5))]
)
def test_hand_over_during_a_step_joins_no_running_step(shares_processors, token_s):
    """All steps take one second, and a pull takes half a second. The decode server runs
    a step from 1.5 to 2.5 when the second request is handed over at 2.3. On a CPU, it
    reads the message at 2.5. Its KV arrives during the next step.
    """
    nothing = dict.fromkeys(
        ("sequence_s", "held_token_s", "pair_s", "request_s", "handoff_s"), 0.0
    )
    times = replace(
        TIMES,
        step_s=1.0,
        token_s=1e-9,
        sent_s=0.5,
        sent_token_s=0.0,
        shares_processors=shares_processors,
        **nothing,
    )
    requests = [Request(0.0, 100, 10, ()), Request(1.3, 100, 2, ())]
    fleet = simulated_fleet(replace(HOST, times=times), PAIR, lambda *_: None)
    fleet.run(requests)
    _, second = requests
    token_times_s = (second.first_token_s, second.last_token_s)
    assert token_times_s == pytest.approx(token_s, abs=1e-3)


def test_fit_recovers_the_work_of_deliveries():
    samples = [(tokens, 5e-4 + tokens * 1e-4) for tokens in (1, 4, 16, 48)]
    assert fit_deliveries(samples) == pytest.approx((5e-4, 1e-4))


def test_servers_with_devices_of_their_own_are_not_slowed_down():
    assert fit_slowdowns([0.01, 0.0099, 0.01], work_s=0.0) == (1.0, 1.0, 1.0)


def test_slowdown_is_hardly_more_than_the_number_of_tasks():
    assert fit_slowdowns([0.01, 0.05, 0.02], work_s=0.0) == (1.0, 2.5, 3.75)
    assert fit_slowdowns([0.01, 0.09], work_s=0.002)[-1] == pytest.approx(5.0)


def test_work_outside_of_engines_counts_as_tasks():
    """Four servers on two cores, each of them with an engine that is always busy and
    work that takes half of the time.
    """
    seconds = [0.01 * max(1.0, 1.5 * count / 2) for count in (1, 2, 3, 4)]
    factors = fit_slowdowns(seconds, work_s=0.005)
    assert len(factors) == 8
    assert factors[2:] == pytest.approx([max(1.0, n / 2) for n in range(3, 9)])
    assert factors[0] == 1.0


@pytest.mark.parametrize(
    ("others", "seconds", "expected", "num_runs"),
    [
        ([0.0, 0.0, 0.0], [3.0, 1.0, 2.0], 2.0, 3),
        ([99.0, 0.0, 0.0, 0.0], [9.0, 3.0, 1.0, 2.0], 2.0, 4),
        ([99.0] * 6, [9.0, 8.0, 7.0, 6.0, 5.0, 4.0], 6.5, 6),
        ([0.0, 0.0, *[99.0] * 4], [1.0, 1.0, 7.0, 7.0, 7.0, 7.0], 7.0, 6),
    ],
)
def test_disturbed_measurements_are_repeated_and_left_out(
    monkeypatch, others, seconds, expected, num_runs
):
    """A test cannot choose how many processors other programs use. So these numbers are
    scripted.
    """
    reports = iter(others)

    class Scripted(OtherPrograms):
        def processors(self) -> float:
            return next(reports)

    monkeypatch.setattr(processors, "OtherPrograms", Scripted)
    runs = iter(seconds)

    async def run() -> float:
        return next(runs)

    assert asyncio.run(processors.typical_s([], run)) == expected
    assert len(list(runs)) == len(seconds) - num_runs
