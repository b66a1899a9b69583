"""The verdict of a comparison: which side won, by how much, and with which confidence.

Both sides got the same request at the same time, so their requests form pairs. The
confidence interval is for the mean difference of the pairs.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.bench.endpoint import Timeline
from benchmarks.bench.generator import SideResult
from benchmarks.bench.results.statistics import Interval, bootstrap_mean
from benchmarks.bench.slo import Slo

MIN_PAIRS = 8
_LATENCIES: dict[str, Callable[[Timeline], float]] = {
    "ttft": lambda timeline: timeline.ttft_s,
    "itl": lambda timeline: timeline.mean_itl_s,
    "normalised": lambda timeline: timeline.normalised_s,
    "e2e": lambda timeline: timeline.e2e_s,
}
_TITLES = {
    "ttft": "time to first token",
    "itl": "mean time between tokens",
    "normalised": "time per output token of whole requests",
    "e2e": "time of whole requests",
}
METRICS: tuple[str, ...] = ("goodput", *_LATENCIES)


@dataclass(frozen=True)
class Verdict:
    """The outcome of a comparison.

    Attributes:
        winner: name of the side that won; None: no significant difference.
        difference: for goodput, the first side's share of requests within the SLO minus
            the second side's share. For latencies, the mean logarithm of the ratio of
            the first side's latency to the second side's.
    """

    metric: str
    winner: str | None
    difference: Interval | None
    num_pairs: int
    sentence: str

    def as_dict(self) -> dict[str, Any]:
        values = asdict(self)
        if self.difference is not None:
            values["difference"] = self.difference._asdict()
        return values


def compare(first: SideResult, second: SideResult, metric: str, slo: Slo) -> Verdict:
    """Compare two sides of a run by one of METRICS.

    If an earlier turn failed on one side, only the other side got the later requests of
    the session. They count as failed on the side that did not get them.
    """
    a_by_index = {record.index: record.timeline for record in first.records}
    b_by_index = {record.index: record.timeline for record in second.records}
    not_sent = Timeline(0.0, error="not sent")
    pairs = [
        (a_by_index.get(index, not_sent), b_by_index.get(index, not_sent))
        for index in sorted(a_by_index.keys() | b_by_index.keys())
    ]
    names = (first.side.name, second.side.name)
    if metric == "goodput":
        return _compare_goodput(names, pairs, slo)
    return _compare_latency(names, pairs, metric)


def _compare_goodput(
    names: tuple[str, str], pairs: Sequence[tuple[Timeline, Timeline]], slo: Slo
) -> Verdict:
    a_good = [a.meets(slo) for a, _ in pairs]
    b_good = [b.meets(slo) for _, b in pairs]
    if len(pairs) < MIN_PAIRS:
        return _too_few("goodput", len(pairs))
    differences = [float(a) - float(b) for a, b in zip(a_good, b_good, strict=True)]
    interval = bootstrap_mean(differences)
    a_share = sum(a_good) / len(pairs)
    b_share = sum(b_good) / len(pairs)
    winner = _winner(names, interval, is_more_better=True)
    details = (
        f"{names[0]} served {a_share:.1%} of its requests within {slo}, {names[1]} "
        f"{b_share:.1%}; the difference is {interval.mean * 100:+.1f} points (95 % "
        f"interval {interval.low * 100:+.1f} to {interval.high * 100:+.1f}, "
        f"{len(pairs)} paired requests)"
    )
    sentence = f"{winner} won: {details}." if winner else _no_difference(details)
    return Verdict("goodput", winner, interval, len(pairs), sentence)


def _compare_latency(
    names: tuple[str, str], pairs: Sequence[tuple[Timeline, Timeline]], metric: str
) -> Verdict:
    latency_s = _LATENCIES[metric]
    log_ratios = []
    for a, b in pairs:
        if not a.succeeded or not b.succeeded:
            continue
        a_s = latency_s(a)
        b_s = latency_s(b)
        if a_s > 0 and b_s > 0:
            log_ratios.append(math.log(a_s / b_s))
    if len(log_ratios) < MIN_PAIRS:
        return _too_few(metric, len(log_ratios))
    interval = bootstrap_mean(log_ratios)
    winner = _winner(names, interval, is_more_better=False)
    ratio, low, high = (math.exp(value) for value in interval)
    details = (
        f"the {_TITLES[metric]} of {names[0]} is {ratio:.3f} times that of {names[1]} "
        f"(geometric mean, 95 % interval {low:.3f} to {high:.3f}, "
        f"{len(log_ratios)} paired requests)"
    )
    num_failed = [sum(not pair[side].succeeded for pair in pairs) for side in (0, 1)]
    if any(num_failed):
        details += (
            f"; requests that failed do not count: {num_failed[0]} of {names[0]}, "
            f"{num_failed[1]} of {names[1]}"
        )
    sentence = f"{winner} won: {details}." if winner else _no_difference(details)
    return Verdict(metric, winner, interval, len(log_ratios), sentence)


def _winner(
    names: tuple[str, str], interval: Interval, *, is_more_better: bool
) -> str | None:
    if interval.contains_zero:
        return None
    is_first_better = (interval.mean > 0) == is_more_better
    return names[0] if is_first_better else names[1]


def _no_difference(details: str) -> str:
    return f"No difference seen: {details}."


def _too_few(metric: str, count: int) -> Verdict:
    sentence = (
        f"No difference seen: only {count} pairs of requests can be compared by "
        f"{metric}, and a comparison needs {MIN_PAIRS}; send more requests."
    )
    return Verdict(metric, None, None, count, sentence)
