"""The proxy's status page is open while a cluster serves requests for ten minutes.

The page must cost little CPU time, and memory must not grow in the browser or in the
proxy.
"""

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.rigs.client import fresh_prompt, greedy
from tests.rigs.cluster import Cluster, Server, cluster

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
playwright = pytest.importorskip(
    "playwright.async_api", reason="needs the extra `browser`"
)
RUN_SECONDS = float(os.environ.get("BATON_TEST_PAGE_S", "600"))
WARMUP_SHARE = 0.25  # after this share of RUN_SECONDS, the page's histories are full
NUM_CLIENTS = 4
NUM_STATE_REQUESTS = 200
IDLE_S = 20.0


def _cpu_s(server: Server) -> float:
    """Return the CPU seconds that the server's HTTP process has used."""
    stat = Path(f"/proc/{server.child.pid}/stat").read_text()
    fields = stat.rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _rss_mb(server: Server) -> float:
    return server.metrics()["process_resident_memory_bytes"] / 2**20


async def _send_requests(url: str, session: aiohttp.ClientSession, until: float) -> int:
    num_requests = 0
    loop = asyncio.get_running_loop()
    while loop.time() < until:
        body = greedy(fresh_prompt(32), 8, stream=True)
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            await answer.read()
        num_requests += 1
    return num_requests


async def _page_memory(page: Any) -> dict[str, float]:
    """Return the heap and the DOM nodes of the page, after a garbage collection."""
    devtools = await page.context.new_cdp_session(page)
    await devtools.send("HeapProfiler.collectGarbage")
    heap = await devtools.send("Runtime.getHeapUsage")
    nodes = await devtools.send("Memory.getDOMCounters")
    await devtools.detach()
    return {"heap_mb": heap["usedSize"] / 2**20, "nodes": nodes["nodes"]}


async def _idle_share(proxy: Server) -> float:
    before = _cpu_s(proxy)
    await asyncio.sleep(IDLE_S)
    return (_cpu_s(proxy) - before) / IDLE_S


async def _update_share(proxy: Server, session: aiohttp.ClientSession) -> float:
    """Return the share of a core that the proxy needs for the updates of one page."""
    async with session.get(f"{proxy.url}/ui/state?since=0&epoch=") as answer:
        state = await answer.json()
    # The measured update has twice the changes of a usual interval.
    changes = int(2 * state["number"] / RUN_SECONDS * state["interval_s"])
    query = f"since={state['number'] - changes}&epoch={state['epoch']}"
    before = _cpu_s(proxy)
    for _ in range(NUM_STATE_REQUESTS):
        async with session.get(f"{proxy.url}/ui/state?{query}") as answer:
            assert (await answer.json())["points"]
    return (_cpu_s(proxy) - before) / NUM_STATE_REQUESTS / state["interval_s"]


async def _measure_page(
    running: Cluster,
) -> tuple[list[dict[str, float]], dict[str, float], list[str]]:
    """Return the memory after the warm-up and at the end, the CPU costs, and the lines
    on the browser's console.
    """
    console: list[str] = []
    proxy = running.proxy
    until = asyncio.get_running_loop().time() + RUN_SECONDS
    async with (
        playwright.async_playwright() as driver,
        aiohttp.ClientSession() as session,
    ):
        browser = await driver.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"]
        )
        page = await browser.new_page()
        page.on("console", lambda message: console.append(message.text))
        page.on("pageerror", lambda error: console.append(str(error)))
        await page.goto(proxy.url)
        load = asyncio.gather(
            *(_send_requests(proxy.url, session, until) for _ in range(NUM_CLIENTS))
        )
        await asyncio.sleep(RUN_SECONDS * WARMUP_SHARE)
        memory = [await _page_memory(page) | {"proxy_mb": _rss_mb(proxy)}]
        num_requests = sum(await load)
        memory.append(await _page_memory(page) | {"proxy_mb": _rss_mb(proxy)})
        assert await page.inner_text("#status") == "ready: 2 of 2 servers"
        shares = {
            "update": await _update_share(proxy, session),
            "open": await _idle_share(proxy),
        }
        await browser.close()
        shares["closed"] = await _idle_share(proxy)
        costs = {"requests": num_requests, **shares}
    return memory, costs, console


@pytest.mark.slow
@pytest.mark.timeout(RUN_SECONDS + 300)
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_page_does_not_grow_and_costs_little_of_the_proxys_time(tiny_model):
    # This test is not a coroutine, because coroutines have a shorter time limit than
    # other tests.
    with cluster(tiny_model) as running:
        (warm, end), costs, console = asyncio.run(_measure_page(running))
    print(json.dumps({"warm": warm, "end": end, **costs}))
    assert console == []
    assert costs["update"] + costs["open"] - costs["closed"] < 0.02
    limits = {"heap_mb": 2.0, "nodes": 0.1 * warm["nodes"], "proxy_mb": 8.0}
    for name, limit in limits.items():
        assert end[name] <= warm[name] + limit, name
