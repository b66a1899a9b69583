"""Tells apart what gpt-oss thinks, says and calls: OpenAI's harmony format. Pure.

    <|start|>assistant                                              the end of the prompt
    <|channel|>analysis<|message|>I add.<|end|>                     reasoning
    <|start|>assistant<|channel|>commentary<|message|>Wait.<|end|>  content
    <|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{}<|call|>
    <|start|>assistant<|channel|>final<|message|>2<|return|>        content

An answer is messages, each with a head up to <|message|>. The recipient of a call may also stand
before the channel. What models write amiss in a head is passed over where a message follows; text
that no head explains is content. A message may lack its <|end|>: the next head ends it, also one of
a call that begins with the recipient.

Tags are tokens. An answer may also spell one out, which is text like any other, so a tag is here a
character that no text has: half a surrogate pair.
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
# The head of a call behind a text that has no <|end|>, and how it begins.
_OPEN_RECIPIENT = re.compile(
    r"\s{1,8}to=functions\.[\w.-]{1,64}\s{0,8}(json|code)?\s{0,8}"
)
_MAYBE_RECIPIENT = re.compile(
    r"\s{1,8}(to?|to=[a-z]{0,9}|to=functions\.[\w.-]{0,64}\s{0,8}[a-z]{0,4}\s{0,8})?$"
)
_BARE_HEAD = re.compile(r"\s*(t|to|to=\s*[\w.-]*)?\s*")  # as it begins, up to a tag
_SYSTEM = ("system", "developer")
_WORDS = (
    "assistant",
    "analysis",
    "commentary",
    "final",
    "to=",
    "json",
    "code",
)  # of a head


def tags_of(tokenizer: Tokenizer) -> dict[int, str]:
    """The tokens that are tags, and what they are here."""
    found = ((tokenizer.id_of(name), tag) for name, tag in _TAGS.items())
    return {token_id: tag for token_id, tag in found if token_id is not None}


def head_of(prompt_ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """What a prompt says of the message that its answer goes on with, behind the role: nothing,
    or the head through MESSAGE where the message has begun."""
    tags = tags_of(tokenizer)
    ends = (
        at
        for at in reversed(range(len(prompt_ids)))
        if tags.get(prompt_ids[at]) == START
    )
    last = prompt_ids[next(ends, len(prompt_ids)) :]
    kinds = [tags.get(token_id) for token_id in last]
    if END in kinds:
        return ""
    size = kinds.index(MESSAGE) + 1 if MESSAGE in kinds else len(kinds)
    texts = (
        tags.get(token_id) or tokenizer.decode([token_id]) for token_id in last[:size]
    )
    return "".join(texts).removeprefix(_ROLE)


class HarmonyParser(ReasoningParser):
    """One choice's answer; where its calls are told, each is START name MESSAGE arguments END in
    the text, for ToolParser.

    Args:
        head: as of `head_of`.
        tags: as of `tags_of`.
        tells_calls: else they are content, or in the channel for it, reasoning.
    """

    may_think = True

    def __init__(self, head: str, tags: Mapping[int, str], tells_calls: bool) -> None:
        super().__init__("perhaps")
        self.tags = tags
        self._tells_calls = tells_calls
        self.is_in_head, self._head = True, ""
        self._recipient = (
            ""  # the end of a message's text that may be the head of a call
        )
        self._part: Literal["reasoning", "content", "call"] = (
            "content"  # that a message is of
        )
        self._parts = set[str]()  # that have text
        self._gap = ""  # before a message's text
        self._told = "", ""  # since it was last asked
        self._told = self.feed(head)

    def feed(self, text: str) -> tuple[str, str]:
        for piece in _PIECE.findall(text):
            if not self.is_in_head:
                self._look_for_end(piece)
            if not self.is_in_head:
                self._tell_message(piece.strip(ALL_TAGS))
            elif piece == MESSAGE:
                self._begin_message(is_whole=True)
            elif piece in (START, END):
                self._let_go()
                self._head = piece if piece == START else ""
            else:
                self._head += piece
                self._look()
        told, self._told = self._told, ("", "")
        return told

    def finish(self, *, is_cut: bool = False) -> tuple[str, str]:
        self._tell_recipient()
        self._let_go()
        return self.feed("")

    @property
    def _has_tags(self) -> bool:
        return not {*ALL_TAGS}.isdisjoint(self._head)

    def _look_for_end(self, tag: str) -> None:
        """Ends a message before a tag that begins a head, or goes on with one."""
        is_of_head = tag in (CHANNEL, CONSTRAIN, MESSAGE)
        if is_of_head and _OPEN_RECIPIENT.fullmatch(self._recipient):
            head, self._recipient = self._recipient, ""
            self._end()
            self._head = head
        elif tag in (START, END, CHANNEL):
            self._tell_recipient()
            self._end()

    def _tell_message(self, text: str) -> None:
        """Tells a message's text, but for an end that may be the head of a call."""
        if self._part == "call" or not self._tells_calls:
            self._tell(text)
            return
        text = self._recipient + text
        end = _MAYBE_RECIPIENT.search(text)
        self._recipient = end[0] if end else ""
        self._tell(text[: len(text) - len(self._recipient)])

    def _tell_recipient(self) -> None:
        """What looked like the head of a call is text."""
        text, self._recipient = self._recipient, ""
        self._tell(text)

    def _look(self) -> None:
        """Whether a head may go on so; else it is text."""
        if not (self._has_tags or _BARE_HEAD.fullmatch(self._head)):
            text, self._head = self._head, ""
            self._begin_message(is_whole=True)
            self._tell_message(text)
        elif len(self._head) > _MAX_HEAD:
            self._begin_message()

    def _let_go(self) -> None:
        """Ends a head that has no message. What it has beside a head's words is text."""
        text = _NO_TEXT.sub("", self._head).strip()
        if text and not (
            self._has_tags and any(word.startswith(text) for word in _WORDS)
        ):
            self._begin_message()
            self._end()

    def _begin_message(self, *, is_whole: bool = False) -> None:
        """What its head has beside a head's words is text; of one that is whole, from two on."""
        head, self._head, self.is_in_head = self._head, "", False
        recipient = _RECIPIENT.search(head)
        name = recipient[1].removeprefix("functions.") if recipient else ""
        channel = _CHANNEL.search(_RECIPIENT.sub("", head))
        text = _NO_TEXT.sub("", head)
        self._part = "reasoning" if channel and channel[1] == "analysis" else "content"
        self._gap = "\n\n" * (self._part in self._parts)
        if is_whole and len(text.split()) > 1:
            self._tell(text)
        if name not in ("", "assistant", "user") and self._tells_calls:
            self._part, self._gap = "call", ""
            self._parts.discard("call")
            self._put(START + name + MESSAGE)
        self.is_inside = self._part == "reasoning"
        self.is_over |= not self.is_inside
        if not is_whole:
            self._tell(text)

    def _end(self) -> None:
        if self._part == "call":
            self._put(END if "call" in self._parts else "{}" + END)
        self.is_in_head, self.is_inside = True, False

    def _tell(self, text: str) -> None:
        if text:
            self._put(self._gap + text)
            self._gap = ""
            if text.strip():
                self._parts.add(self._part)

    def _put(self, text: str) -> None:
        thought, said = self._told
        thinks = self._part == "reasoning"
        self._told = (thought + text, said) if thinks else (thought, said + text)


def one_call_each(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A conversation as the chat template takes it, which has one call in a turn, its tools'
    answers behind it, and one system message. Thoughts and a text before a call come as one, as
    the model wrote them."""
    groups: list[list[dict[str, Any]]] = [[]]  # turns with their tools' answers
    group_of: dict[str, list[dict[str, Any]]] = {}  # by the id of a call
    for message in messages:
        if message["role"] == "tool":
            group_of.get(message.get("tool_call_id", ""), groups[-1]).append(message)
            continue
        calls, before = message.get("tool_calls", ()), groups[-1]
        thought, said = message.get("thinking"), message.get("content")
        if calls and thought and said:
            said = f"<|end|><|start|>assistant<|channel|>commentary<|message|>{said}"
            message = {**message, "thinking": thought + said, "content": ""}
        for call in calls:
            groups.append([{**message, "tool_calls": [call]}])
            group_of[call["id"]] = groups[-1]
            message = {"role": "assistant", "content": ""}
        if message["role"] in _SYSTEM and before and before[0]["role"] in _SYSTEM:
            texts = [before[0].get("content"), said]
            before[0] = {
                **before[0],
                "content": "\n\n".join(text or "" for text in texts),
            }
        elif not calls:
            groups.append([message])
    return [message for group in groups for message in group]
