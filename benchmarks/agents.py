"""Plays sessions of coding agents, or a trace, and compares the number of computed
prompt tokens with the minimum: that of one server with an infinite cache.

    python -m benchmarks.agents --url URL [--metrics URL ...] [--length-scale 0.02]
    python -m benchmarks.agents --url URL --trace FILE --length-scale 0.03125
    python -m benchmarks.agents --write FILE     a trace for `baton bench --trace`

The sessions are made with published statistics (benchmarks/agent_trace.py), or read
from --trace. With the block hashes of a Mooncake trace, the minimum is exact, because
prompts share the same blocks of tokens as in the trace. A length scale of 1/32 turns
blocks of 512 tokens into blocks of 16 tokens.

Name each server behind a proxy by --metrics, because the proxy does not count computed
tokens. Restart the servers before each run: with the cached prompts of an earlier run,
they may compute fewer tokens than the minimum. If the servers are slower than the
trace, limit the requests in flight by --concurrency, or requests wait at the servers
until they time out. The last line of output is a JSON document.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from benchmarks.agent_trace import (
    agent_workload,
    min_computed_tokens,
    statistics_of,
    trace_lines,
)
from benchmarks.bench import options as bench_options
from benchmarks.bench.endpoint import open_session
from benchmarks.bench.errors import BenchError
from benchmarks.bench.generator import LoadOptions, Side, SideResult, run_load
from benchmarks.bench.progress import progress
from benchmarks.bench.prompts import BodyOptions
from benchmarks.bench.results.figures import side_figures
from benchmarks.bench.scrape import parse_samples
from benchmarks.bench.slo import parse_slo
from benchmarks.bench.traces import read_trace
from benchmarks.bench.workload import Workload, limited, scaled, with_poisson_arrivals

_COMPUTED = "baton_engine_step_prompt_tokens_total"
_BLOCK_TOKENS = "baton_kv_block_size_tokens"
_BLOCKS = "baton_kv_blocks_capacity"
_DEFAULT_RATE = 1.0
_TIMEOUT_S = 10.0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.agents",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="an endpoint")
    parser.add_argument(
        "--metrics",
        action="append",
        default=[],
        metavar="URL",
        help="a server whose /metrics are read (repeatable; default: --url)",
    )
    parser.add_argument(
        "--write",
        type=Path,
        metavar="FILE",
        help="write the trace to FILE and send nothing",
    )
    group = bench_options.add_trace_options(parser)
    bench_options.add_bounds(group)
    group.add_argument(
        "--sessions",
        type=bench_options.positive,
        default=10,
        help="sessions to make without --trace (default: 10)",
    )
    group.add_argument(
        "--vocab-size",
        type=bench_options.positive,
        default=256,
        help="random token ids are below this number (default: 256)",
    )
    group.add_argument(
        "--retention",
        choices=("in_memory", "24h"),
        help="prompt_cache_retention of the requests: keep their prompts cached longer",
    )
    group.add_argument("--model", help="model name (default: the first of /v1/models)")
    group.add_argument("--api-key", help="sent as bearer token")
    return parser


def make_workload(args: argparse.Namespace) -> Workload:
    """Return the sessions that the options describe.

    Raises:
        BenchError: options conflict, or the trace is invalid.
    """
    if args.write is not None and args.length_scale != 1.0:
        raise BenchError(
            "--write writes blocks of 512 tokens, which --length-scale would shorten: "
            "give --length-scale to the run that reads the file"
        )
    if args.trace is None:
        rate = args.rate or _DEFAULT_RATE
        workload = agent_workload(args.sessions, rate, args.seed)
    else:
        workload = read_trace(args.trace, args.max_requests)
        if args.rate is not None:
            workload = with_poisson_arrivals(workload, args.rate, args.seed)
    workload = scaled(workload, args.load, args.length_scale)
    duration_s = None if args.write else args.duration
    return limited(workload, args.max_requests, duration_s)


async def read_gauges(url: str, api_key: str | None) -> dict[str, float]:
    """Return the gauges of a server.

    Raises:
        BenchError: the server's /metrics cannot be read.
    """
    try:
        async with open_session(url, _TIMEOUT_S, api_key) as session:
            async with session.get("/metrics") as response:
                response.raise_for_status()
                return parse_samples(await response.text(), "gauge")
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise BenchError(
            f"{url}/metrics cannot be read ({error}); give the URL of a server, and an "
            "admin key by --api-key if it needs one"
        ) from None


async def play(
    side: Side, workload: Workload, options: LoadOptions
) -> tuple[SideResult, list[dict[str, float]]]:
    """Send the workload. Return the result, and the gauges of each server.

    Raises:
        BenchError: an endpoint cannot be used, or a server is not a Baton server.
    """
    gauges = [
        await read_gauges(url, options.api_key)
        for url in side.metrics_urls or side.urls
    ]
    for url, values in zip(side.metrics_urls or side.urls, gauges, strict=True):
        if _BLOCK_TOKENS not in values:
            raise BenchError(
                f"{url}/metrics has no {_BLOCK_TOKENS}: it is no Baton server; name "
                "each server behind the proxy by --metrics URL"
            )
    with progress(workload.num_requests) as shown:
        run = await run_load([side], workload, options, shown.on_end)
    return run.sides[0], gauges


def figures(
    result: SideResult, workload: Workload, gauges: list[dict[str, float]]
) -> dict[str, Any]:
    """Return the figures of a run, in the order in which they are printed."""
    sent = sorted(result.records, key=lambda record: record.timeline.sent_at)
    requests = [(r.session, r.turn) for r in sent if r.timeline.succeeded]
    block_tokens = int(min(values[_BLOCK_TOKENS] for values in gauges))
    pool_tokens = [int(v[_BLOCKS] * v[_BLOCK_TOKENS]) for v in gauges]
    min_computed = min_computed_tokens(workload, requests, block_tokens)
    computed = sum(
        counters.get(_COMPUTED, 0.0) for counters in result.counters.values()
    )
    side = side_figures(result, workload, parse_slo("ttft=1"))
    return {
        "computed_tokens": int(computed),
        "min_computed_tokens": min_computed,
        "computed_over_least": round(computed / max(min_computed, 1), 4),
        "prompt_tokens": side["prompt_tokens"],
        "computed_share": round(computed / max(side["prompt_tokens"], 1), 4),
        "working_set_tokens": statistics_of(workload).working_set_tokens,
        "pool_tokens": pool_tokens,
        "block_tokens": block_tokens,
        "requests": side["requests"],
        "succeeded": side["succeeded"],
        "skipped": side["skipped"],
        "errors": side["errors"],
        "elapsed_s": side["elapsed_s"],
        "requests_per_s": side["requests_per_s"],
        "output_tokens_per_s": side["output_tokens_per_s"],
        "ttft_ms": side["ttft_ms"],
        "mean_itl_ms": side["mean_itl_ms"],
        "cache_hit_rate": side["cache_hit_rate"],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark.

    Returns:
        The exit status: 0 if every request succeeded, 1 if one failed, 2 after an
        error.
    """
    args = make_parser().parse_args(argv)
    try:
        workload = make_workload(args)
        if args.write is not None:
            args.write.write_text("".join(trace_lines(workload)))
            print(json.dumps(dataclasses.asdict(statistics_of(workload))))
            return 0
        urls = [bench_options.server_url("--metrics", url) for url in args.metrics]
        url = bench_options.server_url("--url", args.url)
        side = Side("agents", (url,), tuple(urls))
        options = LoadOptions(
            body=BodyOptions(
                vocab_size=args.vocab_size, seed=args.seed, retention=args.retention
            ),
            concurrency=args.concurrency or bench_options.OPEN_LOOP_CONCURRENCY,
            model=args.model,
            api_key=args.api_key,
            warmup=0,  # warm-up requests would add computed tokens
            duration_s=args.duration,
            drain_s=args.drain_s,
        )
        result, gauges = uvloop.run(play(side, workload, options))
    except (BenchError, OSError) as error:
        print(f"python -m benchmarks.agents: error: {error}", file=sys.stderr)
        return 2
    document = figures(result, workload, gauges)
    for name, value in document.items():
        print(f"{name:<24}{value}")
    print(json.dumps(document))
    return 0 if document["succeeded"] == workload.num_requests else 1


if __name__ == "__main__":
    sys.exit(main())
