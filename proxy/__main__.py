"""`python -m proxy`, also `baton proxy`: serves until a signal or its launcher's end."""

import os
import sys

# `python -m` puts the working directory first: a model.py there would hide Baton's own package.
if __name__ == "__main__" and not sys.flags.safe_path:
    if sys.path[0] != os.path.dirname(os.path.dirname(os.path.abspath(__file__))):
        del sys.path[0]

import asyncio
import gc
import socket
from collections.abc import Sequence

from protocol.http.acceptor import raise_file_limit
from protocol.http.access import check
from protocol.http.server import HttpServer, bound_clients
from protocol.ipc.wire import CannotListen, bind
from protocol.process import lifecycle
from protocol.process.logging import get_logger, setup_logging
from protocol.registration import http_url
from protocol.settings.settings import ProxySettings, describe, parse
from proxy.app import ProxyApp
from proxy.discovery.sources import BadFile, read_servers

logger = get_logger("proxy")  # also where this module is called __main__

BACKLOG = 4096
DESCRIPTORS_EACH = (
    3  # of a client's connection: its own, and those of its request to two servers
)
KEEP_ALIVE_S = 75  # longer than clients keep idle connections, so that they close first
GRACE_SHARE = 0.7  # of shutdown_grace_s, after which streams are ended


class ProxyServer(HttpServer):
    """Ends with an error for those who still wait."""

    def __init__(self, app: ProxyApp) -> None:
        self._app = app
        super().__init__(
            app,
            app.settings,
            app.access.certificate,
            descriptors_each=DESCRIPTORS_EACH,
            loop="uvloop",
            lifespan="on",
            log_config=None,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.shut_down(self._app.settings.shutdown_grace_s * GRACE_SHARE)
        await super().shutdown(sockets)

    def stop(self, _signal: int, count: int) -> None:
        self.should_exit = True
        self.force_exit = count > 1


def _lacking(settings: ProxySettings) -> str:
    """What the proxy cannot start without; empty where it can."""
    if not (settings.decode or settings.servers_file or settings.cluster_secret):
        return (
            "--decode: give the URL of at least one decode server, or --servers-file, or "
            "BATON_CLUSTER_SECRET for servers that --register here"
        )
    try:
        if settings.servers_file:
            read_servers(settings.servers_file)
    except BadFile as error:
        return f"--servers-file {settings.servers_file}: {error}"
    return ""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the proxy; returns the exit status."""
    lifecycle.watch_parent()
    settings = parse(ProxySettings, argv, prog="baton proxy")
    setup_logging("proxy", settings.log_level)
    if problem := _lacking(settings):
        lifecycle.report_failure(problem)
        return 2
    raise_file_limit()
    logger.info("settings %s", describe(settings))
    try:
        check(settings)
        app = ProxyApp(settings)
        listener = bind(settings.host, settings.port)
    except (CannotListen, ValueError) as error:
        lifecycle.report_failure(str(error))
        return 1 if isinstance(error, CannotListen) else 2
    listener.listen(BACKLOG)
    bound_clients(listener, settings.client_timeout_s)
    server = ProxyServer(app)
    gc.collect()
    gc.freeze()  # a look through all of this would hold up every stream for some 10 ms
    port = listener.getsockname()[1]
    url = http_url(settings.host, port, app.access.certificate.scheme)
    logger.info("listening on %s", url)
    lifecycle.report_ready({"port": port, "url": url})
    with lifecycle.stop_signals(server.stop):
        with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
            runner.run(server.serve(sockets=[listener]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
