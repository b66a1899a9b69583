"""What the HTTP application refuses, and how failures and clients that leave end a request."""

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from msgspec.structs import replace

from engine.http.api import ServerHooks
from engine.text.tokenizer import Tokenizer
from protocol.messages import (
    AddRequest,
    EngineFailed,
    ErrorInfo,
    KVUsage,
    TokenDelta,
)
from tests.rigs.http_server import (
    CONTEXT,
    MAX_BODY,
    WAIT_S,
    events,
    serving,
)

# -- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"prompt": ""}, 400, "`prompt`"),
        ({"prompt": [260]}, 400, "token id 260; ids are from 0 to 259"),
        ({"prompt": [-1]}, 400, "token id -1"),
        ({"prompt": [10**30]}, 400, "`prompt`"),
        (
            {"prompt": "x" * CONTEXT},
            400,
            f"context length is {CONTEXT} .* is too long: it has {CONTEXT}. ",
        ),
        (
            {"prompt": "xy", "max_tokens": 63},
            400,
            "is 64 tokens.* has 2 tokens .* asks for 63 .* at most 62",
        ),
        ({"prompt": "x" * 17_000}, 400, r"is 64 tokens and .* too long: it has at least \d+"),
        ({"model": "nope"}, 404, '"nope"; this server has "m"'),
        ({"temperature": -1}, 400, "`temperature` is -1"),
        ({"n": 129}, 400, "`n`"),
        ({"min_tokens": 17}, 400, "`min_tokens` is 17, and without `max_tokens` at most 16 "),
        ({"prompt": "x" * 60, "min_tokens": 5}, 400, "`min_tokens` is 5, .* at most 4 tokens"),
        ({"prompt": "x" * MAX_BODY}, 413, f"limit is {MAX_BODY} bytes"),
    ],
)
async def test_bad_input_is_a_clear_refusal(
    tokenizer: Tokenizer, fields: dict[str, Any], status: int, message: str
) -> None:
    async with serving(tokenizer) as server:
        response = await server.post(**fields)
        assert response.status_code == status
        error = response.json()["error"]
        assert re.search(message, error["message"])
        assert error["type"] == "invalid_request_error" and error["retryable"] is False
        assert server.engine.added == []
        assert server.metrics.value("baton_requests_in_progress") == 0
        assert (await server.post()).status_code == 200


@pytest.mark.parametrize(
    ("path", "fields", "field"),
    [
        ("/v1/completions", {"prompt": "xy", "max_tokens": 63}, "max_tokens"),
        ("/v1/completions", {"prompt": "xy", "max_completion_tokens": 63}, "max_completion_tokens"),
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": "Hi"}],
                "max_tokens": 99,
                "max_completion_tokens": 98,
            },
            "max_completion_tokens",
        ),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 63}, "max_output_tokens"),
    ],
)
async def test_a_limit_beyond_the_context_is_named_as_the_client_named_it(
    tokenizer: Tokenizer, path: str, fields: dict[str, Any], field: str
) -> None:
    async with serving(tokenizer) as server:
        response = await server.http.post(path, json={"model": "m", **fields})
        error = response.json()["error"]
        assert (error["param"], error["code"]) == (field, "context_length_exceeded")
        assert f"`{field}` asks for {fields[field]} more; lower `{field}`" in error["message"]


async def test_the_longest_prompt_and_answer_that_fit_are_served(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer) as server:
        body = (await server.post(prompt="x" * (CONTEXT - 1))).json()
        assert body["usage"]["completion_tokens"] == 1
        body = (await server.post(prompt="xy", max_tokens=CONTEXT - 2)).json()
        assert body["usage"]["total_tokens"] == CONTEXT


async def test_ten_megabytes_are_refused_with_and_without_a_length(tokenizer: Tokenizer) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b"x" * 100_000

    async with serving(tokenizer) as server:
        for content in (b"x" * 10_000_000, pieces()):
            response = await server.http.post("/v1/completions", content=content)
            assert response.status_code == 413
            assert response.json()["error"]["code"] == "payload_too_large"
        assert (await server.post()).status_code == 200


async def test_what_a_proxy_adds_to_a_body_does_not_count(tokenizer: Tokenizer) -> None:
    added = {"note": "x" * MAX_BODY}  # such as the logprobs of a long prompt

    async with serving(tokenizer) as server:
        assert (await server.post(kv_transfer_params=added)).status_code == 200
        handed_back = {"kv_transfer_params": added}
        assert (await server.http.post("/release_kv", json=handed_back)).status_code == 200
        response = await server.post(kv_transfer_params=added, user="x" * MAX_BODY)
        assert response.status_code == 413
        assert f"limit is {MAX_BODY} bytes" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"GET /health HTTP/1.1\r\n\r\n", 400),
        (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}",
            400,
        ),
        (b"? ? ?\r\n\r\n", 400),
        (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n"
            b"Content-Length: 100000000\r\n\r\n",
            413,
        ),
    ],
)
async def test_what_the_connection_refuses_is_an_error_like_any_other(
    tokenizer: Tokenizer, raw: bytes, status: int
) -> None:
    async with serving(tokenizer) as server:
        url = server.http.base_url
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(raw)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 %d" % status)
        assert b"x-request-id: " in head
        found = re.search(rb"content-length: (\d+)", head)
        assert found
        body = json.loads(await reader.readexactly(int(found[1])))
        assert body["error"]["type"] == "invalid_request_error"
        writer.close()


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"\xff", b'{"model": "m", "prompt": "\\ud800"}']
)
async def test_what_is_not_a_json_object_is_refused(tokenizer: Tokenizer, content: bytes) -> None:
    async with serving(tokenizer) as server:
        response = await server.http.post("/v1/completions", content=content)
        assert response.status_code == 400
        assert "JSON" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "members"),
    [
        ("/v1/completions", '"model": "m", "prompt": %s'),
        ("/v1/chat/completions", '"model": "m", "messages": [], "guided_json": %s'),
        ("/v1/responses", '"model": "m", "input": %s'),
        ("/tokenize", '"messages": [{"role": "user", "content": %s}]'),
    ],
)
async def test_a_body_of_whatever_depth_is_the_client_s_mistake(
    tokenizer: Tokenizer, path: str, members: str
) -> None:
    """Some depths can be read but not shown in a message."""
    deepest = sys.getrecursionlimit()

    async with serving(tokenizer) as server:
        bodies = [
            "{" + members % ("[" * depth + "]" * depth) + "}"
            for depth in range(deepest - 150, deepest)
        ]
        posts = [server.http.post(path, content=body) for body in bodies]
        for response in await asyncio.gather(*posts):
            assert response.status_code == 400
            assert response.json()["error"]["code"] == "invalid_request"


async def test_unknown_routes_and_methods_have_the_same_shape(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer) as server:
        missing = await server.http.get("/v2/completions")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
        wrong = await server.http.get("/v1/completions")
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
        assert wrong.headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"max_tokens": 16}, "min_tokens"),
        ({"max_tokens": 17, "stream_options": "all"}, "stream_options"),
        ({}, "min_tokens"),
    ],
)
async def test_a_prefill_is_refused_for_what_its_client_asked(
    tokenizer: Tokenizer, asked: dict[str, Any], param: str
) -> None:
    params = {"do_remote_decode": True, "client_request": asked, "max_model_len": CONTEXT}
    leg = {"max_tokens": 1, "min_tokens": 17, "kv_transfer_params": params}

    async with serving(tokenizer) as server:
        response = await server.post(**leg)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
        assert server.engine.added == []


@pytest.mark.parametrize(
    ("context", "max_tokens", "refused"),
    [(10, 7, False), (10, 8, True), (3, None, True), (None, 1000, False), ("10", 1000, False)],
)
async def test_a_prefill_is_refused_for_what_no_decode_server_has_room_for(
    tokenizer: Tokenizer, context: object, max_tokens: int | None, refused: bool
) -> None:
    asked = {} if max_tokens is None else {"max_tokens": max_tokens}
    params = {"do_remote_decode": True, "client_request": asked, "max_model_len": context}

    async with serving(tokenizer) as server:
        leg = {"prompt": [1, 2, 3], "max_tokens": 1, "kv_transfer_params": params}
        response = await server.post(**leg)
        assert response.status_code == (400 if refused else 200)
        if refused:
            error = response.json()["error"]
            assert error["code"] == "context_length_exceeded"
            assert f"maximum context length is {context} tokens" in error["message"]
        assert len(server.engine.added) == (not refused)


# -- failures ----------------------------------------------------------------------------------


def failing_after(num_tokens: int, code: str = "transfer_failed") -> Any:
    async def script(request: AddRequest) -> AsyncIterator[TokenDelta]:
        for token_id in range(70, 70 + num_tokens):
            yield TokenDelta(request_id=request.request_id, token_ids=[token_id])
            await asyncio.sleep(0.01)  # so that the stream has begun
        yield TokenDelta(request_id=request.request_id, error=ErrorInfo(code, "it broke"))

    return script


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_the_first_token_is_an_http_error(
    tokenizer: Tokenizer, stream: bool
) -> None:
    async with serving(tokenizer, failing_after(0)) as server:
        response = await server.post(stream=stream)
        assert response.status_code == 502
        error = response.json()["error"]
        assert (error["phase"], error["retryable"]) == ("transfer", True)


async def test_a_later_failure_ends_the_stream_without_done(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer, failing_after(2)) as server:
        found = events(await server.post(stream=True))
        assert [name for name, _ in found] == ["message", "message", "error"]
        assert found[-1][1]["error"]["code"] == "transfer_failed"
        whole = await server.post()
        assert whole.status_code == 502
        assert server.metrics.value("baton_requests", endpoint="completions", outcome="error") == 2
        assert server.metrics.value("baton_requests_in_progress") == 0


async def test_one_failing_prompt_ends_the_others(tokenizer: Tokenizer) -> None:
    async def script(request: AddRequest) -> AsyncIterator[TokenDelta]:
        if request.token_ids == [2]:
            yield TokenDelta(request_id=request.request_id, error=ErrorInfo("overloaded", "full"))
        await asyncio.Event().wait()

    async with serving(tokenizer, script) as server:
        response = await server.post(prompt=[[1], [2], [3]])
        assert response.status_code == 503
        ids = {tuple(a.token_ids): a.request_id for a in server.engine.added}
        assert sorted(server.engine.aborted) == [ids[(1,)], ids[(3,)]]


async def test_a_bug_in_a_hook_is_an_internal_error(tokenizer: Tokenizer) -> None:
    class Broken(ServerHooks):
        def prepare(self, *_: Any) -> Any:
            raise ZeroDivisionError

    async with serving(tokenizer, hooks=Broken()) as server:
        response = await server.post()
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "internal_error"
        assert server.metrics.value("baton_requests_in_progress") == 0


async def test_a_dead_engine_is_503_everywhere(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer) as server:
        assert (await server.http.get("/health")).status_code == 200
        server.engine.say(EngineFailed("out of memory"))
        for response in (
            await server.post(),
            await server.http.get("/health"),
            await server.http.get("/ready"),
        ):
            assert response.status_code == 503
            assert "out of memory" in response.text


async def test_before_the_engine_is_ready_requests_are_refused(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer, ready=None) as server:
        assert (await server.http.get("/health")).status_code == 200
        assert (await server.http.get("/ready")).json()["ready"] is False
        assert (await server.post()).status_code == 503


# -- clients that leave ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stage", ["whole, before a token", "stream, before a token", "stream, after one"]
)
async def test_a_client_that_leaves_aborts_its_sequences(tokenizer: Tokenizer, stage: str) -> None:
    started, ended = asyncio.Event(), asyncio.Event()

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
        assert server.engine.num_open == 0
        value = server.metrics.value
        while value("baton_requests", endpoint="completions", outcome="abort") != 1:
            await asyncio.sleep(0)
        assert value("baton_requests_in_progress") == 0


@pytest.mark.parametrize("leaves", [True, False])
async def test_kv_kept_for_an_answer_that_is_never_given_is_let_go(
    tokenizer: Tokenizer, leaves: bool
) -> None:
    """The KV of a call's first prompts is leased while its last one is still computed."""

    class Retaining(ServerHooks):
        def prepare(self, request: Any, adds: Any, ready: Any) -> Any:
            return [replace(add, retain_kv=True) for add in adds]

    told = asyncio.Event()

    async def script(request: AddRequest) -> AsyncIterator[TokenDelta]:
        if request.token_ids == [1]:
            yield TokenDelta(request_id=request.request_id, finish_reason="length", usage=KVUsage())
            told.set()
        elif leaves:
            await asyncio.Event().wait()
        else:
            await told.wait()
            error = ErrorInfo("overloaded", "full")
            yield TokenDelta(request_id=request.request_id, error=error)

    async with serving(tokenizer, script, Retaining()) as server:
        pending = asyncio.create_task(server.post(prompt=[[1], [2]], max_tokens=1))
        await told.wait()
        if leaves:
            pending.cancel()
        else:
            assert (await pending).status_code == 503
        expected = {added.request_id for added in server.engine.added}
        while set(server.engine.aborted) != expected:
            await asyncio.sleep(0)


async def test_a_request_whose_answer_cannot_be_begun_is_taken_back_from_the_engine(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("no such thing")

    async def hangs(_: AddRequest) -> AsyncIterator[TokenDelta]:
        await asyncio.Event().wait()
        yield TokenDelta(request_id="")

    async with serving(tokenizer, hangs) as server:
        with monkeypatch.context() as patched:
            patched.setattr("engine.http.generate.PromptGeneration", fails)
            assert (await server.post()).status_code == 500
        assert server.engine.aborted == [server.engine.added[0].request_id]
        assert server.engine.num_open == 0
        assert server.metrics.value("baton_requests_in_progress") == 0


@pytest.mark.parametrize(
    "path",
    [
        "/health",
        "/ready",
        "/metrics?name=x",
        "/docs",
        "/openapi.json",
        "/v1/models",
        "/v1/models/m",
    ],
)
async def test_a_head_is_answered_as_a_get_is_without_its_body(
    tokenizer: Tokenizer, path: str
) -> None:
    async with serving(tokenizer) as server:
        whole, head = await server.http.get(path), await server.http.head(path)
        assert (head.status_code, head.content) == (whole.status_code, b"") and head.is_success
        assert head.headers["content-type"] == whole.headers["content-type"]
        assert "content-length" in head.headers
        refused = await server.http.delete(path)
        assert refused.status_code == 405
        assert sorted(refused.headers["allow"].split(", ")) == ["GET", "HEAD"]
