"""More than a cluster can do: an open loop at three times its capacity.

Prints what it measured as one JSON line; docs/performance.md has the figures of a quiet machine.
"""

import asyncio
import json
import random
import resource
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from tests.rigs.client import fresh_prompt, greedy
from tests.rigs.cluster import (
    Cluster,
    assert_idle,
    running,
    start_decode,
    start_prefill,
    start_proxy,
)
from tests.rigs.plain_http import http

_WARM_S, _MEASURED_S = 15.0, 60.0
_LIMITS = ("--max-queue-s", "6")
_FEW_TOKENS = (
    "--kv-cache-tokens",
    "8192",
)  # of which each page is used before memory is measured


@pytest.fixture
def bounded(default_model: Path) -> Iterator[Cluster]:
    model = default_model
    p, d = (
        start(model, "--max-num-seqs", "8", "--threads", "1", *_FEW_TOKENS, *_LIMITS)
        for start in (start_prefill, start_decode)
    )
    x = start_proxy([p], [d], *_LIMITS)
    with running(p, d, x):
        yield Cluster([p], [d], x, model)


class Offered:
    """Requests at a rate, and what became of each: (status, seconds)."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.found: list[tuple[int, float]] = []

    @property
    def num_served(self) -> int:
        return sum(status == 200 for status, _ in self.found)

    async def _ask(self, session: aiohttp.ClientSession) -> int:
        prompt = [
            random.randrange(300, 20_000) for _ in range(random.randrange(32, 96))
        ]
        body = greedy(prompt, 8)
        began = time.perf_counter()
        async with session.post(f"{self._url}/v1/completions", json=body) as response:
            await response.read()
        self.found.append((response.status, time.perf_counter() - began))
        return response.status

    async def run(
        self, seconds: float, *, rate: float = 0.0, clients: int = 0
    ) -> "Offered":
        """An open loop at `rate`, or so many clients that ask one after the other."""
        until = time.perf_counter() + seconds
        connector = aiohttp.TCPConnector(limit=0)

        async def closed() -> None:
            while time.perf_counter() < until:
                if await self._ask(session) != 200:
                    await asyncio.sleep(0.2)

        async with aiohttp.ClientSession(connector=connector) as session:
            tasks = [asyncio.create_task(closed()) for _ in range(clients)]
            while rate and time.perf_counter() < until:
                tasks.append(asyncio.create_task(self._ask(session)))
                await asyncio.sleep(random.expovariate(rate))
            await asyncio.gather(*tasks)
        return self

    def figures(self) -> dict[str, Any]:
        def ms(status: int, level: float) -> float:
            times = [seconds for code, seconds in self.found if code == status]
            return round(float(np.percentile(times, level)) * 1e3, 1) if times else 0.0

        told = {
            code: sum(status == code for status, _ in self.found) for code in (200, 429)
        }
        levels = {
            f"{code}_p{level}_ms": ms(code, level)
            for code in told
            for level in (50, 99)
        }
        return {
            "asked": len(self.found),
            **{str(c): n for c, n in told.items()},
            **levels,
        }


def _rss_mb(cluster: Cluster) -> list[int]:
    """Of the proxy, and of both processes of each server."""
    mine = [
        int(s.metrics()["process_resident_memory_bytes"]) for s in cluster.servers()
    ]
    engines = [pid for server in cluster.servers()[1:] for pid in server.engine_pids()]
    pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in engines]
    return [one >> 20 for one in mine] + [
        one * resource.getpagesize() >> 20 for one in pages
    ]


@pytest.mark.slow
async def test_at_three_times_its_capacity_a_cluster_does_as_much_and_refuses_the_rest(
    bounded,
):
    url = bounded.url
    capacity = (await Offered(url).run(_WARM_S, clients=6)).num_served / _WARM_S
    calm = await Offered(url).run(_MEASURED_S, rate=0.9 * capacity)
    await Offered(url).run(_WARM_S, rate=3.0 * capacity)
    before = _rss_mb(bounded)
    much = await Offered(url).run(_MEASURED_S, rate=3.0 * capacity)
    after = _rss_mb(bounded)
    told = {"0.9x": calm.figures(), "3x": much.figures(), "rss_mb": [before, after]}
    print(json.dumps({"capacity_per_s": round(capacity, 2), **told}))
    assert {status for status, _ in calm.found + much.found} <= {200, 429}
    served = much.num_served
    assert served >= 0.5 * capacity * _MEASURED_S  # it goes on serving
    assert len(much.found) - served >= 0.3 * len(much.found)
    assert all(now - then < 100 for then, now in zip(before, after, strict=True))
    assert_idle(*bounded.servers()[1:])


def test_requests_that_expire_in_whichever_phase_leave_no_block_and_no_lease(
    tiny_cluster,
):
    """In a queue, a prefill, a pull and a decode: each gets one end, and its KV comes home long
    before its lease ends."""

    def ask(at: int) -> tuple[int, str]:
        body = greedy(fresh_prompt(700), 60, stream=bool(at % 2), priority=at % 3)
        headers = {"x-request-timeout-s": f"{0.01 * 1.13**at:.4f}"}
        url = f"{tiny_cluster.url}/v1/completions"
        answer = http.post(url, json=body, headers=headers, timeout=60)
        return answer.status_code, answer.text

    with ThreadPoolExecutor(12) as threads:
        found = list(threads.map(ask, range(48)))
    for status, text in found:
        is_whole = status == 200 and "deadline_exceeded" not in text
        assert is_whole or (
            status in (200, 504) and text.count("deadline_exceeded") == 1
        )
    statuses = [status for status, _ in found]
    assert 504 in statuses and 200 in statuses
    assert_idle(*tiny_cluster.prefill, *tiny_cluster.decode)
