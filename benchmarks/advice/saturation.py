"""Corrects the times of servers by real runs in which they are saturated.

Single measurements on a host with idle cores do not show how busy servers slow each
other down: they share caches, the host switches between threads, and threads of one
engine wait for each other. Each arrangement of servers therefore runs two closed loops,
one with long prompts and one with long answers. Two factors (Correction) are fitted so
that the simulated loops take as long as the real loops.
"""

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from benchmarks.advice.client import ClosedLoop, Endpoint, connect
from benchmarks.advice.constants import Correction, HostConstants
from benchmarks.advice.deployments import Deployment
from benchmarks.advice.predict import simulated_fleet
from benchmarks.advice.processors import typical_s
from benchmarks.advice.servers import RunningServers, running_proxy
from benchmarks.loads import Request

# The prompt lengths below are for steps of this number of prompt tokens, as on a CPU.
# If steps are larger by a factor, as on a GPU, prompts are longer by the same factor.
USUAL_STEP_TOKENS = 512
_PROMPTS_LENGTHS = (256, 8)  # tokens of a prompt and of its answer
_ANSWERS_LENGTHS = (64, 64)
_IN_FLIGHT = 4  # per server
_COUNT = 20  # requests per server
_ROUNDS = 4
_PENALTY = 0.01
_MAX_LOG = math.log(4.0)  # largest logarithm of a factor
_LOG_STEP = 0.1  # change of a logarithm for numerical derivatives
_LOG_STEPS = _LOG_STEP * np.eye(2)

FloatArray = NDArray[np.float64]
# A function that simulates a closed loop with a correction, and returns its seconds.
Simulate = Callable[[ClosedLoop, Correction], float]


def measured_loops(
    servers: RunningServers, deployment: Deployment, loops: Sequence[ClosedLoop]
) -> list[float]:
    """Run closed loops on the servers of a deployment, and return the seconds of each.

    Raises:
        BenchError: the proxy was not ready, or a request failed.
    """
    with running_proxy(servers, deployment) as proxy:
        pids = [*servers.pids, proxy.pid]
        return asyncio.run(_measure_loops(proxy.url, pids, loops))


def loops_once_s(url: str, loops: Sequence[ClosedLoop]) -> list[float]:
    """Run each closed loop once through a proxy, and return the seconds of each.

    Another loop before them warms the servers up.

    Raises:
        BenchError: a request failed.
    """
    return asyncio.run(_run_loops_once(url, loops))


async def _run_loops_once(url: str, loops: Sequence[ClosedLoop]) -> list[float]:
    seeds = _seeds(loops)
    async with AsyncExitStack() as stack:
        client = await connect(stack, Endpoint(url, ()))
        await client.send_loop(loops[0], next(seeds))
        return [await client.send_loop(loop, next(seeds)) for loop in loops]


def _seeds(loops: Sequence[ClosedLoop]) -> Iterator[int]:
    """Yield a seed for each loop. No two loops have an equal prompt."""
    return itertools.count(int(time.time()) * 1000, max(loop.count for loop in loops))


def closed_loops(constants: HostConstants) -> tuple[ClosedLoop, ClosedLoop]:
    """Return a load with long prompts, and one with long answers."""
    scale = max(1, constants.times.step_tokens // USUAL_STEP_TOKENS)
    longest_mean = int(constants.max_model_len / 1.5)
    prompts, answers = (
        ClosedLoop(
            prompt_tokens=min(scale * length, longest_mean - num_outputs),
            output_tokens=num_outputs,
            count=_COUNT * constants.num_servers,
            in_flight=_IN_FLIGHT * constants.num_servers,
            is_mixed=True,
        )
        for length, num_outputs in (_PROMPTS_LENGTHS, _ANSWERS_LENGTHS)
    )
    return prompts, answers


async def _measure_loops(
    url: str, pids: Sequence[int], loops: Sequence[ClosedLoop]
) -> list[float]:
    """Run closed loops through a proxy, and return the seconds of each."""
    seconds = []
    seeds = _seeds(loops)
    async with AsyncExitStack() as stack:
        client = await connect(stack, Endpoint(url, ()))
        for loop in loops:
            await client.send_loop(loop, next(seeds))  # warm up

            async def once(loop: ClosedLoop = loop) -> float:
                return await client.send_loop(loop, next(seeds))

            seconds.append(await typical_s(pids, once))
    return seconds


def simulated_s(
    constants: HostConstants, deployment: Deployment, loop: ClosedLoop
) -> float:
    """Return the seconds that a closed loop takes in the simulation."""
    hashes = itertools.count(1)
    indices = iter(range(loop.count))

    def next_request(now: float) -> Request | None:
        index = next(indices, None)
        if index is None:
            return None
        prompt_tokens, output_tokens = loop.lengths(index)
        num_blocks = prompt_tokens // constants.times.block_tokens
        return Request(
            arrival_s=now,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            hashes=tuple(itertools.islice(hashes, num_blocks)),
        )

    first = [next_request(0.0) for _ in range(min(loop.in_flight, loop.count))]
    fleet = simulated_fleet(
        constants, deployment, lambda _request, now: next_request(now)
    )
    fleet.run([request for request in first if request is not None])
    return fleet.now


def correction_of(
    constants: HostConstants,
    deployment: Deployment,
    loops: Sequence[ClosedLoop],
    measured_s: Sequence[float],
) -> Correction:
    """Return the factors with which simulated loops take as long as real loops.

    Args:
        loops: the loads of `closed_loops`.
        measured_s: seconds that these loads took on the real servers.
    """
    name = deployment.arrangement

    def simulate(loop: ClosedLoop, correction: Correction) -> float:
        corrected = replace(constants, corrections={name: correction})
        return simulated_s(corrected, deployment, loop)

    return fit_correction(simulate, loops, measured_s)


def fit_correction(
    simulate: Simulate, loops: Sequence[ClosedLoop], measured_s: Sequence[float]
) -> Correction:
    """Fit both factors of a Correction, by Gauss-Newton steps on their logarithms.

    A penalty (_PENALTY) on the logarithms keeps a factor near 1 if the factor hardly
    changes the simulated durations.
    """
    tried: list[tuple[float, FloatArray]] = []

    def errors(logs: FloatArray) -> FloatArray:
        correction = _correction(logs)
        values = np.array(
            [
                math.log(simulate(loop, correction) / seconds)
                for loop, seconds in zip(loops, measured_s, strict=True)
            ]
        )
        tried.append((values @ values + _PENALTY * (logs @ logs), logs))
        return values

    logs = np.zeros(2)
    for _ in range(_ROUNDS):
        current = errors(logs)
        columns = [(errors(logs + step) - current) / _LOG_STEP for step in _LOG_STEPS]
        slopes = np.stack(columns, axis=1)
        matrix = slopes.T @ slopes + _PENALTY * np.eye(2)
        change = np.linalg.solve(matrix, -slopes.T @ current - _PENALTY * logs)
        logs = np.clip(logs + change, -_MAX_LOG, _MAX_LOG)
    errors(logs)
    # A simulated duration jumps if a small change of a factor leads to a different
    # placement of requests. The last factors are therefore not always the best.
    _, best = min(tried, key=itemgetter(0))
    return _correction(np.clip(best, -_MAX_LOG, _MAX_LOG))


def _correction(logs: FloatArray) -> Correction:
    return Correction(*(round(math.exp(value), 4) for value in logs))
