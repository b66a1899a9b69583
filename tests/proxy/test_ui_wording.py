"""The texts of the proxy's page in a browser: times, numbers, gaps, and API keys."""

import asyncio
import re
import time
from typing import Any

import pytest

from protocol.http.access import REDACTED
from proxy.ui import points, state
from tests.proxy.fakes import Fake, Rig, Waits, decodes, until

pytest.importorskip("playwright.async_api", reason="needs the extra `browser`")
from tests.proxy.test_ui_browser import CHROMIUM, opened

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium"),
]
NEGATIVE_TIME = re.compile(r"[-−]\d[\d.]* (?:µs|ms|s)\b")  # noqa: RUF001


async def call(page: Any, module: str, expression: str) -> Any:
    """Return the value of a JavaScript expression, in which `m` is this module of the
    page.
    """
    return await page.evaluate(
        f"async () => {{ const m = await import('/ui/{module}'); {expression} }}"
    )


async def test_times_of_running_requests_are_never_negative():
    decode = Fake(Waits())
    async with Rig(decode=[decode]) as rig, opened(rig) as page:
        await page.wait_for_selector("#servers-table tbody tr:nth-child(2)")
        tasks = []
        # The requests differ in the time since the chart's last point.
        for number in range(1, 6):
            tasks.append(asyncio.create_task(rig.complete()))
            await until(lambda number=number: len(decode.calls) == number)
            await page.wait_for_selector(f".request:nth-child({number})")
            await page.locator(".request summary").first.click()
            await page.wait_for_selector(".request .detail table")
            text = await page.inner_text("#requests-list")
            labels = await page.locator(".timeline").evaluate_all(
                "all => all.map((one) => one.getAttribute('aria-label')).join()"
            )
            assert not NEGATIVE_TIME.search(text + labels)
        for task in tasks:
            task.cancel()


async def test_server_times_outside_of_the_proxys_times_are_clipped():
    row = """{at: 100, first_s: null, end_s: null, legs: [["prefill-0", 0.1]],
              served: {"prefill-0": {
                  times: {admitted: -0.2, drawn: 9, end: 9}, generated: 1}}}"""
    async with Rig() as rig, opened(rig) as page:
        segments = await call(
            page, "requests.js", f"return m.segments({row}, m.elapsed({row}, 99))"
        )
        assert all(0 <= segment["from"] < segment["to"] for segment in segments)
        assert await call(page, "requests.js", f"return m.elapsed({row}, 99)") == 0.1


async def test_charts_show_the_past_and_no_time_without_measurements(monkeypatch):
    monkeypatch.setattr(state, "HISTORY_INTERVAL_S", 0.05)
    monkeypatch.setattr(points, "HISTORY_INTERVAL_S", 0.05)
    async with Rig() as rig:
        await until(lambda: len(rig.app._site.points.history(0)) >= 3)
        for point in rig.app._site.points.history(0):
            point["at"] -= 1800
        past = rig.app._site.points.history(0)[0]["at"]
        async with opened(rig) as page:
            await page.wait_for_selector(".plot canvas")
            plot = page.locator(".plot").first
            await plot.press("Home")
            clock = time.strftime("%H:%M:%S", time.localtime(past))
            label = await plot.get_attribute("aria-label")
            assert label is not None and f"at {clock}" not in label
            await page.select_option("#range", "3600")
            await plot.press("Home")
            label = await plot.get_attribute("aria-label")
            assert label is not None and f"at {clock}" in label
            await page.reload()
            await page.wait_for_selector(".plot canvas")
            assert await page.input_value("#range") == "3600"


async def test_points_of_a_range_are_selected_and_gaps_are_not_bridged():
    async with Rig() as rig, opened(rig) as page:
        history = "[{at: 100}, {at: 110}, {at: 120}, {at: 700}, {at: 710}]"
        recent = "[{at: 708}, {at: 709}, {at: 710}]"

        async def select(range_s: int) -> list[float]:
            expression = (
                f"return m.selectPoints({recent}, {history}, 711, {range_s}, 25)"
                ".map((point) => Math.round(point.at))"
            )
            times = await call(page, "charts.js", expression)
            assert isinstance(times, list)
            return times

        assert await select(300) == [708, 709, 710]
        assert await select(900) == [100, 110, 120, 120, 700, 710]


async def test_rates_are_computed_from_the_history_when_a_page_is_opened():
    async with Rig() as rig, opened(rig) as page:
        expression = """
            const at = (at, ended) => ({at, ended, of: 1, failed: 0, first_bytes: [],
                                        prefill: {}, decode: {}});
            const past = m.derive(at(100, 0), [], 25);
            const later = m.derive(at(110, 40), [past], 25);
            const newest = m.derive(at(111, 42), [past, later], 25);
            const lost = m.derive(at(200, 42), [past, later, newest], 25);
            return [past, later, newest, lost].map((point) => point.ended[0])"""
        # The window of a rate is at least 5 s long. So the window of the newest point
        # begins at the first point: 42 requests in 11 s.
        rates = await call(page, "charts.js", expression)
        assert rates == [None, 4, 42 / 11, None]


async def test_page_of_a_proxy_without_keys_mentions_no_keys():
    async with Rig() as rig, opened(rig) as page:
        await page.wait_for_selector("#servers-table tbody tr:nth-child(2)")
        assert await page.locator("#key-button").is_hidden()
        code = await page.inner_text("#code-curl") + await page.inner_text(
            "#code-python"
        )
        assert "KEY" not in code and "pip install openai" in code


@pytest.mark.parametrize("key", ["an operator's", "a client's"])
async def test_page_of_a_proxy_with_keys_takes_a_key_and_its_commands_send_one(key):
    async with Rig(api_key=("a client's",), admin_key=("an operator's",)) as rig:
        async with opened(rig) as page:
            await page.fill("#key-input", key)
            await page.keyboard.press("Enter")
            await page.wait_for_selector("#key-button:not([hidden])")
            await page.wait_for_selector("#code-curl >> text=Bearer $BATON_API_KEY")
            assert 'os.environ["BATON_API_KEY"]' in await page.inner_text(
                "#code-python"
            )


async def test_page_mentions_keys_that_servers_require():
    async with Rig([], [Fake(decodes, details=REDACTED)]) as rig, opened(rig) as page:
        await page.wait_for_selector("#key-button:not([hidden])")
        await page.wait_for_selector("#code-curl >> text=Bearer $BATON_API_KEY")


async def test_nouns_are_singular_or_plural_as_their_number_requires():
    async with Rig() as rig, opened(rig) as page:
        await page.wait_for_selector("#track-summary >> text=no request has ended yet")
        await rig.complete()
        one = "the latest request went from a prefill server to a decode server"
        await page.wait_for_selector(f"#track-summary >> text={one}")
        assert await page.inner_text("#requests-count") == ""
        assert await page.inner_text("#status") == "ready: 2 of 2 servers"
        await rig.complete()
        two = "of the latest 2 requests, 2 went from a prefill server to a decode "
        two += "server and 0 to"
        await page.wait_for_selector(f"#track-summary >> text={two}")
        assert await page.inner_text("#requests-count") == "the latest 2"
    async with Rig([]) as rig, opened(rig) as page:
        await page.wait_for_selector("#status >> text=ready: 1 of 1 server")
        assert await page.inner_text("#status") == "ready: 1 of 1 server"
