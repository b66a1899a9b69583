"""A server's HTTP application. It runs in a process without torch and talks to the engine.

POST /v1/completions, /v1/chat/completions, /v1/responses     engine/http/generate.py
POST /tokenize, /detokenize                    engine/http/tokenize.py
POST /release_kv                               nobody will use the KV of these kv_transfer_params
GET  /v1/models, /v1/models/{name}
GET  /openapi.json, /docs                      protocol/openai/openapi.py
GET  /health     this process and its engine are alive
GET  /ready      the engine can serve; says what it is
GET  /metrics    Prometheus
"""

import time
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse

from engine.http.generate import CHAT, COMPLETIONS, RESPONSES, Api
from engine.http.hooks import HttpSettings, ServerHooks
from engine.http.middleware import (
    CLIENT_GONE,
    RequestIdMiddleware,
    error_response,
    plain_error,
    read_body,
)
from engine.http.request_stats import expose_from_start
from engine.http.text_encoder import TextEncoder
from engine.http.tokenize import add_tokenizing
from engine.process.client import Engine
from engine.text.grammar_check import GrammarChecker
from engine.text.tokenizer import Tokenizer
from protocol.errors import BatonError, InternalError, ModelNotFound
from protocol.http.body import ClientDisconnected
from protocol.http.cors import cors_options
from protocol.metrics import CONTENT_TYPE, Metrics
from protocol.openai import openapi
from protocol.openai.api import RELEASE_PATH, parse_json_object
from protocol.openai.responses import model_card, model_list
from protocol.openai.sampling import GenerationConfig
from protocol.process.logging import get_logger
from protocol.short_repr import short_repr

__all__ = ["HttpSettings", "ServerHooks", "create_app"]

log = get_logger(__name__)

_ENDPOINTS = (
    ("/v1/completions", COMPLETIONS),
    ("/v1/chat/completions", CHAT),
    ("/v1/responses", RESPONSES),
)
_READING = ["GET", "HEAD"]


def create_app(
    client: Engine,
    tokenizer: Tokenizer,
    settings: HttpSettings,
    hooks: ServerHooks,
    fingerprint: str | None = None,
    config: GenerationConfig | None = None,
) -> FastAPI:
    """The application of one server; its metrics are `app.state.metrics`.

    Starting and closing `client` and `app.state.grammars` is the caller's part, on the loop that
    serves the application.

    Args:
        fingerprint: the `system_fingerprint` of answers.
        config: what requests get where they do not say.
    """
    metrics = Metrics("server")
    expose_from_start(metrics, (endpoint.name for _, endpoint in _ENDPOINTS))
    texts, config = TextEncoder(tokenizer), config or GenerationConfig()
    grammars = GrammarChecker(tokenizer, settings.grammar_timeout_s)
    api = Api(client, tokenizer, settings, hooks, metrics, texts, grammars, config, fingerprint)
    app = FastAPI(title="Baton", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.metrics = metrics
    app.state.grammars = grammars
    generating = {path: partial(api.respond, endpoint=endpoint) for path, endpoint in _ENDPOINTS}
    app.add_middleware(RequestIdMiddleware, direct=generating)
    _add_error_handlers(app)
    for path, answer in generating.items():
        app.router.add_route(path, answer, methods=["POST"])
    add_tokenizing(app, api)
    _add_release(app, api)
    _add_models(app, api)
    _add_operations(app, api)
    _add_documentation(app)
    if settings.cors_origin:
        app.add_middleware(CORSMiddleware, **cors_options(settings.cors_origin))
    return app


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


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(BatonError)
    async def on_baton_error(request: Request, error: BatonError) -> Response:
        return error_response(error)

    @app.exception_handler(ClientDisconnected)
    async def on_client_gone(request: Request, error: ClientDisconnected) -> Response:
        return Response(status_code=CLIENT_GONE)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        path = request.url.path[:200]
        if error.status_code == 404:
            return plain_error(404, f"There is no {path} here.", "not_found")
        if error.status_code == 405:
            message = f"{path} does not take {request.method}."
            return plain_error(405, message, "method_not_allowed", error.headers)
        return plain_error(error.status_code, str(error.detail), "http_error")

    @app.exception_handler(Exception)
    async def on_any_error(request: Request, error: Exception) -> Response:
        log.exception("unexpected error", exc_info=error)
        return error_response(InternalError("The server failed on this request."))
