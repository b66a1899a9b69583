"""The formats in which models write tool calls: their tags, and how a call begins in them. Pure.

engine/text/tool_parser.py shows each format and reads it.
"""

import re
from collections.abc import Iterator
from typing import Final, NamedTuple, cast

from engine.text.chat_template import ChatTemplate
from engine.text.detokenizer import overlap
from engine.text.tokenizer import Tokenizer
from protocol.openai.tools import Tools
from protocol.settings.options import ToolSyntax

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG, PYTHON_START = "<|python_tag|>", "<|python_start|>"
MISTRAL = "[TOOL_CALLS]"
CALLS, END_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, END_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_FUNCTION = "<function="
# Those that some vocabularies have as special tokens, which are no text elsewhere.
SPECIAL_TAGS: Final = (
    *(OPEN, CLOSE, MISTRAL, "[ARGS]", "[CALL_ID]"),
    *(CALLS, END_CALLS, CALL, END_CALL, _SEPARATOR),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)


class Tags(NamedTuple):
    """Of formats that write each parameter by itself."""

    begin: tuple[str, ...]  # of a call
    name_end: str  # perhaps of the next tag, too
    key: str
    key_end: str
    value: str  # none: a line's ends around the value are not of it
    value_end: str
    ends: tuple[str, ...]  # of a call


TAGS: Final = {
    "qwen3_coder": Tags(
        (OPEN, _FUNCTION), ">", "<parameter=", ">", "", "</parameter>", ("</function>", CLOSE)
    ),
    "glm45": Tags(
        (OPEN,), "<", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", (CLOSE,)
    ),
}  # fmt: skip
# What a chat template shows of a format, the surest first, and the tokens that are its tags.
_SHOWN: Final[dict[ToolSyntax, str]] = {
    "mistral": r"\[TOOL_CALLS\]",
    "deepseek_v3": CALL,
    "qwen3_coder": _FUNCTION,
    "glm45": "<arg_key>",
    "hermes": OPEN,
    "pythonic": r"func_name1\(",
    "llama3_json": r"""["']parameters["']\s*:|""" + re.escape(PYTHON_TAG),
}
# What only a call begins with, in some formats with the name of a tool.
_BEGINNINGS: Final[dict[ToolSyntax, tuple[str, ...]]] = {
    "mistral": (MISTRAL,), "deepseek_v3": (CALLS,), "qwen3_coder": (OPEN, _FUNCTION),
    "glm45": (OPEN,), "hermes": (OPEN,), "pythonic": (PYTHON_START, "[{}("),
    "llama3_json": (PYTHON_TAG, '{{"name": "{}"'), "harmony": (" to=functions.{}",),
}  # fmt: skip
# The beginning of a call through the name of its tool, {}, without any blanks.
_OPENINGS: Final[dict[ToolSyntax, tuple[str, ...]]] = {
    "hermes": (OPEN + '{{"name":"{}"', OPEN + '{{"arguments":'),
    "qwen3_coder": (OPEN + _FUNCTION + "{}>", _FUNCTION + "{}>"),
    "glm45": (OPEN + "{}<arg_key>", OPEN + "{}" + CLOSE),
    "mistral": (
        *(MISTRAL + '[{{"name":"{}"', MISTRAL + '{{"name":"{}"', MISTRAL + '[{{"arguments":'),
        *(MISTRAL + "{}[ARGS]", MISTRAL + "{}[CALL_ID]", MISTRAL + "{}{{"),
    ),
    "deepseek_v3": (
        *(CALLS + CALL + "{}" + _SEPARATOR, CALLS + CALL + "function" + _SEPARATOR + "{}```json"),
        *(CALL + "{}" + _SEPARATOR, CALL + "function" + _SEPARATOR + "{}```json"),
    ),
    "pythonic": (PYTHON_START + "[{}(",),
    "llama3_json": (PYTHON_TAG + '{{"name":"{}"',),
}  # fmt: skip
_FIRST_TAGS: Final = (OPEN, _FUNCTION, MISTRAL, CALLS, CALL, PYTHON_START, PYTHON_TAG)
_MAX_OPENING = 512  # characters, blanks included


def tool_syntax(option: str, template: ChatTemplate | None) -> ToolSyntax:
    """How the model writes calls: `--tool-call-parser`, or as its chat template shows; Hermes' way
    where that does not say."""
    source = template.source if template and template.knows_tools else ""
    shown: Iterator[ToolSyntax] = (name for name, tags in _SHOWN.items() if re.search(tags, source))
    return next(shown, "hermes") if option == "auto" else cast(ToolSyntax, option)


def call_beginnings(tools: Tools, option: str, tokenizer: Tokenizer) -> tuple[str | int, ...]:
    """What the model may begin an answer with to call a tool of its own accord: texts, and tokens
    that are no text."""
    if tools.mode != "auto":
        return ()
    forms = _BEGINNINGS[tool_syntax(option, tokenizer.chat_template)]
    texts = dict.fromkeys(form.format(name) for form in forms for name in sorted(tools.names))
    found = {text: tokenizer.id_of(text) for text in texts}
    return tuple(n if n in tokenizer.special_ids else text for text, n in found.items())


class CallOpenings:
    """Finds the beginning of a call to an offered tool within other text, in the formats that mark
    calls by tags. There is none to find where the model may not call tools of its own accord."""

    def __init__(
        self, tools: Tools, option: str = "auto", template: ChatTemplate | None = None
    ) -> None:
        forms = _OPENINGS.get(tool_syntax(option, template), ()) if tools.mode == "auto" else ()
        self._openings = tuple(form.format(name) for form in forms for name in sorted(tools.names))
        self._tags = [
            tag for tag in _FIRST_TAGS if any(opening.startswith(tag) for opening in self._openings)
        ]
        self._tag = re.compile("|".join(map(re.escape, self._tags)))

    def find(self, text: str) -> tuple[int, bool]:
        """Where in `text` the first opening begins, or may begin if more text follows, and whether
        it is complete. The position is the length of the text where none does."""
        for found in self._tag.finditer(text) if self._tags else ():
            at = found.start()
            opening = "".join(text[at : at + _MAX_OPENING].split())
            if opening.startswith(self._openings):
                return at, True
            may_go_on = len(text) - at < _MAX_OPENING
            if may_go_on and any(whole.startswith(opening) for whole in self._openings):
                return at, False
        return len(text) - max((overlap(text, tag) for tag in self._tags), default=0), False
