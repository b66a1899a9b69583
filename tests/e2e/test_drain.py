"""A draining decode server hands its streams over to other servers and ends early."""

import json
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from tests.e2e.fleet import CACHED_TOKENS, VARYING_FIELDS, by_choice
from tests.rigs.client import MODEL, TIMEOUT_S, fresh_prompt
from tests.rigs.cluster import (
    Server,
    assert_idle,
    running,
    start_decode,
    start_prefill,
    start_proxy,
    started,
    wait_until,
)
from tests.rigs.plain_http import http

_NUM_REQUESTS = 24
# The grace period is longer than any answer takes, so a server that ends sooner has
# handed its answers over.
_ARGV = (
    "--shutdown-grace-s",
    "600",
    "--kv-cache-tokens",
    "60000",
    "--kv-verify",
    "all",
)
_RECOMPUTED = 'baton_kv_tokens_total{source="recomputed"}'
_MOVED = 'baton_proxy_resumes_total{outcome="resumed",reason="moved"}'


def _body(index: int, num_tokens: int) -> dict[str, Any]:
    """Return the body of a request. Most requests are streams, and most have one
    choice.
    """
    body: dict[str, Any] = {
        "model": MODEL,
        "prompt": fresh_prompt(40 + index),
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    if index % 2:
        body |= {"temperature": 1.0, "seed": index, "frequency_penalty": 0.4}
    if index % 6:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if index % 8 == 1:
        body["n"] = 2
    return body


class _PendingAnswer:
    """A request in flight, which a thread of the pool reads.

    Attributes:
        has_begun: set when 20 lines of the answer have arrived.
        gap_s: longest time between two lines of the answer.
    """

    def __init__(
        self, pool: ThreadPoolExecutor, url: str, body: dict[str, Any]
    ) -> None:
        self.has_begun = threading.Event()
        self.gap_s = 0.0
        self._text: Future[str] = pool.submit(self._read, url, body)

    def _read(self, url: str, body: dict[str, Any]) -> str:
        lines: list[str] = []
        last_s: float | None = None
        with http.stream(
            "POST", f"{url}/v1/completions", json=body, timeout=10 * TIMEOUT_S
        ) as answer:
            for line in answer.iter_lines():
                lines.append(line)
                now_s = time.monotonic()
                if last_s is not None:
                    self.gap_s = max(self.gap_s, now_s - last_s)
                last_s = now_s
                if len(lines) == 20:
                    self.has_begun.set()
        return CACHED_TOKENS.sub("", VARYING_FIELDS.sub("", "\n".join(lines)))

    def result(self) -> str:
        return by_choice(self._text.result())


def _terminate(server: Server) -> None:
    """Send SIGTERM to all processes of a server, as service managers do: to the engine
    first, to its parent last.
    """
    server.signal_engine(signal.SIGTERM)
    server.child.signal(signal.SIGTERM)


def _drain(server: Server) -> None:
    assert http.post(f"{server.url}/drain").json() == {"draining": True}


def _drain_under_load(
    servers: list[Server],
    proxy: Server,
    bodies: list[dict[str, Any]],
    end: Callable[[Server], None],
) -> dict[str, Any]:
    """End the first decode server with `end` while it answers. Return measurements.

    All answers must be the same as if the server had not ended, and no prompt may be
    recomputed.
    """
    prefill, leaving, *others = servers
    with ThreadPoolExecutor(len(bodies)) as pool:
        send = partial(_PendingAnswer, pool, proxy.url)
        undisturbed = [send(body) for body in bodies]
        expected = [answer.result() for answer in undisturbed]
        recomputed_before = [server.metrics()[_RECOMPUTED] for server in others]
        answers = [send(body) for body in bodies]
        for answer, body in zip(answers, bodies, strict=True):
            assert "stream" not in body or answer.has_begun.wait(TIMEOUT_S)
        num_requests = leaving.metrics()["baton_requests_in_progress"]
        started_s = time.monotonic()
        end(leaving)
        assert leaving.child.exited.wait(TIMEOUT_S)
        figures: dict[str, Any] = {
            "exit_s": round(time.monotonic() - started_s, 2),
            "requests": num_requests,
            "open": sum(not answer._text.done() for answer in answers),
        }
        assert [answer.result() for answer in answers] == expected
    num_moved = proxy.metrics()[_MOVED]
    assert 0 < num_moved <= num_requests
    recomputed = [server.metrics()[_RECOMPUTED] for server in others]
    assert recomputed == recomputed_before, "a part of a prompt was computed again"
    assert_idle(prefill, *others)
    figures["moved"] = num_moved
    figures["gap_s"] = round(max(answer.gap_s for answer in answers), 2)
    return figures


@pytest.mark.slow
@pytest.mark.parametrize("end", [_drain, _terminate])
def test_answers_of_a_draining_server_continue_on_others(tiny_model, end):
    """The draining server has two ranks and speculates. The two servers that take over
    have one rank each, and only the first of them speculates, with another limit."""
    decode = partial(start_decode, tiny_model, *_ARGV)
    leaving = partial(decode, "--tp", "2", "--speculate", "ngram:6")
    speculating = partial(decode, "--speculate", "ngram:2")
    prefill = partial(start_prefill, tiny_model, "--kv-verify", "all")
    with started(prefill, leaving, speculating, decode) as servers:
        proxy = start_proxy(servers[:1], servers[1:], "--disaggregate", "always")
        with running(proxy):
            bodies = [_body(index, 300 + 70 * index) for index in range(_NUM_REQUESTS)]
            figures = _drain_under_load(servers, proxy, bodies, end)
            print(json.dumps({"drain": figures}))
            assert figures["open"] > 0, "the server answered everything before it ended"


@pytest.mark.slow
def test_answers_wait_or_return_if_all_other_servers_are_full(tiny_model):
    small = ["--shutdown-grace-s", "600", "--kv-cache-tokens", "768"]
    decode = partial(start_decode, tiny_model, *small)
    prefill = partial(start_prefill, tiny_model)
    argv = ["--routing", "round_robin", "--disaggregate", "always"]
    with started(prefill, decode, decode) as servers:
        proxy = start_proxy(servers[:1], servers[1:], *argv)
        with running(proxy):
            bodies = [_body(6 * index + 2, 500) for index in range(4)]
            figures = _drain_under_load(servers, proxy, bodies, _drain)
            print(json.dumps({"full": figures}))
            _end_last_server(servers[2], proxy, bodies[0])
            wait_until(servers[0].all_blocks_free)


def _end_last_server(server: Server, proxy: Server, body: dict[str, Any]) -> None:
    """End the only decode server during an answer. The server must finish the answer
    first.
    """
    with ThreadPoolExecutor(1) as pool:
        expected = _PendingAnswer(pool, proxy.url, body).result()
        answer = _PendingAnswer(pool, proxy.url, body)
        assert answer.has_begun.wait(TIMEOUT_S)
        _terminate(server)
        assert answer.result() == expected
    assert server.child.exited.wait(TIMEOUT_S)
