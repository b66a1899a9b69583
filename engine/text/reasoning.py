"""Tells what a model thinks from what it answers: <think>...</think> before the answer. Pure.

Reasoning ends at </think>, and where that never comes, at the first tool call: a model may call a
tool and end its answer without closing its reasoning. A call that is followed by </think> was only
thought of. So text from the first call on is held back until </think> or the end.

A chat template may write the first tag itself, or both for a model that is not to think; then the
prompt ends with it. Blanks around the two texts belong to neither. Each character is read once.
"""

from collections.abc import Mapping
from typing import Final, Literal

from engine.text.detokenizer import overlap
from engine.text.tokenizer import Tokenizer
from engine.text.tool_formats import CallOpenings
from protocol.openai.chat import ChatRequest
from protocol.openai.sampling import GenerationRequest
from protocol.openai.tools import Tools
from protocol.settings.options import ModelOptions

Begins = Literal["open", "perhaps", "harmony"]

OPEN, CLOSE = SPECIAL_TAGS = ("<think>", "</think>")
_TAIL_TOKENS = 16  # of a prompt, which hold a tag and blanks
# Whether an answer thinks from its start although neither it nor the prompt has the first tag.
_OPENS: Final[dict[str, Begins]] = {
    "deepseek_r1": "open",
    "qwen3": "perhaps",
    "auto": "perhaps",
}


def reasoning_begins(
    options: ModelOptions,
    request: GenerationRequest,
    prompt_ids: list[int],
    tokenizer: Tokenizer,
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
        openings: of the calls that end reasoning which is never closed.

    Attributes:
        is_over: what comes is the answer.
        is_inside: the first tag is there, or will not come.
    """

    tags: Mapping[
        int, str
    ] = {}  # the tokens that are tags, and what they are in the text
    is_in_head = False  # what comes is neither reasoning nor answer

    def __init__(
        self, begins: Begins | None, openings: CallOpenings | None = None
    ) -> None:
        self.is_over = begins is None
        self._begins = begins
        self.is_inside = False
        self._blanks: list[str] = []  # that a text may follow
        self._has_text = False  # of the part that is being read
        self._tail = ""  # the beginning of a tag, perhaps
        self._openings = openings or CallOpenings(Tools())
        self._held: list[str] = []  # from a call in the reasoning on
        self._held_end = ""  # the last characters of that, where a tag may begin

    @property
    def is_waiting(self) -> bool:
        """Whether what came last is held back, and may turn out to be of the answer."""
        return bool(self._held or self._tail)

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
            thought, is_closed, text = (
                self._hold(text) if self._held else self._think(text)
            )
            reasoning = self._stripped(thought)
            if is_closed:
                self.is_over, self._blanks, self._has_text = True, [], False
        if self.is_over and not self._has_text:
            text = text.lstrip() if self.is_inside else text
            self._has_text = bool(text)
        return (reasoning, text) if self.is_over else (reasoning, "")

    def finish(self, *, is_cut: bool = False) -> tuple[str, str]:
        """What was held back.

        Args:
            is_cut: a limit ended the answer, which may not have come to the end of its reasoning.
        """
        if self.is_over:
            return "", ""
        if self._held:
            held = "".join(self._held)
            self._held = []
            if is_cut:
                return self._stripped(held), ""
            self.is_over = True
            return "", held
        if self.is_inside:
            return self._stripped(self._tail), ""
        self.is_over = True
        return "", "".join([*self._blanks, self._tail])

    def _think(self, text: str) -> tuple[str, bool, str]:
        """What a text within the reasoning adds to it, whether it closes it, and what follows."""
        close = text.find(CLOSE)
        call, is_call = self._openings.find(text)
        if 0 <= close < call:
            return text[:close], True, text[close + len(CLOSE) :]
        if is_call:
            thought, is_closed, rest = self._hold(text[call:])
            return text[:call] + thought, is_closed, rest
        end = min(call, len(text) - overlap(text, CLOSE))
        self._tail = text[end:]
        return text[:end], False, ""

    def _hold(self, text: str) -> tuple[str, bool, str]:
        """As `_think`, of a text from a call on: it is of the reasoning only if that is closed."""
        self._held.append(text)
        recent = self._held_end + text
        if CLOSE not in recent:
            self._held_end = recent[-len(CLOSE) + 1 :]
            return "", False, ""
        thought, _, rest = "".join(self._held).partition(CLOSE)
        self._held = []
        return thought, True, rest

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
