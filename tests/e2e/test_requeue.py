"""A decode server that ends hands its queue on: what was prefilled once is pulled by another one,
and no lease is left to expire."""

import itertools
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.reference import Reference
from tests.e2e.test_equality import make_prompt
from tests.e2e.test_faults_by_phase import Stream, _asked
from tests.rigs.client import MODEL, parse_kv
from tests.rigs.cluster import (
    Cluster,
    Server,
    running,
    start_decode,
    start_proxy,
    started,
    wait_until,
)
from tests.rigs.plain_http import http

_seeds = itertools.count(110_000)
_DECODE = ("--max-num-seqs", "2", "--shutdown-grace-s", "1")


def _leases(server: Server) -> tuple[float, ...]:
    """How many were granted, completed, aborted, and expired."""
    events = ("granted", "completed", "aborted", "expired")
    metrics = server.metrics()
    return tuple(metrics[f'baton_leases_total{{event="{event}"}}'] for event in events)


def _waits(server: Server, num: int) -> None:
    wait_until(lambda: server.metrics()["baton_requests_waiting"] == num)


class _Whole(threading.Thread):
    """A completion of two choices, not streamed."""

    def __init__(self, url: str, prompt: list[int], max_tokens: int) -> None:
        super().__init__(daemon=True)
        self._url = f"{url}/v1/completions"
        asked: dict[str, Any] = {"model": MODEL, "prompt": prompt, "n": 2, "max_tokens": max_tokens}
        self._body = {**asked, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        self.answer: httpx.Response | None = None
        self.start()

    def run(self) -> None:
        self.answer = http.post(self._url, json=self._body, timeout=60)


def test_a_queue_moves_on_with_its_leases(
    tiny_cluster: Cluster, tiny_model: Path, tiny_reference: Reference
) -> None:
    prefiller = tiny_cluster.prefill[0]
    wait_until(prefiller.all_blocks_home)
    before = _leases(prefiller)
    fills = {"prompt": make_prompt(next(_seeds), 30), "n": 2, "max_tokens": 3900, "stream": True}
    streamed, whole, left = (make_prompt(next(_seeds), 150) for _ in range(3))

    def leases() -> list[float]:
        return [now - then for now, then in zip(_leases(prefiller), before, strict=True)]

    start = partial(start_decode, tiny_model, *_DECODE)
    with started(start, start) as decode, running(proxy := start_proxy([prefiller], decode)):
        ending, other = decode
        with _asked(ending, fills), _asked(other, fills):  # both run all that they may
            for server in decode:
                wait_until(lambda at=server: at.metrics()["baton_requests_running"] == 2)
            # Round robin: the first of each two asks the server that will end.
            with _asked(proxy, {"prompt": left, "n": 2, "max_tokens": 5}):
                _waits(ending, 1)
                stream = Stream(proxy.url, streamed, 6)
                _waits(other, 1)
                answer = _Whole(proxy.url, whole, 6)
                _waits(ending, 2)
                ending.child.signal(signal.SIGTERM)
                _waits(other, 3)
                assert leases() == [3, 0, 0, 0]
            _waits(other, 2)
            wait_until(lambda: leases() == [3, 0, 1, 0])
        stream.join(60)
        answer.join(60)
        assert stream.events[-1] == "[DONE]" and answer.answer is not None
        assert stream.token_ids() == tiny_reference.generate(streamed, 6)
        choices = answer.answer.json()["choices"]
        assert [c["token_ids"] for c in choices] == [tiny_reference.generate(whole, 6)] * 2
        assert parse_kv(answer.answer.headers["x-baton-kv"])["transferred"] == 150
        wait_until(lambda: prefiller.all_blocks_home() and other.all_blocks_home())
        assert leases() == [3, 2, 1, 0]
        assert proxy.metrics()['baton_proxy_retries_total{leg="decode"}'] == 2
        assert proxy.metrics()['baton_proxy_retries_total{leg="prefill"}'] == 0
