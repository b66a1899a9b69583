"""The HTTP application over real sockets, in front of a scripted engine."""

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
import tokenizers
import uvicorn
from tokenizers import decoders, models, pre_tokenizers

from engine.client import ScriptedEngine, count_up
from engine.http import PlainHooks, create_app
from engine.tokenizer import Tokenizer
from protocol.errors import KVParamsRejected
from protocol.messages import (
    AddRequest,
    EngineFailed,
    EngineReady,
    EngineStats,
    ErrorInfo,
    KVUsage,
    TokenDelta,
    TokenLogprobs,
)
from protocol.metrics import Metrics, stat_key
from protocol.sse import SSEParser

WAIT_S = 20.0
CONTEXT = 64
MAX_BODY = 20_000
READY = EngineReady(num_blocks=64, block_size=16, max_model_len=CONTEXT, vocab_size=260)


@dataclass(frozen=True)
class Settings:
    model: str = "folder/model"
    served_model_name: str | None = "m"
    max_body_bytes: int = MAX_BODY


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One token per byte, and <end>."""
    folder = tmp_path_factory.mktemp("tokenizer")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<end>"])
    inner.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    config = {"eos_token": "<end>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer(folder)


class Server:
    """The application under uvicorn, the engine's script and the client, on one loop."""

    def __init__(self, engine: ScriptedEngine, http: httpx.AsyncClient, metrics: Metrics) -> None:
        self.engine = engine
        self.http = http
        self.metrics = metrics

    async def post(self, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
        body: dict[str, Any] = {"model": "m", "prompt": "ab", **fields}
        if "chat" in path:
            del body["prompt"]
        return await self.http.post(path, json=body)

    async def chat(self, **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": "Hi"}]
        return await self.post("/v1/chat/completions", **{"messages": messages, **fields})


@asynccontextmanager
async def serving(
    tokenizer: Tokenizer,
    script: Any = count_up,
    hooks: Any = None,
    ready: EngineReady | None = READY,
) -> AsyncIterator[Server]:
    engine = ScriptedEngine(script, ready)
    await engine.start()
    app = create_app(engine, tokenizer, Settings(), hooks or PlainHooks())
    config = uvicorn.Config(app, port=0, log_level="warning", lifespan="off")
    server = uvicorn.Server(config)
    listener = config.bind_socket()
    task = asyncio.create_task(server.serve(sockets=[listener]))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        async with httpx.AsyncClient(base_url=url, timeout=WAIT_S, trust_env=False) as http:
            yield Server(engine, http, app.state.metrics)
    finally:
        server.should_exit = True
        await engine.close()
        await task
        listener.close()


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), 60))


def saying(tokenizer: Tokenizer, text: str, **last: Any) -> Any:
    """A script that says `text`, one token per delta."""

    async def script(request: AddRequest) -> AsyncIterator[TokenDelta]:
        for token_id in tokenizer.encode(text):
            yield TokenDelta(request_id=request.request_id, token_ids=[token_id])
            await asyncio.sleep(0)
        members = {"finish_reason": "length", "usage": USAGE, **last}
        yield TokenDelta(request_id=request.request_id, **members)

    return script


USAGE = KVUsage(transferred=1, recomputed=1, skipped=0, cached_tokens=1)


def events(response: httpx.Response) -> list[tuple[str, Any]]:
    assert response.headers["content-type"].startswith("text/event-stream")
    found = SSEParser().feed(response.content)
    return [(name, text if text == "[DONE]" else json.loads(text)) for name, text in found]


def chunks(response: httpx.Response) -> list[dict[str, Any]]:
    """A good stream's chunks: it ends in [DONE] and holds no error."""
    *found, last = events(response)
    assert last == ("message", "[DONE]")
    assert {name for name, _ in found} == {"message"}
    return [chunk for _, chunk in found]


# -- answers -----------------------------------------------------------------------------------


def test_a_whole_completion(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with serving(tokenizer, saying(tokenizer, "Hé 🙂")) as server:
            response = await server.post(return_token_ids=True)
            body = response.json()
            assert response.status_code == 200
            assert response.headers["x-baton-kv"] == "transferred=1, recomputed=1, skipped=0"
            (choice,) = body["choices"]
            assert (choice["text"], choice["finish_reason"]) == ("Hé 🙂", "length")
            assert choice["token_ids"] == tokenizer.encode("Hé 🙂")
            assert choice["prompt_token_ids"] == tokenizer.encode("ab")
            assert body["usage"] == {
                "prompt_tokens": 2,
                "completion_tokens": 8,
                "total_tokens": 10,
                "prompt_tokens_details": {"cached_tokens": 1},
            }

    run(main)


def test_a_stream_says_the_same(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with serving(tokenizer, saying(tokenizer, "Hé 🙂")) as server:
            response = await server.post(
                stream=True, return_token_ids=True, stream_options={"include_usage": True}
            )
            found = chunks(response)
            assert len({(c["id"], c["created"], c["model"]) for c in found}) == 1
            choices = [c["choices"][0] for c in found[:-1]]
            assert "".join(c["text"] for c in choices) == "Hé 🙂"
            assert [i for c in choices for i in c["token_ids"]] == tokenizer.encode("Hé 🙂")
            assert [c.get("prompt_token_ids") for c in choices[:2]] == [
                tokenizer.encode("ab"),
                None,
            ]
            assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["length"]
            assert [c["usage"] for c in found[:-1]] == [None] * len(choices)
            assert found[-1]["choices"] == [] and found[-1]["usage"]["total_tokens"] == 10
            assert found[-1]["baton_kv"] == {"transferred": 1, "recomputed": 1, "skipped": 0}

    run(main)


def test_chat_uses_the_template_and_fills_the_context(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with serving(tokenizer, saying(tokenizer, "Hello")) as server:
            body = (await server.chat()).json()
            assert body["choices"][0]["message"]["content"] == "Hello"
            (added,) = server.engine.added
            assert tokenizer.decode(added.token_ids) == "user:Hi;"
            assert added.max_tokens == CONTEXT - len("user:Hi;")
            deltas = [c["choices"][0]["delta"] for c in chunks(await server.chat(stream=True))]
            assert deltas[0]["role"] == "assistant"
            assert "".join(d.get("content", "") for d in deltas) == "Hello"

    run(main)


def test_several_prompts_are_choices_of_one_answer(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with serving(tokenizer) as server:
            prompts = [[10], [20, 30], [40]]
            body = (await server.post(prompt=prompts, max_tokens=2, return_token_ids=True)).json()
            assert [c["index"] for c in body["choices"]] == [0, 1, 2]
            assert [c["token_ids"] for c in body["choices"]] == [[11, 12], [31, 32], [41, 42]]
            assert body["usage"]["prompt_tokens"] == 4
            assert body["usage"]["completion_tokens"] == 6
            response = await server.post(
                prompt=prompts, max_tokens=2, stream=True, return_token_ids=True
            )
            ids: dict[int, list[int]] = {0: [], 1: [], 2: []}
            found = chunks(response)
            for choice in (c["choices"][0] for c in found):
                ids[choice["index"]] += choice["token_ids"]
            assert ids == {0: [11, 12], 1: [31, 32], 2: [41, 42]}
            assert ["baton_kv" in c for c in found] == [False] * (len(found) - 1) + [True]
            assert found[-1]["baton_kv"]["recomputed"] == 4

    run(main)


def test_what_the_engine_is_asked_for(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with serving(tokenizer) as server:
            await server.post(temperature=0.5, top_p=0.9, top_k=-1, min_p=0.1, seed=7)
            await server.post(ignore_eos=True, max_tokens=1, max_completion_tokens=1)
            await server.post()
            first, second, third = server.engine.added
            sampling = first.sampling
            assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 0)
            assert (sampling.min_p, sampling.seed, first.max_tokens) == (0.1, 7, 16)
            assert first.stop_token_ids == tokenizer.encode("<end>")
            assert second.stop_token_ids == [] and second.max_tokens == 1
            assert second.sampling.seed != third.sampling.seed  # drawn by the server

    run(main)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_cuts_the_text_and_aborts_the_engine(
    tokenizer: Tokenizer, stream: bool
) -> None:
    async def endless(request: AddRequest) -> AsyncIterator[TokenDelta]:
        for token_id in tokenizer.encode("one two th"):
            yield TokenDelta(request_id=request.request_id, token_ids=[token_id])
        await asyncio.Event().wait()

    async def main() -> None:
        async with serving(tokenizer, endless) as server:
            response = await server.post(
                stop=["o t", " two"], stream=stream, stream_options={"include_usage": True}
            )
            if stream:
                *found, last = chunks(response)
                text = "".join(c["choices"][0]["text"] for c in found)
                reason = found[-1]["choices"][0]["finish_reason"]
            else:
                last = response.json()
                text, reason = last["choices"][0]["text"], last["choices"][0]["finish_reason"]
            assert (text, reason) == ("one", "stop")
            assert last["usage"]["completion_tokens"] == len("one two")
            assert server.engine.aborted == [server.engine.added[0].request_id]

    run(main)


def test_the_end_token_has_no_text_and_what_was_held_back_comes(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        script = saying(tokenizer, "Hi wor<end>", finish_reason="stop")
        async with serving(tokenizer, script) as server:
            body = (await server.post(stop="world")).json()
            assert body["choices"][0]["text"] == "Hi wor"
            assert body["choices"][0]["finish_reason"] == "stop"
            assert body["usage"]["completion_tokens"] == 7

    run(main)


def test_logprobs_have_one_entry_per_token(tokenizer: Tokenizer) -> None:
    a, b, c = tokenizer.encode("abc")

    async def script(request: AddRequest) -> AsyncIterator[TokenDelta]:
        found = [TokenLogprobs(-0.5, [a, b], [-0.5, -1.5]), TokenLogprobs(float("-inf"), [b], [-2])]
        yield TokenDelta(
            request_id=request.request_id,
            token_ids=[a, c],
            logprobs=found,
            finish_reason="length",
            usage=USAGE,
        )

    async def main() -> None:
        async with serving(tokenizer, script) as server:
            body = (await server.post(logprobs=2)).json()
            assert server.engine.added[0].sampling.num_logprobs == 2
            assert body["choices"][0]["logprobs"] == {
                "tokens": ["a", "c"],
                "token_logprobs": [-0.5, -9999.0],
                "top_logprobs": [{"a": -0.5, "b": -1.5}, {"c": -9999.0, "b": -2.0}],
                "text_offset": [0, 1],
            }

    run(main)


def test_the_openai_client_understands_us(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with serving(tokenizer, saying(tokenizer, "Hello")) as server:
            client = openai.AsyncOpenAI(
                base_url=f"{server.http.base_url}/v1", api_key="-", max_retries=0
            )
            async with client:
                whole = await client.completions.create(model="m", prompt="ab")
                assert whole.choices[0].text == "Hello" and whole.usage is not None
                stream = await client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": "Hi"}], stream=True
                )
                text = [chunk.choices[0].delta.content or "" async for chunk in stream]
                assert "".join(text) == "Hello"
                assert [model.id async for model in client.models.list()] == ["m"]
                with pytest.raises(openai.NotFoundError, match="this server has"):
                    await client.completions.create(model="other", prompt="ab")

    run(main)


# -- hooks -------------------------------------------------------------------------------------


class RecordingHooks(PlainHooks):
    role = "prefill"

    def prepare(self, request: Any, prompts: Any, sampling: Any) -> Any:
        if request.kv_transfer_params == {"bad": True}:
            raise KVParamsRejected("`kv_transfer_params.bad` is true.", param="kv_transfer_params")
        return [{"retain_kv": request.kv_transfer_params is not None} for _ in prompts]

    def finish(self, finals: Any) -> dict[str, Any]:
        return {"kv_transfer_params": [final.usage.transferred for final in finals]}


def test_hooks_shape_the_requests_and_the_answer(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        script = saying(tokenizer, "x")
        async with serving(tokenizer, script, RecordingHooks()) as server:
            response = await server.post(prompt=["a", "b"], kv_transfer_params={"x": 1})
            assert response.json()["kv_transfer_params"] == [1, 1]
            assert [added.retain_kv for added in server.engine.added] == [True, True]
            last = chunks(await server.post(stream=True))[-1]
            assert last["kv_transfer_params"] == [1]
            rejected = await server.post(kv_transfer_params={"bad": True})
            assert rejected.status_code == 400
            assert rejected.json()["error"]["code"] == "kv_transfer_params_rejected"

    run(main)


# -- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"prompt": ""}, 400, "`prompt`"),
        ({"prompt": [260]}, 400, "token id 260; ids are from 0 to 259"),
        ({"prompt": [-1]}, 400, "token id -1"),
        ({"prompt": [10**30]}, 400, "`prompt`"),
        ({"prompt": "x" * CONTEXT}, 400, f"has {CONTEXT} tokens and the context holds {CONTEXT}"),
        ({"prompt": "xy", "max_tokens": 63}, 400, "has 2 tokens .* asks for 63 .* holds 64"),
        ({"prompt": "x" * 17_000}, 400, "has 17000 tokens"),
        ({"model": "nope"}, 404, "'nope'; this server has 'm'"),
        ({"temperature": -1}, 400, "`temperature` is -1"),
        ({"n": 2}, 400, "`n`"),
        ({"prompt": "x" * MAX_BODY}, 413, f"longer than {MAX_BODY} bytes"),
    ],
)
def test_bad_input_is_a_clear_refusal(
    tokenizer: Tokenizer, fields: dict[str, Any], status: int, message: str
) -> None:
    async def main() -> None:
        async with serving(tokenizer) as server:
            response = await server.post(**fields)
            assert response.status_code == status
            error = response.json()["error"]
            assert re.search(message, error["message"])
            assert error["type"] == "invalid_request_error" and error["retryable"] is False
            assert server.engine.added == []
            assert server.metrics.value("baton_requests_in_progress") == 0
            assert (await server.post()).status_code == 200

    run(main)


def test_the_longest_prompt_and_answer_that_fit_are_served(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with serving(tokenizer) as server:
            body = (await server.post(prompt="x" * (CONTEXT - 1))).json()
            assert body["usage"]["completion_tokens"] == 1
            body = (await server.post(prompt="xy", max_tokens=CONTEXT - 2)).json()
            assert body["usage"]["total_tokens"] == CONTEXT

    run(main)


def test_ten_megabytes_are_refused_with_and_without_a_length(tokenizer: Tokenizer) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b"x" * 100_000

    async def main() -> None:
        async with serving(tokenizer) as server:
            for content in (b"x" * 10_000_000, pieces()):
                response = await server.http.post("/v1/completions", content=content)
                assert response.status_code == 413
                assert response.json()["error"]["code"] == "payload_too_large"
            assert (await server.post()).status_code == 200

    run(main)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"\xff", b'{"model": "m", "prompt": "\\ud800"}']
)
def test_what_is_not_a_json_object_is_refused(tokenizer: Tokenizer, content: bytes) -> None:
    async def main() -> None:
        async with serving(tokenizer) as server:
            response = await server.http.post("/v1/completions", content=content)
            assert response.status_code == 400
            assert "JSON" in response.json()["error"]["message"]

    run(main)


def test_unknown_routes_and_methods_have_the_same_shape(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with serving(tokenizer) as server:
            missing = await server.http.get("/v2/completions")
            assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
            wrong = await server.http.get("/v1/completions")
            assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")

    run(main)


# -- failures ----------------------------------------------------------------------------------


def failing_after(num_tokens: int, code: str = "transfer_failed") -> Any:
    async def script(request: AddRequest) -> AsyncIterator[TokenDelta]:
        for token_id in range(70, 70 + num_tokens):
            yield TokenDelta(request_id=request.request_id, token_ids=[token_id])
            await asyncio.sleep(0.01)  # so that the stream has begun
        yield TokenDelta(request_id=request.request_id, error=ErrorInfo(code, "it broke"))

    return script


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_before_the_first_token_is_an_http_error(
    tokenizer: Tokenizer, stream: bool
) -> None:
    async def main() -> None:
        async with serving(tokenizer, failing_after(0)) as server:
            response = await server.post(stream=stream)
            assert response.status_code == 502
            error = response.json()["error"]
            assert (error["phase"], error["retryable"]) == ("transfer", True)

    run(main)


def test_a_later_failure_ends_the_stream_without_done(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with serving(tokenizer, failing_after(2)) as server:
            found = events(await server.post(stream=True))
            assert [name for name, _ in found] == ["message", "message", "error"]
            assert found[-1][1]["error"]["code"] == "transfer_failed"
            whole = await server.post()
            assert whole.status_code == 502
            assert (
                server.metrics.value("baton_requests", endpoint="completions", outcome="error") == 2
            )
            assert server.metrics.value("baton_requests_in_progress") == 0

    run(main)


def test_one_failing_prompt_ends_the_others(tokenizer: Tokenizer) -> None:
    async def script(request: AddRequest) -> AsyncIterator[TokenDelta]:
        if request.token_ids == [2]:
            yield TokenDelta(request_id=request.request_id, error=ErrorInfo("overloaded", "full"))
        await asyncio.Event().wait()

    async def main() -> None:
        async with serving(tokenizer, script) as server:
            response = await server.post(prompt=[[1], [2], [3]])
            assert response.status_code == 503
            ids = {tuple(a.token_ids): a.request_id for a in server.engine.added}
            assert sorted(server.engine.aborted) == [ids[(1,)], ids[(3,)]]

    run(main)


def test_a_bug_in_a_hook_is_an_internal_error(tokenizer: Tokenizer) -> None:
    class Broken(PlainHooks):
        def prepare(self, request: Any, prompts: Any, sampling: Any) -> Any:
            raise ZeroDivisionError

    async def main() -> None:
        async with serving(tokenizer, hooks=Broken()) as server:
            response = await server.post()
            assert response.status_code == 500
            assert response.json()["error"]["code"] == "internal_error"
            assert server.metrics.value("baton_requests_in_progress") == 0

    run(main)


def test_a_dead_engine_is_503_everywhere(tokenizer: Tokenizer) -> None:
    async def main() -> None:
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

    run(main)


def test_before_the_engine_is_ready_requests_are_refused(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with serving(tokenizer, ready=None) as server:
            assert (await server.http.get("/health")).status_code == 200
            assert (await server.http.get("/ready")).json()["ready"] is False
            assert (await server.post()).status_code == 503

    run(main)


# -- clients that leave ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stage", ["whole, before a token", "stream, before a token", "stream, after one"]
)
def test_a_client_that_leaves_aborts_its_sequences(tokenizer: Tokenizer, stage: str) -> None:
    async def main() -> None:
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

    run(main)


# -- ids, metrics, operations ------------------------------------------------------------------


@pytest.mark.parametrize("request_id", ["req-1", "100% {odd} \u00e9", "x" * 3000])
def test_a_request_id_is_echoed_and_logged(
    tokenizer: Tokenizer, request_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    from protocol.logging import LineFormatter, current_request_id

    seen: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(LineFormatter("decode").format(record))
            ids.append(current_request_id())

    ids: list[str | None] = []
    handler = Handler()
    logger = logging.getLogger("baton.engine.http_tally")

    async def main() -> None:
        async with serving(tokenizer) as server:
            header = {"x-request-id": request_id.encode("latin-1")}
            body = {"model": "m", "prompt": "ab"}
            for _ in range(2):
                response = await server.http.post("/v1/completions", json=body, headers=header)
                assert response.headers["x-request-id"] == request_id
            first, second = server.engine.added
            assert first.request_id != second.request_id
            assert first.request_id.startswith(request_id[:64]) and len(first.request_id) < 100
            generated = [(await server.post()).headers["x-request-id"] for _ in range(2)]
            assert len(set(generated)) == 2

    logger.addHandler(handler)
    caplog.set_level(logging.INFO, "baton")
    try:
        run(main)
    finally:
        logger.removeHandler(handler)
    assert ids[:2] == [request_id, request_id]
    assert "prompt=2" in seen[0]


def test_metrics_count_what_happened(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with serving(tokenizer, saying(tokenizer, "Hello")) as server:
            key = stat_key("baton_kv_blocks", state="free")
            server.engine.say(EngineStats({key: 7.0, "running": 2.0, "odd.thing": 1.0}))
            await server.post()
            await server.post(temperature=-1)
            text = (await server.http.get("/metrics")).text
            for line in (
                'baton_requests_total{endpoint="completions",outcome="length"} 1.0',
                'baton_requests_total{endpoint="completions",outcome="rejected"} 1.0',
                "baton_prompt_tokens_total 2.0",
                "baton_generation_tokens_total 5.0",
                'baton_kv_tokens_total{source="transferred"} 1.0',
                "baton_time_to_first_token_seconds_count 1.0",
                "baton_inter_token_seconds_count 4.0",
                'baton_kv_blocks{state="free"} 7.0',
                "baton_requests_running 2.0",
                "baton_engine_odd_thing 1.0",
            ):
                assert f"\n{line}\n" in text, line

    run(main)


def test_two_applications_in_one_process_share_no_metrics(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with serving(tokenizer) as one, serving(tokenizer) as other:
            await one.post()
            assert one.metrics.value("baton_prompt_tokens") == 2
            assert other.metrics.value("baton_prompt_tokens") == 0

    run(main)


def test_ready_and_models_say_what_is_served(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with serving(tokenizer, hooks=RecordingHooks()) as server:
            ready = (await server.http.get("/ready")).json()
            assert ready == {
                "ready": True,
                "role": "prefill",
                "model": "m",
                "num_blocks": 64,
                "block_size": 16,
                "max_model_len": CONTEXT,
            }
            (card,) = (await server.http.get("/v1/models")).json()["data"]
            assert (card["id"], card["max_model_len"]) == ("m", CONTEXT)
            assert (await server.http.get("/v1/models/m")).json() == card
            assert (await server.http.get("/v1/models/a/b")).status_code == 404

    run(main)
