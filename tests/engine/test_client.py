"""Both ends of the socket between the HTTP process and its engine."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, closing
from functools import partial

import msgspec
import pytest

from engine.process.client import EngineClient
from engine.process.transport import EngineTransport
from protocol.errors import EngineDied
from protocol.ipc.wire import framed
from protocol.messages import (
    AbortRequest,
    AddRequest,
    EngineFailed,
    EngineInput,
    EngineProgress,
    EngineStats,
    ErrorInfo,
    Outputs,
    SamplingParams,
    TokenDelta,
    encode,
)
from tests.proxy.fakes import until
from tests.rigs.scripted_engine import SMALL_ENGINE, ScriptedEngine, generate, hang

WAIT_S = 20.0


def add(request_id: str, max_tokens: int = 3, num_choices: int = 1) -> AddRequest:
    return AddRequest(
        request_id=request_id,
        token_ids=[10],
        sampling=SamplingParams(),
        max_tokens=max_tokens,
        num_choices=num_choices,
    )


class RemoteEngine:
    """The engine's end of the socket, which records messages and answers on request."""

    def __init__(self, link: socket.socket) -> None:
        self.transport = EngineTransport(link)
        self._received: list[EngineInput] = []
        self.is_over = False

    async def receive(self) -> EngineInput:
        while not self._received:
            assert not self.is_over
            self._received, self.is_over = await asyncio.to_thread(
                self.transport.receive, WAIT_S
            )
        return self._received.pop(0)

    def emit(self, *deltas: TokenDelta) -> None:
        self.transport.send(Outputs(list(deltas)))


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[EngineClient, RemoteEngine]]:
    link, theirs = socket.socketpair()
    client = EngineClient()
    remote = RemoteEngine(theirs)
    await client.start(link)
    try:
        remote.transport.send(SMALL_ENGINE)
        assert await client.wait_ready(WAIT_S) == SMALL_ENGINE
        yield client, remote
    finally:
        await client.close()
        remote.transport.close()


async def collect(engine: EngineClient, request: AddRequest) -> list[TokenDelta]:
    return [delta async for delta in generate(engine, request)]


def tokens(deltas: list[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


async def test_request_is_open_until_every_choice_has_ended():
    async with connected() as (client, remote):
        with closing(client.submit([add("r", num_choices=2)])) as subscription:
            for delta in (_delta("r", 1, finish="stop"), _delta("r", 2)):
                remote.emit(delta)
                assert await subscription.next_batch() == [delta]
                assert len(client._subscriptions) == 1
            remote.emit(_delta("r", 3, finish="length"))
            assert tokens(await subscription.next_batch()) == [3]
            assert await subscription.next_batch() == []
            assert not client._subscriptions


async def test_error_ends_all_choices():
    async with connected() as (client, remote):
        answer = asyncio.create_task(collect(client, add("r", num_choices=3)))
        await remote.receive()
        failed = TokenDelta(request_id="r", error=ErrorInfo("transfer_failed", "gone"))
        remote.emit(failed)
        assert await answer == [failed]
        assert not client._subscriptions


@pytest.mark.parametrize("how", ["leaving", "cancelled"])
async def test_closing_early_aborts_and_drops_later_deltas(how):
    async with connected() as (client, remote):
        if how == "cancelled":
            task = asyncio.create_task(collect(client, add("r")))
            assert await remote.receive() == add("r")
            task.cancel()
        else:
            async with aclosing(generate(client, add("r"))) as answer:
                asyncio.get_running_loop().call_soon(remote.emit, _delta("r", 1))
                assert (await anext(answer)).token_ids == [1]
            assert await remote.receive() == add("r")
        assert await remote.receive() == AbortRequest("r")
        remote.emit(_delta("r", 2), _delta("r", finish="abort"))
        remote.transport.send(EngineStats({"x": 1.0}))
        await until(lambda: client.stats == {"x": 1.0})
        assert not client._subscriptions


async def test_requested_abort_still_delivers_the_last_delta():
    async with connected() as (client, remote):
        with closing(client.submit([add("r")])) as subscription:
            await remote.receive()
            subscription.abort("r")
            assert await remote.receive() == AbortRequest("r")
            remote.emit(_delta("r", finish="abort"))
            (last,) = await asyncio.wait_for(subscription.next_batch(), WAIT_S)
            assert last.finish_reason == "abort"
            assert await subscription.next_batch() == []
        await client.close()
        last_words = await asyncio.to_thread(remote.transport.receive, WAIT_S)
        assert last_words == ([], True), "hung up; no second abort"


@pytest.mark.parametrize("how", ["message", "process", "garbage"])
async def test_dead_engine_ends_every_open_request(how):
    client = EngineClient()
    link, engine = socket.socketpair()
    await client.start(link)
    engine.sendall(framed(encode(SMALL_ENGINE)))
    await client.wait_ready(WAIT_S)
    answers = [asyncio.create_task(collect(client, add(name))) for name in "ab"]
    await until(lambda: len(client._subscriptions) == 2)
    if how == "process":
        client.fail("out of memory")
    else:
        engine.sendall(
            framed(encode(EngineFailed("full")) if how == "message" else b"\xc1")
        )
    for answer in answers:
        (last,) = await asyncio.wait_for(answer, WAIT_S)
        assert last.error is not None and last.error.code == "engine_died"
    assert not client.healthy and not client._subscriptions
    with pytest.raises(EngineDied):
        client.submit([add("c")])
    engine.close()
    await client.close()


async def test_missing_engine_is_not_waited_for():
    client = EngineClient()
    link, engine = socket.socketpair()
    with pytest.raises(EngineDied, match="not connected"):
        client.submit([add("r")])
    assert not client._subscriptions
    await client.start(link)
    with pytest.raises(EngineDied, match="nothing has changed for 0"):
        await client.wait_ready(0.001)
    reported: list[str] = []
    client.on_progress = reported.append
    for half in ("first", "second"):
        waiting = asyncio.create_task(client.wait_ready(WAIT_S))
        engine.sendall(framed(encode(EngineProgress(half))))
        await until(lambda half=half: half in reported)  # type: ignore[misc]
        assert not waiting.done() and client.progress == half
        waiting.cancel()
    engine.close()
    client.fail("no such model")
    with pytest.raises(EngineDied, match="no such model"):
        await client.wait_ready(WAIT_S)
    await client.close()


async def test_hang_up_ends_the_other_side():
    async with connected() as (client, remote):
        assert not client.is_lost
        remote.transport.close()
        await until(lambda: client.is_lost)
        with pytest.raises(EngineDied, match="not connected"):
            client.submit([add("r")])
    http, link = socket.socketpair()
    transport = EngineTransport(link)
    http.close()
    assert transport.receive(WAIT_S) == ([], True)
    transport.send(Outputs([_delta("a")]))  # the other end is closed
    transport.close()


@pytest.mark.parametrize("ends", [False, True])
async def test_sending_never_blocks_and_loses_no_message(ends):
    """More messages than the socket holds, with a busy or ended peer."""
    long = [
        msgspec.structs.replace(add(str(i)), token_ids=[70_000] * 50_000)
        for i in range(8)
    ]
    async with connected() as (client, remote):
        with closing(client.submit(long)) as subscription:
            for request in long:
                assert await remote.receive() == request
                remote.emit(_delta(request.request_id, *request.token_ids))
            work = (
                remote.transport.close
                if ends
                else partial(remote.transport.receive, WAIT_S)
            )
            sending = asyncio.create_task(asyncio.to_thread(work))
            actual: list[TokenDelta] = []
            while len(actual) < len(long):
                if not ends and sending.done():
                    sending = asyncio.create_task(asyncio.to_thread(work))
                news = asyncio.create_task(subscription.next_batch())
                both = {news} if ends else {news, sending}
                await asyncio.wait(
                    both, timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED
                )
                # The socket took a part, and no message is complete.
                if not news.done():
                    news.cancel()
                    continue
                actual += news.result()
            remote.transport.wake()
            await sending
        assert [delta.token_ids for delta in actual] == [one.token_ids for one in long]


async def test_no_step_runs_while_the_http_process_is_stalled(monkeypatch):
    monkeypatch.setattr("engine.process.transport.MAX_UNSENT_BYTES", 1 << 16)
    http, link = socket.socketpair()
    transport = EngineTransport(link)
    http.setblocking(False)
    transport.send(Outputs([_delta("a", *[70_000] * 4_000_000)]))  # 20 MB
    receiving = asyncio.create_task(asyncio.to_thread(transport.receive, 0.0))
    num_read = 0
    loop = asyncio.get_running_loop()
    while not receiving.done():
        part = asyncio.create_task(loop.sock_recv(http, 1 << 16))
        await asyncio.wait((part, receiving), return_when=asyncio.FIRST_COMPLETED)
        if part.done():
            num_read += len(part.result())
        else:  # enough has been read
            part.cancel()
    assert receiving.result() == ([], False) and num_read > 10_000_000
    transport.close()
    http.close()


async def test_messages_come_in_order_to_the_end():
    http, link = socket.socketpair()
    transport = EngineTransport(link)
    assert transport.receive(0.0) == ([], False)
    both = framed(encode(AbortRequest("a"))) + framed(encode(AbortRequest("b")))
    http.sendall(both[:-1])
    assert transport.receive(WAIT_S) == ([AbortRequest("a")], False)
    http.sendall(both[-1:])
    http.close()
    assert transport.receive(WAIT_S) == ([AbortRequest("b")], False)
    assert transport.receive(WAIT_S) == ([], True)
    transport.close()


async def test_another_thread_wakes_the_engine():
    async with connected() as (_, remote):
        waiting = asyncio.create_task(
            asyncio.to_thread(remote.transport.receive, WAIT_S)
        )
        remote.transport.wake()
        assert await waiting == ([], False)


async def test_request_that_ends_during_close_delivers_no_delta():
    """Its retained KV is released during the close that ended it."""

    async with connected() as (client, remote):
        retained = client.submit([msgspec.structs.replace(add("a"), retain_kv=True)])
        await remote.receive()
        closing = asyncio.create_task(client.close())
        batch = await retained.next_batch()
        assert batch[0].error is not None
        assert batch[0].error.code == "no_server_available", "it died of no request"
        while not closing.done():
            retained.close()
            client.send(AbortRequest("a"))
            await asyncio.sleep(0)


async def test_silence_counts_only_while_requests_are_open():
    engine = ScriptedEngine(hang)
    assert not engine.is_stalled(), "idle"
    with closing(engine.submit([add("r")])):
        assert not engine.is_stalled(), "its idle time is not held against it"
        assert engine.is_stalled()
        engine.submit([add("s")])
        assert engine.is_stalled()
        engine.emit(EngineStats({}))
        assert not engine.is_stalled()
        assert engine.is_stalled()
    await engine.close()


def _delta(request_id: str, *token_ids: int, finish: str | None = None) -> TokenDelta:
    return TokenDelta(
        request_id=request_id, token_ids=list(token_ids), finish_reason=finish
    )
