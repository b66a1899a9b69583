"""What load is offered to an OpenAI endpoint and what became of it: prompts, arrivals, figures."""

import itertools
import random
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import numpy as np

from protocol.http.sse import SSEParser
from proxy.upstream import HttpUpstream, Response, UpstreamError

LEVELS = (50, 90, 99)  # percentiles
FIRST_TOKEN_ID = 32  # below: special tokens, in many vocabularies
_T = TypeVar("_T")
# Each about one token of an English vocabulary.
WORDS = "time year people way day man thing woman life child world school state family".split()
KV_FIELDS = ("transferred", "recomputed", "skipped")


@dataclass
class Timeline:
    """What happened to one request. Times are `time.perf_counter` seconds."""

    due_at: float  # when it should have been sent: latencies count from here
    token_at: list[float] = field(default_factory=list)  # one per event that carried tokens
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
    def e2e_s(self) -> float:
        return self.ended_at - self.due_at

    @property
    def succeeded(self) -> bool:
        return self.error is None and self.done and bool(self.token_at)

    def observe(self, event: str, data: str, now: float) -> None:
        """Takes in one event of the stream."""
        if data == "[DONE]":
            self.done = True
            return
        chunk = msgspec.json.decode(data)
        if event == "error" or "error" in chunk:
            error = chunk.get("error", chunk)
            self.error = str(error.get("code") or error.get("type") or "error event")
            return
        if any(_carries_tokens(choice) for choice in chunk.get("choices", ())):
            self.token_at.append(now)
        usage = chunk.get("usage") or {}
        self.prompt_tokens = usage.get("prompt_tokens", self.prompt_tokens)
        self.output_tokens = usage.get("completion_tokens", self.output_tokens)
        self.kv = chunk.get("baton_kv") or self.kv


def _carries_tokens(choice: Mapping[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    return bool(
        choice.get("token_ids")
        or choice.get("text")
        or delta.get("content")
        or delta.get("reasoning_content")
    )


class Endpoint:
    """An OpenAI endpoint, asked over as many connections as requests are in flight.

    Args:
        timeout_s: longest silence of the endpoint.
    """

    def __init__(self, url: str, *, timeout_s: float, api_key: str | None = None) -> None:
        self.url = url
        self._client = HttpUpstream(
            connect_timeout_s=min(timeout_s, 30.0), read_timeout_s=timeout_s
        )
        self._headers = [(b"content-type", b"application/json")]
        if api_key:
            self._headers.append((b"authorization", b"Bearer " + api_key.encode()))

    async def close(self) -> None:
        await self._client.close()

    async def get_model(self) -> dict[str, Any]:
        """The first entry of /v1/models.

        Raises:
            RuntimeError: the endpoint has none, or does not answer.
        """
        try:
            response = await self._client.send(self.url, "GET", "/v1/models", headers=self._headers)
            models = msgspec.json.decode(await response.read())["data"]
            return dict(models[0])
        except UpstreamError as error:
            raise RuntimeError(f"--url {self.url} does not answer: {error}") from None
        except (msgspec.DecodeError, LookupError, TypeError) as error:
            raise RuntimeError(f"{self.url}/v1/models names no model: {error!r}") from None

    async def stream(self, path: str, body: Mapping[str, Any], due_at: float) -> Timeline:
        """Sends one request and reads its stream to the end; failures are in the result."""
        timeline = Timeline(due_at)
        try:
            response = await self._client.send(
                self.url, "POST", path, headers=self._headers, body=msgspec.json.encode(body)
            )
            if response.status != 200:
                timeline.error = f"status {response.status}"
                await response.read()
            else:
                await _read(response, timeline)
        except UpstreamError as error:
            timeline.error = error.failure.value
        except msgspec.DecodeError:
            timeline.error = "malformed event"
        timeline.ended_at = time.perf_counter()
        if timeline.error is None and not timeline.done:
            timeline.error = "no [DONE]"
        timeline.output_tokens = timeline.output_tokens or len(timeline.token_at)
        return timeline


async def _read(response: Response, timeline: Timeline) -> None:
    parser = SSEParser()
    try:
        while (chunk := await response.next_chunk()) is not None:
            now = time.perf_counter()
            for event, data in parser.feed(chunk):
                timeline.observe(event, data, now)
    finally:
        await response.aclose()


@dataclass(frozen=True)
class Objective:
    """What a user is promised; a request is good when it meets both."""

    ttft_ms: float
    itl_ms: float  # mean over the request's tokens

    def is_met_by(self, timeline: Timeline) -> bool:
        return (
            timeline.succeeded
            and timeline.ttft_s * 1e3 <= self.ttft_ms
            and timeline.mean_itl_s * 1e3 <= self.itl_ms
        )


def arrivals_s(rate: float, count: int, seed: int) -> list[float]:
    """The times of `count` arrivals of a Poisson process (`rate` per second), from 0."""
    draw = random.Random(f"arrivals {seed}")
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += draw.expovariate(rate)
    return times


def drawn(vocab: Sequence[_T], length: int, seed: int, index: int, *, shared: int = 0) -> list[_T]:
    """Prompt `index`: `length` ids or words, of which the first `shared` are those of every
    prompt."""
    common = random.Random(f"shared {seed}")
    own = random.Random(f"prompt {seed} {index}")
    start = [common.choice(vocab) for _ in range(shared)]
    return start + [own.choice(vocab) for _ in range(length - shared)]


def union_s(spans: Iterable[tuple[float, float]]) -> float:
    """The time covered by at least one of the (start, end) spans."""
    covered, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered


def figures(
    timelines: Sequence[Timeline], elapsed_s: float, objective: Objective, output_len: int
) -> dict[str, Any]:
    """All figures of a run; latencies in ms, of requests that succeeded.

    `decode_tokens_per_s` counts tokens after each request's first, over the time in which at
    least one request was between its first and its last token.
    """
    good = [timeline for timeline in timelines if timeline.succeeded]
    output = sum(timeline.output_tokens for timeline in good)
    decoding_s = union_s((t.token_at[0], t.token_at[-1]) for t in good)
    met = sum(objective.is_met_by(timeline) for timeline in timelines)
    return {
        "requests": len(timelines),
        "succeeded": len(good),
        "errors": dict(Counter(t.error for t in timelines if t.error)),
        "short_outputs": sum(timeline.output_tokens != output_len for timeline in good),
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
        "e2e_ms": _levels([t.e2e_s for t in good]),
        "slo": {"ttft_ms": objective.ttft_ms, "itl_ms": objective.itl_ms},
        "slo_met": met,
        "goodput_requests_per_s": _rate(met, elapsed_s),
        "baton_kv": {name: sum(t.kv.get(name, 0) for t in good) for name in KV_FIELDS},
    }


def _rate(count: int, seconds: float) -> float:
    return round(count / seconds, 3) if seconds > 0 else 0.0


def _levels(seconds: Sequence[float]) -> dict[str, float | None]:
    """Percentiles in ms; None where there is nothing to take them of."""
    found = np.percentile(seconds, LEVELS) if seconds else [None] * len(LEVELS)
    return {
        f"p{level}": None if value is None else round(float(value) * 1e3, 3)
        for level, value in zip(LEVELS, found, strict=True)
    }


def table(result: dict[str, Any]) -> str:
    """The figures for people."""
    lines = [
        f"{result['succeeded']} of {result['requests']} requests in {result['elapsed_s']:.1f} s"
        + (f", errors: {result['errors']}" if result["errors"] else ""),
        f"{result['requests_per_s']:.2f} requests/s, {result['output_tokens_per_s']:.1f} output "
        f"tokens/s, {result['decode_tokens_per_s']:.1f} while decoding",
        f"{'ms':<28}" + "".join(f"{'p' + str(level):>10}" for level in LEVELS),
    ]
    for name, title in (
        ("ttft_ms", "time to first token"),
        ("gap_1_2_ms", "token 1 to token 2"),
        ("itl_ms", "between tokens"),
        ("mean_itl_ms", "mean between tokens"),
        ("e2e_ms", "whole request"),
    ):
        shown = (result[name][f"p{level}"] for level in LEVELS)
        cells = "".join(f"{'-' if value is None else f'{value:.1f}':>10}" for value in shown)
        lines.append(f"{title:<28}{cells}")
    slo = result["slo"]
    lines.append(
        f"goodput {result['goodput_requests_per_s']:.2f} requests/s: {result['slo_met']} requests "
        f"with TTFT <= {slo['ttft_ms']:g} ms and mean ITL <= {slo['itl_ms']:g} ms"
    )
    if any(result["baton_kv"].values()):
        kv = ", ".join(f"{name} {tokens}" for name, tokens in result["baton_kv"].items())
        lines.append(f"prompt tokens: {kv}")
    if result["short_outputs"]:
        lines.append(f"WARNING: {result['short_outputs']} outputs had another length than asked")
    return "\n".join(lines)
