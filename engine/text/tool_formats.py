"""The formats in which models write tool calls: their tags, and how a call begins in them. Pure.

What models write, by what their chat templates teach them:

    hermes       text <tool_call>{"name": "f", "arguments": {...}}</tool_call> <tool_call>...
    llama3_json  {"name": "f", "parameters": {...}}; {...}      nothing but calls
    mistral      text [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]
                 text [TOOL_CALLS]f[ARGS]{...}[TOOL_CALLS]f{...}
    deepseek_v3  text <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f
                 ```json {...} ``` <｜tool▁call▁end｜> ... <｜tool▁calls▁end｜>
                 (version 3.1: <｜tool▁call▁begin｜>f<｜tool▁sep｜>{...})
    qwen3_coder  text <tool_call><function=f><parameter=a> 1 </parameter> ...</function></tool_call>
    glm45        text <tool_call>f <arg_key>a</arg_key> <arg_value>1</arg_value> ...</tool_call>
    pythonic     [f(a=1), g()]                                  nothing but calls
    harmony      to=functions.f<|message|>{...}                 as engine/text/harmony.py tells it
    required     [{"name": "f", "parameters": {...}}, ...]      as the grammar enforces it
    named        {...}                                          the arguments alone

Models leave out end tags. A parameter ends at its own one, else where the next parameter begins: at
one of the tool that the call does not have yet, at any on a line of its own, or behind the call.
"""

import re
from collections.abc import Collection, Iterator
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
    after_call: tuple[
        str, ...
    ]  # without blanks: what no value has, but the text behind one

    def ends_value(
        self, text: str, keys: Collection[str], names: Collection[str]
    ) -> bool | None:
        """Whether a value ends before `text`, perhaps without its end tag; None if that depends on
        more text.

        Args:
            text: the next MAX_TAG characters, from a "<" on, or as many as there are.
            keys: the parameters so far, which come once.
            names: those that may follow; if empty, any.
        """
        if text.startswith(self.key):
            name, end, _ = text[len(self.key) :].partition(self.key_end)
            if end:
                name = name.strip()
                is_name = bool(_PARAMETER.fullmatch(name)) and (
                    not names or name in names
                )
                return is_name and name not in keys
        bare = "".join(text.split())
        if text.startswith(self.value_end) or bare.startswith(self.after_call):
            return True
        is_key = text.startswith(self.key)
        tags = (self.key, self.value_end, *self.after_call)
        may_end = is_key or any(tag.startswith(bare) for tag in tags)
        return None if may_end and len(text) < MAX_TAG else False


_PARAMETER = re.compile(r"[\w.-]+")
MAX_TAG = 128  # characters, with what tells a tag from a text, and blanks
TAGS: Final = {
    "qwen3_coder": Tags(
        (OPEN, _FUNCTION), ">", "<parameter=", ">", "", "</parameter>", ("</function>", CLOSE),
        (*(f"</function>{tag}" for tag in (CLOSE, OPEN, _FUNCTION)), CLOSE + OPEN),
    ),
    "glm45": Tags(
        (OPEN,), "<", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", (CLOSE,),
        (CLOSE + OPEN,),
    ),
}  # fmt: skip
# What stands between a tag and the arguments, by the format, and what ends it.
_NAME = r"\s*(?P<name>[\w.-]+)\s*"
HEADS: Final = {
    "mistral": re.compile(rf"{_NAME}(\[CALL_ID\][^\[{{]*)?(\[ARGS\])?\s*\{{"),
    "deepseek_v3": re.compile(
        rf"(\s*function<｜tool▁sep｜>)?{_NAME}(```json|<｜tool▁sep｜>)\s*\{{"
    ),
    "qwen3_coder": re.compile(f"{_NAME}>"),
    "glm45": re.compile(f"{_NAME}<"),
    "pythonic": re.compile(rf"[\s,]*{_NAME}\("),
}
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
    shown: Iterator[ToolSyntax] = (
        name for name, tags in _SHOWN.items() if re.search(tags, source)
    )
    return next(shown, "hermes") if option == "auto" else cast(ToolSyntax, option)


def call_beginnings(
    tools: Tools, option: str, tokenizer: Tokenizer
) -> tuple[str | int, ...]:
    """What the model may begin an answer with to call a tool of its own accord: texts, and tokens
    that are no text."""
    if tools.mode != "auto":
        return ()
    forms = _BEGINNINGS[tool_syntax(option, tokenizer.chat_template)]
    texts = dict.fromkeys(
        form.format(name) for form in forms for name in sorted(tools.names)
    )
    found = {text: tokenizer.id_of(text) for text in texts}
    return tuple(n if n in tokenizer.special_ids else text for text, n in found.items())


class CallOpenings:
    """Finds the beginning of a call to an offered tool within other text, in the formats that mark
    calls by tags. There is none to find where the model may not call tools of its own accord."""

    def __init__(
        self, tools: Tools, option: str = "auto", template: ChatTemplate | None = None
    ) -> None:
        forms = (
            _OPENINGS.get(tool_syntax(option, template), ())
            if tools.mode == "auto"
            else ()
        )
        self._openings = tuple(
            form.format(name) for form in forms for name in sorted(tools.names)
        )
        self._tags = [
            tag
            for tag in _FIRST_TAGS
            if any(opening.startswith(tag) for opening in self._openings)
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
        return len(text) - max(
            (overlap(text, tag) for tag in self._tags), default=0
        ), False
