"""Finds the tool calls in an answer while the model writes it. Pure, no I/O.

    text pieces -> ToolParser -> content (text that is not a call) and ToolCallPieces

The formats of calls are in engine/text/tool_calls/.

JSON arguments that follow the tool's name are emitted piece by piece, as the model
writes them. All other arguments are emitted when the call, or a parameter of the call,
is complete. Text that turns out not to be a call becomes content, so no text of an
answer is lost. Each character is scanned once, even in very long runs of white space or
brackets.
"""

from engine.text.chat_template import ChatTemplate
from engine.text.tool_calls.answer_reader import AnswerReader, Parsed
from engine.text.tool_calls.format import ToolCallFormat
from engine.text.tool_calls.registry import FORCED_CALL_FORMATS, MODEL_FORMATS
from engine.text.tool_formats import tool_syntax
from protocol.openai.tools import Tools

_MAX_PIECE_CHARS = 1024  # longer text is read in pieces


def create_tool_parser(
    tools: Tools,
    option: str = "auto",
    template: ChatTemplate | None = None,
    answer_id: str = "",
) -> "ToolParser | None":
    """Return a parser for one answer; None if the answer cannot have calls.

    Args:
        tools: the tools of the request.
        option: the value of --tool-call-parser; see `tool_syntax`.
        template: the model's chat template.
        answer_id: an id of the answer, from which the ids of calls are derived.
    """
    if tools.mode == "none":
        return None
    model_format = MODEL_FORMATS[tool_syntax(option, template)]
    format_class = FORCED_CALL_FORMATS.get(tools.mode, model_format)
    # In the next turn, the chat template receives the ids of all calls. So even the ids
    # of forced calls have the form that the model's own format requires.
    has_short_ids = model_format.has_short_ids
    return ToolParser(tools, format_class, has_short_ids, answer_id)


class ToolParser:
    """Finds the tool calls of one choice: `feed` all its text, then `finish` once."""

    def __init__(
        self,
        tools: Tools,
        format_class: type[ToolCallFormat],
        has_short_ids: bool = False,
        answer_id: str = "",
    ) -> None:
        self._allows_parallel = tools.is_parallel
        self._answer = AnswerReader(
            tools.names,
            requires_offered_name=format_class.requires_offered_name,
            has_short_ids=has_short_ids,
            answer_id=answer_id,
        )
        self._format = format_class(self._answer, tools)
        self._reader = self._format.read()
        next(self._reader)

    @property
    def num_calls(self) -> int:
        """Number of calls that the model has begun.

        This includes calls that the client does not receive, because
        `Tools.is_parallel` is false.
        """
        return self._answer.num_calls

    @property
    def has_complete_calls(self) -> bool:
        """Whether the client receives calls, and all of them are complete."""
        return self._format.has_complete_calls

    def feed(self, text: str) -> Parsed:
        """Return the content and the pieces of calls that `text` adds to the answer."""
        # The time to read a piece grows with the square of its length.
        contents = []
        calls = []
        for start in range(0, max(len(text), 1), _MAX_PIECE_CHARS):
            self._answer.parsed = Parsed()
            self._reader.send(text[start : start + _MAX_PIECE_CHARS])
            visible = self._visible_part()
            contents.append(visible.content)
            calls += visible.calls
        return Parsed("".join(contents), calls)

    def finish(self) -> Parsed:
        """Return the content and the pieces of calls in the text held back.

        Call this once, when the answer has ended. A call that was cut off after the
        tool's name is still a call.
        """
        answer = self._answer
        answer.parsed = Parsed()
        answer.is_ended = True
        if self._format.reads_at_end:
            self._reader.send("")
        rest = "".join(answer.held) + answer.text
        is_blank_after_call = answer.num_calls > 0 and not rest.strip()
        if not answer.held_belongs_to_call and not is_blank_after_call:
            answer.parsed.content += rest
        self._format.finish()
        return self._visible_part()

    def _visible_part(self) -> Parsed:
        """Return the part of the parsed text that the client receives."""
        parsed = self._answer.parsed
        if not self._allows_parallel:
            parsed.calls = [call for call in parsed.calls if call.index == 0]
        return parsed
