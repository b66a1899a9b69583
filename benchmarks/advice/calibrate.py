"""Measures the constants of this host with real servers and short runs.

Everything is measured as a client sees it, through the proxy, so that the constants
contain what HTTP and the proxy add. The servers are those of a deployment with
replicas. All of them run while one is measured, as they do later.

1. Requests of one server at a time: the processor time outside of its engine.
2. Steps: streams on one server, few and many, with short and long contexts.
3. Prompts of several lengths on one idle server.
4. Streams and prompts on several servers at the same time: how much the servers slow
   each other down.
5. Prompts through a prefill and a decode server: the hand-over of KV.
6. Saturating loads on each arrangement of the servers (saturation.py).
"""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace

from benchmarks.advice.client import (
    Client,
    ClosedLoop,
    Endpoint,
    connect,
    probe_s,
)
from benchmarks.advice.constants import HostConstants
from benchmarks.advice.deployments import Deployment, arrangements, split
from benchmarks.advice.fit import (
    DecodeSample,
    PromptSample,
    fit_decode,
    fit_deliveries,
    fit_prompts,
    fit_slowdowns,
)
from benchmarks.advice.processors import (
    OtherPrograms,
    children,
    is_disturbed,
    typical_s,
)
from benchmarks.advice.saturation import USUAL_STEP_TOKENS, measure_correction
from benchmarks.advice.servers import (
    RunningServers,
    ServerOptions,
    running_proxy,
    running_servers,
)
from benchmarks.bench.endpoint import open_session
from benchmarks.bench.errors import BenchError
from benchmarks.bench.scrape import parse_samples
from benchmarks.simulation.times import EngineTimes
from protocol.settings.machine import available_cores
from protocol.settings.settings import DecodeSettings, load

_TIMEOUT_S = 300.0
_STREAM_COUNTS = (1, 4, 16, 48)
_SHORT_PROMPT = 16
_DECODE_TOKENS = 32
# Lengths of prompts where a step has 512 prompt tokens, as on a CPU. With larger steps,
# as on a GPU, they are as many times as long.
_PROMPT_LENGTHS = (32, 128, 512, 1536)
_LONG_CONTEXT = 1024
_REPEATS = 5
# Streams of each server, and tokens of each prompt (as above), with which the slowdown
# of several servers is measured.
_SHARED_STREAMS = 4
_SHARED_PROMPT = 256
_PROMPTS_IN_FLIGHT = 2  # of each server, so that its engine does not wait for requests
_SHARED_PROMPTS = 8  # of each server
# Requests with which processor time is measured, and how many of them are in flight.
_WORK_REQUESTS = 24
_WORK_IN_FLIGHT = 4
_ONE = Deployment("one server", 0, 1, "round_robin", "never", pulls=False)
_PAIR = split(1, 1, "always")


class _Calibration:
    """The measurements, one after the other.

    Args:
        singles: one for each server.
        pids: the servers and proxies.
        shares_processors: see EngineTimes.
    """

    def __init__(
        self,
        singles: Sequence[Client],
        pids: Sequence[int],
        step_tokens: int,
        *,
        shares_processors: bool,
    ) -> None:
        self._singles = singles
        self._pids = pids
        self._step_tokens = step_tokens
        self._shares_processors = shares_processors
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
        self, clients: Sequence[Client], streams: int, prompt_tokens: int
    ) -> float:
        """Return the mean duration of steps while each server has `streams` streams."""
        return await self._typical(
            lambda: self._decode_once_s(clients, streams, prompt_tokens)
        )

    async def _decode_once_s(
        self, clients: Sequence[Client], streams: int, prompt_tokens: int
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
            means = [timeline.mean_itl_s for timeline in timelines]
        return statistics.mean(means)

    async def prompt_s(self, client: Client, num_tokens: int) -> float:
        """Return the time to first token on an idle server."""

        async def once() -> float:
            timeline = await client.send(num_tokens, 1, self._next_seed())
            return timeline.ttft_s

        return await self._typical(once)

    async def shared_prompt_s(self, clients: Sequence[Client]) -> float:
        """Return the time per prompt while each server computes one after another."""

        async def once() -> float:
            runs = [
                self._send_prompts(
                    client, _SHARED_PROMPTS, _PROMPTS_IN_FLIGHT, self._shared_length
                )
                for client in clients
            ]
            elapsed_s = await asyncio.gather(*runs)
            return statistics.mean(elapsed_s) / _SHARED_PROMPTS

        return await self._typical(once)

    async def request_work_s(self, client: Client, num_outputs: int = 1) -> float:
        """Return the processor time outside of engines of a request with a short
        prompt.
        """

        async def once() -> float:
            before_s = client.work_s()
            await self._send_prompts(
                client, _WORK_REQUESTS, _WORK_IN_FLIGHT, self._lengths[1], num_outputs
            )
            return (client.work_s() - before_s) / _WORK_REQUESTS

        return await self._typical(once)

    async def engine_work_s(self, client: Client) -> float:
        """Return the processor time of `Client.engine_pids` for a request with two
        tokens.
        """

        async def once() -> float:
            before_s = client.engine_work_s()
            await self._send_prompts(client, _WORK_REQUESTS, 1, self._lengths[1], 2)
            return (client.engine_work_s() - before_s) / _WORK_REQUESTS

        return await self._typical(once)

    async def _typical(self, run: Callable[[], Awaitable[float]]) -> float:
        return await typical_s(self._pids, run)

    async def delivery_work_s(self, client: Client, streams: int) -> float:
        """Return the processor time to deliver the tokens of a step.

        It is what requests need in addition if they get more than one token.
        """

        async def once() -> float:
            work_s = []
            for num_outputs in (1, _DECODE_TOKENS):
                before_s = client.work_s()
                requests = [
                    client.send(_SHORT_PROMPT, num_outputs, self._next_seed())
                    for _ in range(streams)
                ]
                await asyncio.gather(*requests)
                work_s.append(client.work_s() - before_s)
            return (work_s[1] - work_s[0]) / (_DECODE_TOKENS - 1)

        return await self._typical(once)

    async def _send_prompts(
        self,
        client: Client,
        count: int,
        in_flight: int,
        num_tokens: int,
        num_outputs: int = 1,
    ) -> float:
        """Send prompts, `in_flight` at a time. Return the seconds that they took."""
        loop = ClosedLoop(num_tokens, num_outputs, count, in_flight)
        seed = self._seed
        self._seed += count
        return await client.send_loop(loop, seed)

    async def times(self, pair: Client | None) -> EngineTimes:
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
        delivery = fit_deliveries(
            [
                (count, await self.delivery_work_s(one[0], count))
                for count in _STREAM_COUNTS
            ]
        )
        prompt_samples = [
            PromptSample(length, await self.prompt_s(one[0], length))
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
            request_work_s=await self.request_work_s(one[0]),
            delivery_s=delivery.step_s,
            delivery_token_s=delivery.token_s,
            min_prompt_step_s=0.0,
            step_tokens=self._step_tokens,
            shares_processors=self._shares_processors,
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
            prompt_s.append(await self.shared_prompt_s(clients))
        decode_work_s = 0.0
        prompt_work_s = 0.0
        if times.shares_processors:
            decode_work_s = times.delivery_s + _SHARED_STREAMS * times.delivery_token_s
            prompt_work_s = times.request_work_s
        return replace(
            times,
            decode_slowdown=fit_slowdowns(decode_s, decode_work_s),
            prompt_slowdown=fit_slowdowns(prompt_s, prompt_work_s),
        )

    async def _with_handoff(self, times: EngineTimes, pair: Client) -> EngineTimes:
        """Measure the hand-over: what it adds to the first and to the second token, and
        its processor time.
        """
        lengths = (self._lengths[1], self._lengths[-1])
        gaps_s = []
        extra_s = []
        for length in lengths:
            ttft_s, gap_s = await self._handoff_delays_s(pair, length)
            extra_s.append(ttft_s)
            gaps_s.append(gap_s)
        sent_token_s = max(gaps_s[1] - gaps_s[0], 0.0) / (lengths[1] - lengths[0])
        work_s = await self.request_work_s(pair, 2)
        work_s -= await self.request_work_s(self._singles[0], 2)
        step_s = 0.0
        if times.shares_processors:
            step_s = await self.engine_work_s(pair) - times.step_s - times.sequence_s
        return replace(
            times,
            handoff_s=max(extra_s[0], 0.0),
            handoff_work_s=max(work_s, 0.0),
            handoff_step_s=max(step_s, 0.0),
            # The step after the hand-over is simulated, so it does not count here.
            sent_s=max(gaps_s[0] - lengths[0] * sent_token_s - max(step_s, 0.0), 0.0),
            sent_token_s=sent_token_s,
        )

    async def _handoff_delays_s(self, pair: Client, length: int) -> tuple[float, float]:
        """Return what the hand-over of a prompt adds to the first and to the second
        token.
        """
        extra_s = []
        gaps_s = []
        await pair.send(length, 4, self._next_seed())  # connects the two servers
        for _ in range(_REPEATS):
            unpaired = await self._singles[0].send(length, 4, self._next_seed())
            paired = await pair.send(length, 4, self._next_seed())
            extra_s.append(paired.ttft_s - unpaired.ttft_s)
            # All tokens of a short answer may arrive in one event.
            if paired.gaps_s and unpaired.gaps_s:
                gaps_s.append(paired.gaps_s[0] - unpaired.gaps_s[0])
        return statistics.median(extra_s), statistics.median(gaps_s or [0.0])

    async def probe_s(self) -> float:
        """Return the seconds of the probe at the first server."""
        return await probe_s(self._singles[0], self._next_seed())


async def _read_capacity(server_url: str) -> tuple[int, int]:
    """Return the tokens that fit in a server's KV cache, and its block size."""
    async with open_session(server_url, _TIMEOUT_S, None) as session:
        async with session.get("/metrics") as response:
            gauges = parse_samples(await response.text(), "gauge")
    block_tokens = int(gauges["baton_kv_block_size_tokens"])
    return int(gauges["baton_kv_blocks_capacity"]) * block_tokens, block_tokens


async def _measure(
    endpoints: Sequence[Endpoint],
    pair_endpoint: Endpoint | None,
    pids: Sequence[int],
    settings: DecodeSettings,
    device: str,
) -> tuple[EngineTimes, int, float]:
    """Return the times, the longest context, and the seconds of the probe."""
    async with AsyncExitStack() as stack:
        singles = [await connect(stack, endpoint) for endpoint in endpoints]
        pair = None
        if pair_endpoint is not None:
            pair = await connect(stack, pair_endpoint)
        calibration = _Calibration(
            singles,
            pids,
            settings.batched_tokens_for(device),
            shares_processors=device == "cpu",
        )
        times = await calibration.times(pair)
        return times, singles[0].max_model_len, await calibration.probe_s()


def _start_proxies(
    stack: ExitStack, servers: RunningServers
) -> tuple[list[Endpoint], Endpoint | None]:
    """Start a proxy for each server, and one for the first two as a pair."""
    pids = servers.pids
    endpoints = []
    for url, pid in zip(servers.decodes, pids, strict=True):
        single = RunningServers([], [url], servers.secret, servers.timeout_s)
        proxy = stack.enter_context(running_proxy(single, _ONE))
        endpoints.append(Endpoint(proxy.url, (proxy.pid, pid)))
    if len(pids) < 2:
        return endpoints, None
    first, second = servers.decodes[:2]
    pair = RunningServers([first], [second], servers.secret, servers.timeout_s)
    proxy = stack.enter_context(running_proxy(pair, _PAIR))
    pair_pids = (proxy.pid, pids[0], pids[1])
    engine_pids = tuple(children(pids[1]))
    return endpoints, Endpoint(proxy.url, pair_pids, engine_pids)


def measure_constants(options: ServerOptions, num_servers: int) -> HostConstants:
    """Start servers on this host, and measure its constants.

    Raises:
        BenchError: a server could not be started, or a request failed.
    """
    started_at = time.monotonic()
    with running_servers(options, 0, num_servers) as servers:
        print(f"servers ready after {time.monotonic() - started_at:.0f} s", flush=True)
        others = OtherPrograms(servers.pids)
        constants = _measure_single_servers(options, servers)
        corrections = {
            deployment.arrangement: measure_correction(servers, deployment, constants)
            for deployment in arrangements(num_servers)
        }
        seconds = time.monotonic() - started_at
        print(f"constants measured after {seconds:.0f} s", flush=True)
        _warn_if_busy(others.processors())
    return replace(constants, corrections=corrections)


def _measure_single_servers(
    options: ServerOptions, servers: RunningServers
) -> HostConstants:
    """Measure everything except corrections."""
    argv = [f"--model={options.model}", f"--device={options.device}", *options.options]
    settings = load(DecodeSettings, [*argv, "--role=both"])
    split_settings = load(DecodeSettings, argv)
    with ExitStack() as stack:
        endpoints, pair_endpoint = _start_proxies(stack, servers)
        pids = [pid for endpoint in endpoints for pid in endpoint.pids]
        if pair_endpoint is not None:
            pids += pair_endpoint.pids
        times, max_model_len, probe = asyncio.run(
            _measure(endpoints, pair_endpoint, pids, settings, options.device)
        )
    capacity, block_tokens = asyncio.run(_read_capacity(servers.decodes[0]))
    return HostConstants(
        model=options.model,
        device=options.device,
        num_servers=len(servers.decodes),
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


def _warn_if_busy(other_processors: float) -> None:
    """Print a warning if the constants are too high because of other programs."""
    if is_disturbed(other_processors):
        print(
            f"WARNING: other programs used {other_processors:.1f} of "
            f"{available_cores()} processors while the constants were measured; "
            "predictions are too low if the host is idle later",
            flush=True,
        )
