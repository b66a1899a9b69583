"""Reads the tool calls out of an answer while it is written. Pure, no I/O.

    text pieces -> ToolParser -> content (text that is no call) and ToolCallPieces

engine/text/tool_formats.py shows the formats.

A call's arguments are passed on as they come, as the model spells them, where its name comes before
them and they are JSON; else once it, or one of its parameters, is complete. Text that turns out to
be no call becomes content, so nothing of an answer is lost. Each character is looked at once,
however long blanks or brackets go on.
"""

import re
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from engine.text.chat_template import ChatTemplate
from engine.text.harmony import END, MESSAGE, START
from engine.text.tool_arguments import as_json, call_in, is_json, json_of_python, quoted
from engine.text.tool_formats import (
    CALL,
    CALLS,
    CLOSE,
    END_CALL,
    END_CALLS,
    HEADS,
    MAX_TAG,
    MISTRAL,
    OPEN,
    PYTHON_START,
    PYTHON_TAG,
    TAGS,
    Tags,
    tool_syntax,
)
from protocol.openai.tools import ToolCallPiece, Tools, call_id, parameters_of

_BLANKS = " \t\r\n"
_BETWEEN = _BLANKS + "[],;"
_PLAIN = re.compile(rf".[^<\[{_BLANKS}]*", re.DOTALL)  # where no tag begins
_STRING = r'"(?:[^"\\]|\\.)*"'
_HEAD = re.compile(
    rf'(\{{\s*"name"\s*:\s*{_STRING}\s*),\s*"(?:arguments|parameters)"\s*:\s*[{{\[]',
    re.DOTALL,
)

_MAX_HEAD = 512  # characters

# A reader asks for more text wherever it is, and returns what the last type says.
_T = TypeVar("_T")
_Reader = Generator[None, str, _T]


@dataclass
class Parsed:
    """What some text adds to an answer."""

    content: str = ""
    calls: list[ToolCallPiece] = field(default_factory=list)


def create_tool_parser(
    tools: Tools,
    option: str = "auto",
    template: ChatTemplate | None = None,
    answer_id: str = "",
) -> "ToolParser | None":
    """A parser for one answer, None where it can have no calls; see `tool_syntax`. Its calls' ids
    follow from `answer_id`."""
    if tools.mode == "none":
        return None
    syntax = tool_syntax(option, template)
    # Mistral's templates refuse any but short ids in the next turn.
    form = syntax if tools.mode == "auto" else tools.mode
    return ToolParser(tools, form, syntax == "mistral", answer_id)


class ToolParser:
    """One choice's answer. `feed` all of its text, then `finish` once.

    Attributes:
        num_calls: that the model wrote so far, told the client or not.
    """

    def __init__(
        self, tools: Tools, form: str, has_short_ids: bool = False, answer_id: str = ""
    ) -> None:
        self.num_calls = 0
        self._open = set[int]()  # the calls whose arguments are not complete
        self._is_ended = False  # no more text comes
        self._named_arguments: list[str] = []  # of the tool that the request names
        self._has_short_ids, self._answer_id = has_short_ids, answer_id
        self._tools = tools
        self._form = form
        self._text = ""  # not read yet
        self._parsed = Parsed()
        self._held: list[str] = []  # text that may become a tag or a call
        self._ends_call = False  # what is held belongs to the call before it
        self._depth, self._quoted, self._escaped = 0, "", False  # where an object is
        # What quotes texts in it, and opens and closes brackets.
        self._marks = ("\"'", "([{", ")]}") if form == "pythonic" else ('"', "[{", "]}")
        self._has_tags = form in (
            "hermes",
            "deepseek_v3",
        )  # which begin as no JSON does
        self._reader = _READERS[form](self)
        next(self._reader)

    @property
    def has_complete_calls(self) -> bool:
        """Whether there are calls, and each that the client receives has all of its arguments."""
        if self._form == "named":
            return is_json("".join(self._named_arguments))
        num_told = self.num_calls if self._tools.parallel else min(self.num_calls, 1)
        return num_told > 0 and self._open.isdisjoint(range(num_told))

    def feed(self, text: str) -> Parsed:
        self._parsed = Parsed()
        self._reader.send(text)
        return self._told()

    def finish(self) -> Parsed:
        """What was held back to see what it would become. A call that was cut off after its name
        stays a call."""
        self._parsed = Parsed()
        self._is_ended = True
        if self._form in TAGS:
            self._reader.send("")
        rest = "".join(self._held) + self._text
        if not (self._ends_call or (self.num_calls and not rest.strip())):
            self._parsed.content += rest
        if self._form == "named" and not self.num_calls:
            self._begin_call(self._tools.name)
        return self._told()

    def _told(self) -> Parsed:
        """What the client receives of the parsed text."""
        if not self._tools.parallel:
            self._parsed.calls = [
                call for call in self._parsed.calls if call.index == 0
            ]
        return self._parsed

    def _read_hermes(self) -> _Reader[None]:
        """Objects between tags, text around them."""
        while True:
            yield from self._content_to(OPEN)
            if (yield from self._call()):
                yield from self._skip("}")  # one too many
                yield from self._skip(CLOSE)

    def _read_mistral(self) -> _Reader[None]:
        """A tag before a list of objects, or before each name and its arguments."""
        while True:
            yield from self._content_to(MISTRAL)
            if (yield from self._peek()) not in ("[", "{"):
                yield from self._headed_call()
                continue
            between = _BLANKS + "["
            while (yield from self._call(between)):
                if (yield from self._skip("]")):
                    break
                self._ends_call, between = True, _BLANKS + ","

    def _read_deepseek(self) -> _Reader[None]:
        """Calls between tags of their own, and all of them between two that may be missing."""
        while True:
            yield from self._content_to(CALLS, CALL)
            if (yield from self._headed_call()):
                yield from self._skip("```")
                yield from self._skip(END_CALL)
                yield from self._skip(END_CALLS)

    def _read_tagged(self) -> _Reader[None]:
        """Functions and parameters between tags; the outermost ones may be missing."""
        tags = TAGS[self._form]
        while True:
            yield from self._content_to(*tags.begin)
            name = yield from self._head(tags.name_end)
            if not self._begin_call(name):
                self._let_go()
                continue
            if tags.key.startswith(tags.name_end):
                self._text = tags.name_end + self._text
            types = self._types_of(name)
            keys: list[str] = []
            while (yield from self._skip(tags.key)):
                self._ends_call = True
                key = yield from self._key(tags)
                margin = (
                    "" if tags.value and (yield from self._tag(tags.value)) else "\n"
                )
                before = ", " if keys else "{"
                keys.append(key)
                value, is_closed = yield from self._value(tags, types, keys)
                self._held = []
                value = value.removeprefix(margin).removesuffix(
                    margin if is_closed else "\n"
                )
                self._tell(f"{before}{quoted(key)}: {as_json(value, types.get(key))}")
            self._tell("}" if keys else "{}")
            self._end_call()
            for tag in tags.ends:
                yield from self._skip(tag)

    def _key(self, tags: Tags) -> _Reader[str]:
        """A parameter's name through its end, which may be missing before a value."""
        while len(self._text) < _MAX_HEAD:
            self._text = self._text.lstrip()
            ends = (self._text.find(end) for end in (tags.key_end, tags.value or "\n"))
            at = min((end for end in ends if end >= 0), default=-1)
            if at >= 0:
                key = self._text[:at]
                self._text = self._text[at:].removeprefix(tags.key_end)
                return key.strip()
            self._text += yield
        return (yield from self._to(tags.key_end))[: -len(tags.key_end)].strip()

    def _value(
        self, tags: Tags, types: Collection[str], keys: Collection[str]
    ) -> _Reader[tuple[str, bool]]:
        """A parameter's text, and whether its end tag was there. Where that is missing, the text
        ends before the next parameter, or where the call ends.

        Args:
            types: the names of the tool's parameters.
            keys: those that the call has so far.
        """
        parts = [""]
        at = 0  # the text before it is of the value
        while True:
            found = self._text.find("<", at)
            at = found if found >= 0 else len(self._text)
            before = self._text[at - 1] if at else parts[-1][-1:]
            names = () if before == "\n" else types
            is_end = tags.ends_value(self._text[at : at + MAX_TAG], keys, names)
            if is_end is False:
                at += 1
                continue
            if (
                is_end is None and self._is_ended
            ):  # the end tag is missing: another one counts
                self._text = "".join([*parts, self._text])
                parts = [""]
                ends = [end for tag in tags.ends if (end := self._text.find(tag)) >= 0]
                is_end = bool(ends) or None
                at = min(ends, default=0)
            if is_end:
                parts.append(self._text[:at])
                is_closed = self._text.startswith(tags.value_end, at)
                self._text = self._text[at:].removeprefix(tags.value_end)
                return "".join(parts), is_closed
            if at:
                parts.append(self._text[:at])
                self._text = self._text[at:]
                at = 0
            self._text += yield

    def _read_pythonic(self) -> _Reader[None]:
        """A list of Python's calls; else all is content."""
        yield from self._tag(PYTHON_START)
        is_list = yield from self._tag("[")
        while is_list and (name := (yield from self._head("("))):
            at, self._depth = len(self._held), 1
            yield from self._until((0,), self._held.append)
            arguments = json_of_python("".join(self._held[at:]))
            if arguments is None or not self._begin_call(name):
                break
            self._tell(arguments)
            self._end_call()
            if (yield from self._skip("]")):
                yield from self._skip("<|python_end|>")
                yield from self._peek()
                break
        yield from self._all_the_rest()

    def _read_json(self) -> _Reader[None]:
        """Objects one after another, in a list or with semicolons between; else all is content."""
        while (yield from self._tag(PYTHON_TAG, _BLANKS + "[")):
            pass  # it announces calls
        between = _BLANKS
        while (yield from self._call(between)):
            self._ends_call, between = True, _BETWEEN
        yield from self._all_the_rest()

    def _read_harmony(self) -> _Reader[None]:
        """START name MESSAGE arguments END, and text around them."""
        is_call = False
        while True:
            text, tag, self._text = self._text.partition(END if is_call else START)
            if is_call:
                self._tell(text)
            else:
                self._parsed.content += text
            if not tag:
                self._text = yield
            elif is_call := not is_call:
                self._begin_call((yield from self._to(MESSAGE))[:-1])
            else:
                self._end_call()

    def _all_the_rest(self) -> _Reader[None]:
        """Is content."""
        self._let_go()
        while True:
            self._parsed.content += self._rest()
            self._text = yield

    def _read_named(self) -> _Reader[None]:
        """The arguments of a tool that the request named."""
        self._text = yield
        self._begin_call(self._tools.name)
        while True:
            self._named_arguments.append(self._text)
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

    def _content_to(self, *tags: str) -> _Reader[None]:
        """Text up to the last of some tags, of which only that must be there."""
        while True:
            found = False
            for tag in tags:
                found = yield from self._tag(tag)
            if found:
                return
            self._let_go()
            if plain := _PLAIN.match(self._text):
                self._parsed.content += plain[0]
                self._text = self._text[plain.end() :]

    def _skip(self, tag: str) -> _Reader[bool]:
        """Whether a tag of the call that has begun comes next; another may begin in what is not."""
        self._ends_call = True
        found = yield from self._tag(tag)
        if not found:
            self._text = "".join(self._held) + self._text
        self._held, self._ends_call = [], False
        return found

    def _peek(self) -> _Reader[str]:
        """The next character behind blanks, which are held back."""
        yield from self._tag("")
        while not self._text:
            self._text += yield
            yield from self._tag("")
        return self._text[0]

    def _to(self, tag: str, limit: int = 1 << 62) -> _Reader[str]:
        """The text through a tag, which is held back; nothing, where so many characters are
        without one. Each character is looked at once."""
        parts, size, num_held = list[str](), 0, len(self._held)
        seen = ""  # the end of the parts, where the tag may have begun
        while True:
            at = (seen + self._text).find(tag)
            end = at + len(tag) - len(seen) if at >= 0 else len(self._text)
            if size + end > limit:
                self._text = "".join([*parts, self._text])
                del self._held[num_held:]
                return ""
            size += end
            parts.append(self._text[:end])
            self._held.append(self._text[:end])
            seen = (seen + self._text)[-len(tag) + 1 :] if len(tag) > 1 else ""
            self._text = self._text[end:]
            if at >= 0:
                return "".join(parts)
            self._text = yield

    def _head(self, end: str) -> _Reader[str | None]:
        """The name in a format's head, whose last character is `end`; None where it is none."""
        found = HEADS[self._form].fullmatch((yield from self._to(end, _MAX_HEAD)))
        return found and found["name"]

    def _headed_call(self) -> _Reader[bool]:
        """Reads a name, as the format's head has it, and the arguments; whether it was a call."""
        name = yield from self._head("{")
        if not self._begin_call(name):
            self._let_go()
            return False
        self._tell("{")
        self._depth = 1
        yield from self._until((0,), self._tell)
        self._end_call(is_whole=self._depth == 0)
        return True

    def _types_of(self, name: str | None) -> dict[str, Any]:
        """The schemas of a tool's parameters by their names."""
        own = (tool for tool in self._tools.offered if tool["function"]["name"] == name)
        properties = next((parameters_of(tool) for tool in own), {}).get("properties")
        return properties if isinstance(properties, dict) else {}

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
            if head and self._begin_call(call_in(head[1] + "}")[0]):
                self._tell(text[-1])
                yield from self._until((1,), self._tell)
                self._end_call(is_whole=self._depth == 1)
                if not (yield from self._skip(CLOSE)):  # without the last bracket
                    yield from self._until((0,), lambda text: None)
                return True
            if self._depth:
                yield from self._until((0,), self._held.append)
            name, arguments = call_in("".join(self._held[at:]))
            if self._begin_call(name):
                self._tell(arguments)
                self._end_call()
                return True
        self._let_go()
        return False

    def _until(
        self, depths: tuple[int, ...], take: Callable[[str], None]
    ) -> _Reader[None]:
        """Takes an object's text up to where its brackets come to be so deep, or up to a tag, where
        some of them are missing."""
        quotes, opening, closing = self._marks
        while True:
            for at, char in enumerate(self._text, 1):
                if self._escaped or (self._quoted and char == "\\"):
                    self._escaped = not self._escaped
                elif char == self._quoted:
                    self._quoted = ""
                elif self._quoted:
                    pass
                elif char in quotes:
                    self._quoted = char
                elif char == "<" and self._has_tags:
                    take(self._text[: at - 1])
                    self._text = self._text[at - 1 :]
                    return
                elif char in opening or char in closing:
                    self._depth += 1 if char in opening else -1
                    if self._depth in depths:
                        take(self._text[:at])
                        self._text = self._text[at:]
                        return
            take(self._rest())
            self._text = yield

    def _begin_call(self, name: str | None) -> bool:
        """Whether there is such a tool, whose call has begun."""
        is_sure = self._form not in (
            "llama3_json",
            "pythonic",
        )  # they look like other text
        if name is None or not (is_sure or name in self._tools.names):
            return False
        self._held = []
        at = self.num_calls
        self.num_calls += 1
        self._open.add(at)
        call = call_id(self._answer_id, at, self._has_short_ids)
        self._parsed.calls.append(ToolCallPiece(at, "", call, name))
        return True

    def _end_call(self, *, is_whole: bool = True) -> None:
        if is_whole:
            self._open.discard(self.num_calls - 1)

    def _tell(self, arguments: str) -> None:
        calls = self._parsed.calls
        if calls and calls[-1].name is None:  # which comes alone
            calls[-1].arguments += arguments
        elif arguments:
            calls.append(ToolCallPiece(self.num_calls - 1, arguments))


_READERS: Final = {
    "hermes": ToolParser._read_hermes,
    "llama3_json": ToolParser._read_json,
    "mistral": ToolParser._read_mistral,
    "deepseek_v3": ToolParser._read_deepseek,
    "qwen3_coder": ToolParser._read_tagged,
    "glm45": ToolParser._read_tagged,
    "pythonic": ToolParser._read_pythonic,
    "harmony": ToolParser._read_harmony,
    "required": ToolParser._read_json,
    "named": ToolParser._read_named,
}
