"""`baton bench advise` without servers: fits, constants, predictions."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.advice.accuracy import cases, is_right, summary
from benchmarks.advice.constants import (
    Correction,
    HostConstants,
    read_constants,
    save_constants,
)
from benchmarks.advice.deployments import Deployment, deployments
from benchmarks.advice.fit import DecodeSample, PromptSample, fit_decode, fit_prompts
from benchmarks.advice.measurements import Measurements
from benchmarks.advice.predict import (
    Prediction,
    best_of_each_kind,
    predict,
    recommended,
)
from benchmarks.advice.verify import Measured, Run, load_of_run
from benchmarks.bench import cli
from benchmarks.bench.errors import BenchError
from benchmarks.bench.slo import Slo
from benchmarks.bench.workload import Session, Turn, Workload
from benchmarks.loads import Request
from benchmarks.simulation.engine import Engine
from benchmarks.simulation.fleet import Fleet
from benchmarks.simulation.times import EngineTimes
from protocol.settings.settings import ServeSettings, UpSettings, load

TIMES = EngineTimes(
    step_s=0.005,
    sequence_s=0.0005,
    held_token_s=1e-7,
    token_s=4e-4,
    pair_s=1e-7,
    request_s=0.01,
    handoff_s=0.005,
    sent_token_s=1e-5,
    capacity=100_000,
    step_tokens=512,
    min_prompt_step_s=0.0,
    block_tokens=64,
)
HOST = HostConstants(
    model="m",
    device="cpu",
    num_servers=4,
    options=("--threads=1",),
    date="2026-01-01 00:00:00",
    max_model_len=4096,
    split_target_s=0.5,
    replica_target_s=0.5,
    probe_s=0.1,
    times=TIMES,
)


def test_fit_recovers_the_times_of_steps():
    samples = [
        DecodeSample(streams, context, 0.004 + streams * 3e-4 + context * 2e-7)
        for streams, context in [(1, 30), (4, 120), (16, 480), (4, 4000)]
    ]
    assert fit_decode(samples) == pytest.approx((0.004, 3e-4, 2e-7))


def test_fit_recovers_the_times_of_prompts():
    """Prompts above 512 tokens take several steps."""
    samples = [
        PromptSample(
            tokens, 0.02 + steps * 0.004 + tokens * 1e-3 + tokens**2 / 2 * 1e-7
        )
        for tokens, steps in [(32, 1), (128, 1), (512, 1), (1536, 3)]
    ]
    fit = fit_prompts(samples, step_s=0.004, step_tokens=512)
    assert fit == pytest.approx((0.02, 1e-3, 1e-7))


def test_no_fitted_time_is_negative():
    samples = [DecodeSample(1, 30, 0.01), DecodeSample(4, 120, 0.009)]
    samples += [DecodeSample(16, 480, 0.008), DecodeSample(4, 4000, 0.02)]
    fit = fit_decode(samples)
    assert min(fit) >= 0
    assert fit.step_s > 0


def test_constants_are_read_as_written(tmp_path):
    path = tmp_path / "host.json"
    constants = replace(
        HOST,
        times=replace(TIMES, decode_slowdown=(1.0, 1.5)),
        corrections={"4 replicas": Correction(1.1, 0.9)},
    )
    save_constants(path, constants)
    assert read_constants(path) == constants
    assert "prompt 400 us a token" in constants.describe()
    assert "saturated 4 replicas: requests x 1.10, steps x 0.90" in constants.describe()


def test_invalid_corrections_are_named_with_their_file(tmp_path):
    path = tmp_path / "host.json"
    save_constants(path, replace(HOST, corrections={"1P3D": Correction(step=0.0)}))
    with pytest.raises(BenchError, match=r"corrections\.1P3D must be above 0"):
        read_constants(path)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"step_s": "fast"}, "Expected `float`, got `str` - at `$.times.step_s`"),
        ({"step_s": -1.0}, "times.step_s -1.0 must be from 0"),
        ({"token_s": 0.0}, "times.token_s must be above 0"),
        ({"capacity": 0}, "times.capacity must be above 0"),
        ({"decode_slowdown": []}, "times.decode_slowdown () must be from 0"),
        ({"prompt_slowdown": [0.5]}, "times.prompt_slowdown must be at least 1"),
    ],
)
def test_invalid_constants_are_named_with_their_file(tmp_path, change, problem):
    path = tmp_path / "host.json"
    data = asdict(HOST)
    data["times"] |= change
    path.write_text(json.dumps(data))
    with pytest.raises(BenchError) as error_info:
        read_constants(path)
    assert str(error_info.value) == f"{path}: {problem}"


def test_deployments_are_replicas_and_all_splits_with_valid_commands():
    listed = deployments(3)
    assert [each.name for each in listed] == [
        "3 replicas, round robin",
        "3 replicas, routing auto",
        "1P2D always",
        "1P2D auto",
        "2P1D always",
        "2P1D auto",
    ]
    for each in listed:
        assert each.prefills + each.decodes == 3
        _, program, *argv = each.command("some/model").split()
        load({"serve": ServeSettings, "up": UpSettings}[program], argv)


def workload_of(*sessions: tuple[float, int, int]) -> Workload:
    """Returns requests with these arrival times, prompt lengths and answer lengths."""
    return Workload(
        tuple(
            Session(arrival_s, (Turn(prompt, output),))
            for arrival_s, prompt, output in sessions
        ),
        64,
        "test",
    )


REPLICAS = deployments(4)[0]
PAIR = deployments(2)[2]


def test_prediction_of_one_request_is_the_sum_of_its_times():
    prediction = predict(HOST, REPLICAS, workload_of((0.0, 100, 11)), Slo(ttft=1.0))
    expected_s = 0.01 + 0.005 + 100 * 4e-4 + 100 * 50 * 1e-7
    assert prediction.ttft_p50_s == pytest.approx(expected_s)
    step_s = 0.005 + 0.0005 + 106 * 1e-7
    assert prediction.itl_mean_s == pytest.approx(step_s, rel=0.01)
    assert prediction.goodput == pytest.approx(1 / (expected_s + 10 * step_s), rel=0.01)


@pytest.mark.parametrize("deployment", [REPLICAS, PAIR])
def test_request_of_one_token_ends_with_its_prompt(deployment):
    workload = workload_of((0.0, 100, 1), (0.5, 100, 1))
    result = predict(HOST, deployment, workload, Slo(ttft=1.0))
    assert result.itl_mean_s == 0.0
    assert result.goodput == pytest.approx(2 / (0.5 + result.ttft_p50_s))


def test_prediction_of_a_split_contains_the_hand_over():
    prediction = predict(HOST, PAIR, workload_of((0.0, 100, 11)), Slo(ttft=1.0))
    undisturbed = predict(HOST, REPLICAS, workload_of((0.0, 100, 11)), Slo(ttft=1.0))
    assert prediction.ttft_p50_s - undisturbed.ttft_p50_s == pytest.approx(0.005)


def test_long_prompts_during_streams_favour_a_split():
    """Streams need a token every 11.5 ms, and each prompt takes 0.4 s."""
    streams = [(0.0, 16, 200) for _ in range(8)]
    prompts = [(0.3 + 0.25 * index, 1000, 30) for index in range(8)]
    workload = workload_of(*streams, *prompts)
    constants = replace(HOST, split_target_s=0.025)
    slo = Slo(ttft=6.0, itl=0.0115)
    replicas = predict(constants, deployments(2)[0], workload, slo)
    split = predict(constants, PAIR, workload, slo)
    assert split.share > replicas.share + 0.2


def test_busy_servers_of_a_host_slow_each_other_down():
    """If a step takes twice as long while another server is busy, two concurrent
    requests take twice as long. A single request takes as long as before.
    """
    shared = replace(
        HOST,
        times=replace(TIMES, decode_slowdown=(1.0, 2.0), prompt_slowdown=(1.0, 2.0)),
    )
    one = workload_of((0.0, 100, 50))
    two = workload_of((0.0, 100, 50), (0.0, 100, 50))
    slo = Slo(ttft=9.0)
    assert predict(shared, REPLICAS, one, slo) == predict(HOST, REPLICAS, one, slo)
    undisturbed = predict(HOST, REPLICAS, two, slo)
    slowed = predict(shared, REPLICAS, two, slo)
    assert slowed.itl_mean_s == pytest.approx(2 * undisturbed.itl_mean_s)
    without_http = [each.ttft_p50_s - TIMES.request_s for each in (undisturbed, slowed)]
    assert without_http[1] == pytest.approx(2 * without_http[0])


def test_step_that_overlaps_partly_is_slowed_down_partly():
    """The second prompt's step begins when the first prompt's step is half done."""
    times = replace(
        TIMES,
        request_s=0.0,
        step_s=1e-9,
        pair_s=0.0,
        held_token_s=0.0,
        token_s=1e-3,
        prompt_slowdown=(1.0, 2.0),
        decode_slowdown=(1.0, 1.0),
    )
    requests = [Request(0.0, 100, 1, ()), Request(0.05, 100, 1, ())]

    class InTurn:
        lender: Engine | None = None

        def place_prompt(self, request: Request) -> Engine:
            return fleet.engines[requests.index(request)]

        place_stream = place_prompt

        def on_computed(self, request: Request) -> None: ...

        def on_finished(self, request: Request) -> None: ...

    engines = [Engine(index, False, times, None) for index in range(2)]
    fleet = Fleet(engines, times, lambda request, now: None)
    fleet.router = InTurn()
    fleet.run(requests)
    assert requests[0].first_token_s == pytest.approx(0.05 + 2 * 0.05, abs=1e-3)
    assert requests[1].first_token_s == pytest.approx(0.15 + 0.05, abs=1e-3)
    assert engines[0].totals.seconds >= 0.15  # health reports contain the slowdown


def prediction(name: str, prefills: int, goodput: float) -> Prediction:
    deployment = Deployment(name, prefills, 2, "auto", "auto", pulls=False)
    return Prediction(deployment, goodput, goodput / 4, 0.1, 0.1, 0.01)


def test_simplest_deployment_is_recommended_unless_another_is_clearly_better():
    predictions = [prediction("replicas", 0, 1.0), prediction("split", 1, 1.02)]
    assert recommended(predictions).deployment.name == "replicas"
    predictions[1] = prediction("split", 1, 1.1)
    assert recommended(predictions).deployment.name == "split"
    kinds = best_of_each_kind([*predictions, prediction("other split", 2, 0.5)])
    assert [each.deployment.name for each in kinds] == ["split", "replicas"]


def test_recommendation_is_one_of_the_two_that_are_verified():
    predictions = [
        prediction("round robin", 0, 0.955),
        prediction("auto", 0, 0.98),
        prediction("split", 1, 1.0),
    ]
    assert recommended(predictions).deployment.name == "split"
    predictions[2] = prediction("split", 1, 0.97)
    assert recommended(predictions).deployment.name == "round robin"


def test_two_unequal_lengths_are_measured_whatever_the_context_of_the_model():
    for max_model_len in range(160, 4000, 16):
        short, long = Measurements(max_model_len, [], step_tokens=512).handoff_lengths
        assert short < long < max_model_len


def test_real_run_sends_all_requests_of_a_long_trace():
    workload = workload_of((0.0, 100, 11), (1700.0, 100, 11))
    assert load_of_run(workload, 0, 1).duration_s > 1700


def test_split_with_the_most_reserve_is_the_best_of_equally_good_ones():
    """The reserve is the unused part of the SLO's limits. Replicas are recommended
    regardless of their reserve, because they are simpler.
    """
    splits = [
        prediction("first", 1, 1.0)._replace(limit_use=0.9),
        prediction("second", 2, 0.99)._replace(limit_use=0.4),
        prediction("slow", 3, 0.9)._replace(limit_use=0.1),
    ]
    assert recommended(splits).deployment.name == "second"
    replicas = prediction("replicas", 0, 1.0)._replace(limit_use=0.95)
    assert recommended([replicas, *splits]) == replicas


def test_prediction_reports_which_share_of_the_limits_is_needed():
    workload = workload_of((0.0, 100, 11), (5.0, 100, 11))
    loose = predict(HOST, REPLICAS, workload, Slo(ttft=1.0, itl=1.0))
    assert loose.limit_use == pytest.approx(loose.ttft_p99_s)
    tight = predict(HOST, REPLICAS, workload, Slo(itl=loose.itl_mean_s / 2))
    assert tight.limit_use == pytest.approx(2.0)
    assert tight.share == 0.0
    assert predict(HOST, REPLICAS, workload, Slo()).limit_use == 0.0


def measured(prefills: int, predicted: float, *actual: float) -> Measured:
    expected = prediction("p", prefills, predicted)
    runs = [
        Run(expected, prediction("p", prefills, each), 0, 1.0, 0.0, 0.0)
        for each in actual
    ]
    return Measured(expected, tuple(runs))


def test_error_of_a_prediction_is_that_of_the_mean_of_the_runs():
    assert measured(0, 1.1, 0.9, 1.1).error == pytest.approx(0.1)
    assert measured(0, 1.0, 0.0, 0.0).error is None
    assert measured(0, 0.0, 0.0, 0.0).error == 0.0


def test_error_is_that_of_the_predictions_just_before_the_runs():
    result = measured(0, 2.0, 1.0, 1.0)
    runs = [
        replace(run, predicted=run.predicted._replace(goodput=goodput))
        for run, goodput in zip(result.runs, (1.0, 1.2), strict=True)
    ]
    result = replace(result, runs=tuple(runs))
    assert result.error == pytest.approx(0.1)
    assert result.first_error == pytest.approx(1.0)
    counts = summary({"case": [result, measured(1, 1.0, 0.9, 0.9)]})
    assert counts["within_15_percent"] == 2
    assert counts["first_within_15_percent"] == 1


def test_deployments_tie_if_the_ranges_of_their_runs_overlap():
    assert measured(0, 1.0, 1.0, 1.2).ties_with(measured(1, 1.0, 1.3, 1.1))
    assert measured(1, 1.0, 1.3, 1.1).ties_with(measured(0, 1.0, 1.0, 1.2))
    assert not measured(0, 1.0, 1.0, 1.1).ties_with(measured(1, 1.0, 1.3, 1.2))


def test_recommendation_is_right_if_it_won_or_tied():
    assert is_right([measured(0, 1.0, 0.9, 0.8), measured(1, 2.0, 1.0, 1.1)])
    assert not is_right([measured(0, 2.0, 0.9, 0.9), measured(1, 1.0, 1.0, 1.0)])
    assert is_right([measured(1, 2.0, 0.9, 1.1), measured(0, 1.0, 1.0, 1.2)])
    # The simpler deployment is recommended, because the difference is negligible.
    assert not is_right([measured(1, 1.01, 1.0, 1.0), measured(0, 1.0, 0.9, 0.9)])


def test_deployments_tie_if_as_many_requests_are_within_the_slo():
    def with_share(prefills: int, predicted: float, actual: float, share: float):
        result = measured(prefills, predicted, actual)
        run = result.runs[0]
        run = replace(run, measured=run.measured._replace(share=share))
        return replace(result, runs=(run,))

    chosen = with_share(0, 2.0, 1.0, 0.98)
    assert is_right([chosen, with_share(1, 1.0, 1.1, 1.0)])
    assert not is_right([chosen, with_share(1, 1.0, 1.1, 1.02)])
    nothing = [with_share(0, 2.0, 0.0, 0.0), with_share(1, 1.0, 0.1, 0.1)]
    assert not is_right(nothing)


def test_summary_counts_ties_and_errors():
    results = {
        "a tie": [measured(0, 1.0, 0.9, 1.1), measured(1, 1.2, 1.0, 1.2)],
        "wrong": [measured(0, 2.0, 1.0, 1.0), measured(1, 1.0, 1.1, 1.1)],
        "nothing": [measured(0, 2.0, 1.0, 1.0), measured(1, 1.0, 0.0, 0.0)],
    }
    counts = summary(results)
    assert counts["right_winners"] == 2
    assert counts["ties"] == 1
    assert (counts["within_15_percent"], counts["predictions"]) == (3, 6)
    # The two runs of the tied deployments are more than 15 % apart.
    assert (counts["repeatable_within_15_percent"], counts["repeatable"]) == (1, 4)
    assert counts["max_error"] == 1.0


def test_cases_of_the_accuracy_suit_the_host():
    listed = cases(HOST, 4, duration_s=4.0)
    assert len(listed) == 10
    for case in listed:
        assert case.workload.longest_prompt <= HOST.max_model_len
        last_s = case.workload.sessions[-1].arrival_s
        assert 1.0 < last_s < 16.0
        assert case.slo.itl is not None and 0.005 < case.slo.itl < 0.1
        assert case.slo.ttft is not None and math.isfinite(case.slo.ttft)


TRACE_ROW = {"timestamp": 0, "input_length": 100, "output_length": 10}


def run_advise(folder: Path, **changes: Any) -> int:
    """Runs the command on saved constants. Returns the exit status."""
    trace = folder / "trace.jsonl"
    rows = [{**TRACE_ROW, "timestamp": 50 * index} for index in range(20)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    save_constants(folder / "host.json", HOST)
    options = {
        "trace": trace,
        "model": "m",
        "servers": 4,
        "device": "cpu",
        "constants": folder / "host.json",
        **changes,
    }
    argv = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    return cli.main(["advise", *argv])


def test_advice_from_saved_constants_ends_in_a_recommendation(tmp_path, capsys):
    assert run_advise(tmp_path, save_constants=tmp_path / "again.json") == 0
    *lines, last = capsys.readouterr().out.strip().splitlines()
    document = json.loads(last)
    assert len(document["predictions"]) == 8
    assert document["recommended"] == "4 replicas, round robin"
    assert document["command"] in lines[-1]
    assert document["requests"] == 20
    assert document["is_tie"] is True
    assert "the two tie: they differ by less than 3%" in lines[-2]
    assert read_constants(tmp_path / "again.json") == HOST


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"servers": 1}, "--servers 1 must be from 2 to 16"),
        ({"devices": "a"}, "--devices a are not indices of GPUs"),
        ({"model": "other"}, "has the constants of m, not of other"),
        ({"length_scale": 100}, "use --length-scale 36 or less"),
        ({"trace": "/no/trace"}, "/no/trace cannot be read"),
        ({"constants": "/no/file"}, "/no/file cannot be read"),
        ({"slo": "itl"}, "itl= must be a number of seconds above 0"),
    ],
)
def test_bad_input_of_advise_ends_in_one_line(tmp_path, capsys, changes, problem):
    assert run_advise(tmp_path, **changes) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("baton bench advise: error: ")
    assert problem in line
