"""The HTTP server of a process: uvicorn with limits on the size and the speed of each
request (connections.py).

Connections beyond the limit of open files wait (acceptor.py). If a client vanishes or
reads nothing, the kernel ends the connection (`drop_unresponsive_clients`).
"""

import contextlib
import socket
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from uvicorn.config import STARTUP_FAILURE

from protocol.http.acceptor import Acceptor, max_connections
from protocol.http.access import RATE_HEADERS
from protocol.http.connections import bounded_protocol
from protocol.http.tls import Certificate
from protocol.ipc.wire import keep_alive
from protocol.messages import KV_HEADER, PREFILL_KV_HEADER
from protocol.settings.server_options import ListenOptions

# Response headers that web pages of --cors-origin may read.
_EXPOSED_HEADERS = [
    "x-request-id",
    KV_HEADER,
    PREFILL_KV_HEADER,
    "retry-after",
    *RATE_HEADERS,
]


def drop_unresponsive_clients(listener: socket.socket, timeout_s: float) -> None:
    """Makes the kernel end a connection after its client was unresponsive for
    `timeout_s`.

    An unresponsive client acknowledges no packets, or reads nothing of the response.
    The setting applies to all connections that `listener` accepts.
    """
    keep_alive(listener, idle_s=15, interval_s=5, timeout_s=timeout_s)


class HttpServer(uvicorn.Server):
    """A uvicorn server with bounded connections and without signal handlers.

    Args:
        app: An ASGI application. Web pages of --cors-origin may call it.
        extra_body_bytes: See bounded_protocol.
        descriptors_per_connection: Number of file descriptors that one connection
            needs. When descriptors run out, new connections wait in the kernel's
            backlog.
        uvicorn_options: Additional arguments of uvicorn.Config.
    """

    def __init__(
        self,
        app: Any,
        options: ListenOptions,
        certificate: Certificate,
        extra_body_bytes: int = 0,
        descriptors_per_connection: int = 1,
        **uvicorn_options: Any,
    ) -> None:
        self._descriptors_per_connection = descriptors_per_connection
        if options.cors_origin:
            app = CORSMiddleware(
                app,
                allow_origins=options.cors_origin,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=_EXPOSED_HEADERS,
                # Seconds for which a browser may cache the response to a preflight
                # request.
                max_age=600,
            )
        config = uvicorn.Config(
            app,
            http=bounded_protocol(options, extra_body_bytes),
            ws="none",
            access_log=False,
            log_config=None,  # keeps the handlers that setup_logging has installed
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=max(1, round(options.shutdown_grace_s)),
            **certificate.for_uvicorn(),
            **uvicorn_options,
        )
        super().__init__(config)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts the application and accepts connections, like uvicorn's method.

        Unlike uvicorn's method, this method lets connections beyond the limit of
        descriptors wait.
        """
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            sys.exit(STARTUP_FAILURE)
        config = self.config
        state = self.server_state
        protocol_class: Any = config.http_protocol_class
        make_protocol = partial(
            protocol_class,
            config=config,
            server_state=state,
            app_state=self.lifespan.state,
        )
        limit = max_connections(self._descriptors_per_connection)
        self.servers: list[Any] = [
            Acceptor(listener, make_protocol, config.ssl, state.connections, limit)
            for listener in sockets or []
        ]
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Installs no signal handlers, unlike uvicorn's method."""
        yield
