"""A server's HTTP application under uvicorn, in front of a scripted engine.

Everything runs on the event loop of the test.
"""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import httpx
from msgspec.structs import replace

from engine.http.api import KV_PARAMS_BYTES, Api, ServerHooks
from engine.http.app import create_app
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from protocol.http.server import HttpServer
from protocol.messages import AddRequest, EngineReady, KVUsage, TokenDelta
from protocol.metrics import Metrics
from protocol.openai.sampling import GenerationConfig
from protocol.settings.settings import DecodeSettings, PrefillSettings
from tests.rigs.client import sse_events
from tests.rigs.scripted_engine import ScriptedEngine, count_up
from tests.rigs.uvicorn_polls import shorten_uvicorn_polls

shorten_uvicorn_polls()
WAIT_S = 120.0
SECRET = b"the secret of a cluster"
CONTEXT = 64
MAX_BODY = 20_000
READY = EngineReady(
    num_blocks=64, block_size=16, max_model_len=CONTEXT, max_num_seqs=8, vocab_size=260
)


class Server:
    """The application, its scripted engine and a client."""

    def __init__(
        self, engine: ScriptedEngine, http: httpx.AsyncClient, metrics: Metrics
    ) -> None:
        self.engine = engine
        self.http = http
        self.metrics = metrics
        self.host = str(http.base_url.host)
        self.port = http.base_url.port

    async def post(
        self, path: str = "/v1/completions", headers: Any = None, **fields: Any
    ) -> httpx.Response:
        body: dict[str, Any] = {"model": "m", "prompt": "ab", **fields}
        if "chat" in path:
            del body["prompt"]
        return await self.http.post(path, json=body, headers=headers)

    async def chat(self, **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": "Hi"}]
        return await self.post(
            "/v1/chat/completions", **{"messages": messages, **fields}
        )


async def connected(server: Server) -> socket.socket:
    """Return a connected socket with a receive buffer of 4 kB."""
    await server.http.get("/health")  # returns when the server is listening
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((server.host, server.port))
    client.setblocking(False)
    return client


async def send_request(client: socket.socket, **fields: Any) -> None:
    """Send a completion request over a connected socket."""
    body = json.dumps({"model": "m", "prompt": "ab", **fields}).encode()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
        % len(body)
    )
    await asyncio.get_running_loop().sock_sendall(client, head + body)


class Running:
    """A server that already runs, for rigs that start and stop their servers. `start`
    and `stop` do nothing.
    """

    def __init__(self, url: object) -> None:
        self.url = str(url).rstrip("/")
        self.ready = True

    def start(self) -> None: ...

    async def stop(self) -> None: ...


@asynccontextmanager
async def serving(
    tokenizer: Tokenizer,
    script: Any = count_up,
    hooks: Any = None,
    ready: EngineReady | None = READY,
    fingerprint: str | None = None,
    origins: tuple[str, ...] = (),
    max_body: int = MAX_BODY,
    config: GenerationConfig | None = None,
    client_timeout_s: float = WAIT_S,
    role: str = "prefill",
    **more_settings: Any,
) -> AsyncIterator[Server]:
    """Run the application until the block ends.

    Args:
        script: the script of the engine (see ScriptedEngine).
        more_settings: further settings of the application.
    """
    fields = {
        "model": "folder/model",
        "served_model_name": "m",
        "max_body_bytes": max_body,
        "cors_origin": origins,
        "grammar_timeout_s": 30.0,
        **more_settings,
    }
    settings_class = PrefillSettings if role == "prefill" else DecodeSettings
    settings = settings_class(
        _cli_parse_args=[], client_timeout_s=client_timeout_s, **fields
    )
    engine = ScriptedEngine(script, ready, settings)
    await engine.start()
    api = Api(engine, settings, hooks or ServerHooks(), SECRET)
    api.set_model(tokenizer, fingerprint, config)
    tls = api.access.certificate
    server = HttpServer(
        create_app(api),
        settings,
        tls,
        KV_PARAMS_BYTES,
        port=0,
        log_level="warning",
        lifespan="off",
    )
    listener = server.config.bind_socket()
    listener.listen()
    task = asyncio.create_task(server.serve(sockets=[listener]))
    url = f"{tls.scheme}://127.0.0.1:{listener.getsockname()[1]}"
    try:
        async with httpx.AsyncClient(
            base_url=url, timeout=WAIT_S, trust_env=False, verify=False
        ) as http:
            yield Server(engine, http, api.metrics)
    finally:
        server.should_exit = True
        await engine.close()
        await task
        api.grammars.close()
        listener.close()


serving_4k = partial(serving, ready=replace(READY, max_model_len=4096))
serving_harmony = partial(
    serving, ready=replace(READY, max_model_len=4096, vocab_size=280)
)


def with_template(tokenizer: Tokenizer, source: str) -> Tokenizer:
    """Return a copy of the tokenizer with the chat template `source`."""
    copy = object.__new__(Tokenizer)
    copy.__dict__ = {**tokenizer.__dict__, "chat_template": ChatTemplate(source)}
    return copy


def scripted(*deltas: dict[str, Any]) -> Any:
    """Return a script that sends a TokenDelta for each of these dicts of fields."""

    async def script(request: AddRequest) -> AsyncIterator[TokenDelta]:
        for members in deltas:
            yield TokenDelta(request_id=request.request_id, **members)
            await asyncio.sleep(0)

    return script


def end(choice: int = 0, **members: Any) -> dict[str, Any]:
    """Return the fields of a terminal delta."""
    return {"choice": choice, "finish_reason": "length", "usage": USAGE, **members}


def text_script(tokenizer: Tokenizer, text: str, **last: Any) -> Any:
    """Return a script that generates `text`, one token per delta."""
    tokens = ({"token_ids": [token_id]} for token_id in tokenizer.encode(text))
    return scripted(*tokens, end(**last))


USAGE = KVUsage(transferred=1, recomputed=1, skipped=0, cached_tokens=1)


def events(response: httpx.Response) -> list[tuple[str, Any]]:
    """Return the name and parsed data of each event of a stream."""
    assert response.headers["content-type"].startswith("text/event-stream")
    return [
        (name, text if text == "[DONE]" else json.loads(text))
        for name, text in sse_events(response.text)
    ]


def chunks(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the chunks of a stream that ends in [DONE] and has no error."""
    *chunk_events, last = events(response)
    assert last == ("message", "[DONE]")
    assert {name for name, _ in chunk_events} == {"message"}
    return [chunk for _, chunk in chunk_events]
