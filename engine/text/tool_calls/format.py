"""The interface of a tool-call format."""

from abc import ABC, abstractmethod
from typing import ClassVar

from engine.text.tool_calls.answer_reader import AnswerReader, Reader
from protocol.openai.tools import Tools

NAME = r"\s*(?P<name>[\w.-]+)\s*"  # pattern of a tool's name in a call's head


class ToolCallFormat(ABC):
    """How some models write tool calls. An instance reads one answer.

    A new format is a subclass in a file of its own and a line in registry.py.

    Attributes:
        name: the value of `--tool-call-parser` that selects the format.
        template_pattern: a regular expression that matches chat templates of the
            format.
        answer_starts: texts that only an answer with a call begins with; "{}" stands
            for the name of a tool.
        openings: the beginning of a call through the name of its tool, "{}", with all
            blanks removed.
        start_tags: the tags with which the openings begin.
        special_tags: tags that some vocabularies have as special tokens. The
            detokenizer keeps them while the answer can have calls.
        requires_offered_name: whether a call looks like other text, so that only the
            name of an offered tool makes it a call.
        has_short_ids: whether the next turn's template accepts only ids of 9
            characters.
        reads_at_end: whether `read` continues once more when the answer has ended.
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
        """Read the whole answer: a generator that yields for more text, without end."""

    def finish(self) -> None:  # noqa: B027 (most formats have nothing to add)
        """Complete the calls after the answer's last text."""

    @property
    def has_complete_calls(self) -> bool:
        """Whether the client receives calls and all of their arguments are complete."""
        num_calls = self.answer.num_calls
        if not self.tools.parallel:
            num_calls = min(num_calls, 1)
        return num_calls > 0 and self.answer.open_calls.isdisjoint(range(num_calls))
