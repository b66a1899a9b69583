"""A client that sends random prompts and measures latencies and processor time."""

import asyncio
import math
import statistics
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import aiohttp
import numpy as np

from benchmarks.advice.processors import processor_seconds
from benchmarks.bench.endpoint import Timeline, find_model, open_session, stream
from benchmarks.bench.errors import BenchError
from benchmarks.bench.prompts import FIRST_TOKEN_ID

_TIMEOUT_S = 300.0
_VOCABULARY = 256
_PROBES = 3
# The fractional parts of the multiples of each number are spread evenly over 0 to 1.
_RATIOS = (math.sqrt(2), math.sqrt(5))


@dataclass(frozen=True)
class ClosedLoop:
    """A load in which the end of a request starts the next request.

    No server has cached the prompts.

    Attributes:
        prompt_tokens: mean length of the prompts.
        output_tokens: mean length of the answers.
        count: total number of requests.
        in_flight: number of concurrent requests.
        is_mixed: True if lengths vary from 0.5 to 1.5 times the means. Requests of
            equal lengths may run in lockstep, unlike those of real loads.
    """

    prompt_tokens: int
    output_tokens: int
    count: int
    in_flight: int
    is_mixed: bool = False

    def lengths(self, index: int) -> tuple[int, int]:
        """Return the lengths of a prompt and of its answer, in tokens."""
        if not self.is_mixed:
            return self.prompt_tokens, self.output_tokens
        factors = (0.5 + index * ratio % 1.0 for ratio in _RATIOS)
        means = (self.prompt_tokens, self.output_tokens)
        prompt_tokens, output_tokens = (
            max(round(mean * factor), 1)
            for mean, factor in zip(means, factors, strict=True)
        )
        return prompt_tokens, output_tokens


@dataclass(frozen=True)
class Client:
    """A client of a proxy.

    Attributes:
        pids: processes that work for a request outside of engines: the proxy and the
            HTTP processes of servers. Empty if their work is not measured.
        engine_pids: processes of the decode server's engine, if the proxy is in front
            of a prefill server and a decode server.
    """

    url: str
    session: aiohttp.ClientSession
    model: str
    max_model_len: int
    pids: tuple[int, ...]
    engine_pids: tuple[int, ...] = ()

    def work_s(self) -> float:
        """Return the processor time of `pids` and of this program so far."""
        return processor_seconds(self.pids) + time.process_time()

    def engine_work_s(self) -> float:
        """Return the processor time of `engine_pids` so far."""
        return processor_seconds(self.engine_pids)

    async def send(self, num_tokens: int, num_outputs: int, seed: int) -> Timeline:
        """Send a request with a prompt that no server has cached.

        Raises:
            BenchError: the request failed.
        """
        rng = np.random.default_rng(seed)
        prompt = rng.integers(FIRST_TOKEN_ID, _VOCABULARY, num_tokens).tolist()
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": num_outputs,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        timeline = Timeline(time.perf_counter())
        await stream(self.session, "/v1/completions", body, timeline)
        if not timeline.succeeded:
            raise BenchError(f"a request for the constants failed: {timeline.error}")
        return timeline

    async def send_loop(self, loop: ClosedLoop, seed: int) -> float:
        """Send a closed loop of requests. Return the seconds until all have ended."""
        slots = asyncio.Semaphore(loop.in_flight)

        async def send(index: int) -> None:
            async with slots:
                await self.send(*loop.lengths(index), seed + index)

        started_at = time.perf_counter()
        await asyncio.gather(*(send(index) for index in range(loop.count)))
        return time.perf_counter() - started_at


class Endpoint(NamedTuple):
    """The URL of a proxy, and the values of `Client.pids` and `Client.engine_pids`."""

    url: str
    pids: tuple[int, ...]
    engine_pids: tuple[int, ...] = ()


async def connect(stack: AsyncExitStack, endpoint: Endpoint) -> Client:
    url = endpoint.url
    session = await stack.enter_async_context(open_session(url, _TIMEOUT_S, None))
    entry = await find_model(session, url)
    return Client(
        url=url,
        session=session,
        model=str(entry["id"]),
        max_model_len=int(entry["max_model_len"]),
        pids=endpoint.pids,
        engine_pids=endpoint.engine_pids,
    )


async def probe_s(client: Client, seed: int) -> float:
    """Run the probe, which shows how fast the host is.

    The probe sends three small requests, one after the other. The result is the median
    of their seconds.
    """
    seconds = []
    for index in range(_PROBES):
        timeline = await client.send(128, 16, seed * _PROBES + index)
        seconds.append(timeline.e2e_s)
    return statistics.median(seconds)


async def probe_url(url: str) -> float:
    """Run the probe at an endpoint, and return its seconds."""
    async with AsyncExitStack() as stack:
        client = await connect(stack, Endpoint(url, ()))
        return await probe_s(client, int(time.time()))
