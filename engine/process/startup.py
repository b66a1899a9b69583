"""The process setup that the main program of each node performs first."""

import logging

from protocol.http.acceptor import raise_file_limit
from protocol.process import lifecycle
from protocol.process.logging import open_standard_streams, setup_logging
from protocol.settings.settings import EngineSettings, describe

logger = logging.getLogger("baton.serve")


def prepare_process(settings: EngineSettings) -> None:
    """Sets up logging and the file limit, and makes this process end with its parent.

    Also logs the settings.
    """
    open_standard_streams()
    lifecycle.watch_parent()
    setup_logging(
        settings.role, level=settings.log_level, log_format=settings.log_format
    )
    raise_file_limit()
    logger.info("settings %s", describe(settings))
