"""Load on an OpenAI endpoint: `python -m benchmarks.serve --url http://127.0.0.1:8000`.

With --rate, requests arrive by a Poisson process whatever became of those before (open loop), and
every latency counts from the moment a request was due. Without it, --concurrency requests are in
flight at any time (closed loop). Prompts are random and seeded; outputs are forced to their full
length with ignore_eos. A request counts as good when its time to first token and its mean time
between tokens are within the stated limits. The last line is one JSON document.
"""

import argparse
import asyncio
import gc
import ipaddress
import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import uvloop

from benchmarks.load import (
    FIRST_TOKEN_ID,
    WORDS,
    Endpoint,
    Objective,
    Timeline,
    arrivals_s,
    drawn,
    figures,
    table,
)

_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
        "is_member": {"type": "boolean"},
    },
    "required": ["name", "age", "tags", "is_member"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": _PERSON, "minItems": 1000}

_TOLD = (
    "url", "model", "endpoint", "rate", "concurrency", "input_len", "shared_len", "output_len",
    "seed",
)  # fmt: skip
MAX_REQUESTS = 100_000
MAX_IN_FLIGHT = 16_384


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
    add("--num-requests", type=_count(MAX_REQUESTS), default=64, help="requests to measure")
    add("--warmup", type=int, default=1, help="requests sent before, one after the other")
    add("--rate", type=float, help="arrivals per second (default: closed loop)")
    add("--concurrency", type=_count(MAX_IN_FLIGHT), help="most requests in flight (default: 8 "
        f"without --rate, else {MAX_IN_FLIGHT})")  # fmt: skip
    add("--input-len", type=_count(10**6), default=256, help="prompt length (tokens)")
    add("--shared-len", type=int, default=0, help="of these, the first that all share (tokens)")
    add("--output-len", type=_count(10**6), default=64, help="output length (tokens)")
    add("--prompt", choices=("token-ids", "words"), help="how prompts are written "
        "(default: token-ids, words for chat)")  # fmt: skip
    add("--vocab-size", type=int, default=256, help="ids are drawn below this")
    add("--temperature", type=float, default=0.0)
    add("--seed", type=int, default=0, help="of prompts and arrivals; take another for the next "
        "run on the same servers, whose prefix caches know these prompts")  # fmt: skip
    add("--no-ignore-eos", action="store_true", help="outputs may end early")
    add("--schema", action="store_true", help="outputs are JSON by a schema (a list of objects)")
    add("--slo-ttft-ms", type=float, default=1000.0, help="longest good time to first token (ms)")
    add("--slo-itl-ms", type=float, default=100.0, help="longest good mean time per token (ms)")
    add("--timeout-s", type=float, default=120.0, help="longest silence of the endpoint (s)")
    add("--max-duration-s", type=float, default=600.0, help="requests not ended by then fail (s)")
    add("--api-key", help="sent as bearer token")
    add("--allow-remote", action="store_true", help="load an endpoint that is not this machine")
    return parser


def _count(limit: int) -> Any:
    def parse(text: str) -> int:
        value = int(text)
        if not 1 <= value <= limit:
            raise argparse.ArgumentTypeError(f"{value} is not from 1 to {limit}")
        return value

    return parse


def is_loopback(url: str) -> bool:
    """Whether a URL can only mean this machine."""
    host = urlsplit(url).hostname or ""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Ends the program, with a message, when options do not go together."""
    options.url = options.url.rstrip("/").removesuffix("/v1")
    if urlsplit(options.url).scheme not in ("http", "https"):
        parser.error(f"--url {options.url} is no URL; write http://host:port")
    if not options.allow_remote and not is_loopback(options.url):
        parser.error(f"{options.url} is not this machine; --allow-remote if you may load it")
    if options.rate is not None and not 0 < options.rate < float("inf"):
        parser.error(f"--rate {options.rate} must be above 0; leave it out for a closed loop")
    if not 0 <= options.shared_len <= options.input_len:
        parser.error(f"--shared-len {options.shared_len} must be from 0 to --input-len")
    if options.vocab_size <= FIRST_TOKEN_ID:
        parser.error(f"--vocab-size {options.vocab_size} must be above {FIRST_TOKEN_ID}")
    if options.warmup < 0:
        parser.error(f"--warmup {options.warmup} must not be negative")
    is_chat = options.endpoint == "chat"
    options.path = "/v1/chat/completions" if is_chat else "/v1/completions"
    options.prompt = options.prompt or ("words" if is_chat else "token-ids")
    if is_chat and options.prompt == "token-ids":
        parser.error("--prompt token-ids: a chat message has no token ids; use words")
    if options.concurrency is None:
        options.concurrency = MAX_IN_FLIGHT if options.rate else 8


def request_body(options: argparse.Namespace, index: int) -> dict[str, Any]:
    """The body of request `index`; negative ones are for warming up."""
    shape = (options.seed, index)
    body: dict[str, Any] = {
        "model": options.model,
        "temperature": options.temperature,
        "max_tokens": options.output_len,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    vocab = WORDS if options.prompt == "words" else range(FIRST_TOKEN_ID, options.vocab_size)
    prompt: Any = drawn(vocab, options.input_len, *shape, shared=options.shared_len)
    if options.prompt == "words":
        prompt = " ".join(prompt)
    if options.endpoint == "chat":
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    if not options.no_ignore_eos:
        body["ignore_eos"] = True
    if options.schema:
        body["structured_outputs"] = {"json": SCHEMA}
    if options.is_baton:
        body["return_token_ids"] = True  # each token shows, also one that completes no character
    return body


async def drive(options: argparse.Namespace, endpoint: Endpoint) -> tuple[list[Timeline], float]:
    """Offers the load; returns what became of each request, and the seconds it took."""
    slots = asyncio.Semaphore(options.concurrency)
    bodies = [request_body(options, index) for index in range(options.num_requests)]
    gc.collect()
    gc.freeze()  # looking through the prompts would show in the latencies
    began = time.perf_counter()

    async def one(index: int, due_at: float | None) -> Timeline:
        if due_at is not None:
            await asyncio.sleep(due_at - time.perf_counter())
        async with slots:
            now = time.perf_counter()
            return await endpoint.stream(
                options.path, bodies[index], now if due_at is None else due_at
            )

    due: list[float | None] = [None] * options.num_requests
    if options.rate is not None:
        offsets = arrivals_s(options.rate, options.num_requests, options.seed)
        due = [began + offset for offset in offsets]
    tasks = [asyncio.create_task(one(*each)) for each in enumerate(due)]
    done, late = await asyncio.wait(tasks, timeout=options.max_duration_s)
    for task in late:
        task.cancel()
    elapsed_s = time.perf_counter() - began
    gc.unfreeze()
    await asyncio.gather(*late, return_exceptions=True)
    unfinished = [Timeline(began, error="not ended by --max-duration-s") for _ in late]
    return [task.result() for task in tasks if task in done] + unfinished, elapsed_s


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """The whole benchmark; returns the figures.

    Raises:
        RuntimeError: the endpoint cannot be used.
    """
    endpoint = Endpoint(options.url, timeout_s=options.timeout_s, api_key=options.api_key)
    try:
        card = await endpoint.get_model()
        options.model = options.model or card["id"]
        options.is_baton = card.get("owned_by") == "baton"
        for index in range(options.warmup):
            body = request_body(options, -1 - index)
            warm = await endpoint.stream(options.path, body, time.perf_counter())
            if not warm.succeeded:
                raise RuntimeError(f"the warm-up request failed: {warm.error}")
        timelines, elapsed_s = await drive(options, endpoint)
    finally:
        await endpoint.close()
    objective = Objective(options.slo_ttft_ms, options.slo_itl_ms)
    return {
        "benchmark": "serve",
        **{name: getattr(options, name) for name in _TOLD},
        **figures(timelines, elapsed_s, objective, options.output_len),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; 0 when every request succeeded."""
    parser = make_parser()
    options = parser.parse_args(argv)
    check(parser, options)
    try:
        result = uvloop.run(run(options))
    except RuntimeError as error:
        print(f"benchmarks.serve: error: {error}", file=sys.stderr)
        return 2
    print(table(result))
    print(json.dumps(result))
    return 0 if result["succeeded"] == result["requests"] else 1


if __name__ == "__main__":
    sys.exit(main())
