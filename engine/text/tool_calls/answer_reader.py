"""Reading primitives that all tool-call formats share. Pure, no I/O.

A format reads an answer as a generator: it yields when it needs more text, and
`AnswerReader.text` then has that text. The primitives here match tags, hold text back
that may become a call, and collect what the client receives.
"""

import re
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TypeVar

from protocol.openai.tools import ToolCallPiece, call_id

BLANKS = " \t\r\n"
MAX_HEAD = 512  # characters between the start of a call and its arguments
_PLAIN_TEXT = re.compile(rf".[^<\[{BLANKS}]*", re.DOTALL)  # no tag begins in it

# A reader yields to ask for more text and returns a value of the last type.
_T = TypeVar("_T")
Reader = Generator[None, str, _T]


@dataclass
class Parsed:
    """The content and the pieces of calls that one piece of text adds to an answer."""

    content: str = ""
    calls: list[ToolCallPiece] = field(default_factory=list)


class AnswerReader:
    """The unread text of one choice's answer, and the calls read so far.

    Args:
        names: the names of the offered tools.
        requires_offered_name: whether text is a call only if it names an offered tool.
        has_short_ids: whether ids of calls have 9 characters.
        answer_id: the ids of calls follow from it.

    Attributes:
        text: the text that is not read yet.
        held: text that may become a tag or a call. It becomes content if it does not.
        held_belongs_to_call: whether the held text belongs to the preceding call, so
            that it never becomes content.
        is_ended: whether the answer has no more text.
        parsed: what the latest text added.
        num_calls: calls that the model has begun, including calls that the client does
            not receive.
        open_calls: the indices of calls whose arguments are incomplete.
    """

    def __init__(
        self,
        names: frozenset[str],
        *,
        requires_offered_name: bool,
        has_short_ids: bool,
        answer_id: str,
    ) -> None:
        self.text = ""
        self.held: list[str] = []
        self.held_belongs_to_call = False
        self.is_ended = False
        self.parsed = Parsed()
        self.num_calls = 0
        self.open_calls = set[int]()
        self._names = names
        self._requires_offered_name = requires_offered_name
        self._has_short_ids = has_short_ids
        self._answer_id = answer_id

    def take_text(self) -> str:
        """Return the unread text and mark it read."""
        text = self.text
        self.text = ""
        return text

    def release_held(self) -> None:
        """Make the held text content."""
        self.parsed.content += "".join(self.held)
        self.held = []

    def match_tag(self, tag: str, before: str = BLANKS) -> Reader[bool]:
        """Return whether `tag` comes next, after any characters of `before`.

        The characters and the tag are held back.
        """
        while True:
            text = self.text.lstrip(before)
            self.held.append(self.text[: len(self.text) - len(text)])
            self.text = text
            if text.startswith(tag):
                self.held.append(tag)
                self.text = text[len(tag) :]
                return True
            if not tag.startswith(text):
                return False
            self.text += yield

    def skip_tag(self, tag: str) -> Reader[bool]:
        """Skip `tag` of the call that has begun; return whether it came next.

        Text that does not match stays unread, because another tag may begin in it.
        """
        self.held_belongs_to_call = True
        is_match = yield from self.match_tag(tag)
        if not is_match:
            self.text = "".join(self.held) + self.text
        self.held = []
        self.held_belongs_to_call = False
        return is_match

    def peek(self) -> Reader[str]:
        """Return the next character after blanks. The blanks are held back."""
        yield from self.match_tag("")
        while not self.text:
            self.text += yield
            yield from self.match_tag("")
        return self.text[0]

    def read_content_through(self, *tags: str) -> Reader[None]:
        """Read content through `tags`, of which only the last is required."""
        while True:
            is_match = False
            for tag in tags:
                is_match = yield from self.match_tag(tag)
            if is_match:
                return
            self.release_held()
            if plain := _PLAIN_TEXT.match(self.text):
                self.parsed.content += plain[0]
                self.text = self.text[plain.end() :]

    def read_rest_as_content(self) -> Reader[None]:
        """Make the held text and all text that follows content. Never returns."""
        self.release_held()
        while True:
            self.parsed.content += self.take_text()
            self.text = yield

    def read_through(self, tag: str, limit: int = 1 << 62) -> Reader[str]:
        """Return the text through `tag`, and hold it back.

        Returns "" and leaves the text unread where `limit` characters have no such tag.
        The function scans each character once.
        """
        parts = list[str]()
        size = 0
        num_held = len(self.held)
        overlap = ""  # the end of the parts, where the tag may have begun
        while True:
            at = (overlap + self.text).find(tag)
            end = at + len(tag) - len(overlap) if at >= 0 else len(self.text)
            if size + end > limit:
                self.text = "".join([*parts, self.text])
                del self.held[num_held:]
                return ""
            size += end
            parts.append(self.text[:end])
            self.held.append(self.text[:end])
            overlap = (overlap + self.text)[-len(tag) + 1 :] if len(tag) > 1 else ""
            self.text = self.text[end:]
            if at >= 0:
                return "".join(parts)
            self.text = yield

    def read_name(self, head: re.Pattern[str], end: str) -> Reader[str | None]:
        """Return the name in the text through `end`; None if `head` does not match."""
        match = head.fullmatch((yield from self.read_through(end, MAX_HEAD)))
        return match and match["name"]

    def begin_call(self, name: str | None) -> bool:
        """Begin a call to the tool `name`; return whether such a call is valid."""
        if name is None:
            return False
        if self._requires_offered_name and name not in self._names:
            return False
        self.held = []
        index = self.num_calls
        self.num_calls += 1
        self.open_calls.add(index)
        new_id = call_id(self._answer_id, index, self._has_short_ids)
        self.parsed.calls.append(ToolCallPiece(index, "", new_id, name))
        return True

    def add_arguments(self, arguments: str) -> None:
        """Append text to the arguments of the current call."""
        calls = self.parsed.calls
        # A piece with a name carries no arguments: clients receive the name alone.
        if calls and calls[-1].name is None:
            calls[-1].arguments += arguments
        elif arguments:
            calls.append(ToolCallPiece(self.num_calls - 1, arguments))

    def end_call(self, *, is_complete: bool = True) -> None:
        """End the current call, whose arguments may be incomplete."""
        if is_complete:
            self.open_calls.discard(self.num_calls - 1)
