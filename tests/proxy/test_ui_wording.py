"""The texts of the proxy's page in a browser: times, numbers, gaps, and API keys."""

import asyncio
import re
import time
from typing import Any

import pytest

from protocol.http.access import REDACTED
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


async def test_charts_skip_the_time_without_an_open_page():
    async with Rig() as rig:
        async with opened(rig) as page:
            points = rig.app._site._points
            await until(lambda: len(points) >= 3)
            assert await page.locator("#charts-note").is_hidden()
        await rig.app._site.close()
        for _, point in points:
            point["at"] -= 3600
        old = time.strftime("%H:%M:%S", time.localtime(points[0][1]["at"]))
        async with opened(rig) as page:
            await page.wait_for_selector("#charts-note:not([hidden])")
            await page.locator(".plot").first.press("Home")
            label = await page.locator(".plot").first.get_attribute("aria-label")
            assert label is not None
            assert f"at {old}" in label, "the chart does not show the real time"
            points_json = (
                "[{at: 1}, {at: 2}, {at: 3}, {at: 3603, isGap: true}, {at: 3604}]"
            )
            places = await call(
                page, "charts.js", f"return m.positions({points_json}, 1)"
            )
            assert places == [3598, 3599, 3600, 3603, 3604]


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
