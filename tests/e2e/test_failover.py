"""A decode server is lost in the middle of an answer, and the client does not notice.

tests/engine/test_resume.py cuts streams behind each frame; here are real servers and real faults.
"""

import contextlib
import random
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests import stopping
from tests.rigs.client import MODEL, TIMEOUT_S, fresh_prompt
from tests.rigs.cluster import (
    Server,
    running,
    start_decode,
    start_prefill,
    start_proxy,
    started,
    wait_until,
)
from tests.rigs.cutter import Cutter, Fault
from tests.rigs.plain_http import http

_QUICK = ("--health-interval-s", "0.1", "--health-timeout-s", "0.3")
_OWN = re.compile(r'"(id|item_id|created|created_at|baton_kv)":("[^"]*"|\d+|\{[^}]*\}),?')
_INDEX = re.compile(r'"choices":\[\{"index":(\d)')
_NUMBER = re.compile(r"-?\d+\.\d+(e-?\d+)?")


@dataclass
class Fleet:
    """One prefill server, some decode servers behind relays, and the proxy."""

    prefill: Server
    decodes: list[Server]
    cutters: list[Cutter]
    proxy: Server

    def server_of(self, cutter: Cutter) -> Server:
        return self.decodes[self.cutters.index(cutter)]

    def ask(self, path: str, body: dict[str, Any], fault: Fault | None = None) -> str:
        """The answer, without what is its own."""
        for cutter in self.cutters:
            cutter.fault = fault
        answer = http.post(f"{self.proxy.url}{path}", json=body, timeout=TIMEOUT_S)
        assert answer.status_code == 200, answer.text
        return _OWN.sub("", answer.text)

    def taken_over(self) -> float:
        """How often a server took over from another one, in mid-stream or before it."""
        metrics = self.proxy.metrics()
        resumes = (n for name, n in metrics.items() if 'outcome="resumed"' in name)
        return sum(resumes) + metrics['baton_proxy_retries_total{leg="decode"}']

    def until_ready(self, num: int) -> None:
        def is_ready() -> bool:
            told = http.get(f"{self.proxy.url}/ready", timeout=10).json()
            return bool(told["decode"]["ready"] == num)

        wait_until(is_ready)


@contextlib.contextmanager
def _fleet(model: Path) -> Iterator[Fleet]:
    decode = partial(start_decode, model, "--shutdown-grace-s", "0.1")
    starts = [partial(start_prefill, model), decode, decode, decode]
    with started(*starts) as (prefill, *decodes):
        cutters = [Cutter(server.port) for server in decodes]
        told = [arg for cutter in cutters for arg in ("--decode", cutter.url)]
        proxy = start_proxy([prefill], [], *told, *_QUICK)
        with running(proxy):
            yield Fleet(prefill, decodes, cutters, proxy)
            for cutter in cutters:
                cutter.close()


@pytest.fixture(scope="module")
def fleet(tiny_model: Path) -> Iterator[Fleet]:
    with _fleet(tiny_model) as made:
        yield made


_SAMPLED = {"temperature": 1.0, "seed": 7, "frequency_penalty": 0.4, "presence_penalty": 0.2}
_REGEX = {"structured_outputs": {"regex": "[a-z]{4,9}( [0-9]{3}){6}"}}
_TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "string", "maxLength": 8}},
            "required": ["a", "b"],
        },
    },
}
_CHATS = "/v1/chat/completions"
# By name: the endpoint and the request.
_ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("/v1/completions", {"temperature": 0, "ignore_eos": True, "logprobs": 2}),
    "sampled": ("/v1/completions", {**_SAMPLED, "return_token_ids": True, "ignore_eos": True}),
    "n = 3": ("/v1/completions", {**_SAMPLED, "n": 3, "return_token_ids": True}),
    "structured": (_CHATS, {**_SAMPLED, **_REGEX}),
    "a call": (_CHATS, {**_SAMPLED, "tools": [_TOOL], "tool_choice": "required"}),
    "items": ("/v1/responses", {"temperature": 0, "max_output_tokens": 30}),
}


def _body(name: str, prompt: list[int], *, stream: bool = True) -> tuple[str, dict[str, Any]]:
    path, body = _ASKED[name]
    body = {"model": MODEL, "stream": stream, **body}
    if stream and path != "/v1/responses":
        body["stream_options"] = {"include_usage": True}
    if path == "/v1/completions":
        return path, {"prompt": prompt, "max_tokens": 24, **body}
    text = " ".join(map(str, prompt[:20]))
    if path == "/v1/responses":
        return path, {"input": text, **body}
    return path, {"messages": [{"role": "user", "content": text}], "max_tokens": 60, **body}


def _by_choice(stream: str) -> str:
    """Choices take turns as they come."""
    events = stream.split("\n\n")
    return "\n\n".join(sorted(events, key=lambda event: (_INDEX.findall(event) or ["9"])[0]))


def _assert_same(found: str, expected: str) -> None:
    """Byte for byte, but for the last bits of fractions: prompts and steps sum in other orders."""
    assert _NUMBER.sub("0.0", found) == _NUMBER.sub("0.0", expected)
    pairs = zip(_NUMBER.finditer(found), _NUMBER.finditer(expected), strict=True)
    assert all(abs(float(a[0]) - float(b[0])) < 1e-3 for a, b in pairs)


def _run(fleet: Fleet, name: str, act: Any, *afters: int, num_ready: int = 3) -> None:
    """With a fault after each of so many frames."""
    path, body = _body(name, fresh_prompt(70))
    fleet.ask(path, body)  # from here on the prompt is cached
    expected = fleet.ask(path, body)
    for after in afters:
        fleet.until_ready(num_ready)
        before, fault = fleet.taken_over(), Fault(act, after)
        found = fleet.ask(path, body, fault)
        assert fault.happened.is_set() and fleet.taken_over() == before + 1
        _assert_same(*map(_by_choice, (found, expected)))


def _until_it_is_over(fleet: Fleet) -> None:
    for server in fleet.decodes:
        if not server.child.exited.is_set():
            server.assert_home()
    fleet.prefill.assert_home()


_SLOW = ("a call",)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in _SLOW)) for n in _ASKED]
)
def test_a_stream_survives_a_cut_connection(fleet: Fleet, name: str) -> None:
    _run(fleet, name, lambda cutter: cutter.cut() or cutter.mend(), 1, 2, 7)
    _until_it_is_over(fleet)


def test_an_answer_that_is_no_stream_is_had_again(fleet: Fleet) -> None:
    path, body = _body("sampled", fresh_prompt(70), stream=False)
    body["max_tokens"] = 200
    fleet.ask(path, body)
    expected, before = fleet.ask(path, body), fleet.taken_over()

    def busy() -> list[Cutter]:
        pairs = zip(fleet.cutters, fleet.decodes, strict=True)
        return [cutter for cutter, d in pairs if d.metrics()["baton_requests_running"]]

    wait_until(lambda: not busy())
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(fleet.ask, path, body)
        wait_until(lambda: bool(busy()))
        for cutter in busy():
            cutter.cut()
            cutter.mend()
        assert asked.result() == expected
    assert fleet.taken_over() == before + 1
    _until_it_is_over(fleet)


def test_a_stream_survives_a_network_that_swallows_all(fleet: Fleet) -> None:
    _run(fleet, "sampled", Cutter.swallow, 9)
    for cutter in fleet.cutters:
        cutter.mend()
    _until_it_is_over(fleet)


def test_a_server_that_was_stopped_finds_its_client_gone(fleet: Fleet) -> None:
    stopped: list[int] = []

    def stop(cutter: Cutter) -> None:
        server = fleet.server_of(cutter)
        stopped.extend((*server.engine_pids(), server.child.pid))
        for pid in stopped:
            stopping.send(pid, signal.SIGSTOP)

    try:
        _run(fleet, "greedy", stop, 5)
    finally:
        for pid in stopped:
            stopping.send(pid, signal.SIGCONT)
    _until_it_is_over(fleet)


def test_servers_that_end_or_are_killed_cost_no_stream(fleet: Fleet) -> None:
    _run(fleet, "n = 3", lambda cutter: fleet.server_of(cutter).child.signal(signal.SIGTERM), 4)
    _run(fleet, "sampled", lambda cutter: fleet.server_of(cutter).kill(), 6, num_ready=2)
    _until_it_is_over(fleet)


_KILLS_S, _NUM_STREAMS = 300.0, 24


@pytest.mark.slow
def test_streams_outlive_servers_that_are_killed_at_any_time(tiny_model: Path) -> None:
    rng, over = random.Random(5), threading.Event()
    with _fleet(tiny_model) as fleet, contextlib.ExitStack() as later:
        asked = [
            _body(rng.choice(["sampled", "n = 3", "items"]), fresh_prompt(40 + 9 * at))
            for at in range(_NUM_STREAMS)
        ]
        for _, body in asked:
            body |= {name: 200 for name in ("max_tokens", "max_output_tokens") if name in body}

        def ask(at: int) -> int:
            """How often the answer was right."""
            path, body = asked[at]
            _, expected = fleet.ask(path, body), fleet.ask(path, body)
            num = 0
            barrier.wait()
            while not over.is_set():
                _assert_same(_by_choice(fleet.ask(path, body)), _by_choice(expected))
                num += 1
            return num

        barrier = threading.Barrier(_NUM_STREAMS + 1)
        with ThreadPoolExecutor(_NUM_STREAMS) as pool:
            answers = [pool.submit(ask, at) for at in range(_NUM_STREAMS)]
            barrier.wait()
            until_s = time.monotonic() + _KILLS_S
            while time.monotonic() < until_s and not any(one.done() for one in answers):
                at = rng.randrange(3)
                fleet.decodes[at].kill()
                successor = fleet.decodes[at] = start_decode(tiny_model)
                later.enter_context(running(successor))
                fleet.cutters[at].target = successor.port
                fleet.until_ready(3)
            over.set()
            assert min(one.result() for one in answers) >= 1
        assert fleet.taken_over() > 10
        _until_it_is_over(fleet)
