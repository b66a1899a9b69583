"""Formats that write each parameter of a call between tags of its own. Pure, no I/O.

Models leave end tags out. A parameter's value ends at its own end tag. Where that is
missing, it ends before the next parameter: one of the tool that the call does not have
yet, or any parameter on a line of its own. Else it ends with the call.
"""

import re
from collections.abc import Collection
from typing import Any, ClassVar, NamedTuple

from engine.text.tool_arguments import parameter_to_json, quoted
from engine.text.tool_calls.answer_reader import MAX_HEAD, Reader
from engine.text.tool_calls.format import ToolCallFormat
from protocol.openai.tools import parameters_of

# Characters from a "<" on that decide whether it begins a tag, blanks included.
MAX_TAG = 128
_PARAMETER = re.compile(r"[\w.-]+")


class Tags(NamedTuple):
    """The tags of a format.

    Attributes:
        begin: the tags that begin a call, of which only the last is required.
        name_end: what ends the tool's name; it may be the start of the next tag.
        key: what begins a parameter's name.
        key_end: what ends a parameter's name.
        value: what begins a value. If it is empty, the line breaks at the two ends of a
            value do not belong to the value.
        value_end: what ends a value.
        ends: the tags that end a call.
        after_call: texts, without blanks, that no value contains but that follow a
            call.
    """

    begin: tuple[str, ...]
    name_end: str
    key: str
    key_end: str
    value: str
    value_end: str
    ends: tuple[str, ...]
    after_call: tuple[str, ...]

    def ends_value(
        self, text: str, keys: Collection[str], names: Collection[str]
    ) -> bool | None:
        """Return whether a value ends before `text`, perhaps without its end tag.

        Returns None if that depends on more text.

        Args:
            text: the next MAX_TAG characters from a "<" on, or as many as there are.
            keys: the parameters that the call has so far; each occurs once.
            names: the parameters that may follow; if empty, any may.
        """
        if text.startswith(self.key):
            name, end, _ = text[len(self.key) :].partition(self.key_end)
            if end:
                name = name.strip()
                is_allowed = not names or name in names
                is_name = bool(_PARAMETER.fullmatch(name)) and is_allowed
                return is_name and name not in keys
        bare = "".join(text.split())
        if text.startswith(self.value_end) or bare.startswith(self.after_call):
            return True
        tags = (self.key, self.value_end, *self.after_call)
        may_be_tag = text.startswith(self.key) or any(
            tag.startswith(bare) for tag in tags
        )
        return None if may_be_tag and len(text) < MAX_TAG else False


class ParameterTagsFormat(ToolCallFormat):
    """A format of functions and parameters between tags.

    Attributes:
        tags: the format's tags.
        head: the pattern of a tool's name through `tags.name_end`.
    """

    tags: ClassVar[Tags]
    head: ClassVar[re.Pattern[str]]
    reads_at_end = True  # the last value may lack its end tag

    def read(self) -> Reader[None]:
        """Read calls; their outermost tags may be missing."""
        tags = self.tags
        answer = self.answer
        while True:
            yield from answer.read_content_through(*tags.begin)
            name = yield from answer.read_name(self.head, tags.name_end)
            if not answer.begin_call(name):
                answer.release_held()
                continue
            if tags.key.startswith(tags.name_end):
                answer.text = tags.name_end + answer.text
            yield from self._read_parameters(self._schemas_of(name))
            answer.end_call()
            for tag in tags.ends:
                yield from answer.skip_tag(tag)

    def _read_parameters(self, schemas: dict[str, Any]) -> Reader[None]:
        """Read the parameters of a call, and pass each on as JSON when it is complete.

        Args:
            schemas: the schemas of the tool's parameters by name.
        """
        tags = self.tags
        answer = self.answer
        keys: list[str] = []
        while (yield from answer.skip_tag(tags.key)):
            answer.held_belongs_to_call = True
            key = yield from self._read_key()
            margin = "\n"
            if tags.value and (yield from answer.match_tag(tags.value)):
                margin = ""
            before = ", " if keys else "{"
            keys.append(key)
            value, is_closed = yield from self._read_value(schemas, keys)
            answer.held = []
            value = value.removeprefix(margin)
            value = value.removesuffix(margin if is_closed else "\n")
            json_value = parameter_to_json(value, schemas.get(key))
            answer.add_arguments(f"{before}{quoted(key)}: {json_value}")
        answer.add_arguments("}" if keys else "{}")

    def _read_key(self) -> Reader[str]:
        """Return a parameter's name, and read through its end.

        The end may be missing where a value follows.
        """
        tags = self.tags
        answer = self.answer
        while len(answer.text) < MAX_HEAD:
            answer.text = answer.text.lstrip()
            ends = (answer.text.find(end) for end in (tags.key_end, tags.value or "\n"))
            at = min((end for end in ends if end >= 0), default=-1)
            if at >= 0:
                key = answer.text[:at]
                answer.text = answer.text[at:].removeprefix(tags.key_end)
                return key.strip()
            answer.text += yield
        text = yield from answer.read_through(tags.key_end)
        return text[: -len(tags.key_end)].strip()

    def _read_value(
        self, names: Collection[str], keys: Collection[str]
    ) -> Reader[tuple[str, bool]]:
        """Return a parameter's text, and whether its end tag was there.

        Args:
            names: the names of the tool's parameters.
            keys: the parameters that the call has so far.
        """
        tags = self.tags
        answer = self.answer
        parts = [""]
        at = 0  # the text before this position belongs to the value
        while True:
            next_tag = answer.text.find("<", at)
            at = next_tag if next_tag >= 0 else len(answer.text)
            before = answer.text[at - 1] if at else parts[-1][-1:]
            allowed = () if before == "\n" else names
            is_end = tags.ends_value(answer.text[at : at + MAX_TAG], keys, allowed)
            if is_end is False:
                at += 1
                continue
            if is_end is None and answer.is_ended:
                # The value's end tag is missing, so a tag that ends the call counts.
                answer.text = "".join([*parts, answer.text])
                parts = [""]
                ends = [answer.text.find(tag) for tag in tags.ends]
                ends = [end for end in ends if end >= 0]
                is_end = bool(ends) or None
                at = min(ends, default=0)
            if is_end:
                parts.append(answer.text[:at])
                is_closed = answer.text.startswith(tags.value_end, at)
                answer.text = answer.text[at:].removeprefix(tags.value_end)
                return "".join(parts), is_closed
            if at:
                parts.append(answer.text[:at])
                answer.text = answer.text[at:]
                at = 0
            answer.text += yield

    def _schemas_of(self, name: str | None) -> dict[str, Any]:
        """Return the schemas of a tool's parameters by name; empty without any."""
        for tool in self.tools.offered:
            if tool["function"]["name"] == name:
                properties = parameters_of(tool).get("properties")
                return properties if isinstance(properties, dict) else {}
        return {}
