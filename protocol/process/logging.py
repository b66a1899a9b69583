"""One line per event: time, level, role and rank, request id, logger, text.

2026-01-31T12:00:00.123Z INFO  decode/0 [req-1] baton.engine.core: admitted, 3 blocks

The request id comes from a context variable, which asyncio tasks inherit.
"""

import contextlib
import logging
import os
import re
import sys
import time
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TextIO

from protocol.process.output import queue_standard_streams

_request_id: ContextVar[str | None] = ContextVar("request_id", default=None)

_MAX_SHOWN = 128  # characters of an id that a client chose

# Root of our own loggers; all others are heard from warnings on.
_OWN_LOGGER = "baton"


def get_logger(name: str) -> logging.Logger:
    """The logger of a file: get_logger(__name__)."""
    return logging.getLogger(f"baton.{name}")


def current_request_id() -> str | None:
    """The id of the request that the running task serves."""
    return _request_id.get()


@contextlib.contextmanager
def request_context(request_id: str) -> Iterator[None]:
    """Within, every line of the running task carries the beginning of `request_id`: any string. Not
    around a `yield` of an asynchronous generator that another task may resume."""
    token = _request_id.set(request_id[:_MAX_SHOWN])
    try:
        yield
    finally:
        _request_id.reset(token)


def escape(text: str) -> str:
    """`text` on one line: control characters and line separators as backslash escapes."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii")
        for c in text
    )


class LineFormatter(logging.Formatter):
    """Formats a record as the line above; `who` is role and rank, such as "decode/0"."""

    def __init__(self, who: str) -> None:
        super().__init__()
        self.who = who

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        millis = int(record.created % 1 * 1000)
        request_id = getattr(record, "request_id", None) or _request_id.get()
        request = f" [{escape(request_id)}]" if request_id else ""
        line = (
            f"{seconds}.{millis:03d}Z {record.levelname:<7} {self.who}{request} "
            f"{record.name}: {escape(record.getMessage())}"
        )
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


_HEADER = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z [A-Z]+ +(\S+) ")


def sender_of(line: str) -> str | None:
    """Role and rank of the process that logged this line, such as "decode/0"; None if it has no
    header: the rest of a longer record, or not from a logger of ours."""
    header = _HEADER.match(line)
    return header[1] if header else None


def is_rank(sender: str) -> bool:
    """Whether lines of this sender are an engine rank's."""
    return "/" in sender


def setup_logging(
    role: str,
    level: str = "info",
    *,
    rank: int | None = None,
    stream: TextIO | None = None,
) -> None:
    """Sends this process's log lines to stderr, from now on through a queue that never blocks; see
    protocol/process/output.py. Called once, first thing in main.

    Args:
        role: "prefill", "decode", "proxy" or "up".
        level: least severe level shown of our own lines: debug, info, warning or error.
        stream: used as it is, instead of stderr.
    """
    formatter = LineFormatter(role if rank is None else f"{role}/{rank}")
    if stream is None:
        queue_standard_streams(
            lambda num_lines: formatter.format(dropped_record(num_lines))
        )
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    own = logging.getLogger(_OWN_LOGGER)
    own.handlers.clear()
    own.setLevel(level.upper())
    logging.captureWarnings(True)


def dropped_record(num_lines: int) -> logging.LogRecord:
    """The warning that so many lines were dropped."""
    record = logging.makeLogRecord(
        {
            "name": f"{_OWN_LOGGER}.output",
            "levelno": logging.WARNING,
            "levelname": "WARNING",
            "msg": "%d lines of output were dropped: nothing read or stored them in time",
            "args": (num_lines,),
            "request_id": None,
        }
    )
    return record


def open_standard_streams() -> None:
    """Opens those that are closed, to nothing. Else a pipe gets one of their numbers, and a child
    that is to inherit it finds its own standard stream there; and `sys.stdout` is None."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number, which is `fd`
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)
