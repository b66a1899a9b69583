"""A decode server that is to end hands its answers over, and ends long before they do."""

import json
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from tests.e2e.test_failover import _CACHED, _OWN, _by_choice
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

_NUM = 24
# Longer than any answer takes: whoever ends sooner has handed its answers over.
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


def _body(at: int, num_tokens: int) -> dict[str, Any]:
    """Streams, most of them of one choice, and answers that are none."""
    how: dict[str, Any] = {"temperature": 0}
    if at % 2:
        how = {"temperature": 1.0, "seed": at, "frequency_penalty": 0.4}
    if at % 6:
        how |= {"stream": True, "stream_options": {"include_usage": True}}
    how |= {"n": 2} if at % 8 == 1 else {}
    body = {
        "model": MODEL,
        "prompt": fresh_prompt(40 + at),
        "max_tokens": num_tokens,
        **how,
    }
    return body | {"ignore_eos": True, "return_token_ids": True}


class _Asked:
    """An answer on its way, and the times between its bytes."""

    def __init__(
        self, pool: ThreadPoolExecutor, url: str, body: dict[str, Any]
    ) -> None:
        self.has_begun, self.gap_s = threading.Event(), 0.0
        self._asked: Future[str] = pool.submit(self._read, url, body)

    def _read(self, url: str, body: dict[str, Any]) -> str:
        text, last_s = list[str](), None
        with http.stream(
            "POST", f"{url}/v1/completions", json=body, timeout=10 * TIMEOUT_S
        ) as answer:
            for line in answer.iter_lines():
                text.append(line)
                now_s = time.monotonic()
                self.gap_s = max(self.gap_s, now_s - (last_s or now_s))
                last_s = now_s
                if len(text) == 20:
                    self.has_begun.set()
        return _CACHED.sub("", _OWN.sub("", "\n".join(text)))

    def result(self) -> str:
        return _by_choice(self._asked.result())


def _ends(server: Server) -> None:
    server.signal_engine(signal.SIGTERM)  # as service managers do, and its parent last
    server.child.signal(signal.SIGTERM)


def _drains(server: Server) -> None:
    assert http.post(f"{server.url}/drain").json() == {"draining": True}


def _drain_under_load(
    servers: list[Server],
    proxy: Server,
    bodies: list[dict[str, Any]],
    end: Callable[[Server], None],
) -> dict[str, Any]:
    """Has the first decode server end while it answers; the figures that were measured."""
    prefill, leaving, *others = servers
    with ThreadPoolExecutor(len(bodies)) as pool:
        ask = partial(_Asked, pool, proxy.url)
        expected = [one.result() for one in [ask(body) for body in bodies]]
        before = [server.metrics()[_RECOMPUTED] for server in others]
        asked = [ask(body) for body in bodies]
        for one, body in zip(asked, bodies, strict=True):
            assert "stream" not in body or one.has_begun.wait(TIMEOUT_S)
        num = leaving.metrics()["baton_requests_in_progress"]
        begun_s = time.monotonic()
        end(leaving)
        assert leaving.child.exited.wait(TIMEOUT_S)
        seen: dict[str, Any] = {
            "exit_s": round(time.monotonic() - begun_s, 2),
            "requests": num,
        }
        seen["open"] = sum(not one._asked.done() for one in asked)
        assert [one.result() for one in asked] == expected
    moved = proxy.metrics()[_MOVED]
    assert 0 < moved <= num
    for server, so_far in zip(others, before, strict=True):
        assert server.metrics()[_RECOMPUTED] == so_far, (
            "nothing of a prompt was computed again"
        )
    assert_idle(prefill, *others)
    return seen | {"moved": moved, "gap_s": round(max(one.gap_s for one in asked), 2)}


@pytest.mark.slow
@pytest.mark.parametrize("end", [_drains, _ends])
def test_answers_of_a_server_that_drains_go_on_elsewhere(tiny_model, end):
    """From ranks that share the work to one that does not, among others."""
    decode = partial(start_decode, tiny_model, *_ARGV)
    leaving = partial(decode, "--tp", "2")
    prefill = partial(start_prefill, tiny_model, "--kv-verify", "all")
    with started(prefill, leaving, decode, decode) as servers:
        proxy = start_proxy(servers[:1], servers[1:], "--disaggregate", "always")
        with running(proxy):
            bodies = [_body(at, 300 + 70 * at) for at in range(_NUM)]
            seen = _drain_under_load(servers, proxy, bodies, end)
            print(json.dumps({"drain": seen}))
            assert seen["open"] > 0, "it ended before what it had to answer"


@pytest.mark.slow
def test_where_all_others_are_full_answers_wait_for_room_or_come_back(tiny_model):
    small = ("--shutdown-grace-s", "600", "--kv-cache-tokens", "768")
    decode = partial(start_decode, tiny_model, *small)
    argv = ("--routing", "round_robin", "--disaggregate", "always")
    with started(partial(start_prefill, tiny_model), decode, decode) as servers:
        with running(proxy := start_proxy(servers[:1], servers[1:], *argv)):
            bodies = [_body(6 * at + 2, 500) for at in range(4)]
            seen = _drain_under_load(servers, proxy, bodies, _drains)
            print(json.dumps({"full": seen}))
            staying = servers[2]
            with ThreadPoolExecutor(
                1
            ) as pool:  # there is no other one at all: they end here
                alone = _Asked(pool, proxy.url, bodies[0])
                expected = alone.result()
                again = _Asked(pool, proxy.url, bodies[0])
                assert again.has_begun.wait(TIMEOUT_S)
                _ends(staying)
                assert again.result() == expected
            assert staying.child.exited.wait(TIMEOUT_S)
            wait_until(servers[0].all_blocks_free)
