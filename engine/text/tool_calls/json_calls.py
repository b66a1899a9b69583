"""Reads calls in which the arguments are JSON objects. Pure, no I/O."""

import re
from collections.abc import Callable
from typing import ClassVar

from engine.text.tool_arguments import parse_call
from engine.text.tool_calls.answer_reader import BLANKS, AnswerReader, Reader
from engine.text.tool_calls.format import ToolCallFormat
from protocol.openai.tools import Tools

_STRING = r'"(?:[^"\\]|\\.)*"'
# Matches the beginning of an object that has the tool's name before the arguments,
# through the first bracket of the arguments.
_OBJECT_HEAD = re.compile(
    rf'(\{{\s*"name"\s*:\s*{_STRING}\s*),\s*"(?:arguments|parameters)"\s*:\s*[{{\[]',
    re.DOTALL,
)


class BracketScanner:
    """Reads text up to a bracket depth. Brackets within quoted strings do not count.

    Args:
        quotes: the characters that quote strings.
        opening: the opening brackets.
        closing: the closing brackets.
        stops_at_tags: whether an unquoted "<" ends the object even if closing brackets
            are missing. JSON has no unquoted "<", so the "<" must begin a tag.

    Attributes:
        depth: the number of open brackets.
    """

    def __init__(
        self,
        answer: AnswerReader,
        *,
        quotes: str = '"',
        opening: str = "[{",
        closing: str = "]}",
        stops_at_tags: bool = False,
    ) -> None:
        self.depth = 0
        self._answer = answer
        self._quotes = quotes
        self._opening = opening
        self._closing = closing
        self._stops_at_tags = stops_at_tags
        self._open_quote = ""
        self._is_escaped = False

    def read_until(
        self, depths: tuple[int, ...], consume: Callable[[str], None]
    ) -> Reader[None]:
        """Pass text to `consume` until a bracket changes the depth to one of `depths`.

        With `stops_at_tags`, reading also stops before a tag.
        """
        answer = self._answer
        while True:
            for size, char in enumerate(answer.text, 1):
                if self._is_escaped or (self._open_quote and char == "\\"):
                    self._is_escaped = not self._is_escaped
                elif char == self._open_quote:
                    self._open_quote = ""
                elif self._open_quote:
                    pass
                elif char in self._quotes:
                    self._open_quote = char
                elif char == "<" and self._stops_at_tags:
                    consume(answer.text[: size - 1])
                    answer.text = answer.text[size - 1 :]
                    return
                elif char in self._opening or char in self._closing:
                    self.depth += 1 if char in self._opening else -1
                    if self.depth in depths:
                        consume(answer.text[:size])
                        answer.text = answer.text[size:]
                        return
            consume(answer.take_text())
            answer.text = yield


class JsonCallFormat(ToolCallFormat):
    """A format in which calls, or the arguments of calls, are JSON objects.

    Attributes:
        stops_at_tags: whether a tag ends an object that lacks its last brackets.
    """

    stops_at_tags: ClassVar[bool] = False

    def __init__(self, answer: AnswerReader, tools: Tools) -> None:
        super().__init__(answer, tools)
        self.scanner = BracketScanner(answer, stops_at_tags=self.stops_at_tags)

    def read_object_call(self, before: str = BLANKS) -> Reader[bool]:
        """Read a call: a JSON object with "name", and "arguments" or "parameters".

        Text that is not a call becomes content, as the model wrote it.

        Args:
            before: characters that may precede the object.

        Returns:
            Whether the text is a call.
        """
        answer = self.answer
        is_object = yield from answer.match_tag("{", before)
        if answer.held_belongs_to_call:
            answer.held = ["{"] if is_object else []
            answer.held_belongs_to_call = False
        if not is_object:
            answer.release_held()
            return False
        start = len(answer.held) - 1
        self.scanner.depth = 1
        yield from self.scanner.read_until((0, 2), answer.held.append)
        text = "".join(answer.held[start:])
        head = _OBJECT_HEAD.fullmatch(text)
        if head and answer.begin_call(parse_call(head[1] + "}")[0]):
            answer.add_arguments(text[-1])
            yield from self._stream_arguments()
            return True
        if self.scanner.depth:
            yield from self.scanner.read_until((0,), answer.held.append)
        name, arguments = parse_call("".join(answer.held[start:]))
        if answer.begin_call(name):
            answer.add_arguments(arguments)
            answer.end_call()
            return True
        answer.release_held()
        return False

    def _stream_arguments(self) -> Reader[None]:
        """Emit the arguments as they arrive, then skip the end of the object."""
        yield from self.scanner.read_until((1,), self.answer.add_arguments)
        self.answer.end_call(is_complete=self.scanner.depth == 1)
        # If the object lacks its last bracket, </tool_call> comes next.
        if not (yield from self.answer.skip_tag("</tool_call>")):
            yield from self.scanner.read_until((0,), lambda _: None)

    def read_headed_call(self, head: re.Pattern[str]) -> Reader[bool]:
        """Read a call that is the tool's name, then the arguments as an object.

        Text that is not a call becomes content.

        Args:
            head: the pattern of the text through the first "{" of the arguments, with
                a group `name`.

        Returns:
            Whether the text is a call.
        """
        name = yield from self.answer.read_name(head, "{")
        if not self.answer.begin_call(name):
            self.answer.release_held()
            return False
        self.answer.add_arguments("{")
        self.scanner.depth = 1
        yield from self.scanner.read_until((0,), self.answer.add_arguments)
        self.answer.end_call(is_complete=self.scanner.depth == 0)
        return True
