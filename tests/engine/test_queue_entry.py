"""A server's queue counts a request with its true length: after its tokenization, and
only while its client is connected.

The HTTP application runs under a real uvicorn, in front of a scripted engine.
"""

import asyncio
import json
import random
import socket
import threading
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from engine.http import prompt_bounds
from engine.http.api import ServerHooks
from engine.text import grammar_check
from engine.text.tokenizer import Tokenizer
from protocol.http.admission import Admission
from protocol.http.prompt_marks import (
    SPAN_TOKENS,
    SharedPrefixes,
    WaitingPrompt,
    marks_of,
)
from protocol.messages import (
    AddRequest,
    EngineInput,
    ErrorInfo,
    KVUsage,
    Outputs,
    SamplingParams,
    TokenDelta,
)
from protocol.settings.server_options import QueueOptions
from tests.engine.test_admission import Gate, until_added
from tests.rigs.http_server import READY, Server, serving
from tests.rigs.metric import metric
from tests.rigs.scripted_engine import hang

CONTEXT = 4096
serving_4k = partial(
    serving, ready=replace(READY, max_model_len=CONTEXT, num_blocks=4096)
)
SHARED_IDS = [300 % 256] * 1500
NUM_UNIQUE_IDS = 60


def prompt_ids(number: int) -> list[int]:
    unique_ids = random.Random(number).choices(range(256), k=NUM_UNIQUE_IDS)
    return [*SHARED_IDS, *unique_ids]


async def queue_tokens(server: Server) -> float:
    await server.http.get("/metrics")  # updates the gauge
    return metric(server.metrics, "baton_queue_tokens")


async def until_in_progress(server: Server, count: int) -> None:
    while metric(server.metrics, "baton_requests_in_progress") != count:
        await asyncio.sleep(0.002)


# -- prompts that begin alike ----------------------------------------------------------


async def test_common_prefixes_count_once(tokenizer):
    gate = Gate()
    async with serving_4k(tokenizer, gate, max_queued_tokens=4000) as server:
        requested = []
        for number in range(12):
            ids = prompt_ids(number)
            requested.append(asyncio.create_task(server.post(prompt=ids, max_tokens=1)))
            await until_added(server, number + 1)  # no request is refused
        # 1,472 of the shared tokens are in complete spans.
        assert await queue_tokens(server) == 1560 + 11 * 88
        gate.open.set()
        assert {(await task).status_code for task in requested} == {200}
        assert await queue_tokens(server) == 0
        gate.open.clear()
        late_request = asyncio.create_task(
            server.post(prompt=prompt_ids(99), max_tokens=1)
        )
        await until_added(server, 13)
        assert await queue_tokens(server) == 88, "the other tokens are cached"
        gate.open.set()
        assert (await late_request).status_code == 200


async def test_without_a_prefix_cache_every_prompt_counts_in_full():
    options = QueueOptions(max_queue_s=10.0, max_queued_tokens=10**6)
    queue = Admission(options)
    for number in range(3):
        queue.enter([make_request(prompt_ids(number))])
    assert queue.num_tokens == 3 * 1560


def make_request(ids: list[int], **fields: Any) -> AddRequest:
    fields = {
        "request_id": "a",
        "max_tokens": 1,
        "sampling": SamplingParams(),
        **fields,
    }
    return AddRequest(token_ids=ids, **fields)


def test_prefix_is_charged_to_another_prompt_after_an_abort():
    queue = Admission(QueueOptions(max_queue_s=10.0, max_queued_tokens=10**6))
    queue.set_cache_capacity(10**5)
    first, second, third = (
        queue.enter([make_request(prompt_ids(number))]) for number in range(3)
    )
    assert queue.num_tokens == 1560 + 2 * 88
    first.drop_all()
    assert queue.num_tokens == 1560 + 88
    second.mark_served("a")
    assert queue.num_tokens == 88
    third.drop_all()
    assert queue.num_tokens == 0


def test_prompts_with_logprobs_count_in_full():
    queue = Admission(QueueOptions(max_queue_s=10.0, max_queued_tokens=10**6))
    queue.set_cache_capacity(10**5)
    for _ in range(2):
        queue.enter([make_request(prompt_ids(1), num_prompt_logprobs=1)])
    assert queue.num_tokens == 2 * 1560


def test_urgent_prompt_does_not_rely_on_the_prefix_of_a_less_urgent_one():
    queue = Admission(QueueOptions(max_queue_s=10.0, max_queued_tokens=10**6))
    queue.set_cache_capacity(10**5)
    queue.enter([make_request(prompt_ids(1))])
    queue.enter([make_request(prompt_ids(2), priority=-1)])
    assert queue._tokens_by_priority == {0: 88, -1: 1560}


def test_rate_counts_only_computed_tokens():
    """The queue counts 88 tokens, but the engine computes 1,560 tokens. The rate must
    follow from the computed tokens."""
    now_s = 0.0
    queue = Admission(
        QueueOptions(max_queue_s=10.0, max_queued_tokens=10**6), lambda: now_s
    )
    queue.set_cache_capacity(10**5)
    for number in range(20):
        queue_entry = queue.enter([make_request(prompt_ids(number))])
        now_s += 1.56
        queue_entry.mark_served("a", 1560)
    queue.enter([make_request([7] * 5000)])
    assert queue.wait_s() == pytest.approx(5.0)


@given(st.data())
def test_each_span_is_charged_once_in_any_order_of_events(data):
    counted = 0

    def on_change(prompt: WaitingPrompt, change: int) -> None:
        nonlocal counted
        counted += change

    prefixes = SharedPrefixes(on_change)
    prefixes.capacity_tokens = data.draw(st.sampled_from([0, 4, 40])) * SPAN_TOKENS
    waiting: dict[WaitingPrompt, int] = {}
    for _ in range(data.draw(st.integers(1, 30))):
        if waiting and data.draw(st.booleans()):
            prompt = data.draw(st.sampled_from(list(waiting)))
            prefixes.remove(prompt, is_computed=data.draw(st.booleans()))
            del waiting[prompt]
        else:
            pieces = data.draw(st.lists(st.integers(0, 1), max_size=4))
            ids = [piece for piece in pieces for _ in range(SPAN_TOKENS)] + [2] * 5
            priority = data.draw(st.integers(-1, 1))
            prompt = WaitingPrompt(priority, len(ids), 0, marks_of(ids))
            prefixes.add(prompt)
            waiting[prompt] = 5
        keys = {mark.key for prompt in waiting for mark in prompt.marks}
        spans = keys - prefixes._computed.keys()
        assert counted == SPAN_TOKENS * len(spans) + sum(waiting.values())
        assert prefixes._num_computed_tokens <= prefixes.capacity_tokens
        assert len(prefixes) == len(keys | prefixes._computed.keys())


def test_prompt_of_any_length_has_few_prefix_marks():
    assert [len(marks_of(range(n))) for n in (63, 64, 4096, 131_072)] == [0, 1, 64, 224]
    assert sum(mark.num_tokens for mark in marks_of(range(1 << 20))) == 1 << 20


def test_prompts_with_different_salts_share_no_prefix_marks():
    keys = [
        {mark.key for mark in marks_of(range(256), salt)} for salt in (b"", b"a", b"b")
    ]
    assert keys[0] == {mark.key for mark in marks_of(range(256))}
    assert not (keys[0] & keys[1] or keys[0] & keys[2] or keys[1] & keys[2])


async def test_prompt_logprobs_do_not_end_the_wait(tokenizer):
    may_end = asyncio.Event()

    async def script(added: AddRequest) -> AsyncIterator[TokenDelta]:
        yield TokenDelta(request_id=added.request_id, prompt_logprobs=[None])
        await may_end.wait()
        yield TokenDelta(
            request_id=added.request_id,
            token_ids=[70],
            prompt_logprobs=[],
            finish_reason="length",
            usage=KVUsage(recomputed=2),
        )

    async with serving(tokenizer, script) as server:
        requested = asyncio.create_task(server.post(prompt_logprobs=1, max_tokens=1))
        await until_added(server, 1)
        await asyncio.sleep(0)
        assert await queue_tokens(server) == 64
        may_end.set()
        await requested
        assert await queue_tokens(server) == 0


# -- requests that are not tokenized yet, or have a disconnected client ----------------


class BlockedTokenizer(Tokenizer):
    """Tokenizes texts of at least 3,000 characters only after a test sets `may_end`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.__dict__ = {**tokenizer.__dict__}
        self.begun = threading.Event()
        self.may_end = threading.Event()
        self.num_begun = 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if len(text) >= 3000:
            self.num_begun += 1
            self.begun.set()
            assert self.may_end.wait(120)
        return super().encode(text, add_special_tokens=add_special_tokens)

    async def until_begun(self) -> None:
        while not self.begun.is_set():
            await asyncio.sleep(0.002)


async def test_request_enters_the_queue_once_tokenized(tokenizer):
    blocked = BlockedTokenizer(tokenizer)
    async with serving_4k(blocked, max_queued_tokens=100) as server:
        too_long = asyncio.create_task(server.post(prompt="x" * 5000))
        await blocked.until_begun()
        assert await queue_tokens(server) == 0
        for _ in range(3):
            assert (await server.post()).status_code == 200
        blocked.may_end.set()
        assert (await too_long).status_code == 400
        assert (await server.post()).status_code == 200


async def send_unread(server: Server, path: str, body: dict[str, Any]) -> socket.socket:
    """Send a request and read nothing; closing the socket disconnects the client."""
    data = json.dumps({"model": "m", **body}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    client = socket.create_connection((server.host, server.port))
    client.setblocking(False)
    await asyncio.get_running_loop().sock_sendall(client, head.encode() + data)
    return client


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"]
)
async def test_client_disconnect_ends_the_work_on_its_request(tokenizer, path):
    text = "x" * 3000
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": [text, text]},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": text}]},
        "/v1/responses": {"input": text},
    }
    blocked = BlockedTokenizer(tokenizer)
    async with serving_4k(blocked, hang) as server:
        client = await send_unread(server, path, bodies[path])
        await blocked.until_begun()
        assert metric(server.metrics, "baton_requests_in_progress") == 1
        client.close()
        await until_in_progress(server, 0)  # although the tokenizing thread still runs
        blocked.may_end.set()
        assert (
            await server.http.post("/tokenize", json={"prompt": text})
        ).status_code == 200
        assert blocked.num_begun == 2, "the second prompt was not tokenized"
        assert not server.engine.added and await queue_tokens(server) == 0


async def test_offered_kv_is_released_when_the_client_disconnects(tokenizer):
    class Hooks(ServerHooks):
        released: ClassVar[list[object]] = []

        def release_messages(self, kv_transfer_params: object) -> list[EngineInput]:
            self.released.append(kv_transfer_params)
            return []

    blocked = BlockedTokenizer(tokenizer)
    async with serving_4k(blocked, hang, Hooks()) as server:
        body = {"prompt": "x" * 3000, "kv_transfer_params": {"remote_engine_id": "p"}}
        client = await send_unread(server, "/v1/completions", body)
        await blocked.until_begun()
        client.close()
        await until_in_progress(server, 0)
        blocked.may_end.set()
        assert Hooks.released == [{"remote_engine_id": "p"}]


async def test_client_disconnect_lets_the_next_long_text_be_tokenized(tokenizer):
    """Very long texts are tokenized one after the other."""
    blocked = BlockedTokenizer(tokenizer)
    ready = replace(READY, max_model_len=1 << 17, num_blocks=1 << 13)
    text = "x" * (1 << 20) + "x"
    async with serving(blocked, hang, ready=ready, max_body=1 << 22) as server:
        first = await send_unread(server, "/tokenize", {"prompt": text})
        await blocked.until_begun()
        second = await send_unread(server, "/v1/completions", {"prompt": text})
        await until_in_progress(server, 1)
        second.close()
        await until_in_progress(server, 0)
        first.close()
        blocked.may_end.set()
        assert (
            await server.http.post("/tokenize", json={"prompt": "x" * 3000})
        ).status_code == 200
        assert not server.engine.added


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": ""}] * 5000},
            "messages",
        ),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "a"}] * 5000},
            "messages",
        ),
        (
            "/v1/chat/completions",
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": ""}] * 5000}
                ]
            },
            "messages",
        ),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": "a"}] * 5000},
            "input",
        ),
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": "a"}],
                "tools": [{"type": "function", "function": {"name": "f"}}] * 5000,
            },
            "tools",
        ),
        ("/v1/completions", {"prompt": "x" * 20_000}, "prompt"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x" * 20_000}]},
            "messages",
        ),
        *(
            (
                "/v1/completions",
                {
                    "prompt": "a",
                    "prediction": {"type": "content", "content": content},
                    "truncate_prompt_tokens": truncation,
                },
                "prediction",
            )
            for truncation in (None, -1)
            for content in ("x" * 20_000, [{"type": "text", "text": ""}] * 5000)
        ),
    ],
)
async def test_prompt_beyond_the_context_is_refused_before_rendering(
    tokenizer, monkeypatch, path, body, field
):
    monkeypatch.setattr(prompt_bounds, "MIN_CHARS_LIMIT", 10_000)
    monkeypatch.setattr(tokenizer, "longest_token_chars", 1)
    monkeypatch.setattr(tokenizer, "render_chat", None)
    async with serving(
        tokenizer, ready=replace(READY, max_model_len=2048), max_body=10**6
    ) as server:
        answer = await server.http.post(path, json={"model": "m", **body})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, field)
        assert error["code"] == "context_length_exceeded"
        assert "5000" in error["message"] or "20000 characters" in error["message"]
        assert not server.engine.added


# -- grammars that wait for their trial ------------------------------------------------


def slow_schema(number: int) -> dict[str, Any]:
    """A schema whose trial compilation takes all of the allowed time."""
    return {"json": {"type": "integer", "multipleOf": 4_999_999 + 2 * number}}


async def test_requests_with_a_grammar_being_compiled_do_not_delay_other_requests(
    tokenizer,
):
    async with serving(tokenizer, hang, max_queued_tokens=200) as server:
        good = {"structured_outputs": {"regex": "[a-z]*"}}
        requested = [asyncio.create_task(server.post(**good)) for _ in range(3)]
        await until_added(server, 3)
        assert await queue_tokens(server) == 0
        answer = await server.post(**good)
        assert (
            answer.status_code == 429 and answer.json()["error"]["phase"] == "grammar"
        )
        requested.append(asyncio.create_task(server.post()))
        await until_added(server, 4)
        assert await queue_tokens(server) == 64
        first, second = (added.request_id for added in server.engine.added[:2])
        server.engine.emit(Outputs([], compiled=[first]))
        assert await queue_tokens(server) == 128
        error = ErrorInfo("grammar_failed", "too complex")
        server.engine.emit(Outputs([TokenDelta(request_id=second, error=error)]))
        for task in requested:
            task.cancel()
        await asyncio.gather(*requested, return_exceptions=True)
        await until_in_progress(server, 0)
        assert await queue_tokens(server) == 0
        last = asyncio.create_task(server.post(**good))
        await until_added(server, 5)
        last.cancel()
        await until_in_progress(server, 0)


async def test_waiting_trials_do_not_delay_requests_without_a_schema(
    tokenizer, monkeypatch
):
    monkeypatch.setattr(grammar_check, "MAX_WAITING_TRIALS", 3)
    monkeypatch.setattr(grammar_check, "_MAX_FIRST_TRIALS", 1)
    options = {"max_queued_tokens": 100, "grammar_timeout_s": 60.0}
    async with serving(tokenizer, **options) as server:
        good = {"structured_outputs": {"regex": "[a-z]*"}}
        assert (await server.post(**good)).status_code == 200
        waiting = [
            asyncio.create_task(server.post(structured_outputs=slow_schema(number)))
            for number in range(4)  # one is tried, three wait
        ]
        await until_in_progress(server, 4)
        answer = await server.post(structured_outputs=slow_schema(9))
        # Wait until one of the four is tried and the other three fill the trial queue.
        while answer.status_code != 429:
            answer = await server.post(structured_outputs=slow_schema(9))
        error = answer.json()["error"]
        assert (error["code"], error["phase"]) == ("rate_limit_exceeded", "grammar")
        assert (
            "trial queue" in error["message"] and answer.headers["retry-after"] == "5"
        )
        assert await queue_tokens(server) == 0
        for _ in range(3):
            assert (await server.post()).status_code == 200
            # This grammar has already passed its trial.
            assert (await server.post(**good)).status_code == 200
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await until_in_progress(server, 0)
