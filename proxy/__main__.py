"""`python -m proxy` and `baton proxy`: run the proxy until it is stopped.

A signal stops the proxy, and so does the exit of the launcher that started it.
"""

import os
import sys

# `python -m` puts the working directory first in sys.path. The directory is removed,
# because a model.py in it would hide Baton's own package `model`.
if __name__ == "__main__" and not sys.flags.safe_path:
    if sys.path[0] != os.path.dirname(os.path.dirname(os.path.abspath(__file__))):
        del sys.path[0]

import asyncio
import gc
import socket
from collections.abc import Sequence

from protocol.http.acceptor import raise_file_limit
from protocol.http.access import check
from protocol.http.server import HttpServer, drop_unresponsive_clients
from protocol.ipc.wire import CannotListen, bind
from protocol.process import lifecycle
from protocol.process.logging import get_logger, setup_logging
from protocol.registration import http_url
from protocol.settings.settings import ProxySettings, describe, parse
from protocol.telemetry.tracer import create_tracer
from proxy.app import ProxyApp
from proxy.discovery.sources import BadFile, read_servers

logger = get_logger("proxy")  # not __name__, which may be "__main__"

BACKLOG = 4096
# File descriptors per client: its connection, and connections to two servers.
DESCRIPTORS_PER_CLIENT = 3
# The proxy keeps idle connections open for longer than clients usually do. If the proxy
# closed one first, a client could send a request over it at the same moment.
KEEP_ALIVE_S = 75
GRACE_SHARE = 0.7  # running requests are ended after this share of shutdown_grace_s


class ProxyServer(HttpServer):
    """An HTTP server that, on shutdown, ends the remaining requests with an error."""

    def __init__(self, app: ProxyApp) -> None:
        self._app = app
        super().__init__(
            app,
            app.settings,
            app.access.certificate,
            descriptors_per_connection=DESCRIPTORS_PER_CLIENT,
            loop="uvloop",
            lifespan="on",
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.shut_down(self._app.settings.shutdown_grace_s * GRACE_SHARE)
        await super().shutdown(sockets)

    def stop(self, _signal: int, count: int) -> None:
        self.should_exit = True
        self.force_exit = count > 1


def _server_source_problem(settings: ProxySettings) -> str:
    """Return the problem of the options that name servers; empty if there is none."""
    if not (settings.decode or settings.servers_file or settings.cluster_secret):
        return (
            "--decode: give the URL of at least one decode server, or --servers-file, "
            "or BATON_CLUSTER_SECRET for servers that --register here"
        )
    try:
        if settings.servers_file:
            read_servers(settings.servers_file)
    except BadFile as error:
        return f"--servers-file {settings.servers_file}: {error}"
    return ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the proxy; return the exit status."""
    lifecycle.watch_parent()
    settings = parse(ProxySettings, argv, prog="baton proxy")
    setup_logging("proxy", settings.log_level, log_format=settings.log_format)
    if problem := _server_source_problem(settings):
        lifecycle.report_failure(problem)
        return 2
    raise_file_limit()
    logger.info("settings %s", describe(settings))
    try:
        check(settings)
        app = ProxyApp(settings)
        app.tracer = create_tracer(settings, "baton-proxy")
        listener = bind(settings.host, settings.port)
    except (CannotListen, ValueError) as error:
        lifecycle.report_failure(str(error))
        return 1 if isinstance(error, CannotListen) else 2
    listener.listen(BACKLOG)
    drop_unresponsive_clients(listener, settings.client_timeout_s)
    server = ProxyServer(app)
    gc.collect()
    gc.freeze()  # later collections of these objects would delay streams by about 10 ms
    port = listener.getsockname()[1]
    url = http_url(settings.host, port, app.access.certificate.scheme)
    page = f"page {url}/ (open it in a browser), " if settings.ui else ""
    logger.info("listening: %sendpoint %s/v1", page, url)
    lifecycle.report_ready({"port": port, "url": url})
    with lifecycle.stop_signals(server.stop):
        with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
            runner.run(server.serve(sockets=[listener]))
    if app.tracer is not None:
        app.tracer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
