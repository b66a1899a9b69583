"""Runs a deployment on this host for real, to compare it with its prediction."""

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.advice.client import probe_url
from benchmarks.advice.constants import HostConstants
from benchmarks.advice.deployments import Deployment
from benchmarks.advice.predict import Prediction, percentile, predict
from benchmarks.advice.processors import OtherPrograms
from benchmarks.advice.saturation import closed_loops, correction_of, loops_once_s
from benchmarks.advice.servers import (
    RunningServers,
    ServerOptions,
    connect_servers,
    running_proxy,
    running_servers,
)
from benchmarks.bench.generator import LoadOptions, Side, run_load
from benchmarks.bench.prompts import BodyOptions
from benchmarks.bench.slo import Slo
from benchmarks.bench.workload import Workload

# Two runs of the same deployment show how much the host changes between runs.
NUM_RUNS = 2
MAX_ERROR = 0.15  # relative error of a goodput that counts as accurate
# No turn of a conversation starts later than this after the last session has arrived.
_MAX_SESSION_S = 600.0


@dataclass(frozen=True)
class Run:
    """One real run of a load.

    Attributes:
        predicted: the prediction for the speed that the host had just before the run.
        host_slowdown: duration of the probe after the run, divided by its duration when
            the constants were measured. Above 1, the host has become slower. With a
            split, the probe may include hand-overs of KV, which also lengthen it.
        other_processors: mean number of processors that other programs used.
        loop_lag_p99_s: 99th percentile of the delays of the load generator's event
            loop (s).
    """

    predicted: Prediction
    measured: Prediction
    num_failed: int
    host_slowdown: float
    other_processors: float
    loop_lag_p99_s: float

    def as_dict(self) -> dict[str, Any]:
        return {
            **prediction_dict(self.measured),
            "predicted": prediction_dict(self.predicted),
            "failed": self.num_failed,
            "host_slowdown": round(self.host_slowdown, 3),
            "other_processors": round(self.other_processors, 3),
            "loop_lag_p99_ms": round(self.loop_lag_p99_s * 1e3, 2),
        }


@dataclass(frozen=True)
class Measured:
    """A prediction, and the real runs of the same deployment with the same load.

    Attributes:
        predicted: the prediction for the speed that the host had when its constants
            were measured. The recommendation is based on it.
    """

    predicted: Prediction
    runs: tuple[Run, ...]

    @property
    def name(self) -> str:
        return self.predicted.deployment.name

    @property
    def goodputs(self) -> list[float]:
        """The goodput of each run, in ascending order."""
        return sorted(run.measured.goodput for run in self.runs)

    @property
    def goodput(self) -> float:
        """The mean goodput of the runs."""
        return statistics.mean(self.goodputs)

    @property
    def share(self) -> float:
        """The mean share of the requests that were within the SLO."""
        return statistics.mean(run.measured.share for run in self.runs)

    @property
    def predicted_goodput(self) -> float:
        """The mean of the goodputs that were predicted just before the runs."""
        return statistics.mean(run.predicted.goodput for run in self.runs)

    @property
    def error(self) -> float | None:
        """The relative error of `predicted_goodput`. None if the measured goodput is 0,
        but the predicted goodput is not.
        """
        return self._error_of(self.predicted_goodput)

    @property
    def first_error(self) -> float | None:
        """Like `error`, for the goodput of `predicted`."""
        return self._error_of(self.predicted.goodput)

    def _error_of(self, goodput: float) -> float | None:
        if not self.goodput:
            return None if goodput else 0.0
        return goodput / self.goodput - 1

    @property
    def is_accurate(self) -> bool:
        """Whether `predicted_goodput` is within MAX_ERROR of the measured goodput."""
        return self.error is not None and abs(self.error) <= MAX_ERROR

    @property
    def is_repeatable(self) -> bool:
        """Whether the goodput of each run is within MAX_ERROR of the goodput of the
        best run."""
        return self.goodputs[0] >= (1 - MAX_ERROR) * self.goodputs[-1]

    def ties_with(self, other: "Measured") -> bool:
        """Whether the goodput ranges of the two deployments overlap. If so, the
        difference of the goodputs may be mere variation between runs.
        """
        return (
            self.goodputs[0] <= other.goodputs[-1]
            and other.goodputs[0] <= self.goodputs[-1]
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "deployment": self.name,
            "predicted": prediction_dict(self.predicted),
            "predicted_before_runs_requests_per_s": round(self.predicted_goodput, 4),
            "goodput_requests_per_s": round(self.goodput, 4),
            "error": None if self.error is None else round(self.error, 4),
            "runs": [run.as_dict() for run in self.runs],
        }


def prediction_dict(prediction: Prediction) -> dict[str, Any]:
    return {
        "deployment": prediction.deployment.name,
        "goodput_requests_per_s": round(prediction.goodput, 4),
        "slo_share": round(prediction.share, 4),
        "ttft_p50_s": round(prediction.ttft_p50_s, 4),
        "ttft_p99_s": round(prediction.ttft_p99_s, 4),
        "itl_mean_s": round(prediction.itl_mean_s, 5),
    }


def load_of_run(workload: Workload, seed: int, number: int) -> LoadOptions:
    """Return the load options of one run of a deployment.

    The run sends all requests, because the prediction counts all of them. Each run has
    its own prompts, because servers have cached the prompts of earlier runs.
    """
    return LoadOptions(
        BodyOptions(seed=NUM_RUNS * seed + number),
        concurrency=10_000,
        duration_s=workload.sessions[-1].arrival_s + _MAX_SESSION_S,
    )


def run_deployment(
    servers: RunningServers,
    deployment: Deployment,
    workload: Workload,
    load: LoadOptions,
    slo: Slo,
    constants: HostConstants,
) -> Run:
    """Start a proxy in front of running servers, and send the load through it.

    The speed of a host changes within minutes, even if no other program runs. The run
    therefore begins with the closed loops of the calibration (saturation.py). The load
    is then predicted with the factors that these loops give.

    Raises:
        BenchError: the proxy was not ready, or a request of the closed loops failed.
    """
    loops = closed_loops(constants)
    with running_proxy(servers, deployment) as proxy:
        loops_s = loops_once_s(proxy.url, loops)
        side = Side(deployment.name, (proxy.url,))
        others = OtherPrograms([*servers.pids, proxy.pid])
        result = asyncio.run(run_load([side], workload, load))
        other_processors = others.processors()
        probe_after_s = asyncio.run(probe_url(proxy.url))
    timelines = [record.timeline for record in result.sides[0].records]
    succeeded = [timeline for timeline in timelines if timeline.succeeded]
    ttfts_s = sorted(timeline.ttft_s for timeline in succeeded) or [0.0]
    num_good = sum(timeline.meets(slo) for timeline in timelines)
    elapsed_s = result.sides[0].elapsed_s
    measured = Prediction(
        deployment=deployment,
        goodput=num_good / elapsed_s,
        share=num_good / max(len(timelines), 1),
        ttft_p50_s=percentile(ttfts_s, 0.5),
        ttft_p99_s=percentile(ttfts_s, 0.99),
        itl_mean_s=statistics.mean([t.mean_itl_s for t in succeeded] or [0.0]),
    )
    correction = correction_of(constants, deployment, loops, loops_s)
    corrected = replace(constants, corrections={deployment.arrangement: correction})
    return Run(
        predicted=predict(corrected, deployment, workload, slo),
        measured=measured,
        num_failed=len(timelines) - len(succeeded),
        host_slowdown=probe_after_s / constants.probe_s,
        other_processors=other_processors,
        loop_lag_p99_s=percentile(sorted(result.loop_lags_s) or [0.0], 0.99),
    )


def verify(
    predictions: Sequence[Prediction],
    options: ServerOptions,
    workload: Workload,
    seed: int,
    slo: Slo,
    constants: HostConstants,
) -> list[Measured]:
    """Run the predicted deployments one after the other, with new servers for each.

    Raises:
        BenchError: servers could not be started.
    """
    measured = []
    for prediction in predictions:
        deployment = prediction.deployment
        started_at = time.monotonic()
        with running_servers(
            options, deployment.prefills, deployment.decodes
        ) as servers:
            seconds = time.monotonic() - started_at
            print(f"{deployment.name}: servers ready after {seconds:.0f} s", flush=True)
            connect_servers(servers)
            runs = [
                run_deployment(
                    servers,
                    deployment,
                    workload,
                    load_of_run(workload, seed, number),
                    slo,
                    constants,
                )
                for number in range(NUM_RUNS)
            ]
        measured.append(Measured(prediction, tuple(runs)))
    return measured
