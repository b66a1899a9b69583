"""One server on several nodes. The nodes are loopback addresses of this machine, or
hosts with their own networks.
"""

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from protocol.handshake import (
    EngineMetadata,
    GetMetadata,
    Metadata,
    open_reply,
    seal_request,
)
from protocol.ipc.wire import framed
from tests.e2e.matrix import Geometry, check_cell, model_dir
from tests.ports import reserved_ports
from tests.rigs.client import Stream, complete, make_prompt
from tests.rigs.cluster import ENGINE_ARGV, SECRET, Server, running
from tests.rigs.hosts import Hosts, missing_requirement
from tests.rigs.nodes import Node, start_failures, start_nodes
from tests.rigs.plain_http import http

_TIMEOUT_S = 60.0


def _options(model: Path) -> tuple[str, ...]:
    return ("--model", str(model), *ENGINE_ARGV, "--tp", "2")


def _wait_for_ends(*servers: Server) -> list[str]:
    """Wait until all nodes have ended. Return the reasons that they report."""
    for server in servers:
        assert server.child.exited.wait(_TIMEOUT_S)
    return [server.child.reason() for server in servers]


def _metadata(server: Server) -> EngineMetadata:
    """Return the metadata of the engine, from the server's side channel."""
    port = http.get(f"{server.url}/ready", timeout=10).json()["side_channel_port"]
    with socket.create_connection((server.host, port), _TIMEOUT_S) as sock:
        request = seal_request(GetMetadata(nonce="x"), SECRET.encode())
        sock.sendall(framed(request))
        with sock.makefile("rb") as stream:
            reply = stream.read(int.from_bytes(stream.read(4), "little"))
    message = open_reply(reply, SECRET.encode())
    assert isinstance(message, Metadata)
    return message.engine


def test_server_on_two_nodes_equals_transformers(tiny_model, tiny_reference):
    servers = start_nodes("decode_server", *_options(tiny_model))
    with running(*servers):
        first, other = servers
        assert len(other.engine_pids()) == 1
        assert _metadata(first).hosts == ["127.0.0.1", "127.0.0.2"]
        for length in (3, 90):
            prompt = make_prompt(91_000 + length, length)
            answer = complete(first.url, prompt, 12)
            assert answer.token_ids == tiny_reference.generate(prompt, 12)
        # A service manager stops all nodes at the same time. Each must end without an
        # error.
        for server in (other, first):
            server.child.signal(signal.SIGTERM)
        _wait_for_ends(first, other)
        assert [server.child.process.returncode for server in servers] == [0, 0]


def test_all_nodes_report_the_same_difference(tiny_model):
    nodes = (Node(), Node(argv=("--block-size", "32")))
    reasons = start_failures("decode_server", *_options(tiny_model), nodes=nodes)
    assert "nodes 0 and 1 differ in --block-size: 64 on node 0, 32" in reasons[0]
    assert reasons[0] == reasons[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        (
            (Node(), Node(env={"BATON_CLUSTER_SECRET": "another secret of tests"})),
            "nodes 0 and 1 have different cluster secrets; set BATON_CLUSTER_SECRET",
        ),
        (
            (Node(), Node(argv=("--model", "/nowhere/model"))),
            "node 1 (127.0.0.2): model '/nowhere/model': no such directory",
        ),
        (
            (Node(argv=("--model", "/nowhere/model")), Node()),
            "node 0 (127.0.0.1): model '/nowhere/model': no such directory",
        ),
        (
            (Node(), Node(argv=("--load-format", "dummy"))),
            "nodes 0 and 1 differ in --load-format: auto on node 0, dummy on node 1",
        ),
        (
            (Node(), Node(argv=("--model", "MLA"))),
            "nodes 0 and 1 have different models: ",
        ),
        (
            (Node(), Node(argv=("--role", "both"))),
            "nodes 0 and 1 differ in --role: decode on node 0, both on node 1",
        ),
        (
            (Node(), Node(argv=("--node-rank", "0", "--port", "0"))),
            "node 0 (127.0.0.1): cannot listen at --rendezvous 127.0.0.1:",
        ),
    ],
    ids=[
        "secret",
        "no model on node 1",
        "no model on node 0",
        "load format",
        "model",
        "role",
        "node rank",
    ],
)
def test_all_nodes_refuse_in_one_line(tiny_model, nodes, message):
    first, other = nodes
    if "MLA" in other.argv:
        other = Node(argv=("--model", str(model_dir("mla"))))
    options = [*_options(tiny_model), "--rendezvous-timeout-s", "10"]
    reasons = start_failures("decode_server", *options, nodes=(first, other))
    assert any(message in reason for reason in reasons), reasons
    if "cannot listen" not in message:
        assert reasons[0] == reasons[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("node_rank", "message"),
    [
        ("0", "node 1 of 2 did not join at 127.0.0.1:{} within 2 s"),
        ("1", "node 0 did not answer at 127.0.0.1:{} within 2 s"),
    ],
)
def test_node_without_its_peer_ends_with_the_reason(tiny_model, node_rank, message):
    with reserved_ports(1) as (port,):
        argv = ["--nnodes", "2", "--rendezvous", f"127.0.0.1:{port}"]
        argv += ["--rendezvous-timeout-s", "2"]
        node = Node(argv=("--node-rank", node_rank))
        (reason,) = start_failures(
            "decode_server", *_options(tiny_model), *argv, nodes=(node,)
        )
    assert message.format(port) in reason


# -- nodes that end


def _kill_rank(servers: list[Server]) -> None:
    os.kill(servers[1].engine_pids()[0], signal.SIGKILL)


def _kill_node_0(servers: list[Server]) -> None:
    servers[0].child.signal(signal.SIGKILL)


def _kill_node_1(servers: list[Server]) -> None:
    servers[1].child.signal(signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kill", "message", "reporting"),
    [
        (_kill_rank, "decode.1 on node 1 (127.0.0.2): killed by SIGKILL", [0, 1]),
        (_kill_node_0, "node 0 (127.0.0.1) is lost: its connection ended", [1]),
        (_kill_node_1, "node 1 (127.0.0.2) is lost: its connection ended", [0]),
    ],
    ids=["rank", "node 0", "node 1"],
)
def test_a_killed_node_ends_the_server_on_all_nodes(
    tiny_model, kill, message, reporting
):
    servers = start_nodes("decode_server", *_options(tiny_model))
    with running(*servers):
        stream = Stream(servers[0].url, make_prompt(92_000, 50), 2000)
        stream.wait_for_events(3)
        began_s = time.monotonic()
        kill(servers)
        reasons = _wait_for_ends(*servers)
        seconds = time.monotonic() - began_s
        print(json.dumps({"seconds until all nodes have ended": round(seconds, 1)}))
        lines = {reasons[number] for number in reporting}
        assert len(lines) == 1
        assert message in lines.pop()
        stream.join(_TIMEOUT_S)
        assert not stream.is_alive()


# -- hosts with networks of their own


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    if lacking := missing_requirement():
        pytest.skip(f"no namespaces: {lacking}")
    hosts = Hosts("a", "b", "c", folder=tmp_path)
    yield hosts
    hosts.close()


_ON_A_AND_B = (Node(host="a"), Node(host="b"))
_HALVES = Geometry(tp=2)
_EXPERTS = Geometry(tp=2, options=("--ep", "2"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "two_hosts"),
    [("gqa4", _HALVES), ("mla", _HALVES), ("moe", _EXPERTS)],
    ids=["GQA", "MLA", "mixture"],
)
def test_pairs_over_hosts_equal_one_server(hosts, name, two_hosts):
    """KV is pulled from two hosts to one, and from one host to two."""
    model = ["--model", str(model_dir(name)), *ENGINE_ARGV]
    one_host = Geometry(block_size=16)

    def side_channel(host: str) -> tuple[str, str]:
        return ("--side-channel-host", hosts.address(host))

    p = hosts.start(
        "c", "prefill_server", *model, *one_host.argv, *side_channel("c"), name="p"
    )
    d = hosts.start("c", "decode_server", *model, *one_host.argv, name="d")
    wide_p, _ = start_nodes(
        "prefill_server",
        *model,
        *two_hosts.argv,
        *side_channel("a"),
        nodes=_ON_A_AND_B,
        hosts=hosts,
    )
    with hosts.inside("c"):
        check_cell(wide_p, d, two_hosts, one_host, p.url, f"{name} from two hosts")
        assert _metadata(wide_p).hosts == [hosts.address("a"), hosts.address("b")]
    wide_d, _ = start_nodes(
        "decode_server", *model, *two_hosts.argv, nodes=_ON_A_AND_B, hosts=hosts
    )
    with hosts.inside("c"):
        check_cell(p, wide_d, one_host, two_hosts, p.url, f"{name} to two hosts")


def _cut_network(hosts: Hosts, servers: list[Server]) -> None:
    hosts.drop_packets("a", "b")
    hosts.drop_packets("b", "a")


def _kill_host(hosts: Hosts, servers: list[Server]) -> None:
    """Drop all packets from host b to host a, then kill the processes of host b. Host a
    therefore does not see its connections close.
    """
    hosts.drop_packets("b", "a")
    servers[1].child.signal(signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("cut", [_cut_network, _kill_host], ids=["network", "host"])
def test_a_lost_host_ends_the_server_on_all_nodes(
    hosts: Hosts, tiny_model: Path, cut: Callable[[Hosts, list[Server]], None]
) -> None:
    servers = start_nodes(
        "decode_server", *_options(tiny_model), nodes=_ON_A_AND_B, hosts=hosts
    )
    with hosts.inside("a"):
        stream = Stream(servers[0].url, make_prompt(93_000, 50), 2000)
        stream.wait_for_events(3)
    began_s = time.monotonic()
    cut(hosts, servers)
    reasons = _wait_for_ends(*servers)
    seconds = time.monotonic() - began_s
    print(json.dumps({"seconds until all nodes have ended": round(seconds, 1)}))
    silence = "is lost: it sent nothing for 5 s (--node-timeout-s)"
    assert f"node 1 ({hosts.address('b')}) {silence}" in reasons[0]
    if cut is _cut_network:
        assert f"node 0 ({hosts.address('a')}) {silence}" in reasons[1]
    stream.join(_TIMEOUT_S)
    assert not stream.is_alive()
