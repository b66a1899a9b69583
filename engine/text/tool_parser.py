"""Reads the tool calls out of an answer while it is written. Pure, no I/O.

    text pieces -> ToolParser -> content (text that is no call) and ToolCallPieces

What models write, by what their chat templates teach them:

    hermes       text <tool_call>{"name": "f", "arguments": {...}}</tool_call> <tool_call>...
    llama3_json  {"name": "f", "parameters": {...}}; {...}      nothing but calls
    required     [{"name": "f", "parameters": {...}}, ...]      as the grammar enforces it
    named        {...}                                          the arguments alone

A call is passed on once its name is there, its arguments as they come, as the model spells them:
a JSON library would spell them anew. Text that turns out to be no call becomes content, so nothing
of an answer is lost. Each character is looked at once, however long blanks or brackets go on.
"""

import json
import re
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Final, Literal, TypeVar

from engine.text.chat_template import ChatTemplate
from protocol.openai.tools import ToolCallPiece, Tools, new_call_id

Syntax = Literal["hermes", "llama3_json"]

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_BLANKS = " \t\r\n"
_BETWEEN = _BLANKS + "[],;"
_ARGUMENTS = ("arguments", "parameters")

# A reader asks for more text wherever it is, and returns what the last type says.
_T = TypeVar("_T")
_Reader = Generator[None, str, _T]


@dataclass
class Parsed:
    """What some text adds to an answer."""

    content: str = ""
    calls: list[ToolCallPiece] = field(default_factory=list)


def tool_syntax(option: str, template: ChatTemplate | None) -> Syntax:
    """How the model writes calls: `--tool-call-parser`, or as its chat template shows; Hermes' way
    where that does not say."""
    source = template.source if template and template.knows_tools else ""
    shows_json = re.search(r"""["']parameters["']\s*:""", source) or _PYTHON_TAG in source
    is_json = option == "llama3_json" if option != "auto" else shows_json and _OPEN not in source
    return "llama3_json" if is_json else "hermes"


def create_tool_parser(
    tools: Tools, option: str = "auto", template: ChatTemplate | None = None
) -> "ToolParser | None":
    """A parser for one answer, None where it can have no calls; see `tool_syntax`."""
    if tools.mode == "none":
        return None
    return ToolParser(tools, tool_syntax(option, template) if tools.mode == "auto" else tools.mode)


class _NoCall(Exception):
    """An object turned out to be no call."""


class ToolParser:
    """One choice's answer. `feed` all of its text, then `finish` once.

    Attributes:
        num_calls: that the model wrote so far, told the client or not.
    """

    def __init__(self, tools: Tools, form: str) -> None:
        self.num_calls = 0
        self._tools = tools
        self._form = form
        self._text, self._at = "", 0  # that came last, and how far it is read
        self._parsed = Parsed()
        self._held: list[str] = []  # text that may become a tag or a call
        self._ends_call = False  # between a call and its closing tag
        self._begun = False  # the call's name is out
        self._early: list[str] = []  # arguments that came before it
        self._reader = _READERS[form](self)
        next(self._reader)

    def feed(self, text: str) -> Parsed:
        self._parsed = Parsed()
        self._reader.send(text)
        if not self._tools.parallel:
            self._parsed.calls = [call for call in self._parsed.calls if call.index == 0]
        return self._parsed

    def finish(self) -> Parsed:
        """What was held back to see what it would become. A call that was cut off after its name
        stays a call."""
        self._parsed = Parsed("".join(self._held))
        if self._ends_call or (self.num_calls and not self._parsed.content.strip()):
            self._parsed.content = ""
        if self._form == "named" and not self.num_calls:
            self._begin_call(self._tools.name or "")
        return self._parsed

    def _read_hermes(self) -> _Reader[None]:
        """Objects between tags, text around them."""
        while True:
            if (yield from self._tag(_OPEN)):
                if (yield from self._call()):
                    self._ends_call = True
                    if not (yield from self._tag(_CLOSE)):  # another tag may begin in that
                        self._text, self._at = "".join(self._held) + self._text[self._at :], 0
                    self._held, self._ends_call = [], False
                continue
            self._let_go()
            if (char := self._text[self._at]) not in "<" + _BLANKS:
                self._parsed.content += char
                self._at += 1

    def _read_json(self) -> _Reader[None]:
        """Objects one after another, in a list or with semicolons between; else all is content."""
        while (yield from self._tag(_PYTHON_TAG, _BLANKS + "[")):
            pass  # it announces calls
        is_call = True
        while is_call:
            char = yield from self._peek()
            if char == "{":
                is_call = yield from self._call()
            else:
                is_call = self.num_calls > 0 and char in _BETWEEN
                self._at += is_call
        self._let_go()
        while True:
            self._parsed.content += self._text[self._at :]
            self._at = len(self._text)
            yield from self._peek()

    def _read_named(self) -> _Reader[None]:
        """The arguments of a tool that the request named."""
        yield from self._peek()
        self._begin_call(self._tools.name or "")
        while True:
            self._tell(self._text[self._at :])
            self._at = len(self._text)
            yield from self._peek()

    def _peek(self) -> _Reader[str]:
        """The next character, once there is one."""
        while self._at == len(self._text):
            self._text, self._at = (yield), 0
        return self._text[self._at]

    def _char(self) -> _Reader[str]:
        """The next character of an object."""
        char = yield from self._peek()
        self._at += 1
        if not self._begun:
            self._held.append(char)
        return char

    def _tag(self, tag: str, before: str = _BLANKS) -> _Reader[bool]:
        """Whether a tag comes next, behind any of `before`; all that is read is held back."""
        num_found = 0
        while num_found < len(tag):
            char = yield from self._peek()
            if char == tag[num_found]:
                num_found += 1
            elif num_found or char not in before:
                return False
            self._held.append(char)
            self._at += 1
        return True

    def _let_go(self) -> None:
        """What is held back has become content."""
        self._parsed.content += "".join(self._held)
        self._held = []

    def _call(self) -> _Reader[bool]:
        """Reads a JSON object {"name": ..., "arguments" or "parameters": ...}; whether it was a
        call. If not it is content, as the model wrote it."""
        self._early = []
        try:
            yield from self._members()
        except _NoCall:
            self._let_go()
        is_call, self._begun = self._begun, False
        return is_call

    def _members(self) -> _Reader[None]:
        while (char := (yield from self._char())) != "{":
            self._require(char in _BLANKS)
        end, has_arguments = "", False
        while end != "}":
            end, text = yield from self._value(":,}")
            if end != ":":
                self._require(end == "}" and not text)  # an empty object, or a comma at its end
                continue
            key = _json_string(text)
            self._require(key is not None)
            end, text = yield from self._value(",}", streams=key in _ARGUMENTS)
            if key == "name" and not self._begun:
                self._name(_json_string(text))
            elif key in _ARGUMENTS:
                has_arguments = True
                if text.startswith('"'):  # some write the arguments as a string
                    self._tell((_json_string(text) or "").strip())
        self._require(self._begun)
        if not has_arguments:
            self._tell("{}")

    def _value(self, stops: str, *, streams: bool = False) -> _Reader[tuple[str, str]]:
        """Reads a key or value up to one of `stops`: that, and the text without the blanks around
        it. One that `streams`, and is no string, is told as it comes."""
        text: list[str] = []
        blanks: list[str] = []
        depth, quoted, escaped = 0, False, False
        while True:
            char = yield from self._char()
            if quoted:
                quoted, escaped = escaped or char != '"', char == "\\" and not escaped
            elif char in stops and not depth:
                return char, "".join(text)
            elif char in _BLANKS:
                blanks += [char] if text else []
                continue
            else:
                quoted = char == '"'
                depth += (char in "[{") - (char in "]}")
                self._require(depth >= 0)
            if streams and (text or [char])[0] != '"':
                self._tell("".join([*blanks, char]))
                text = text or [char]
            else:
                text += [*blanks, char]
            blanks = []

    def _require(self, holds: bool) -> None:
        """Once a call's name is out, it is one, whatever follows."""
        if not (holds or self._begun):
            raise _NoCall

    def _name(self, name: str | None) -> None:
        if name is None or (self._form == "llama3_json" and name not in self._tools.names):
            raise _NoCall
        self._begun, self._held = True, []
        self._begin_call(name)
        self._tell("".join(self._early))

    def _begin_call(self, name: str) -> None:
        self.num_calls += 1
        self._parsed.calls.append(ToolCallPiece(self.num_calls - 1, "", new_call_id(), name))

    def _tell(self, arguments: str) -> None:
        if self._form != "named" and not self._begun:
            self._early.append(arguments)
            return
        calls = self._parsed.calls
        if not calls or calls[-1].index != self.num_calls - 1:
            calls.append(ToolCallPiece(self.num_calls - 1))
        calls[-1].arguments += arguments


_READERS: Final = {
    "hermes": ToolParser._read_hermes,
    "llama3_json": ToolParser._read_json,
    "required": ToolParser._read_json,
    "named": ToolParser._read_named,
}


def _json_string(text: str) -> str | None:
    if not text.startswith('"'):  # nor parsed: a model may nest brackets without end
        return None
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
