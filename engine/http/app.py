"""A server's HTTP application. It runs in a process without torch and talks to the engine.

POST /v1/completions, /v1/chat/completions, /v1/responses     engine/http/generate.py
POST /tokenize, /detokenize                    engine/http/routes.py, like all below
POST /release_kv                               nobody will use the KV of these kv_transfer_params
GET  /v1/models, /v1/models/{name}
GET  /openapi.json, /docs                      protocol/openai/openapi.py
GET  /health     this process and its engine are alive
GET  /ready      the engine can serve; says what it is
GET  /metrics    Prometheus
"""

from functools import partial

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from engine.http.api import Api
from engine.http.endpoints import ENDPOINTS
from engine.http.generate import respond
from engine.http.middleware import RequestIdMiddleware, add_error_handlers
from engine.http.request_stats import expose_from_start
from engine.http.routes import add_routes
from protocol.http.cors import cors_options


def create_app(api: Api) -> FastAPI:
    """The application of one server.

    Starting and closing `api.client` and `api.grammars` is the caller's part, on the loop that
    serves the application.
    """
    expose_from_start(api.metrics, (endpoint.name for endpoint in ENDPOINTS.values()))
    app = FastAPI(title="Baton", docs_url=None, redoc_url=None, openapi_url=None)
    generating = {
        path: partial(respond, api=api, endpoint=endpoint) for path, endpoint in ENDPOINTS.items()
    }
    app.add_middleware(RequestIdMiddleware, direct=generating)
    add_error_handlers(app)
    for path, answer in generating.items():
        app.router.add_route(path, answer, methods=["POST"])
    add_routes(app, api)
    if api.settings.cors_origin:
        app.add_middleware(CORSMiddleware, **cors_options(api.settings.cors_origin))
    return app
