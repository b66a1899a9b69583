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
    Migrate,
    Outputs,
    SamplingParams,
    TokenDelta,
    encode,
)
from tests.proxy.fakes import until
from tests.rigs.scripted_engine import SMALL_ENGINE, ScriptedEngine, generate, hang

WAIT_S = 20.0


def make_request(
    request_id: str, max_tokens: int = 3, num_choices: int = 1
) -> AddRequest:
    return AddRequest(
        request_id=request_id,
        token_ids=[10],
        sampling=SamplingParams(),
        max_tokens=max_tokens,
        num_choices=num_choices,
    )


class RemoteEngine:
    """The engine's end of the socket. It answers only when the test calls `emit`."""

    def __init__(self, link: socket.socket) -> None:
        self.transport = EngineTransport(link)
        self._received: list[EngineInput] = []
        self.is_closed = False

    async def receive(self) -> EngineInput:
        while not self._received:
            assert not self.is_closed
            self._received, self.is_closed = await asyncio.to_thread(
                self.transport.receive, WAIT_S
            )
        return self._received.pop(0)

    def emit(self, *deltas: TokenDelta) -> None:
        self.transport.send(Outputs(list(deltas)))


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[EngineClient, RemoteEngine]]:
    link, engine_link = socket.socketpair()
    client = EngineClient()
    remote = RemoteEngine(engine_link)
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
        with closing(client.submit([make_request("r", num_choices=2)])) as subscription:
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
        answer = asyncio.create_task(collect(client, make_request("r", num_choices=3)))
        await remote.receive()
        failed = TokenDelta(request_id="r", error=ErrorInfo("transfer_failed", "gone"))
        remote.emit(failed)
        assert await answer == [failed]
        assert not client._subscriptions


@pytest.mark.parametrize("ending", ["leaving", "cancelled"])
async def test_closing_early_aborts_and_drops_later_deltas(ending):
    async with connected() as (client, remote):
        if ending == "cancelled":
            task = asyncio.create_task(collect(client, make_request("r")))
            assert await remote.receive() == make_request("r")
            task.cancel()
        else:
            async with aclosing(generate(client, make_request("r"))) as answer:
                asyncio.get_running_loop().call_soon(remote.emit, _delta("r", 1))
                assert (await anext(answer)).token_ids == [1]
            assert await remote.receive() == make_request("r")
        assert await remote.receive() == AbortRequest("r")
        remote.emit(_delta("r", 2), _delta("r", finish="abort"))
        remote.transport.send(EngineStats({"x": 1.0}))
        await until(lambda: client.stats == {"x": 1.0})
        assert not client._subscriptions


async def test_hand_over_does_not_move_requests_again_that_have_come_back():
    async with connected() as (client, remote):
        client.is_handing_over = True
        requests = [make_request(name) for name in ("back", "new")]
        with (
            closing(client.submit(requests[:1])) as returned,
            closing(client.submit(requests[1:])) as other,
        ):
            returned.allow_migration(lambda: True, is_resumed=True)
            other.allow_migration(lambda: True, is_resumed=False)
            received = [await remote.receive() for _ in range(3)]
            assert received == [*requests, Migrate("new")]


async def test_requested_abort_still_delivers_the_last_delta():
    async with connected() as (client, remote):
        with closing(client.submit([make_request("r")])) as subscription:
            await remote.receive()
            subscription.abort("r")
            assert await remote.receive() == AbortRequest("r")
            remote.emit(_delta("r", finish="abort"))
            (last,) = await asyncio.wait_for(subscription.next_batch(), WAIT_S)
            assert last.finish_reason == "abort"
            assert await subscription.next_batch() == []
        await client.close()
        last_messages = await asyncio.to_thread(remote.transport.receive, WAIT_S)
        assert last_messages == ([], True), "the socket is closed, without an abort"


@pytest.mark.parametrize("ending", ["message", "process", "garbage"])
async def test_dead_engine_ends_every_open_request(ending):
    client = EngineClient()
    link, engine = socket.socketpair()
    await client.start(link)
    engine.sendall(framed(encode(SMALL_ENGINE)))
    await client.wait_ready(WAIT_S)
    answers = [
        asyncio.create_task(collect(client, make_request(name))) for name in "ab"
    ]
    await until(lambda: len(client._subscriptions) == 2)
    if ending == "process":
        client.fail("out of memory")
    else:
        engine.sendall(
            framed(encode(EngineFailed("full")) if ending == "message" else b"\xc1")
        )
    for answer in answers:
        (last,) = await asyncio.wait_for(answer, WAIT_S)
        assert last.error is not None and last.error.code == "engine_died"
    assert not client.healthy and not client._subscriptions
    with pytest.raises(EngineDied):
        client.submit([make_request("c")])
    engine.close()
    await client.close()


async def test_wait_ready_raises_without_progress_or_after_a_failure():
    client = EngineClient()
    link, engine = socket.socketpair()
    with pytest.raises(EngineDied, match="not connected"):
        client.submit([make_request("r")])
    assert not client._subscriptions
    await client.start(link)
    with pytest.raises(EngineDied, match="nothing has changed for 0"):
        await client.wait_ready(0.001)
    progress_reports: list[str] = []
    client.on_progress = progress_reports.append
    for stage in ("first", "second"):
        waiting = asyncio.create_task(client.wait_ready(WAIT_S))
        engine.sendall(framed(encode(EngineProgress(stage))))
        await until(lambda stage=stage: stage in progress_reports)  # type: ignore[misc]
        assert not waiting.done() and client.progress == stage
        waiting.cancel()
    engine.close()
    client.fail("no such model")
    with pytest.raises(EngineDied, match="no such model"):
        await client.wait_ready(WAIT_S)
    await client.close()


async def test_close_of_one_end_of_the_socket_ends_the_other_end():
    async with connected() as (client, remote):
        assert not client.is_lost
        remote.transport.close()
        await until(lambda: client.is_lost)
        with pytest.raises(EngineDied, match="not connected"):
            client.submit([make_request("r")])
    http, link = socket.socketpair()
    transport = EngineTransport(link)
    http.close()
    assert transport.receive(WAIT_S) == ([], True)
    transport.send(Outputs([_delta("a")]))  # the other end is closed
    transport.close()


@pytest.mark.parametrize("engine_ends", [False, True])
async def test_sending_never_blocks_and_loses_no_message(engine_ends):
    """The messages exceed the socket's buffer, and the peer is busy or has ended."""
    long_requests = [
        msgspec.structs.replace(make_request(str(i)), token_ids=[70_000] * 50_000)
        for i in range(8)
    ]
    async with connected() as (client, remote):
        with closing(client.submit(long_requests)) as subscription:
            for request in long_requests:
                assert await remote.receive() == request
                remote.emit(_delta(request.request_id, *request.token_ids))
            work = (
                remote.transport.close
                if engine_ends
                else partial(remote.transport.receive, WAIT_S)
            )
            sending = asyncio.create_task(asyncio.to_thread(work))
            actual: list[TokenDelta] = []
            while len(actual) < len(long_requests):
                if not engine_ends and sending.done():
                    sending = asyncio.create_task(asyncio.to_thread(work))
                batch_task = asyncio.create_task(subscription.next_batch())
                both = {batch_task} if engine_ends else {batch_task, sending}
                await asyncio.wait(
                    both, timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED
                )
                # A part of the data was sent, but no complete message has arrived.
                if not batch_task.done():
                    batch_task.cancel()
                    continue
                actual += batch_task.result()
            remote.transport.wake()
            await sending
        assert [delta.token_ids for delta in actual] == [
            request.token_ids for request in long_requests
        ]


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
        else:  # enough data has been read, so `receive` has returned
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
    """The caller releases the request's KV while `close` is still running."""

    async with connected() as (client, remote):
        retained = client.submit(
            [msgspec.structs.replace(make_request("a"), retain_kv=True)]
        )
        await remote.receive()
        closing = asyncio.create_task(client.close())
        batch = await retained.next_batch()
        assert batch[0].error is not None
        assert batch[0].error.code == "no_server_available", "the engine has not died"
        while not closing.done():
            retained.close()
            client.send(AbortRequest("a"))
            await asyncio.sleep(0)


async def test_silence_counts_only_while_requests_are_open():
    engine = ScriptedEngine(hang)
    assert not engine.is_stalled(), "no request is open"
    with closing(engine.submit([make_request("r")])):
        assert not engine.is_stalled(), "earlier idle time does not count"
        assert engine.is_stalled()
        engine.submit([make_request("s")])
        assert engine.is_stalled()
        engine.emit(EngineStats({}))
        assert not engine.is_stalled()
        assert engine.is_stalled()
    await engine.close()


def _delta(request_id: str, *token_ids: int, finish: str | None = None) -> TokenDelta:
    return TokenDelta(
        request_id=request_id, token_ids=list(token_ids), finish_reason=finish
    )
