"""The limit on tokens that wait at a server, and refusals with 429 and Retry-After.

The tests check the queue's arithmetic with a simulated clock, and the HTTP application
in front of a scripted engine.
"""

import asyncio
import math
import socket
from collections.abc import AsyncIterator
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from engine.process import client
from protocol.errors import MAX_RETRY_AFTER_S, GrammarQueueFull, QueueFull
from protocol.http.admission import MIN_TOKENS, Admission, QueueEntry
from protocol.messages import AddRequest, Grammar, SamplingParams, TokenDelta
from protocol.settings.server_options import QueueOptions
from tests.rigs.http_server import Server, connected, events, send_request, serving
from tests.rigs.memory_pair import REMOTE
from tests.rigs.metric import metric
from tests.rigs.scripted_engine import count_up, hang


def make_request(
    num_tokens: int, priority: int = 0, request_id: str = "a"
) -> AddRequest:
    return AddRequest(
        request_id=request_id,
        token_ids=[1] * num_tokens,
        sampling=SamplingParams(),
        max_tokens=1,
        priority=priority,
    )


class Queue:
    """A server's queue, and a simulated server that takes `token_s` for each token."""

    def __init__(
        self, token_s: float = 0.0, max_queue_s: float = 10.0, limit: int = 10**6
    ) -> None:
        self.now_s = 100.0
        options = QueueOptions(max_queue_s=max_queue_s, max_queued_tokens=limit)
        self.admission = Admission(options, lambda: self.now_s)
        self.entries: list[tuple[QueueEntry, int]] = []
        if token_s:  # serve one request, so that the queue has measured the rate
            self.send_request()
            self.serve(token_s)

    def send_request(self, num_tokens: int = 1000, priority: int = 0) -> None:
        self.entries.append(
            (self.admission.enter([make_request(num_tokens, priority)]), num_tokens)
        )

    def serve(self, token_s: float = 0.001, count: int = 1) -> None:
        for _ in range(count):
            queue_entry, num_tokens = self.entries.pop(0)
            self.now_s += num_tokens * token_s
            queue_entry.mark_served("a", num_tokens)

    def fill(self) -> tuple[int, QueueFull]:
        """Send requests until one is refused. Return the number of accepted requests,
        and the error."""
        for count in range(10_000):
            try:
                self.send_request()
            except QueueFull as error:
                return count, error
        raise AssertionError("the queue has no limit")


def test_queue_holds_what_is_served_in_time_and_refusals_say_when_to_retry():
    queue = Queue(token_s=0.001)
    taken, error = queue.fill()
    assert taken == 11  # the last request waits for 10 s of earlier requests
    assert error.headers == {"retry-after": "6"}
    queue.serve(count=6)
    assert queue.fill()[0] == 6
    while queue.entries:
        queue.serve()
    assert queue.admission.num_tokens == 0 and queue.fill()[0] == 11


def test_prompts_computed_elsewhere_do_not_change_the_rate():
    queue = Queue(token_s=0.001)
    for _ in range(20):  # each long prompt takes the prefill server two seconds
        pulled = replace(make_request(8000), remote=replace(REMOTE, transfer_id="t"))
        queue.entries.append((queue.admission.enter([pulled]), 8000))
        queue.now_s += 2.0
        if len(queue.entries) > 1:  # the next prompt is already waiting
            queue.entries.pop(0)[0].mark_served("a")
    queue.entries.pop()[0].drop_all()
    assert queue.fill()[0] == 11


def test_rate_follows_a_change_of_speed_within_a_second():
    queue = Queue(token_s=0.0002)
    assert queue.fill()[0] in (50, 51)
    queue.serve(token_s=0.002, count=3)
    # 47 or 48 prompts now take 2 s each.
    assert 0.75 * 96 <= queue.admission.wait_s() <= 96
    queue.now_s += 1000.0
    assert queue.admission.wait_s() > 10_000.0  # the server is stalled
    while queue.entries:
        queue.serve(token_s=0.0002)
    queue.send_request()
    queue.serve(token_s=0.0002)
    assert queue.fill()[0] in (50, 51)


def test_empty_queue_accepts_any_prompt_but_then_no_tokens_beyond_its_limit():
    queue = Queue(limit=5000)
    queue.send_request(50_000)
    with pytest.raises(QueueFull, match=r"50000 tokens .* this request has 64 more"):
        queue.send_request(64)
    queue.entries.pop()[0].drop_all()
    queue_entry = queue.admission.enter([make_request(4000)])
    with pytest.raises(QueueFull):
        queue.admission.enter([make_request(600), make_request(500, request_id="b")])
    assert queue.admission.num_tokens == 4000
    queue_entry.drop_all()
    queue_entry.drop_all()
    assert queue.admission.num_tokens == 0


def test_only_requests_with_a_grammar_are_refused_because_of_waiting_grammars():
    """An empty queue accepts a prompt that exceeds the limit alone."""
    queue = Queue(limit=5000)
    sampling = SamplingParams(grammar=Grammar("regex", "a"))
    long_request = replace(make_request(50_000), sampling=sampling)
    waiting = queue.admission.enter([long_request])
    with pytest.raises(GrammarQueueFull):
        queue.admission.enter([replace(make_request(64), sampling=sampling)])
    queue.send_request(64)
    waiting.drop_all()
    queue.admission.enter([replace(make_request(64), sampling=sampling)])


def test_urgent_requests_wait_only_for_urgent_requests():
    queue = Queue(token_s=0.001)
    queue.fill()
    for _ in range(11):
        queue.send_request(priority=-1)
    for priority in (-1, 0, 7):
        with pytest.raises(QueueFull):
            queue.send_request(priority=priority)
    queue.send_request(priority=-2)


@given(
    st.lists(
        st.tuples(st.integers(0, 5000), st.integers(-1, 1), st.integers(0, 3)),
        max_size=40,
    )
)
def test_accounting_adds_up_in_any_order_of_events(actions):
    """Actions 0 and 1: a request arrives; 2: the oldest request is served; 3: the
    newest request is dropped."""
    queue = Queue(max_queue_s=3.0, limit=20_000)
    queued_tokens: dict[QueueEntry, int] = {}
    for num_tokens, priority, action in actions:
        queue.now_s += num_tokens / 5000
        if action < 2:
            try:
                queue_entry = queue.admission.enter(
                    [make_request(num_tokens, priority)]
                )
                queued_tokens[queue_entry] = max(num_tokens, MIN_TOKENS)
            except QueueFull as error:
                assert (
                    queued_tokens
                    and 1 <= int(error.headers["retry-after"]) <= MAX_RETRY_AFTER_S
                )
        elif queued_tokens and action == 2:
            oldest = next(iter(queued_tokens))
            oldest.mark_served("a", num_tokens)
            del queued_tokens[oldest]
        elif queued_tokens:
            queued_tokens.popitem()[0].drop_all()
        assert queue.admission.num_tokens == sum(queued_tokens.values())
        assert 0 <= queue.admission.wait_s(0) <= queue.admission.wait_s() < math.inf


# -- over HTTP -------------------------------------------------------------------------


class Gate:
    """A script of an engine. It answers no request before the test sets `open`."""

    def __init__(self) -> None:
        self.open = asyncio.Event()

    async def __call__(self, request: AddRequest) -> AsyncIterator[TokenDelta]:
        await self.open.wait()
        async for delta in count_up(request):
            yield delta


async def until_added(server: Server, count: int) -> None:
    while len(server.engine.added) < count:
        await asyncio.sleep(0.002)


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"]
)
async def test_full_queue_refuses_with_429_before_the_engine_is_involved(
    tokenizer, path
):
    gate = Gate()
    fields = {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {}
    fields |= {"input": "Hi", "prompt": None} if "responses" in path else {}
    async with serving(tokenizer, gate, max_queued_tokens=100) as server:
        first = asyncio.create_task(server.post(path, **fields))
        await until_added(server, 1)
        refused = await server.post(path, **fields, stream=True)
        error = refused.json()["error"]
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        error_fields = (
            error["code"],
            error["type"],
            error["phase"],
            error["retryable"],
        )
        assert error_fields == (
            "rate_limit_exceeded",
            "rate_limit_error",
            "admission",
            True,
        )
        assert len(server.engine.added) == 1
        await server.http.get("/metrics")  # updates the gauge
        assert metric(server.metrics, "baton_queue_tokens") == 64
        gate.open.set()
        assert (await first).status_code == 200
        assert (await server.post(path, **fields)).status_code == 200
        endpoint = path.split("/")[2]
        count = metric(
            server.metrics, "baton_requests", endpoint=endpoint, outcome="rejected"
        )
        assert count == 1
        await server.http.get("/metrics")
        assert metric(server.metrics, "baton_queue_tokens") == 0


@pytest.mark.parametrize("fields", [{"prompt": [300]}, {"prompt": "x" * 99}, {"n": 0}])
async def test_refused_request_leaves_the_queue(tokenizer, fields):
    async with serving(tokenizer, max_queued_tokens=100) as server:
        for _ in range(3):
            assert (await server.post(**fields)).status_code == 400
        assert (await server.post()).status_code == 200


async def test_texts_that_wait_to_be_tokenized_are_bounded(tokenizer, monkeypatch):
    monkeypatch.setattr("engine.http.text_workers.MAX_WAITING_CHARS", 12_000)
    async with serving(tokenizer) as server:
        send_request = partial(server.post, "/tokenize", prompt="x" * 8_000)
        answers = await asyncio.gather(*[send_request() for _ in range(9)])
        statuses = {answer.status_code for answer in answers}
        assert statuses <= {200, 429} and 200 in statuses
        assert (await send_request()).status_code == 200


# -- deadlines -------------------------------------------------------------------------

SHORT_TIMEOUT = {"x-request-timeout-s": "0.02"}


@pytest.mark.parametrize(
    "timeout", ["0", "-1", "soon", "", "inf", "1e3", "2000000", "1, 2"]
)
async def test_malformed_timeout_is_refused(tokenizer, timeout):
    async with serving(tokenizer) as server:
        for path in ("/v1/completions", "/tokenize"):
            answer = await server.post(path, headers={"x-request-timeout-s": timeout})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, "x-request-timeout-s")
            assert "send one number of seconds" in error["message"]


@pytest.mark.parametrize("is_default", [False, True])
async def test_expired_request_ends_with_504_and_is_aborted_in_the_engine(
    tokenizer, is_default
):
    options = {"request_timeout_s": 0.02} if is_default else {}
    headers = None if is_default else SHORT_TIMEOUT
    async with serving(tokenizer, hang, **options) as server:
        answer = await server.post(prompt=["a", "b"], headers=headers, stream=True)
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "deadline_exceeded"
        assert sorted(server.engine.aborted) == sorted(
            request.request_id for request in server.engine.added
        )
        assert not server.engine._subscriptions


async def test_request_answered_in_time_does_not_expire(tokenizer):
    async with serving(tokenizer, request_timeout_s=0.001) as server:
        longer = {"x-request-timeout-s": "3000.5"}
        answer = await server.post(headers=longer, stream=True)
        assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n")
        assert not server.engine.aborted


async def test_expired_stream_ends_in_an_error_event(tokenizer):
    async def script(request: AddRequest) -> AsyncIterator[TokenDelta]:
        yield TokenDelta(request_id=request.request_id, token_ids=[70])
        await asyncio.Event().wait()

    async with serving(tokenizer, script) as server:
        actual = events(
            await server.post(headers={"x-request-timeout-s": "0.3"}, stream=True)
        )
        assert [name for name, _ in actual] == ["message", "error"]
        assert actual[-1][1]["error"]["code"] == "deadline_exceeded"
        assert not server.engine._subscriptions and len(server.engine.aborted) == 1
        assert metric(server.metrics, "baton_requests_in_progress") == 0


async def test_priorities_reach_the_engine(tokenizer):
    async with serving(tokenizer) as server:
        for fields in ({}, {"priority": -3}, {"priority": 2**31 - 1}):
            assert (await server.post(**fields)).status_code == 200
        await server.post("/v1/responses", prompt=None, input="Hi", priority=4)
        assert [add.priority for add in server.engine.added] == [0, -3, 2**31 - 1, 4]
        for wrong in (2**31, 0.5, "1", True):
            answer = await server.post(priority=wrong)
            assert (answer.status_code, answer.json()["error"]["param"]) == (
                400,
                "priority",
            )


# -- clients that do not read ----------------------------------------------------------


@pytest.mark.parametrize(("choices", "n"), [(32, 1), (1, 8)])
async def test_unread_stream_is_aborted_in_the_engine(
    tokenizer, monkeypatch, choices, n
):
    monkeypatch.setattr(client, "MAX_UNREAD", limit := 1 << 10)
    monkeypatch.setattr(client, "MAX_UNREAD_CHOICES", choices)
    num_sent = 0

    async def script(request: AddRequest) -> AsyncIterator[TokenDelta]:
        nonlocal num_sent
        while True:
            num_sent += 1
            yield TokenDelta(request_id=request.request_id, token_ids=[70] * 8)
            await asyncio.sleep(0)

    async with serving(tokenizer, script) as server:
        sock = await connected(server)
        loop = asyncio.get_running_loop()
        await send_request(sock, stream=True, max_tokens=60, n=n)
        while not server.engine.aborted:
            await asyncio.sleep(0.002)
        assert not server.engine._subscriptions
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        received = b""
        while b"client_too_slow" not in received:  # the client reads again
            received = received[-100:] + await loop.sock_recv(sock, 1 << 20)
        assert num_sent > limit
        sock.close()
