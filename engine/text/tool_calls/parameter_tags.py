"""Reads formats that have tags around each parameter of a call. Pure, no I/O.

A parameter's value ends at the value's end tag, which models sometimes leave out. If
the end tag is missing, the value ends before the next parameter. A parameter tag counts
as the next parameter only if the call does not have this parameter yet. The tag must
also begin a line or name a parameter of the tool. If there is no next parameter, the
value ends with the call.
"""

import re
from collections.abc import Collection
from typing import Any, ClassVar, NamedTuple

from engine.text.tool_arguments import parameter_to_json, to_json
from engine.text.tool_calls.answer_reader import MAX_HEAD_CHARS, Reader
from engine.text.tool_calls.format import ToolCallFormat
from protocol.openai.tools import parameters_of

# Maximum number of characters, including white space, that are examined to decide
# whether a "<" begins a tag.
MAX_TAG_CHARS = 128
_PARAMETER = re.compile(r"[\w.-]+")


class Tags(NamedTuple):
    """The tags of a format.

    Attributes:
        begin: the tags that begin a call. Only the last tag is required.
        name_end: the text that ends the tool's name. It may be the beginning of the
            next tag.
        key: the tag that begins a parameter's name.
        key_end: the tag that ends a parameter's name.
        value: the tag that begins a value. If it is empty, a line break at the start
            and at the end of a value does not belong to the value.
        value_end: the tag that ends a value.
        ends: the tags that end a call.
        after_call: texts that occur only where a call ends, so no value contains them.
            These texts have no white space, because white space in the answer is
            ignored when the two are compared.
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
        """Return whether a value ends before `text`, even without an end tag.

        Args:
            text: the next characters, at most MAX_TAG_CHARS. The first one is "<".
            keys: the parameters that the call has so far, which cannot follow again.
            names: the parameters that may follow; if empty, any parameter may follow.

        Returns:
            None if this cannot be decided without more text.
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
        return None if may_be_tag and len(text) < MAX_TAG_CHARS else False


class ParameterTagsFormat(ToolCallFormat):
    """A format with tags around each function and each parameter.

    Attributes:
        tags: the format's tags.
        head: the pattern of a call from the tool's name through `tags.name_end`, with a
            group `name`.
    """

    tags: ClassVar[Tags]
    head: ClassVar[re.Pattern[str]]
    reads_at_end = True  # the last value may lack its end tag

    def read(self) -> Reader[None]:
        """Read calls. The outermost tags of a call are optional."""
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
        """Read the parameters of a call. Emit each as JSON when it is complete.

        Args:
            schemas: the schemas of the tool's parameters by name.
        """
        tags = self.tags
        answer = self.answer
        keys: list[str] = []
        while (yield from answer.skip_tag(tags.key)):
            answer.held_belongs_to_call = True
            key = yield from self._read_key()
            margin = "\n"  # a line break that is not part of the value
            if tags.value and (yield from answer.match_tag(tags.value)):
                margin = ""
            separator = ", " if keys else "{"
            keys.append(key)
            value, is_closed = yield from self._read_value(schemas, keys)
            answer.held = []
            value = value.removeprefix(margin)
            value = value.removesuffix(margin if is_closed else "\n")
            json_value = parameter_to_json(value, schemas.get(key))
            answer.add_arguments(f"{separator}{to_json(key)}: {json_value}")
        answer.add_arguments("}" if keys else "{}")

    def _read_key(self) -> Reader[str]:
        """Return a parameter's name, and read through the tag that ends the name.

        Models may leave this end tag out. The name then ends at the tag that begins the
        value, or at a line break if the format has no such tag.
        """
        tags = self.tags
        answer = self.answer
        while len(answer.text) < MAX_HEAD_CHARS:
            answer.text = answer.text.lstrip()
            ends = (answer.text.find(end) for end in (tags.key_end, tags.value or "\n"))
            first_end = min((end for end in ends if end >= 0), default=-1)
            if first_end >= 0:
                key = answer.text[:first_end]
                answer.text = answer.text[first_end:].removeprefix(tags.key_end)
                return key.strip()
            answer.text += yield
        text = yield from answer.read_through(tags.key_end)
        return text[: -len(tags.key_end)].strip()

    def _read_value(
        self, names: Collection[str], keys: Collection[str]
    ) -> Reader[tuple[str, bool]]:
        """Read a parameter's value.

        Args:
            names: the names of the tool's parameters.
            keys: the parameters that the call has so far, including the current one.

        Returns:
            The value's text, and whether the value had its end tag.
        """
        tags = self.tags
        answer = self.answer
        parts = [""]
        position = 0  # the text before this position belongs to the value
        while True:
            next_tag = answer.text.find("<", position)
            position = next_tag if next_tag >= 0 else len(answer.text)
            previous_char = answer.text[position - 1] if position else parts[-1][-1:]
            allowed = () if previous_char == "\n" else names
            next_text = answer.text[position : position + MAX_TAG_CHARS]
            is_end = tags.ends_value(next_text, keys, allowed)
            if is_end is False:
                position += 1
                continue
            if is_end is None and answer.is_ended:
                # The answer has ended without the value's end tag. So a tag that ends
                # the call also ends the value.
                answer.text = "".join([*parts, answer.text])
                parts = [""]
                ends = [answer.text.find(tag) for tag in tags.ends]
                ends = [end for end in ends if end >= 0]
                is_end = bool(ends) or None
                position = min(ends, default=0)
            if is_end:
                parts.append(answer.text[:position])
                is_closed = answer.text.startswith(tags.value_end, position)
                answer.text = answer.text[position:].removeprefix(tags.value_end)
                return "".join(parts), is_closed
            if position:
                parts.append(answer.text[:position])
                answer.text = answer.text[position:]
                position = 0
            answer.text += yield

    def _schemas_of(self, name: str | None) -> dict[str, Any]:
        """Return the schemas of a tool's parameters by name; {} if there are none."""
        for tool in self.tools.offered:
            if tool["function"]["name"] == name:
                properties = parameters_of(tool).get("properties")
                return properties if isinstance(properties, dict) else {}
        return {}
