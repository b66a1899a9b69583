"""Simulates servers with placement policies of the proxy, and compares the latencies.

    python -m benchmarks.routing --trace FILE [--shapes 2P2D,4D] [--load 1.0,1.5]
    python -m benchmarks.routing --mix agents|chats|documents|open|burst [...]

benchmarks/simulation/ simulates the servers; benchmarks/loads.py makes the requests.
The policy `known` is an ideal router that reads the state of the simulated servers. All
other policies run the proxy's own code. The last line of output is a JSON document.
"""

import argparse
import itertools
import json
import statistics
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.bench.errors import BenchError
from benchmarks.bench.traces import BLOCK_TOKENS, read_trace
from benchmarks.bench.workload import scaled
from benchmarks.loads import MIXES, FollowUp, Request, Workload, from_sessions
from benchmarks.routers import IdealRouter, ProxyRouter
from benchmarks.simulation.engine import Engine
from benchmarks.simulation.fleet import Fleet
from benchmarks.simulation.store import SimulatedStore
from benchmarks.simulation.times import EngineTimes
from proxy.placement.load_tracker import Disaggregate, Routing
from proxy.placement.server_load import USUAL_STEP_S

HEAD = (
    "shape load policy        TTFT p50     p99 s  ITL p50   p99 ms  TPOT ms  good"
    "  computed  alone"
)
ROW = "{:5} {:4} {:13} {:8.3f} {:9.3f} {:8.1f} {:8.1f} {:8.1f} {:5.3f} {:9.3f} {:6.2f}"


class Policy(NamedTuple):
    """A placement policy, as options of the proxy."""

    routing: Routing
    disaggregate: Disaggregate
    pulls: bool


POLICIES: dict[str, Policy | None] = {
    "round_robin": Policy("round_robin", "always", False),
    "least_loaded": Policy("least_loaded", "always", False),
    "always": Policy("auto", "always", False),
    "never": Policy("auto", "never", False),
    "auto": Policy("auto", "auto", False),
    "always_pulls": Policy("auto", "always", True),
    "auto_pulls": Policy("auto", "auto", True),
    "known": None,  # the ideal router
}


def figures(fleet: Fleet, args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of a simulated run, in the order of the table's columns.

    "good" is the share of requests within --ttft-s and --tpot-s. "computed" is the
    share of prompt tokens that servers computed, because no KV was cached. "alone" is
    the share of requests with both legs on one decode server.
    """
    requests = fleet.requests
    ttfts_s = sorted(request.first_token_s - request.arrival_s for request in requests)
    tpots_s = [_mean_time_per_token_s(request) for request in requests]
    num_good = 0
    for request, tpot_s in zip(requests, tpots_s, strict=True):
        ttft_s = request.first_token_s - request.arrival_s
        num_good += ttft_s <= args.ttft_s and tpot_s <= args.tpot_s
    gaps = Counter[int]()
    for engine in fleet.engines:
        gaps += engine.gaps
    prompt_tokens = sum(request.prompt_tokens for request in requests)
    computed_tokens = sum(request.computed_tokens for request in requests)
    num_on_decode_servers = sum(request.on_decode_server for request in requests)
    return {
        "ttft_p50_s": _percentile(ttfts_s, 0.5),
        "ttft_p99_s": _percentile(ttfts_s, 0.99),
        "itl_p50_ms": _counted_percentile(gaps, 0.5) * 0.1,
        "itl_p99_ms": _counted_percentile(gaps, 0.99) * 0.1,
        "tpot_mean_ms": statistics.mean(tpots_s) * 1e3,
        "good": num_good / len(requests),
        "computed": computed_tokens / prompt_tokens,
        "alone": num_on_decode_servers / len(requests),
        "requests": len(requests),
        "total_s": max(request.last_token_s for request in requests),
    }


def _mean_time_per_token_s(request: Request) -> float:
    decoding_s = request.last_token_s - request.first_token_s
    return decoding_s / max(request.generated_tokens - 1, 1)


def _percentile(sorted_values: list[float], share: float) -> float:
    index = min(int(share * len(sorted_values)), len(sorted_values) - 1)
    return sorted_values[index]


def _counted_percentile(counts: Counter[int], share: float) -> int:
    """Return the smallest value such that `share` of all values are equal or smaller.

    Args:
        counts: the number of times that each value occurs.
    """
    num_counted = 0.0
    for value in sorted(counts):
        num_counted += counts[value]
        if num_counted >= share * counts.total():
            return value
    return 0


def simulate(
    policy_name: str,
    shape: str,
    requests: list[Request],
    follow_up: FollowUp,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Simulate one policy, and return its figures.

    Args:
        shape: numbers of servers, such as "2P2D" or "4D".
    """
    prefills, _, decodes = shape.rstrip("D").rpartition("P")
    num_prefills = int(prefills or 0)
    num_engines = num_prefills + int(decodes or 0)
    target_s = args.itl_target_s
    times = EngineTimes()
    # Only the decode servers of a fleet with prefill servers have a target time between
    # tokens. Prefill servers have no streams. In a fleet without prefill servers, high
    # throughput is more important than the target.
    engines = [
        Engine(
            index,
            index < num_prefills,
            times,
            target_s if 0 < num_prefills <= index else None,
        )
        for index in range(num_engines)
    ]
    if args.store_tokens:
        stores = [
            SimulatedStore(host, args.store_tokens, times) for host in range(args.hosts)
        ]
        for engine in engines:
            engine.store = stores[engine.index % args.hosts]
    fleet = Fleet(engines, times, follow_up)
    policy = POLICIES[policy_name]
    if policy is None:
        fleet.router = IdealRouter(fleet, target_s)
    else:
        fleet.router = ProxyRouter(
            fleet, policy.routing, policy.disaggregate, target_s, policy.pulls
        )
    fleet.run(requests)
    return figures(fleet, args)


def _workload(args: argparse.Namespace, load: float) -> Workload:
    if args.mix:
        return MIXES[args.mix](load, args.requests)
    sessions = scaled(read_trace(args.trace, args.requests), load, 1.0)
    return from_sessions(sessions, BLOCK_TOKENS)


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.routing", description=__doc__)
    add = parser.add_argument
    add("--trace", type=Path, help="a trace that `baton bench` reads")
    add("--mix", choices=MIXES, help="a synthetic load")
    add("--shapes", default="2P2D", help="such as 4D,2P2D,1P3D")
    add("--load", default="1.0", help="factors of the load, such as 1.0,1.5")
    add(
        "--requests",
        type=int,
        default=4000,
        help="maximum number of requests; not used by the mix `documents`",
    )
    add("--policies", default=",".join(POLICIES))
    add(
        "--ttft-s",
        type=float,
        default=2.0,
        help="longest time to first token of a good request (s)",
    )
    add(
        "--tpot-s",
        type=float,
        default=0.025,
        help="longest mean time per output token of a good request (s)",
    )
    add(
        "--itl-target-s",
        type=float,
        default=USUAL_STEP_S,
        help="target time between tokens (s). If there are prefill servers, decode "
        "servers split prompts to stay within this target",
    )
    add(
        "--store-tokens",
        type=int,
        default=0,
        help="tokens that the KV store of each host holds (0: no stores)",
    )
    add(
        "--hosts",
        type=int,
        default=1,
        help="number of hosts; servers are assigned to them round-robin",
    )
    args = parser.parse_args(argv)
    if args.hosts < 1:
        parser.error("--hosts must be at least 1")
    if (args.trace is None) == (args.mix is None):
        parser.error("give either --trace FILE or --mix NAME")
    return args


def main(argv: list[str] | None = None) -> int:
    args = _parse_args(argv)
    shapes = args.shapes.split(",")
    loads = args.load.split(",")
    policies = args.policies.split(",")
    rows = []
    print(HEAD)
    for shape, load, policy in itertools.product(shapes, loads, policies):
        # A simulation changes its requests, so each simulation makes new requests.
        try:
            requests, follow_up = _workload(args, float(load))
        except BenchError as error:
            print(f"benchmarks.routing: error: {error}", file=sys.stderr)
            return 2
        row = {"shape": shape, "load": load, "policy": policy}
        row |= simulate(policy, shape, requests, follow_up, args)
        print(ROW.format(*row.values()), flush=True)
        rows.append(row)
    print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
