"""Reads an answer piece by piece, for all tool-call formats. Pure, no I/O.

The `read` method of a format is a generator. It yields when it needs more text, and
`yield` returns that text. The methods of `AnswerReader` match tags, hold back text that
may become a call, and collect the content and calls for the client.
"""

import re
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TypeVar

from protocol.openai.tools import ToolCallPiece, call_id

BLANKS = " \t\r\n"
MAX_HEAD_CHARS = 512  # the longest head of a call: the text before the arguments
# Matches one character, and all text before the next white space or the next "<" or
# "[", with which a tag may begin.
_PLAIN_TEXT = re.compile(rf".[^<\[{BLANKS}]*", re.DOTALL)

# A reader yields to get more text, and returns a value of the type _T.
_T = TypeVar("_T")
Reader = Generator[None, str, _T]


@dataclass
class Parsed:
    """The content and the pieces of calls that a piece of text adds to an answer."""

    content: str = ""
    calls: list[ToolCallPiece] = field(default_factory=list)


class AnswerReader:
    """The unread text of one choice's answer, and the calls read so far.

    Args:
        names: the names of the offered tools.
        requires_offered_name: whether text is a call only if it names an offered tool.
        has_short_ids: whether the ids of calls have 9 characters.
        answer_id: an id of the answer, from which the ids of calls are derived.

    Attributes:
        text: the text that has not been read yet.
        held: text held back, in pieces, because it may belong to a tag or a call. Text
            that belongs to neither becomes content.
        held_belongs_to_call: whether the text held back belongs to the preceding call,
            so that it must not become content.
        is_ended: whether all text of the answer has arrived.
        parsed: the content and the pieces of calls that `ToolParser` returns next.
        num_calls: number of calls that the model has begun, including calls that the
            client does not receive.
        open_calls: the indices of the calls that have incomplete arguments.
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
        """Return the unread text, and count it as read."""
        text = self.text
        self.text = ""
        return text

    def release_held(self) -> None:
        """Append the text that was held back to the content."""
        self.parsed.content += "".join(self.held)
        self.held = []

    def match_tag(self, tag: str, before: str = BLANKS) -> Reader[bool]:
        """Return whether `tag` comes next, after any number of characters in `before`.

        The characters before the tag are held back, and the tag too if it comes next.
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
        """Skip white space and `tag` after a call; return whether the tag came next.

        If the tag does not come next, the white space stays unread as well, because the
        next tag of the format may begin with white space.
        """
        self.held_belongs_to_call = True
        is_match = yield from self.match_tag(tag)
        if not is_match:
            self.text = "".join(self.held) + self.text
        self.held = []
        self.held_belongs_to_call = False
        return is_match

    def peek(self) -> Reader[str]:
        """Return the next character that is not white space, without reading it.

        Holds back the white space before the character.
        """
        yield from self.match_tag("")
        while not self.text:
            self.text += yield
            yield from self.match_tag("")
        return self.text[0]

    def read_content_through(self, *tags: str) -> Reader[None]:
        """Read content up to `tags` in this order, and hold the tags back.

        All tags except the last are optional.
        """
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
        """Turn the text held back and all further text into content. Never returns."""
        self.release_held()
        while True:
            self.parsed.content += self.take_text()
            self.text = yield

    def read_through(self, tag: str, limit: int = 1 << 62) -> Reader[str]:
        """Read and hold back the text through `tag`.

        Scans each character once.

        Args:
            limit: the maximum number of characters to read.

        Returns:
            The text including `tag`. "" if the tag is not in the next `limit`
            characters; the text then stays unread.
        """
        parts = list[str]()
        size = 0
        num_held = len(self.held)
        overlap = ""  # the last characters of `parts`, in which the tag may begin
        while True:
            start = (overlap + self.text).find(tag)
            end = start + len(tag) - len(overlap) if start >= 0 else len(self.text)
            if size + end > limit:
                self.text = "".join([*parts, self.text])
                del self.held[num_held:]
                return ""
            size += end
            parts.append(self.text[:end])
            self.held.append(self.text[:end])
            overlap = (overlap + self.text)[-len(tag) + 1 :] if len(tag) > 1 else ""
            self.text = self.text[end:]
            if start >= 0:
                return "".join(parts)
            self.text = yield

    def read_name(self, head: re.Pattern[str], end: str) -> Reader[str | None]:
        """Read the head of a call through `end`, and return the tool's name.

        Args:
            head: the pattern of the head, with a group `name`.

        Returns:
            None if `head` does not match the text.
        """
        match = head.fullmatch((yield from self.read_through(end, MAX_HEAD_CHARS)))
        return match and match["name"]

    def begin_call(self, name: str | None) -> bool:
        """Begin a call to the tool `name`, and drop the text held back.

        Returns False, and does nothing, if `name` is None, or if the format requires
        the name of an offered tool and `name` is not one.
        """
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
        # The piece with the name stays without arguments: clients receive the name
        # first, and the arguments in later pieces.
        if calls and calls[-1].name is None:
            calls[-1].arguments += arguments
        elif arguments:
            calls.append(ToolCallPiece(self.num_calls - 1, arguments))

    def end_call(self, *, is_complete: bool = True) -> None:
        """End the current call.

        Args:
            is_complete: whether the arguments are complete.
        """
        if is_complete:
            self.open_calls.discard(self.num_calls - 1)
