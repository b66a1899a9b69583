"""Separates a model's reasoning, <think>...</think>, from its answer. Pure, no I/O.

Reasoning ends at </think>. If the output has no </think>, reasoning ends at the first
tool call, because a model may call a tool without closing its reasoning. But if
</think> follows the call, the call belongs to the reasoning. So text from the first
call on is held back until </think> or the end of the output.

A chat template may write <think> itself, or <think></think> for a model that should not
reason. The prompt then ends with <think> or </think>. White space around the reasoning
and before the answer is dropped. Each character is read once.
"""

from collections.abc import Mapping
from typing import Final, Literal

from engine.text.detokenizer import partial_tag_length
from engine.text.tokenizer import Tokenizer
from engine.text.tool_formats import CallOpenings
from protocol.openai.chat import ChatRequest
from protocol.openai.sampling import GenerationRequest
from protocol.openai.tools import Tools
from protocol.settings.options import ModelOptions

# open: the output starts within the reasoning. perhaps: the output may begin with
# <think>. harmony: engine/text/harmony.py separates the reasoning and the calls.
ReasoningStart = Literal["open", "perhaps", "harmony"]

OPEN = "<think>"
CLOSE = "</think>"
SPECIAL_TAGS = (OPEN, CLOSE)
_TAIL_TOKENS = 16  # number of tokens at a prompt's end that may contain a final tag
# The start of an output if the prompt does not end with <think> or </think>, by the
# value of --reasoning-parser.
_DEFAULT_STARTS: Final[dict[str, ReasoningStart]] = {
    "deepseek_r1": "open",
    "qwen3": "perhaps",
    "auto": "perhaps",
}


def reasoning_start(
    options: ModelOptions,
    request: GenerationRequest,
    prompt_ids: list[int],
    tokenizer: Tokenizer,
) -> ReasoningStart | None:
    """Return how the reasoning of an output starts; None if there is no reasoning."""
    option = options.reasoning_parser
    template = tokenizer.chat_template
    if option == "none" or not isinstance(request, ChatRequest):
        return None
    parsers = {option, options.tool_call_parser}
    is_harmony_model = template is not None and template.is_harmony
    if "harmony" in parsers or (parsers == {"auto"} and is_harmony_model):
        return "harmony"
    if option == "auto" and not (template and CLOSE in template.source):
        return None
    tail = tokenizer.decode_all(prompt_ids[-_TAIL_TOKENS:]).rstrip()
    if request.continue_final_message:
        tail = _last_tag(request.messages[-1].content or "")
    if tail.endswith(CLOSE):
        return None
    if tail.endswith(OPEN):
        return "open"
    return _DEFAULT_STARTS[option]


def _last_tag(text: str) -> str:
    """Return the last of <think> and </think> in a text; "" if it has neither."""
    if text.rfind(OPEN) > text.rfind(CLOSE):
        return OPEN
    return CLOSE if CLOSE in text else ""


class ReasoningParser:
    """Separates the reasoning of one choice: `feed` all text, then `finish` once.

    Args:
        start: the result of `reasoning_start`.
        openings: finds calls. A call ends reasoning that is never closed.

    Attributes:
        is_over: whether the reasoning has ended, so that all later text is the answer.
            In a harmony answer: whether a message other than reasoning has begun.
        is_inside: whether the reasoning has begun, with or without <think>; stays true
            when it has ended. In a harmony answer: whether the current message is
            reasoning.
        tags: the characters that stand for tag tokens, by token id. Only the harmony
            format has them.
        is_in_head: whether the next text is in the head of a harmony message, which is
            neither reasoning nor answer.
    """

    tags: Mapping[int, str] = {}
    is_in_head = False

    def __init__(
        self, start: ReasoningStart | None, openings: CallOpenings | None = None
    ) -> None:
        self.is_over = start is None
        self._start = start
        self.is_inside = False
        self._blanks: list[str] = []  # white space, emitted only if text follows
        # Whether the current part, reasoning or answer, has text.
        self._has_text = False
        self._tail = ""  # text held back because it may begin a tag
        self._openings = openings or CallOpenings(Tools())
        # Text held back after the beginning of a call within the reasoning.
        self._held: list[str] = []
        self._held_end = ""  # the last characters of `_held`, which may begin </think>

    @property
    def holds_text_back(self) -> bool:
        """Whether the latest text is held back and may belong to the answer."""
        return bool(self._held or self._tail)

    @property
    def may_think(self) -> bool:
        """Whether the text that follows may belong to the reasoning."""
        return not self.is_over

    def feed(self, text: str) -> tuple[str, str]:
        """Return the text that `text` adds to the reasoning, and to the answer."""
        reasoning = ""
        text = self._tail + text
        self._tail = ""
        if not self.is_over and not self.is_inside:
            text = self._read_start(text)
        if not self.is_over and self.is_inside:
            read = self._hold_until_close if self._held else self._read_reasoning
            thought, is_closed, text = read(text)
            reasoning = self._strip(thought)
            if is_closed:
                self.is_over = True
                self._blanks = []
                self._has_text = False
        if self.is_over and not self._has_text:
            text = text.lstrip() if self.is_inside else text
            self._has_text = bool(text)
        return (reasoning, text) if self.is_over else (reasoning, "")

    def finish(self, *, is_truncated: bool = False) -> tuple[str, str]:
        """Divide the text held back into reasoning and answer, and return both.

        Call this once, when the output has ended.

        Args:
            is_truncated: whether a limit or an abort ended the output, so that the text
                held back may still be reasoning.
        """
        if self.is_over:
            return "", ""
        if self._held:
            held = "".join(self._held)
            self._held = []
            if is_truncated:
                return self._strip(held), ""
            self.is_over = True
            return "", held
        if self.is_inside:
            return self._strip(self._tail), ""
        self.is_over = True
        return "", "".join([*self._blanks, self._tail])

    def _read_reasoning(self, text: str) -> tuple[str, bool, str]:
        """Read text within the reasoning.

        Returns:
            The text that belongs to the reasoning, whether </think> was found, and the
            text after </think>.
        """
        close = text.find(CLOSE)
        call, is_call = self._openings.find(text)
        if 0 <= close < call:
            return text[:close], True, text[close + len(CLOSE) :]
        if is_call:
            thought, is_closed, rest = self._hold_until_close(text[call:])
            return text[:call] + thought, is_closed, rest
        end = min(call, len(text) - partial_tag_length(text, CLOSE))
        self._tail = text[end:]
        return text[:end], False, ""

    def _hold_until_close(self, text: str) -> tuple[str, bool, str]:
        """Hold back text from the beginning of a call on, until </think>.

        Returns:
            The same values as `_read_reasoning`. If </think> was found, all text held
            back belongs to the reasoning.
        """
        self._held.append(text)
        recent = self._held_end + text
        if CLOSE not in recent:
            self._held_end = recent[-len(CLOSE) + 1 :]
            return "", False, ""
        thought, _, rest = "".join(self._held).partition(CLOSE)
        self._held = []
        return thought, True, rest

    def _read_start(self, text: str) -> str:
        """Read text before the reasoning, and decide whether the reasoning begins.

        Returns:
            The text after <think>, or all text if the output does not begin with
            <think>. "" while the text may still be an incomplete <think>.
        """
        bare = text.lstrip()
        self._blanks.append(text[: len(text) - len(bare)])
        if bare.startswith(OPEN):
            self.is_inside = True
            self._blanks = []
            return bare[len(OPEN) :]
        if OPEN.startswith(bare):
            self._tail = bare
            return ""
        if self._start == "open":
            self.is_inside = True
            self._blanks = []
            return bare
        text = "".join([*self._blanks, bare])
        self._blanks = []
        self.is_over = True
        return text

    def _strip(self, text: str) -> str:
        """Return text of the reasoning, without white space at the reasoning's start.

        White space at the end of `text` is held back. It is returned before the next
        text that is not only white space.
        """
        bare = text.rstrip() if self._has_text else text.strip()
        if not bare:
            if self._has_text:
                self._blanks.append(text)
            return ""
        blanks_before = "".join(self._blanks)
        blanks_after = text[text.rfind(bare[-1]) + 1 :]
        self._blanks = [blanks_after]
        self._has_text = True
        return blanks_before + bare
