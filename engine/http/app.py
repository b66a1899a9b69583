"""A server's HTTP application. It runs in a process without torch and talks to the engine."""

import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from engine.http.api import ENDPOINTS, Api
from engine.http.generate import respond
from engine.http.limits import check_token_ids, settle_model
from engine.http.middleware import (
    ERROR_HANDLERS,
    RequestIdMiddleware,
    cancelled_on_disconnect,
    error_response,
    read_json,
)
from engine.http.text_workers import LONG_CHARS
from protocol.errors import InvalidRequest, ModelNotFound
from protocol.http.access import check_operator
from protocol.http.deadlines import deadline_of, within
from protocol.kv_params import RELEASE_PATH
from protocol.metrics import CONTENT_TYPE, ENGINE_TOTALS
from protocol.openai import openapi
from protocol.openai.requests import validate
from protocol.openai.responses import model_card
from protocol.openai.tokenize import DetokenizeRequest, TokenizeRequest
from protocol.short_repr import short_repr


class _Migrate(msgspec.Struct, forbid_unknown_fields=True):
    requests: Annotated[int, msgspec.Meta(ge=1)]


def create_app(api: Api) -> FastAPI:
    """The application of one server.

    Starting and closing `api.client` and `api.grammars` is the caller's part, on the loop that
    serves the application. It answers from before the engine, and its model, are there.
    """
    pages = _Pages(api)
    posted: dict[str, Callable[..., Any]] = {
        **{
            path: partial(respond, api=api, endpoint=one)
            for path, one in ENDPOINTS.items()
        },
        "/tokenize": partial(pages.on_text, work=pages.tokenize),
        "/detokenize": partial(pages.on_text, work=pages.detokenize),
        RELEASE_PATH: pages.release_kv,
        "/drain": pages.drain,
        "/migrate": pages.migrate,
    }
    read = {
        "/v1/models": pages.models,
        "/v1/models/{name:path}": pages.model,
        "/version": pages.version,
        "/health": pages.health,
        "/ready": pages.ready,
        "/metrics": pages.metrics,
        "/stats": pages.stats,
        "/openapi.json": pages.openapi_json,
        "/docs": pages.docs,
    }
    routes: list[BaseRoute] = []
    routes += [Route(path, answer, methods=["POST"]) for path, answer in posted.items()]
    routes += [
        Route(path, answer, methods=["GET"]) for path, answer in read.items()
    ]  # and HEAD
    return FastAPI(
        title="Baton",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        routes=routes,
        middleware=[Middleware(RequestIdMiddleware, access=api.access)],
        exception_handlers=ERROR_HANDLERS,
    )


class _Pages:
    """All answers but those that generate."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._created = int(time.time())
        self._document = openapi.document()
        self._page = openapi.page(self._document)

    @property
    def _card(self) -> dict[str, Any]:
        engine = self._api.client.ready
        length = engine.max_model_len if engine else None
        return model_card(self._api.model_name, self._created, length)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._api.model_name:
            own = short_repr(self._api.model_name)
            told = f"The model in the path is {short_repr(name, 200)}; this server has {own}."
            return error_response(ModelNotFound(told))
        return JSONResponse(self._card)

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": self._api.metrics.version})

    async def health(self, request: Request) -> Response:
        """Whether this process and its engine are alive."""
        if not self._api.client.healthy:
            reason = {"reason": self._api.client.failure}
            told = self._api.access.redaction(request.scope) or reason
            return JSONResponse({"status": "dead", **told}, 503)
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Whether the engine can serve, and what it is."""
        client, reason = self._api.client, None
        if client.ready is None or not client.healthy:
            reason = client.failure or client.progress
        elif client.is_draining:
            reason = "the server is ending"
        told: dict[str, Any] = {"ready": reason is None}
        if bare := self._api.access.redaction(request.scope):
            told |= bare
        elif reason is not None:
            told |= {"reason": reason, **self._about()}
        else:
            work = {
                name: client.stats.get(f"baton_{name}", 0.0) for name in ENGINE_TOTALS
            }
            told |= {**self._about(), **work}
        return JSONResponse(told, 200 if reason is None else 503)

    def _about(self) -> dict[str, Any]:
        """What this server is, as far as its engine has told."""
        common = {"role": self._api.settings.role, "model": self._api.model_name}
        engine = self._api.client.ready
        if engine is None:
            return common
        sizes = {
            "num_blocks": engine.num_blocks,
            "block_size": engine.block_size,
            "max_model_len": engine.max_model_len,
            "max_num_seqs": self._api.settings.max_num_seqs,
        }
        return {**common, **sizes, **engine.geometry}

    async def stats(self, request: Request) -> Response:
        """Numbers and the times of the last requests, for the proxy's page."""
        since, values = request.query_params.get("since", "0"), self._api.client.stats
        told = self._api.metrics.numbers(since, self._about(), values)
        return Response(msgspec.json.encode(told), media_type="application/json")

    async def metrics(self, request: Request) -> Response:
        metrics, queue = self._api.metrics, self._api.client.queue
        metrics.update_engine(self._api.client.stats)
        metrics.set("baton_queue_tokens", queue.num_tokens)
        metrics.set("baton_queue_seconds", queue.wait_s())
        waiting = self._api.grammars.num_waiting if self._api.client.ready else 0
        metrics.set("baton_grammar_trials_waiting", waiting)
        return Response(metrics.expose(), headers={"content-type": CONTENT_TYPE})

    async def openapi_json(self, request: Request) -> Response:
        return JSONResponse(self._document)

    async def docs(self, request: Request) -> Response:
        return Response(self._page, media_type="text/html; charset=utf-8")

    async def release_kv(self, request: Request) -> Response:
        """Nobody will use the KV of these `kv_transfer_params`."""
        members, _ = await read_json(
            request, self._api.settings.max_body_bytes, is_held=False
        )
        messages = self._api.hooks.refused(members.get("kv_transfer_params"))
        for message in messages:
            self._api.client.send(message)
        return JSONResponse({"released": len(messages)})

    async def drain(self, request: Request) -> Response:
        """As SIGTERM: other servers go on with the streams."""
        check_operator(request.scope)
        self._api.on_drain()
        return JSONResponse({"draining": True})

    async def migrate(self, request: Request) -> Response:
        """They go on with so many of them: {"requests": N}."""
        check_operator(request.scope)
        members, _ = await read_json(
            request, self._api.settings.max_body_bytes, is_held=False
        )
        try:
            asked = msgspec.convert(members, _Migrate)
        except msgspec.ValidationError as error:
            told = f'the body of /migrate: {error}; send {{"requests": N}}'
            raise InvalidRequest(told, param="requests") from None
        return JSONResponse({"moving": self._api.client.migrate(asked.requests)})

    async def on_text(
        self, request: Request, work: Callable[[dict[str, Any], int], Awaitable[bytes]]
    ) -> Response:
        settings = self._api.settings
        self._api.client.require_ready()  # and so is the tokenizer
        async with within(
            deadline_of(request.scope["headers"], settings.request_timeout_s)
        ):
            members, num_bytes = await read_json(request, settings.max_body_bytes)
            settle_model(members, self._api.model_name)
            async with cancelled_on_disconnect(request.receive):
                answer = await work(members, num_bytes)
            return Response(answer, media_type="application/json")

    async def tokenize(self, members: dict[str, Any], num_bytes: int) -> bytes:
        api = self._api
        length = api.client.require_ready().max_model_len
        api.texts.check_num_items(members, length)

        def parse() -> TokenizeRequest:
            api.texts.check_num_chars(members, length)
            return validate(TokenizeRequest, members)

        parsed = await api.texts.run_python(num_bytes, parse)
        request = (
            parsed.as_generation()
        )  # whose sender may want to know by how much it is too long
        (ids,) = await api.texts.tokenize(
            request, num_bytes, length, sure_to=LONG_CHARS
        )

        def answer() -> bytes:
            pieces = api.tokenizer.pieces(ids) if parsed.return_token_strs else None
            told = {
                "count": len(ids),
                "max_model_len": length,
                "tokens": ids,
                "token_strs": pieces,
            }
            return msgspec.json.encode(told)

        return await api.texts.run(len(ids), answer)

    async def detokenize(self, members: dict[str, Any], num_bytes: int) -> bytes:
        api = self._api

        def answer() -> bytes:
            parsed = validate(DetokenizeRequest, members)
            if parsed.tokens:
                check_token_ids(
                    parsed.tokens, api.client.require_ready().vocab_size, "tokens"
                )
            return msgspec.json.encode(
                {"prompt": api.tokenizer.decode_all(parsed.tokens)}
            )

        return await api.texts.run(num_bytes, answer)
