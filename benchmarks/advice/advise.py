"""`baton bench advise`: recommends replicas or a prefill/decode split for a trace."""

import argparse
import json
import math
import shutil
from collections.abc import Sequence
from typing import Any

from benchmarks.advice.calibrate import measure_constants
from benchmarks.advice.constants import HostConstants, read_constants, save_constants
from benchmarks.advice.deployments import deployments
from benchmarks.advice.options import MAX_SERVERS
from benchmarks.advice.predict import (
    NEGLIGIBLE_GAIN,
    Prediction,
    best_of_each_kind,
    predict,
    predicts_tie,
    recommended,
)
from benchmarks.advice.servers import ServerOptions
from benchmarks.advice.verify import Measured, prediction_dict, verify
from benchmarks.bench import options as bench_options
from benchmarks.bench.errors import BenchError
from benchmarks.bench.slo import Slo
from benchmarks.bench.workload import Workload
from protocol.settings.machine import available_cores

_HEAD = (
    "deployment                   goodput/s  within SLO  TTFT p50 s     p99 s  ITL ms"
)
_ROW = "{:28} {:9.3f}  {:10.1%}  {:10.3f} {:9.3f} {:7.1f}"


def advise(args: argparse.Namespace) -> int:
    """Run `baton bench advise`. Returns the exit status.

    Raises:
        BenchError: options or the trace are invalid, or servers could not be started.
    """
    slo = bench_options.make_slo(args)
    if args.trace is None:
        raise BenchError("--trace is missing; give a trace of your own traffic")
    workload = bench_options.make_workload(args)
    options = server_options(args)
    constants = constants_of(args, options)
    check_lengths(workload, constants, args.length_scale)
    print(f"constants of {constants.date}: {constants.describe()}")
    predictions = predict_all(constants, args.servers, workload, slo)
    print_predictions(predictions)
    best = recommended(predictions)
    print(_recommendation(best, predictions, args.model))
    document: dict[str, Any] = {
        "benchmark": "advise",
        "model": args.model,
        "servers": args.servers,
        "trace": str(args.trace),
        "requests": workload.num_requests,
        "slo": slo.limits(),
        "predictions": [prediction_dict(each) for each in predictions],
        "recommended": best.deployment.name,
        "is_tie": predicts_tie(best_of_each_kind(predictions)),
        "command": best.deployment.command(args.model),
    }
    if args.verify:
        measured = verify(
            best_of_each_kind(predictions),
            options,
            workload,
            args.seed,
            slo,
            constants,
        )
        print_verification(measured)
        document["verification"] = [each.as_dict() for each in measured]
    print(json.dumps(document))
    return 0


def server_options(args: argparse.Namespace) -> ServerOptions:
    """Return the options of the servers.

    Raises:
        BenchError: --servers or --devices is invalid.
    """
    if not 2 <= args.servers <= MAX_SERVERS:
        raise BenchError(f"--servers {args.servers} must be from 2 to {MAX_SERVERS}")
    device = args.device or ("cuda" if shutil.which("nvidia-smi") else "cpu")
    words = tuple(args.server_options.split())
    if device == "cpu" and not any(word.startswith("--threads") for word in words):
        # If all servers together had more threads than cores, threads would wait
        # for each other.
        words = (*words, f"--threads={max(1, available_cores() // args.servers)}")
    devices: tuple[int, ...] = ()
    if args.devices is not None:
        try:
            devices = tuple(int(word) for word in args.devices.split(","))
        except ValueError:
            raise BenchError(
                f"--devices {args.devices} are not indices of GPUs; write for "
                "example 0,1"
            ) from None
    elif device == "cuda":
        devices = tuple(range(args.servers))
    return ServerOptions(
        model=args.model,
        device=device,
        options=words,
        devices=devices,
        start_timeout_s=args.start_timeout_s,
    )


def constants_of(args: argparse.Namespace, options: ServerOptions) -> HostConstants:
    """Read the constants from the file of --constants, or measure them on this host.

    Write them to the file of --save-constants, if this option is given.

    Raises:
        BenchError: the file is invalid, or servers could not be started.
    """
    if args.constants is None:
        print(f"measuring this host with {args.servers} servers", flush=True)
        constants = measure_constants(options, args.servers)
    else:
        constants = read_constants(args.constants)
        if constants.model != args.model:
            raise BenchError(
                f"{args.constants} has the constants of {constants.model}, not of "
                f"{args.model}; measure them again, or give --model {constants.model}"
            )
    if args.save_constants is not None:
        save_constants(args.save_constants, constants)
    return constants


def check_lengths(
    workload: Workload, constants: HostConstants, length_scale: float = 1.0
) -> None:
    """Raise BenchError if a request is too long for the model.

    Args:
        length_scale: factor by which the lengths of the trace were multiplied.
    """
    longest = workload.longest_prompt
    if longest > constants.max_model_len:
        scale = length_scale * constants.max_model_len / longest
        # Round down, because `scaled` may round lengths up to whole tokens.
        digits = 1 - math.floor(math.log10(scale))
        scale = math.floor(scale * 0.98 * 10**digits) / 10**digits
        raise BenchError(
            f"{workload.name} has a request of {longest} tokens, but the model takes "
            f"{constants.max_model_len}; use --length-scale {scale:g} or less"
        )


def predict_all(
    constants: HostConstants, num_servers: int, workload: Workload, slo: Slo
) -> list[Prediction]:
    """Predict all deployments, the simplest first."""
    return [
        predict(constants, deployment, workload, slo)
        for deployment in deployments(num_servers)
    ]


def print_predictions(predictions: Sequence[Prediction]) -> None:
    print(_HEAD)
    for prediction in predictions:
        name = prediction.deployment.name
        values = prediction[1:5]
        print(_ROW.format(name, *values, prediction.itl_mean_s * 1e3))


def _recommendation(
    best: Prediction, predictions: Sequence[Prediction], model: str
) -> str:
    kinds = best_of_each_kind(predictions)
    (other,) = (
        each for each in kinds if each.deployment.is_split != best.deployment.is_split
    )
    outcome = ""
    if predicts_tie(kinds):
        outcome = f"; the two tie: they differ by less than {NEGLIGIBLE_GAIN:.0%}"
    command = best.deployment.command(model)
    return (
        f"recommended: {best.deployment.name} ({best.goodput:.3f} requests/s within "
        f"the SLO; {other.deployment.name}: {other.goodput:.3f}{outcome})\n"
        f"    {command}"
    )


def print_verification(measured: Sequence[Measured]) -> None:
    """Print predicted and measured goodputs side by side, and the winner."""
    print(
        "deployment                   predicted/s  before runs/s  measured/s"
        "            runs   error"
    )
    for each in measured:
        error = "-" if each.error is None else f"{each.error:+.1%}"
        runs = f"{each.goodputs[0]:.3f} to {each.goodputs[-1]:.3f}"
        print(
            f"{each.name:28} {each.predicted.goodput:11.3f} "
            f"{each.predicted_goodput:14.3f} {each.goodput:11.3f} {runs:>15} {error:>7}"
        )
        for run in each.runs:
            if run.num_failed:
                print(f"WARNING: {run.num_failed} requests of a run failed")
    slowdowns = [run.host_slowdown for each in measured for run in each.runs]
    others = max(run.other_processors for each in measured for run in each.runs)
    print(
        f"host slowdown {min(slowdowns):.2f} to {max(slowdowns):.2f}, other programs "
        f"used up to {others:.1f} processors"
    )
    winner, loser = sorted(measured, key=lambda each: -each.goodput)
    if winner.ties_with(loser):
        print("the real runs tie: their ranges overlap")
        return
    is_predicted = winner.predicted.goodput >= loser.predicted.goodput
    outcome = "as predicted" if is_predicted else "not as predicted"
    print(f"{winner.name} won the real runs, {outcome}")
