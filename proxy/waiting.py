"""Timeouts of a busy event loop."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from protocol.http.countdown import Countdown


@asynccontextmanager
async def within(timeout_s: float | None) -> AsyncIterator[None]:
    """asyncio.timeout for answers of others, which a loop that is late does not hold against them.

    Raises:
        TimeoutError: nothing came for `timeout_s`, or for longer where the loop was late.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as timeout:
        if timeout_s is None:
            yield
            return
        countdown = Countdown(loop, timeout_s, lambda: timeout.reschedule(loop.time()))
        try:
            yield
        finally:
            countdown.cancel()
