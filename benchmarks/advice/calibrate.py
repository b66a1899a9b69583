"""Measures the constants of this host with real servers and short runs.

Everything is measured as a client sees it, through the proxy, so that the constants
contain what HTTP and the proxy add. The servers are those of a deployment with
replicas. All of them run while one is measured, as they do later.

1. Steps: streams on one server, few and many, with short and long contexts.
2. Prompts of several lengths on one idle server.
3. Both again on several servers at the same time: how much they slow each other down.
4. The same prompts through a prefill and a decode server: the hand-over of KV.
"""

import asyncio
import statistics
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import numpy as np

from benchmarks.advice.constants import HostConstants
from benchmarks.advice.deployments import Deployment
from benchmarks.advice.fit import DecodeSample, PromptSample, fit_decode, fit_prompts
from benchmarks.advice.servers import (
    RunningServers,
    ServerOptions,
    running_proxy,
    running_servers,
)
from benchmarks.bench.endpoint import Timeline, find_model, open_session, stream
from benchmarks.bench.errors import BenchError
from benchmarks.bench.prompts import FIRST_TOKEN_ID
from benchmarks.bench.scrape import parse_samples
from benchmarks.engine_times import EngineTimes
from protocol.settings.settings import DecodeSettings, load

_TIMEOUT_S = 300.0
_STREAM_COUNTS = (1, 4, 16, 48)
_SHORT_PROMPT = 16
_DECODE_TOKENS = 32
# Lengths of prompts where a step has 512 prompt tokens, as on a CPU. With larger steps,
# as on a GPU, they are as many times as long.
USUAL_STEP_TOKENS = 512
_PROMPT_LENGTHS = (32, 128, 512, 1536)
_LONG_CONTEXT = 1024
_REPEATS = 3
_DECODE_REPEATS = 2
# Streams of each server, and tokens of each prompt (as above), with which the slowdown
# of several servers is measured.
_SHARED_STREAMS = 4
_SHARED_PROMPT = 256
_VOCABULARY = 256
_ONE = Deployment("one server", 0, 1, "round_robin", "never", pulls=False)
_PAIR = Deployment("a pair", 1, 1, "auto", "always", pulls=True)


@dataclass(frozen=True)
class _Client:
    """A proxy in front of one server, or of a pair."""

    url: str
    session: aiohttp.ClientSession
    model: str
    max_model_len: int

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


class _Calibration:
    """The measurements, one after the other."""

    def __init__(self, singles: Sequence[_Client], step_tokens: int) -> None:
        self._singles = singles
        self._step_tokens = step_tokens
        self._seed = int(time.time())  # no prompt is cached from an earlier run
        scale = max(1, step_tokens // USUAL_STEP_TOKENS)
        limit = min(client.max_model_len for client in singles) - _DECODE_TOKENS
        if limit < scale * _PROMPT_LENGTHS[1]:
            raise BenchError(
                f"the model takes {limit + _DECODE_TOKENS} tokens, too few to measure "
                "prompts; its context must have "
                f"{scale * _PROMPT_LENGTHS[1] + _DECODE_TOKENS} or more"
            )
        lengths = [scale * length for length in _PROMPT_LENGTHS]
        self._lengths = [length for length in lengths if length <= limit]
        self._shared_length = min(scale * _SHARED_PROMPT, self._lengths[-1])
        self._long_context = min(scale * _LONG_CONTEXT, limit // 2)

    def _next_seed(self) -> int:
        self._seed += 1
        return self._seed

    async def decode_s(
        self, clients: Sequence[_Client], streams: int, prompt_tokens: int
    ) -> float:
        """Return the mean duration of steps while each server has `streams` streams.

        The shortest of several runs counts, because other programs of the host only
        make a run longer.
        """
        return min(
            [
                await self._decode_once_s(clients, streams, prompt_tokens)
                for _ in range(_DECODE_REPEATS)
            ]
        )

    async def _decode_once_s(
        self, clients: Sequence[_Client], streams: int, prompt_tokens: int
    ) -> float:
        """Return the mean duration of the steps in which all streams generate."""
        requests = [
            client.send(prompt_tokens, _DECODE_TOKENS, self._next_seed())
            for client in clients
            for _ in range(streams)
        ]
        timelines = await asyncio.gather(*requests)
        # All tokens of a short answer may arrive in one event.
        begin = max(timeline.token_at[:2][-1] for timeline in timelines)
        end = min(timeline.token_at[-1] for timeline in timelines)
        means = []
        for timeline in timelines:
            times = [at for at in timeline.token_at if begin <= at <= end]
            if len(times) > 1:
                means.append((times[-1] - times[0]) / (len(times) - 1))
        if not means:
            # Streams did not overlap: prompts took longer than all answers.
            return statistics.mean(timeline.mean_itl_s for timeline in timelines)
        return statistics.mean(means)

    async def prompt_s(self, clients: Sequence[_Client], num_tokens: int) -> float:
        """Return the time to first token while each server computes a prompt.

        It is the mean of all servers, in the median of several runs.
        """
        seconds = []
        for _ in range(_REPEATS):
            timelines = await asyncio.gather(
                *(client.send(num_tokens, 1, self._next_seed()) for client in clients)
            )
            seconds.append(statistics.mean(each.ttft_s for each in timelines))
        return statistics.median(seconds)

    async def times(self, pair: _Client | None) -> EngineTimes:
        """Measure everything.

        Args:
            pair: a prefill and a decode server; None: there is only one server.
        """
        one = self._singles[:1]
        await self.decode_s(one, 1, _SHORT_PROMPT)  # warm up
        decode_samples = []
        shapes = [(count, _SHORT_PROMPT) for count in _STREAM_COUNTS]
        shapes.append((_SHARED_STREAMS, self._long_context))
        for count, length in shapes:
            seconds = await self.decode_s(one, count, length)
            context_tokens = count * (length + _DECODE_TOKENS / 2)
            decode_samples.append(DecodeSample(count, context_tokens, seconds))
        decode = fit_decode(decode_samples)
        prompt_samples = [
            PromptSample(length, await self.prompt_s(one, length))
            for length in self._lengths
        ]
        prompt = fit_prompts(prompt_samples, decode.step_s, self._step_tokens)
        times = EngineTimes(
            step_s=decode.step_s,
            sequence_s=decode.sequence_s,
            held_token_s=decode.held_token_s,
            token_s=prompt.token_s,
            pair_s=prompt.pair_s,
            request_s=prompt.request_s,
            min_prompt_step_s=0.0,
            step_tokens=self._step_tokens,
        )
        times = await self._with_slowdowns(times)
        return times if pair is None else await self._with_handoff(times, pair)

    async def _with_slowdowns(self, times: EngineTimes) -> EngineTimes:
        decode_s = []
        prompt_s = []
        for count in range(1, len(self._singles) + 1):
            clients = self._singles[:count]
            decode_s.append(
                await self.decode_s(clients, _SHARED_STREAMS, _SHORT_PROMPT)
            )
            seconds = await self.prompt_s(clients, self._shared_length)
            prompt_s.append(max(seconds - times.request_s, 0.1 * seconds))
        return replace(
            times,
            decode_slowdown=_slowdowns(decode_s),
            prompt_slowdown=_slowdowns(prompt_s),
        )

    async def _with_handoff(self, times: EngineTimes, pair: _Client) -> EngineTimes:
        """Measure the hand-over: what it adds to the first and to the second token."""
        length = self._lengths[1]
        await pair.send(length, 4, self._next_seed())  # connects the two servers
        extra_s = []
        gaps_s = []
        for _ in range(_REPEATS):
            unpaired = await self._singles[0].send(length, 4, self._next_seed())
            paired = await pair.send(length, 4, self._next_seed())
            extra_s.append(paired.ttft_s - unpaired.ttft_s)
            gaps_s.append(paired.gaps_s[0] - unpaired.gaps_s[0])
        return replace(
            times,
            handoff_s=max(statistics.median(extra_s), 0.0),
            sent_token_s=max(statistics.median(gaps_s), 0.0) / length,
        )

    async def probe_s(self) -> float:
        """Return the seconds of the probe at the first server."""
        return await probe_s(self._singles[0], self._next_seed())


async def probe_s(client: _Client, seed: int) -> float:
    """Return the seconds of a fixed small load: a prompt and a few tokens, repeated."""
    seconds = []
    for index in range(_REPEATS):
        timeline = await client.send(128, 16, seed * _REPEATS + index)
        seconds.append(timeline.e2e_s)
    return statistics.median(seconds)


def _slowdowns(seconds: Sequence[float]) -> tuple[float, ...]:
    """Return the factors for 1, 2, .. busy servers; none is below the one before."""
    factors: list[float] = []
    for value in seconds:
        lowest = factors[-1] if factors else 1.0
        factors.append(round(max(value / seconds[0], lowest), 4))
    return tuple(factors)


async def probe_url(url: str) -> float:
    """Return the seconds of the load of `HostConstants.probe_s` at an endpoint."""
    async with AsyncExitStack() as stack:
        client = await _connect(stack, url)
        return await probe_s(client, int(time.time()))


async def _connect(stack: AsyncExitStack, url: str) -> _Client:
    session = await stack.enter_async_context(open_session(url, _TIMEOUT_S, None))
    entry = await find_model(session, url)
    return _Client(url, session, str(entry["id"]), int(entry["max_model_len"]))


async def _read_capacity(server_url: str) -> tuple[int, int]:
    """Return the tokens that fit in a server's KV cache, and its block size."""
    async with open_session(server_url, _TIMEOUT_S, None) as session:
        async with session.get("/metrics") as response:
            gauges = parse_samples(await response.text(), "gauge")
    block_tokens = int(gauges["baton_kv_block_size_tokens"])
    return int(gauges["baton_kv_blocks_capacity"]) * block_tokens, block_tokens


async def _measure(
    urls: Sequence[str], pair_url: str | None, settings: DecodeSettings, device: str
) -> tuple[EngineTimes, int, float]:
    """Return the times, the longest context, and the seconds of the probe."""
    async with AsyncExitStack() as stack:
        singles = [await _connect(stack, url) for url in urls]
        pair = None if pair_url is None else await _connect(stack, pair_url)
        calibration = _Calibration(singles, settings.batched_tokens_for(device))
        times = await calibration.times(pair)
        return times, singles[0].max_model_len, await calibration.probe_s()


def measure_constants(options: ServerOptions, num_servers: int) -> HostConstants:
    """Start servers on this host, and measure its constants.

    Raises:
        BenchError: a server could not be started, or a request failed.
    """
    argv = [f"--model={options.model}", f"--device={options.device}", *options.options]
    settings = load(DecodeSettings, [*argv, "--role=both"])
    split_settings = load(DecodeSettings, argv)
    started_at = time.monotonic()
    with ExitStack() as stack:
        servers = stack.enter_context(running_servers(options, 0, num_servers))
        print(f"servers ready after {time.monotonic() - started_at:.0f} s", flush=True)
        urls = []
        for url in servers.decodes:
            single = RunningServers([], [url], servers.secret, servers.timeout_s)
            urls.append(stack.enter_context(running_proxy(single, _ONE)))
        pair_url = None
        if num_servers > 1:
            first, second = servers.decodes[:2]
            pair = RunningServers([first], [second], servers.secret, servers.timeout_s)
            pair_url = stack.enter_context(running_proxy(pair, _PAIR))
        times, max_model_len, probe = asyncio.run(
            _measure(urls, pair_url, settings, options.device)
        )
        seconds = time.monotonic() - started_at
        print(f"constants measured after {seconds:.0f} s", flush=True)
        capacity, block_tokens = asyncio.run(_read_capacity(servers.decodes[0]))
    return HostConstants(
        model=options.model,
        device=options.device,
        num_servers=num_servers,
        options=options.options,
        date=time.strftime("%Y-%m-%d %H:%M:%S"),
        max_model_len=max_model_len,
        split_target_s=_target_s(split_settings, options.device),
        replica_target_s=_target_s(settings, options.device),
        probe_s=round(probe, 4),
        times=replace(
            times,
            capacity=capacity,
            block_tokens=block_tokens,
            max_streams=settings.num_seqs_for(options.device),
        ),
    )


def _target_s(settings: DecodeSettings, device: str) -> float | None:
    """Return the target for the time between tokens; None: there is no target."""
    return settings.itl_target_s or settings.usual_itl_target_for(device)
