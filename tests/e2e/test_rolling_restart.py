"""Servers that are told to end, and replaced, one after another under load: no client notices."""

import itertools
import threading
from pathlib import Path

import httpx
import pytest

from tests.e2e.client import MODEL, complete
from tests.e2e.cluster import (
    Cluster,
    Server,
    running,
    start_decode,
    start_prefill,
    start_proxy,
    wait_until,
)
from tests.e2e.reference import Reference
from tests.e2e.test_equality import make_prompt

_CLIENTS = 6


class _Load(threading.Thread):
    """A client that asks for one completion after another."""

    def __init__(self, url: str, prompts: list[list[int]], expected: list[list[int]]) -> None:
        super().__init__(daemon=True)
        self.done = threading.Event()
        self.num_right = 0
        self.problems: list[str] = []
        self._url, self._cases = url, list(zip(prompts, expected, strict=True))
        self.start()

    def run(self) -> None:
        with httpx.Client(timeout=60, verify=False) as client:
            for prompt, expected in itertools.cycle(self._cases):
                if self.done.is_set():
                    return
                body = {"model": MODEL, "prompt": prompt, "max_tokens": len(expected)}
                body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
                try:
                    answer = client.post(f"{self._url}/v1/completions", json=body)
                except httpx.HTTPError as error:
                    self.problems.append(repr(error))
                    continue
                if answer.status_code != 200:
                    self.problems.append(answer.text)
                elif answer.json()["choices"][0]["token_ids"] != expected:
                    self.problems.append("other tokens")
                else:
                    self.num_right += 1


@pytest.mark.slow
def test_a_rolling_restart_under_load_is_not_noticed(
    tiny_model: Path, tiny_reference: Reference
) -> None:
    prefill = [start_prefill(tiny_model) for _ in range(2)]
    decode = [start_decode(tiny_model) for _ in range(2)]
    with running(*prefill, *decode), running(proxy := start_proxy(prefill, decode)):
        prompts = [make_prompt(80_000 + seed, 40 + 17 * seed) for seed in range(12)]
        expected = [tiny_reference.generate(prompt, 24) for prompt in prompts]
        load = [
            _Load(proxy.url, prompts[at:] + prompts[:at], expected[at:] + expected[:at])
            for at in range(_CLIENTS)
        ]
        successors: list[Server] = []
        try:
            for server in (*prefill, *decode):
                before = sum(client.num_right for client in load)
                wait_until(
                    lambda before=before: sum(c.num_right for c in load) >= before + 4 * _CLIENTS
                )
                is_prefill = server in prefill
                ready = (
                    f'baton_proxy_upstream_ready{{role="{"prefill" if is_prefill else "decode"}"'
                )
                ready += f',url="{server.url}"}}'
                assert server.stop() == 0
                start = start_prefill if is_prefill else start_decode
                ports = ["--port", str(server.port)]
                if is_prefill:
                    ports += ["--side-channel-port", str(server.info["side_channel_port"])]
                successors.append(start(tiny_model, *ports))
                wait_until(lambda ready=ready: proxy.metrics()[ready] == 1)
            before = sum(client.num_right for client in load)
            wait_until(lambda: sum(c.num_right for c in load) >= before + 4 * _CLIENTS)
            for client in load:
                client.done.set()
            for client in load:
                client.join(60)
            assert [problem for client in load for problem in client.problems] == []
            for server in successors:
                wait_until(server.all_blocks_home)
            fresh = make_prompt(81_000, 130)
            cluster = Cluster(successors[:2], successors[2:], proxy, tiny_model)
            answer = complete(cluster.url, fresh, 6)
            assert answer.token_ids == tiny_reference.generate(fresh, 6)
            assert answer.kv["transferred"] == len(fresh)
        finally:
            for client in load:
                client.done.set()
            for server in successors:
                server.stop()
