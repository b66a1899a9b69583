"""Timeouts of a busy event loop."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

TURNS = 4  # parts of a timeout


@asynccontextmanager
async def within(timeout_s: float | None) -> AsyncIterator[None]:
    """asyncio.timeout for answers of others, which a loop that is late does not hold against them.

    A turn of a loop with hundreds of requests may take longer than the timeout. The timer is then
    due before anybody has looked whether the answer came meanwhile. So time is up after a number of
    parts of it, between any two of which the loop has looked.

    Raises:
        TimeoutError: nothing came for `timeout_s`, or for longer where the loop was late.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as timeout:
        if timeout_s is None:
            yield
            return
        part_s, turns = timeout_s / TURNS, 0
        timer: asyncio.TimerHandle

        def wait_on() -> None:
            nonlocal timer, turns
            if turns == TURNS:
                timeout.reschedule(loop.time())
                return
            turns += 1
            timer = loop.call_later(part_s, wait_on)

        wait_on()
        try:
            yield
        finally:
            timer.cancel()
