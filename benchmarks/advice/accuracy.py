"""Measures the accuracy of the advice on this host: predicted and measured goodput.

    python -m benchmarks.advice.accuracy --model MODEL --servers 4

The constants of the host are measured once. Ten loads follow: five mixtures of prompts,
answers and conversations, each at two shares of the rate that replicas can serve. For
each load, the program predicts the best replicas and the best split, and then runs both
twice. Just before each run, it measures the speed of the host again, and repeats the
prediction for this speed (verify.py).

The recommendation is right if the recommended deployment has the higher mean goodput,
or if the two deployments tie. They tie if the goodput ranges of their runs overlap, or
if almost equal shares of their requests are within the SLO. The last line of output is
JSON.
"""

import argparse
import itertools
import json
import math
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.advice.advise import (
    check_lengths,
    constants_of,
    predict_all,
    server_options,
)
from benchmarks.advice.constants import HostConstants
from benchmarks.advice.deployments import deployments
from benchmarks.advice.options import add_server_options
from benchmarks.advice.predict import (
    NEGLIGIBLE_GAIN,
    Prediction,
    best_of_each_kind,
    predict,
    recommended,
)
from benchmarks.advice.saturation import USUAL_STEP_TOKENS
from benchmarks.advice.servers import (
    ServerOptions,
    connect_servers,
    running_servers,
)
from benchmarks.advice.verify import (
    MAX_ERROR,
    NUM_RUNS,
    Measured,
    Run,
    load_of_run,
    run_deployment,
)
from benchmarks.bench import options as bench_options
from benchmarks.bench.errors import BenchError
from benchmarks.bench.slo import Slo
from benchmarks.bench.workload import Session, Turn, Workload, with_poisson_arrivals
from benchmarks.simulation.contention import slowdown

BLOCK_TOKENS = 64
_LOADS = (0.5, 0.75)  # shares of the rate that replicas can serve
_SATURATING_REQUESTS = 96
_MAX_REQUESTS = 1000
_UNLIMITED = Slo()
# The limits of the SLO are these multiples of the latencies of a single session, times
# the slowdown of decode steps while all servers are busy.
_TTFT_FACTOR = 3.0
_ITL_FACTOR = 3.0


@dataclass(frozen=True)
class Case:
    """One load with its SLO."""

    name: str
    workload: Workload
    slo: Slo
    seed: int


Mix = Callable[[random.Random, int], Session]


def _equal(input_tokens: int, output_tokens: int) -> Mix:
    return lambda rng, scale: Session(0.0, (Turn(input_tokens * scale, output_tokens),))


def _mixed(rng: random.Random, scale: int) -> Session:
    """Prompts from 16 to 1,024 tokens, answers from 4 to 128."""
    input_tokens = round(rng.lognormvariate(math.log(160), 0.8))
    output_tokens = round(rng.lognormvariate(math.log(32), 0.7))
    turn = Turn(
        input_tokens=scale * min(max(input_tokens, 16), 1024),
        output_tokens=min(max(output_tokens, 4), 128),
    )
    return Session(0.0, (turn,))


def _agent(rng: random.Random, scale: int) -> Session:
    """Three turns. The first begins with one of four system prompts of 256 tokens."""
    system = rng.randrange(4)
    blocks = tuple(range(100 * system, 100 * system + 4))
    first = Turn(scale * (4 * BLOCK_TOKENS + 64), 24, blocks)
    later = Turn(scale * 64, 24, think_s=0.2)
    return Session(0.0, (first, later, later))


# The prompt lengths are for steps of USUAL_STEP_TOKENS prompt tokens, as on a CPU. If
# steps are larger by a factor, as on a GPU, prompts are longer by the same factor.
MIXES: dict[str, Mix] = {
    "512 + 16": _equal(512, 16),
    "128 + 64": _equal(128, 64),
    "64 + 128": _equal(64, 128),
    "mixed": _mixed,
    "agents": _agent,
}


def cases(constants: HostConstants, num_servers: int, duration_s: float) -> list[Case]:
    """Return the ten loads, with arrival rates and SLOs that suit the host."""
    listed: list[Case] = []
    scale = max(1, constants.times.step_tokens // USUAL_STEP_TOKENS)
    for mix_name, make_session in MIXES.items():
        rng = random.Random(f"cases {mix_name}")
        sessions = [make_session(rng, scale) for _ in range(_MAX_REQUESTS)]
        sample = Workload(tuple(sessions), scale * BLOCK_TOKENS, mix_name)
        rate = saturated_rate(constants, num_servers, sample)
        for load in _LOADS:
            seed = len(listed) + 1
            count = max(8, min(round(rate * load * duration_s), _MAX_REQUESTS))
            limited = replace(sample, sessions=sample.sessions[:count])
            workload = with_poisson_arrivals(limited, rate * load, seed)
            name = f"{mix_name}, load {load:g}"
            listed.append(Case(name, workload, _slo(constants, sample), seed))
    return listed


def saturated_rate(
    constants: HostConstants, num_servers: int, workload: Workload
) -> float:
    """Return the sessions per second of saturated replicas: all arrive at once."""
    sessions = workload.sessions[:_SATURATING_REQUESTS]
    burst = replace(workload, sessions=sessions)
    replicas = deployments(num_servers)[0]
    prediction = predict(constants, replicas, burst, _UNLIMITED)
    # Without limits, goodput counts all requests.
    return prediction.goodput * len(sessions) / burst.num_requests


def _slo(constants: HostConstants, workload: Workload) -> Slo:
    """Return limits that are multiples of the latencies of a single session."""
    replicas = deployments(constants.num_servers)[0]
    ttfts_s = []
    itls_s = []
    for session in workload.sessions[:16]:
        single = replace(workload, sessions=(session,))
        prediction = predict(constants, replicas, single, _UNLIMITED)
        ttfts_s.append(prediction.ttft_p50_s)
        itls_s.append(prediction.itl_mean_s)
    factor = slowdown(constants.times.decode_slowdown, constants.num_servers)
    return Slo(
        ttft=round(_TTFT_FACTOR * factor * max(ttfts_s), 4),
        itl=round(_ITL_FACTOR * factor * statistics.mean(itls_s), 5),
    )


def measure_cases(
    constants: HostConstants,
    options: ServerOptions,
    chosen: Sequence[tuple[Case, list[Prediction]]],
) -> dict[str, list[Measured]]:
    """Run the predicted deployments of all cases.

    Deployments with equal numbers of prefill and decode servers use the same servers.
    """
    runs: dict[tuple[str, str], list[Run]] = {}
    splits = {
        (each.deployment.prefills, each.deployment.decodes)
        for _, predictions in chosen
        for each in predictions
    }
    for prefills, decodes in sorted(splits):
        of_split = [
            (case, each)
            for case, predictions in chosen
            for each in predictions
            if each.deployment.prefills == prefills
        ]
        with running_servers(options, prefills, decodes) as servers:
            connect_servers(servers)
            # All cases run once before the second runs begin. A short disturbance of
            # the host therefore does not affect both runs of a case.
            for number, (case, prediction) in itertools.product(
                range(NUM_RUNS), of_split
            ):
                deployment = prediction.deployment
                run = run_deployment(
                    servers,
                    deployment,
                    case.workload,
                    load_of_run(case.workload, case.seed, number),
                    case.slo,
                    constants,
                )
                runs.setdefault((case.name, deployment.name), []).append(run)
                print(f"{case.name}: {_line(prediction, run)}", flush=True)
    return {
        case.name: [
            Measured(each, tuple(runs[case.name, each.deployment.name]))
            for each in predictions
        ]
        for case, predictions in chosen
    }


def _line(predicted: Prediction, run: Run) -> str:
    before = run.predicted
    measured = run.measured
    return (
        f"{predicted.deployment.name}: goodput predicted {predicted.goodput:.3f} "
        f"({predicted.share:.0%}), just before the run {before.goodput:.3f} "
        f"({before.share:.0%}), measured {measured.goodput:.3f} "
        f"({measured.share:.0%}); TTFT p50 {before.ttft_p50_s * 1e3:.0f}, "
        f"{measured.ttft_p50_s * 1e3:.0f} ms; ITL {before.itl_mean_s * 1e3:.1f}, "
        f"{measured.itl_mean_s * 1e3:.1f} ms; host slowdown {run.host_slowdown:.2f}, "
        f"other programs {run.other_processors:.2f} processors"
    )


def is_right(results: Sequence[Measured]) -> bool:
    """Return whether the recommended deployment won the real runs, or the runs tie."""
    best = max(results, key=lambda result: result.goodput)
    recommendation = recommended([result.predicted for result in results])
    (chosen,) = (each for each in results if each.predicted is recommendation)
    return chosen is best or is_tie(results)


def is_tie(results: Sequence[Measured]) -> bool:
    """Return whether the real runs show no winner.

    Both deployments receive the requests at the same times. If equal shares of the
    requests meet the SLO, the goodputs differ only because the runs differ in length.
    """
    first, second = results
    shares = [first.share, second.share]
    is_share_equal = min(shares) > (1 - NEGLIGIBLE_GAIN) * max(shares)
    return is_share_equal or first.ties_with(second)


def summary(measured: dict[str, list[Measured]]) -> dict[str, Any]:
    """Return the figures of accuracy over all cases.

    "within_15_percent" counts the predictions just before the runs,
    "first_within_15_percent" those with the constants that were measured at the start.
    "repeatable" is the number of deployments whose runs are within 15 % of each other.
    The speed of the host changes between the runs of the other deployments.

    Args:
        measured: the results of each case by its name.
    """
    listed = [result for results in measured.values() for result in results]
    repeatable = [result for result in listed if result.is_repeatable]
    errors = [abs(result.error) for result in listed if result.error is not None]
    slowdowns = [run.host_slowdown for result in listed for run in result.runs]
    others = [run.other_processors for result in listed for run in result.runs]
    spreads = [
        (result.goodputs[-1] - result.goodputs[0]) / result.goodput
        for result in listed
        if result.goodput
    ]
    return {
        "cases": len(measured),
        "right_winners": sum(is_right(results) for results in measured.values()),
        "ties": sum(is_tie(results) for results in measured.values()),
        "predictions": len(listed),
        "within_15_percent": sum(result.is_accurate for result in listed),
        "first_within_15_percent": sum(
            result.first_error is not None and abs(result.first_error) <= MAX_ERROR
            for result in listed
        ),
        "repeatable": len(repeatable),
        "repeatable_within_15_percent": sum(
            result.is_accurate for result in repeatable
        ),
        "median_error": round(statistics.median(errors), 4) if errors else None,
        "max_error": round(max(errors), 4) if errors else None,
        "median_run_spread": round(statistics.median(spreads), 4) if spreads else None,
        "other_processors_range": [round(min(others), 3), round(max(others), 3)],
        "host_slowdown_range": [round(min(slowdowns), 3), round(max(slowdowns), 3)],
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.advice.accuracy",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_server_options(parser)
    parser.add_argument(
        "--duration",
        type=bench_options.positive_float,
        default=30.0,
        help="seconds over which the requests of a case arrive (default: 30)",
    )
    args = parser.parse_args(argv)
    try:
        options = server_options(args)
        constants = constants_of(args, options)
        print(f"constants of {constants.date}: {constants.describe()}", flush=True)
        chosen = []
        for case in cases(constants, args.servers, args.duration):
            check_lengths(case.workload, constants)
            predictions = predict_all(constants, args.servers, case.workload, case.slo)
            chosen.append((case, best_of_each_kind(predictions)))
        measured = measure_cases(constants, options, chosen)
    except BenchError as error:
        print(f"benchmarks.advice.accuracy: error: {error}", file=sys.stderr)
        return 2
    document = {
        "benchmark": "advice accuracy",
        "constants": constants.describe(),
        "results": {
            case.name: {
                "slo": case.slo.limits(),
                "requests": case.workload.num_requests,
                "is_right": is_right(measured[case.name]),
                "is_tie": is_tie(measured[case.name]),
                "deployments": [each.as_dict() for each in measured[case.name]],
            }
            for case, _ in chosen
        },
        **summary(measured),
    }
    print(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
