"""A proxy at its limit of file descriptors: new connections wait, and none is reset."""

import asyncio
import queue
import sys

import pytest

from protocol.process import lifecycle

LIMIT = 64
NUM_CONNECTIONS = 3 * LIMIT
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
TIMEOUT_S = 60.0
# A program like `python -m proxy`, but with a low limit of file descriptors.
PROXY = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({LIMIT}, {LIMIT}))
from protocol.http import connections
if sys.argv[1] == "the kernel's":
    connections.max_connections = lambda _: 1 << 20
from proxy.__main__ import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize("limit", ["its own", "the kernel's"])
async def test_connections_beyond_the_limit_wait_and_are_answered(limit):
    events: queue.Queue[lifecycle.Event] = queue.Queue()
    argv = (limit, "--port", "0", "--decode", "http://127.0.0.1:1")
    child = lifecycle.spawn(
        (sys.executable, "-c", PROXY, *argv), name="proxy", on_event=events.put
    )
    try:
        ready = await asyncio.to_thread(events.get, timeout=TIMEOUT_S)
        assert ready.kind == "ready", child.tail
        port = ready.value["port"]
        connections = [
            await asyncio.open_connection("127.0.0.1", port)
            for _ in range(NUM_CONNECTIONS)
        ]
        for _, writer in connections:
            writer.write(HEALTH)
        tasks = [asyncio.ensure_future(read_status(*each)) for each in connections]
        async with asyncio.timeout(TIMEOUT_S):
            statuses = await asyncio.gather(*tasks)
        assert statuses == [b"HTTP/1.1 200 OK\r\n"] * NUM_CONNECTIONS
    finally:
        child.kill()


async def read_status(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> bytes:
    """Return the first line of a response, and close the connection."""
    status = await reader.readline()
    writer.close()
    return status
