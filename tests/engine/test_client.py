"""What the client promises of the requests it sends to an engine over a real socket."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, closing
from typing import Any

import msgspec
import pytest

from engine.process.client import EngineClient
from protocol.errors import EngineDied
from protocol.ipc.wire import framed
from protocol.messages import (
    AbortRequest,
    AddRequest,
    EngineFailed,
    EngineStats,
    ErrorInfo,
    Outputs,
    SamplingParams,
    Shutdown,
    TokenDelta,
    decode_input,
    encode,
)
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
    """The engine's end of the socket: says it is ready, records, and answers when told to."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def receive(self) -> Any:
        async with asyncio.timeout(WAIT_S):
            length = int.from_bytes(await self._reader.readexactly(4), "little")
            return decode_input(await self._reader.readexactly(length))

    async def send(self, message: Any) -> None:
        await self.send_raw(encode(message))

    async def send_raw(self, data: bytes) -> None:
        self._writer.write(framed(data))
        await self._writer.drain()

    async def answer(self, request: AddRequest, *token_ids: int, finish: str | None = None) -> None:
        delta = TokenDelta(
            request_id=request.request_id, token_ids=list(token_ids), finish_reason=finish
        )
        await self.send(Outputs([delta]))

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()


@asynccontextmanager
async def connected(socket_folder: Any) -> AsyncIterator[tuple[EngineClient, RemoteEngine]]:
    client = EngineClient(f"ipc://{socket_folder}/http")
    await client.start()
    remote = RemoteEngine(*await asyncio.open_unix_connection(f"{socket_folder}/http"))
    try:
        await remote.send(SMALL_ENGINE)
        assert await client.wait_ready(WAIT_S) == SMALL_ENGINE
        yield client, remote
    finally:
        await client.close()
        await remote.close()


async def collect(engine: EngineClient, request: AddRequest) -> list[TokenDelta]:
    return [delta async for delta in generate(engine, request)]


def tokens(deltas: list[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


async def test_a_request_goes_out_and_its_tokens_come_back(socket_folder: Any) -> None:
    async with connected(socket_folder) as (client, remote):
        answer = asyncio.create_task(collect(client, add("r")))
        request = await remote.receive()
        assert request == add("r")
        await remote.answer(request, 1)
        await remote.answer(request, 2, 3, finish="length")
        deltas = await answer
        assert tokens(deltas) == [1, 2, 3] and deltas[-1].finish_reason == "length"
        assert client.num_open == 0


async def test_several_requests_share_one_subscription(socket_folder: Any) -> None:
    async with connected(socket_folder) as (client, remote):
        with_both = client.submit([add("a"), add("b")])
        first, second = await remote.receive(), await remote.receive()
        await remote.answer(second, 7, finish="stop")
        await remote.answer(first, 8, finish="stop")
        found = {}
        while batch := await asyncio.wait_for(with_both.next_batch(), WAIT_S):
            found.update({delta.request_id: delta.token_ids for delta in batch})
        assert found == {"a": [8], "b": [7]}


async def test_a_request_is_open_until_every_choice_has_ended(socket_folder: Any) -> None:
    async with connected(socket_folder) as (client, remote):
        with closing(client.submit([add("r", num_choices=2)])) as subscription:
            await remote.receive()
            for delta in (_delta("r", 1, finish="stop"), _delta("r", 2)):
                await remote.send(Outputs([delta]))
                assert await subscription.next_batch() == [delta]
                assert client.num_open == 1
            await remote.send(Outputs([_delta("r", 3, finish="length")]))
            assert tokens(await subscription.next_batch()) == [3]
            assert await subscription.next_batch() == []
            assert client.num_open == 0


async def test_an_error_ends_all_choices(socket_folder: Any) -> None:
    async with connected(socket_folder) as (client, remote):
        answer = asyncio.create_task(collect(client, add("r", num_choices=3)))
        await remote.receive()
        failed = TokenDelta(request_id="r", error=ErrorInfo("transfer_failed", "gone"))
        await remote.send(Outputs([failed]))
        assert await answer == [failed]
        assert client.num_open == 0


async def test_leaving_early_aborts_and_drops_what_still_comes(socket_folder: Any) -> None:
    async with connected(socket_folder) as (client, remote):
        async with aclosing(generate(client, add("r"))) as answer:
            asyncio.get_running_loop().create_task(remote.send(Outputs([_delta("r", 1)])))
            assert (await anext(answer)).token_ids == [1]
        assert await remote.receive() == add("r")
        assert await remote.receive() == AbortRequest("r")
        await remote.send(Outputs([_delta("r", 2), _delta("r", finish="abort")]))
        await remote.send(EngineStats({"x": 1.0}))
        await _until(lambda: client.stats == {"x": 1.0})
        assert client.num_open == 0


async def test_cancelling_aborts(socket_folder: Any) -> None:
    async with connected(socket_folder) as (client, remote):
        answer = asyncio.create_task(collect(client, add("r")))
        assert await remote.receive() == add("r")
        answer.cancel()
        assert await remote.receive() == AbortRequest("r")


async def test_an_asked_for_abort_still_brings_the_last_delta(socket_folder: Any) -> None:
    async with connected(socket_folder) as (client, remote):
        with closing(client.submit([add("r")])) as subscription:
            await remote.receive()
            subscription.abort("r")
            assert await remote.receive() == AbortRequest("r")
            await remote.send(Outputs([_delta("r", finish="abort")]))
            (last,) = await asyncio.wait_for(subscription.next_batch(), WAIT_S)
            assert last.finish_reason == "abort"
            assert await subscription.next_batch() == []
        await remote.send(EngineStats({}))
        await client.close()
        assert await remote.receive() == Shutdown()  # and no second abort


@pytest.mark.parametrize("how", ["message", "process", "garbage"])
async def test_a_dead_engine_ends_every_open_request(socket_folder: Any, how: str) -> None:
    async with connected(socket_folder) as (client, remote):
        answers = [asyncio.create_task(collect(client, add(name))) for name in "ab"]
        await remote.receive()
        await remote.receive()
        if how == "message":
            await remote.send(EngineFailed("out of memory"))
        elif how == "process":
            client.fail("out of memory")
        else:
            await remote.send_raw(b"\xc1")
        for answer in answers:
            (last,) = await asyncio.wait_for(answer, WAIT_S)
            assert last.error is not None and last.error.code == "engine_died"
        assert not client.healthy and client.num_open == 0
        with pytest.raises(EngineDied):
            client.submit([add("c")])


async def test_an_engine_that_fails_at_start_is_not_waited_for(socket_folder: Any) -> None:
    client = EngineClient(f"ipc://{socket_folder}/http")
    await client.start()
    client.fail("no such model")
    with pytest.raises(EngineDied, match="no such model"):
        await client.wait_ready(WAIT_S)
    await client.close()


async def test_a_silent_engine_is_given_up() -> None:
    engine = ScriptedEngine(ready=None)
    await engine.start()
    with pytest.raises(EngineDied, match="not ready after"):
        await engine.wait_ready(0.001)
    await engine.close()


async def test_nobody_connected_is_a_dead_engine_not_a_hang(socket_folder: Any) -> None:
    client = EngineClient(f"ipc://{socket_folder}/http")
    await client.start()
    with pytest.raises(EngineDied, match="not connected"):
        client.submit([add("r")])
    assert client.num_open == 0
    await client.close()


async def test_an_engine_that_hangs_up_is_a_dead_engine(socket_folder: Any) -> None:
    async with connected(socket_folder) as (client, remote):
        assert not client.is_lost
        await remote.close()
        await _until(lambda: client.is_lost)
        with pytest.raises(EngineDied, match="not connected"):
            client.submit([add("r")])


async def test_an_engine_that_reads_late_gets_everything(socket_folder: Any) -> None:
    """More than the socket holds, while the engine is in a step."""
    long = [msgspec.structs.replace(add(str(i)), token_ids=[70_000] * 50_000) for i in range(8)]

    async with connected(socket_folder) as (client, remote):
        subscription = client.submit(long)
        for request in long:
            assert await remote.receive() == request
        subscription.close()


async def test_closing_ends_open_requests(socket_folder: Any) -> None:
    async with connected(socket_folder) as (client, remote):
        answer = asyncio.create_task(collect(client, add("r")))
        await remote.receive()
        await client.close()
        (last,) = await asyncio.wait_for(answer, WAIT_S)
        assert last.error is not None and last.error.code == "no_server_available"


async def test_a_request_that_ends_while_the_client_closes_tells_nobody(socket_folder: Any) -> None:
    """It lets go of the KV kept for it, in the middle of the close that ended it."""

    async with connected(socket_folder) as (client, remote):
        kept = client.submit([msgspec.structs.replace(add("a"), retain_kv=True)])
        await remote.receive()
        closing = asyncio.create_task(client.close())
        batch = await kept.next_batch()
        assert batch[0].error is not None
        assert batch[0].error.code == "no_server_available", "it died of no request"
        while not closing.done():
            kept.close()
            client.tell(AbortRequest("a"))
            await asyncio.sleep(0)


async def test_silence_counts_only_while_requests_are_open() -> None:
    engine = ScriptedEngine(hang)
    assert not engine.look(), "idle"
    with closing(engine.submit([add("r")])):
        assert not engine.look(), "its idle time is not held against it"
        assert engine.look()
        engine.submit([add("s")])
        assert engine.look()
        engine.say(EngineStats({}))
        assert not engine.look()
        assert engine.look()
    await engine.close()


async def test_an_id_in_use_is_our_own_bug() -> None:
    engine = ScriptedEngine()
    await engine.start()
    with pytest.raises(ValueError, match="in use"):
        engine.submit([add("r"), add("r")])
    with closing(engine.submit([add("r")])), pytest.raises(ValueError, match="in use"):
        engine.submit([add("r")])
    await engine.close()


def _delta(request_id: str, *token_ids: int, finish: str | None = None) -> TokenDelta:
    return TokenDelta(request_id=request_id, token_ids=list(token_ids), finish_reason=finish)


async def _until(condition: Any) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0)
