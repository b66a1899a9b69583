"""A server's main program: engine processes behind, HTTP in front, both ending together.

    start: settings -> HTTP accepts -> model files -> rank processes -> EngineReady -> served
    end:   SIGTERM, SIGINT, or the parent gone -> HTTP drains -> rank processes end
           a rank process dies -> every open request gets its error -> this process ends, status 1

No torch here: the engine's processes have it.
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
from engine.prepare import StartFailure, prepare, read_for_answers
from engine.process.client import LEASES, LEASES_POLL_INTERVAL_S, EngineClient
from engine.process.launch import EngineProcesses
from model.hub import resolve_model
from protocol.errors import EngineDied
from protocol.http.acceptor import raise_file_limit
from protocol.http.connections import HttpServer, bound_clients
from protocol.ipc.wire import bind
from protocol.process import lifecycle
from protocol.process.logging import open_standard_streams, setup_logging
from protocol.settings.machine import cluster_secret
from protocol.settings.settings import EngineSettings, describe

logger = logging.getLogger("baton.serve")

_START_TIMEOUT_S = 600.0  # of an engine, without progress
_ENDING_S = 5.0  # for the processes of an engine that failed or hung up
_KILLED = 130  # exit status, as of `baton up`
RANK = "engine.worker.worker"  # the program of a rank process
_RESOLVER = "resolve-model"  # the thread that finds, downloads or converts the model

HooksFactory = Callable[[bytes], ServerHooks]  # from the cluster secret


def run_server(
    settings: EngineSettings, hooks: HooksFactory, module: str = RANK
) -> int:
    """Serves until told to end. Returns the process's exit status.

    Args:
        hooks: makes what the HTTP side adds for the legs of a request.
        module: what each rank process runs.
    """
    open_standard_streams()
    lifecycle.watch_parent()
    setup_logging(settings.role, level=settings.log_level)
    raise_file_limit()
    logger.info("settings %s", describe(settings))

    async def run() -> int:
        return await _Server(settings, module, hooks).run()

    try:
        return uvloop.run(run())
    except (StartFailure, EngineDied, ValueError, OSError) as error:
        lifecycle.report_failure(_told(error))
        if any(thread.name.startswith(_RESOLVER) for thread in threading.enumerate()):
            lifecycle.exit_now(
                1
            )  # told to end: Python would wait for the threads of a download
        return 1


def _told(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


class _Server:
    """One server, on the running event loop."""

    def __init__(
        self, settings: EngineSettings, module: str, hooks: HooksFactory
    ) -> None:
        self.settings = settings
        self.secret = cluster_secret(settings.cluster_secret)
        client = EngineClient(settings, caches_prefixes=settings.enable_prefix_caching)
        self.api = Api(client, settings, hooks(self.secret), self.secret)
        self.api.client.on_progress = self._tell_progress
        self.api.on_drain = self._end
        how = settings, self.api.access.certificate, KV_PARAMS_BYTES
        self.server = HttpServer(
            create_app(self.api), *how, log_level="warning", lifespan="off"
        )
        self.processes = EngineProcesses(module, self._engine_ended)
        self.loop = asyncio.get_running_loop()
        self.failure: asyncio.Future[str] = self.loop.create_future()
        self.stop: asyncio.Future[None] = self.loop.create_future()  # done: told to end

    async def run(self) -> int:
        for number in (signal.SIGINT, signal.SIGTERM):
            self.loop.add_signal_handler(number, self._told_to_end)
        try:
            listener = bind(self.settings.host, self.settings.port)
            listener.listen(2048)
            bound_clients(listener, self.settings.client_timeout_s)
            with listener:
                serving = asyncio.ensure_future(self.server.serve(sockets=[listener]))
                try:
                    return await self._start_and_serve(listener, serving)
                finally:
                    self.server.should_exit = self.server.force_exit = True
                    await serving
        finally:
            await asyncio.to_thread(self.processes.stop, self.settings.shutdown_grace_s)

    def _told_to_end(self) -> None:
        """The first signal asks for an end in order; the next one waits for nothing."""
        if self.stop.done():
            self.processes.kill()
            lifecycle.report_failure("told twice to end: killed")
            lifecycle.exit_now(_KILLED)
        self._end()

    def _end(self) -> None:
        if not self.stop.done():
            self.stop.set_result(None)

    def _engine_ended(self, reason: str) -> None:
        def tell() -> None:
            if not self.failure.done():
                self.failure.set_result(reason)

        self.loop.call_soon_threadsafe(tell)

    def _tell_progress(self, text: str) -> None:
        self.api.client.progress = text
        logger.info("%s", text)
        lifecycle.report_progress(text)

    async def _start_and_serve(
        self, listener: socket.socket, serving: asyncio.Future[None]
    ) -> int:
        settings, api, client = self.settings, self.api, self.api.client
        client.progress = "looking for the model"

        def tell(text: str) -> None:
            self.loop.call_soon_threadsafe(self._tell_progress, text)

        resolve = partial(
            resolve_model, settings.model, settings.revision, progress=tell
        )
        thread = ThreadPoolExecutor(1, thread_name_prefix=_RESOLVER)
        resolving = self.loop.run_in_executor(thread, resolve)
        thread.shutdown(
            wait=False
        )  # it ends with that; nobody waits for it who is told to end
        model_dir = await self._or_stop(resolving)
        prepared = prepare(self.settings, self.secret, model_dir)
        with self.processes.start(prepared.config) as link:
            self._tell_progress("loading the model")
            # Before the weights are there: what is wrong with these files is known in a second.
            tokenizer, fingerprint = await asyncio.to_thread(read_for_answers, prepared)
            # Not on the event loop: to look through thousands of special tokens takes seconds.
            await asyncio.to_thread(
                api.set_model, tokenizer, fingerprint, prepared.defaults
            )
            await client.start(
                link
            )  # not before: an engine that is ready is asked at once
            watching = asyncio.create_task(api.access.watch())
            try:
                await api.grammars.start()
                await self._or_stop(client.wait_ready(_START_TIMEOUT_S))
                return await self._serve(listener.getsockname()[1], serving)
            finally:
                watching.cancel()
                api.grammars.close()
                await client.close()

    async def _or_stop(self, work: Any) -> Any:
        """Awaits `work`, unless the server is told to end or its engine dies first."""
        task = asyncio.ensure_future(work)
        await asyncio.wait(
            {task, self.stop, self.failure}, return_when=asyncio.FIRST_COMPLETED
        )
        if task.done():
            return task.result()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if self.failure.done():
            raise StartFailure(self.failure.result())
        raise StartFailure("told to end before it was ready")

    async def _serve(self, port: int, serving: asyncio.Future[None]) -> int:
        client = self.api.client
        gc.collect()
        gc.freeze()  # a look through all of this would hold up every stream
        where = f"{self.api.access.certificate.scheme}://{self.settings.host}:{port}"
        logger.info("%s serves at %s", self.settings.role, where)
        lifecycle.report_ready({"port": port})
        leave = self._register(port, client)
        hung = asyncio.ensure_future(self._watch_for_hang(client))
        ends: set[asyncio.Future[Any]] = {serving, self.stop, self.failure}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        hung.cancel()
        await leave()  # first of all: what proxies send from now on would be refused
        until = self.loop.time() + self.settings.shutdown_grace_s / 2
        handing = asyncio.ensure_future(client.hand_over(until))
        ends = {serving, self.failure, handing}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        handing.cancel()
        self.server.should_exit = (
            True  # accepts nothing more; open requests may finish for a while
        )
        await self._drain(serving, client, until)
        failed = self.failure.result() if self.failure.done() else None
        if failed is not None:
            client.fail(
                failed
            )  # the clients are told that, not that the server is ending
        await (
            client.close()
        )  # every request still open gets its one error; the engine ends too
        await serving
        if failed is not None:
            raise StartFailure(failed)
        return 0

    def _register(
        self, port: int, client: EngineClient
    ) -> Callable[[], Awaitable[None]]:
        """Registers with every proxy that the settings name; the result takes that back."""
        if not self.settings.register_with:
            return partial(asyncio.sleep, 0)
        from engine.http.registrar import (
            create_registrar,  # aiohttp: a fifth of this process's start
        )

        registrar = create_registrar(self.settings, port, client.ready, self.secret)
        registrar.start()
        return registrar.leave

    async def _drain(
        self, serving: asyncio.Future[None], client: EngineClient, until: float
    ) -> None:
        """Lets open requests finish, and decode servers come for the KV they were promised, while
        the engine lives and for half of the grace time."""
        limit_s = max(0.0, until - self.loop.time())
        ends: set[asyncio.Future[Any]] = {serving, self.failure}
        await asyncio.wait(ends, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        while client.stats.get(LEASES, 0) and not self.failure.done():
            if self.loop.time() >= until:
                return
            await asyncio.sleep(LEASES_POLL_INTERVAL_S)

    async def _watch_for_hang(self, client: EngineClient) -> None:
        """Gives up an engine whose processes live but do not get on: a stopped rank, a GPU or a
        collective that hangs, or an end that does. Its requests get their error, and whoever runs
        us starts it anew. Looks are counted, not seconds: where this process was stopped, or all of
        them were, the engine has done nothing wrong."""
        limit_s = self.settings.hang_timeout_s
        look_s, num_silent = min(1.0, limit_s / 4), 0
        while not client.is_lost and num_silent * look_s < limit_s:
            await asyncio.sleep(look_s)
            num_silent = num_silent + 1 if client.is_stalled() else 0
        reason = f"the engine has requests and said nothing for {limit_s:g} s (--hang-timeout-s)"
        if client.is_lost:
            await asyncio.sleep(_ENDING_S)
            reason = (
                client.failure or "the engine hung up, and its process does not end"
            )
        self._engine_ended(reason)
