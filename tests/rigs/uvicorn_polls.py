"""Servers in a test's own process end at once: uvicorn looks every 0.1 s whether it is to end, and
whether its connections have, which at the end of a thousand tests are minutes."""

import asyncio
from typing import Any

import uvicorn.server

_NAP_S = 0.004


class _Asyncio:
    """The module, to uvicorn."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(min(delay_s, _NAP_S))


def shorten_uvicorn_polls() -> None:
    uvicorn.server.asyncio = _Asyncio()  # type: ignore[assignment]
