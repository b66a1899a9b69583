"""Requests with random prompts, and the processor time that they take."""

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


@dataclass(frozen=True)
class Client:
    """A proxy in front of one server, or of a pair.

    Attributes:
        pids: the processes with the work of a request that is no step: the proxy, the
            HTTP processes of servers, and the engine of a pair's decode server.
    """

    url: str
    session: aiohttp.ClientSession
    model: str
    max_model_len: int
    pids: tuple[int, ...]

    def work_s(self) -> float:
        """Return the processor time of `pids` and of this program so far."""
        return processor_seconds(self.pids)

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


class Endpoint(NamedTuple):
    """The address of a proxy, and `Client.pids`."""

    url: str
    pids: tuple[int, ...]


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
    )


async def probe_s(client: Client, seed: int) -> float:
    """Return the seconds of a fixed small load: a prompt and a few tokens, repeated."""
    seconds = []
    for index in range(_PROBES):
        timeline = await client.send(128, 16, seed * _PROBES + index)
        seconds.append(timeline.e2e_s)
    return statistics.median(seconds)


async def probe_url(url: str) -> float:
    """Return the seconds of the load of `HostConstants.probe_s` at an endpoint."""
    async with AsyncExitStack() as stack:
        client = await connect(stack, Endpoint(url, ()))
        return await probe_s(client, int(time.time()))
