"""Identifies the process that wrote a line of output, and converts lines to JSON and
back to text.

Log lines have the formats that logging.py describes. All other lines are printed by
libraries, by the interpreter, or by Baton's programs while they start or end.
"""

import re
import time
from collections.abc import Callable
from typing import Any

import msgspec

# Parent of all loggers of Baton. For loggers of other packages, only warnings and
# errors are shown.
ROOT_LOGGER = "baton"
# Logger name of printed lines, and of reports about dropped lines.
OUTPUT_LOGGER = f"{ROOT_LOGGER}.output"
_HEADER = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z [A-Z]+ +(\S+) ")
_JSON_START = '{"time":"'  # the beginning of every result of `json_line`
_LAUNCHER_PREFIX = "baton | "
# The message with which a program fails begins with "error: " or "PROGRAM: error: ".
_ERROR = "error: "
_MAX_PROGRAM_CHARS = 24

# The `part` of this process's JSON lines; empty if this process writes text lines.
_json_part = ""


def escape(text: str) -> str:
    """Returns `text` as one line, with escaped control characters and line
    separators.
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii")
        for c in text
    )


def time_text(seconds: float) -> str:
    """Returns a Unix time in ISO 8601, with milliseconds."""
    date = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{date}.{int(seconds % 1 * 1000):03d}Z"


def json_line(seconds: float, level: str, part: str, members: dict[str, str]) -> str:
    """Returns a JSON object in one line.

    Args:
        seconds: A Unix time.
        part: Role and rank of the process, such as "decode/0", or the process's name.
        members: Additional members of the object.
    """
    head = {"time": time_text(seconds), "level": level, "part": part}
    return msgspec.json.encode(head | members).decode()


def use_json_lines(part: str) -> Callable[[str], str]:
    """Makes `format_child_line` return JSON objects in this process.

    Args:
        part: The member `part` of the JSON objects for printed lines.

    Returns:
        A function that converts a printed line to a JSON object. The function returns a
        result of `json_line` unchanged.
    """
    global _json_part
    _json_part = part
    return _as_json


def _as_json(line: str) -> str:
    if line.startswith(_JSON_START):
        return line
    text = line.removeprefix(_LAUNCHER_PREFIX)
    level = "ERROR" if _ERROR in text[:_MAX_PROGRAM_CHARS] else "INFO"
    members = {"logger": OUTPUT_LOGGER, "message": text}
    return json_line(time.time(), level, _json_part, members)


def format_child_line(name: str, line: str) -> str:
    """Returns a line of a child process with the child's name as a prefix.

    In a JSON object, the name is the member `process` instead.
    """
    if not _json_part:
        return f"{name} | {line}"
    if _decode(line) is None:
        members = {"logger": OUTPUT_LOGGER, "message": line}
        line = json_line(time.time(), "INFO", name, members)
    return f'{line[:-1]},"process":"{name}"}}'


def _decode(line: str) -> dict[str, Any] | None:
    """Returns the members of a result of `json_line`; None for any other line."""
    if not line.startswith(_JSON_START):
        return None
    try:
        members: dict[str, Any] = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return None
    return members


def as_text(line: str) -> str:
    """Returns a line of output as text.

    A JSON object becomes the corresponding text line without the request id. An object
    with an exception becomes only the last line of the traceback.
    """
    members = _decode(line)
    if members is None:
        return line
    if exception := members.get("exception"):
        return str(exception).strip().rpartition("\n")[2]
    message = escape(str(members.get("message")))
    if members.get("logger") == OUTPUT_LOGGER:
        return message
    head = [members.get(name) for name in ("time", "level", "part")]
    return f"{' '.join(map(str, head))} {members.get('logger')}: {message}"


def sender_of(line: str) -> str | None:
    """Returns the role and rank of the process that wrote a line, such as "decode/0".

    The result is None if the line has no header, because it is a text line of a
    traceback, or because Baton's loggers did not write it.
    """
    if members := _decode(line):
        return str(members.get("part"))
    header = _HEADER.match(line)
    return header[1] if header else None


def is_rank(sender: str) -> bool:
    """Returns whether a result of `sender_of` names a rank of an engine."""
    return "/" in sender
