"""The malformed requests, sent to proxy, prefill and decode server, and a chain."""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import h11
import pytest

from engine.http.legs.either_leg import EitherLeg
from engine.text.tokenizer import Tokenizer
from protocol.messages import AddRequest, TokenDelta
from tests.engine.malformed import HEALTH, MAYBE, ROWS, Row
from tests.proxy.fakes import KV_PARAMS, Rig
from tests.rigs.http_server import Running, serving
from tests.rigs.offers import offer

TIMEOUT_S = 0.5  # for clients that send too little
AT_ONCE = 32
SECRET = b"secret"


# The prompts that each of the servers behind a port received.
Prompts = Callable[[], list[list[str]]]


async def read_answer(reader: asyncio.StreamReader, has_body: bool) -> str:
    """Read an answer and return its status; empty at the end of the connection."""
    try:
        reported = (await reader.readuntil(b"\r\n\r\n"))[:-4]
    except asyncio.IncompleteReadError as error:
        return repr(error.partial) if error.partial else ""
    except ConnectionError:
        return ""
    first, *rest = reported.split(b"\r\n")
    headers = dict(line.lower().split(b": ", 1) for line in rest)
    status = first.split()[1].decode()
    if status == "100":
        return status
    if headers.get(b"x-request-id") == b"trailer":
        return f"{status} with a trailer"
    length = int(headers[b"content-length"])
    body = await reader.readexactly(length) if has_body else b""
    if b"x-request-id" not in headers and status != "200":
        return f"{status} without an id"
    if body and status != "200":
        error = json.loads(body)["error"]
        if error["type"] != "invalid_request_error" or not error["message"]:
            return f"{status} and {error}"
    return status if has_body else status + "-"


async def answers_to(row: Row, port: int, tag: bytes) -> str:
    """Return the outcome in the table's form: the answers, and `!` if the connection is
    closed.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    actual: list[str] = []
    try:
        writer.write(row.raw.replace(b"@@@@", tag))
        expected = row.expected.rstrip("!").split()
        for want in expected:
            actual.append(await read_answer(reader, not want.endswith("-")))
        if not row.expected.endswith("!"):
            writer.write(HEALTH)
        while status := await read_answer(reader, True):
            if status == "200" and not row.expected.endswith("!"):
                return " ".join(actual)
            actual.append(status)
        return " ".join(filter(None, actual)) + "!"
    finally:
        writer.close()


async def failures(port: int, prompts: Prompts) -> list[str]:
    """Return the rows with another outcome than the table's, and that outcome."""
    turn = asyncio.Semaphore(AT_ONCE)

    async def answers(row: Row, tag: str) -> str:
        async with turn:
            try:
                async with asyncio.timeout(15):
                    return await answers_to(row, port, tag.encode())
            except (
                TimeoutError,
                asyncio.IncompleteReadError,
                KeyError,
                ValueError,
            ) as error:
                return repr(error)

    tags = [f"~{at:03}" for at in range(len(ROWS))]
    actual = await asyncio.gather(*map(answers, ROWS, tags))
    request = prompts()
    wrong = [
        text
        for texts in request
        for text in texts
        if not any(tag in text for tag in tags)
    ]
    for row, tag, reported in zip(ROWS, tags, actual, strict=True):
        times = {sum(tag in text for text in texts) for texts in request}
        if not re.fullmatch(row.expected, reported) or not times <= (
            {0, 1} if row.num_completions == MAYBE else {row.num_completions}
        ):
            wrong.append(
                f"{row.name}: {reported} {times}, expected {row.expected} "
                f"{row.num_completions}"
            )
    return wrong


@dataclass
class Recorder:
    """A strict server with another parser. It records the requests that it receives."""

    answer: Any
    bodies: list[bytes] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    async def __call__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        connection = h11.Connection(h11.SERVER)
        body = bytearray()
        try:
            while True:
                match connection.next_event():
                    case h11.NEED_DATA:
                        connection.receive_data(await reader.read(65536))
                    case h11.Request() as request:
                        head = request
                        body = bytearray()
                    case h11.Data(data=data):
                        body += data
                    case h11.EndOfMessage():
                        if head.target == b"/v1/completions":
                            self.bodies.append(bytes(body))
                        reported = json.dumps(
                            self.answer if head.method == b"POST" else {}
                        ).encode()
                        headers = [("content-length", str(len(reported)))]
                        for event in (
                            h11.Response(status_code=200, headers=headers),
                            h11.Data(data=reported),
                            h11.EndOfMessage(),
                        ):
                            writer.write(connection.send(event) or b"")
                        connection.start_next_cycle()
                    case _:
                        return
        except h11.RemoteProtocolError as error:
            self.problems.append(str(error))
        except ConnectionError:
            pass
        finally:
            writer.close()


@contextlib.asynccontextmanager
async def proxying(prefill: object, decode: object) -> AsyncIterator[int]:
    """Start a proxy in front of these servers; return its port once both are ready."""
    limits = {
        "client_timeout_s": TIMEOUT_S,
        "max_body_bytes": 20_000,
        "disaggregate": "always",
    }
    async with Rig([Running(prefill)], [Running(decode)], **limits) as rig:
        yield rig.listener.getsockname()[1]


async def says(request: AddRequest) -> AsyncIterator[TokenDelta]:
    params = (
        offer(SECRET, request.token_ids, request.sampling)
        if request.retain_kv
        else None
    )
    yield TokenDelta(request_id=request.request_id, token_ids=[42])
    end = {"finish_reason": "length", "kv_transfer_params": params}
    yield TokenDelta(request_id=request.request_id, **end)


@contextlib.asynccontextmanager
async def recorded() -> AsyncIterator[tuple[int, Prompts]]:
    """A proxy between two recorders."""
    recorders = [Recorder({"kv_transfer_params": KV_PARAMS}), Recorder({"text": "x"})]
    async with contextlib.AsyncExitStack() as stack:
        urls = []
        for recorder in recorders:
            server = await asyncio.start_server(recorder, "127.0.0.1", 0)
            stack.callback(server.close)
            urls.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        async with proxying(*urls) as port:
            yield port, lambda: [[b.decode() for b in one.bodies] for one in recorders]
    assert [problem for one in recorders for problem in one.problems] == []


@contextlib.asynccontextmanager
async def served(
    tokenizer: Tokenizer, *roles: str
) -> AsyncIterator[tuple[int, Prompts]]:
    """Start servers of these roles, with a proxy in front of several."""
    hooks = EitherLeg(SECRET, "recompute")
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        options = {"hooks": hooks, "client_timeout_s": TIMEOUT_S}
        servers = [
            await enter(serving(tokenizer, says, role=role, **options))
            for role in roles
        ]
        urls = [server.http.base_url for server in servers]
        port = await enter(proxying(*urls)) if urls[1:] else servers[0].port
        decode = tokenizer.decode
        yield (
            port,
            lambda: [
                [decode(add.token_ids) for add in s.engine.added] for s in servers
            ],
        )


@pytest.mark.parametrize(
    "roles",
    [(), ("prefill",), ("decode",), ("prefill", "decode")],
    ids=lambda roles: "-".join(roles) or "proxy",
)
async def test_proxy_and_servers_parse_each_request_alike(roles, tokenizer):
    async with served(tokenizer, *roles) if roles else recorded() as (port, prompts):
        wrong = await failures(port, prompts)
    assert not wrong, "\n" + "\n".join(wrong)


def test_row_names_are_unique():
    assert len({row.name for row in ROWS}) == len(ROWS) >= 140
