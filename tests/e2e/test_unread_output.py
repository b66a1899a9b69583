"""Programs serve and end although their output goes to a full pipe that nothing
reads.
"""

import sys
from pathlib import Path

import pytest

from tests.rigs.client import MODEL, TIMEOUT_S
from tests.rigs.cluster import Cluster, Server, running, start, wait_until
from tests.rigs.plain_http import http

# This program fills a pipe and then executes its arguments, with the pipe as their
# output. The reading end of the pipe stays open.
_WITH_FULL_PIPE = """
import os, sys
reader, writer = os.pipe()
os.set_blocking(writer, False)
try:
    while True:
        os.write(writer, b"x" * 4096)
except BlockingIOError:
    os.set_blocking(writer, True)
os.set_inheritable(reader, True)
os.dup2(writer, 1)
os.dup2(writer, 2)
os.execv(sys.argv[1], sys.argv[1:])
"""
_UNREAD = (sys.executable, "-c", _WITH_FULL_PIPE)
_ENGINE = (
    "--port",
    "0",
    "--device",
    "cpu",
    "--threads",
    "1",
    "--kv-cache-tokens",
    "8192",
)
_NAMED = ("--served-model-name", MODEL, "--log-level", "debug")


def _assert_completes(server: Server) -> None:
    body = {
        "model": MODEL,
        "prompt": "Once upon a time",
        "max_tokens": 8,
        "ignore_eos": True,
    }
    answer = http.post(f"{server.url}/v1/completions", json=body, timeout=TIMEOUT_S)
    assert answer.status_code == 200
    assert http.get(f"{server.url}/health", timeout=TIMEOUT_S).status_code == 200


@pytest.mark.parametrize("module", ["prefill_server", "decode_server"])
def test_server_with_unread_output_serves_and_ends(tiny_model: Path, module: str):
    argv = ["--model", str(tiny_model), *_ENGINE, *_NAMED]
    server = start(module, *argv, wrapper=_UNREAD)
    with running(server):
        for _ in range(3):
            _assert_completes(server)
        assert server.stop() == 0


def test_proxy_with_unread_output_serves_and_ends(tiny_cluster: Cluster):
    urls = [
        *("--prefill", tiny_cluster.prefill[0].url),
        *("--decode", tiny_cluster.decode[0].url),
    ]
    proxy = start(
        "proxy", "--port", "0", "--log-level", "debug", *urls, wrapper=_UNREAD
    )
    with running(proxy):
        wait_until(
            lambda: http.get(f"{proxy.url}/ready", timeout=10).status_code == 200
        )
        for _ in range(3):
            _assert_completes(proxy)
        assert proxy.stop() == 0
