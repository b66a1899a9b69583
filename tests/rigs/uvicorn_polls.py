"""Shortens the polling intervals of uvicorn, so that servers in a test's process end
quickly.

Every 0.1 s, uvicorn checks whether it must stop and whether its connections have ended.
Over a thousand tests, these waits add up to minutes.
"""

import asyncio
from typing import Any

import uvicorn.server

_POLL_S = 0.004


class _Asyncio:
    """Replaces the module asyncio in uvicorn. Its `sleep` takes at most _POLL_S
    seconds.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(min(delay_s, _POLL_S))


def shorten_uvicorn_polls() -> None:
    uvicorn.server.asyncio = _Asyncio()  # type: ignore[assignment]
