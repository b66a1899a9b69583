"""The page beside a cluster that serves requests for ten minutes: what it costs, and that nothing
grows, in the browser or in the proxy."""

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
SECONDS = float(os.environ.get("BATON_TEST_PAGE_S", "600"))
WARM = 0.25  # share of SECONDS after which histories are full
CLIENTS, ASKS, IDLE_S = 4, 200, 20.0


def _cpu_s(server: Server) -> float:
    """CPU seconds of the server's one process."""
    fields = (
        Path(f"/proc/{server.child.pid}/stat").read_text().rpartition(") ")[2].split()
    )
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _rss_mb(server: Server) -> float:
    return server.metrics()["process_resident_memory_bytes"] / 2**20


async def _asks(url: str, session: aiohttp.ClientSession, until: float) -> int:
    num, loop = 0, asyncio.get_running_loop()
    while loop.time() < until:
        body = greedy(fresh_prompt(32), 8, stream=True)
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            await answer.read()
        num += 1
    return num


async def _held(page: Any) -> dict[str, float]:
    """Heap and DOM nodes of the page, after a garbage collection."""
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


async def _told_share(proxy: Server, session: aiohttp.ClientSession) -> float:
    """The share of its time in which the proxy would tell a page what changes in each interval."""
    async with session.get(f"{proxy.url}/ui/state?since=0&epoch=") as answer:
        state = await answer.json()
    changes = int(
        2 * state["number"] / SECONDS * state["interval_s"]
    )  # twice an interval's
    rest, before = (
        f"since={state['number'] - changes}&epoch={state['epoch']}",
        _cpu_s(proxy),
    )
    for _ in range(ASKS):
        async with session.get(f"{proxy.url}/ui/state?{rest}") as answer:
            assert (await answer.json())["points"]
    return (_cpu_s(proxy) - before) / ASKS / state["interval_s"]


async def _watched(
    running: Cluster,
) -> tuple[list[dict[str, float]], dict[str, float], list[str]]:
    """Memory after WARM and at the end, the costs, and the lines of the console."""
    told: list[str] = []
    proxy, until = running.proxy, asyncio.get_running_loop().time() + SECONDS
    async with (
        playwright.async_playwright() as driver,
        aiohttp.ClientSession() as session,
    ):
        browser = await driver.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"]
        )
        page = await browser.new_page()
        page.on("console", lambda message: told.append(message.text))
        page.on("pageerror", lambda error: told.append(str(error)))
        await page.goto(proxy.url)
        load = asyncio.gather(
            *(_asks(proxy.url, session, until) for _ in range(CLIENTS))
        )
        await asyncio.sleep(SECONDS * WARM)
        held = [await _held(page) | {"proxy_mb": _rss_mb(proxy)}]
        num_requests = sum(await load)
        held.append(await _held(page) | {"proxy_mb": _rss_mb(proxy)})
        assert await page.inner_text("#status") == "ready: 2 of 2 servers"
        shares = {
            "told": await _told_share(proxy, session),
            "open": await _idle_share(proxy),
        }
        await browser.close()
        shares["closed"] = await _idle_share(proxy)
        costs = {"requests": num_requests, **shares}
    return held, costs, told


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 300)
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_the_page_grows_by_nothing_and_costs_hardly_any_of_the_proxys_time(tiny_model):
    with cluster(
        tiny_model
    ) as running:  # for longer than a test that is a coroutine may take
        (warm, end), costs, told = asyncio.run(_watched(running))
    print(json.dumps({"warm": warm, "end": end, **costs}))
    assert told == []
    assert costs["told"] + costs["open"] - costs["closed"] < 0.02
    for name, most in {
        "heap_mb": 2.0,
        "nodes": 0.1 * warm["nodes"],
        "proxy_mb": 8.0,
    }.items():
        assert end[name] <= warm[name] + most, name
