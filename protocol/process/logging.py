"""Log format: one line per event with time, level, role and rank, request id and text.

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

_MAX_ID_CHARS = 128  # of an id that a client chose

# Root of Baton's loggers. Other loggers are shown from the level `warning` on.
_ROOT_LOGGER = "baton"


def get_logger(name: str) -> logging.Logger:
    """Returns the logger of a file; call it as get_logger(__name__)."""
    return logging.getLogger(f"baton.{name}")


def current_request_id() -> str | None:
    """Returns the id of the request that the running task serves."""
    return _request_id.get()


@contextlib.contextmanager
def request_context(request_id: str) -> Iterator[None]:
    """Adds `request_id` to every log line of the running task, within the `with`.

    Do not use it around a `yield` of an asynchronous generator that another task may
    resume.

    Args:
        request_id: Any string; its first characters are logged.
    """
    token = _request_id.set(request_id[:_MAX_ID_CHARS])
    try:
        yield
    finally:
        _request_id.reset(token)


def escape(text: str) -> str:
    """Escapes control characters and line separators, so that `text` is one line."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii")
        for c in text
    )


class LineFormatter(logging.Formatter):
    """Formats a record as one line, see above.

    Args:
        sender: Role and rank of this process, such as "decode/0".
    """

    def __init__(self, sender: str) -> None:
        super().__init__()
        self.sender = sender

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        millis = int(record.created % 1 * 1000)
        request_id = getattr(record, "request_id", None) or _request_id.get()
        request = f" [{escape(request_id)}]" if request_id else ""
        line = (
            f"{seconds}.{millis:03d}Z {record.levelname:<7} {self.sender}{request} "
            f"{record.name}: {escape(record.getMessage())}"
        )
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


_HEADER = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z [A-Z]+ +(\S+) ")


def sender_of(line: str) -> str | None:
    """Returns role and rank of the process that logged this line, such as "decode/0".

    None means that the line has no header: it continues a longer record, or another
    program wrote it.
    """
    header = _HEADER.match(line)
    return header[1] if header else None


def is_rank(sender: str) -> bool:
    """Returns whether this sender is a rank of an engine."""
    return "/" in sender


def setup_logging(
    role: str,
    level: str = "info",
    *,
    rank: int | None = None,
    stream: TextIO | None = None,
) -> None:
    """Sends this process's log lines to stderr. The main function calls it first.

    The lines pass through a queue that never blocks; see protocol/process/output.py.

    Args:
        role: "prefill", "decode", "proxy" or "up".
        level: Lowest level of Baton's lines that is shown: debug, info, warning or
            error.
        stream: A stream to use without a queue, instead of stderr.
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
    baton_logger = logging.getLogger(_ROOT_LOGGER)
    baton_logger.handlers.clear()
    baton_logger.setLevel(level.upper())
    logging.captureWarnings(True)


def dropped_record(num_lines: int) -> logging.LogRecord:
    """Returns the warning about `num_lines` dropped lines."""
    record = logging.makeLogRecord(
        {
            "name": f"{_ROOT_LOGGER}.output",
            "levelno": logging.WARNING,
            "levelname": "WARNING",
            "msg": "%d lines of output were dropped: nothing read or stored them in "
            "time",
            "args": (num_lines,),
            "request_id": None,
        }
    )
    return record


def open_standard_streams() -> None:
    """Opens the standard streams that are closed, as /dev/null.

    Otherwise a pipe could get one of their numbers, and a child that inherits the pipe
    would use it as its own standard stream. Also, `sys.stdout` would be None.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            # The lowest free number is `fd`.
            os.open(os.devnull, os.O_RDWR)
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)
