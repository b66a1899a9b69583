"""Timeouts: what is late, and what only seems so."""

import asyncio
import socket
import time
from collections.abc import Callable

import pytest
import uvloop

from proxy.waiting import within

LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


@pytest.mark.parametrize("make_loop", LOOPS)
def test_what_came_while_the_loop_was_busy_is_not_late(
    make_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def test() -> None:
        here, there = socket.socketpair()
        with there:
            reader, writer = await asyncio.open_connection(sock=here)

            def be_busy() -> None:
                time.sleep(0.1)
                there.send(b"x")

            async with within(0.02):
                asyncio.get_running_loop().call_soon(be_busy)
                assert await reader.readexactly(1) == b"x"
            writer.close()
            await writer.wait_closed()

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(test())


@pytest.mark.parametrize("make_loop", LOOPS)
def test_what_does_not_come_is_late(
    make_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def test() -> None:
        with pytest.raises(TimeoutError):
            async with within(0.02):
                await asyncio.Event().wait()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02), within(None):
                await asyncio.Event().wait()

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(test())


async def test_being_cancelled_is_no_timeout() -> None:
    async def wait() -> None:
        async with within(60.0):
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
