"""Reads traces: files that record when requests arrived, and how long they were.

    Mooncake (JSON lines)    {"timestamp": 27482, "input_length": 6955,
                              "output_length": 52, "hash_ids": [46, 47, 2353]}
    conversations (JSON      as in Mooncake's traces, with "session_id"; the first turn
    lines)                   has a "timestamp", each later turn has a "delay" after the
                             end of the preceding turn; "input_length" counts the tokens
                             that the turn adds to the conversation
    Azure (CSV)              TIMESTAMP,ContextTokens,GeneratedTokens

Timestamps and delays of JSON lines are in milliseconds. A block of `hash_ids` has 512
tokens. An error names the file, the line and the field.
"""

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.bench.errors import BenchError
from benchmarks.bench.workload import Session, Turn, Workload

BLOCK_TOKENS = 512  # as in Mooncake's traces
MAX_TOKENS = 10_000_000  # longer prompts and answers are rejected as mistakes
_AZURE_FIELDS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True)
class _Line:
    """One line of a trace: its fields, file and line number."""

    path: Path
    number: int
    fields: Mapping[str, Any]

    def error(self, name: str, problem: str) -> BenchError:
        return BenchError(f"{self.path}, line {self.number}, field {name}: {problem}")

    def value(self, name: str) -> Any:
        value = self.fields.get(name)
        if value is None:
            raise self.error(name, "is missing")
        return value

    def tokens(self, name: str, minimum: int) -> int:
        """Return a number of tokens. A number below `minimum` counts as `minimum`."""
        value = self.value(name)
        if isinstance(value, str):
            value = int(value) if value.strip().isdigit() else value
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(name, f"{value!r} is not a whole number of tokens")
        if not 0 <= value <= MAX_TOKENS:
            raise self.error(name, f"{value} must be from 0 to {MAX_TOKENS}")
        return max(value, minimum)

    def milliseconds(self, name: str) -> float:
        value = self.value(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value < 1e15:
            raise self.error(name, f"{value!r} is not a number of milliseconds")
        return float(value)

    def blocks(self) -> tuple[int, ...]:
        value = self.fields.get("hash_ids", [])
        is_valid = isinstance(value, list) and all(
            isinstance(item, int) and not isinstance(item, bool) and item >= 0
            for item in value
        )
        if not is_valid:
            raise self.error("hash_ids", "must be a list of whole numbers from 0")
        return tuple(value)


def read_trace(path: Path, max_requests: int | None = None) -> Workload:
    """Read a trace: CSV if the name ends in .csv, else JSON lines.

    Args:
        max_requests: lines after the first `max_requests` are not read.

    Raises:
        BenchError: the file cannot be read, has no requests, or has an invalid line.
    """
    is_csv = path.suffix == ".csv"
    read: Callable[[Path], Iterator[_Line]] = _csv_lines if is_csv else _json_lines
    lines: list[_Line] = []
    try:
        for line in read(path):
            if max_requests is not None and len(lines) == max_requests:
                break
            lines.append(line)
    except OSError as error:
        raise BenchError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BenchError(f"{path} is not a text file in UTF-8") from None
    if not lines:
        raise BenchError(f"{path} has no requests")
    if is_csv:
        sessions = _azure_sessions(lines)
    else:
        sessions = _json_sessions(lines)
    first_s = min(session.arrival_s for session in sessions)
    ordered = sorted(sessions, key=lambda session: session.arrival_s)
    return Workload(
        sessions=tuple(
            Session(each.arrival_s - first_s, each.turns) for each in ordered
        ),
        block_tokens=BLOCK_TOKENS,
        name=path.name,
    )


def _json_lines(path: Path) -> Iterator[_Line]:
    with path.open(encoding="utf-8") as file:
        for number, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                fields = json.loads(text)
            except ValueError as error:
                raise BenchError(
                    f"{path}, line {number} is not JSON: {error}"
                ) from None
            if not isinstance(fields, dict):
                raise BenchError(f"{path}, line {number} is not a JSON object")
            yield _Line(path, number, fields)


def _csv_lines(path: Path) -> Iterator[_Line]:
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file)
        missing = [
            name for name in _AZURE_FIELDS if name not in (rows.fieldnames or ())
        ]
        if missing:
            raise BenchError(
                f"{path}, line 1, field {missing[0]}: is missing; the first line of an "
                f"Azure trace is {','.join(_AZURE_FIELDS)}"
            )
        for row in rows:
            yield _Line(path, rows.line_num, row)


def _azure_sessions(lines: list[_Line]) -> list[Session]:
    sessions = []
    for line in lines:
        text = str(line.value("TIMESTAMP"))
        try:
            time = datetime.fromisoformat(text[:26])
        except ValueError:
            raise line.error("TIMESTAMP", f"{text!r} is not a date and time") from None
        turn = Turn(
            input_tokens=line.tokens("ContextTokens", minimum=1),
            output_tokens=line.tokens("GeneratedTokens", minimum=1),
        )
        arrival_s = (time.replace(tzinfo=None) - datetime(1970, 1, 1)).total_seconds()
        sessions.append(Session(arrival_s, (turn,)))
    return sessions


@dataclass
class _Conversation:
    arrival_s: float
    turns: list[Turn] = field(default_factory=list)


def _json_sessions(lines: list[_Line]) -> list[Session]:
    conversations: dict[tuple[str, object], _Conversation] = {}
    for line in lines:
        session_id = line.fields.get("session_id")
        if session_id is not None and not isinstance(session_id, str | int):
            raise line.error("session_id", f"{session_id!r} is not a string or number")
        # A request without a session is a conversation of one turn.
        key: tuple[str, object] = ("session", session_id)
        if session_id is None:
            key = ("line", line.number)
        conversation = conversations.get(key)
        think_s = 0.0
        if conversation is None:
            conversation = _Conversation(line.milliseconds("timestamp") / 1e3)
            conversations[key] = conversation
        else:
            think_s = line.milliseconds("delay") / 1e3
        turn = Turn(
            input_tokens=line.tokens("input_length", minimum=1),
            output_tokens=line.tokens("output_length", minimum=1),
            blocks=line.blocks(),
            think_s=think_s,
        )
        conversation.turns.append(turn)
    return [
        Session(each.arrival_s, tuple(each.turns)) for each in conversations.values()
    ]
