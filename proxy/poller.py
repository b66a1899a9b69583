"""Asks every server of the fleet whether it is ready, again and again."""

import asyncio
import contextlib
import random
import time

import msgspec

from proxy.membership import Fleet, Server
from proxy.upstream import Upstream, UpstreamError

JITTER = 0.2  # of the interval, so that many proxies do not ask in step


class Poller:
    """One task per server; a server that hangs delays no other's check."""

    def __init__(
        self, fleet: Fleet, upstream: Upstream, *, interval_s: float, timeout_s: float
    ) -> None:
        self._fleet = fleet
        self._upstream = upstream
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._tasks: dict[Server, asyncio.Task[None]] = {}

    def start(self) -> None:
        """Polls the servers that are in the fleet now; call again when it has changed."""
        servers = set(self._fleet.servers())
        for server in servers - self._tasks.keys():
            self._tasks[server] = asyncio.create_task(self._poll(server), name=f"poll {server}")
        for server in self._tasks.keys() - servers:
            self._tasks.pop(server).cancel()

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _poll(self, server: Server) -> None:
        while True:
            started_at = time.monotonic()
            ready, reason = await self._ask(server)
            self._fleet.polled(server, ready=ready, reason=reason, started_at=started_at)
            await asyncio.sleep(self._interval_s * random.uniform(1 - JITTER, 1 + JITTER))

    async def _ask(self, server: Server) -> tuple[bool, str]:
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._upstream.send(server.url, "GET", "/ready")
                body = await response.read()
        except UpstreamError as error:
            return False, f"{type(error).__name__.lower()}: {error}"
        except TimeoutError:
            return False, f"no answer within {self._timeout_s:g} s"
        return response.status == 200, _reason(response.status, body)


def _reason(status: int, body: bytes) -> str:
    """Why a server says that it is not ready."""
    try:
        said = msgspec.json.decode(body)
    except msgspec.DecodeError:
        said = None
    if isinstance(said, dict):
        error = said.get("error")
        text = error.get("message") if isinstance(error, dict) else said.get("reason")
        if isinstance(text, str):
            return text[:200]
    return f"status {status}"
