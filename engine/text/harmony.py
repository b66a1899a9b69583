"""Separates reasoning, content and calls of gpt-oss: OpenAI's harmony format. Pure.

    <|start|>assistant                                              the prompt's end
    <|channel|>analysis<|message|>I add.<|end|>                     reasoning
    <|start|>assistant<|channel|>commentary<|message|>Wait.<|end|>  content
    <|start|>assistant<|channel|>commentary to=functions.add
        <|constrain|>json<|message|>{}<|call|>                      a call
    <|start|>assistant<|channel|>final<|message|>2<|return|>        content

An answer is a sequence of messages, each with a head up to <|message|>. The recipient
of a call may also come before the channel. Mistakes in a head are skipped where a
message follows; text that fits no head is content. A message may lack its <|end|>: the
next head ends it, even the head of a call that begins with the recipient.

Tags are tokens; see harmony_tags.py.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from engine.text.harmony_tags import ALL_TAGS, CHANNEL, CONSTRAIN, END, MESSAGE, START
from engine.text.reasoning import ReasoningParser
from engine.text.tokenizer import Tokenizer

_TAGS: Final = {
    "<|start|>": START, "<|end|>": END, "<|call|>": END, "<|return|>": END,
    "<|message|>": MESSAGE, "<|channel|>": CHANNEL, "<|constrain|>": CONSTRAIN,
}  # fmt: skip
_PIECE = re.compile(f"[{ALL_TAGS}]|[^{ALL_TAGS}]+")
_MAX_HEAD = 512  # characters
_ROLE = START + "assistant"
_CHANNEL = re.compile(rf"{CHANNEL}\W*(analysis|commentary|final)")
_RECIPIENT = re.compile(r"\bto=\s*([\w.-]+)")
_NO_TEXT = re.compile(rf"{_ROLE}|{_CHANNEL.pattern}|{_RECIPIENT.pattern}|[{ALL_TAGS}]")
# The head of a call after a message without <|end|>, and the beginnings of such a head.
_OPEN_RECIPIENT = re.compile(
    r"\s{1,8}to=functions\.[\w.-]{1,64}\s{0,8}(json|code)?\s{0,8}"
)
_MAYBE_RECIPIENT = re.compile(
    r"\s{1,8}(to?|to=[a-z]{0,9}|to=functions\.[\w.-]{0,64}\s{0,8}[a-z]{0,4}\s{0,8})?$"
)
_BARE_HEAD = re.compile(r"\s*(t|to|to=\s*[\w.-]*)?\s*")  # a head before its first tag
_SYSTEM = ("system", "developer")
_HEAD_WORDS = (
    "assistant", "analysis", "commentary", "final", "to=", "json", "code",
)  # fmt: skip


def tag_characters(tokenizer: Tokenizer) -> dict[int, str]:
    """Return the character of each token that is a tag, by token id."""
    characters: dict[int, str] = {}
    for name, character in _TAGS.items():
        token_id = tokenizer.id_of(name)
        if token_id is not None:
            characters[token_id] = character
    return characters


def answer_head(prompt_ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """Return the part of the answer's first head that the prompt ends with.

    It is empty, or the head after the role, through MESSAGE where the message has
    begun.
    """
    tags = tag_characters(tokenizer)
    starts = (
        at
        for at in reversed(range(len(prompt_ids)))
        if tags.get(prompt_ids[at]) == START
    )
    last_message = prompt_ids[next(starts, len(prompt_ids)) :]
    kinds = [tags.get(token_id) for token_id in last_message]
    if END in kinds:
        return ""
    size = kinds.index(MESSAGE) + 1 if MESSAGE in kinds else len(kinds)
    texts = (
        tags.get(token_id) or tokenizer.decode([token_id])
        for token_id in last_message[:size]
    )
    return "".join(texts).removeprefix(_ROLE)


class HarmonyParser(ReasoningParser):
    """Separates the reasoning of one choice from its content and calls.

    A call becomes START name MESSAGE arguments END in the content, for ToolParser.

    Args:
        head: see `answer_head`.
        tags: see `tag_characters`.
        emits_calls: if False, the text of calls is reasoning or content by its channel.
    """

    may_think = True

    def __init__(self, head: str, tags: Mapping[int, str], emits_calls: bool) -> None:
        super().__init__("perhaps")
        self.tags = tags
        self._emits_calls = emits_calls
        self.is_in_head = True
        self._head = ""
        # The end of a message's text that may be the head of a call.
        self._recipient = ""
        # What the current message is, and the kinds that have text so far.
        self._part: Literal["reasoning", "content", "call"] = "content"
        self._parts = set[str]()
        self._gap = ""  # what separates a message's text from the preceding one
        # Reasoning and content since the last `feed`.
        self._reasoning = ""
        self._content = ""
        self._reasoning, self._content = self.feed(head)

    def feed(self, text: str) -> tuple[str, str]:
        """Return what `text` adds to the reasoning and to the content."""
        for piece in _PIECE.findall(text):
            if not self.is_in_head:
                self._end_message_before(piece)
            if not self.is_in_head:
                self._add_message_text(piece.strip(ALL_TAGS))
            elif piece == MESSAGE:
                self._begin_message(is_complete=True)
            elif piece in (START, END):
                self._end_head()
                self._head = piece if piece == START else ""
            else:
                self._head += piece
                self._check_head()
        reasoning = self._reasoning
        content = self._content
        self._reasoning = ""
        self._content = ""
        return reasoning, content

    def finish(self, *, is_cut: bool = False) -> tuple[str, str]:
        """Return the reasoning and the content that were held back."""
        self._release_recipient()
        self._end_head()
        return self.feed("")

    @property
    def _has_tags(self) -> bool:
        return not {*ALL_TAGS}.isdisjoint(self._head)

    def _end_message_before(self, tag: str) -> None:
        """End the message where `tag` begins a head or continues one in its text."""
        is_of_head = tag in (CHANNEL, CONSTRAIN, MESSAGE)
        if is_of_head and _OPEN_RECIPIENT.fullmatch(self._recipient):
            head = self._recipient
            self._recipient = ""
            self._end_message()
            self._head = head
        elif tag in (START, END, CHANNEL):
            self._release_recipient()
            self._end_message()

    def _add_message_text(self, text: str) -> None:
        """Emit a message's text, except for an end that may be the head of a call."""
        if self._part == "call" or not self._emits_calls:
            self._add_text(text)
            return
        text = self._recipient + text
        end = _MAYBE_RECIPIENT.search(text)
        self._recipient = end[0] if end else ""
        self._add_text(text[: len(text) - len(self._recipient)])

    def _release_recipient(self) -> None:
        """Emit as text what looked like the head of a call."""
        text = self._recipient
        self._recipient = ""
        self._add_text(text)

    def _check_head(self) -> None:
        """Begin a message where the text so far can be no head."""
        if not (self._has_tags or _BARE_HEAD.fullmatch(self._head)):
            text = self._head
            self._head = ""
            self._begin_message(is_complete=True)
            self._add_message_text(text)
        elif len(self._head) > _MAX_HEAD:
            self._begin_message()

    def _end_head(self) -> None:
        """End a head that has no message. Text that belongs to no head is emitted."""
        text = _NO_TEXT.sub("", self._head).strip()
        is_head_word = any(word.startswith(text) for word in _HEAD_WORDS)
        if text and not (self._has_tags and is_head_word):
            self._begin_message()
            self._end_message()

    def _begin_message(self, *, is_complete: bool = False) -> None:
        """Begin the message of the current head.

        Text in the head that belongs to no head is emitted.

        Args:
            is_complete: whether the head is complete. A single word in such a head is
                dropped.
        """
        head = self._head
        self._head = ""
        self.is_in_head = False
        recipient = _RECIPIENT.search(head)
        name = recipient[1].removeprefix("functions.") if recipient else ""
        channel = _CHANNEL.search(_RECIPIENT.sub("", head))
        text = _NO_TEXT.sub("", head)
        self._part = "reasoning" if channel and channel[1] == "analysis" else "content"
        self._gap = "\n\n" if self._part in self._parts else ""
        if is_complete and len(text.split()) > 1:
            self._add_text(text)
        if name not in ("", "assistant", "user") and self._emits_calls:
            self._part = "call"
            self._gap = ""
            self._parts.discard("call")
            self._emit(START + name + MESSAGE)
        self.is_inside = self._part == "reasoning"
        self.is_over |= not self.is_inside
        if not is_complete:
            self._add_text(text)

    def _end_message(self) -> None:
        if self._part == "call":
            self._emit(END if "call" in self._parts else "{}" + END)
        self.is_in_head = True
        self.is_inside = False

    def _add_text(self, text: str) -> None:
        if text:
            self._emit(self._gap + text)
            self._gap = ""
            if text.strip():
                self._parts.add(self._part)

    def _emit(self, text: str) -> None:
        if self._part == "reasoning":
            self._reasoning += text
        else:
            self._content += text


def split_parallel_calls(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a conversation in the form that the chat template takes.

    The template takes one call in a turn, followed by its tools' results, and one
    system message. Reasoning and text before a call are joined, as the model wrote
    them.
    """
    groups: list[list[dict[str, Any]]] = [[]]  # turns with their tools' results
    group_of: dict[str, list[dict[str, Any]]] = {}  # by the id of a call
    for message in messages:
        if message["role"] == "tool":
            group = group_of.get(message.get("tool_call_id", ""), groups[-1])
            group.append(message)
            continue
        calls = message.get("tool_calls", ())
        preceding = groups[-1]
        thought = message.get("thinking")
        content = message.get("content")
        if calls and thought and content:
            head = "<|end|><|start|>assistant<|channel|>commentary<|message|>"
            content = head + content
            message = {**message, "thinking": thought + content, "content": ""}
        for call in calls:
            groups.append([{**message, "tool_calls": [call]}])
            group_of[call["id"]] = groups[-1]
            message = {"role": "assistant", "content": ""}
        is_system = message["role"] in _SYSTEM
        if is_system and preceding and preceding[0]["role"] in _SYSTEM:
            texts = [preceding[0].get("content"), content]
            joined = "\n\n".join(text or "" for text in texts)
            preceding[0] = {**preceding[0], "content": joined}
        elif not calls:
            groups.append([message])
    return [message for group in groups for message in group]
