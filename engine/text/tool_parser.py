"""Reads the tool calls out of an answer while it is written. Pure, no I/O.

    text pieces -> ToolParser -> content (text that is no call) and ToolCallPieces

What models write, by what their chat templates teach them:

    hermes       text <tool_call>{"name": "f", "arguments": {...}}</tool_call> <tool_call>...
    llama3_json  {"name": "f", "parameters": {...}}; {...}      nothing but calls
    required     [{"name": "f", "parameters": {...}}, ...]      as the grammar enforces it
    named        {...}                                          the arguments alone

A call is passed on once its name is there, its arguments as they come, as the model spells them.
What turns out not to be a call becomes content, so nothing of an answer is lost.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from protocol.openai.tools import ToolCallPiece, Tools, new_call_id

Syntax = Literal["hermes", "llama3_json"]

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_BLANKS = " \t\r\n"

# Texts are read in runs, so that none is looked at again however long it gets.
_BLANK_RUN = re.compile("[ \t\r\n]+")
_PLAIN_RUN = re.compile(r'[ \t\r\n]+|["{}\[\],:]|[^"{}\[\],: \t\r\n]+')  # of JSON
_STRING_RUN = re.compile(r'["\\]|[^"\\]+')  # inside a string of it
_TEXT_RUN = re.compile("[^< \t\r\n]+")  # in which no tag begins, nor the blanks before one
_BETWEEN_RUN = re.compile(r"[ \t\r\n\[\],;]+")


@dataclass
class Parsed:
    """What some text adds to an answer."""

    content: str = ""
    calls: list[ToolCallPiece] = field(default_factory=list)


class ToolParser(ABC):
    """One choice's answer. `feed` all of its text, then `finish` once.

    Attributes:
        num_calls: that the model wrote so far.
        parallel: whether the client takes more than the first of them.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self.parallel = True

    def wanted(self, calls: list[ToolCallPiece]) -> list[ToolCallPiece]:
        """Of what was parsed, what the client is told."""
        return calls if self.parallel else [call for call in calls if call.index == 0]

    @abstractmethod
    def feed(self, text: str) -> Parsed: ...

    @abstractmethod
    def finish(self) -> Parsed:
        """What was held back to see what it would become."""

    def _begin_call(self, name: str, arguments: str = "") -> ToolCallPiece:
        self.num_calls += 1
        return ToolCallPiece(self.num_calls - 1, arguments, new_call_id(), name)

    def _more(self, arguments: str) -> ToolCallPiece:
        return ToolCallPiece(self.num_calls - 1, arguments)


def create_tool_parser(tools: Tools, syntax: Syntax) -> ToolParser | None:
    """A parser for one answer, None where it can have no calls."""
    parser = _parser_for(tools, syntax)
    if parser is not None:
        parser.parallel = tools.parallel
    return parser


def _parser_for(tools: Tools, syntax: Syntax) -> ToolParser | None:
    match tools.mode:
        case "none":
            return None
        case "named":
            assert tools.name is not None
            return NamedParser(tools.name)
        case "required":
            return JsonParser(lambda _: True)
        case "auto":
            if syntax == "hermes":
                return HermesParser()
            return JsonParser(tools.names.__contains__)


def detect_syntax(template: str) -> Syntax:
    """How the models of a chat template write calls; Hermes' way where it does not say."""
    if _OPEN in template:
        return "hermes"
    if re.search(r"""["']parameters["']\s*:""", template) or _PYTHON_TAG in template:
        return "llama3_json"
    return "hermes"


class NamedParser(ToolParser):
    """The answer is the arguments of a tool that the request named."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def feed(self, text: str) -> Parsed:
        if not self.num_calls:
            return Parsed(calls=[self._begin_call(self._name, text)])
        return Parsed(calls=[self._more(text)] if text else [])

    def finish(self) -> Parsed:
        return self.feed("")


class _CallReader:
    """Reads a JSON object {"name": ..., "arguments" or "parameters": ...}, one run a time.

    Attributes:
        name: once it is there.
        done: the object is complete.
        failed: it is no call.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.done = self.failed = False
        self._text: list[str] = []
        self._arguments: list[str] = []  # not taken yet
        self._blanks: list[str] = []  # after them
        self._depth = 0
        self._in_string = self._escaped = False
        self._key: str | None = None
        self._value: list[str] = []  # of the current member, or its key while that is read
        self._is_object = False  # the value is no string
        self._saw_arguments = self._has_arguments = False

    @property
    def text(self) -> str:
        """All that was read."""
        return "".join(self._text)

    def take(self) -> str:
        """The arguments' text since the last call, without the blanks around them."""
        text = "".join(self._arguments)
        self._arguments = []
        return text

    def feed(self, text: str, at: int) -> int:
        """Reads one run from `at` on; where it ends."""
        run = self._run(text, at)
        self._text.append(run)
        if self._in_string:
            self._feed_string(run)
        elif self._depth == 0:
            if run == "{":
                self._depth = 1
            elif run[0] not in _BLANKS:
                self.failed = True
        else:
            self._feed_plain(run)
        return at + len(run)

    def _run(self, text: str, at: int) -> str:
        pattern = _STRING_RUN if self._in_string else _PLAIN_RUN if self._depth else _BLANK_RUN
        found = None if self._escaped else pattern.match(text, at)
        return found[0] if found else text[at]

    def _feed_string(self, run: str) -> None:
        self._add(run)
        if self._escaped:
            self._escaped = False
        elif run == "\\":
            self._escaped = True
        elif run == '"':
            self._in_string = False

    def _feed_plain(self, run: str) -> None:
        if self._depth == 1 and run == ":" and self._key is None:
            self._key = _json_string("".join(self._value))
            self._value = []
            self.failed = self._key is None
            return
        if self._depth == 1 and run in (",", "}"):
            self._end_member(is_last=run == "}")
            return
        if run in ("[", "{"):
            self._depth += 1
        elif run in ("]", "}"):
            self._depth -= 1
        self._in_string = run == '"'
        self._add(run)

    def _add(self, run: str) -> None:
        is_blank = run[0] in _BLANKS and not self._in_string
        if not self._value:
            if is_blank:
                return
            self._is_object = run != '"'  # some write the arguments as a string
        if not (self._is_object and self._key in ("arguments", "parameters")):
            self._value.append(run)
            return
        self._value = [run]
        if is_blank:
            self._blanks.append(run)
            return
        self._arguments += [*self._blanks, run]
        self._blanks = []

    def _end_member(self, *, is_last: bool) -> None:
        value = "".join(self._value)
        if self._key == "name":
            self.name = _json_string(value)
            self.failed = self.name is None
        elif self._key in ("arguments", "parameters"):
            self._saw_arguments = True
            if not self._is_object:
                self._arguments.append((_json_string(value) or "").strip())
        elif self._key is None and (value or not is_last):
            self.failed = True
        self._key, self._value, self._blanks = None, [], []
        if is_last:
            self.done = True
            self.failed = self.failed or self.name is None
            if not self._saw_arguments:
                self._arguments.append("{}")


def _json_string(text: str) -> str | None:
    if not text.startswith('"'):  # nor parsed: a model may nest brackets without end
        return None
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


class _Awaited:
    """A tag behind characters of `before`: held back while it may still come."""

    def __init__(self, tag: str, before: str) -> None:
        self._tag = tag
        self._before = re.compile(f"[{re.escape(before)}]+")
        self._held: list[str] = []
        self._num_found = 0

    def feed(self, text: str, at: int) -> tuple[int, bool | None]:
        """Reads on from `at`: where that ends, and whether the tag is there; None: it may come."""
        while at < len(text):
            run = None if self._num_found else self._before.match(text, at)
            if run is None and text[at] != self._tag[self._num_found]:
                return at, False
            self._num_found += run is None
            self._held.append(run[0] if run else text[at])
            at += len(self._held[-1])
            if self._num_found == len(self._tag):
                return at, True
        return at, None

    def take(self) -> str:
        """What was held back; it is awaited anew."""
        held, self._held, self._num_found = "".join(self._held), [], 0
        return held


class _ObjectsParser(ToolParser):
    """What both ways of writing calls as JSON objects share."""

    def __init__(self, is_tool: Callable[[str], bool]) -> None:
        super().__init__()
        self._is_tool = is_tool
        self._reader: _CallReader | None = None
        self._begun = False  # the call's name is out

    def feed(self, text: str) -> Parsed:
        parsed, at = Parsed(), 0
        while at < len(text):
            if self._reader is not None:
                at = self._feed_reader(self._reader, text, at, parsed)
            else:
                text, at = self._feed_text(text, at, parsed)
        return parsed

    @abstractmethod
    def _feed_text(self, text: str, at: int, parsed: Parsed) -> tuple[str, int]:
        """Reads some text outside of objects; what is to be read then, and from where."""

    @abstractmethod
    def _ended(self, *, is_call: bool) -> None:
        """An object is complete, or turned out to be no call."""

    def _as_content(self, text: str) -> str:
        """An object that is no call, as the model wrote it."""
        return text

    def _feed_reader(self, reader: _CallReader, text: str, at: int, parsed: Parsed) -> int:
        at = reader.feed(text, at)
        is_call = reader.name is None or self._begun or self._is_tool(reader.name)
        if (reader.failed and not self._begun) or not is_call:
            parsed.content += self._as_content(reader.text)
            self._reader = None
            self._ended(is_call=False)
            return at
        if reader.name is not None and not self._begun:
            self._begun = True
            parsed.calls.append(self._begin_call(reader.name))
        if self._begun and (arguments := reader.take()):
            if not parsed.calls or parsed.calls[-1].index != self.num_calls - 1:
                parsed.calls.append(self._more(""))
            parsed.calls[-1].arguments += arguments
        if reader.done:
            self._reader, self._begun = None, False
            self._ended(is_call=True)
        return at

    def finish(self) -> Parsed:
        """A call that was cut off after its name stays a call."""
        reader, self._reader = self._reader, None
        if reader is None or self._begun:
            return Parsed()
        return Parsed(self._as_content(reader.text))


class JsonParser(_ObjectsParser):
    """Objects one after another, in a list or with semicolons between; else it is all content."""

    def __init__(self, is_tool: Callable[[str], bool]) -> None:
        super().__init__(is_tool)
        self._beginning = _Awaited(_PYTHON_TAG, _BLANKS + "[")  # the tag that announces calls
        self._is_content = False

    def _ended(self, *, is_call: bool) -> None:
        self._is_content = not is_call

    def _feed_text(self, text: str, at: int, parsed: Parsed) -> tuple[str, int]:
        if self._is_content:
            parsed.content += text[at:]
            return text, len(text)
        if text[at] == "{":
            self._beginning.take()
            self._reader = _CallReader()
            return text, at
        if self.num_calls:
            between = _BETWEEN_RUN.match(text, at)
            self._is_content = between is None
            return text, between.end() if between else at
        at, is_there = self._beginning.feed(text, at)
        if is_there:
            self._beginning.take()
        elif is_there is False and text[at] != "{":
            parsed.content += self._beginning.take()
            self._is_content = True
        return text, at

    def finish(self) -> Parsed:
        parsed = super().finish()
        parsed.content = self._beginning.take() + parsed.content
        return parsed


class HermesParser(_ObjectsParser):
    """Objects between tags, text around them."""

    def __init__(self) -> None:
        super().__init__(lambda _: True)
        self._inside = False  # between a call's end and the closing tag
        self._tag = _Awaited(_OPEN, _BLANKS)

    def _ended(self, *, is_call: bool) -> None:
        self._await_tag(inside=is_call)

    def _await_tag(self, *, inside: bool) -> None:
        self._inside = inside
        self._tag = _Awaited(_CLOSE if inside else _OPEN, _BLANKS)

    def _feed_text(self, text: str, at: int, parsed: Parsed) -> tuple[str, int]:
        at, is_there = self._tag.feed(text, at)
        if is_there is None:
            return text, at
        held, was_inside = self._tag.take(), self._inside
        self._await_tag(inside=False)
        if is_there and not was_inside:
            self._reader = _CallReader()
        elif not is_there and was_inside:  # another tag may begin in what was held back
            return held + text[at:], 0
        elif not is_there:
            plain = _TEXT_RUN.match(text, at)
            parsed.content += held + (plain[0] if plain else "")
            at = plain.end() if plain else at
        return text, at

    def _as_content(self, text: str) -> str:
        return _OPEN + text

    def finish(self) -> Parsed:
        parsed, held = super().finish(), self._tag.take()
        if not self._inside and (held.strip() or not self.num_calls):
            parsed.content += held
        return parsed
