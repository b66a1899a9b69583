"""The figures of one side of a run, and the table that shows all sides."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from benchmarks.bench.client_lag import MAX_USUAL_LAG_S, summary
from benchmarks.bench.endpoint import Timeline
from benchmarks.bench.generator import RunResult, SideResult
from benchmarks.bench.scrape import kv_figures
from benchmarks.bench.slo import Slo
from benchmarks.bench.workload import Workload

PERCENTILES = (50, 90, 99)
KV_FIELDS = ("transferred", "recomputed", "skipped")
_LATENCY_TITLES = {
    "ttft_ms": "time to first token",
    "gap_1_2_ms": "token 1 to token 2",
    "itl_ms": "between tokens",
    "mean_itl_ms": "mean between tokens",
    "normalised_ms": "whole request per token",
    "e2e_ms": "whole request",
}


def union_s(spans: Iterable[tuple[float, float]]) -> float:
    """Return the time that at least one of the (start, end) spans covers."""
    covered = 0.0
    covered_until = float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, covered_until))
        covered_until = max(covered_until, end)
    return covered


def side_figures(result: SideResult, workload: Workload, slo: Slo) -> dict[str, Any]:
    """Return all figures of a side.

    Latencies are in ms, and only of requests that succeeded. `decode_tokens_per_s` is
    the number of output tokens except first tokens, divided by the time in which at
    least one request was between its first and its last token.
    """
    timelines = [record.timeline for record in result.records]
    elapsed_s = result.elapsed_s
    succeeded = [timeline for timeline in timelines if timeline.succeeded]
    num_output_tokens = sum(timeline.output_tokens for timeline in succeeded)
    decoding_s = union_s((t.token_at[0], t.token_at[-1]) for t in succeeded)
    slo_met = sum(timeline.meets(slo) for timeline in timelines)
    return {
        "name": result.side.name,
        "urls": list(result.side.urls),
        "model": result.model,
        "requests": len(timelines),
        "succeeded": len(succeeded),
        "skipped": result.skipped,
        "errors": dict(Counter(t.error for t in timelines if t.error)),
        "wrong_lengths": _count_wrong_lengths(result, workload),
        "elapsed_s": round(elapsed_s, 3),
        "prompt_tokens": sum(timeline.prompt_tokens for timeline in succeeded),
        "output_tokens": num_output_tokens,
        "requests_per_s": _rate(len(succeeded), elapsed_s),
        "output_tokens_per_s": _rate(num_output_tokens, elapsed_s),
        "decode_tokens_per_s": _rate(num_output_tokens - len(succeeded), decoding_s),
        **_latencies(succeeded),
        "slo": slo.limits(),
        "slo_met": slo_met,
        "slo_share": round(slo_met / len(timelines), 4) if timelines else 0.0,
        "goodput_requests_per_s": _rate(slo_met, elapsed_s),
        "baton_kv": {
            name: sum(t.kv.get(name, 0) for t in succeeded) for name in KV_FIELDS
        },
        **kv_figures(result.counters),
        "counters": result.counters,
    }


def _latencies(succeeded: Sequence[Timeline]) -> dict[str, Any]:
    return {
        "ttft_ms": _percentiles_ms([t.ttft_s for t in succeeded]),
        "gap_1_2_ms": _percentiles_ms(
            [t.gaps_s[0] for t in succeeded if len(t.token_at) > 1]
        ),
        "itl_ms": _percentiles_ms([gap for t in succeeded for gap in t.gaps_s]),
        "mean_itl_ms": _percentiles_ms(
            [t.mean_itl_s for t in succeeded if t.output_tokens > 1]
        ),
        "normalised_ms": _percentiles_ms([t.normalised_s for t in succeeded]),
        "e2e_ms": _percentiles_ms([t.e2e_s for t in succeeded]),
    }


def _count_wrong_lengths(result: SideResult, workload: Workload) -> int:
    """Return the number of answers without the length that the workload demands."""
    return sum(
        record.timeline.output_tokens
        != workload.sessions[record.session].turns[record.turn].output_tokens
        for record in result.records
        if record.timeline.succeeded
    )


def _rate(count: int, seconds: float) -> float:
    return round(count / seconds, 3) if seconds > 0 else 0.0


def _percentiles_ms(seconds: Sequence[float]) -> dict[str, float | None]:
    """Return the percentiles in ms. All are None if `seconds` is empty."""
    if not seconds:
        return {f"p{level}": None for level in PERCENTILES}
    values = np.percentile(seconds, PERCENTILES)
    return {
        f"p{level}": round(float(value) * 1e3, 3)
        for level, value in zip(PERCENTILES, values, strict=True)
    }


def client_figures(result: RunResult) -> dict[str, Any]:
    """Return how late the load generator was, in ms.

    `send_lag_ms` is the time from a request's due time until this program began to send
    the request, including a wait because of --concurrency. `loop_lag_ms` is how late
    the event loop woke a sleeping task. It may read tokens with the same delay.
    """
    send_lags_s = [
        record.timeline.sent_at - record.timeline.due_at
        for side in result.sides
        for record in side.records
        if record.timeline.sent_at
    ]
    loop_lag = summary(result.loop_lags_s)
    p99_ms = loop_lag["p99"] or 0.0
    return {
        "send_lag_ms": summary(send_lags_s),
        "loop_lag_ms": loop_lag,
        "is_late": p99_ms > MAX_USUAL_LAG_S * 1e3,
    }


def table(sides: Sequence[dict[str, Any]], client: dict[str, Any]) -> str:
    """Return the figures of all sides and of the load generator as readable text."""
    lines = []
    for side in sides:
        lines += _side_lines(side, has_title=len(sides) > 1)
    lag = client["send_lag_ms"]
    loop_lag = client["loop_lag_ms"]
    lines.append(
        f"load generator: requests sent {_ms(lag['p99'])} ms late (p99, at most "
        f"{_ms(lag['max'])}), event loop {_ms(loop_lag['p99'])} ms late (p99, at most "
        f"{_ms(loop_lag['max'])})"
    )
    if client["is_late"]:
        lines.append(
            "WARNING: the load generator itself was late; its host is too busy, and "
            "latencies are too long by up to its lag"
        )
    return "\n".join(lines)


def _side_lines(side: dict[str, Any], *, has_title: bool) -> list[str]:
    errors = f", errors: {side['errors']}" if side["errors"] else ""
    skipped = f", {side['skipped']} not sent" if side["skipped"] else ""
    header = "".join(f"{f'p{level}':>10}" for level in PERCENTILES)
    lines = []
    if has_title:
        lines.append(f"-- {side['name']}: {', '.join(side['urls'])} ({side['model']})")
    lines += [
        f"{side['succeeded']} of {side['requests']} requests "
        f"in {side['elapsed_s']:.1f} s{skipped}{errors}",
        f"{side['requests_per_s']:.2f} requests/s, "
        f"{side['output_tokens_per_s']:.1f} output tokens/s, "
        f"{side['decode_tokens_per_s']:.1f} while decoding",
        f"{'ms':<28}{header}",
    ]
    for name, title in _LATENCY_TITLES.items():
        cells = "".join(f"{_ms(value):>10}" for value in side[name].values())
        lines.append(f"{title:<28}{cells}")
    limits = ", ".join(f"{key} <= {limit:g} s" for key, limit in side["slo"].items())
    lines.append(
        f"goodput {side['goodput_requests_per_s']:.2f} requests/s: "
        f"{side['slo_met']} of {side['requests']} requests with {limits}"
    )
    if any(side["baton_kv"].values()):
        kv = ", ".join(f"{name} {n}" for name, n in side["baton_kv"].items())
        lines.append(f"prompt tokens: {kv}")
    if side["kv_bytes_moved"] is not None:
        lines.append(f"KV moved between servers: {side['kv_bytes_moved'] / 1e6:.1f} MB")
    if side["cache_hit_rate"] is not None:
        lines.append(f"prefix caches: {side['cache_hit_rate']:.1%} of the tokens")
    if side["wrong_lengths"]:
        lines.append(
            f"WARNING: {side['wrong_lengths']} outputs do not have the length that "
            "was requested"
        )
    return lines


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
