"""Calls that the request forces, in the formats that a grammar enforces.

tool_choice "required":      [{"name": "f", "parameters": {...}}, ...]
a tool named in tool_choice: {...}, only the arguments
"""

from engine.text.tool_arguments import is_json
from engine.text.tool_calls.answer_reader import AnswerReader, Reader
from engine.text.tool_calls.format import ToolCallFormat
from engine.text.tool_calls.llama3_json import JsonListFormat
from protocol.openai.tools import Tools


class RequiredFormat(JsonListFormat):
    """A list of calls to any of the offered tools."""

    name = "required"


class NamedFormat(ToolCallFormat):
    """An answer that is only the arguments of the tool that the request names."""

    name = "named"

    def __init__(self, answer: AnswerReader, tools: Tools) -> None:
        super().__init__(answer, tools)
        self._arguments: list[str] = []

    def read(self) -> Reader[None]:
        """Begin the call when text arrives. All text belongs to the arguments."""
        answer = self.answer
        answer.text = yield
        answer.begin_call(self.tools.name)
        while True:
            self._arguments.append(answer.text)
            answer.add_arguments(answer.take_text())
            answer.text = yield

    def finish(self) -> None:
        """Begin the call if the answer had no text."""
        if not self.answer.num_calls:
            self.answer.begin_call(self.tools.name)

    @property
    def has_complete_calls(self) -> bool:
        """Whether the arguments are one complete JSON value."""
        return is_json("".join(self._arguments))
