"""Short polls of uvicorn, so that servers in a test's own process end quickly.

uvicorn checks every 0.1 s whether it is to end and whether its connections have ended.
Over a thousand tests these waits add up to minutes.
"""

import asyncio
from typing import Any

import uvicorn.server

_POLL_S = 0.004


class _Asyncio:
    """The module asyncio as uvicorn sees it, with a short sleep."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(min(delay_s, _POLL_S))


def shorten_uvicorn_polls() -> None:
    uvicorn.server.asyncio = _Asyncio()  # type: ignore[assignment]
