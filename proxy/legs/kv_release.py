"""Releases the KV that servers hold for requests that no longer need the KV."""

import asyncio
import contextlib

import msgspec

from protocol.kv_params import RELEASE_PATH
from protocol.process.logging import get_logger
from proxy.membership import Server
from proxy.upstream import Headers, HttpUpstream, UpstreamError

logger = get_logger(__name__)

RELEASE_TIMEOUT_S = 30.0  # without a release, the KV stays until its lease expires
# Limit on releases in flight. KV that is not released is freed when its lease ends.
MAX_RELEASES = 1024
CLOSE_TIMEOUT_S = 2.0


class KVReleaser:
    """Sends releases in background tasks, so that no client waits for them."""

    def __init__(self, upstream: HttpUpstream) -> None:
        self._upstream = upstream
        self._tasks: set[asyncio.Task[None]] = set()

    def release(
        self, server: Server, headers: Headers, params: object, after_s: float = 0.0
    ) -> None:
        """Report to a server that no other server will pull the KV of a request.

        Nothing is sent to vLLM's servers, which have no endpoint for releases. They
        free the KV when its lease ends.

        Args:
            headers: the client's headers that are forwarded to servers.
            params: the `kv_transfer_params` that name the KV.
            after_s: delay of the release in seconds.
        """
        if server.health.is_foreign or len(self._tasks) >= MAX_RELEASES:
            return
        body = msgspec.json.encode({"kv_transfer_params": params})
        task = asyncio.create_task(self._send(server.url, headers, body, after_s))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(
        self, url: str, headers: Headers, body: bytes, after_s: float
    ) -> None:
        await asyncio.sleep(after_s)
        try:
            async with asyncio.timeout(RELEASE_TIMEOUT_S):
                response = await self._upstream.send(
                    url, "POST", RELEASE_PATH, headers=headers, body=body
                )
                await response.read()
        except (UpstreamError, TimeoutError) as error:
            logger.info(
                "KV at %s was not released and stays until its lease ends: %r",
                url,
                error,
            )

    async def close(self) -> None:
        """Wait for releases in flight, for at most CLOSE_TIMEOUT_S."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await asyncio.gather(*self._tasks, return_exceptions=True)
