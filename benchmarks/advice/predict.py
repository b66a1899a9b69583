"""Predicts the latencies and the goodput of a deployment, by simulation.

The proxy's own code places the simulated requests (benchmarks/routers.py).
"""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.advice.constants import HostConstants
from benchmarks.advice.deployments import Deployment
from benchmarks.bench.slo import Slo
from benchmarks.bench.workload import Workload
from benchmarks.loads import FollowUp, Request, from_sessions
from benchmarks.routers import ProxyRouter
from benchmarks.simulation.engine import Engine
from benchmarks.simulation.fleet import Fleet
from proxy.placement.server_load import USUAL_STEP_S

# Predicted goodputs that differ by less than this share count as equal. Replicas win a
# tie. Among tied splits, the one with the lowest `limit_use` wins.
NEGLIGIBLE_GAIN = 0.03


class Prediction(NamedTuple):
    """The predicted or the measured performance of a deployment.

    Attributes:
        goodput: requests per second within the SLO.
        share: share of the requests that are within the SLO.
        limit_use: 99th percentile of the requests' `Slo.limit_use`, the largest ratio
            of a latency to its limit. At 0.5, 99 % of the requests would also meet an
            SLO with half of each limit. It is 0 in a measured result.
    """

    deployment: Deployment
    goodput: float
    share: float
    ttft_p50_s: float
    ttft_p99_s: float
    itl_mean_s: float
    limit_use: float = 0.0


def predict(
    constants: HostConstants, deployment: Deployment, workload: Workload, slo: Slo
) -> Prediction:
    """Return the latencies and the goodput of a deployment under a load."""
    requests, follow_up = from_sessions(workload, constants.times.block_tokens)
    fleet = simulated_fleet(constants, deployment, follow_up)
    fleet.run(requests)
    return _prediction(deployment, fleet.requests, slo)


def simulated_fleet(
    constants: HostConstants, deployment: Deployment, follow_up: FollowUp
) -> Fleet:
    """Return the simulated servers and the router of a deployment."""
    times = constants.times_of(deployment)
    num_engines = deployment.prefills + deployment.decodes
    target_s = constants.replica_target_s
    if deployment.is_split:
        target_s = constants.split_target_s
    engines = []
    for index in range(num_engines):
        is_prefill = index < deployment.prefills
        engines.append(
            Engine(index, is_prefill, times, None if is_prefill else target_s)
        )
    fleet = Fleet(engines, times, follow_up)
    fleet.router = ProxyRouter(
        fleet,
        deployment.routing,
        deployment.disaggregate,
        target_s or USUAL_STEP_S,
        deployment.pulls,
    )
    return fleet


def _prediction(
    deployment: Deployment, requests: Sequence[Request], slo: Slo
) -> Prediction:
    ttfts_s = []
    itls_s = []
    limit_uses = []
    num_good = 0
    for request in requests:
        ttft_s = request.first_token_s - request.arrival_s
        decoding_s = request.last_token_s - request.first_token_s
        itl_s = decoding_s / max(request.generated_tokens - 1, 1)
        ttfts_s.append(ttft_s)
        itls_s.append(itl_s)
        e2e_s = request.last_token_s - request.arrival_s
        limit_uses.append(slo.limit_use(ttft_s, itl_s, e2e_s))
        num_good += slo.is_met(ttft_s, itl_s, e2e_s)
    ttfts_s.sort()
    elapsed_s = max(request.last_token_s for request in requests)
    return Prediction(
        deployment=deployment,
        goodput=num_good / elapsed_s,
        share=num_good / len(requests),
        ttft_p50_s=percentile(ttfts_s, 0.5),
        ttft_p99_s=percentile(ttfts_s, 0.99),
        itl_mean_s=statistics.mean(itls_s),
        limit_use=percentile(sorted(limit_uses), 0.99),
    )


def percentile(sorted_values: Sequence[float], share: float) -> float:
    """Return a percentile.

    Args:
        sorted_values: values in ascending order; at least one.
        share: the percentile as a share from 0 to 1.
    """
    return sorted_values[min(int(share * len(sorted_values)), len(sorted_values) - 1)]


def recommended(predictions: Sequence[Prediction]) -> Prediction:
    """Return the better of the best replicas and the best split; if they tie, replicas.

    Args:
        predictions: the simplest deployments first.
    """
    kinds = best_of_each_kind(predictions)
    return _simplest(sorted(kinds, key=lambda each: each.deployment.is_split))


def _simplest(predictions: Sequence[Prediction]) -> Prediction:
    """Return the simplest deployment with almost the highest goodput.

    If only splits have almost the highest goodput, return the split with the lowest
    `limit_use`, which is the farthest from violating the SLO.

    Args:
        predictions: the simplest deployments first.
    """
    best = max(prediction.goodput for prediction in predictions)
    good = [
        prediction
        for prediction in predictions
        if prediction.goodput >= (1 - NEGLIGIBLE_GAIN) * best
    ]
    if not good[0].deployment.is_split:
        return good[0]
    return min(good, key=lambda prediction: prediction.limit_use)


def best_of_each_kind(predictions: Sequence[Prediction]) -> list[Prediction]:
    """Return the best replicas and the best split, the better of the two first."""
    kinds = []
    for is_split in (False, True):
        of_kind = [each for each in predictions if each.deployment.is_split == is_split]
        if of_kind:
            kinds.append(_simplest(of_kind))
    return sorted(kinds, key=lambda prediction: -prediction.goodput)


def predicts_tie(kinds: Sequence[Prediction]) -> bool:
    """Return whether the predicted goodputs differ by less than NEGLIGIBLE_GAIN.

    Args:
        kinds: the predictions of `best_of_each_kind`.
    """
    goodputs = [prediction.goodput for prediction in kinds]
    return min(goodputs) >= (1 - NEGLIGIBLE_GAIN) * max(goodputs)
