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

from protocol.openai_tools import ToolCallPiece, Tools, new_call_id

Syntax = Literal["hermes", "llama3_json"]

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_BLANKS = " \t\r\n"


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
    """Reads a JSON object {"name": ..., "arguments" or "parameters": ...}, one character a time.

    Attributes:
        text: all that was read.
        name: once it is there.
        done: the object is complete.
        failed: it is no call.
    """

    def __init__(self) -> None:
        self.text = ""
        self.name: str | None = None
        self.done = self.failed = False
        self._arguments = ""
        self._depth = 0
        self._in_string = self._escaped = False
        self._key: str | None = None
        self._value = ""  # of the current member, or its key while that is read
        self._saw_arguments = self._has_taken = False

    def take(self) -> str:
        """The arguments' text since the last call, without the blanks around them."""
        text = self._arguments if self._has_taken else self._arguments.lstrip()
        solid = text.rstrip()
        self._arguments = text[len(solid) :]
        self._has_taken = self._has_taken or bool(solid)
        return solid

    def feed(self, char: str) -> None:
        self.text += char
        if self._in_string:
            self._feed_string(char)
        elif self._depth == 0:
            if char == "{":
                self._depth = 1
            elif char not in _BLANKS:
                self.failed = True
        else:
            self._feed_plain(char)

    def _feed_string(self, char: str) -> None:
        self._add(char)
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False

    def _feed_plain(self, char: str) -> None:
        if self._depth == 1 and char == ":" and self._key is None:
            self._key = _json_string(self._value)
            self._value = ""
            self.failed = self._key is None
            return
        if self._depth == 1 and char in ",}":
            self._end_member(is_last=char == "}")
            return
        if char in "[{":
            self._depth += 1
        elif char in "]}":
            self._depth -= 1
        self._in_string = char == '"'
        self._add(char)

    def _add(self, char: str) -> None:
        self._value += char
        is_object = not self._value.lstrip().startswith('"')  # some write them as a string
        if is_object and self._key in ("arguments", "parameters"):
            self._arguments += char

    def _end_member(self, *, is_last: bool) -> None:
        if self._key == "name":
            self.name = _json_string(self._value)
            self.failed = self.name is None
        elif self._key in ("arguments", "parameters"):
            self._saw_arguments = True
            self._arguments += _json_string(self._value) or ""
        elif self._key is None and (self._value.strip() or not is_last):
            self.failed = True
        self._key, self._value = None, ""
        if is_last:
            self.done = True
            self.failed = self.failed or self.name is None
            if not self._saw_arguments:
                self._arguments = "{}"


def _json_string(text: str) -> str | None:
    if not text.lstrip().startswith('"'):  # nor parsed: a model may nest brackets without end
        return None
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


class _ObjectsParser(ToolParser):
    """What both ways of writing calls as JSON objects share."""

    def __init__(self, is_tool: Callable[[str], bool]) -> None:
        super().__init__()
        self._is_tool = is_tool
        self._reader: _CallReader | None = None
        self._begun = False  # the call's name is out

    def _as_content(self, text: str) -> str:
        """An object that is no call, as the model wrote it."""
        return text

    def _feed_reader(self, reader: _CallReader, char: str, parsed: Parsed) -> None:
        reader.feed(char)
        is_call = reader.name is None or self._begun or self._is_tool(reader.name)
        if (reader.failed and not self._begun) or not is_call:
            parsed.content += self._as_content(reader.text)
            self._reader = None
            return
        if reader.name is not None and not self._begun:
            self._begun = True
            parsed.calls.append(self._begin_call(reader.name))
        if self._begun and (text := reader.take()):
            if not parsed.calls or parsed.calls[-1].index != self.num_calls - 1:
                parsed.calls.append(self._more(""))
            parsed.calls[-1].arguments += text
        if reader.done:
            self._reader, self._begun = None, False

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
        self._held = ""  # the very beginning: blanks, or the tag that announces calls
        self._is_content = False

    def feed(self, text: str) -> Parsed:
        parsed = Parsed()
        for char in text:
            if self._reader is not None:
                self._feed_reader(self._reader, char, parsed)
                self._is_content = self._is_content or bool(parsed.content)
            elif self._is_content:
                parsed.content += char
            elif char == "{":
                self._held = ""
                self._reader = _CallReader()
                self._reader.feed(char)
            else:
                self._feed_between(char, parsed)
        return parsed

    def _feed_between(self, char: str, parsed: Parsed) -> None:
        if self.num_calls:
            if char not in _BLANKS + "[],;":
                self._is_content = True
                parsed.content += char
            return
        self._held += char
        begin = self._held.lstrip(_BLANKS + "[")
        if not _PYTHON_TAG.startswith(begin):
            self._is_content = True
            parsed.content, self._held = parsed.content + self._held, ""
        elif begin == _PYTHON_TAG:
            self._held = ""

    def finish(self) -> Parsed:
        parsed = super().finish()
        parsed.content = self._held + parsed.content
        return parsed


class HermesParser(_ObjectsParser):
    """Objects between tags, text around them."""

    def __init__(self) -> None:
        super().__init__(lambda _: True)
        self._held = ""  # perhaps a tag, or the blanks before one
        self._inside = False  # between a call's end and the closing tag

    def feed(self, text: str) -> Parsed:
        parsed = Parsed()
        for char in text:
            if self._reader is not None:
                num_before = self.num_calls - self._begun
                self._feed_reader(self._reader, char, parsed)
                self._inside = self._reader is None and self.num_calls > num_before
            elif self._inside:
                self._feed_after(char, parsed)
            else:
                self._feed_text(char, parsed)
        return parsed

    def _feed_text(self, char: str, parsed: Parsed) -> None:
        self._held += char
        tag = self._held.lstrip(_BLANKS)
        while not _OPEN.startswith(tag):
            # Give out the first character that cannot be the beginning of blanks and a tag.
            cut = len(self._held) - len(tag) + 1
            parsed.content += self._held[:cut]
            self._held = self._held[cut:]
            tag = self._held.lstrip(_BLANKS)
        if tag == _OPEN:
            self._held = ""
            self._reader = _CallReader()

    def _feed_after(self, char: str, parsed: Parsed) -> None:
        self._held += char
        tag = self._held.lstrip(_BLANKS)
        if tag == _CLOSE:
            self._held, self._inside = "", False
        elif not _CLOSE.startswith(tag):
            held, self._held, self._inside = self._held, "", False
            for one in held:
                self._feed_text(one, parsed)

    def _as_content(self, text: str) -> str:
        return _OPEN + text

    def finish(self) -> Parsed:
        parsed = super().finish()
        if not self._inside and (self._held.strip() or not self.num_calls):
            parsed.content += self._held
        return parsed
