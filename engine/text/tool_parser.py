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
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from protocol.openai.tools import ToolCallPiece, Tools, new_call_id

Syntax = Literal["hermes", "llama3_json"]

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_BLANKS = " \t\r\n"
_ARGUMENTS = ("arguments", "parameters")

# Texts are read in runs, so that none is looked at again however long it gets.
_PLAIN_RUN = re.compile(r'[ \t\r\n]+|["{}\[\],:]|[^"{}\[\],: \t\r\n]+')  # of JSON
_STRING_RUN = re.compile(r'["\\]|[^"\\]+')  # inside a string of it
_ANY = re.compile(".", re.DOTALL)
_TEXT_RUN = re.compile("[^< \t\r\n]+")  # in which no tag begins, nor the blanks before one
_BLANK_RUN = re.compile(r"[ \t\r\n]+")
_BEFORE_TAG_RUN = re.compile(r"[ \t\r\n\[]+")
_BETWEEN_RUN = re.compile(r"[ \t\r\n\[\],;]+")

# A reader asks for more text wherever it is, and returns what the last type says.
_T = TypeVar("_T")
_Reader = Generator[None, str, _T]


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
    parser: ToolParser
    match tools.mode:
        case "none":
            return None
        case "named":
            assert tools.name is not None
            parser = NamedParser(tools.name)
        case "required":
            parser = JsonParser()
        case "auto":
            is_hermes = syntax == "hermes"
            parser = HermesParser() if is_hermes else JsonParser(tools.names.__contains__)
    parser.parallel = tools.parallel
    return parser


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


class _NoCall(Exception):
    """An object turned out to be no call."""


class _ObjectsParser(ToolParser):
    """What both ways of writing calls as JSON objects share."""

    def __init__(self, is_tool: Callable[[str], bool] = lambda _: True) -> None:
        super().__init__()
        self._is_tool = is_tool
        self._text, self._at = "", 0  # that came last, and how far it is read
        self._parsed = Parsed()
        self._held: list[str] = []  # back, as it may become a tag
        self._object: list[str] = []  # that may become a call
        self._begun = False  # the call's name is out
        self._arguments: list[str] = []  # that came before it
        self._reader = self._read()
        next(self._reader)

    def feed(self, text: str) -> Parsed:
        self._parsed = Parsed()
        self._reader.send(text)
        return self._parsed

    def finish(self) -> Parsed:
        """A call that was cut off after its name stays a call."""
        return Parsed("".join([*self._held, *self._object]))

    @abstractmethod
    def _read(self) -> _Reader[None]:
        """Reads the whole answer."""

    def _more_text(self) -> _Reader[None]:
        """Returns once there is a character to be read."""
        while self._at == len(self._text):
            self._text, self._at = (yield), 0

    def _run(self, pattern: re.Pattern[str]) -> _Reader[str]:
        """A run of `pattern`, as far as it is there, or one character; of an object."""
        yield from self._more_text()
        found = pattern.match(self._text, self._at)
        run = found[0] if found else self._text[self._at]
        self._at += len(run)
        if not self._begun:
            self._object.append(run)
        return run

    def _tag(self, tag: str, before: re.Pattern[str]) -> _Reader[bool]:
        """Whether a tag comes next, behind what `before` matches; what was read is held back."""
        num_found, self._held = 0, []
        while num_found < len(tag):
            yield from self._more_text()
            found = None if num_found else before.match(self._text, self._at)
            run = found[0] if found else self._text[self._at]
            if found is None:
                if run != tag[num_found]:
                    return False
                num_found += 1
            self._held.append(run)
            self._at += len(run)
        return True

    def _call(self, begin: str) -> _Reader[bool]:
        """Reads a JSON object {"name": ..., "arguments" or "parameters": ...}; whether it was a
        call. If not it is content, behind `begin`, as the model wrote it."""
        self._held, self._object, self._arguments = [], [begin], []
        try:
            yield from self._members()
        except _NoCall:
            self._parsed.content += "".join(self._object)
        is_call, self._begun, self._object = self._begun, False, []
        return is_call

    def _members(self) -> _Reader[None]:
        while (run := (yield from self._run(_BLANK_RUN))) != "{":
            self._require(run[0] in _BLANKS)
        end, has_arguments = "", False
        while end != "}":
            end, text = yield from self._value(":,}")
            if end != ":":
                self._require(end == "}" and not text)  # an empty object, or a comma at its end
                continue
            key = _json_string(text)
            self._require(key is not None)
            end, text = yield from self._value(",}", streams=key in _ARGUMENTS)
            if key == "name":
                self._named(_json_string(text))
            elif key in _ARGUMENTS:
                has_arguments = True
                if text.startswith('"'):  # some write the arguments as a string
                    self._tell((_json_string(text) or "").strip())
        self._require(self._begun)
        if not has_arguments:
            self._tell("{}")

    def _require(self, holds: bool) -> None:
        """Once a call's name is out, it is one, whatever follows."""
        if not (holds or self._begun):
            raise _NoCall

    def _named(self, name: str | None) -> None:
        if self._begun:
            return
        if name is None or not self._is_tool(name):
            raise _NoCall
        self._begun, self._object = True, []
        self._parsed.calls.append(self._begin_call(name, "".join(self._arguments)))

    def _tell(self, arguments: str) -> None:
        if not self._begun:
            self._arguments.append(arguments)
            return
        calls = self._parsed.calls
        if not calls or calls[-1].index != self.num_calls - 1:
            calls.append(self._more(""))
        calls[-1].arguments += arguments

    def _value(self, stops: str, *, streams: bool = False) -> _Reader[tuple[str, str]]:
        """Reads a key or value up to one of `stops`: that, and the text without the blanks around
        it. Of one that `streams`, and is no string, all is told as it comes."""
        parts: list[str] = []
        blanks: list[str] = []
        depth, quoted, escaped = 0, False, False
        while True:
            pattern = _ANY if escaped else _STRING_RUN if quoted else _PLAIN_RUN
            run = yield from self._run(pattern)
            if quoted:
                quoted, escaped = escaped or run != '"', run == "\\" and not escaped
            elif run in stops and not depth:
                return run, "".join(parts)
            elif run[0] in _BLANKS:
                blanks += [run] if parts else []
                continue
            else:
                quoted = run == '"'
                depth += (run in "[{") - (run in "]}")
                self._require(depth >= 0)
            if streams and (parts or [run])[0] != '"':
                self._tell("".join([*blanks, run]))
                parts = parts or [run]
            else:
                parts += [*blanks, run]
            blanks = []


def _json_string(text: str) -> str | None:
    if not text.startswith('"'):  # nor parsed: a model may nest brackets without end
        return None
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


class JsonParser(_ObjectsParser):
    """Objects one after another, in a list or with semicolons between; else it is all content."""

    def _read(self) -> _Reader[None]:
        is_call = True
        while is_call:
            yield from self._more_text()
            if self._text[self._at] == "{":
                is_call = yield from self._call("")
            elif self.num_calls:
                between = _BETWEEN_RUN.match(self._text, self._at)
                is_call = between is not None
                self._at = between.end() if between else self._at
            elif (yield from self._tag(_PYTHON_TAG, _BEFORE_TAG_RUN)):  # which announces calls
                self._held = []
            elif self._text[self._at] != "{":
                break
        self._parsed.content += "".join(self._held)
        self._held = []
        while True:
            yield from self._more_text()
            self._parsed.content += self._text[self._at :]
            self._at = len(self._text)


class HermesParser(_ObjectsParser):
    """Objects between tags, text around them."""

    _inside = False  # between a call's end and the closing tag

    def _read(self) -> _Reader[None]:
        while True:
            is_there = yield from self._tag(_CLOSE if self._inside else _OPEN, _BLANK_RUN)
            if self._inside:
                if not is_there:  # another tag may begin in what was held back
                    self._text, self._at = "".join(self._held) + self._text[self._at :], 0
                self._inside = False
            elif is_there:
                self._inside = yield from self._call(_OPEN)
            else:
                plain = _TEXT_RUN.match(self._text, self._at)
                self._parsed.content += "".join(self._held) + (plain[0] if plain else "")
                self._at = plain.end() if plain else self._at

    def finish(self) -> Parsed:
        is_blank = not "".join(self._held).strip()
        if self._inside or (is_blank and self.num_calls):
            self._held = []
        return super().finish()
