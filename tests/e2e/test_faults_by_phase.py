"""Servers that are killed or stopped, and clients that leave, in every phase of a request.

After each, every block comes home, the client has had one end, and the next answer is right.
"""

import contextlib
import itertools
import json
import signal
import socket
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import stopping
from tests.e2e.reference import Reference
from tests.e2e.test_equality import make_prompt
from tests.rigs.client import MODEL, complete, complete_all, prefill
from tests.rigs.cluster import (
    Cluster,
    Server,
    cluster,
    prefill_ports,
    running,
    start_decode,
    start_prefill,
    start_proxy,
    started,
    wait_until,
)
from tests.rigs.plain_http import http

_seeds = itertools.count(70_000)
_LEASE_S = 120  # whatever comes home sooner was given back, and did not expire
_SLOW_PREFILL = ("--max-num-batched-tokens", "1")  # a step per token: seconds for a long prompt


def _prompt(length: int = 150) -> list[int]:
    """A prompt that no server has seen."""
    return make_prompt(next(_seeds), length)


@pytest.fixture
def make_cluster(tiny_model: Path) -> Iterator[Any]:
    """Makes clusters to break: `make_cluster(prefill_argv, decode_argv)`."""
    with contextlib.ExitStack() as stack:

        def make(prefill_argv: Any = (), decode_argv: Any = (), *, num_decode: int = 1) -> Cluster:
            p = partial(start_prefill, tiny_model, "--lease-s", str(_LEASE_S), *prefill_argv)
            d = partial(start_decode, tiny_model, *decode_argv)
            prefiller, *decode = stack.enter_context(started(p, *[d] * num_decode))
            proxy = start_proxy([prefiller], decode)
            stack.enter_context(running(proxy))
            return Cluster([prefiller], decode, proxy, tiny_model)

        yield make


@pytest.fixture(scope="module")
def slow_cluster(tiny_model: Path) -> Iterator[Cluster]:
    """A cluster whose prefills take long, which is whole after each test."""
    with cluster(tiny_model, prefill_argv=("--lease-s", str(_LEASE_S), *_SLOW_PREFILL)) as made:
        yield made


class Stream(threading.Thread):
    """A streamed completion that is read in a thread; `events` are its data lines."""

    def __init__(self, url: str, prompt: list[int], max_tokens: int, **members: Any) -> None:
        super().__init__(daemon=True)
        self.events: list[str] = []
        self.error: Exception | None = None
        self._body = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            **members,
        }
        self._url = url
        self.start()

    def run(self) -> None:
        try:
            url = f"{self._url}/v1/completions"
            with http.stream("POST", url, json=self._body, timeout=60) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: "):
                        self.events.append(line.removeprefix("data: "))
        except httpx.HTTPError as error:
            self.error = error

    def begun(self, num_events: int = 3) -> "Stream":
        wait_until(lambda: len(self.events) >= num_events)
        return self

    def token_ids(self) -> list[int]:
        chunks = [json.loads(event) for event in self.events if event != "[DONE]"]
        return [t for c in chunks if c.get("choices") for t in c["choices"][0]["token_ids"] or []]


@contextlib.contextmanager
def _asked(server: Server, body: dict[str, Any]) -> Iterator[socket.socket]:
    """A request whose client leaves without a word at the end of the block."""
    data = json.dumps({"model": MODEL, "temperature": 0, "ignore_eos": True, **body}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(head.encode() + data)
        yield connection


def _stop(server: Server, number: int) -> None:
    """To the whole server: its HTTP process and its engine's."""
    for pid in (*server.engine_pids(), server.child.pid):
        stopping.send(pid, number)


def _is_busy(server: Server) -> bool:
    return server.metrics()["baton_requests_running"] > 0


def _assert_home(*servers: Server) -> None:
    for server in servers:
        wait_until(server.all_blocks_home, 20)
        metrics = server.metrics()
        for name in ("running", "waiting", "receiving"):
            assert metrics[f"baton_requests_{name}"] == 0


def _assert_serves(cluster: Cluster, reference: Reference, transferred: bool = True) -> None:
    prompt = _prompt(90)
    answer = complete(cluster.url, prompt, 5)
    assert answer.token_ids == reference.generate(prompt, 5)
    assert answer.kv["transferred"] == (90 if transferred else 0)


def test_a_decode_server_killed_in_mid_stream_ends_the_stream_with_an_error(
    make_cluster: Any, tiny_model: Path, tiny_reference: Reference, ports: list[int]
) -> None:
    decode_port = ("--port", str(ports[0]))
    cluster = make_cluster((), decode_port)
    stream = Stream(cluster.url, _prompt(), 1500).begun()
    decode = cluster.decode[0]
    decode.kill()
    stream.join(30)
    assert stream.error is None and "[DONE]" not in stream.events
    assert json.loads(stream.events[-1])["error"]["code"] == "decode_server_lost"
    _assert_home(cluster.prefill[0])
    with running(start_decode(tiny_model, *decode_port)):
        ready = 'baton_proxy_upstream_ready{role="decode",server="decode-0"}'
        wait_until(lambda: cluster.proxy.metrics()[ready] == 1)
        _assert_serves(cluster, tiny_reference)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_killed_proxy_leaves_nothing_behind(
    make_cluster: Any, tiny_reference: Reference, phase: str
) -> None:
    cluster = make_cluster(_SLOW_PREFILL)
    prefiller, decode = cluster.prefill[0], cluster.decode[0]
    if phase == "prefill":
        Stream(cluster.url, _prompt(1500), 5)
        wait_until(lambda: _is_busy(prefiller))
    else:
        Stream(cluster.url, _prompt(50), 1900).begun()
    cluster.proxy.kill()
    _assert_home(prefiller, decode)
    with running(proxy := start_proxy([prefiller], [decode])):
        _assert_serves(Cluster([prefiller], [decode], proxy, cluster.model), tiny_reference)


def test_a_client_that_leaves_during_the_prefill_ends_it(
    slow_cluster: Cluster, tiny_reference: Reference
) -> None:
    prefiller, decode = slow_cluster.prefill[0], slow_cluster.decode[0]
    steps = "baton_engine_steps_total"
    for prompt in (_prompt(4000), [_prompt(30), _prompt(4000)]):
        before = prefiller.metrics()[steps]
        with _asked(slow_cluster.proxy, {"prompt": prompt, "max_tokens": 5}):
            wait_until(lambda before=before: prefiller.metrics()[steps] > before + 20)
        _assert_home(prefiller, decode)
        assert prefiller.metrics()[steps] < before + 3900, "its work was cancelled"
    _assert_serves(slow_cluster, tiny_reference)


@pytest.mark.slow
def test_a_client_that_leaves_while_its_request_queues_on_a_decode_server(
    make_cluster: Any, tiny_reference: Reference
) -> None:
    cluster = make_cluster((), ("--max-num-seqs", "1"))
    prefiller, decode = cluster.prefill[0], cluster.decode[0]
    long = Stream(cluster.url, _prompt(40), 1500).begun()
    for stream in (False, True):
        with _asked(cluster.proxy, {"prompt": _prompt(), "max_tokens": 5, "stream": stream}):
            wait_until(lambda: decode.metrics()["baton_requests_waiting"] == 1)
        wait_until(lambda: decode.metrics()["baton_requests_waiting"] == 0)
        wait_until(prefiller.all_blocks_home)
    assert len(long.events) < 1400, "the long request outlived them"
    long.join(60)
    assert long.events[-1] == "[DONE]"
    _assert_home(prefiller, decode)
    _assert_serves(cluster, tiny_reference)


def test_kv_goes_home_when_the_client_of_a_stopped_decode_server_leaves(
    slow_cluster: Cluster, tiny_reference: Reference
) -> None:
    prefiller, decode = slow_cluster.prefill[0], slow_cluster.decode[0]
    _stop(decode, signal.SIGSTOP)
    try:
        with _asked(slow_cluster.proxy, {"prompt": _prompt(20), "max_tokens": 5}):
            wait_until(lambda: prefiller.metrics()['baton_kv_blocks{state="leased"}'] > 0)
        _assert_home(prefiller)
    finally:
        _stop(decode, signal.SIGCONT)
    ready = 'baton_proxy_upstream_ready{role="decode",server="decode-0"}'
    wait_until(lambda: slow_cluster.proxy.metrics()[ready] == 1)
    _assert_serves(slow_cluster, tiny_reference)
    _assert_home(prefiller, decode)


@pytest.mark.slow
def test_the_last_decode_server_dies_during_the_prefill(make_cluster: Any) -> None:
    cluster = make_cluster(_SLOW_PREFILL)
    prefiller, decode = cluster.prefill[0], cluster.decode[0]
    answers: list[httpx.Response] = []
    body = {"model": MODEL, "prompt": _prompt(1000), "max_tokens": 5}
    url = f"{cluster.url}/v1/completions"
    asking = threading.Thread(
        target=lambda: answers.append(http.post(url, json=body, timeout=60)), daemon=True
    )
    asking.start()
    wait_until(lambda: _is_busy(prefiller))
    decode.kill()
    asking.join(60)
    assert answers[0].status_code in (502, 503)
    _assert_home(prefiller)


@pytest.mark.parametrize("transfer", ["auto", pytest.param("nixl", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "stopped_s",
    [
        "until the lease is over",
        pytest.param("until the fence is given up", marks=pytest.mark.slow),
    ],
)
def test_a_prefill_server_that_stops_and_goes_on_spoils_no_answer(
    tiny_model: Path, tiny_reference: Reference, transfer: str, stopped_s: str
) -> None:
    """Its lease runs out while it cannot say so; then it goes on, and reuses the blocks."""
    timeouts = ("--fence-timeout-s", "3", "--pull-timeout-s", "5")
    p = partial(start_prefill, tiny_model, "--lease-s", "1", "--kv-cache-tokens", "2048")
    d = partial(start_decode, tiny_model, "--transfer", transfer, *timeouts)
    with started(p, d) as (prefiller, decode):
        warm = _prompt()
        complete(decode.url, warm, 2, kv_transfer_params=prefill(prefiller.url, warm))
        prompt = _prompt()
        expected = tiny_reference.generate(prompt, 8)
        params = prefill(prefiller.url, prompt)
        prefiller.signal_engine(signal.SIGSTOP)
        asked = Stream(decode.url, prompt, 8, kv_transfer_params=params).begun(1)
        if "lease" in stopped_s:
            threading.Event().wait(1.5)
        else:
            asked.join(60)
        prefiller.signal_engine(signal.SIGCONT)
        complete_all(prefiller.url, [_prompt(500) for _ in range(3)], 2)
        asked.join(60)
        assert asked.events[-1] == "[DONE]" and asked.token_ids() == expected
        _assert_home(prefiller, decode)

        def pulls() -> bool:
            """Unless this machine takes longer between the legs than a lease lasts."""
            other = _prompt()
            params = prefill(prefiller.url, other)
            answer = complete(decode.url, other, 6, kv_transfer_params=params)
            assert answer.token_ids == tiny_reference.generate(other, 6)
            return answer.kv["transferred"] == len(other)

        wait_until(pulls)


@pytest.mark.slow
def test_a_prefill_server_restarted_between_the_legs(
    tiny_model: Path, tiny_cluster: Cluster, tiny_reference: Reference, ports: list[int]
) -> None:
    decode = tiny_cluster.decode[0]
    prefiller = start_prefill(tiny_model, *prefill_ports(*ports))
    prompts = [_prompt() for _ in range(3)]
    with running(prefiller):
        known, stale, other = (prefill(prefiller.url, prompt) for prompt in prompts)
        complete(decode.url, prompts[0], 2, kv_transfer_params=known)
        prefiller.kill()
    with running(successor := start_prefill(tiny_model, *prefill_ports(*ports))):
        complete_all(successor.url, [_prompt(400) for _ in range(3)], 2)
        for prompt, params in ((prompts[1], stale), (prompts[2], other)):
            answer = complete(decode.url, prompt, 8, kv_transfer_params=params)
            assert answer.token_ids == tiny_reference.generate(prompt, 8)
            assert answer.kv["transferred"] == 0
        fresh = _prompt()
        answer = complete(decode.url, fresh, 4, kv_transfer_params=prefill(successor.url, fresh))
        assert answer.kv["transferred"] == len(fresh)
        _assert_home(successor, decode)


def test_one_reference_at_many_requests_at_once_is_honoured_once(
    tiny_cluster: Cluster, tiny_model: Path, tiny_reference: Reference
) -> None:
    prefiller = tiny_cluster.prefill[0]
    with running(second := start_decode(tiny_model)):
        for _ in range(3):
            prompt = _prompt(700)
            params = prefill(prefiller.url, prompt)
            streams = [
                Stream(server.url, prompt, 8, kv_transfer_params=params)
                for server in (tiny_cluster.decode[0], second)
                for _ in range(3)
            ]
            for stream in streams:
                stream.join(60)
                assert stream.events[-1] == "[DONE]"
                assert stream.token_ids() == tiny_reference.generate(prompt, 8)
        _assert_home(prefiller, tiny_cluster.decode[0], second)


@pytest.mark.slow
def test_a_short_lease_is_kept_alive_while_its_request_queues(
    tiny_model: Path, tiny_reference: Reference
) -> None:
    p = partial(start_prefill, tiny_model, "--lease-s", "0.5")
    d = partial(start_decode, tiny_model, "--max-num-seqs", "1")
    with started(p, d) as (prefiller, decode):
        complete(decode.url, warm := _prompt(), 2, kv_transfer_params=prefill(prefiller.url, warm))
        long = Stream(decode.url, _prompt(40), 1500).begun()
        prompt = _prompt()
        params = prefill(prefiller.url, prompt)
        answer = complete(decode.url, prompt, 6, kv_transfer_params=params)
        long.join(60)
        assert answer.token_ids == tiny_reference.generate(prompt, 6)
        assert answer.kv["transferred"] == len(prompt)
        _assert_home(prefiller, decode)


def test_pools_too_small_for_the_load_delay_it_and_change_nothing(
    make_cluster: Any, tiny_reference: Reference
) -> None:
    small = ("--kv-cache-tokens", "2048")
    cluster = make_cluster(small, small)
    prompts = [_prompt(300) for _ in range(10)]
    answers = complete_all(cluster.url, prompts, 100)
    assert cluster.decode[0].metrics()["baton_preemptions_total"] > 0
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == tiny_reference.generate(prompt, 100)
    _assert_home(cluster.prefill[0], cluster.decode[0])
