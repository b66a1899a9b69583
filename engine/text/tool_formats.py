"""Which tool-call format a model uses, and where a call begins in its answer. Pure."""

import re
from typing import Final, cast

from engine.text.chat_template import ChatTemplate
from engine.text.detokenizer import overlap
from engine.text.tokenizer import Tokenizer
from engine.text.tool_calls.registry import MODEL_FORMATS
from protocol.openai.tools import Tools
from protocol.settings.options import ToolSyntax

_MAX_OPENING: Final = 512  # characters, blanks included


def tool_syntax(option: str, template: ChatTemplate | None) -> ToolSyntax:
    """Return the name of the format in which the model writes calls.

    That is the value of `--tool-call-parser`. If the option is "auto", it is the format
    that the chat template shows, or Hermes' where the template shows none.
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
    """Return how an answer may begin that calls a tool of the model's own accord.

    Each is a text, or the id of a token that has no text.
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
    """Return each pattern with the name of each offered tool filled in."""
    names = sorted(tools.names)
    return tuple(pattern.format(name) for pattern in patterns for name in names)


class CallOpenings:
    """Finds the beginning of a call to an offered tool within other text.

    It works for formats that mark calls by tags, and finds none where the model may not
    call tools of its own accord.
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
        self._tag = re.compile("|".join(map(re.escape, self._tags)))

    def find(self, text: str) -> tuple[int, bool]:
        """Return where the first opening begins in `text`, and whether it is complete.

        An opening that more text may complete counts. Without one, the position is the
        length of the text, less the characters that may begin a tag.
        """
        for match in self._tag.finditer(text) if self._tags else ():
            start = match.start()
            opening = "".join(text[start : start + _MAX_OPENING].split())
            if opening.startswith(self._openings):
                return start, True
            if len(text) - start >= _MAX_OPENING:
                continue
            if any(full.startswith(opening) for full in self._openings):
                return start, False
        num_held = max((overlap(text, tag) for tag in self._tags), default=0)
        return len(text) - num_held, False
