"""Reads the tool calls out of an answer while it is written. Pure, no I/O.

    text pieces -> ToolParser -> content (text that is no call) and ToolCallPieces

What models write, by what their chat templates teach them:

    hermes       text <tool_call>{"name": "f", "arguments": {...}}</tool_call> <tool_call>...
    llama3_json  {"name": "f", "parameters": {...}}; {...}      nothing but calls
    required     [{"name": "f", "parameters": {...}}, ...]      as the grammar enforces it
    named        {...}                                          the arguments alone

A call's arguments are passed on as they come, as the model spells them, where its name comes before
them; else once it is complete. Text that turns out to be no call becomes content, so nothing of an
answer is lost. Each character is looked at once, however long blanks or brackets go on.
"""

import json
import re
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Final, Literal, TypeVar

from engine.text.chat_template import ChatTemplate
from protocol.openai.tools import ToolCallPiece, Tools, new_call_id

Syntax = Literal["hermes", "llama3_json"]

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_BLANKS = " \t\r\n"
_BETWEEN = _BLANKS + "[],;"
_PLAIN = re.compile(rf".[^<{_BLANKS}]*", re.DOTALL)  # where no tag begins
_STRING = r'"(?:[^"\\]|\\.)*"'
_HEAD = re.compile(
    rf'(\{{\s*"name"\s*:\s*{_STRING}\s*),\s*"(?:arguments|parameters)"\s*:\s*[{{\[]', re.DOTALL
)

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


class ToolParser:
    """One choice's answer. `feed` all of its text, then `finish` once.

    Attributes:
        num_calls: that the model wrote so far, told the client or not.
    """

    def __init__(self, tools: Tools, form: str) -> None:
        self.num_calls = 0
        self._tools = tools
        self._form = form
        self._text = ""  # not read yet
        self._parsed = Parsed()
        self._held: list[str] = []  # text that may become a tag or a call
        self._ends_call = False  # what is held belongs to the call before it
        self._depth, self._quoted, self._escaped = 0, False, False  # where an object is
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
        self._parsed = Parsed("".join(self._held) + self._text)
        if self._ends_call or (self.num_calls and not self._parsed.content.strip()):
            self._parsed.content = ""
        if self._form == "named" and not self.num_calls:
            self._begin_call(self._tools.name)
        return self._parsed

    def _read_hermes(self) -> _Reader[None]:
        """Objects between tags, text around them."""
        while True:
            if not (yield from self._tag(_OPEN)):
                self._let_go()
                if plain := _PLAIN.match(self._text):
                    self._parsed.content += plain[0]
                    self._text = self._text[plain.end() :]
            elif (yield from self._call()):
                self._ends_call = True
                if not (yield from self._tag(_CLOSE)):  # another tag may begin in that
                    self._text = "".join(self._held) + self._text
                self._held, self._ends_call = [], False

    def _read_json(self) -> _Reader[None]:
        """Objects one after another, in a list or with semicolons between; else all is content."""
        while (yield from self._tag(_PYTHON_TAG, _BLANKS + "[")):
            pass  # it announces calls
        between = _BLANKS
        while (yield from self._call(between)):
            self._ends_call, between = True, _BETWEEN
        while True:
            self._parsed.content += self._rest()
            self._text = yield

    def _read_named(self) -> _Reader[None]:
        """The arguments of a tool that the request named."""
        self._text = yield
        self._begin_call(self._tools.name)
        while True:
            self._tell(self._rest())
            self._text = yield

    def _tag(self, tag: str, before: str = _BLANKS) -> _Reader[bool]:
        """Whether a tag comes next, behind any of `before`; what is read is held back."""
        while True:
            text = self._text.lstrip(before)
            self._held.append(self._text[: len(self._text) - len(text)])
            self._text = text
            if text.startswith(tag):
                self._held.append(tag)
                self._text = text[len(tag) :]
                return True
            if not tag.startswith(text):
                return False
            self._text += yield

    def _rest(self) -> str:
        text, self._text = self._text, ""
        return text

    def _let_go(self) -> None:
        """What is held back has become content."""
        self._parsed.content += "".join(self._held)
        self._held = []

    def _call(self, before: str = _BLANKS) -> _Reader[bool]:
        """Reads a JSON object {"name": ..., "arguments" or "parameters": ...}; whether it was a
        call. If not it is content, as the model wrote it."""
        is_object = yield from self._tag("{", before)
        if self._ends_call:
            self._held, self._ends_call = ["{"] * is_object, False
        if is_object:
            at = len(self._held) - 1
            self._depth = 1
            yield from self._until((0, 2), self._held.append)
            text = "".join(self._held[at:])
            head = _HEAD.fullmatch(text)
            if head and self._begin_call(_call_in(head[1] + "}")[0]):
                self._tell(text[-1])
                yield from self._until((1,), self._tell)
                yield from self._until((0,), lambda text: None)
                return True
            if self._depth:
                yield from self._until((0,), self._held.append)
            name, arguments = _call_in("".join(self._held[at:]))
            if self._begin_call(name):
                self._tell(arguments)
                return True
        self._let_go()
        return False

    def _until(self, depths: tuple[int, ...], take: Callable[[str], None]) -> _Reader[None]:
        """Takes an object's text up to where its brackets come to be so deep."""
        while True:
            for at, char in enumerate(self._text, 1):
                if self._escaped or (self._quoted and char == "\\"):
                    self._escaped = not self._escaped
                elif char == '"':
                    self._quoted = not self._quoted
                elif not self._quoted and char in "{[]}":
                    self._depth += 1 if char in "{[" else -1
                    if self._depth in depths:
                        take(self._text[:at])
                        self._text = self._text[at:]
                        return
            take(self._rest())
            self._text = yield

    def _begin_call(self, name: str | None) -> bool:
        """Whether there is such a tool, whose call has begun."""
        if name is None or (self._form == "llama3_json" and name not in self._tools.names):
            return False
        self._held = []
        self.num_calls += 1
        self._parsed.calls.append(ToolCallPiece(self.num_calls - 1, "", new_call_id(), name))
        return True

    def _tell(self, arguments: str) -> None:
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


def _call_in(text: str) -> tuple[str | None, str]:
    """A tool's name, None where `text` is no call, and the arguments."""
    try:
        found = json.loads(text)
        name, given = found["name"], found.get("arguments", found.get("parameters", {}))
        # Some write the arguments as a string.
        arguments = (
            given.strip() if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        )
        (name + arguments).encode()
    except (LookupError, TypeError, ValueError, RecursionError):
        return None, ""
    return name, arguments
