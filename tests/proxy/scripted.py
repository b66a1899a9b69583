"""A server that sends exactly the scripted bytes, and an HTTP client for it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from proxy.upstream import HttpUpstream

Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter


async def read_request(reader: Reader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    _, _, rest = head.lower().partition(b"content-length:")
    length = int(rest.split(b"\r\n")[0]) if rest else 0
    return head + await reader.readexactly(length)


class Script:
    """A server that answers its n-th request with the n-th of `answers`, and counts
    connections.
    """

    def __init__(
        self, *answers: bytes | Callable[[Reader, Writer], Awaitable[None]]
    ) -> None:
        self._answers = list(answers)
        self.requests: list[bytes] = []
        self.num_connections = 0
        self.num_closed = 0
        self.url = ""

    async def __call__(self, reader: Reader, writer: Writer) -> None:
        self.num_connections += 1
        try:
            while self._answers:
                self.requests.append(await read_request(reader))
                answer = self._answers.pop(0)
                if not isinstance(answer, bytes):
                    await answer(reader, writer)
                    return
                writer.write(answer)
            await reader.read()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.num_closed += 1
            writer.close()


@asynccontextmanager
async def serving(script: Script, **options: float) -> AsyncIterator[HttpUpstream]:
    server = await asyncio.start_server(script, "127.0.0.1", 0)
    script.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    client = HttpUpstream(
        **{"connect_timeout_s": 5.0, "read_timeout_s": 10.0, **options}
    )
    try:
        yield client
    finally:
        await client.close()
        server.close()
        await server.wait_closed()


OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nX-A: 1\r\n\r\nok"


async def until_closed(script: Script, num_closed: int) -> None:
    """Wait until this many connections of the server have ended."""
    while script.num_closed < num_closed:
        await asyncio.sleep(0.002)
