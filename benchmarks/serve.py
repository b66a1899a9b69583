"""Load on an OpenAI endpoint: latencies, throughput and goodput.

    python -m benchmarks.serve --url http://127.0.0.1:8000

With --rate, requests arrive by a Poisson process, independently of how fast the
endpoint answers (open loop). A request's time to first token and total time then count
from the moment at which the request was due. Without --rate, --concurrency requests are
in flight at any time (closed loop).

Prompts are random and seeded. Outputs are forced to their full length with ignore_eos.
A request counts for goodput if its time to first token and its mean time between tokens
are within the limits of --slo-ttft-ms and --slo-itl-ms. Progress goes to standard
error. The last line of output is one JSON document, which is also written to the file
of --save.
"""

import argparse
import asyncio
import gc
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import uvloop

from benchmarks.endpoint import Timeline, get_model, open_session, stream
from benchmarks.serve_figures import figures, table
from benchmarks.serve_requests import FIRST_TOKEN_ID, arrivals_s, request_body

_REPORTED_OPTIONS = (
    "url",
    "model",
    "endpoint",
    "rate",
    "concurrency",
    "input_len",
    "shared_len",
    "output_len",
    "seed",
)
_PROGRESS_INTERVAL_S = 5.0
_CLOSED_LOOP_CONCURRENCY = 8
_OPEN_LOOP_CONCURRENCY = 16_384


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="the endpoint, without /v1")
    add("--model", help="model name (default: the first of /v1/models)")
    add("--endpoint", choices=("completions", "chat"), default="completions")
    add("--api-key", help="sent as bearer token")
    _add_load_options(parser)
    _add_prompt_options(parser)
    add(
        "--slo-ttft-ms",
        type=float,
        default=1000.0,
        help="longest time to first token that counts for goodput (ms)",
    )
    add(
        "--slo-itl-ms",
        type=float,
        default=100.0,
        help="longest mean time per token that counts for goodput (ms)",
    )
    add(
        "--timeout-s",
        type=float,
        default=120.0,
        help="longest time without data from the endpoint (s)",
    )
    add(
        "--save",
        type=Path,
        metavar="FILE",
        help="file that gets the JSON document (default: serve-TIME.json in the "
        "working directory)",
    )
    add(
        "--max-duration-s",
        type=float,
        default=600.0,
        help="time after which requests that have not finished count as failed (s)",
    )
    return parser


def _add_load_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--num-requests", type=_positive, default=64, help="requests to measure")
    add(
        "--warmup",
        type=int,
        default=1,
        help="warm-up requests, sent one after the other before the measurement",
    )
    add("--rate", type=float, help="arrivals per second (default: closed loop)")
    add(
        "--concurrency",
        type=_positive,
        help=f"maximum requests in flight (default: {_CLOSED_LOOP_CONCURRENCY} "
        f"without --rate, else {_OPEN_LOOP_CONCURRENCY})",
    )


def _add_prompt_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--input-len", type=_positive, default=256, help="prompt length (tokens)")
    add(
        "--shared-len",
        type=int,
        default=0,
        help="length of the prefix that all prompts share (tokens)",
    )
    add("--output-len", type=_positive, default=64, help="output length (tokens)")
    add(
        "--prompt",
        choices=("token-ids", "words"),
        help="form of the prompts (default: token-ids; words for chat)",
    )
    add(
        "--vocab-size",
        type=int,
        default=256,
        help="random token ids are below this number",
    )
    add("--temperature", type=float, default=0.0)
    add(
        "--seed",
        type=int,
        default=0,
        help="seed of prompts and arrivals; use a new seed for the next run on the "
        "same servers, because their prefix caches hold the prompts of this seed",
    )
    add("--no-ignore-eos", action="store_true", help="outputs may end early")
    add(
        "--schema",
        action="store_true",
        help="outputs follow a JSON schema (a list of objects)",
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not above 0")
    return value


def complete_options(
    parser: argparse.ArgumentParser, options: argparse.Namespace
) -> None:
    """Set the options that depend on others. Create the file of --save, if given.

    Exits with a message if an option is invalid or options conflict.
    """
    options.url = options.url.rstrip("/").removesuffix("/v1")
    url = urlsplit(options.url)
    if url.scheme not in ("http", "https") or url.path:
        parser.error(
            f"--url {options.url} is not the URL of a server; write http://host:port "
            "or https://host:port"
        )
    if options.save is not None:
        try:
            options.save.touch()
        except OSError as error:
            parser.error(f"--save {options.save} cannot be written: {error.strerror}")
    if options.rate is not None and not 0 < options.rate < float("inf"):
        parser.error(
            f"--rate {options.rate} must be finite and above 0; "
            "leave it out for a closed loop"
        )
    if not 0 <= options.shared_len <= options.input_len:
        parser.error(f"--shared-len {options.shared_len} must be from 0 to --input-len")
    if options.vocab_size <= FIRST_TOKEN_ID:
        parser.error(
            f"--vocab-size {options.vocab_size} must be above {FIRST_TOKEN_ID}"
        )
    is_chat = options.endpoint == "chat"
    options.path = "/v1/chat/completions" if is_chat else "/v1/completions"
    options.prompt = options.prompt or ("words" if is_chat else "token-ids")
    if is_chat and options.prompt == "token-ids":
        parser.error("--prompt token-ids: a chat message has no token ids; use words")
    if not options.concurrency:
        is_open_loop = options.rate is not None
        options.concurrency = (
            _OPEN_LOOP_CONCURRENCY if is_open_loop else _CLOSED_LOOP_CONCURRENCY
        )


async def send_all(
    options: argparse.Namespace, session: aiohttp.ClientSession
) -> tuple[list[Timeline], float]:
    """Send all requests. Return their timelines and the elapsed seconds."""
    slots = asyncio.Semaphore(options.concurrency)
    bodies = [request_body(options, index) for index in range(options.num_requests)]
    gc.collect()
    # A garbage collection that scans the prompts would lengthen the latencies.
    gc.freeze()
    started_at = time.perf_counter()

    async def send(body: dict[str, Any], due_at: float | None) -> Timeline:
        if due_at is not None:
            await asyncio.sleep(due_at - time.perf_counter())
        async with slots:
            return await stream(
                session, options.path, body, due_at or time.perf_counter()
            )

    due_times: list[float | None] = [None] * options.num_requests
    if options.rate is not None:
        offsets = arrivals_s(options.rate, options.num_requests, options.seed)
        due_times = [started_at + offset for offset in offsets]
    tasks = [
        asyncio.create_task(send(body, due_at))
        for body, due_at in zip(bodies, due_times, strict=True)
    ]
    reporter = asyncio.create_task(_report_progress(tasks, started_at))
    done, pending = await asyncio.wait(tasks, timeout=options.max_duration_s)
    reporter.cancel()
    for task in pending:
        task.cancel()
    elapsed_s = time.perf_counter() - started_at
    gc.unfreeze()
    await asyncio.gather(*pending, return_exceptions=True)
    timelines = [task.result() for task in tasks if task in done]
    for _ in pending:
        timelines.append(
            Timeline(started_at, error="did not finish within --max-duration-s")
        )
    return timelines, elapsed_s


async def _report_progress(
    tasks: Sequence[asyncio.Task[Timeline]], started_at: float
) -> None:
    """Print to standard error how many requests have ended, until cancelled."""
    while True:
        await asyncio.sleep(_PROGRESS_INTERVAL_S)
        ended = [task.result() for task in tasks if task.done()]
        num_failed = sum(not timeline.succeeded for timeline in ended)
        elapsed_s = time.perf_counter() - started_at
        print(
            f"{elapsed_s:.0f} s: {len(ended)} of {len(tasks)} requests have ended, "
            f"{num_failed} of them failed",
            file=sys.stderr,
            flush=True,
        )


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run the benchmark and return its figures.

    Raises:
        RuntimeError: the endpoint does not answer or lists no model, or a warm-up
            request failed.
    """
    async with open_session(options.url, options.timeout_s, options.api_key) as session:
        model_entry = await get_model(session)
        options.model = options.model or model_entry["id"]
        options.is_baton = model_entry.get("owned_by") == "baton"
        for index in range(options.warmup):
            body = request_body(options, -1 - index)
            timeline = await stream(session, options.path, body, time.perf_counter())
            if not timeline.succeeded:
                raise RuntimeError(f"a warm-up request failed: {timeline.error}")
        timelines, elapsed_s = await send_all(options, session)
    result: dict[str, Any] = {"benchmark": "serve"}
    result |= {name: getattr(options, name) for name in _REPORTED_OPTIONS}
    return result | figures(timelines, elapsed_s, options)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark.

    Returns:
        The exit status: 0 if every request succeeded, 1 if one failed, 2 after an
        error.
    """
    parser = make_parser()
    options = parser.parse_args(argv)
    complete_options(parser, options)
    try:
        result = uvloop.run(run(options))
    except RuntimeError as error:
        print(f"benchmarks.serve: error: {error}", file=sys.stderr)
        return 2
    path = options.save or Path(time.strftime("serve-%Y%m%d-%H%M%S.json"))
    path.write_text(json.dumps(result) + "\n")
    print(f"saved to {path}", file=sys.stderr)
    print(table(result))
    print(json.dumps(result))
    return 0 if result["succeeded"] == result["requests"] else 1


if __name__ == "__main__":
    sys.exit(main())
