"""Separates reasoning, content and calls in OpenAI's harmony format (gpt-oss).

    <|start|>assistant                                              the prompt's end
    <|channel|>analysis<|message|>I add.<|end|>                     reasoning
    <|start|>assistant<|channel|>commentary<|message|>Wait.<|end|>  content
    <|start|>assistant<|channel|>commentary to=functions.add
        <|constrain|>json<|message|>{}<|call|>                      a call
    <|start|>assistant<|channel|>final<|message|>2<|return|>        content

An answer is a sequence of messages. Each message has a head, which ends with
<|message|>, and a text. In the head of a call, the recipient (to=...) may also precede
the channel. Mistakes in a head are skipped if <|message|> follows. Text that cannot
belong to a head is content. If a message lacks its <|end|>, the next head ends the
message, even if this head begins with the recipient of a call.

Each tag is a single token. The parser reads text in which one character represents each
tag (harmony_tags.py). The parser is pure (no I/O).
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
_MAX_HEAD_CHARS = 512
_ROLE = START + "assistant"
_CHANNEL = re.compile(rf"{CHANNEL}\W*(analysis|commentary|final)")
_RECIPIENT = re.compile(r"\bto=\s*([\w.-]+)")
_HEAD_SYNTAX = re.compile(
    rf"{_ROLE}|{_CHANNEL.pattern}|{_RECIPIENT.pattern}|[{ALL_TAGS}]"
)
# Matches the recipient that begins the head of a call after a message without <|end|>.
_OPEN_RECIPIENT = re.compile(
    r"\s{1,8}to=functions\.[\w.-]{1,64}\s{0,8}(json|code)?\s{0,8}"
)
# Matches the recipient of a call, complete or incomplete, at the end of a text.
_MAYBE_RECIPIENT = re.compile(
    r"\s{1,8}(to?|to=[a-z]{0,9}|to=functions\.[\w.-]{0,64}\s{0,8}[a-z]{0,4}\s{0,8})?$"
)
# Matches the part of a head before its first tag: spaces, and the recipient, complete
# or incomplete.
_BARE_HEAD = re.compile(r"\s*(t|to|to=\s*[\w.-]*)?\s*")
_SYSTEM_ROLES = ("system", "developer")
_HEAD_WORDS = (
    "assistant", "analysis", "commentary", "final", "to=", "json", "code",
)  # fmt: skip


def tag_characters(tokenizer: Tokenizer) -> dict[int, str]:
    """Return the characters that stand for the tag tokens, by token id.

    Returns {} if the model's vocabulary has no tag tokens of the harmony format.
    """
    characters: dict[int, str] = {}
    for name, character in _TAGS.items():
        token_id = tokenizer.id_of(name)
        if token_id is not None:
            characters[token_id] = character
    return characters


def answer_head(prompt_ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """Return the part of the answer's first head that the prompt already contains.

    The role "assistant" at the beginning of the head is left out. If the prompt
    contains the complete head, the result ends with MESSAGE. Returns "" if the prompt
    contains only the role, or if the prompt's last message has ended.
    """
    tags = tag_characters(tokenizer)
    starts = (
        position
        for position in reversed(range(len(prompt_ids)))
        if tags.get(prompt_ids[position]) == START
    )
    last_message = prompt_ids[next(starts, len(prompt_ids)) :]
    tag_kinds = [tags.get(token_id) for token_id in last_message]
    if END in tag_kinds:
        return ""
    size = tag_kinds.index(MESSAGE) + 1 if MESSAGE in tag_kinds else len(tag_kinds)
    texts = (
        tags.get(token_id) or tokenizer.decode([token_id])
        for token_id in last_message[:size]
    )
    return "".join(texts).removeprefix(_ROLE)


class HarmonyParser(ReasoningParser):
    """Separates the reasoning of one choice from its content and calls.

    In the content, a call is written as START name MESSAGE arguments END, which
    ToolParser reads.

    Args:
        head: the result of `answer_head`.
        tags: the result of `tag_characters`.
        emits_calls: whether calls become content for ToolParser. If False, the channel
            decides whether the text of a call is reasoning or content.
    """

    may_think = True

    def __init__(self, head: str, tags: Mapping[int, str], emits_calls: bool) -> None:
        super().__init__("perhaps")
        self.tags = tags
        self._emits_calls = emits_calls
        self.is_in_head = True
        self._head = ""
        # The end of a message's text, held back because it may begin the head of a
        # call.
        self._held_recipient = ""
        # The part of the answer to which the current message belongs.
        self._part: Literal["reasoning", "content", "call"] = "content"
        self._parts_with_text = set[str]()
        # The separator to emit before the next text of the current message. It
        # separates the message from the previous message of the same part.
        self._separator = ""
        # The reasoning and the content that `feed` will return next.
        self._reasoning = ""
        self._content = ""
        self._reasoning, self._content = self.feed(head)

    def feed(self, text: str) -> tuple[str, str]:
        """Return the text that `text` adds to the reasoning, and to the content."""
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

    def finish(self, *, is_truncated: bool = False) -> tuple[str, str]:
        """Return the reasoning and the content that were held back."""
        self._emit_held_recipient()
        self._end_head()
        return self.feed("")

    @property
    def _has_tags(self) -> bool:
        return not {*ALL_TAGS}.isdisjoint(self._head)

    def _end_message_before(self, piece: str) -> None:
        """End the current message if `piece` ends it or belongs to the next head.

        The text held back from the current message may be the recipient of a call. If a
        tag of a head follows, the recipient begins the head of the next message.

        Args:
            piece: the next piece of the answer, a tag or text.
        """
        is_head_tag = piece in (CHANNEL, CONSTRAIN, MESSAGE)
        if is_head_tag and _OPEN_RECIPIENT.fullmatch(self._held_recipient):
            head = self._held_recipient
            self._held_recipient = ""
            self._end_message()
            self._head = head
        elif piece in (START, END, CHANNEL):
            self._emit_held_recipient()
            self._end_message()

    def _add_message_text(self, text: str) -> None:
        """Emit text of a message. Hold back an end that may begin a call's head."""
        if self._part == "call" or not self._emits_calls:
            self._add_text(text)
            return
        text = self._held_recipient + text
        end = _MAYBE_RECIPIENT.search(text)
        self._held_recipient = end[0] if end else ""
        self._add_text(text[: len(text) - len(self._held_recipient)])

    def _emit_held_recipient(self) -> None:
        """Emit the text held back, because it is not the head of a call."""
        text = self._held_recipient
        self._held_recipient = ""
        self._add_text(text)

    def _check_head(self) -> None:
        """Begin a message early if the current head is invalid or too long.

        A head without tags is invalid if it has text other than a recipient. All its
        text then becomes text of the message.
        """
        if not (self._has_tags or _BARE_HEAD.fullmatch(self._head)):
            text = self._head
            self._head = ""
            self._begin_message(is_complete=True)
            self._add_message_text(text)
        elif len(self._head) > _MAX_HEAD_CHARS:
            self._begin_message()

    def _end_head(self) -> None:
        """End a head that lacks <|message|>. Emit text that is no part of a head."""
        text = _HEAD_SYNTAX.sub("", self._head).strip()
        is_head_word = any(word.startswith(text) for word in _HEAD_WORDS)
        if text and not (self._has_tags and is_head_word):
            self._begin_message()
            self._end_message()

    def _begin_message(self, *, is_complete: bool = False) -> None:
        """Begin the message that the current head introduces.

        Unexpected text in the head is emitted as text of the message.

        Args:
            is_complete: whether the head has ended with <|message|>. Then a single
                unexpected word, such as a content type, is dropped.
        """
        head = self._head
        self._head = ""
        self.is_in_head = False
        recipient = _RECIPIENT.search(head)
        name = recipient[1].removeprefix("functions.") if recipient else ""
        channel = _CHANNEL.search(_RECIPIENT.sub("", head))
        text = _HEAD_SYNTAX.sub("", head)
        self._part = "reasoning" if channel and channel[1] == "analysis" else "content"
        self._separator = "\n\n" if self._part in self._parts_with_text else ""
        if is_complete and len(text.split()) > 1:
            self._add_text(text)
        if name not in ("", "assistant", "user") and self._emits_calls:
            self._part = "call"
            self._separator = ""
            self._parts_with_text.discard("call")
            self._emit(START + name + MESSAGE)
        self.is_inside = self._part == "reasoning"
        self.is_over |= not self.is_inside
        if not is_complete:
            self._add_text(text)

    def _end_message(self) -> None:
        """End the current message. A call without arguments gets `{}`."""
        if self._part == "call":
            self._emit(END if "call" in self._parts_with_text else "{}" + END)
        self.is_in_head = True
        self.is_inside = False

    def _add_text(self, text: str) -> None:
        if text:
            self._emit(self._separator + text)
            self._separator = ""
            if text.strip():
                self._parts_with_text.add(self._part)

    def _emit(self, text: str) -> None:
        if self._part == "reasoning":
            self._reasoning += text
        else:
            self._content += text


def messages_for_gpt_oss(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a conversation in the form that gpt-oss's chat template accepts.

    The template accepts no consecutive system messages, and only one call per turn,
    followed by the result of this call. So consecutive system messages are joined, and
    turns with several calls are split. If a turn has reasoning, text and a call, the
    text is appended to the reasoning, after the tags that the model writes between the
    two.
    """
    # Each group is a turn, followed by the results of the turn's calls.
    groups: list[list[dict[str, Any]]] = [[]]
    group_by_call_id: dict[str, list[dict[str, Any]]] = {}
    for message in messages:
        if message["role"] == "tool":
            group = group_by_call_id.get(message.get("tool_call_id", ""), groups[-1])
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
            group_by_call_id[call["id"]] = groups[-1]
            message = {"role": "assistant", "content": ""}
        is_system = message["role"] in _SYSTEM_ROLES
        if is_system and preceding and preceding[0]["role"] in _SYSTEM_ROLES:
            texts = [preceding[0].get("content"), content]
            joined = "\n\n".join(text or "" for text in texts)
            preceding[0] = {**preceding[0], "content": joined}
        elif not calls:
            groups.append([message])
    return [message for group in groups for message in group]
