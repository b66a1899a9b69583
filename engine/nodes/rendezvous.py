"""Node 0 of a server with several nodes: lets the other nodes join, and watches them.

    open   Other nodes connect, and prove that they have the cluster secret.
    meet   Every node checks its options and its model, and reports them. If the reports
           agree, each node connects its ranks, and node 0 starts its ranks.
    then   Nodes exchange heartbeats. If one node fails, the server ends on all nodes.

If a node's connection is lost before all nodes agree, the node may join again.
"""

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from engine.nodes.agreement import find_difference, report_of
from engine.nodes.group import Nodes, SingleNode
from engine.nodes.link import NodeLink
from engine.nodes.listening import listen_at_rendezvous
from engine.nodes.messages import (
    CHANNELS,
    BadGreeting,
    Channel,
    Disagreement,
    Failed,
    Hello,
    Leaving,
    Message,
    NodeReport,
    Ready,
    Start,
    Stop,
    receive_greeting,
)
from engine.prepare import Prepared, StartFailure
from engine.process.launch import Launch
from protocol.ipc.wire import keep_alive, listen
from protocol.process.logging import get_logger
from protocol.settings.settings import EngineSettings

logger = get_logger(__name__)

_GREETING_TIMEOUT_S = 10.0
_MAX_GREETINGS = 64  # maximum number of concurrent unauthenticated connections
_ACCEPT_INTERVAL_S = 0.5
# How long node 0 continues to accept nodes after a failed start, so that nodes that
# start a little later receive the reason.
_FAILURE_LINGER_S = 10.0


class Rendezvous(Nodes):
    """Node 0's connections to the other nodes.

    Args:
        secret: the cluster secret.
        on_failure: called with the reason, from any thread, if another node fails.
        on_leaving: called from any thread if another node has received a stop signal.
    """

    def __init__(
        self,
        settings: EngineSettings,
        secret: bytes,
        on_failure: Callable[[str], None],
        on_leaving: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._secret = secret
        self._on_failure = on_failure
        self._on_leaving = on_leaving
        self._host = ""  # the address of node 0 at which the other nodes connect
        self._greetings = threading.BoundedSemaphore(_MAX_GREETINGS)
        # Guards all attributes below, and is notified when one of them changes.
        self._changed = threading.Condition()
        self._links: dict[int, NodeLink] = {}  # by node number
        self._reports: dict[int, NodeReport] = {}
        self._rank_sockets: dict[tuple[int, Channel], socket.socket] = {}
        self._session = ""  # the engine's incarnation, once the nodes agree
        self._failure: str | None = None
        self._has_started = False  # whether all ranks have connected
        self._has_timed_out = False  # whether a node did not join in time
        self._is_closed = False
        self._num_informed = 0  # number of nodes that were sent the failure's reason

    # -- for the main program

    def open(self) -> None:
        listener = listen_at_rendezvous(self._settings, lambda: self._failure)
        listener.settimeout(_ACCEPT_INTERVAL_S)
        self._host = str(listener.getsockname()[0])
        threading.Thread(
            target=self._accept, args=(listener,), name="rendezvous", daemon=True
        ).start()

    def meet(self, prepared: Prepared, report: Callable[[str], None]) -> Launch:
        host = self._settings.node_host or self._host
        config = prepared.config.model_copy(update={"node_host": host})
        node_report = report_of(config, prepared.model_config)
        with self._changed:
            self._reports[0] = node_report
            self._wait_for_nodes(report)
            if difference := find_difference(self._reports):
                raise StartFailure(self.fail(difference))
            self._session = config.incarnation
        store = listen(self._host, 0, "--rendezvous")
        store_port = int(store.getsockname()[1])
        start = Start(
            engine_id=config.engine_id,
            incarnation=config.incarnation,
            store_port=store_port,
        )
        with self._changed:
            for link in self._links.values():
                link.send(start)
            self._wait_for_ranks(config.ranks_per_node)
            self._has_started = True
            sockets = [
                self._rank_sockets.pop((rank, channel))
                for rank in range(config.ranks_per_node, config.tp)
                for channel in CHANNELS
            ]
        config = config.model_copy(update={"store_port": store_port})
        return Launch(config, sockets, store)

    def set_ready(self) -> None:
        with self._changed:
            for link in self._links.values():
                link.send(Ready())

    def fail(self, reason: str) -> str:
        with self._changed:
            if self._failure is None and not self._is_closed:
                self._failure = reason
                for link in self._links.values():
                    link.send(Failed(reason))
                    self._num_informed += 1
                self._changed.notify_all()
            return self._failure or reason

    def fail_here(self, reason: str) -> str:
        return self.fail(f"node 0 ({self._settings.rendezvous_address[0]}): {reason}")

    def close(self, *, lingers: bool) -> None:
        with self._changed:
            is_start_failure = self._failure is not None and not self._has_started
            if lingers and self._host and is_start_failure and not self._has_timed_out:
                logger.error("%s; reporting it to the other nodes", self._failure)
                self._changed.wait_for(
                    lambda: self._num_informed >= self._settings.nnodes - 1,
                    _FAILURE_LINGER_S,
                )
            self._is_closed = True
            links = list(self._links.values())
            if self._failure is None:
                for link in links:
                    link.send(Stop())
        for link in links:
            link.close()
        for sock in self._rank_sockets.values():
            sock.close()

    # -- waiting

    def _wait_for_nodes(self, report: Callable[[str], None]) -> None:
        """Waits for the reports of all nodes.

        The timeout applies only while a node has not joined. After that, a node may
        need any time to download the model. A node that joins and then dies counts as
        absent again.

        Raises:
            StartFailure: a node did not join in time, or a node has failed.
        """
        settings = self._settings
        numbers = range(1, settings.nnodes)
        deadline_s = time.monotonic() + settings.rendezvous_timeout_s
        progress = ""
        while True:
            if self._failure is not None:
                raise StartFailure(self._failure)
            absent = [number for number in numbers if number not in self._links]
            unprepared = [number for number in numbers if number not in self._reports]
            missing = absent or unprepared
            if not missing:
                return
            nodes = "node" if len(missing) == 1 else "nodes"
            names = f"{nodes} {', '.join(map(str, missing))}"
            state = "join" if absent else "find and check the model"
            text = f"waiting for {names} to {state}"
            if text != progress:
                progress = text
                report(progress)
            if not absent:
                deadline_s = time.monotonic() + settings.rendezvous_timeout_s
            elif time.monotonic() >= deadline_s:
                self._has_timed_out = True
                raise StartFailure(
                    self.fail(
                        f"{names} of {settings.nnodes} did not join at "
                        f"{settings.rendezvous} within "
                        f"{settings.rendezvous_timeout_s:g} s "
                        "(--rendezvous-timeout-s); start the same command with "
                        f"--node-rank {missing[0]} on that node, and check that it can "
                        "reach this address of node 0"
                    )
                )
            self._changed.wait(_ACCEPT_INTERVAL_S)

    def _wait_for_ranks(self, ranks_per_node: int) -> None:
        """Waits until each rank of the other nodes has its two connections.

        Raises:
            StartFailure: ranks did not connect in time, or a node has failed.
        """
        num_ranks = ranks_per_node * (self._settings.nnodes - 1)
        self._changed.wait_for(
            lambda: (
                self._failure is not None or len(self._rank_sockets) == 2 * num_ranks
            ),
            self._settings.rendezvous_timeout_s,
        )
        if self._failure is not None:
            raise StartFailure(self._failure)
        if len(self._rank_sockets) < 2 * num_ranks:
            timeout_s = self._settings.rendezvous_timeout_s
            raise StartFailure(
                self.fail(
                    f"the ranks of other nodes did not connect to "
                    f"{self._settings.rendezvous} within {timeout_s:g} s "
                    "(--rendezvous-timeout-s); check the network between the nodes"
                )
            )

    # -- connections

    def _accept(self, listener: socket.socket) -> None:
        with listener:
            while not (self._is_closed or self._has_started):
                with suppress(TimeoutError, ConnectionError):
                    sock, _ = listener.accept()
                    if not self._greetings.acquire(blocking=False):
                        sock.close()
                        continue
                    threading.Thread(
                        target=self._greet, args=(sock,), name="greeting", daemon=True
                    ).start()

    def _greet(self, sock: socket.socket) -> None:
        """Authenticates a connection, and stores it for its node or rank."""
        host = "unknown"
        try:
            host = str(sock.getpeername()[0])
            sock.settimeout(_GREETING_TIMEOUT_S)
            hello, key = receive_greeting(sock, self._secret, self._settings.nnodes)
            sock.settimeout(None)
            if hello.rank is None:
                self._add_node(sock, hello, key, host)
            else:
                self._add_rank(sock, hello, hello.rank)
        except Disagreement as error:
            sock.close()
            reason = self.fail(str(error))
            with self._changed:
                self._num_informed += 1  # the peer reports the same reason itself
                self._changed.notify_all()
            self._on_failure(reason)
        except (BadGreeting, OSError) as error:
            logger.warning("refused a connection from %s: %s", host, error)
            sock.close()
        finally:
            self._greetings.release()

    def _add_node(
        self, sock: socket.socket, hello: Hello, key: bytes, host: str
    ) -> None:
        number = hello.node_rank
        peer = f"node {number} ({host})"
        link = NodeLink(
            sock,
            key,
            node_rank=0,
            peer_rank=number,
            peer=peer,
            timeout_s=self._settings.node_timeout_s,
        )
        with self._changed:
            reason: str | None = None
            if number == 0 or number in self._links:
                other = f"node 0 ({self._settings.rendezvous})"
                if number:
                    other = self._links[number].peer
                reason = (
                    f"two nodes have --node-rank {number}: {other}, and the node at "
                    f"{host}; give every node a different --node-rank"
                )
            else:
                reason = self._failure
                self._links[number] = link
                self._changed.notify_all()
            if reason is not None:
                link.send(Failed(reason))
                self._num_informed += 1
        link.start(
            lambda message: self._on_message(number, message),
            lambda error: self._on_lost(number, link, error),
        )
        if reason is not None and self._failure is None:
            self._on_failure(self.fail(reason))
        elif reason is None:
            logger.info("%s has joined", peer)

    def _add_rank(self, sock: socket.socket, hello: Hello, rank: int) -> None:
        with self._changed:
            is_of_session = bool(self._session) and hello.session == self._session
            ranks_per_node = self._settings.tp // self._settings.nnodes
            if not is_of_session or rank // ranks_per_node != hello.node_rank:
                raise BadGreeting(f"rank {rank} is not expected")
            tune_rank_socket(sock)
            self._rank_sockets[(rank, hello.channel)] = sock
            self._changed.notify_all()

    def _on_message(self, number: int, message: Message) -> None:
        match message:
            case NodeReport():
                with self._changed:
                    self._reports[number] = message
                    self._changed.notify_all()
            case Failed(reason):
                self._on_failure(self.fail(reason))
            case Leaving():
                logger.info("node %d has received a stop signal; draining", number)
                self._on_leaving()
            case _:
                logger.warning("node %d sent an unexpected message", number)

    def _on_lost(self, number: int, link: NodeLink, error: str) -> None:
        with self._changed:
            if self._links.get(number) is not link or self._is_closed:
                return
            if not self._session and self._failure is None:
                logger.warning("%s; it may join again", error)
                del self._links[number]
                self._reports.pop(number, None)
                self._changed.notify_all()
                return
        self._on_failure(self.fail(error))


def nodes_of(
    settings: EngineSettings,
    secret: bytes,
    on_failure: Callable[[str], None],
    on_leaving: Callable[[], None],
) -> Nodes:
    """Returns the object through which node 0 controls the nodes of the server.

    For the arguments, see Rendezvous.
    """
    if settings.nnodes == 1:
        return SingleNode()
    return Rendezvous(settings, secret, on_failure, on_leaving)


def tune_rank_socket(sock: socket.socket) -> None:
    """Sets the options of a socket between ranks.

    The socket has no timeout, because a rank may compute for a long time. The
    heartbeats between the nodes detect a dead host."""
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    keep_alive(sock, idle_s=10, interval_s=5)
