"""Node 0 lets other nodes join, compares them, and reports failures to all nodes."""

import queue
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from engine.geometry import read_config
from engine.nodes.agreement import report_of
from engine.nodes.link import NodeLink
from engine.nodes.messages import (
    CHANNELS,
    Failed,
    Hello,
    Leaving,
    Message,
    NodeReport,
    Ready,
    Start,
    Stop,
    greet,
    new_nonce,
)
from engine.nodes.rendezvous import Rendezvous
from engine.prepare import Prepared, StartFailure, engine_config
from engine.process.launch import Launch
from protocol.openai.sampling import GenerationConfig
from protocol.settings.settings import PrefillSettings
from protocol.version import VERSION
from tests.make_models import ensure_model
from tests.ports import reserved_ports
from tests.rigs.cluster import wait_until

_SECRET = b"a secret of these tests"
_TIMEOUT_S = 30.0


class _Node:
    """A node that a test controls. It has no ranks."""

    def __init__(
        self, rig: "_Rig", number: int, *, has_heartbeats: bool = True
    ) -> None:
        self._rig = rig
        self._number = number
        self.messages: queue.Queue[Message | str] = queue.Queue()
        rig.nodes.append(self)
        sock, key = self._connect()
        self.link = NodeLink(
            sock,
            key,
            node_rank=number,
            peer_rank=0,
            peer="node 0",
            timeout_s=rig.settings.node_timeout_s,
        )
        if has_heartbeats:
            self.link.start(self.messages.put, self.messages.put)

    def _connect(self, **fields: Any) -> tuple[socket.socket, bytes]:
        hello = Hello(
            version=VERSION,
            node_rank=self._number,
            nnodes=self._rig.settings.nnodes,
            nonce=new_nonce(),
            **fields,
        )
        sock = socket.create_connection(self._rig.settings.rendezvous_address)
        return sock, greet(sock, hello, _SECRET)

    def connect_rank(self, rank: int, session: str) -> list[socket.socket]:
        return [
            self._connect(rank=rank, channel=channel, session=session)[0]
            for channel in CHANNELS
        ]

    def next_message(self) -> Message | str:
        return self.messages.get(timeout=_TIMEOUT_S)


def _prepared(settings: PrefillSettings) -> Prepared:
    model_dir = ensure_model("gqa")
    model_config = read_config(model_dir, settings)
    config = engine_config(settings, _SECRET, model_dir, model_config)
    return Prepared(config, model_config, GenerationConfig())


class _Rig:
    """Node 0 of a server with one rank on each node."""

    def __init__(self, port: int, nnodes: int, **options: Any) -> None:
        self.settings = PrefillSettings(
            _cli_parse_args=[],
            model=str(ensure_model("gqa")),
            device="cpu",
            tp=nnodes,
            nnodes=nnodes,
            rendezvous=f"127.0.0.1:{port}",
            cluster_secret=_SECRET.decode(),
            **options,
        )
        self.nodes: list[_Node] = []
        self.failures: queue.Queue[str] = queue.Queue()
        self.is_leaving = threading.Event()
        self.rendezvous = Rendezvous(
            self.settings, _SECRET, self.failures.put, self.is_leaving.set
        )
        self.prepared = _prepared(self.settings)
        self.report: NodeReport = report_of(
            self.prepared.config, self.prepared.model_config
        )
        self._pool = ThreadPoolExecutor(1)
        self.rendezvous.open()

    def meet(self) -> Future[Launch]:
        return self._pool.submit(self.rendezvous.meet, self.prepared, lambda text: None)

    def close(self) -> None:
        self.rendezvous.fail("the test has ended")
        for node in self.nodes:
            node.link.close()
        self.rendezvous.close(lingers=False)
        self._pool.shutdown()


@pytest.fixture
def make_rig() -> Iterator[Callable[..., _Rig]]:
    with ExitStack() as stack, reserved_ports(1) as (port,):

        def make(nnodes: int = 2, **options: Any) -> _Rig:
            rig = _Rig(port, nnodes, **options)
            stack.callback(rig.close)
            return rig

        yield make


def _failure(meeting: Future[Launch]) -> str:
    with pytest.raises(StartFailure) as caught:
        meeting.result(_TIMEOUT_S)
    return str(caught.value)


def _start(rig: _Rig, *nodes: _Node) -> Launch:
    """Lets all nodes agree, and connects their ranks in reverse order."""
    meeting = rig.meet()
    for node in nodes:
        node.link.send(rig.report)
    for node in reversed(nodes):
        start = node.next_message()
        assert isinstance(start, Start)
        for channel, sock in zip(
            CHANNELS, node.connect_rank(node._number, start.incarnation), strict=True
        ):
            sock.sendall(f"{node._number} {channel}".encode())
            sock.close()
    return meeting.result(_TIMEOUT_S)


def _close(launch: Launch) -> None:
    assert launch.store is not None
    for sock in (*launch.rank_sockets, launch.store):
        sock.close()


def test_connections_are_sorted_by_rank_and_channel(make_rig):
    rig = make_rig(3)
    one = _Node(rig, 1)
    two = _Node(rig, 2)
    launch = _start(rig, one, two)
    assert [sock.recv(100) for sock in launch.rank_sockets] == [
        b"1 steps",
        b"1 pulls",
        b"2 steps",
        b"2 pulls",
    ]
    assert launch.config.store_port == launch.store.getsockname()[1]
    assert launch.config.node_host == "127.0.0.1"
    _close(launch)
    rig.rendezvous.set_ready()
    rig.rendezvous.close(lingers=True)
    assert [one.next_message(), one.next_message()] == [Ready(), Stop()]


def test_a_port_in_use_is_named(make_rig):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(StartFailure) as caught:
            _Rig(port, 2)
    assert str(caught.value) == (
        f"cannot listen at --rendezvous 127.0.0.1:{port} (Address already in "
        "use); give an address of node 0 and a free port there"
    )


def test_leaving_node_stops_the_server(make_rig):
    rig = make_rig()
    _Node(rig, 1).link.send(Leaving())
    assert rig.is_leaving.wait(_TIMEOUT_S)
    assert rig.failures.empty()


def test_all_nodes_get_the_name_of_an_absent_node(make_rig):
    rig = make_rig(3, rendezvous_timeout_s=0.5)
    node = _Node(rig, 1)
    reason = _failure(rig.meet())
    assert reason.startswith("node 2 of 3 did not join at 127.0.0.1:")
    assert "within 0.5 s (--rendezvous-timeout-s)" in reason
    assert node.next_message() == Failed(reason)


def test_all_nodes_receive_the_message_about_a_difference(make_rig):
    rig = make_rig(3)
    nodes = [_Node(rig, 1), _Node(rig, 2)]
    other = _prepared(rig.settings.model_copy(update={"block_size": 16}))
    meeting = rig.meet()
    nodes[0].link.send(rig.report)
    nodes[1].link.send(report_of(other.config, other.model_config))
    reason = _failure(meeting)
    assert "nodes 0 and 2 differ in --block-size: 64 on node 0, 16 on node 2" in reason
    assert [node.next_message() for node in nodes] == [Failed(reason)] * 2


def test_a_failure_of_one_node_is_reported_to_all(make_rig):
    rig = make_rig(3)
    nodes = [_Node(rig, 1), _Node(rig, 2)]
    meeting = rig.meet()
    nodes[1].link.send(Failed("node 2 has no model"))
    assert rig.failures.get(timeout=_TIMEOUT_S) == "node 2 has no model"
    assert _failure(meeting) == "node 2 has no model"
    assert nodes[0].next_message() == Failed("node 2 has no model")


def test_a_node_that_joins_after_the_failure_gets_its_reason(make_rig):
    rig = make_rig()
    reason = "node 0 (127.0.0.1): no model"
    assert rig.rendezvous.fail_here("no model") == reason
    assert rig.rendezvous.fail_here("a consequence") == reason
    closing = rig._pool.submit(rig.rendezvous.close, lingers=True)
    assert _Node(rig, 1).next_message() == Failed(reason)
    closing.result(_TIMEOUT_S)


def test_two_nodes_with_one_number_are_refused(make_rig):
    rig = make_rig(3)
    first = _Node(rig, 1)
    second = _Node(rig, 1)
    reason = rig.failures.get(timeout=_TIMEOUT_S)
    assert reason.startswith("two nodes have --node-rank 1: node 1 (127.0.0.1), and")
    assert first.next_message() == second.next_message() == Failed(reason)


def test_a_node_may_join_again_before_the_start(make_rig):
    rig = make_rig()
    _Node(rig, 1).link.close()
    wait_until(lambda: not rig.rendezvous._links)
    launch = _start(rig, _Node(rig, 1))
    assert len(launch.rank_sockets) == 2
    _close(launch)


def test_a_lost_node_ends_the_server_on_all_nodes(make_rig):
    rig = make_rig(3)
    one = _Node(rig, 1)
    two = _Node(rig, 2)
    launch = _start(rig, one, two)
    two.link.close()
    reason = rig.failures.get(timeout=_TIMEOUT_S)
    assert reason.startswith("node 2 (127.0.0.1) is lost: its connection ended")
    assert one.next_message() == Failed(reason)
    _close(launch)


def test_a_silent_node_is_lost(make_rig):
    rig = make_rig(node_timeout_s=0.5)
    node = _Node(rig, 1, has_heartbeats=False)
    rig.rendezvous._session = "the ranks are starting"
    reason = rig.failures.get(timeout=_TIMEOUT_S)
    assert "node 1 (127.0.0.1) is lost: it sent nothing for 0.5 s" in reason
    node.link.close()
