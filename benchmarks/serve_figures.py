"""The figures of benchmarks.serve: percentiles, rates and the table that shows them."""

import argparse
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from benchmarks.endpoint import Timeline

PERCENTILES = (50, 90, 99)
KV_FIELDS = ("transferred", "recomputed", "skipped")
_LATENCY_TITLES = {
    "ttft_ms": "time to first token",
    "gap_1_2_ms": "token 1 to token 2",
    "itl_ms": "between tokens",
    "mean_itl_ms": "mean between tokens",
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


def figures(
    timelines: Sequence[Timeline], elapsed_s: float, options: argparse.Namespace
) -> dict[str, Any]:
    """Return all figures of a run.

    Latencies are in ms and only of requests that succeeded. `decode_tokens_per_s` is
    the number of tokens after each request's first token, divided by the time in which
    at least one request was between its first and its last token.

    Args:
        elapsed_s: seconds of the whole run.
    """
    succeeded = [timeline for timeline in timelines if timeline.succeeded]
    num_output_tokens = sum(timeline.output_tokens for timeline in succeeded)
    decoding_s = union_s((t.token_at[0], t.token_at[-1]) for t in succeeded)
    slo = {"ttft_ms": options.slo_ttft_ms, "itl_ms": options.slo_itl_ms}
    slo_met = sum(timeline.meets_slo(**slo) for timeline in timelines)
    return {
        "requests": len(timelines),
        "succeeded": len(succeeded),
        "errors": dict(Counter(t.error for t in timelines if t.error)),
        "short_outputs": sum(t.output_tokens != options.output_len for t in succeeded),
        "elapsed_s": round(elapsed_s, 3),
        "prompt_tokens": sum(timeline.prompt_tokens for timeline in succeeded),
        "output_tokens": num_output_tokens,
        "requests_per_s": _rate(len(succeeded), elapsed_s),
        "output_tokens_per_s": _rate(num_output_tokens, elapsed_s),
        "decode_tokens_per_s": _rate(num_output_tokens - len(succeeded), decoding_s),
        "ttft_ms": _percentiles_ms([t.ttft_s for t in succeeded]),
        "gap_1_2_ms": _percentiles_ms(
            [t.gaps_s[0] for t in succeeded if len(t.token_at) > 1]
        ),
        "itl_ms": _percentiles_ms([gap for t in succeeded for gap in t.gaps_s]),
        "mean_itl_ms": _percentiles_ms(
            [t.mean_itl_s for t in succeeded if t.output_tokens > 1]
        ),
        "e2e_ms": _percentiles_ms([t.ended_at - t.due_at for t in succeeded]),
        "slo": slo,
        "slo_met": slo_met,
        "goodput_requests_per_s": _rate(slo_met, elapsed_s),
        "baton_kv": {
            name: sum(t.kv.get(name, 0) for t in succeeded) for name in KV_FIELDS
        },
    }


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


def table(result: dict[str, Any]) -> str:
    """Return the figures as a table for people."""
    errors = f", errors: {result['errors']}" if result["errors"] else ""
    header = "".join(f"{f'p{level}':>10}" for level in PERCENTILES)
    lines = [
        f"{result['succeeded']} of {result['requests']} requests "
        f"in {result['elapsed_s']:.1f} s{errors}",
        f"{result['requests_per_s']:.2f} requests/s, "
        f"{result['output_tokens_per_s']:.1f} output tokens/s, "
        f"{result['decode_tokens_per_s']:.1f} while decoding",
        f"{'ms':<28}{header}",
    ]
    for name, title in _LATENCY_TITLES.items():
        cells = ("-" if ms is None else f"{ms:.1f}" for ms in result[name].values())
        lines.append(f"{title:<28}" + "".join(f"{cell:>10}" for cell in cells))
    slo = result["slo"]
    lines.append(
        f"goodput {result['goodput_requests_per_s']:.2f} requests/s: "
        f"{result['slo_met']} requests with TTFT <= {slo['ttft_ms']:g} ms "
        f"and mean ITL <= {slo['itl_ms']:g} ms"
    )
    if any(result["baton_kv"].values()):
        kv = ", ".join(f"{name} {n}" for name, n in result["baton_kv"].items())
        lines.append(f"prompt tokens: {kv}")
    if result["short_outputs"]:
        lines.append(
            f"WARNING: {result['short_outputs']} outputs do not have the length "
            "of --output-len"
        )
    return "\n".join(lines)
