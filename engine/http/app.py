"""The HTTP application of a prefill or decode server.

The application runs in the server's HTTP process, which does not import torch.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from engine.http.api import Api
from engine.http.generate import respond
from engine.http.middleware import (
    ERROR_HANDLERS,
    RequestIdMiddleware,
    error_response,
    read_json,
)
from engine.http.pages.tokenizer_pages import TokenizerPages
from protocol.errors import InvalidRequest, ModelNotFound
from protocol.http.access import check_operator
from protocol.http.endpoints import ENDPOINTS
from protocol.kv_params import RELEASE_PATH
from protocol.metrics import ENGINE_TOTALS
from protocol.openai import openapi
from protocol.openai.responses import model_card
from protocol.short_repr import short_repr
from protocol.telemetry.kv_usage import kv_usage


class _MigrateBody(msgspec.Struct, forbid_unknown_fields=True):
    requests: Annotated[int, msgspec.Meta(ge=1)]


def create_app(api: Api) -> FastAPI:
    """Return the application of one server.

    The caller starts and closes `api.client` and `api.grammars`, on the event loop that
    serves the application. The application can run before the engine is ready. Until
    then, it refuses only the requests that need the model.
    """
    pages = _Pages(api)
    post_handlers: dict[str, Callable[..., Any]] = {
        path: partial(respond, api=api, endpoint=endpoint)
        for path, endpoint in ENDPOINTS.items()
    }
    post_handlers |= TokenizerPages(api).handlers
    post_handlers |= {
        RELEASE_PATH: pages.release_kv,
        "/drain": pages.drain,
        "/migrate": pages.migrate,
    }
    get_handlers = {
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
    for path, handler in post_handlers.items():
        routes.append(Route(path, handler, methods=["POST"]))
    for path, handler in get_handlers.items():
        routes.append(Route(path, handler, methods=["GET"]))  # Starlette adds HEAD
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
    """The handlers of all paths that do not generate text."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._created = int(time.time())
        self._openapi_document = openapi.document()
        self._docs_page = openapi.page(self._openapi_document)

    @property
    def _model_card(self) -> dict[str, Any]:
        engine = self._api.client.ready
        length = engine.max_model_len if engine else None
        return model_card(self._api.model_name, self._created, length)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model_card]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._api.model_name:
            served = short_repr(self._api.model_name)
            error = ModelNotFound(
                f"The model in the path is {short_repr(name, 200)}; this server serves "
                f"{served}."
            )
            return error_response(error, request.scope["path"])
        return JSONResponse(self._model_card)

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": self._api.metrics.version})

    async def health(self, request: Request) -> Response:
        """Report whether the engine is alive: status 200, or 503 with the reason."""
        if not self._api.client.healthy:
            reason = {"reason": self._api.client.failure}
            details = self._api.access.redaction(request.scope) or reason
            return JSONResponse({"status": "dead", **details}, 503)
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Report whether the engine can serve, with the model and the engine's sizes.

        The status is 503 while the server starts or shuts down, and after the engine
        has failed. If the server has API keys, only admins receive the details.
        """
        client = self._api.client
        reason = None
        if client.ready is None or not client.healthy:
            reason = client.failure or client.progress
        elif client.is_draining:
            reason = "the server is shutting down"
        report: dict[str, Any] = {"ready": reason is None}
        if redaction := self._api.access.redaction(request.scope):
            report |= redaction
        elif reason is not None:
            report |= {"reason": reason, **self._describe_server()}
        else:
            report |= self._describe_server()
            for name in ENGINE_TOTALS:
                report[name] = client.stats.get(f"baton_{name}", 0.0)
            if client.host_tier is not None:
                report["host_tier"] = msgspec.to_builtins(client.host_tier)
        return JSONResponse(report, 200 if reason is None else 503)

    def _describe_server(self) -> dict[str, Any]:
        """Return the role, the model and, once the engine is ready, its sizes."""
        common = {"role": self._api.settings.role, "model": self._api.model_name}
        engine = self._api.client.ready
        if engine is None:
            return common
        sizes = {
            "num_blocks": engine.num_blocks,
            "block_size": engine.block_size,
            "max_model_len": engine.max_model_len,
            "max_num_seqs": engine.max_num_seqs,
        }
        return {**common, **sizes, **engine.geometry}

    async def stats(self, request: Request) -> Response:
        """Return metrics and the times of recent requests, for the proxy's web page."""
        report = self._api.metrics.stats_report(
            request.query_params.get("since", "0"),
            self._describe_server(),
            self._api.client.stats,
        )
        return Response(msgspec.json.encode(report), media_type="application/json")

    async def metrics(self, request: Request) -> Response:
        metrics = self._api.metrics
        queue = self._api.client.queue
        stats = self._api.client.stats
        metrics.update_engine(stats)
        metrics.set("baton_kv_usage_ratio", kv_usage(stats))
        metrics.set("baton_queue_tokens", queue.num_tokens)
        metrics.set("baton_queue_seconds", queue.wait_s())
        num_waiting_trials = (
            self._api.grammars.num_waiting if self._api.client.ready else 0
        )
        metrics.set("baton_grammar_trials_waiting", num_waiting_trials)
        text, content_type = metrics.expose(request.headers.get("accept", ""))
        return Response(text, headers={"content-type": content_type})

    async def openapi_json(self, request: Request) -> Response:
        return JSONResponse(self._openapi_document)

    async def docs(self, request: Request) -> Response:
        return Response(self._docs_page, media_type="text/html; charset=utf-8")

    async def release_kv(self, request: Request) -> Response:
        """Release KV that no server will pull.

        The body's `kv_transfer_params` refer to the KV. The response has the number of
        release and abort messages that were sent to the engine.
        """
        members, _ = await read_json(
            request, self._api.settings.max_body_bytes, is_held=False
        )
        params = members.get("kv_transfer_params")
        messages = self._api.hooks.release_messages(params)
        for message in messages:
            self._api.client.send(message)
        return JSONResponse({"released": len(messages)})

    async def drain(self, request: Request) -> Response:
        """Shut the server down, as SIGTERM does: its requests migrate or finish.

        The response is sent without waiting for the shutdown.
        """
        check_operator(request.scope)
        self._api.on_drain()
        return JSONResponse({"draining": True})

    async def migrate(self, request: Request) -> Response:
        """Migrate at most N requests to other servers; the body is {"requests": N}.

        The response has the number of requests that will migrate.
        """
        check_operator(request.scope)
        members, _ = await read_json(
            request, self._api.settings.max_body_bytes, is_held=False
        )
        try:
            body = msgspec.convert(members, _MigrateBody)
        except msgspec.ValidationError as error:
            raise InvalidRequest(
                f'the body of /migrate is not valid: {error}; send {{"requests": N}}',
                param="requests",
            ) from None
        return JSONResponse({"moving": self._api.client.migrate(body.requests)})
