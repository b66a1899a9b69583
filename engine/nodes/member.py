"""The program of a node other than node 0. It runs ranks and no HTTP server.

    join node 0 -> find and check the model -> report to node 0
    -> Start: connect the ranks to node 0, and start them -> Ready
    -> Stop: end with status 0; a failure of any node: end with status 1

All decisions are made on the main thread, which executes queued calls. Other threads
prepare the start, watch the connection to node 0, and watch the ranks.
"""

import queue
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import NoReturn

from engine.config import EngineConfig
from engine.nodes.agreement import report_of
from engine.nodes.link import NodeLink
from engine.nodes.messages import (
    CHANNELS,
    BadGreeting,
    Disagreement,
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
from engine.nodes.rendezvous import tune_rank_socket
from engine.prepare import Prepared, StartFailure, prepare
from engine.process.launch import FAILED_GRACE_S, EngineProcesses
from engine.process.startup import prepare_process
from model.hub import resolve_model
from protocol.process import lifecycle
from protocol.process.logging import get_logger
from protocol.settings.machine import cluster_secret
from protocol.settings.settings import EngineSettings
from protocol.version import VERSION

logger = get_logger(__name__)

_CONNECT_TIMEOUT_S = 5.0
_RETRY_S = 0.5
# How long this node waits for node 0's Stop or Failed message after a rank has exited.
_STOP_DELAY_S = 5.0
_KILLED_STATUS = 130  # exit status after a second signal, as in engine/serve.py


class Member:
    """One node other than node 0.

    Args:
        module: the module that each rank process runs.
    """

    def __init__(self, settings: EngineSettings, module: str) -> None:
        self._settings = settings
        self._secret = cluster_secret(settings.cluster_secret)
        self._processes = EngineProcesses(
            module, lambda reason: self._post(self._ranks_ended, reason)
        )
        # Calls that the main thread executes. A signal handler may call SimpleQueue.put
        # at any time.
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._link: NodeLink | None = None
        self._prepared: Prepared | None = None
        self._has_started = False
        self._status: int | None = None  # exit status; None: continue
        # The time at which the program ends with a failure, and the reason to report.
        self._deadline_s: float | None = None
        self._deadline_reason = "stopped before it was ready"

    def run(self) -> int:
        """Runs until node 0, a signal or a failure ends this node.

        Returns:
            The exit status: 0 if node 0 has ended the server, 1 after a failure, 130
            after a second signal.
        """
        threading.Thread(target=self._prepare, name="prepare", daemon=True).start()
        with lifecycle.stop_signals(
            lambda _number, count: self._post(self._on_signal, count)
        ):
            while self._status is None:
                try:
                    call = self._calls.get(timeout=lifecycle.SIGNAL_CHECK_INTERVAL_S)
                except queue.Empty:
                    self._check_deadline()
                else:
                    call()
            if self._status == _KILLED_STATUS:
                self._processes.kill()
            else:
                grace_s = self._settings.shutdown_grace_s
                if self._status:
                    grace_s = min(grace_s, FAILED_GRACE_S)
                self._processes.stop(grace_s)
        if self._link is not None:
            self._link.close()
        return self._status

    def _post(self, function: Callable[..., None], *arguments: object) -> None:
        self._calls.put(partial(function, *arguments))

    # -- the thread that prepares the start

    def _prepare(self) -> None:
        """Joins node 0, prepares the configuration, and reports it to node 0.

        Every error ends this node. Otherwise the main thread would wait forever for the
        result of this thread.
        """
        try:
            link = self._join()
        except Exception as error:
            self._post(self._fail, _describe(error))
            return
        self._post(self._set_link, link)
        link.start(
            lambda message: self._post(self._on_message, message),
            lambda error: self._post(self._fail, error),
        )
        try:
            settings = self._settings
            report_progress("looking for the model")
            model_dir = resolve_model(
                settings.model, settings.revision, progress=report_progress
            )
            prepared = prepare(settings, self._secret, model_dir)
            report_progress("checking the model")
            report = report_of(prepared.config, prepared.model_config)
            self._post(self._set_prepared, prepared, report)
        except Exception as error:
            name = f"node {settings.node_rank} ({link.local_host})"
            self._post(self._report_failure, f"{name}: {_describe(error)}")

    def _join(self) -> NodeLink:
        """Connects to node 0, and repeats failed attempts until the timeout.

        Raises:
            StartFailure: node 0 does not answer within the timeout.
            Disagreement: node 0 has another secret, version or number of nodes.
        """
        settings = self._settings
        report_progress(f"waiting for node 0 at {settings.rendezvous}")
        hello = Hello(
            version=VERSION,
            node_rank=settings.node_rank,
            nnodes=settings.nnodes,
            nonce=new_nonce(),
        )
        deadline_s = time.monotonic() + settings.rendezvous_timeout_s
        while True:
            try:
                sock, key = self._connect(hello)
                break
            except (OSError, BadGreeting) as error:
                if time.monotonic() >= deadline_s:
                    raise StartFailure(
                        f"node 0 did not answer at {settings.rendezvous} within "
                        f"{settings.rendezvous_timeout_s:g} s "
                        f"(--rendezvous-timeout-s; last failure: {error}); start the "
                        "same command with --node-rank 0 on node 0, and check that "
                        f"this address can be reached from node {settings.node_rank}"
                    ) from error
            time.sleep(_RETRY_S)
        return NodeLink(
            sock,
            key,
            node_rank=settings.node_rank,
            peer_rank=0,
            peer=f"node 0 ({settings.rendezvous_address[0]})",
            timeout_s=settings.node_timeout_s,
        )

    def _connect(self, hello: Hello) -> tuple[socket.socket, bytes]:
        source = None
        if self._settings.node_host is not None:
            source = (self._settings.node_host, 0)
        sock = socket.create_connection(
            self._settings.rendezvous_address,
            timeout=_CONNECT_TIMEOUT_S,
            source_address=source,
        )
        try:
            key = greet(sock, hello, self._secret)
        except BaseException:
            sock.close()
            raise
        return sock, key

    # -- calls on the main thread

    def _set_link(self, link: NodeLink) -> None:
        self._link = link
        logger.info("joined node 0 at %s", self._settings.rendezvous)

    def _set_prepared(self, prepared: Prepared, report: NodeReport) -> None:
        self._prepared = prepared
        self._send(report)
        report_progress("waiting for the other nodes")

    def _on_message(self, message: Message) -> None:
        match message:
            case Start():
                try:
                    self._start_ranks(message)
                except (OSError, BadGreeting, Disagreement) as error:
                    self._report_failure(f"{self._name}: {error}")
            case Ready():
                report_progress("ready")
                lifecycle.report_ready({"port": 0})
                logger.info("%s: the server is ready", self._name)
            case Stop():
                self._end(0)
            case Failed(reason):
                self._fail(reason)
            case _:
                logger.warning("node 0 sent an unexpected message")

    @property
    def _name(self) -> str:
        assert self._link is not None
        host = self._settings.node_host or self._link.local_host
        return f"node {self._settings.node_rank} ({host})"

    def _start_ranks(self, start: Start) -> None:
        assert self._prepared is not None and self._link is not None
        config = self._prepared.config.model_copy(
            update={
                "engine_id": start.engine_id,
                "incarnation": start.incarnation,
                "node_host": self._settings.node_host or self._link.local_host,
                "store_port": start.store_port,
            }
        )
        sockets = {rank: self._connect_rank(config, rank) for rank in config.node_ranks}
        report_progress("loading the model")
        self._has_started = True
        self._processes.start_others(config, sockets)

    def _connect_rank(self, config: EngineConfig, rank: int) -> list[socket.socket]:
        """Returns the two connections of a rank to rank 0."""
        sockets = []
        for channel in CHANNELS:
            hello = Hello(
                version=VERSION,
                node_rank=config.node_rank,
                nnodes=config.nnodes,
                nonce=new_nonce(),
                rank=rank,
                channel=channel,
                session=config.incarnation,
            )
            sock, _ = self._connect(hello)
            tune_rank_socket(sock)
            sockets.append(sock)
        return sockets

    def _ranks_ended(self, reason: str) -> None:
        """Handles the exit of a rank.

        If all exit statuses are 0, node 0 has ended the server, and will send Stop
        soon."""
        if self._processes.have_exited_in_order():
            self._set_deadline(_STOP_DELAY_S, reason)
        else:
            self._report_failure(reason)

    def _on_signal(self, count: int) -> None:
        if count > 1:
            lifecycle.report_failure("received a signal during the shutdown: killed")
            self._end(_KILLED_STATUS)
        elif not self._has_started:
            self._fail(self._deadline_reason)
        else:
            # The ranks keep running while node 0 drains the server and then sends Stop.
            self._send(Leaving())
            self._set_deadline(
                self._settings.shutdown_grace_s + _STOP_DELAY_S,
                f"{self._name} was stopped, and node 0 did not end the server in time",
            )

    def _set_deadline(self, delay_s: float, reason: str) -> None:
        if self._deadline_s is None:
            self._deadline_s = time.monotonic() + delay_s
            self._deadline_reason = reason

    def _check_deadline(self) -> None:
        if self._deadline_s is not None and time.monotonic() >= self._deadline_s:
            self._report_failure(self._deadline_reason)

    def _report_failure(self, reason: str) -> None:
        """Ends this node with a failure, which node 0 reports to all nodes."""
        self._send(Failed(reason))
        self._fail(reason)

    def _fail(self, reason: str) -> None:
        if self._status is None:
            lifecycle.report_failure(reason)
        self._end(1)

    def _end(self, status: int) -> None:
        if self._status is None or status == _KILLED_STATUS:
            self._status = status

    def _send(self, message: Message) -> None:
        if self._link is not None:
            self._link.send(message)


def _describe(error: Exception) -> str:
    """Returns the reason of a failed start. An unexpected error is also logged."""
    if isinstance(error, StartFailure | Disagreement | ValueError | OSError):
        return str(error) or type(error).__name__
    logger.error("the start failed unexpectedly", exc_info=error)
    return f"{type(error).__name__}: {error}"


def report_progress(text: str) -> None:
    """Logs the current step of the start, and reports it to the parent process."""
    logger.info("%s", text)
    lifecycle.report_progress(text)


def run_member(settings: EngineSettings, module: str) -> NoReturn:
    """Runs a node other than node 0 until node 0, a signal or a failure ends it."""
    prepare_process(settings)
    try:
        status = Member(settings, module).run()
    except (ValueError, OSError) as error:
        lifecycle.report_failure(str(error) or type(error).__name__)
        status = 1
    # Exit directly, because Python would wait for a thread that downloads the model.
    lifecycle.exit_now(status)
