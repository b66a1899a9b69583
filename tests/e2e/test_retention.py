"""Requests through a proxy ask both servers to retain the KV of their prompts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_cache_salt import cached_in_usage, send
from tests.rigs.client import fresh_prompt
from tests.rigs.cluster import Cluster, Server, cluster, wait_until

pytestmark = pytest.mark.usefixtures("all_blocks_return")
MARK = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


@pytest.fixture(scope="module")
def tiny_cluster(tiny_model: Path) -> Iterator[Cluster]:
    """A cluster for this module alone. Pins of other tests could fill an owner's share,
    or expire between two counts."""
    with cluster(tiny_model) as running:
        yield running


def num_pinned(server: Server) -> float:
    return server.metrics()["baton_kv_blocks_pinned"]


def wait_for_pins(cluster: Cluster, before: list[float], added: float) -> None:
    servers = cluster.servers()[1:]
    expected = [number + added for number in before]
    wait_until(lambda: [num_pinned(server) for server in servers] == expected)


@pytest.mark.parametrize(
    ("path", "fields", "num_blocks"),
    [
        ("/v1/completions", {"prompt_cache_retention": "24h", "max_tokens": 3}, 12),
        ("/v1/chat/completions", {"max_tokens": 3}, None),
    ],
)
def test_both_servers_pin_the_prompt(
    tiny_cluster: Cluster, path: str, fields: dict[str, Any], num_blocks: int | None
):
    servers = tiny_cluster.servers()[1:]
    size = int(servers[0].metrics()["baton_kv_block_size_tokens"])
    before = [num_pinned(server) for server in servers]
    if num_blocks is not None:
        body = {"prompt": fresh_prompt(num_blocks * size + 1), **fields}
    else:
        system = {"role": "system", "content": "Be brief. " * 40, **MARK}
        messages = [system, {"role": "user", "content": "Why is that so? " * 40}]
        body = {"messages": messages, **fields}
        # A request for one token needs no KV on the decode server, so only the prefill
        # server pins blocks.
        answer = send(tiny_cluster.url, "unused", path, {**body, "max_tokens": 1})
        num_tokens = answer.json()["usage"]["prompt_tokens"]
        wait_until(lambda: num_pinned(servers[0]) > before[0])
        num_blocks = int(num_pinned(servers[0]) - before[0])
        assert num_blocks < num_tokens // size, "the question was pinned too"
    send(tiny_cluster.url, "unused", path, body)
    wait_for_pins(tiny_cluster, before, num_blocks)
    assert cached_in_usage(send(tiny_cluster.url, "unused", path, body)) > 0
    wait_for_pins(tiny_cluster, before, num_blocks)
