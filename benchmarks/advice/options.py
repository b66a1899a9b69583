"""The options of `baton bench advise`. This module must stay fast to import."""

import argparse
from pathlib import Path

from benchmarks.bench import options as bench_options

MAX_SERVERS = 16


def add_advise_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `baton bench advise` to its parser."""
    parser.description = (
        "Recommend replicas or a prefill/decode split for a trace of your own traffic. "
        "The command measures the constants of this host with real servers (or reads "
        "them from --constants), simulates the trace on every deployment of --servers "
        "servers with the proxy's own placement, and recommends one deployment. "
        "--verify runs the best replicas and the best split for real, and prints the "
        "error of the predictions."
    )
    add_server_options(parser)
    parser.add_argument(
        "--verify",
        action="store_true",
        help="run the best replicas and the best split, and compare",
    )
    bench_options.add_trace_options(parser)
    parser.add_argument(
        "--slo",
        default=bench_options.DEFAULT_SLO,
        help="limits within which a request counts for goodput, in seconds: ttft, itl "
        f"(mean per token), e2e (default: {bench_options.DEFAULT_SLO})",
    )


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Add the options about the servers and the constants of the host."""
    add = parser.add_argument_group("servers").add_argument
    add("--model", required=True, help="name or folder of the model")
    add(
        "--servers",
        type=bench_options.positive,
        required=True,
        help=f"number of servers: one per GPU, or CPU servers (2 to {MAX_SERVERS})",
    )
    add(
        "--device",
        choices=("cpu", "cuda"),
        help="what the servers compute on (default: cuda if nvidia-smi is there)",
    )
    add(
        "--devices",
        help="GPUs that are assigned to the servers round-robin, such as 0,1 (default: "
        "one GPU per server)",
    )
    add(
        "--server-options",
        default="",
        metavar="OPTIONS",
        help="options of all servers, each of them one word, such as "
        "--server-options=--gpu-memory-utilization=0.45",
    )
    add(
        "--start-timeout-s",
        type=bench_options.positive_float,
        default=600.0,
        help="time within which the servers have to be ready (s, default: 600)",
    )
    add(
        "--constants",
        type=Path,
        metavar="FILE",
        help="constants of --save-constants, instead of measuring them",
    )
    add("--save-constants", type=Path, metavar="FILE", help="write the constants here")
