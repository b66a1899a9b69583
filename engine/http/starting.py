"""A server's answers while it starts: alive, not ready, and how far it is."""

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.http.middleware import RequestIdMiddleware, error_response
from engine.http.request_stats import ServerMetrics
from protocol.errors import NoServerAvailable
from protocol.http.access import Access, check
from protocol.settings.settings import EngineSettings


class FrontDoor:
    """The ASGI application that a server listens with, from before its model is there. Raises
    ValueError where the settings name keys or certificates that cannot be.

    Attributes:
        metrics, access: of the process.
        app: answers everything, once there is one.
        progress: what takes long just now.
    """

    def __init__(self, settings: EngineSettings) -> None:
        check(settings)
        self.metrics = ServerMetrics()
        self.access = Access(settings, self.metrics)
        self.app: ASGIApp | None = None
        self.progress = "looking for the model"
        self._starting = RequestIdMiddleware(self._answer, self.access)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self.app or self._starting)(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["path"]:
            case "/health":
                answer: Response = JSONResponse({"status": "ok"})
            case "/ready":
                told = self.access.bare(scope) or {"reason": self.progress}
                answer = JSONResponse({"ready": False, **told}, 503)
            case _:
                starting = f"This server is still starting ({self.progress}); try again soon."
                answer = error_response(NoServerAvailable(starting))
        await answer(scope, receive, send)
