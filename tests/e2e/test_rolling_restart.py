"""Servers that are told to end, and replaced, one after another under load: no client notices."""

from functools import partial
from pathlib import Path

import pytest

from tests.e2e.load import Load
from tests.e2e.reference import Reference
from tests.e2e.test_equality import make_prompt
from tests.ports import kept_ports
from tests.rigs.client import complete
from tests.rigs.cluster import (
    Cluster,
    Server,
    prefill_ports,
    running,
    start_decode,
    start_prefill,
    start_proxy,
    started,
    wait_until,
)

_CLIENTS = 6


@pytest.mark.slow
def test_a_rolling_restart_under_load_is_not_noticed(
    tiny_model: Path, tiny_reference: Reference
) -> None:
    with kept_ports(6) as ports:
        _restart_all(tiny_model, tiny_reference, ports)


def _restart_all(model: Path, reference: Reference, ports: list[int]) -> None:
    starts = [partial(start_prefill, model, *prefill_ports(*ports[at : at + 2])) for at in (0, 2)]
    starts += [partial(start_decode, model, "--port", str(port)) for port in ports[4:]]
    with started(*starts) as servers, running(proxy := start_proxy(servers[:2], servers[2:])):
        prompts = [make_prompt(80_000 + seed, 40 + 17 * seed) for seed in range(12)]
        expected = [reference.generate(prompt, 24) for prompt in prompts]
        load = [
            Load(proxy.url, prompts[at:] + prompts[:at], expected[at:] + expected[:at])
            for at in range(_CLIENTS)
        ]
        successors: list[Server] = []
        try:
            for server, start in zip(servers, starts, strict=True):
                before = sum(client.num_right for client in load)
                wait_until(
                    lambda before=before: sum(c.num_right for c in load) >= before + 4 * _CLIENTS
                )
                at = servers.index(server)
                role = "prefill" if at < 2 else "decode"
                name = f"{role}-{at % 2}"
                ready = f'baton_proxy_upstream_ready{{role="{role}",server="{name}"}}'
                assert server.stop() == 0
                successors.append(start())
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
            cluster = Cluster(successors[:2], successors[2:], proxy, model)
            answer = complete(cluster.url, fresh, 6)
            assert answer.token_ids == reference.generate(fresh, 6)
            assert answer.kv["transferred"] == len(fresh)
        finally:
            for client in load:
                client.done.set()
            for server in successors:
                server.stop()
