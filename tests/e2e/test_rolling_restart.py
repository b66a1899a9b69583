"""Servers that are told to end, and replaced, one after another under load: no client notices."""

from pathlib import Path

import pytest

from tests.e2e.client import complete
from tests.e2e.cluster import (
    Cluster,
    Server,
    running,
    start_decode,
    start_prefill,
    start_proxy,
    wait_until,
)
from tests.e2e.load import Load
from tests.e2e.reference import Reference
from tests.e2e.test_equality import make_prompt

_CLIENTS = 6


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
            Load(proxy.url, prompts[at:] + prompts[:at], expected[at:] + expected[:at])
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
