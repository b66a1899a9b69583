"""Log lines: one line per event, with time, level, role and rank, request id, logger
and text.

2026-01-31T12:00:00.123Z INFO    decode/0 [req-1] baton.engine.core: admitted, 3 blocks

With --log-format json, each line is a JSON object:

{"time":"2026-01-31T12:00:00.123Z","level":"INFO","part":"decode/0",
 "request_id":"req-1","logger":"baton.engine.core","message":"admitted, 3 blocks"}

The request id comes from a context variable, which asyncio tasks inherit. Lines outside
a request have no request id. The rank is missing in a process that is not a rank.
"""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Literal, TextIO

from protocol.process.log_lines import (
    OUTPUT_LOGGER,
    ROOT_LOGGER,
    escape,
    json_line,
    time_text,
    use_json_lines,
)
from protocol.process.output import queue_standard_streams

LogFormat = Literal["text", "json"]

_request_id: ContextVar[str | None] = ContextVar("request_id", default=None)

_MAX_ID_CHARS = 128  # limit on a request id, which the client may have chosen


def get_logger(name: str) -> logging.Logger:
    """Returns the logger of a module. The caller passes its `__name__`."""
    return logging.getLogger(f"baton.{name}")


def current_request_id() -> str | None:
    """Returns the id of the request that the current task serves, or None."""
    return _request_id.get()


@contextlib.contextmanager
def request_context(request_id: str) -> Iterator[None]:
    """Adds `request_id` to every log line of the current task within the `with`.

    The `with` must not contain a `yield` of an asynchronous generator, because a
    different task may resume the generator.

    Args:
        request_id: Any string. Its first 128 characters are logged.
    """
    token = _request_id.set(request_id[:_MAX_ID_CHARS])
    try:
        yield
    finally:
        _request_id.reset(token)


class LineFormatter(logging.Formatter):
    """Formats a record as one line of text, as the beginning of this file shows.

    If the record has an exception, the lines of the traceback follow.

    Args:
        sender: Role and rank of this process, such as "decode/0".
    """

    def __init__(self, sender: str) -> None:
        super().__init__()
        self.sender = sender

    def format(self, record: logging.LogRecord) -> str:
        request_id = getattr(record, "request_id", None) or _request_id.get()
        request = f" [{escape(request_id)}]" if request_id else ""
        line = (
            f"{time_text(record.created)} {record.levelname:<7} "
            f"{self.sender}{request} {record.name}: {escape(record.getMessage())}"
        )
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    """Formats a record as one line with a JSON object, as the beginning of this file
    shows.

    Args:
        part: Role and rank of this process, such as "decode/0".
    """

    def __init__(self, part: str) -> None:
        super().__init__()
        self._part = part

    def format(self, record: logging.LogRecord) -> str:
        members: dict[str, str] = {}
        request_id = getattr(record, "request_id", None) or _request_id.get()
        if request_id:
            members["request_id"] = request_id
        if trace_id := getattr(record, "trace_id", None):
            members["trace_id"] = trace_id
        members["logger"] = record.name
        members["message"] = record.getMessage()
        if record.exc_info:
            members["exception"] = self.formatException(record.exc_info)
        return json_line(record.created, record.levelname, self._part, members)


def trace_extra(trace_id: str | None) -> dict[str, str] | None:
    """Returns the argument `extra` for log calls about a request with this trace; None
    if the request has no trace.
    """
    return {"trace_id": trace_id} if trace_id else None


def setup_logging(
    role: str,
    level: str = "info",
    *,
    rank: int | None = None,
    stream: TextIO | None = None,
    log_format: LogFormat = "text",
) -> None:
    """Sends this process's log lines to stderr. Call it before the first log line.

    `sys.stdout` and `sys.stderr` are replaced by streams with a queue, which never
    block; see protocol/process/output.py.

    Args:
        role: "prefill", "decode", "both", "proxy" or "kv".
        level: Lowest level of Baton's lines that is shown: debug, info, warning or
            error.
        rank: Rank of this process in its engine; None for a process without a rank.
        stream: Send the lines to this stream instead of stderr. No stream is replaced.
        log_format: "json" also applies to lines that libraries print, unless `stream`
            is given.
    """
    part = role if rank is None else f"{role}/{rank}"
    formatter: logging.Formatter = LineFormatter(part)
    wrap_line = None
    if log_format == "json":
        formatter = JsonFormatter(part)
        wrap_line = use_json_lines(part)
    if stream is None:
        queue_standard_streams(
            lambda num_lines: formatter.format(dropped_record(num_lines)), wrap_line
        )
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    baton_logger = logging.getLogger(ROOT_LOGGER)
    baton_logger.handlers.clear()
    baton_logger.setLevel(level.upper())
    logging.captureWarnings(True)


def silence(package: str) -> None:
    """Hides all log lines of another package below CRITICAL."""
    logging.getLogger(package).setLevel(logging.CRITICAL)


def dropped_record(num_lines: int) -> logging.LogRecord:
    """Returns the log record of the warning that `num_lines` lines were dropped."""
    record = logging.makeLogRecord(
        {
            "name": OUTPUT_LOGGER,
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
    """Opens /dev/null in place of each standard stream that is closed.

    Otherwise a new pipe could get the number of a standard stream, and a child that
    inherits the pipe would use it as its standard stream. Also, `sys.stdout` or
    `sys.stderr` would be None.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            # The new file gets the number `fd`, because that is the lowest free number.
            os.open(os.devnull, os.O_RDWR)
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)
