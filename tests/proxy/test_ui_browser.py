"""The proxy's page in a real browser: its content, its controls, and its console."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.proxy.fakes import (
    Call,
    Fake,
    Rig,
    Waits,
    answers,
    decodes,
    prefills,
    streams,
)
from tests.proxy.test_ui import Stats, finished_request

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
playwright = pytest.importorskip(
    "playwright.async_api", reason="needs the extra `browser`"
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium"),
]
# The browser logs failed requests to the console, in addition to the page's report.
ALLOWED_LOG_LINE = "Failed to load resource: the server responded"
HTML_INJECTION = '<img src=x onerror="document.title=1">'
PHONE_OPTIONS = {"viewport": {"width": 390, "height": 844}, "color_scheme": "dark"}


@asynccontextmanager
async def opened(rig: Rig, **options: Any) -> AsyncIterator[Any]:
    """Yield the page of the rig's proxy. Check that the page has logged nothing to the
    console except failed requests.
    """
    messages: list[str] = []
    async with playwright.async_playwright() as driver:
        browser = await driver.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"]
        )
        page = await (await browser.new_context(**options)).new_page()
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        await page.goto(rig.url)
        yield page
        assert await page.title() == "Baton"
        await browser.close()
    assert [text for text in messages if not text.startswith(ALLOWED_LOG_LINE)] == []


@pytest.mark.parametrize("options", [{}, PHONE_OPTIONS], ids=["desktop", "phone"])
async def test_fifty_servers_fit_and_their_texts_are_escaped(options):
    fakes = [[Fake(behave) for _ in range(25)] for behave in (prefills, decodes)]
    for fake in (*fakes[0], *fakes[1]):
        stats = Stats(**{"baton_kv_blocks{state=free}": 9.0})
        fake.on_stats = stats
        stats.server = {
            "model": HTML_INJECTION,
            "version": HTML_INJECTION,
            "kv_layout": HTML_INJECTION,
            "block_size": 16,
        }
    async with Rig(*fakes) as rig:
        await fakes[1][-1].stop()
        for _ in range(4):
            await rig.complete(headers={"x-request-id": HTML_INJECTION})
        async with opened(rig, **options) as page:
            await page.wait_for_selector("#servers-table tbody tr:nth-child(50)")
            await page.wait_for_selector(".request:nth-child(4)")
            assert await page.inner_text("#status") == "degraded: 49 of 50 servers"
            await page.locator(".request summary").first.press("Enter")
            assert HTML_INJECTION in await page.inner_text(".request .detail p")
            assert HTML_INJECTION in await page.inner_text("#models")
            assert await page.locator("main img").count() == 0
            root = "document.documentElement"
            widths = f"[{root}.scrollWidth, {root}.clientWidth]"
            content_width, screen_width = await page.evaluate(widths)
            assert content_width <= screen_width
            await page.fill("#servers-filter", "decode-24 ready")
            await page.wait_for_selector(
                "#servers-table tr:not([hidden]) >> text=decode-24"
            )
            assert await page.inner_text("#servers-count") == "1 of 50"


async def test_chat_streams_and_shows_its_times_and_the_sources_of_its_kv():
    calls: list[Call] = []

    async def chats(call: Call) -> None:
        calls.append(call)
        stats.served = [
            finished_request(
                1,
                call.headers["x-request-id"],
                admitted=0.0,
                read=0.1,
                pulled=0.2,
                end=0.3,
            )
        ]
        await asyncio.sleep(0.3)
        first, *others = [f'content": "{w} "}}}}]}}\n\n' for w in "abc"]
        deltas = ["reasoning_" + first, *others]
        events = ['data: {"choices": [{"delta": {"' + delta for delta in deltas]
        last = 'data: {"choices": [], "baton_kv": {"transferred": 7, "skipped": 1}}\n\n'
        encoded = [event.encode() for event in (*events, last, "data: [DONE]\n\n")]
        stream = streams(*encoded)
        await stream(call)

    async with Rig(decode=[Fake(chats)]) as rig:
        stats = Stats()
        rig.decode[0].on_stats = stats
        async with opened(rig) as page:
            await page.wait_for_selector("#servers-table tbody tr:nth-child(2)")
            await page.keyboard.press("Tab")
            # The first link on the page jumps to the chat.
            await page.keyboard.press("Enter")
            await page.keyboard.type("Hello")
            await page.keyboard.press("Enter")
            await page.wait_for_selector(".times >> text=7 / 0 / 1")
            assert await page.inner_text(".answer .message") == "a b c "
            await page.wait_for_selector(
                '.answer .timeline[aria-label*="decode-0 fence"]'
            )
            await page.wait_for_selector(
                "#requests-list .timeline[aria-label*=transfer]"
            )
            rig.decode[0].behave = answers(
                400, {"error": {"message": f"no: {HTML_INJECTION}"}}
            )
            await page.fill("#chat-input", "Again")
            await page.click("#chat-send")
            await page.wait_for_selector(".message.error")
            assert await page.inner_text(".message.error") == f"no: {HTML_INJECTION}"
            rig.decode[0].behave = Waits(
                sends=b'data: {"choices": [{"delta": {"content": "z"}}]}\n\n'
            )
            await page.fill("#chat-input", "Of another")
            await page.click("#chat-send")
            await page.wait_for_selector(".answer .message >> text=z")
            await page.click("#chat-new")
            rig.decode[0].behave = chats
            await page.wait_for_selector("#chat-send:not([hidden])")
            await page.fill("#chat-input", "Hello")
            await page.click("#chat-send")
            await page.wait_for_selector(".answer .message >> text=a b c")
            await page.wait_for_selector("#chat-send:not([hidden])")
            await page.fill("#chat-input", "More")
            await page.click("#chat-send")
            await page.wait_for_selector(".answer:nth-child(4) .message >> text=a b c")
        sent = calls[0].body
        hello, more = (
            [{"role": "user", "content": text}] for text in ("Hello", "More")
        )
        assert sent["messages"] == calls[1].body["messages"] == hello
        assert calls[2].body["messages"] == [
            *hello,
            {"role": "assistant", "content": "b c "},
            *more,
        ]
        assert (sent["stream"], sent["model"]) == (True, "m")


async def test_page_requests_a_key_and_stores_it_in_the_tab():
    async with Rig(api_key=("client's",), admin_key=("operator's",)) as rig:
        async with opened(rig) as page:
            await page.wait_for_selector("#key-dialog[open]")
            for key, message in (
                ("no key", "API key is unknown"),
                ("client's", "needs an admin key"),
            ):
                await page.fill("#key-input", key)
                await page.keyboard.press("Enter")
                await page.wait_for_selector(f"#banner >> text={message}")
                await page.keyboard.press("Escape")
                await page.click("#banner button")
            await page.fill("#key-input", "operator's")
            await page.keyboard.press("Enter")
            await page.wait_for_selector("#banner[hidden]", state="attached")
            await page.wait_for_selector("#servers-table tbody tr:nth-child(2)")
            await page.reload()
            await page.wait_for_selector("#servers-table tbody tr:nth-child(2)")
            assert await page.locator("#key-dialog[open]").count() == 0
            await page.fill("#chat-input", "Hello")
            await page.keyboard.press("Enter")
            await page.wait_for_selector(".request >> text=200")
