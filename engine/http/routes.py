"""What a server answers without the engine: its models, state and documentation, what its tokenizer
makes of a text, and an end of a lease."""

import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.responses import JSONResponse

from engine.http.api import Api
from engine.http.limits import check_model, check_token_ids, fill_in_model
from engine.http.middleware import error_response, read_body, refusal_of
from engine.http.text_encoder import LONG_CHARS
from protocol.errors import ModelNotFound
from protocol.metrics import CONTENT_TYPE
from protocol.openai import openapi
from protocol.openai.prefill_leg import RELEASE_PATH
from protocol.openai.requests import parse_json_object
from protocol.openai.responses import model_card, model_list
from protocol.openai.tokenize import as_request, parse_detokenize, parse_tokenize
from protocol.short_repr import short_repr

_READING = ["GET", "HEAD"]


def add_routes(app: FastAPI, api: Api) -> None:
    """All but those that generate."""
    _add_tokenizing(app, api)
    _add_release(app, api)
    _add_models(app, api)
    _add_operations(app, api)
    _add_documentation(app)


def _add_release(app: FastAPI, api: Api) -> None:
    @app.post(RELEASE_PATH)
    async def release_kv(request: Request) -> Response:
        members = parse_json_object(await read_body(request, api.settings.max_body_bytes))
        messages = api.hooks.refused(members.get("kv_transfer_params"))
        for message in messages:
            api.client.tell(message)
        return _state(200, released=len(messages))


def _add_models(app: FastAPI, api: Api) -> None:
    created = int(time.time())

    def max_model_len() -> int | None:
        return api.client.ready.max_model_len if api.client.ready else None

    @app.api_route("/v1/models", methods=_READING)
    async def models() -> JSONResponse:
        return JSONResponse(model_list(api.model_names, created, max_model_len()))

    @app.api_route("/v1/models/{name:path}", methods=_READING)
    async def model(name: str) -> Response:
        if name not in api.model_names:
            names = " or ".join(map(short_repr, api.model_names))
            told = f"The model in the path is {short_repr(name, 200)}; this server has {names}."
            return error_response(ModelNotFound(told))
        return JSONResponse(model_card(name, created, max_model_len()))


def _add_operations(app: FastAPI, api: Api) -> None:
    @app.api_route("/health", methods=_READING)
    async def health() -> Response:
        if not api.client.healthy:
            return _state(503, status="dead", reason=api.client.failure)
        return _state(200, status="ok")

    @app.api_route("/ready", methods=_READING)
    async def ready() -> Response:
        engine = api.client.ready
        common = {"role": api.hooks.role, "model": api.model_names[0]}
        if engine is None or not api.client.healthy:
            reason = api.client.failure or "the engine is starting"
            return _state(503, ready=False, reason=reason, **common)
        return _state(
            200,
            ready=True,
            **common,
            num_blocks=engine.num_blocks,
            block_size=engine.block_size,
            max_model_len=engine.max_model_len,
            max_num_seqs=api.settings.max_num_seqs,
        )

    @app.api_route("/metrics", methods=_READING)
    async def metrics() -> Response:
        api.metrics.update_engine(api.client.stats)
        return Response(api.metrics.expose(), headers={"content-type": CONTENT_TYPE})


def _add_documentation(app: FastAPI) -> None:
    document = openapi.document()
    page = openapi.page(document)

    @app.api_route("/openapi.json", methods=_READING)
    async def openapi_json() -> JSONResponse:
        return JSONResponse(document)

    @app.api_route("/docs", methods=_READING)
    async def docs() -> Response:
        return Response(page, media_type="text/html; charset=utf-8")


def _state(status_code: int, **members: Any) -> Response:
    return JSONResponse(members, status_code=status_code)


def _add_tokenizing(app: FastAPI, api: Api) -> None:
    """What these raise is answered by the application's handlers."""

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        return await _answer_with(request, api, _tokenize)

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        return await _answer_with(request, api, _detokenize)


async def _answer_with(
    request: Request, api: Api, work: Callable[[bytes, Api], Awaitable[bytes]]
) -> Response:
    raw = await read_body(request, api.settings.max_body_bytes)
    try:
        return Response(await work(raw, api), media_type="application/json")
    except RecursionError as raised:
        raise refusal_of(raised) from None


async def _tokenize(raw: bytes, api: Api) -> bytes:
    members = parse_json_object(raw)
    fill_in_model(members, api.model_names)
    parsed = await api.texts.run(len(raw), lambda: parse_tokenize(members))
    check_model(parsed.model, api.model_names)
    ready = api.require_ready()
    request = as_request(parsed)  # whose sender may want to know by how much it is too long
    (ids,) = await api.texts.tokenize(request, ready.max_model_len, sure_to=LONG_CHARS)

    def answer() -> bytes:
        pieces = api.tokenizer.pieces(ids) if parsed.return_token_strs else None
        told: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": ready.max_model_len,
            "tokens": ids,
            "token_strs": pieces,
        }
        return msgspec.json.encode(told)

    return await api.texts.run(len(ids), answer)


async def _detokenize(raw: bytes, api: Api) -> bytes:
    members = parse_json_object(raw)
    fill_in_model(members, api.model_names)

    def answer() -> bytes:
        parsed = parse_detokenize(members)
        check_model(parsed.model, api.model_names)
        if parsed.tokens:
            check_token_ids(parsed.tokens, api.require_ready().vocab_size, "tokens")
        return msgspec.json.encode({"prompt": api.tokenizer.decode_all(parsed.tokens)})

    return await api.texts.run(len(raw), answer)
