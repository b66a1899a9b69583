"""Failures and disconnects end a request and release the KV that it leased."""

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from msgspec.structs import replace

from engine.http.api import ServerHooks
from protocol.messages import (
    AbortRequest,
    AddRequest,
    EngineFailed,
    EngineInput,
    ErrorInfo,
    KVUsage,
    TokenDelta,
)
from tests.rigs.http_server import (
    WAIT_S,
    Server,
    connected,
    end,
    events,
    scripted,
    send_request,
    serving,
)
from tests.rigs.metric import metric
from tests.rigs.scripted_engine import hang


class RetainingHooks(ServerHooks):
    """Hooks that retain all KV. A response refers to the KV with `num_bytes` bytes, or
    not at all if `num_bytes` is None."""

    def __init__(self, num_bytes: int | None) -> None:
        self._num_bytes = num_bytes

    def prepare(self, request: Any, adds: Any, ready: Any) -> Any:
        return [replace(add, retain_kv=True) for add in adds]

    def response_members(self, last_deltas: Any) -> dict[str, Any]:
        return (
            {}
            if self._num_bytes is None
            else {"kv_transfer_params": "x" * self._num_bytes}
        )


# -- failures --------------------------------------------------------------------------


def failing_after(num_tokens: int, code: str = "transfer_failed") -> Any:
    async def script(request: AddRequest) -> AsyncIterator[TokenDelta]:
        for token_id in range(70, 70 + num_tokens):
            yield TokenDelta(request_id=request.request_id, token_ids=[token_id])
            await asyncio.sleep(0.01)  # the stream begins during this pause
        yield TokenDelta(
            request_id=request.request_id, error=ErrorInfo(code, "it broke")
        )

    return script


@pytest.mark.parametrize("stream", [False, True])
async def test_failure_before_the_first_token_is_an_http_error(tokenizer, stream):
    async with serving(tokenizer, failing_after(0)) as server:
        response = await server.post(stream=stream)
        assert response.status_code == 502
        error = response.json()["error"]
        assert (error["phase"], error["retryable"]) == ("transfer", True)


async def test_later_failure_ends_the_stream_without_done(tokenizer):
    async with serving(tokenizer, failing_after(2)) as server:
        actual = events(await server.post(stream=True))
        assert [name for name, _ in actual] == ["message", "message", "error"]
        assert actual[-1][1]["error"]["code"] == "transfer_failed"
        complete_response = await server.post()
        assert complete_response.status_code == 502
        ended = {"endpoint": "completions", "outcome": "error"}
        assert metric(server.metrics, "baton_requests", **ended) == 2
        assert metric(server.metrics, "baton_requests_in_progress") == 0


async def test_failure_of_one_prompt_ends_the_other_prompts(tokenizer):
    async def script(request: AddRequest) -> AsyncIterator[TokenDelta]:
        if request.token_ids == [2]:
            yield TokenDelta(
                request_id=request.request_id, error=ErrorInfo("overloaded", "full")
            )
        await asyncio.Event().wait()

    async with serving(tokenizer, script) as server:
        response = await server.post(prompt=[[1], [2], [3]])
        assert response.status_code == 503
        ids = {tuple(a.token_ids): a.request_id for a in server.engine.added}
        assert sorted(server.engine.aborted) == [ids[(1,)], ids[(3,)]]


async def test_dead_engine_is_503_everywhere(tokenizer):
    async with serving(tokenizer) as server:
        assert (await server.http.get("/health")).status_code == 200
        server.engine.emit(EngineFailed("out of memory"))
        for response in (
            await server.post(),
            await server.http.get("/health"),
            await server.http.get("/ready"),
        ):
            assert response.status_code == 503
            assert "out of memory" in response.text


# -- clients that disconnect -----------------------------------------------------------


@pytest.mark.parametrize(
    "stage", ["whole, before a token", "stream, before a token", "stream, after one"]
)
async def test_client_disconnect_aborts_its_sequences(tokenizer, stage):
    started = asyncio.Event()
    ended = asyncio.Event()

    async def script(request: AddRequest) -> AsyncIterator[TokenDelta]:
        try:
            if "after one" in stage:
                yield TokenDelta(request_id=request.request_id, token_ids=[70])
            started.set()
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with serving(tokenizer, script) as server:
        body = {"model": "m", "prompt": "ab", "stream": "stream" in stage}
        request = server.http.build_request("POST", "/v1/completions", json=body)
        if "after one" in stage:
            response = await server.http.send(request, stream=True)
            assert b"data: " in await anext(response.aiter_raw())
            await response.aclose()
        else:
            pending = asyncio.create_task(server.http.send(request))
            await started.wait()
            pending.cancel()
        await asyncio.wait_for(ended.wait(), WAIT_S)
        assert server.engine.aborted == [server.engine.added[0].request_id]
        assert not server.engine._subscriptions
        aborted = {"endpoint": "completions", "outcome": "abort"}
        while metric(server.metrics, "baton_requests", **aborted) != 1:
            await asyncio.sleep(0)
        assert metric(server.metrics, "baton_requests_in_progress") == 0


@pytest.mark.parametrize("disconnects", [True, False])
async def test_kv_retained_for_an_answer_that_never_comes_is_released(
    tokenizer, disconnects
):
    """The KV of a call's first prompts is leased while the last prompt is computed."""

    first_ended = asyncio.Event()

    async def script(request: AddRequest) -> AsyncIterator[TokenDelta]:
        if request.token_ids == [1]:
            yield TokenDelta(
                request_id=request.request_id, finish_reason="length", usage=KVUsage()
            )
            first_ended.set()
        elif disconnects:
            await asyncio.Event().wait()
        else:
            await first_ended.wait()
            error = ErrorInfo("overloaded", "full")
            yield TokenDelta(request_id=request.request_id, error=error)

    async with serving(tokenizer, script, RetainingHooks(None)) as server:
        pending = asyncio.create_task(server.post(prompt=[[1], [2]], max_tokens=1))
        await first_ended.wait()
        if disconnects:
            pending.cancel()
        else:
            assert (await pending).status_code == 503
        expected = {added.request_id for added in server.engine.added}
        while set(server.engine.aborted) != expected:
            await asyncio.sleep(0)


async def test_request_is_aborted_in_the_engine_if_its_answer_cannot_begin(
    tokenizer, monkeypatch
):
    def raise_error(*_: Any) -> None:
        raise RuntimeError("no such thing")

    async with serving(tokenizer, hang) as server:
        with monkeypatch.context() as patched:
            patched.setattr("engine.http.call.PromptGeneration", raise_error)
            failed = await server.post()
        assert (failed.status_code, failed.json()["error"]["code"]) == (
            500,
            "internal_error",
        )
        assert server.engine.aborted == [server.engine.added[0].request_id]
        assert not server.engine._subscriptions
        assert metric(server.metrics, "baton_requests_in_progress") == 0


# -- answers that refer to leased KV ---------------------------------------------------


class ReleasingHooks(ServerHooks):
    """Hooks that release one lease for each refused request."""

    def release_messages(self, kv_transfer_params: object) -> list[AbortRequest]:
        return [AbortRequest("a lease")]


async def _wait_until_released(server: Server) -> bool:
    while not server.engine.aborted:
        await asyncio.sleep(0.001)
    request_ids = [request.request_id for request in server.engine.added]
    return server.engine.aborted == request_ids


@pytest.mark.parametrize("num_bytes", [10, 1 << 20])
async def test_kv_stays_retained_for_a_client_that_has_its_answer(tokenizer, num_bytes):
    async with serving(tokenizer, scripted(end()), RetainingHooks(num_bytes)) as server:
        for headers in ({}, {"Connection": "close"}):
            answer = await server.post(headers=headers, max_tokens=1)
            assert answer.json()["kv_transfer_params"] == "x" * num_bytes
            assert answer.headers["x-baton-kv"]
        await server.http.get("/health")
        assert server.engine.aborted == []


async def test_kv_to_which_no_answer_refers_is_released(tokenizer):
    async with serving(tokenizer, scripted(end()), RetainingHooks(None)) as server:
        assert (await server.post(max_tokens=1)).status_code == 200
        assert await _wait_until_released(server)


async def test_kv_is_released_when_the_client_disconnects_within_a_long_answer(
    tokenizer,
):
    async with serving(tokenizer, scripted(end()), RetainingHooks(16 << 20)) as server:
        with await connected(server) as client:
            await send_request(client, max_tokens=1)
            await asyncio.get_running_loop().sock_recv(client, 100)
            assert server.engine.aborted == []
        assert await _wait_until_released(server)


@pytest.mark.parametrize("turns", range(1, 5))
async def test_kv_is_released_when_the_client_disconnected_just_before_the_answer(
    tokenizer, turns
):
    """The client disconnects in different turns of the event loop. In one of the turns
    the server has not noticed the disconnect, so the answer is lost without an error.
    """
    sockets: list[socket.socket] = []

    async def script(request: AddRequest) -> AsyncIterator[TokenDelta]:
        sockets[0].close()
        for _ in range(turns):
            await asyncio.sleep(0)
        yield TokenDelta(request_id=request.request_id, **end())

    async with serving(tokenizer, script, RetainingHooks(10)) as server:
        sockets.append(await connected(server))
        await send_request(sockets[0], max_tokens=1)
        assert await _wait_until_released(server)


@pytest.mark.parametrize("sender_releases", [False, True])
async def test_refused_request_leaves_a_lease_that_its_sender_releases(
    tokenizer, sender_releases
):
    async with serving(tokenizer, hooks=ReleasingHooks(), ready=None) as server:
        messages: list[EngineInput] = []
        server.engine.send = messages.append  # type: ignore[method-assign]
        answer = await server.post(
            kv_transfer_params={"sender_releases": sender_releases}
        )
        assert answer.status_code == 503
        assert messages == ([] if sender_releases else [AbortRequest("a lease")])
