"""What the main program of every node of a server does first."""

import logging

from protocol.http.acceptor import raise_file_limit
from protocol.process import lifecycle
from protocol.process.logging import open_standard_streams, setup_logging
from protocol.settings.settings import EngineSettings, describe

logger = logging.getLogger("baton.serve")


def prepare_process(settings: EngineSettings) -> None:
    """Makes this process end with its parent, and log its settings."""
    open_standard_streams()
    lifecycle.watch_parent()
    setup_logging(
        settings.role, level=settings.log_level, log_format=settings.log_format
    )
    raise_file_limit()
    logger.info("settings %s", describe(settings))
