"""Tells what a model thinks from what it answers: <think>...</think> before the answer. Pure.

A chat template may write the first tag itself, or both for a model that is not to think; then the
prompt ends with it. Blanks around the two texts belong to neither. Each character is read once.
"""

from collections.abc import Mapping
from typing import Final, Literal

from engine.text.detokenizer import overlap
from engine.text.tokenizer import Tokenizer
from protocol.openai.chat import ChatRequest
from protocol.openai.sampling import GenerationRequest
from protocol.settings.options import ModelOptions

Begins = Literal["open", "perhaps", "harmony"]

OPEN, CLOSE = SPECIAL_TAGS = ("<think>", "</think>")
_TAIL_TOKENS = 16  # of a prompt, which hold a tag and blanks
# Whether an answer thinks from its start although neither it nor the prompt has the first tag.
_OPENS: Final[dict[str, Begins]] = {"deepseek_r1": "open", "qwen3": "perhaps", "auto": "perhaps"}


def reasoning_begins(
    options: ModelOptions, request: GenerationRequest, prompt_ids: list[int], tokenizer: Tokenizer
) -> Begins | None:
    """Whether an answer is in its reasoning from the start, or may begin one; None: it has none;
    harmony: its reasoning and its calls are as engine/text/harmony.py reads them."""
    option, template = options.reasoning_parser, tokenizer.chat_template
    if option == "none" or not isinstance(request, ChatRequest):
        return None
    both = {option, options.tool_call_parser}
    if "harmony" in both or (both == {"auto"} and template and template.is_harmony):
        return "harmony"
    if option == "auto" and not (template and CLOSE in template.source):
        return None
    tail = tokenizer.decode_all(prompt_ids[-_TAIL_TOKENS:]).rstrip()
    if request.continue_final_message:
        said = request.messages[-1].content or ""
        tail = OPEN if said.rfind(OPEN) > said.rfind(CLOSE) else CLOSE * (CLOSE in said)
    if tail.endswith(CLOSE):
        return None
    return "open" if tail.endswith(OPEN) else _OPENS[option]


class ReasoningParser:
    """One choice's answer. `feed` all of its text, then `finish` once.

    Args:
        begins: as of `reasoning_begins`.

    Attributes:
        is_over: what comes is the answer.
        is_inside: the first tag is there, or will not come.
    """

    tags: Mapping[int, str] = {}  # the tokens that are tags, and what they are in the text
    is_in_head = False  # what comes is neither reasoning nor answer

    def __init__(self, begins: Begins | None) -> None:
        self.is_over = begins is None
        self._begins = begins
        self.is_inside = False
        self._blanks: list[str] = []  # that a text may follow
        self._has_text = False  # of the part that is being read
        self._tail = ""  # the beginning of a tag, perhaps

    @property
    def may_think(self) -> bool:
        """Whether what comes may be of the reasoning."""
        return not self.is_over

    def feed(self, text: str) -> tuple[str, str]:
        """What it adds to the reasoning and to the answer."""
        reasoning, text, self._tail = "", self._tail + text, ""
        if not self.is_over and not self.is_inside:
            text = self._begin(text)
        if not self.is_over and self.is_inside:
            said, tag, text = text.partition(CLOSE)
            if not tag:
                keep = overlap(said, CLOSE)
                said, self._tail = said[: len(said) - keep], said[len(said) - keep :]
            reasoning = self._stripped(said)
            if tag:
                self.is_over, self._blanks, self._has_text = True, [], False
        if self.is_over and not self._has_text:
            text = text.lstrip() if self.is_inside else text
            self._has_text = bool(text)
        return (reasoning, text) if self.is_over else (reasoning, "")

    def finish(self) -> tuple[str, str]:
        """What was held back."""
        if self.is_over:
            return "", ""
        if self.is_inside:
            return self._stripped(self._tail), ""
        self.is_over = True
        return "", "".join([*self._blanks, self._tail])

    def _begin(self, text: str) -> str:
        """What is left of a text behind the first tag, if that has come."""
        bare = text.lstrip()
        self._blanks.append(text[: len(text) - len(bare)])
        if bare.startswith(OPEN):
            self.is_inside, self._blanks = True, []
            return bare[len(OPEN) :]
        if OPEN.startswith(bare):
            self._tail = bare
            return ""
        if self._begins == "open":
            self.is_inside, self._blanks = True, []
            return bare
        text, self._blanks = "".join([*self._blanks, bare]), []
        self.is_over = True
        return text

    def _stripped(self, text: str) -> str:
        """Without blanks at the start; those at the end wait for more."""
        bare = text.strip() if not self._has_text else text.rstrip()
        if not bare:
            self._blanks += [text] if self._has_text else []
            return ""
        before, after = "".join(self._blanks), text[text.rfind(bare[-1]) + 1 :]
        self._blanks, self._has_text = [after], True
        return before + bare
