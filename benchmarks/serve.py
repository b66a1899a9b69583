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
import itertools
import json
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec
import numpy as np
import uvloop

_T = TypeVar("_T")
LEVELS = (50, 90, 99)  # percentiles
FIRST_TOKEN_ID = 32  # below: special tokens, in many vocabularies
# Each about one token of an English vocabulary.
WORDS = "time year people way day man thing woman life child world school state family".split()
KV_FIELDS = ("transferred", "recomputed", "skipped")
_TOLD = (
    "url", "model", "endpoint", "rate", "concurrency", "input_len", "shared_len", "output_len",
    "seed",
)  # fmt: skip
_MOST_IN_FLIGHT = 16_384
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
    add("--num-requests", type=_positive, default=64, help="requests to measure")
    add(
        "--warmup",
        type=int,
        default=1,
        help="requests sent before, one after the other",
    )
    add("--rate", type=float, help="arrivals per second (default: closed loop)")
    add("--concurrency", type=_positive, help="most requests in flight (default: 8 "
        f"without --rate, else {_MOST_IN_FLIGHT})")  # fmt: skip
    add("--input-len", type=_positive, default=256, help="prompt length (tokens)")
    add(
        "--shared-len",
        type=int,
        default=0,
        help="of these, the first that all share (tokens)",
    )
    add("--output-len", type=_positive, default=64, help="output length (tokens)")
    add("--prompt", choices=("token-ids", "words"), help="how prompts are written "
        "(default: token-ids, words for chat)")  # fmt: skip
    add("--vocab-size", type=int, default=256, help="ids are drawn below this")
    add("--temperature", type=float, default=0.0)
    add("--seed", type=int, default=0, help="of prompts and arrivals; take another for the next "
        "run on the same servers, whose prefix caches know these prompts")  # fmt: skip
    add("--no-ignore-eos", action="store_true", help="outputs may end early")
    add(
        "--schema",
        action="store_true",
        help="outputs are JSON by a schema (a list of objects)",
    )
    add(
        "--slo-ttft-ms",
        type=float,
        default=1000.0,
        help="longest good time to first token (ms)",
    )
    add(
        "--slo-itl-ms",
        type=float,
        default=100.0,
        help="longest good mean time per token (ms)",
    )
    add(
        "--timeout-s",
        type=float,
        default=120.0,
        help="longest silence of the endpoint (s)",
    )
    add(
        "--max-duration-s",
        type=float,
        default=600.0,
        help="requests not ended by then fail (s)",
    )
    add("--api-key", help="sent as bearer token")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not above 0")
    return value


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Ends the program, with a message, when options do not go together."""
    options.url = options.url.rstrip("/").removesuffix("/v1")
    url = urlsplit(options.url)
    if url.scheme not in ("http", "https") or url.path:
        parser.error(
            f"--url {options.url} is no URL of a server; write http://host:port"
        )
    if options.rate is not None and not 0 < options.rate < float("inf"):
        parser.error(
            f"--rate {options.rate} must be above 0; leave it out for a closed loop"
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
    options.concurrency = options.concurrency or (
        _MOST_IN_FLIGHT if options.rate else 8
    )


# -- what is offered


def arrivals_s(rate: float, count: int, seed: int) -> list[float]:
    """When `count` requests of a Poisson process are due (`rate` per second), from 0."""
    draw = random.Random(f"arrivals {seed}")
    gaps = (draw.expovariate(rate) for _ in range(count - 1))
    return list(itertools.accumulate(gaps, initial=0.0))


def drawn(
    vocab: Sequence[_T], length: int, seed: int, index: int, *, shared: int = 0
) -> list[_T]:
    """Prompt `index`: `length` ids or words, of which the first `shared` are those of every
    prompt."""
    common, own = (
        random.Random(f"shared {seed}"),
        random.Random(f"prompt {seed} {index}"),
    )
    return common.choices(vocab, k=shared) + own.choices(vocab, k=length - shared)


def request_body(options: argparse.Namespace, index: int) -> dict[str, Any]:
    """The body of request `index`; negative ones are for warming up."""
    body: dict[str, Any] = {
        "model": options.model,
        "temperature": options.temperature,
        "max_tokens": options.output_len,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    length, shared = options.input_len, options.shared_len
    vocab = (
        WORDS
        if options.prompt == "words"
        else range(FIRST_TOKEN_ID, options.vocab_size)
    )
    prompt: Any = drawn(vocab, length, options.seed, index, shared=shared)
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
        body["return_token_ids"] = (
            True  # each token shows, also one that completes no character
        )
    return body


# -- what becomes of it


@dataclass
class Timeline:
    """What happened to one request. Times are `time.perf_counter` seconds."""

    due_at: float  # when it should have been sent: latencies count from here
    token_at: list[float] = field(
        default_factory=list
    )  # one per event that carried tokens
    ended_at: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    kv: dict[str, int] = field(default_factory=dict)  # baton_kv of the last chunk
    error: str | None = None
    done: bool = False  # [DONE] came

    @property
    def ttft_s(self) -> float:
        return self.token_at[0] - self.due_at

    @property
    def gaps_s(self) -> list[float]:
        """Between neighbouring token events."""
        return [b - a for a, b in itertools.pairwise(self.token_at)]

    @property
    def mean_itl_s(self) -> float:
        """Mean time per token after the first; 0 when there is none."""
        decoded = self.output_tokens - 1
        return (self.token_at[-1] - self.token_at[0]) / decoded if decoded > 0 else 0.0

    @property
    def succeeded(self) -> bool:
        return self.error is None and self.done and bool(self.token_at)

    def is_good(self, ttft_ms: float, itl_ms: float) -> bool:
        """Whether its first token and its tokens' mean distance are within these."""
        is_soon = self.succeeded and self.ttft_s * 1e3 <= ttft_ms
        return is_soon and self.mean_itl_s * 1e3 <= itl_ms

    def observe(self, data: bytes, now: float) -> None:
        """Takes in the data of one event of the stream."""
        if data == b"[DONE]":
            self.done = True
            return
        chunk = msgspec.json.decode(data)
        if "error" in chunk:
            error = chunk["error"]
            self.error = str(error.get("code") or error.get("type") or "error event")
            return
        for choice in chunk.get("choices", ()):
            delta = choice.get("delta") or {}
            texts = (
                choice.get("text"),
                delta.get("content"),
                delta.get("reasoning_content"),
            )
            if choice.get("token_ids") or any(texts):
                self.token_at.append(now)
                break
        usage = chunk.get("usage") or {}
        self.prompt_tokens = usage.get("prompt_tokens", self.prompt_tokens)
        self.output_tokens = usage.get("completion_tokens", self.output_tokens)
        self.kv = chunk.get("baton_kv") or self.kv


@asynccontextmanager
async def connected(
    url: str, timeout_s: float, api_key: str | None
) -> AsyncIterator[aiohttp.ClientSession]:
    """An endpoint, asked over as many connections as requests are in flight.

    Args:
        timeout_s: longest silence of the endpoint.
    """
    connect_s = min(timeout_s, 30.0)
    limits = aiohttp.ClientTimeout(
        total=None, sock_connect=connect_s, sock_read=timeout_s
    )
    connector = aiohttp.TCPConnector(
        limit=0, keepalive_timeout=1.0
    )  # servers close after 5 s
    headers = {"content-type": "application/json", "accept-encoding": "identity"}
    if api_key:
        headers["authorization"] = f"Bearer {api_key}"
    options: Any = {"connector": connector, "timeout": limits, "headers": headers}
    async with aiohttp.ClientSession(url, **options) as session:
        yield session


async def get_model(session: aiohttp.ClientSession) -> dict[str, Any]:
    """The first entry of /v1/models.

    Raises:
        RuntimeError: the endpoint has none, or does not answer.
    """
    try:
        async with session.get("/v1/models") as response:
            return dict((await response.json())["data"][0])
    except (ValueError, LookupError, TypeError, aiohttp.ContentTypeError) as error:
        raise RuntimeError(f"--url: its /v1/models names no model: {error!r}") from None
    except (aiohttp.ClientError, TimeoutError) as error:
        raise RuntimeError(f"--url does not answer: {error or 'in time'}") from None


async def stream(
    session: aiohttp.ClientSession, path: str, body: Mapping[str, Any], due_at: float
) -> Timeline:
    """Sends one request and reads its stream to the end; failures are in the result."""
    timeline = Timeline(due_at)
    try:
        async with session.post(path, data=msgspec.json.encode(body)) as response:
            if response.status != 200:
                timeline.error = f"status {response.status}"
            async for line in response.content:
                if line.startswith(b"data:"):
                    timeline.observe(
                        line.removeprefix(b"data:").strip(), time.perf_counter()
                    )
    except (aiohttp.ClientError, TimeoutError) as error:
        timeline.error = type(error).__name__
    except (ValueError, msgspec.DecodeError):
        timeline.error = "malformed event"
    timeline.ended_at = time.perf_counter()
    if timeline.error is None and not timeline.done:
        timeline.error = "no [DONE]"
    timeline.output_tokens = timeline.output_tokens or len(timeline.token_at)
    return timeline


async def drive(
    options: argparse.Namespace, session: aiohttp.ClientSession
) -> tuple[list[Timeline], float]:
    """Offers the load; returns what became of each request, and the seconds it took."""
    slots = asyncio.Semaphore(options.concurrency)
    bodies = [request_body(options, index) for index in range(options.num_requests)]
    gc.collect()
    gc.freeze()  # looking through the prompts would show in the latencies
    began = time.perf_counter()

    async def one(body: dict[str, Any], due_at: float | None) -> Timeline:
        if due_at is not None:
            await asyncio.sleep(due_at - time.perf_counter())
        async with slots:
            return await stream(
                session, options.path, body, due_at or time.perf_counter()
            )

    due: list[float | None] = [None] * options.num_requests
    if options.rate is not None:
        offsets = arrivals_s(options.rate, options.num_requests, options.seed)
        due = [began + offset for offset in offsets]
    tasks = [asyncio.create_task(one(*each)) for each in zip(bodies, due, strict=True)]
    done, late = await asyncio.wait(tasks, timeout=options.max_duration_s)
    for task in late:
        task.cancel()
    elapsed_s = time.perf_counter() - began
    gc.unfreeze()
    await asyncio.gather(*late, return_exceptions=True)
    unfinished = [Timeline(began, error="not ended by --max-duration-s") for _ in late]
    return [task.result() for task in tasks if task in done] + unfinished, elapsed_s


# -- figures


def union_s(spans: Iterable[tuple[float, float]]) -> float:
    """The time covered by at least one of the (start, end) spans."""
    covered, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered


def figures(
    timelines: Sequence[Timeline], elapsed_s: float, options: argparse.Namespace
) -> dict[str, Any]:
    """All figures of a run; latencies in ms, of requests that succeeded.

    `decode_tokens_per_s` counts tokens after each request's first, over the time in which at
    least one request was between its first and its last token.
    """
    good = [timeline for timeline in timelines if timeline.succeeded]
    output = sum(timeline.output_tokens for timeline in good)
    decoding_s = union_s((t.token_at[0], t.token_at[-1]) for t in good)
    slo = {"ttft_ms": options.slo_ttft_ms, "itl_ms": options.slo_itl_ms}
    met = sum(timeline.is_good(**slo) for timeline in timelines)
    return {
        "requests": len(timelines),
        "succeeded": len(good),
        "errors": dict(Counter(t.error for t in timelines if t.error)),
        "short_outputs": sum(t.output_tokens != options.output_len for t in good),
        "elapsed_s": round(elapsed_s, 3),
        "prompt_tokens": sum(timeline.prompt_tokens for timeline in good),
        "output_tokens": output,
        "requests_per_s": _rate(len(good), elapsed_s),
        "output_tokens_per_s": _rate(output, elapsed_s),
        "decode_tokens_per_s": _rate(output - len(good), decoding_s),
        "ttft_ms": _levels([t.ttft_s for t in good]),
        "gap_1_2_ms": _levels([t.gaps_s[0] for t in good if len(t.token_at) > 1]),
        "itl_ms": _levels([gap for t in good for gap in t.gaps_s]),
        "mean_itl_ms": _levels([t.mean_itl_s for t in good if t.output_tokens > 1]),
        "e2e_ms": _levels([t.ended_at - t.due_at for t in good]),
        "slo": slo,
        "slo_met": met,
        "goodput_requests_per_s": _rate(met, elapsed_s),
        "baton_kv": {name: sum(t.kv.get(name, 0) for t in good) for name in KV_FIELDS},
    }


def _rate(count: int, seconds: float) -> float:
    return round(count / seconds, 3) if seconds > 0 else 0.0


def _levels(seconds: Sequence[float]) -> dict[str, float | None]:
    """Percentiles in ms; None where there is nothing to take them of."""
    if not seconds:
        return {f"p{level}": None for level in LEVELS}
    found = np.percentile(seconds, LEVELS)
    return {
        f"p{level}": round(float(at) * 1e3, 3)
        for level, at in zip(LEVELS, found, strict=True)
    }


def table(result: dict[str, Any]) -> str:
    """The figures for people."""
    errors = f", errors: {result['errors']}" if result["errors"] else ""
    lines = [
        f"{result['succeeded']} of {result['requests']} requests in {result['elapsed_s']:.1f} s"
        f"{errors}\n{result['requests_per_s']:.2f} requests/s, "
        f"{result['output_tokens_per_s']:.1f} output tokens/s, "
        f"{result['decode_tokens_per_s']:.1f} while decoding",
        f"{'ms':<28}" + "".join(f"{f'p{level}':>10}" for level in LEVELS),
    ]
    for name, title in (
        ("ttft_ms", "time to first token"),
        ("gap_1_2_ms", "token 1 to token 2"),
        ("itl_ms", "between tokens"),
        ("mean_itl_ms", "mean between tokens"),
        ("e2e_ms", "whole request"),
    ):
        cells = ("-" if at is None else f"{at:.1f}" for at in result[name].values())
        lines.append(f"{title:<28}" + "".join(f"{cell:>10}" for cell in cells))
    slo = result["slo"]
    lines.append(
        f"goodput {result['goodput_requests_per_s']:.2f} requests/s: {result['slo_met']} requests "
        f"with TTFT <= {slo['ttft_ms']:g} ms and mean ITL <= {slo['itl_ms']:g} ms"
    )
    if any(result["baton_kv"].values()):
        kv = ", ".join(
            f"{name} {tokens}" for name, tokens in result["baton_kv"].items()
        )
        lines.append(f"prompt tokens: {kv}")
    if result["short_outputs"]:
        lines.append(
            f"WARNING: {result['short_outputs']} outputs had another length than asked"
        )
    return "\n".join(lines)


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """The whole benchmark; returns the figures.

    Raises:
        RuntimeError: the endpoint cannot be used.
    """
    async with connected(options.url, options.timeout_s, options.api_key) as session:
        card = await get_model(session)
        options.model = options.model or card["id"]
        options.is_baton = card.get("owned_by") == "baton"
        for index in range(options.warmup):
            body = request_body(options, -1 - index)
            warm = await stream(session, options.path, body, time.perf_counter())
            if not warm.succeeded:
                raise RuntimeError(f"the warm-up request failed: {warm.error}")
        timelines, elapsed_s = await drive(options, session)
    told = {name: getattr(options, name) for name in _TOLD}
    return {"benchmark": "serve", **told, **figures(timelines, elapsed_s, options)}


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
