"""Selects a model's tool-call format, and finds where calls begin. Pure, no I/O."""

import re
from typing import Final, cast

from engine.text.chat_template import ChatTemplate
from engine.text.detokenizer import partial_tag_length
from engine.text.tokenizer import Tokenizer
from engine.text.tool_calls.registry import MODEL_FORMATS
from protocol.openai.tools import Tools
from protocol.settings.options import ToolSyntax

# Maximum number of characters from a call's first tag through the tool's name,
# including white space.
_MAX_OPENING_CHARS: Final = 512


def tool_syntax(option: str, template: ChatTemplate | None) -> ToolSyntax:
    """Return the name of the format in which the model writes calls.

    Args:
        option: the value of --tool-call-parser. If it is "auto", the format is the one
            that the chat template uses, or "hermes" if the template uses none.
        template: the model's chat template.
    """
    if option != "auto":
        return cast(ToolSyntax, option)
    if template is not None and template.knows_tools:
        for name, format_class in MODEL_FORMATS.items():
            pattern = format_class.template_pattern
            if pattern and re.search(pattern, template.source):
                return name
    return "hermes"


def call_beginnings(
    tools: Tools, option: str, tokenizer: Tokenizer
) -> tuple[str | int, ...]:
    """Return the possible beginnings of an answer that calls tools.

    Each beginning is a text, or the id of a special token. The result is empty if
    `tools.mode` is not "auto".
    """
    if tools.mode != "auto":
        return ()
    format_class = MODEL_FORMATS[tool_syntax(option, tokenizer.chat_template)]
    texts = dict.fromkeys(_for_each_tool(format_class.answer_starts, tools))
    beginnings: list[str | int] = []
    for text in texts:
        token_id = tokenizer.id_of(text)
        if token_id is not None and token_id in tokenizer.special_ids:
            beginnings.append(token_id)
        else:
            beginnings.append(text)
    return tuple(beginnings)


def _for_each_tool(patterns: tuple[str, ...], tools: Tools) -> tuple[str, ...]:
    """Return each pattern with each offered tool's name in place of "{}"."""
    names = sorted(tools.names)
    return tuple(pattern.format(name) for pattern in patterns for name in names)


class CallOpenings:
    """Finds the beginning of a call to an offered tool within text.

    Only calls that begin with a tag are found. No calls are found if `tools.mode` is
    not "auto".
    """

    def __init__(
        self, tools: Tools, option: str = "auto", template: ChatTemplate | None = None
    ) -> None:
        self._openings: tuple[str, ...] = ()
        self._tags: tuple[str, ...] = ()
        if tools.mode == "auto":
            format_class = MODEL_FORMATS[tool_syntax(option, template)]
            self._openings = _for_each_tool(format_class.openings, tools)
            if self._openings:
                self._tags = format_class.start_tags
        self._tag_pattern = re.compile("|".join(map(re.escape, self._tags)))

    def find(self, text: str) -> tuple[int, bool]:
        """Find the first opening of a call in `text`, complete or not.

        Returns:
            The position where the opening begins, and whether the opening is complete
            through the tool's name. If there is no opening, the position is the end of
            the text, or where the last characters of the text may begin a tag.
        """
        for match in self._tag_pattern.finditer(text) if self._tags else ():
            start = match.start()
            opening = "".join(text[start : start + _MAX_OPENING_CHARS].split())
            if opening.startswith(self._openings):
                return start, True
            if len(text) - start >= _MAX_OPENING_CHARS:
                continue
            if any(
                complete_opening.startswith(opening)
                for complete_opening in self._openings
            ):
                return start, False
        num_held = max((partial_tag_length(text, tag) for tag in self._tags), default=0)
        return len(text) - num_held, False
