"""The report of a run: an HTML file without external resources, and JSON."""

import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

import proxy.ui
from benchmarks.bench.endpoint import Timeline
from benchmarks.bench.generator import RunResult, SideResult
from benchmarks.bench.results.figures import PERCENTILES
from benchmarks.bench.slo import Slo
from benchmarks.bench.workload import Workload

_MAX_POINTS = 5_000  # per side in a scatter plot; more would make the page slow
_QUANTILES = np.concatenate([np.arange(0, 99, 1.0), np.arange(99, 100.01, 0.1)])
_ROWS = {
    "time to first token (ms)": "ttft_ms",
    "token 1 to token 2 (ms)": "gap_1_2_ms",
    "between tokens (ms)": "itl_ms",
    "mean between tokens (ms)": "mean_itl_ms",
    "whole request per token (ms)": "normalised_ms",
    "whole request (ms)": "e2e_ms",
}


def html_report(result: RunResult, document: dict[str, Any], slo: Slo) -> str:
    """Return the report as HTML.

    Args:
        document: the result of `json_document`, with a verdict if sides are compared.
    """
    data = {
        "about": _about(document),
        "client": _client_text(document["client"]),
        "verdict": (document.get("verdict") or {}).get("sentence", ""),
        "warnings": _warnings(document),
        "table": _table(document["sides"]),
        "plots": _plots(result, slo),
    }
    folder = resources.files(__package__).joinpath("assets")
    vendored = Path(str(proxy.ui.__file__)).parent / "assets" / "vendor"
    parts = {
        "uplot_css": (vendored / "uplot.min.css").read_text(encoding="utf-8"),
        "uplot_js": (vendored / "uplot.min.js").read_text(encoding="utf-8"),
        "report_js": folder.joinpath("report.js").read_text(encoding="utf-8"),
        # Escape "<", because the name of a model or an error may contain "</script>".
        "data": json.dumps(data, allow_nan=False).replace("<", "\\u003c"),
    }
    html = folder.joinpath("report.html").read_text(encoding="utf-8")
    head, *rest = html.split("{{")
    for part in rest:
        name, _, text = part.partition("}}")
        head += parts[name] + text
    return head


def request_rows(side: SideResult, started_at: float) -> list[dict[str, Any]]:
    """Return one row of JSON per request. Times are seconds from the start."""
    return [
        {
            "index": record.index,
            "session": record.session,
            "turn": record.turn,
            "url": record.url,
            "due_s": round(record.timeline.due_at - started_at, 6),
            "send_lag_s": _send_lag_s(record.timeline),
            "first_token_s": _first_token_s(record.timeline, started_at),
            "end_s": round(record.timeline.ended_at - started_at, 6),
            "prompt_tokens": record.timeline.prompt_tokens,
            "output_tokens": record.timeline.output_tokens,
            "mean_itl_s": round(record.timeline.mean_itl_s, 6),
            "kv": record.timeline.kv,
            "error": record.timeline.error,
        }
        for record in side.records
    ]


def _send_lag_s(timeline: Timeline) -> float | None:
    if not timeline.sent_at:
        return None
    return round(timeline.sent_at - timeline.due_at, 6)


def _first_token_s(timeline: Timeline, started_at: float) -> float | None:
    if not timeline.token_at:
        return None
    return round(timeline.token_at[0] - started_at, 6)


def _about(document: dict[str, Any]) -> str:
    load = document["load"]
    slo = ", ".join(f"{key} <= {value:g} s" for key, value in document["slo"].items())
    return f"{document['date']}: {load['description']}; SLO: {slo}"


def _client_text(client: dict[str, Any]) -> str:
    send_lag = client["send_lag_ms"]
    loop_lag = client["loop_lag_ms"]
    return (
        f"Lag of the load generator: requests were sent up to {send_lag['max']} ms "
        f"late (p99 {send_lag['p99']} ms), and its event loop was up to "
        f"{loop_lag['max']} ms late (p99 {loop_lag['p99']} ms). Latencies count from "
        "the time at which a request was due."
    )


def _warnings(document: dict[str, Any]) -> list[str]:
    warnings = []
    if document["client"]["is_late"]:
        warnings.append(
            "The load generator itself was late: its host is too busy, and latencies "
            "are too long by up to its lag."
        )
    for side in document["sides"]:
        if side["errors"]:
            warnings.append(f"{side['name']}: errors {side['errors']}")
        if side["wrong_lengths"]:
            warnings.append(
                f"{side['name']}: {side['wrong_lengths']} outputs do not have the "
                "length that was requested"
            )
    return warnings


def _table(sides: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return the rows of the table; the first row and column are titles."""
    rows = [["", *(side["name"] for side in sides)]]
    rows.append(["endpoints", *(", ".join(side["urls"]) for side in sides)])
    rows.append(["model", *(side["model"] for side in sides)])
    rows.append(
        ["succeeded", *(f"{side['succeeded']} of {side['requests']}" for side in sides)]
    )
    rows.append(["within the SLO", *(f"{side['slo_share']:.1%}" for side in sides)])
    for title, name in {
        "goodput (requests/s)": "goodput_requests_per_s",
        "requests/s": "requests_per_s",
        "output tokens/s": "output_tokens_per_s",
    }.items():
        rows.append([title, *(f"{side[name]:.2f}" for side in sides)])
    for title, name in _ROWS.items():
        for level in PERCENTILES:
            values = [side[name][f"p{level}"] for side in sides]
            cells = ["-" if value is None else f"{value:.1f}" for value in values]
            rows.append([f"{title}, p{level}", *cells])
    rows.append(["KV moved (MB)", *(_megabytes(side) for side in sides)])
    rows.append(["prefix cache hits", *(_hit_rate(side) for side in sides)])
    kv_cells = ["/".join(map(str, side["baton_kv"].values())) for side in sides]
    rows.append(["prompt tokens transferred/recomputed/skipped", *kv_cells])
    return rows


def _megabytes(side: dict[str, Any]) -> str:
    moved = side["kv_bytes_moved"]
    return "-" if moved is None else f"{moved / 1e6:.1f}"


def _hit_rate(side: dict[str, Any]) -> str:
    rate = side["cache_hit_rate"]
    return "-" if rate is None else f"{rate:.1%}"


def _plots(result: RunResult, slo: Slo) -> list[dict[str, Any]]:
    started_at = result.started_at
    latencies = {
        "Time to first token": [
            [t.ttft_s for t in _succeeded(side)] for side in result.sides
        ],
        "Time between tokens": [
            [gap for t in _succeeded(side) for gap in t.gaps_s] for side in result.sides
        ],
        "Time of whole requests": [
            [t.e2e_s for t in _succeeded(side)] for side in result.sides
        ],
    }
    plots = [
        _plot(
            result,
            "Time to first token, by due time",
            "s since the start",
            "ms",
            [_ttft_points(side, started_at) for side in result.sides],
            kind="points",
        )
    ]
    for title, values in latencies.items():
        distributions = [_distribution(seconds) for seconds in values]
        plots.append(
            _plot(
                result, title, "ms", "% of them are shorter", distributions, is_log=True
            )
        )
    plots.append(
        _plot(
            result,
            "Requests in flight",
            "s since the start",
            "requests",
            [_in_flight(side, started_at) for side in result.sides],
        )
    )
    plots.append(
        _plot(
            result,
            "Goodput: requests within the SLO, by due time",
            "s since the start",
            "requests/s",
            [_goodput(side, started_at, slo) for side in result.sides],
        )
    )
    return plots


Points = tuple[list[float], list[float]]


def _plot(
    result: RunResult,
    title: str,
    x_label: str,
    y_label: str,
    points: Sequence[Points],
    *,
    kind: str = "line",
    is_log: bool = False,
) -> dict[str, Any]:
    series = [
        {"name": side.side.name, "x": x, "y": y}
        for side, (x, y) in zip(result.sides, points, strict=True)
    ]
    return {
        "title": title,
        "kind": kind,
        "is_log": is_log,
        "x_label": x_label,
        "y_label": y_label,
        "series": series,
    }


def _succeeded(side: SideResult) -> list[Timeline]:
    return [each.timeline for each in side.records if each.timeline.succeeded]


def _ttft_points(side: SideResult, started_at: float) -> Points:
    timelines = sorted(_succeeded(side), key=lambda timeline: timeline.due_at)
    step = max(1, -(-len(timelines) // _MAX_POINTS))
    chosen = timelines[::step]
    x = [round(timeline.due_at - started_at, 4) for timeline in chosen]
    y = [round(timeline.ttft_s * 1e3, 2) for timeline in chosen]
    return x, y


def _distribution(seconds: Sequence[float]) -> Points:
    """Return a distribution: x is a time in ms, y the percentage of times up to x."""
    if not seconds:
        return [], []
    values = np.percentile(seconds, _QUANTILES) * 1e3
    by_value: dict[float, float] = {}
    for value, quantile in zip(values, _QUANTILES, strict=True):
        # A logarithmic axis cannot show 0.
        by_value[max(round(float(value), 3), 0.001)] = round(float(quantile), 2)
    return list(by_value.keys()), list(by_value.values())


def _in_flight(side: SideResult, started_at: float) -> Points:
    changes: list[tuple[float, int]] = []
    for record in side.records:
        changes.append((record.timeline.due_at - started_at, 1))
        changes.append((record.timeline.ended_at - started_at, -1))
    count = 0
    counts: dict[float, float] = {0.0: 0.0}
    for time_s, change in sorted(changes):
        count += change
        counts[round(time_s, 2)] = float(count)
    return list(counts.keys()), list(counts.values())


def _goodput(side: SideResult, started_at: float, slo: Slo) -> Points:
    """Return the requests per second that met the SLO, in intervals of equal length."""
    interval_s = max(1.0, side.elapsed_s / 60)
    counts = [0] * (int(side.elapsed_s / interval_s) + 1)
    for record in side.records:
        index = int((record.timeline.due_at - started_at) / interval_s)
        counts[min(max(index, 0), len(counts) - 1)] += record.timeline.meets(slo)
    x = [round((index + 0.5) * interval_s, 2) for index in range(len(counts))]
    return x, [round(count / interval_s, 3) for count in counts]


def json_document(
    sides: Sequence[dict[str, Any]],
    client: dict[str, Any],
    *,
    date: str,
    load: dict[str, Any],
    workload: Workload,
    slo: Slo,
) -> dict[str, Any]:
    """Return the JSON document of a run, without the rows of single requests."""
    return {
        "benchmark": "bench",
        "date": date,
        "load": {
            **load,
            "name": workload.name,
            "sessions": len(workload.sessions),
            "requests": workload.num_requests,
        },
        "slo": slo.limits(),
        "sides": list(sides),
        "client": client,
    }
