"""The options of `baton bench` and `baton bench compare`, and their load."""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.bench.errors import BenchError
from benchmarks.bench.generator import LoadOptions
from benchmarks.bench.prompts import FIRST_TOKEN_ID, BodyOptions
from benchmarks.bench.slo import Slo, parse_slo
from benchmarks.bench.traces import read_trace
from benchmarks.bench.workload import (
    Workload,
    limited,
    scaled,
    synthetic,
    with_poisson_arrivals,
)

CLOSED_LOOP_CONCURRENCY = 8
OPEN_LOOP_CONCURRENCY = 16_384
SYNTHETIC_REQUESTS = 64
INPUT_TOKENS = 256
OUTPUT_TOKENS = 64
DEFAULT_SLO = "ttft=1,itl=0.1"


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the load, its limits, the requests and the report."""
    add_bounds(add_trace_options(parser))
    _add_request_options(parser)
    _add_report_options(parser)


def add_bounds(group: argparse._ArgumentGroup) -> None:
    """Add --concurrency and --drain-s, which limit the sessions in flight and the
    time to finish.
    """
    group.add_argument(
        "--concurrency",
        type=positive,
        help="closed loop: sessions in flight. With --rate or with the times of a "
        f"trace: the maximum (default: {CLOSED_LOOP_CONCURRENCY} in a closed loop, "
        f"else {OPEN_LOOP_CONCURRENCY})",
    )
    group.add_argument(
        "--drain-s",
        type=positive_float,
        default=120.0,
        help="requests that have not finished this long after the last arrival, or in "
        "closed loops and conversations after --duration, count as failed "
        "(s, default: 120)",
    )


def add_trace_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the options for the number of requests, their arrivals and their lengths.

    Returns:
        The group of these options.
    """
    group = parser.add_argument_group("load")
    group.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="requests of a trace: JSON lines of Mooncake, of conversations "
        "(session_id, delay), or CSV of Azure. Without it, all prompts have "
        "--input-len tokens",
    )
    group.add_argument(
        "--rate",
        type=positive_float,
        help="open loop: sessions per second of a Poisson process. With --trace it "
        "replaces the trace's times (default: the trace's times; without a trace a "
        "closed loop)",
    )
    group.add_argument(
        "--max-requests",
        type=positive,
        help=f"requests to send (default: {SYNTHETIC_REQUESTS}; all of a trace)",
    )
    group.add_argument(
        "--duration",
        type=positive_float,
        default=600.0,
        help="no request is sent later than this after the start (s, default: 600)",
    )
    group.add_argument(
        "--load",
        type=positive_float,
        default=1.0,
        help="replay a trace this many times as fast (default: 1)",
    )
    group.add_argument(
        "--length-scale",
        type=positive_float,
        default=1.0,
        help="multiply all lengths of a trace, for a model with a shorter context "
        "(default: 1)",
    )
    group.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed of prompts and arrivals; use a new seed for the next run on the "
        "same servers, because their prefix caches hold the prompts of this seed",
    )
    return group


def _add_request_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("requests")
    group.add_argument("--model", help="model name (default: the first of /v1/models)")
    group.add_argument(
        "--endpoint", choices=("completions", "chat"), default="completions"
    )
    group.add_argument("--api-key", help="sent as bearer token")
    group.add_argument(
        "--input-len",
        type=positive,
        help=f"prompt length without a trace (tokens, default: {INPUT_TOKENS})",
    )
    group.add_argument(
        "--shared-len",
        type=int,
        help="length of the prefix that all prompts share, without a trace (tokens, "
        "default: 0)",
    )
    group.add_argument(
        "--output-len",
        type=positive,
        help=f"output length without a trace (tokens, default: {OUTPUT_TOKENS})",
    )
    group.add_argument(
        "--prompt",
        choices=("token-ids", "words"),
        help="form of the prompts (default: token-ids; words for chat)",
    )
    group.add_argument(
        "--vocab-size",
        type=int,
        default=256,
        help="random token ids are below this number (default: 256)",
    )
    group.add_argument("--temperature", type=float, default=0.0)
    group.add_argument(
        "--no-ignore-eos", action="store_true", help="outputs may end early"
    )
    group.add_argument(
        "--schema",
        action="store_true",
        help="outputs follow a JSON schema (a list of objects)",
    )
    group.add_argument(
        "--timeout-s",
        type=positive_float,
        default=120.0,
        help="longest time without data from the endpoint (s, default: 120)",
    )
    group.add_argument(
        "--warmup",
        type=int,
        default=1,
        help="warm-up requests to each endpoint, one after the other (default: 1)",
    )


def _add_report_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("report")
    group.add_argument(
        "--slo",
        default=DEFAULT_SLO,
        help="limits within which a request counts for goodput, in seconds: ttft, itl "
        f"(mean per token), e2e (default: {DEFAULT_SLO})",
    )
    group.add_argument(
        "--save",
        metavar="NAME",
        help="write NAME.json and NAME.html (default: bench-TIME in the working "
        "directory)",
    )


def positive(text: str) -> int:
    """Parse a whole number above 0, as a type of argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not above 0")
    return value


def positive_float(text: str) -> float:
    """Parse a finite number above 0, as a type of argparse."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a finite number above 0")
    return value


def server_url(option: str, text: str) -> str:
    """Return the URL of a server without /v1.

    Raises:
        BenchError: the text is not the URL of a server.
    """
    url = text.rstrip("/").removesuffix("/v1")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or parts.path or not parts.netloc:
        raise BenchError(
            f"{option} {text} is not the URL of a server; write http://host:port "
            "or https://host:port"
        )
    return url


def load_options(args: argparse.Namespace, workload: Workload) -> LoadOptions:
    """Return the options with which the load is sent.

    Raises:
        BenchError: options conflict.
    """
    is_chat = args.endpoint == "chat"
    prompt = args.prompt or ("words" if is_chat else "token-ids")
    if is_chat and prompt == "token-ids":
        raise BenchError(
            "--prompt token-ids: a chat message has no token ids; use words"
        )
    if args.vocab_size <= FIRST_TOKEN_ID:
        raise BenchError(
            f"--vocab-size {args.vocab_size} must be above {FIRST_TOKEN_ID}"
        )
    if args.warmup < 0:
        raise BenchError(f"--warmup {args.warmup} must be at least 0")
    default_concurrency = OPEN_LOOP_CONCURRENCY
    if workload.is_closed:
        default_concurrency = CLOSED_LOOP_CONCURRENCY
    body = BodyOptions(
        is_chat=is_chat,
        uses_words=prompt == "words",
        vocab_size=args.vocab_size,
        temperature=args.temperature,
        seed=args.seed,
        ignores_eos=not args.no_ignore_eos,
        has_schema=args.schema,
    )
    return LoadOptions(
        body=body,
        concurrency=args.concurrency or default_concurrency,
        model=args.model,
        api_key=args.api_key,
        warmup=args.warmup,
        duration_s=args.duration,
        drain_s=args.drain_s,
        timeout_s=args.timeout_s,
    )


def make_workload(args: argparse.Namespace) -> Workload:
    """Return the load that the options describe.

    Raises:
        BenchError: options conflict, or the trace is invalid.
    """
    if args.trace is None:
        if args.load != 1.0 or args.length_scale != 1.0:
            raise BenchError(
                "--load and --length-scale need --trace; without a trace use --rate, "
                "--input-len and --output-len"
            )
        input_tokens = args.input_len or INPUT_TOKENS
        shared_tokens = args.shared_len or 0
        if not 0 <= shared_tokens <= input_tokens:
            raise BenchError(
                f"--shared-len {shared_tokens} must be from 0 to --input-len"
            )
        workload = synthetic(
            num_requests=args.max_requests or SYNTHETIC_REQUESTS,
            rate=args.rate,
            input_tokens=input_tokens,
            shared_tokens=shared_tokens,
            output_tokens=args.output_len or OUTPUT_TOKENS,
            seed=args.seed,
        )
    else:
        _refuse_lengths(args)
        workload = read_trace(args.trace, args.max_requests)
        workload = scaled(workload, args.load, args.length_scale)
        if args.rate is not None:
            workload = with_poisson_arrivals(workload, args.rate, args.seed)
    return limited(workload, args.max_requests, args.duration)


def _refuse_lengths(args: argparse.Namespace) -> None:
    """Raise BenchError if an option sets a length, although a trace has all lengths."""
    for name in ("input_len", "shared_len", "output_len"):
        if getattr(args, name, None) is not None:  # `advise` has no such options
            option = f"--{name.replace('_', '-')}"
            raise BenchError(
                f"{option} has no effect with --trace, which has the length of each "
                "request; use --length-scale"
            )


def make_slo(args: argparse.Namespace) -> Slo:
    """Return the limits of --slo. Raises BenchError if they are invalid."""
    return parse_slo(args.slo)


def describe_load(
    args: argparse.Namespace, workload: Workload, options: LoadOptions
) -> dict[str, Any]:
    """Return the description of the load for the report."""
    if workload.is_closed:
        arrivals = f"closed loop, {options.concurrency} sessions in flight"
    elif args.rate is not None:
        arrivals = f"Poisson arrivals, {args.rate:g} sessions/s"
    else:
        arrivals = f"arrivals of the trace, {args.load:g} times as fast"
    requests = f"{workload.num_requests} requests of {workload.name}"
    return {
        "description": f"{requests}, {arrivals}",
        "rate": args.rate,
        "concurrency": options.concurrency,
        "trace": None if args.trace is None else str(args.trace),
        "load": args.load,
        "length_scale": args.length_scale,
        "seed": args.seed,
        "duration_s": args.duration,
        "endpoint": args.endpoint,
    }


def save_paths(name: str) -> tuple[Path, Path]:
    """Create the files of the JSON document and of the report. Return their paths.

    Raises:
        BenchError: a file cannot be written.
    """
    base = name.removesuffix(".json").removesuffix(".html")
    paths = (Path(f"{base}.json"), Path(f"{base}.html"))
    for path in paths:
        try:
            path.touch()
        except OSError as error:
            raise BenchError(
                f"--save: {path} cannot be written: {error.strerror}"
            ) from None
    return paths


def unique_names(urls: Sequence[str]) -> list[str]:
    """Return a unique name for each endpoint, with its host and port."""
    names = [urlsplit(url).netloc for url in urls]
    if len(set(names)) == len(names):
        return names
    return [f"{name} ({number})" for number, name in enumerate(names, 1)]
