"""Answers that say where leased KV is, to clients that leave before they have them."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from msgspec.structs import replace

from engine.http.api import ServerHooks
from engine.text.tokenizer import Tokenizer
from protocol.messages import AbortRequest, AddRequest, EngineInput, KVUsage, TokenDelta
from tests.rigs.http_server import Server, serving


class Retaining(ServerHooks):
    """Every prompt's KV is kept; answers tell of it, with so many bytes."""

    def __init__(self, num_bytes: int | None) -> None:
        self._num_bytes = num_bytes

    def prepare(self, request: Any, adds: Any, ready: Any) -> Any:
        return [replace(add, retain_kv=True) for add in adds]

    def finish(self, finals: Any) -> dict[str, Any]:
        return {} if self._num_bytes is None else {"kv_transfer_params": "x" * self._num_bytes}


class Refusing(ServerHooks):
    """For each refused request the engine is told of one lease."""

    def refused(self, kv_transfer_params: object) -> list[AbortRequest]:
        return [AbortRequest("a lease")]


def _end(request: AddRequest) -> TokenDelta:
    return TokenDelta(request_id=request.request_id, finish_reason="length", usage=KVUsage())


async def _ends(request: AddRequest) -> AsyncIterator[TokenDelta]:
    yield _end(request)


async def _connected(server: Server) -> socket.socket:
    await server.http.get("/health")  # it listens from now on
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((server.http.base_url.host, server.http.base_url.port))
    client.setblocking(False)
    return client


async def _ask(client: socket.socket) -> None:
    body = json.dumps({"model": "m", "prompt": "ab", "max_tokens": 1}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    await asyncio.get_running_loop().sock_sendall(client, head + body)


async def _until_let_go(server: Server) -> None:
    while server.engine.aborted != ([one.request_id for one in server.engine.added] or None):
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("num_bytes", [10, 1 << 20])
async def test_kv_is_kept_for_a_client_that_has_its_answer(
    tokenizer: Tokenizer, num_bytes: int
) -> None:
    async with serving(tokenizer, _ends, Retaining(num_bytes)) as server:
        for headers in ({}, {"Connection": "close"}):
            body = {"model": "m", "prompt": "ab", "max_tokens": 1}
            answer = await server.http.post("/v1/completions", json=body, headers=headers)
            assert answer.json()["kv_transfer_params"] == "x" * num_bytes
            assert answer.headers["x-baton-kv"]
        await server.http.get("/health")
        assert server.engine.aborted == []


async def test_kv_of_which_an_answer_does_not_tell_is_let_go(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer, _ends, Retaining(None)) as server:
        assert (await server.post(max_tokens=1)).status_code == 200
        await _until_let_go(server)


async def test_kv_is_let_go_when_the_client_leaves_with_half_of_a_long_answer(
    tokenizer: Tokenizer,
) -> None:
    async with serving(tokenizer, _ends, Retaining(16 << 20)) as server:
        with await _connected(server) as client:
            await _ask(client)
            await asyncio.get_running_loop().sock_recv(client, 100)
            assert server.engine.aborted == []
        await _until_let_go(server)


@pytest.mark.parametrize("turns", range(1, 5))
async def test_kv_is_let_go_when_the_client_left_just_before_the_answer(
    tokenizer: Tokenizer, turns: int
) -> None:
    """In one of these turns of the event loop the connection has ended, which nobody has been told
    yet, and what is sent is lost without a word."""
    made: list[socket.socket] = []

    async def script(request: AddRequest) -> AsyncIterator[TokenDelta]:
        made[0].close()
        for _ in range(turns):
            await asyncio.sleep(0)
        yield _end(request)

    async with serving(tokenizer, script, Retaining(10)) as server:
        made.append(await _connected(server))
        await _ask(made[0])
        await _until_let_go(server)


@pytest.mark.parametrize("lent", [False, True])
async def test_a_lent_lease_is_left_alone_by_who_refuses_the_request(
    tokenizer: Tokenizer, lent: bool
) -> None:
    async with serving(tokenizer, hooks=Refusing(), ready=None) as server:
        told: list[EngineInput] = []
        server.engine.tell = told.append  # type: ignore[method-assign]
        answer = await server.post(kv_transfer_params={"sender_releases": lent})
        assert answer.status_code == 503
        assert told == ([] if lent else [AbortRequest("a lease")])
