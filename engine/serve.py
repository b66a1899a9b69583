"""The main program of a server: runs the engine's processes, and serves HTTP in front
of them. If the engine or the HTTP server ends, the other one ends too.

    start: settings -> HTTP accepts -> model files -> rank processes -> EngineReady
           -> requests are served
    end:   SIGTERM, SIGINT, or the parent has ended -> HTTP drains -> rank processes end
           a rank process dies -> every open request gets its error -> this process ends
           with status 1

This module does not import torch: only the engine's processes load it.
"""

import asyncio
import gc
import logging
import signal
import socket
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import uvloop

from engine.http.api import KV_PARAMS_BYTES, Api, ServerHooks
from engine.http.app import create_app
from engine.nodes.rendezvous import nodes_of
from engine.prepare import StartFailure, prepare, read_for_answers
from engine.process.client import (
    LEASES,
    LEASES_POLL_INTERVAL_S,
    OFFERS,
    EngineClient,
)
from engine.process.launch import FAILED_GRACE_S, EngineProcesses
from engine.process.startup import prepare_process
from model.hub import resolve_model
from protocol.errors import EngineDied
from protocol.http.server import HttpServer, drop_unresponsive_clients
from protocol.ipc.wire import bind
from protocol.process import lifecycle
from protocol.settings.machine import cluster_secret
from protocol.settings.settings import EngineSettings

logger = logging.getLogger("baton.serve")

_START_TIMEOUT_S = 600.0  # longest time without progress during an engine's start
# Longest wait for the processes of a failed engine to exit. Their exit status is the
# reason that clients and the log receive.
_ENDING_TIMEOUT_S = 5.0
# Longest time that a drain waits for the host's KV store, which pulls gigabytes per
# second.
_STORE_TIMEOUT_S = 2.0
# Exit status if a signal arrives during the shutdown; `baton up` uses the same status.
_KILLED_STATUS = 130
RANK_MODULE = "engine.worker.worker"  # run by each rank process
# Name of the thread that finds, downloads or converts the model.
_RESOLVER_THREAD = "resolve-model"
_LISTEN_BACKLOG = 2048

START_ERRORS = (StartFailure, EngineDied, ValueError, OSError)

HooksFactory = Callable[[bytes], ServerHooks]  # its argument is the cluster secret


def run_server(
    settings: EngineSettings, hooks: HooksFactory, module: str = RANK_MODULE
) -> int:
    """Runs a server until a signal, POST /drain or a failure ends it. Returns the exit
    status.

    Args:
        hooks: makes the server's hooks, which implement the prefill or decode leg.
        module: the module that each rank process runs.
    """
    prepare_process(settings)

    async def run() -> int:
        return await _Server(settings, module, hooks).run()

    try:
        return uvloop.run(run())
    except START_ERRORS as error:
        lifecycle.report_failure(_describe_failure(error))
        if any(
            thread.name.startswith(_RESOLVER_THREAD) for thread in threading.enumerate()
        ):
            # Exit directly, because a normal exit waits until the thread has
            # downloaded the model.
            lifecycle.exit_now(1)
        return 1


def _describe_failure(error: BaseException) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


class _Server:
    """One server. It uses the event loop that runs when the object is made.

    Args:
        module: the module that each rank process runs.

    Attributes:
        failure: completes with the reason if the engine ends or hangs.
        stop_requested: completes when a shutdown is requested.
    """

    def __init__(
        self, settings: EngineSettings, module: str, hooks: HooksFactory
    ) -> None:
        self.settings = settings
        self.secret = cluster_secret(settings.cluster_secret)
        client = EngineClient(settings, caches_prefixes=settings.enable_prefix_caching)
        self.api = Api(client, settings, hooks(self.secret), self.secret)
        self.api.client.on_progress = self._report_progress
        self.api.on_drain = self._request_stop
        self.server = HttpServer(
            create_app(self.api),
            settings,
            self.api.access.certificate,
            KV_PARAMS_BYTES,
            log_level="warning",
            lifespan="off",
        )
        self.processes = EngineProcesses(module, self._engine_ended)
        self.nodes = nodes_of(
            settings, self.secret, self._engine_ended, self._on_node_leaving
        )
        # Whether this process has received SIGINT or SIGTERM. A shutdown requested by
        # another node or by POST /drain does not count: a service manager may still
        # send its first signal, which must not kill the processes.
        self._has_signal = False
        # Whether the engine ends because the server has been drained, not by a failure.
        self._ends_in_order = False
        self.loop = asyncio.get_running_loop()
        self.failure: asyncio.Future[str] = self.loop.create_future()
        self.stop_requested: asyncio.Future[None] = self.loop.create_future()

    async def run(self) -> int:
        """Serves until the server ends. Returns the exit status.

        Raises:
            StartFailure: the engine could not start, or failed later.
        """
        for number in (signal.SIGINT, signal.SIGTERM):
            self.loop.add_signal_handler(number, self._on_signal)
        try:
            await self._await_unless_stopped(asyncio.to_thread(self.nodes.open))
            listener = bind(self.settings.host, self.settings.port)
            listener.listen(_LISTEN_BACKLOG)
            drop_unresponsive_clients(listener, self.settings.client_timeout_s)
            with listener:
                serving = asyncio.ensure_future(self.server.serve(sockets=[listener]))
                try:
                    return await self._start_and_serve(listener, serving)
                finally:
                    self.server.should_exit = True
                    self.server.force_exit = True
                    await serving
        except START_ERRORS as error:
            # Also sends the reason to the other nodes, so that all nodes report it.
            reason = self.nodes.fail_here(_describe_failure(error))
            raise StartFailure(reason) from error
        except BaseException as error:
            self.nodes.fail_here(_describe_failure(error))
            raise
        finally:
            await asyncio.to_thread(self._end_processes)

    def _end_processes(self) -> None:
        grace_s = self.settings.shutdown_grace_s
        if self.settings.nnodes > 1 and self.failure.done():
            grace_s = min(grace_s, FAILED_GRACE_S)
        self.processes.stop(grace_s)
        self.nodes.close(lingers=not self.stop_requested.done())
        if self.api.metrics.tracer is not None:
            self.api.metrics.tracer.close()

    def _on_signal(self) -> None:
        """Starts an orderly shutdown. A second signal kills all processes
        immediately."""
        if self._has_signal:
            self.processes.kill()
            lifecycle.report_failure("received a signal during the shutdown: killed")
            lifecycle.exit_now(_KILLED_STATUS)
        self._has_signal = True
        self._request_stop()

    def _request_stop(self) -> None:
        if not self.stop_requested.done():
            self.stop_requested.set_result(None)

    def _on_node_leaving(self) -> None:
        self.loop.call_soon_threadsafe(self._request_stop)

    def _engine_ended(self, reason: str) -> None:
        shared_reason = reason
        if not self._ends_in_order:
            shared_reason = self.nodes.fail(reason)

        def set_failure() -> None:
            if not self.failure.done():
                self.failure.set_result(shared_reason)

        self.loop.call_soon_threadsafe(set_failure)

    def _report_progress(self, text: str) -> None:
        self.api.client.progress = text
        logger.info("%s", text)
        lifecycle.report_progress(text)

    async def _start_and_serve(
        self, listener: socket.socket, serving: asyncio.Future[None]
    ) -> int:
        api = self.api
        client = api.client
        client.progress = "looking for the model"
        model_dir = await self._await_unless_stopped(self._resolve_model())
        prepared = prepare(self.settings, self.secret, model_dir)
        launch = await self._await_unless_stopped(
            asyncio.to_thread(self.nodes.meet, prepared, self._report_progress)
        )
        with self.processes.start(launch) as link:
            self._report_progress("loading the model")
            # The tokenizer is read while the weights load, so that errors in its files
            # are reported early.
            tokenizer, fingerprint = await asyncio.to_thread(read_for_answers, prepared)
            # This runs in a thread, because thousands of special tokens take seconds.
            await asyncio.to_thread(
                api.set_model, tokenizer, fingerprint, prepared.defaults
            )
            # The client starts last, because requests are sent to the engine as soon as
            # the engine is ready.
            await client.start(link)
            watching = asyncio.create_task(api.access.watch())
            try:
                await api.grammars.start()
                await self._await_unless_stopped(client.wait_ready(_START_TIMEOUT_S))
                return await self._serve(listener.getsockname()[1], serving)
            finally:
                watching.cancel()
                api.grammars.close()
                await client.close()

    def _resolve_model(self) -> asyncio.Future[Any]:
        """Starts the thread that finds, downloads or converts the model."""

        def report(text: str) -> None:
            self.loop.call_soon_threadsafe(self._report_progress, text)

        resolve = partial(
            resolve_model, self.settings.model, self.settings.revision, progress=report
        )
        pool = ThreadPoolExecutor(1, thread_name_prefix=_RESOLVER_THREAD)
        resolving = self.loop.run_in_executor(pool, resolve)
        # A server that is stopped does not wait for this thread.
        pool.shutdown(wait=False)
        return resolving

    async def _await_unless_stopped(self, work: Any) -> Any:
        """Awaits `work` and returns its result. If the server is stopped or its engine
        ends first, cancels `work` and raises StartFailure."""
        task = asyncio.ensure_future(work)
        await asyncio.wait(
            {task, self.stop_requested, self.failure},
            return_when=asyncio.FIRST_COMPLETED,
        )
        if task.done():
            return task.result()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if self.failure.done():
            raise StartFailure(self.failure.result())
        raise StartFailure("stopped before it was ready")

    async def _serve(self, port: int, serving: asyncio.Future[None]) -> int:
        """Serves requests until a shutdown is requested or the engine fails, then shuts
        down in order. Called when the engine is ready. Returns the exit status, or
        raises StartFailure if the engine failed.

        Args:
            serving: completes when the HTTP server has ended.
        """
        client = self.api.client
        gc.collect()
        # Garbage collection skips all existing objects from now on, because a scan of
        # them would delay every stream.
        gc.freeze()
        url = f"{self.api.access.certificate.scheme}://{self.settings.host}:{port}"
        logger.info("%s serves at %s", self.settings.role, url)
        # If the engine has sent no ready message, it has failed, and `failure`
        # completes soon.
        geometry = client.ready.geometry if client.ready else {}
        lifecycle.report_ready(
            {"port": port, "side_channel_port": geometry.get("side_channel_port", 0)}
        )
        self.nodes.set_ready()
        unregister = self._register(port, client)
        watching = asyncio.ensure_future(self._watch_for_hang(client))
        await _wait_for_first(serving, self.stop_requested, self.failure)
        watching.cancel()
        # Unregister first, so that proxies send no new requests to this server.
        await unregister()
        deadline_s = self.loop.time() + self.settings.shutdown_grace_s / 2
        handing_over = asyncio.ensure_future(client.hand_over(deadline_s))
        await _wait_for_first(serving, self.failure, handing_over)
        handing_over.cancel()
        # No new connections are accepted; open requests may finish during the drain.
        self.server.should_exit = True
        await self._drain(serving, client, deadline_s)
        failure = self.failure.result() if self.failure.done() else None
        if failure is not None:
            # Clients receive this error instead of the error about the shutdown.
            client.fail(failure)
        self._ends_in_order = failure is None
        # Ends the engine, and ends every open request with an error.
        await client.close()
        await serving
        if failure is not None:
            raise StartFailure(failure)
        return 0

    def _register(
        self, port: int, client: EngineClient
    ) -> Callable[[], Awaitable[None]]:
        """Registers this server with every proxy that the settings name. Returns a
        function that removes the registrations."""
        if not self.settings.register_with:
            return partial(asyncio.sleep, 0)
        # Imported here, because the import of aiohttp takes a fifth of this process's
        # start time.
        from engine.http.registrar import create_registrar

        registrar = create_registrar(self.settings, port, client.ready, self.secret)
        registrar.start()
        return registrar.leave

    async def _drain(
        self, serving: asyncio.Future[None], client: EngineClient, deadline_s: float
    ) -> None:
        """Waits until open requests have finished, decode servers have pulled the KV
        that is leased to them, and the KV store has pulled the KV that is offered to
        it. Stops waiting when the engine fails or the deadline has passed."""
        timeout_s = max(0.0, deadline_s - self.loop.time())
        await _wait_for_first(serving, self.failure, timeout_s=timeout_s)
        # The statistics that count a request's leases arrive after the end of the
        # request.
        await asyncio.sleep(LEASES_POLL_INTERVAL_S)
        store_deadline_s = min(deadline_s, self.loop.time() + _STORE_TIMEOUT_S)
        while not self.failure.done():
            now_s = self.loop.time()
            has_leases = client.stats.get(LEASES, 0) and now_s < deadline_s
            has_offers = client.stats.get(OFFERS, 0) and now_s < store_deadline_s
            if not (has_leases or has_offers):
                return
            await asyncio.sleep(LEASES_POLL_INTERVAL_S)

    async def _watch_for_hang(self, client: EngineClient) -> None:
        """Reports the engine as failed if its processes live but make no progress. For
        example, a rank is stopped, or a GPU, a collective or the engine's exit hangs.

        Open requests then get an error, and this process exits, so that its supervisor
        can restart it. The silence of the engine is counted in checks, not in seconds,
        because no checks are made while this process or the whole machine is stopped.
        """
        timeout_s = self.settings.hang_timeout_s
        interval_s = min(1.0, timeout_s / 4)
        num_silent = 0
        while not client.is_lost and num_silent * interval_s < timeout_s:
            await asyncio.sleep(interval_s)
            num_silent = num_silent + 1 if client.is_stalled() else 0
        reason = (
            f"the engine has requests and sent nothing for {timeout_s:g} s "
            "(--hang-timeout-s)"
        )
        if client.is_lost:
            await asyncio.sleep(_ENDING_TIMEOUT_S)
            reason = client.failure or (
                "the engine closed its connection, but its process does not exit"
            )
        self._engine_ended(reason)


async def _wait_for_first(
    *futures: asyncio.Future[Any], timeout_s: float | None = None
) -> None:
    """Waits until one of the futures is done, or the timeout has passed."""
    await asyncio.wait(
        set(futures), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
    )
