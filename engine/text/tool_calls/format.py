"""The interface of a tool-call format."""

from abc import ABC, abstractmethod
from typing import ClassVar

from engine.text.tool_calls.answer_reader import AnswerReader, Reader
from protocol.openai.tools import Tools

NAME = r"\s*(?P<name>[\w.-]+)\s*"  # pattern of a tool's name in a call's head


class ToolCallFormat(ABC):
    """A format in which some models write tool calls. An instance reads one answer.

    To add a format, write a subclass in a file of its own and add it to registry.py.

    Attributes:
        name: the value of --tool-call-parser that selects the format. For calls that
            the request forces, the value of `Tools.mode`.
        template_pattern: a regular expression that matches a part of the chat templates
            of models with this format; "" if no chat template selects the format.
        answer_starts: the texts with which an answer may begin only if it is a call.
            "{}" stands for the name of a tool.
        openings: the possible beginnings of a call, usually through the tool's name.
            "{}" stands for the name. Openings have no white space, because white space
            in the answer is ignored when the two are compared.
        start_tags: the tags with which the openings begin.
        special_tags: tags that are special tokens in some vocabularies. The detokenizer
            keeps their text if the answer can have calls.
        requires_offered_name: whether calls look like ordinary text, so that text is a
            call only if it has the name of an offered tool.
        has_short_ids: whether the model's chat template accepts only call ids of 9
            characters.
        reads_at_end: whether `ToolParser.finish` resumes `read` once more, with no
            text, when the answer has ended.
    """

    name: ClassVar[str]
    template_pattern: ClassVar[str] = ""
    answer_starts: ClassVar[tuple[str, ...]] = ()
    openings: ClassVar[tuple[str, ...]] = ()
    start_tags: ClassVar[tuple[str, ...]] = ()
    special_tags: ClassVar[tuple[str, ...]] = ()
    requires_offered_name: ClassVar[bool] = False
    has_short_ids: ClassVar[bool] = False
    reads_at_end: ClassVar[bool] = False

    def __init__(self, answer: AnswerReader, tools: Tools) -> None:
        self.answer = answer
        self.tools = tools

    @abstractmethod
    def read(self) -> Reader[None]:
        """Read the answer. The generator yields to get more text, and never returns."""

    def finish(self) -> None:  # noqa: B027 (most formats have nothing to add)
        """Complete the calls after all text of the answer has been read."""

    @property
    def has_complete_calls(self) -> bool:
        """Whether the client receives calls, and all of them are complete."""
        num_calls = self.answer.num_calls
        if not self.tools.is_parallel:
            num_calls = min(num_calls, 1)
        return num_calls > 0 and self.answer.open_calls.isdisjoint(range(num_calls))
