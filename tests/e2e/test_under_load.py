"""Under load: servers on hosts of their own that are parted, and servers that are replaced."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.reference import Reference
from tests.ports import reserved_ports
from tests.rigs.client import Load, Stream, complete, make_prompt
from tests.rigs.cluster import (
    ENGINE_ARGV,
    SECRET,
    Cluster,
    Server,
    all_ready,
    assert_idle,
    prefill_ports,
    running,
    start_decode,
    start_prefill,
    start_proxy,
    started,
    wait_until,
)
from tests.rigs.hosts import Hosts, why_not

_LEASE_S = 4


@contextlib.contextmanager
def _asking(
    url: str, prompts: list[list[int]], expected: list[list[int]], num_clients: int
) -> Iterator[list[Load]]:
    """Clients that ask until the end of the block; none of them may have had a problem."""
    turned = [
        (prompts[i:] + prompts[:i], expected[i:] + expected[:i])
        for i in range(num_clients)
    ]
    load = [Load(url, *each) for each in turned]
    try:
        yield load
    finally:
        for client in load:
            client.done.set()
        for client in load:
            client.join(60)
    assert [problem for client in load for problem in client.problems] == []


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    if lacking := why_not():
        pytest.skip(f"no namespaces: {lacking}")
    hosts = Hosts("p", "d", "x", folder=tmp_path)
    yield hosts
    hosts.close()


@pytest.mark.slow
def test_decode_goes_on_without_a_lost_peer_and_pulls_again(
    hosts, tiny_model, tiny_reference
):
    """The two are parted while KV is pulled, so that no end of a connection is ever told. Rejoined,
    UCX may end P (docs/deployment.md), which is then started again as by a supervisor."""
    model = ("--model", str(tiny_model), *ENGINE_ARGV)
    side = ("--side-channel-host", hosts.address("p"), "--lease-s", str(_LEASE_S))
    ports = prefill_ports(8100, 8101)
    start_p = partial(
        hosts.start, "p", "prefill_server", *model, *side, *ports, "--block-size", "16"
    )
    prompts = [make_prompt(90_000 + seed, 90 + 31 * seed) for seed in range(12)]
    expected = [tiny_reference.generate(prompt, 12) for prompt in prompts]
    p = start_p()
    d = hosts.start("d", "decode_server", *model, "--tp", "2", "--block-size", "32")
    x = hosts.start("x", "proxy", "--prefill", p.url, "--decode", d.url)
    with hosts.inside("x"):
        cluster = Cluster([p], [d], x, tiny_model)
        wait_until(lambda: all_ready(x))
        assert complete(x.url, prompts[0], 12).kv["transferred"] == len(prompts[0])
        with _asking(x.url, prompts, expected, 4) as load:
            _wait_for_more(cluster, _pulls)
            hosts.part("d", "p")
            _wait_for_more(cluster, _failures, 1)
            _wait_for_more(
                cluster, lambda _: sum(client.num_right for client in load), 8
            )
            hosts.rejoin("d", "p")
            before = _pulls(cluster)
            wait_until(
                lambda: p.child.exited.is_set() or _pulls(cluster) >= before + 4, 60
            )
            if p.child.exited.is_set():
                assert p.child.reason() == "engine process prefill: killed by SIGABRT"
                p = start_p()
                _wait_for_more(cluster, _pulls)
        assert_idle(p, d)


@pytest.mark.slow
def test_a_slow_link_is_hidden_behind_the_prefill(hosts, default_model):
    """Of a long prompt all KV goes over the link between tokens 1 and 2 when a leg comes after the
    other, and the last chunk's where both are opened at once: in P a chunk takes twice as long."""
    model = ("--model", str(default_model), *ENGINE_ARGV, "--insecure")
    chunks = (
        "--side-channel-host",
        hosts.address("p"),
        "--max-num-batched-tokens",
        "256",
    )
    p = hosts.start("p", "prefill_server", *model, *chunks, "--block-size", "16")
    d = hosts.start("d", "decode_server", *model, "--block-size", "32")
    hosts.slow_down("p", "400mbit")
    servers = ("--prefill", p.url, "--decode", d.url)
    gaps_s, sent_bytes = dict[str, float](), dict[str, int]()
    for order, secret in (("in turn", "that no server knows"), ("at once", SECRET)):
        x = hosts.start("x", "proxy", *servers, BATON_CLUSTER_SECRET=secret)
        with hosts.inside("x"):
            wait_until(lambda x=x: all_ready(x))
            for seed in (
                1,
                2,
            ):  # at the first one hands are shaken, and a secret is distrusted
                prompt = make_prompt(70_000 + seed + len(gaps_s) * 10, 2000)
                (first_s, first), (second_s, second) = _token_times(
                    hosts, x.url, prompt
                )
            assert complete(x.url, prompt, 4).token_ids == Reference(
                default_model
            ).generate(prompt, 4)
        gaps_s[order], sent_bytes[order] = second_s - first_s, second - first
        x.child.kill()
    gap_ms = {name: round(1000 * gap) for name, gap in gaps_s.items()}
    print(json.dumps({"gap_ms": gap_ms, "sent_bytes": sent_bytes}))
    # The last chunk, the one before it, which may still be read, and what the link had queued.
    assert sent_bytes["at once"] <= sent_bytes["in turn"] * 2 * 256 / 2000 + (128 << 10)
    for server in (p, d):
        with hosts.inside("x"):
            wait_until(server.all_blocks_free)


def _token_times(hosts: Hosts, url: str, prompt: list[int]) -> list[tuple[float, int]]:
    """When the first two tokens came, and what P had sent by then."""
    stream, found = Stream(url, prompt, 2), list[tuple[float, int]]()
    while len(found) < 2:
        stream.wait_for_events(len(found) + 1)
        found.append((time.monotonic(), hosts.sent_bytes("p")))
    stream.join(60)
    return found


def _pulls(cluster: Cluster) -> float:
    name = 'baton_kv_transfers_total{outcome="done"'
    return sum(
        n for key, n in cluster.decode[0].metrics().items() if key.startswith(name)
    )


def _failures(cluster: Cluster) -> float:
    name = 'baton_kv_transfer_failures_total{code="peer_unreachable"}'
    return cluster.decode[0].metrics().get(name, 0)


def _wait_for_more(
    cluster: Cluster, count: Callable[[Cluster], float], more: int = 4
) -> None:
    before = count(cluster)
    wait_until(lambda: count(cluster) >= before + more, 60)


_CLIENTS = 6


@pytest.fixture
def six_ports() -> Iterator[list[int]]:
    with reserved_ports(6) as ports:
        yield ports


@pytest.mark.slow
def test_a_rolling_restart_under_load_is_not_noticed(
    tiny_model, tiny_reference, six_ports
):
    """Servers are told to end, and replaced, one after another."""
    model, reference, ports = tiny_model, tiny_reference, six_ports
    starts = [
        partial(start_prefill, model, *prefill_ports(*ports[at : at + 2]))
        for at in (0, 2)
    ]
    starts += [partial(start_decode, model, "--port", str(port)) for port in ports[4:]]
    with (
        started(*starts) as servers,
        running(proxy := start_proxy(servers[:2], servers[2:])),
    ):
        prompts = [make_prompt(80_000 + seed, 40 + 17 * seed) for seed in range(12)]
        expected = [reference.generate(prompt, 24) for prompt in prompts]
        cluster = Cluster(servers[:2], servers[2:], proxy, model)
        successors: list[Server] = []
        try:
            with _asking(proxy.url, prompts, expected, _CLIENTS) as load:
                answers = partial(
                    _wait_for_more,
                    cluster,
                    lambda _: sum(c.num_right for c in load),
                    4 * _CLIENTS,
                )
                for server, start in zip(servers, starts, strict=True):
                    answers()
                    at = servers.index(server)
                    name = f"{'prefill' if at < 2 else 'decode'}-{at % 2}"
                    assert server.stop() == 0
                    successors.append(start())
                    cluster.wait_until_ready(name)
                answers()
            assert_idle(*successors)
            fresh = make_prompt(81_000, 130)
            answer = complete(proxy.url, fresh, 6)
            assert answer.token_ids == reference.generate(fresh, 6)
            assert answer.kv["transferred"] == len(fresh)
        finally:
            for server in successors:
                server.stop()
