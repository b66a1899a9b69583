"""Measures the constants of this host with real servers and short runs.

A client measures through a proxy, so that the constants include the time of HTTP and of
the proxy. As in a real deployment, all servers run, even while only one is measured.

With complete servers, the module measures:

1. The durations of steps on one server: with few and many streams, and with short and
   long contexts.
2. The durations of prompts of several lengths on one idle server.
3. The processor time of a request outside of the engine, on one server.
4. The slowdown of several servers that all decode, or that all compute prompts. On a
   GPU, also the slowdown of servers that decode while others compute prompts, because
   a GPU does not divide its time equally between the two.
5. The durations of loads that saturate all servers (saturation.py).

With servers that are split into prefill and decode servers, it measures:

6. The delay of a KV hand-over from a prefill to a decode server, in one split only.
7. The durations of loads that saturate all servers, in each split.

Complete servers cannot show the delay of a hand-over: a proxy sends both legs of a
request to the same complete server.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace

from benchmarks.advice.client import Client, Endpoint, connect
from benchmarks.advice.constants import HostConstants
from benchmarks.advice.deployments import Deployment, arrangements, split
from benchmarks.advice.fit import (
    DecodeSample,
    PromptSample,
    fit_decode,
    fit_deliveries,
    fit_mixed_slowdowns,
    fit_prompts,
    fit_slowdowns,
)
from benchmarks.advice.measurements import (
    SHARED_STREAMS,
    SHORT_PROMPT,
    Measurements,
    mean_context,
)
from benchmarks.advice.processors import OtherPrograms, children, is_disturbed
from benchmarks.advice.saturation import closed_loops, correction_of, measured_loops
from benchmarks.advice.servers import (
    RunningServers,
    ServerOptions,
    connect_servers,
    running_proxy,
    running_servers,
)
from benchmarks.bench.endpoint import open_session
from benchmarks.bench.scrape import parse_samples
from benchmarks.simulation.times import EngineTimes
from protocol.settings.machine import available_cores
from protocol.settings.settings import DecodeSettings, load

_TIMEOUT_S = 300.0
_STREAM_COUNTS = (1, 4, 16, 48)
_ONE = Deployment("one server", 0, 1, "round_robin", "never", pulls=False)
_PAIR = split(1, 1, "always")


def measure_constants(options: ServerOptions, num_servers: int) -> HostConstants:
    """Start servers on this host, and measure the constants of the host.

    Raises:
        BenchError: a server could not be started, or a request failed.
    """
    started_at = time.monotonic()
    replicas, *splits = arrangements(num_servers)
    with running_servers(options, 0, num_servers) as servers:
        print(f"servers ready after {time.monotonic() - started_at:.0f} s", flush=True)
        constants = _measure_complete_servers(options, servers)
        loops = closed_loops(constants)
        seconds = {replicas: measured_loops(servers, replicas, loops)}
    for deployment in splits:
        with running_servers(
            options, deployment.prefills, deployment.decodes
        ) as servers:
            connect_servers(servers)
            if deployment is splits[0]:
                constants = _with_handoff(constants, servers)
            seconds[deployment] = measured_loops(servers, deployment, loops)
    total_s = time.monotonic() - started_at
    print(f"constants measured after {total_s:.0f} s", flush=True)
    corrections = {
        deployment.arrangement: correction_of(constants, deployment, loops, measured_s)
        for deployment, measured_s in seconds.items()
    }
    return replace(constants, corrections=corrections)


def _measure_complete_servers(
    options: ServerOptions, servers: RunningServers
) -> HostConstants:
    """Measure everything except hand-overs and corrections."""
    argv = [f"--model={options.model}", f"--device={options.device}", *options.options]
    settings = load(DecodeSettings, [*argv, "--role=both"])
    split_settings = load(DecodeSettings, argv)
    with ExitStack() as stack:
        endpoints = []
        for url, pid in zip(servers.decodes, servers.pids, strict=True):
            single = RunningServers([], [url], servers.secret, servers.timeout_s)
            proxy = stack.enter_context(running_proxy(single, _ONE))
            endpoints.append(Endpoint(proxy.url, (proxy.pid, pid)))
        others = OtherPrograms([pid for each in endpoints for pid in each.pids])
        step_tokens = settings.batched_tokens_for(options.device)
        times, max_model_len, probe_s = asyncio.run(
            _measure(endpoints, step_tokens, shares_processors=options.device == "cpu")
        )
        _warn_if_busy(others.processors())
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
        probe_s=round(probe_s, 4),
        times=replace(
            times,
            capacity=capacity,
            block_tokens=block_tokens,
            max_streams=settings.num_seqs_for(options.device),
        ),
    )


async def _measure(
    endpoints: Sequence[Endpoint], step_tokens: int, *, shares_processors: bool
) -> tuple[EngineTimes, int, float]:
    """Return the times, the maximum context length, and the seconds of the probe."""
    pids = [pid for endpoint in endpoints for pid in endpoint.pids]
    async with AsyncExitStack() as stack:
        singles = [await connect(stack, endpoint) for endpoint in endpoints]
        max_model_len = singles[0].max_model_len
        measurements = Measurements(max_model_len, pids, step_tokens)
        await measurements.decode_s(singles[:1], 1, SHORT_PROMPT)  # warm up
        times = await _engine_times(
            measurements, singles[0], step_tokens, shares_processors=shares_processors
        )
        times = await _with_slowdowns(times, measurements, singles)
        return times, max_model_len, await measurements.probe_s(singles[0])


async def _engine_times(
    measurements: Measurements,
    single: Client,
    step_tokens: int,
    *,
    shares_processors: bool,
) -> EngineTimes:
    """Measure the times of one server while all other servers are idle."""
    decode_samples = []
    shapes = [(count, SHORT_PROMPT) for count in _STREAM_COUNTS]
    shapes.append((SHARED_STREAMS, measurements.long_context))
    for count, length in shapes:
        seconds = await measurements.decode_s([single], count, length)
        decode_samples.append(DecodeSample(count, mean_context(count, length), seconds))
    decode = fit_decode(decode_samples)
    delivery = fit_deliveries(
        [
            (count, await measurements.delivery_work_s(single, count))
            for count in _STREAM_COUNTS
        ]
    )
    prompt_samples = [
        PromptSample(length, await measurements.prompt_s(single, length))
        for length in measurements.lengths
    ]
    prompt = fit_prompts(prompt_samples, decode.step_s, step_tokens)
    return EngineTimes(
        step_s=decode.step_s,
        sequence_s=decode.sequence_s,
        held_token_s=decode.held_token_s,
        token_s=prompt.token_s,
        pair_s=prompt.pair_s,
        request_s=prompt.request_s,
        request_work_s=await measurements.request_work_s(single),
        delivery_s=delivery.step_s,
        delivery_token_s=delivery.token_s,
        min_prompt_step_s=0.0,
        step_tokens=step_tokens,
        shares_processors=shares_processors,
    )


async def _with_slowdowns(
    times: EngineTimes, measurements: Measurements, singles: Sequence[Client]
) -> EngineTimes:
    decode_s = []
    prompt_s = []
    for count in range(1, len(singles) + 1):
        busy = singles[:count]
        decode_s.append(await measurements.decode_s(busy, SHARED_STREAMS, SHORT_PROMPT))
        prompt_s.append(await measurements.shared_prompt_s(busy))
    decode_work_s = 0.0
    prompt_work_s = 0.0
    if times.shares_processors:
        decode_work_s = times.delivery_s + SHARED_STREAMS * times.delivery_token_s
        prompt_work_s = times.request_work_s
    times = replace(
        times,
        decode_slowdown=fit_slowdowns(decode_s, decode_work_s),
        prompt_slowdown=fit_slowdowns(prompt_s, prompt_work_s),
    )
    # On a CPU, the simulation assumes that the slowdown does not depend on the kinds of
    # the other tasks. The corrections of saturated servers (saturation.py) contain the
    # error of this assumption.
    if times.shares_processors:
        return times
    return await _with_mixed_slowdowns(
        times, measurements, singles, decode_s[0], prompt_s[0]
    )


async def _with_mixed_slowdowns(
    times: EngineTimes,
    measurements: Measurements,
    singles: Sequence[Client],
    decode_alone_s: float,
    prompt_alone_s: float,
) -> EngineTimes:
    """Measure how much streams and prompts of different servers slow each other down.

    Args:
        decode_alone_s: mean duration of steps while the other servers are idle.
        prompt_alone_s: time per prompt while the other servers are idle.
    """
    decode_s = []
    prompt_s = []
    for count in range(2, len(singles) + 1):
        others = singles[1:count]
        decode_s.append(await measurements.mixed_decode_s(singles[0], others))
        prompt_s.append(await measurements.mixed_prompt_s(singles[0], others))
    return replace(
        times,
        mixed_decode_slowdown=fit_mixed_slowdowns(decode_s, decode_alone_s),
        mixed_prompt_slowdown=fit_mixed_slowdowns(prompt_s, prompt_alone_s),
    )


def _with_handoff(constants: HostConstants, servers: RunningServers) -> HostConstants:
    """Measure hand-overs from the first prefill server to the first decode server."""
    prefill_pid = servers.pids[0]
    decode_pid = servers.pids[len(servers.prefills)]
    decodes = servers.decodes[:1]
    single = RunningServers([], decodes, servers.secret, servers.timeout_s)
    pair = replace(single, prefills=servers.prefills[:1])
    with running_proxy(single, _ONE) as proxy, running_proxy(pair, _PAIR) as pair_proxy:
        endpoint = Endpoint(proxy.url, (proxy.pid, decode_pid))
        pair_endpoint = Endpoint(
            pair_proxy.url,
            (pair_proxy.pid, prefill_pid, decode_pid),
            tuple(children(decode_pid)),
        )
        pids = [*servers.pids, proxy.pid, pair_proxy.pid]
        times = asyncio.run(_measure_handoff(constants, endpoint, pair_endpoint, pids))
    return replace(constants, times=times)


async def _measure_handoff(
    constants: HostConstants,
    endpoint: Endpoint,
    pair_endpoint: Endpoint,
    pids: Sequence[int],
) -> EngineTimes:
    """Measure the delays that a hand-over adds before the first and before the second
    token, and the processor time of a hand-over.
    """
    times = constants.times
    measurements = Measurements(constants.max_model_len, pids, times.step_tokens)
    lengths = measurements.handoff_lengths
    async with AsyncExitStack() as stack:
        single = await connect(stack, endpoint)
        pair = await connect(stack, pair_endpoint)
        delays = [
            await measurements.handoff_delays_s(single, pair, length)
            for length in lengths
        ]
        work_s = await measurements.request_work_s(pair, 2)
        work_s -= await measurements.request_work_s(single, 2)
        step_s = 0.0
        if times.shares_processors:
            step_s = await measurements.handoff_step_s(pair)
    (ttft_s, gap_s), (_, long_gap_s) = delays
    sent_token_s = max(long_gap_s - gap_s, 0.0) / (lengths[1] - lengths[0])
    # The simulation adds `step_s` to a step, so the transfer must not contain it.
    sent_s = gap_s - lengths[0] * sent_token_s - step_s
    return replace(
        times,
        handoff_s=max(ttft_s, 0.0),
        handoff_work_s=max(work_s, 0.0),
        handoff_step_s=step_s,
        sent_s=max(sent_s, 0.0),
        sent_token_s=sent_token_s,
    )


async def _read_capacity(server_url: str) -> tuple[int, int]:
    """Return the capacity of a server's KV cache and its block size, both in tokens."""
    async with open_session(server_url, _TIMEOUT_S, None) as session:
        async with session.get("/metrics") as response:
            gauges = parse_samples(await response.text(), "gauge")
    block_tokens = int(gauges["baton_kv_block_size_tokens"])
    return int(gauges["baton_kv_blocks_capacity"]) * block_tokens, block_tokens


def _target_s(settings: DecodeSettings, device: str) -> float | None:
    """Return the target time between tokens; None if the servers have no target."""
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
