"""Once GET /ready of the proxy has returned 200, requests are disaggregated.

The tests use real processes. The prefill server is ready later than the others.
"""

import itertools
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests import stopping
from tests.rigs.cluster import (
    Server,
    prefill_ports,
    running,
    start,
    start_decode,
    start_prefill,
    started,
    wait_until,
)
from tests.rigs.plain_http import http

TIMEOUT_S = 60
NO_PREFILL = ["no prefill server is ready"]
_prompts = itertools.count()


def start_bare_proxy(prefill_url: str, decode: Server) -> Server:
    """Start a proxy. Do not wait until it has found its servers."""
    servers = ["--prefill", prefill_url, "--decode", decode.url]
    return start("proxy", "--port", "0", "--health-interval-s", "0.2", *servers)


def probe(proxy: Server) -> httpx.Response:
    return http.get(f"{proxy.url}/ready", timeout=TIMEOUT_S)


def wait_for_decode_server(proxy: Server) -> None:
    """Wait until the proxy has found the decode server. GET /ready must not return 200
    yet.
    """
    wait_until(lambda: probe(proxy).json()["servers"]["decode-0"], TIMEOUT_S)
    response = probe(proxy)
    assert response.status_code == 503
    assert response.json()["missing"] == NO_PREFILL


def assert_first_answer_is_disaggregated(proxy: Server) -> None:
    wait_until(lambda: probe(proxy).status_code == 200, TIMEOUT_S)
    prompt = [3 + next(_prompts), *range(5, 40)]  # no part of the prompt is cached
    body = {"model": "test-model", "prompt": prompt, "max_tokens": 2}
    response = http.post(f"{proxy.url}/v1/completions", json=body, timeout=TIMEOUT_S)
    assert response.status_code == 200, response.text
    expected = f"transferred={len(prompt)}, recomputed=0, skipped=0"
    assert response.headers["x-baton-kv"] == expected


@pytest.fixture(scope="module")
def decode(tiny_model: Path) -> Iterator[Server]:
    with started(partial(start_decode, tiny_model)) as (server,):
        yield server


def test_first_request_after_ready_is_always_disaggregated(tiny_model, decode):
    """P's HTTP process is suspended while the proxy starts, to imitate a slow
    server.
    """
    with started(partial(start_prefill, tiny_model)) as (prefill,):
        for _ in range(6):
            stopping.send(prefill.child.pid, signal.SIGSTOP)
            try:
                proxy = start_bare_proxy(prefill.url, decode)
                with running(proxy):
                    wait_for_decode_server(proxy)
                    stopping.send(prefill.child.pid, signal.SIGCONT)
                    assert_first_answer_is_disaggregated(proxy)
            finally:
                stopping.send(prefill.child.pid, signal.SIGCONT)


def test_proxy_waits_for_a_prefill_server_that_starts_later(tiny_model, decode, ports):
    proxy = start_bare_proxy(f"http://127.0.0.1:{ports[0]}", decode)
    with running(proxy):
        wait_for_decode_server(proxy)
        prefill = start_prefill(tiny_model, *prefill_ports(*ports))
        with running(prefill):
            assert_first_answer_is_disaggregated(proxy)
            prefill.kill()
            wait_until(
                lambda: not probe(proxy).json()["servers"]["prefill-0"], TIMEOUT_S
            )
            assert probe(proxy).status_code == 200, (
                "not ready with a decode server alone"
            )
