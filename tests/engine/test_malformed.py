"""Sends the requests of malformed.py to a proxy, to a prefill and a decode server, and
to a proxy in front of both.
"""

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
MAX_CONCURRENT = 32
SECRET = b"secret"


# A function that returns the prompts that each server behind a port has received.
Prompts = Callable[[], list[list[str]]]


async def read_answer(reader: asyncio.StreamReader, has_body: bool) -> str:
    """Read an answer. Return the status and any protocol error of the answer. An empty
    result means that the connection has ended."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n"))[:-4]
    except asyncio.IncompleteReadError as error:
        return repr(error.partial) if error.partial else ""
    except ConnectionError:
        return ""
    first, *rest = head.split(b"\r\n")
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


async def send_row(row: Row, port: int, tag: bytes) -> str:
    """Send a row. Return the outcome in the form of the table: the answers, and `!` if
    the connection is closed.
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


async def find_failures(port: int, prompts: Prompts) -> list[str]:
    """Send all rows. Return a line for each row with an unexpected outcome."""
    slots = asyncio.Semaphore(MAX_CONCURRENT)

    async def answers(row: Row, tag: str) -> str:
        async with slots:
            try:
                async with asyncio.timeout(15):
                    return await send_row(row, port, tag.encode())
            except (
                TimeoutError,
                asyncio.IncompleteReadError,
                KeyError,
                ValueError,
            ) as error:
                return repr(error)

    tags = [f"~{at:03}" for at in range(len(ROWS))]
    actual = await asyncio.gather(*map(answers, ROWS, tags))
    received = prompts()
    wrong = [
        text
        for texts in received
        for text in texts
        if not any(tag in text for tag in tags)
    ]
    for row, tag, outcome in zip(ROWS, tags, actual, strict=True):
        counts = {sum(tag in text for text in texts) for texts in received}
        if not re.fullmatch(row.expected, outcome) or not counts <= (
            {0, 1} if row.num_completions == MAYBE else {row.num_completions}
        ):
            wrong.append(
                f"{row.name}: {outcome} {counts}, expected {row.expected} "
                f"{row.num_completions}"
            )
    return wrong


@dataclass
class Recorder:
    """A strict HTTP server that parses with h11 and records the completions' bodies."""

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
                    case h11.Request() as received:
                        head = received
                        body = bytearray()
                    case h11.Data(data=data):
                        body += data
                    case h11.EndOfMessage():
                        if head.target == b"/v1/completions":
                            self.bodies.append(bytes(body))
                        answer_body = json.dumps(
                            self.answer if head.method == b"POST" else {}
                        ).encode()
                        headers = [("content-length", str(len(answer_body)))]
                        for event in (
                            h11.Response(status_code=200, headers=headers),
                            h11.Data(data=answer_body),
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
async def start_proxy(prefill: object, decode: object) -> AsyncIterator[int]:
    """Start a proxy in front of these servers; return its port once both are ready."""
    limits = {
        "client_timeout_s": TIMEOUT_S,
        "max_body_bytes": 20_000,
        "disaggregate": "always",
    }
    async with Rig([Running(prefill)], [Running(decode)], **limits) as rig:
        yield rig.listener.getsockname()[1]


async def generate(received: AddRequest) -> AsyncIterator[TokenDelta]:
    params = (
        offer(SECRET, received.token_ids, received.sampling)
        if received.retain_kv
        else None
    )
    yield TokenDelta(request_id=received.request_id, token_ids=[42])
    end = {"finish_reason": "length", "kv_transfer_params": params}
    yield TokenDelta(request_id=received.request_id, **end)


@contextlib.asynccontextmanager
async def start_recorders() -> AsyncIterator[tuple[int, Prompts]]:
    """Start a proxy in front of two recorders. Yield its port, and a function that
    returns the bodies that the recorders received."""
    recorders = [Recorder({"kv_transfer_params": KV_PARAMS}), Recorder({"text": "x"})]
    async with contextlib.AsyncExitStack() as stack:
        urls = []
        for recorder in recorders:
            server = await asyncio.start_server(recorder, "127.0.0.1", 0)
            stack.callback(server.close)
            urls.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        async with start_proxy(*urls) as port:
            yield (
                port,
                lambda: [
                    [body.decode() for body in recorder.bodies]
                    for recorder in recorders
                ],
            )
    assert [problem for each in recorders for problem in each.problems] == []


@contextlib.asynccontextmanager
async def start_servers(
    tokenizer: Tokenizer, *roles: str
) -> AsyncIterator[tuple[int, Prompts]]:
    """Start servers of these roles, and a proxy if there are several. Yield the port,
    and a function that returns the prompts that the servers received."""
    hooks = EitherLeg(SECRET, "recompute")
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        options = {"hooks": hooks, "client_timeout_s": TIMEOUT_S}
        servers = [
            await enter(serving(tokenizer, generate, role=role, **options))
            for role in roles
        ]
        urls = [server.http.base_url for server in servers]
        port = await enter(start_proxy(*urls)) if urls[1:] else servers[0].port
        decode = tokenizer.decode
        yield (
            port,
            lambda: [
                [decode(add.token_ids) for add in server.engine.added]
                for server in servers
            ],
        )


@pytest.mark.parametrize(
    "roles",
    [(), ("prefill",), ("decode",), ("prefill", "decode")],
    ids=lambda roles: "-".join(roles) or "proxy",
)
async def test_proxy_and_servers_parse_each_request_alike(roles, tokenizer):
    backends = start_servers(tokenizer, *roles) if roles else start_recorders()
    async with backends as (port, prompts):
        wrong = await find_failures(port, prompts)
    assert not wrong, "\n" + "\n".join(wrong)


def test_row_names_are_unique():
    assert len({row.name for row in ROWS}) == len(ROWS) >= 140
