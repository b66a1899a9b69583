"""Requests of one client do not block those of other clients.

The servers and their proxy refuse a request that would wait in a queue for more than a
second.
"""

import itertools
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tests.rigs.client import fresh_prompt, greedy, make_prompt
from tests.rigs.cluster import (
    Cluster,
    Server,
    assert_idle,
    running,
    start_decode,
    start_prefill,
    start_proxy,
    started,
)
from tests.rigs.plain_http import http

_SHORT_QUEUE = ("--max-queue-s", "1")


@pytest.fixture(scope="module")
def short_queue_cluster(tiny_model: Path) -> Iterator[Cluster]:
    prefill_start = partial(start_prefill, tiny_model, *_SHORT_QUEUE)
    decode_start = partial(start_decode, tiny_model, *_SHORT_QUEUE)
    with started(prefill_start, decode_start) as (prefill, decode):
        proxy = start_proxy([prefill], [decode], *_SHORT_QUEUE)
        with running(proxy):
            yield Cluster([prefill], [decode], proxy, tiny_model)


def send(url: str, prompt: list[int], **members: object) -> int:
    """Send a request and return its status."""
    body = greedy(prompt, 2, **members)
    status: int = http.post(f"{url}/v1/completions", json=body, timeout=120).status_code
    return status


def send_ordinary_requests(cluster: Cluster) -> list[int]:
    """Send 15 short requests one after the other. Return their statuses."""
    return [send(cluster.url, fresh_prompt(40)) for _ in range(15)]


@pytest.mark.parametrize("num_bytes", [300_000, 9_000_000])
def test_too_long_prompts_block_no_other_client(short_queue_cluster, num_bytes):
    # From these requests, the servers measure their speed.
    assert send_ordinary_requests(short_queue_cluster) == [200] * 15
    messages = [{"role": "user", "content": "word " * (num_bytes // 5)}]
    body = {"model": "test-model", "messages": messages}
    refused: list[int] = []
    is_over = threading.Event()

    def send_hostile_requests() -> None:
        while not is_over.is_set():
            answer = http.post(
                f"{short_queue_cluster.url}/v1/chat/completions", json=body, timeout=120
            )
            refused.append(answer.status_code)

    thread = threading.Thread(target=send_hostile_requests)
    thread.start()
    try:
        assert send_ordinary_requests(short_queue_cluster) == [200] * 15
    finally:
        is_over.set()
        thread.join()
    assert set(refused) == {400}
    assert_idle(*short_queue_cluster.servers()[1:])


def test_chats_of_closed_connections_block_no_other_client(short_queue_cluster):
    messages = [{"role": "user", "content": "Hi"}] * 200_000
    body = json.dumps({"model": "test-model", "messages": messages}).encode()
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
        % len(body)
    )
    for server in (short_queue_cluster.proxy, *short_queue_cluster.decode):
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", server.port)) as client:
                client.sendall(head + body)
    assert send_ordinary_requests(short_queue_cluster) == [200] * 15
    assert_idle(*short_queue_cluster.servers()[1:])


def test_new_schemas_block_no_request_without_a_schema(short_queue_cluster):
    """Clients send new schemas all the time. Each schema takes long to compile."""
    assert send_ordinary_requests(short_queue_cluster) == [200] * 15
    statuses: list[int] = []
    numbers = itertools.count(1_000_000)
    is_over = threading.Event()

    def send_hostile_requests() -> None:
        while not is_over.is_set():
            schema = {"type": "integer", "multipleOf": 2 * next(numbers) + 1}
            guided = {"structured_outputs": {"json": schema}}
            statuses.append(send(short_queue_cluster.url, fresh_prompt(40), **guided))

    threads = [threading.Thread(target=send_hostile_requests) for _ in range(48)]
    for thread in threads:
        thread.start()
    try:
        assert send_ordinary_requests(short_queue_cluster) == [200] * 15
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert set(statuses) <= {200, 400, 429}
    assert_idle(*short_queue_cluster.servers()[1:])


@pytest.fixture(scope="module")
def small_queue(tiny_model: Path) -> Iterator[Server]:
    server = start_decode(
        tiny_model, "--max-queued-tokens", "4000", "--max-num-seqs", "1"
    )
    with running(server):
        yield server


def test_prompts_with_a_shared_prefix_are_all_accepted(small_queue):
    """12 concurrent prompts share 1,500 of 1,560 tokens.

    They have 18,720 tokens, but only 2,528 need to be computed. The queue accepts
    4,000.
    """
    shared = make_prompt(3, 1500)
    prompts = [shared + fresh_prompt(60) for _ in range(12)]
    before = small_queue.metrics()["baton_engine_step_prompt_tokens_total"]
    with ThreadPoolExecutor(12) as threads:
        statuses = list(threads.map(partial(send, small_queue.url), prompts))
    assert statuses == [200] * 12
    computed = small_queue.metrics()["baton_engine_step_prompt_tokens_total"] - before
    assert computed < 4000
    assert small_queue.metrics()["baton_queue_tokens"] == 0
    assert_idle(small_queue)
