"""`python -m proxy` as a process. Some tests suspend it for a while.

The suspension is longer than all timeouts. Data that arrives during a suspension must
count as arrived in time.
"""

import asyncio
import contextlib
import queue
import signal
import socket
import sys
from collections.abc import AsyncIterator

import httpx
import pytest

from protocol.process import lifecycle
from tests import stopping
from tests.proxy.fakes import Call, Fake, decodes

TIMEOUT_S = 0.5
SUSPENDED_S = 3 * TIMEOUT_S
_BODY = b'{"prompt": "x", "stream": true}'
_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
_HEAD += b"Content-Length: %d\r\n" % len(_BODY)
# A program like `python -m proxy`, but with a short timeout of idle connections.
_PROXY = f"""
import sys
from proxy import __main__ as main
main.KEEP_ALIVE_S = {TIMEOUT_S}
sys.exit(main.main(sys.argv[1:]))
"""


Events = queue.Queue[lifecycle.Event]


def start_proxy(
    *argv: str, command: tuple[str, ...] = ("-m", "proxy")
) -> tuple[lifecycle.Child, Events]:
    events = Events()
    argv = (sys.executable, *command, "--port", "0", *argv)
    return lifecycle.spawn(argv, name="proxy", on_event=events.put), events


def test_proxy_reports_its_port_serves_and_ends_with_a_signal():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        unreachable = f"http://127.0.0.1:{closed.getsockname()[1]}"
    child, events = start_proxy("--prefill", unreachable, "--decode", unreachable)
    try:
        ready = events.get(timeout=60)
        assert ready.kind == "ready"
        url = ready.value["url"]
        assert url == f"http://127.0.0.1:{ready.value['port']}"
        with httpx.Client(
            base_url=url, trust_env=False, verify=False, timeout=30
        ) as client:
            assert client.get("/health").status_code == 200
            assert client.get("/ready").status_code == 503
            assert client.post("/v1/completions", json={}).status_code == 503
        child.signal(signal.SIGTERM)
        ended = events.get(timeout=60)
        assert (ended.kind, ended.value) == ("exited", 0)
    finally:
        child.kill()


@pytest.mark.parametrize(
    ("argv", "words", "status"),
    [
        (("--decode", "http://127.0.0.1:1"), "PORT", 1),
        (("--prefill", "http://127.0.0.1:1"), "--decode", 2),
        (("--servers-file", "/dev/null"), "--servers-file /dev/null: it must have", 2),
    ],
)
def test_failed_start_reports_what_is_missing(argv, words, status):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        child, events = start_proxy("--port", port, *argv)
        failed = events.get(timeout=60)
        ended = events.get(timeout=60)
    assert failed.kind == "failed"
    assert words.replace("PORT", port) in failed.value
    assert (ended.kind, ended.value) == ("exited", status)
    assert child.failure == failed.value


@contextlib.asynccontextmanager
async def suspended(child: lifecycle.Child) -> AsyncIterator[None]:
    """Suspend the process during the block, and until its timeouts have passed."""
    await asyncio.to_thread(stopping.send, child.pid, signal.SIGSTOP)
    try:
        yield
        await asyncio.sleep(SUSPENDED_S)
    finally:
        stopping.send(child.pid, signal.SIGCONT)


@contextlib.asynccontextmanager
async def proxy_of(
    fake: Fake, *options: str
) -> AsyncIterator[tuple[lifecycle.Child, asyncio.StreamReader, asyncio.StreamWriter]]:
    """Yield a proxy process in front of one decode server, and a connection to it."""
    fake.start()
    child, events = start_proxy("--decode", fake.url, *options, command=("-c", _PROXY))
    try:
        ready = await asyncio.to_thread(events.get, timeout=60)
        assert ready.kind == "ready"
        url = ready.value["url"]
        async with httpx.AsyncClient(
            base_url=url, trust_env=False, verify=False
        ) as client:
            while (await client.get("/ready")).status_code != 200:
                pass
        reader, writer = await asyncio.open_connection("127.0.0.1", ready.value["port"])
        yield child, reader, writer
        writer.close()
    finally:
        child.kill()
        await fake.stop()


@pytest.mark.parametrize("begun", [False, True], ids=["its head", "its end"])
async def test_answer_that_arrives_during_a_suspension_is_relayed(begun):
    received = asyncio.Event()
    resume = asyncio.Event()
    sent = asyncio.Event()

    async def waits(call: Call) -> None:
        if begun:
            await call.start()
            await call.write(b'data: {"text": "one"}\n\n')
        received.set()
        await resume.wait()
        if not begun:
            await call.start()
        await call.write(b"data: [DONE]\n\n", more=False)
        sent.set()

    proxy = proxy_of(Fake(waits), "--read-timeout-s", str(TIMEOUT_S))
    async with proxy as (child, reader, writer):
        writer.write(_HEAD + b"\r\n" + _BODY)
        await received.wait()
        answer = await reader.readuntil(b"one") if begun else b""
        async with suspended(child):
            resume.set()
            await sent.wait()
        answer += await reader.read()
        assert b"data: [DONE]" in answer, answer


async def test_request_whose_rest_arrives_during_a_suspension_is_answered():
    proxy = proxy_of(Fake(decodes), "--client-timeout-s", str(TIMEOUT_S))
    async with proxy as (child, reader, writer):
        writer.write(_HEAD + b"Expect: 100-continue\r\n\r\n")
        await reader.readuntil(b"100 Continue\r\n\r\n")
        async with suspended(child):
            writer.write(_BODY)
        assert b"data: [DONE]" in await reader.read()


async def test_request_on_an_idle_connection_during_a_suspension_is_answered():
    async with proxy_of(Fake(decodes)) as (child, reader, writer):
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"baton_build_info")
        async with suspended(child):
            writer.write(_HEAD + b"\r\n" + _BODY)
        assert b"data: [DONE]" in await reader.read()
