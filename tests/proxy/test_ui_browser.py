"""The proxy's page in a real browser: its content, its controls, and its console."""

import asyncio
import json
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
            await page.wait_for_selector(".kv-numbers >> text=7 transferred")
            assert "0 recomputed" in await page.inner_text(".kv-numbers")
            assert await page.inner_text(".answer .message") == "b c"
            assert await page.text_content(".reasoning pre") == "a "
            assert await page.locator(".kv-help:visible").count() == 0
            await page.click(".answer .what")
            assert "read from its memory" in await page.inner_text(".answer .kv-help")
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
            await page.wait_for_selector(".answer .message >> text=b c")
            await page.wait_for_selector("#chat-send:not([hidden])")
            await page.fill("#chat-input", "More")
            await page.click("#chat-send")
            await page.wait_for_selector(".answer:nth-child(4) .message >> text=b c")
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


MARKDOWN = """# Title

<script>document.title = 1</script> <img src=x onerror="document.title=1">

[good](https://a.example/) [bad](javascript:document.title=1) ![image](//b.example/i)

```html
<b>code</b>
```

| a | b |
|---|---|
| 1 | 2 |
"""


def chats(*texts: str) -> Any:
    """Return a behaviour that streams these texts."""
    events = [
        b"data: " + json.dumps({"choices": [{"delta": {"content": text}}]}).encode()
        for text in texts
    ]
    usage = b'data: {"choices": [], "usage": {"completion_tokens": 9}}'
    return streams(*(event + b"\n\n" for event in (*events, usage, b"data: [DONE]")))


async def say(page: Any, text: str) -> None:
    await page.fill("#chat-input", text)
    await page.click("#chat-send")


async def test_markdown_of_answers_is_sanitised_and_can_be_copied():
    async with Rig(decode=[Fake(chats(*MARKDOWN))]) as rig:
        permissions = {"permissions": ["clipboard-read", "clipboard-write"]}
        async with opened(rig, **permissions) as page:
            await say(page, "**bold**")
            await page.wait_for_selector(".answer .actions")
            assert await page.inner_text(".message.user") == "**bold**"
            assert await page.inner_text(".answer h1") == "Title"
            assert await page.inner_text(".answer td >> nth=1") == "2"
            answer = page.locator(".answer .message")
            assert await answer.locator("img, script").count() == 0
            assert "<script>document.title = 1</script>" in await answer.inner_text()
            links = await answer.locator("a").evaluate_all(
                "all => all.map((link) => [link.getAttribute('href'), link.rel])"
            )
            assert ["https://a.example/", "noopener noreferrer"] in links
            assert not [href for href, _ in links if "script" in (href or "")]
            assert "9 tokens" in await page.inner_text(".times")
            read = "navigator.clipboard.readText()"
            await page.click(".code button")
            await page.wait_for_selector(".code button >> text=Copied")
            assert await page.evaluate(read) == "<b>code</b>"
            await page.click(".actions button >> text=Copy")
            await page.wait_for_selector(".actions button >> text=Copied")
            assert await page.evaluate(read) == MARKDOWN


async def test_chat_regenerates_stops_and_sends_a_system_prompt():
    decode = Fake(chats("first"))
    async with Rig(decode=[decode]) as rig, opened(rig) as page:
        await page.click("#chat-settings summary")
        await page.fill("#chat-system", "Be brief.")
        await say(page, "Hello")
        await page.wait_for_selector(".answer >> text=first")
        decode.behave = chats("second")
        await page.click(".regenerate")
        await page.wait_for_selector(".answer .message >> text=second")
        assert await page.locator(".answer").count() == 1
        bodies = [call.body for call in decode.calls]
        assert bodies[0]["messages"] == bodies[1]["messages"]
        assert bodies[1]["messages"] == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hello"},
        ]
        decode.behave = Waits(
            sends=b'data: {"choices": [{"delta": {"content": "partial"}}]}\n\n'
        )
        await say(page, "More")
        await page.wait_for_selector(".answer .message >> text=partial")
        await page.click("#chat-stop")
        await page.wait_for_selector(".actions >> text=stopped")
        decode.behave = chats("last")
        await say(page, "And?")
        await page.wait_for_selector(".answer .message >> text=last")
        texts = [message["content"] for message in decode.calls[-1].body["messages"]]
        assert texts == ["Be brief.", "Hello", "second", "More", "partial", "And?"]
        assert await page.locator(".regenerate:visible").count() == 1
        await page.reload()
        assert await page.input_value("#chat-system") == "Be brief."


@pytest.mark.parametrize("options", [{}, PHONE_OPTIONS], ids=["desktop", "phone"])
async def test_wide_chat_uses_the_width_of_the_window(options):
    async with Rig(decode=[Fake(chats("word " * 500))]) as rig:
        async with opened(rig, **options) as page:
            await say(page, "Hello")
            await page.wait_for_selector(".answer .actions")
            narrow = await page.locator("#chat").bounding_box()
            await page.click("#chat-wide")
            wide = await page.locator("#chat").bounding_box()
            width = await page.evaluate("document.documentElement.clientWidth")
            assert wide["width"] > 0.9 * width
            assert wide["width"] >= narrow["width"]
            pressed = await page.get_attribute("#chat-wide", "aria-pressed")
            assert pressed == "true"
            content = await page.evaluate("document.documentElement.scrollWidth")
            assert content <= width
            await page.click("#chat-wide")
            assert (await page.locator("#chat").bounding_box())["width"] == (
                narrow["width"]
            )


async def test_page_reports_a_silent_proxy_and_recovers():
    async with Rig() as rig, opened(rig) as page:
        await page.wait_for_selector("#status >> text=ready")

        async def hold(route: Any) -> None:
            pass  # the request gets no answer

        await page.route("**/ui/state*", hold)
        await page.wait_for_selector("#banner >> text=no answer within 10 s")
        assert await page.inner_text("#status") == "no connection"
        await page.unroute("**/ui/state*")
        await page.wait_for_selector("#status >> text=ready")
        assert await page.locator("#banner").is_hidden()


async def test_memory_of_servers_is_shown():
    async with Rig() as rig:
        for fake, device in ((rig.prefill[0], "cpu"), (rig.decode[0], "cuda")):
            stats = Stats(
                baton_engine_memory_used_bytes=41.2e9,
                baton_engine_memory_total_bytes=141e9,
            )
            stats.server = {"device": device, "tp": 2}
            fake.on_stats = stats
        async with opened(rig) as page:
            cells = '#servers-table td[data-label="Memory"]'
            await page.wait_for_selector(f"{cells} >> text=41.2 GB of 141 GB")
            await page.wait_for_selector(f"{cells} >> text=of the first GPU")
            await page.wait_for_selector(f"{cells} >> text=the host has 141 GB")
