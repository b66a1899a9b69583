"""Runs a deployment on this host for real, to compare it with its prediction."""

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.advice.client import probe_url
from benchmarks.advice.predict import Prediction, percentile
from benchmarks.advice.servers import (
    RunningServers,
    ServerOptions,
    running_proxy,
    running_servers,
)
from benchmarks.bench.generator import LoadOptions, Side, run_load
from benchmarks.bench.slo import Slo
from benchmarks.bench.workload import Workload


@dataclass(frozen=True)
class Measured:
    """A prediction, and what a real run of the same load gave.

    Attributes:
        host_slowdown: duration of the probe after the run, divided by its duration when
            the constants were measured. Above 1, the host has become slower.
        loop_lag_p99_s: how late the load generator was, in seconds.
    """

    predicted: Prediction
    measured: Prediction
    num_failed: int
    host_slowdown: float
    loop_lag_p99_s: float

    @property
    def error(self) -> float | None:
        """The relative error of the predicted goodput; None: nothing met the SLO."""
        if not self.measured.goodput:
            return None
        return self.predicted.goodput / self.measured.goodput - 1

    def as_dict(self) -> dict[str, Any]:
        return {
            "deployment": self.predicted.deployment.name,
            "predicted": prediction_dict(self.predicted),
            "measured": prediction_dict(self.measured),
            "error": None if self.error is None else round(self.error, 4),
            "failed": self.num_failed,
            "host_slowdown": round(self.host_slowdown, 3),
            "loop_lag_p99_ms": round(self.loop_lag_p99_s * 1e3, 2),
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


def run_deployment(
    servers: RunningServers,
    predicted: Prediction,
    workload: Workload,
    load: LoadOptions,
    slo: Slo,
    probe_s: float,
) -> Measured:
    """Start a proxy in front of running servers, and send them the load.

    Args:
        probe_s: seconds of the probe when the constants were measured.

    Raises:
        BenchError: the proxy was not ready, or a warm-up request failed.
    """
    deployment = predicted.deployment
    with running_proxy(servers, deployment) as proxy:
        asyncio.run(probe_url(proxy.url))  # connects the servers
        side = Side(deployment.name, (proxy.url,))
        result = asyncio.run(run_load([side], workload, load))
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
    return Measured(
        predicted=predicted,
        measured=measured,
        num_failed=len(timelines) - len(succeeded),
        host_slowdown=probe_after_s / probe_s,
        loop_lag_p99_s=percentile(sorted(result.loop_lags_s) or [0.0], 0.99),
    )


def verify(
    predictions: Sequence[Prediction],
    options: ServerOptions,
    workload: Workload,
    load: LoadOptions,
    slo: Slo,
    probe_s: float,
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
            measured.append(
                run_deployment(servers, prediction, workload, load, slo, probe_s)
            )
    return measured
