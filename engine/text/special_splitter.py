"""Keeps the text of messages from becoming control tokens (transformers' split_special_tokens).

A message may contain `<|im_end|>`. Tokenized with its chat template around it, that text would end
the turn. So a marker is put behind the first character of what could be a control token:

    message      Hi <|im_end|>                    mark        Hi <(marker)|im_end|>
    template     <|im_start|>user\\n...<|im_end|>             the same: its own tokens stay
    encode       matches special tokens in the marked text, then deletes the markers: a normalizer
                 does, which runs behind that match and in front of everything else

So the template's own tokens are found where they were, with their rules for blanks around them.
The text between them is tokenized in one piece, as without this module. A prompt without markers is
tokenized in the usual way. The marker is random, so no message contains it.

Control tokens are the special ones, and others that the chat template names, such as Qwen's
`<tool_call>`, which is not `special`. Two rules say where text is marked:

- Messages of users and tools, arguments of calls, names and definitions of tools: behind each
  character that a control token begins with, unless another token begins there. So no control
  token arises where a template removes a part of a message, or puts two messages together.
- System messages and an assistant's earlier turns: behind the first character of each control
  token, but for tags such as `</think>` and `<tool_call>` that are not special. Templates look for
  these, and they stay tokens: the model wrote them, or they were written for it.
"""

import re
import secrets
from collections.abc import Iterable, Sequence
from typing import Any

import tokenizers

from engine.text.reasoning import SPECIAL_TAGS
from engine.text.tokenizer import Tokenizer
from protocol.errors import BatonError
from protocol.process.logging import get_logger

log = get_logger(__name__)

_MARKER_CHARS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # Unicode's noncharacters
_MARKER_LENGTH = 8
_TAG = re.compile(
    r"[^\w\s].*\w.*[^\w\s]", re.DOTALL
)  # <think>, [INST]; no "```" and no word
_WRITTEN = re.compile(
    r"</?\w+>"
)  # tags that models write; not <|user|>, which begins a turn
_NOTHING = r"(?!)"  # a regular expression that matches nothing
_WIDE = {
    code: code + 0xFEE0 for code in range(0x21, 0x7F)
}  # which NFKC makes narrow again
_FROM_OUTSIDE = (
    "user",
    "tool",
)  # roles whose messages hold no control token of any kind
_STRICT_MEMBERS = ("tool_calls", "name")  # of a message of any role
_NUM_PROBED = 64  # control tokens in a message of the self-test
_TOOL_CALL = {
    "id": "a",
    "type": "function",
    "function": {"name": "f", "arguments": {"x": "{}"}},
}
_PROBES: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "{}"}],
    [{"role": "system", "content": "{}"}, {"role": "user", "content": "{}"}],
    [
        {"role": "user", "content": "{}"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ],
    [
        {"role": "user", "content": "{}"},
        {"role": "assistant", "content": "", "tool_calls": [_TOOL_CALL]},
        {"role": "tool", "content": "{}", "tool_call_id": "a", "name": "f"},
    ],
]


def splitter_of(tokenizer: Tokenizer) -> "SpecialTokenSplitter | None":
    """The splitter of a model with a chat template. None where the tokenizer or the template does
    not allow it: then the log says why, once at the start."""
    if tokenizer.chat_template is None:
        return None
    splitter = SpecialTokenSplitter(tokenizer)
    if problem := splitter.find_problem():
        log.warning(
            "The text of messages can become control tokens of this model: %s. Give another "
            "--chat-template, or confirm it with --no-split-special-tokens.",
            problem,
        )
        return None
    if splitter.unprotected:
        log.warning(
            "The text of messages can become these control tokens of this model, which its "
            "tokenizer matches in another way: %s.",
            " ".join(splitter.unprotected[:20]),
        )
    if not splitter.has_own_tokens:
        log.info(
            "The chat template separates turns by ordinary text, without control tokens: a message "
            "can imitate a turn of another role."
        )
    return splitter


class SpecialTokenSplitter:
    """Marks messages and tokenizes prompts that were rendered from them. Safe to share between
    threads.

    Attributes:
        unprotected: control tokens that text can still become, as the tokenizer's own model has
            them in its vocabulary, or normalizes other text to them.
        has_own_tokens: the template writes control tokens around messages.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        assert tokenizer.chat_template is not None
        self._tokenizer, self._template = tokenizer, tokenizer.chat_template
        letters = (secrets.choice(_MARKER_CHARS) for _ in range(_MARKER_LENGTH))
        self._marker = "".join(letters)
        self._escaped = self._marker.encode(
            "ascii", "backslashreplace"
        ).decode()  # as JSON has it
        added = tokenizer.added_tokens()
        special = {
            text
            for text, is_special in added.items()
            if is_special and _is_divisible(text)
        }
        named = {text for text in added if _is_named(text, self._template.source)}
        controls = special | named
        self._strict = _Rule(controls, others=added.keys() - controls)
        written = {text for text in named if _WRITTEN.fullmatch(text)}
        self._lenient = _Rule(controls - (written - special) - {*SPECIAL_TAGS})
        self._ids = {tokenizer.id_of(text) for text in controls}
        self._guarded = tokenizer.deleting(self._marker, self._strict.texts)
        self.unprotected = self._find_unprotected()
        self.has_own_tokens = self._has_own_tokens()

    def mark_messages(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages with each spelling of a control token marked."""
        return [self._marked_message(message) for message in messages]

    def mark_tools(self, tools: Iterable[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
        """Definitions of tools, marked as messages of users are."""
        return tuple(self._marked(tool, self._strict) for tool in tools)

    def encode(self, prompt: str, *, add_special_tokens: bool) -> list[int]:
        """The ids of a rendered prompt; text that is marked becomes no control token."""
        if self._escaped in prompt:  # the template writes JSON in ASCII
            prompt = prompt.replace(self._escaped, self._marker)
        if self._marker not in prompt:
            return self._tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
        found = self._guarded.encode_batch_fast(
            [prompt], add_special_tokens=add_special_tokens
        )
        return list[int](found[0].ids)

    def without_marks(self, text: str) -> str:
        """A rendered prompt, or an error message, as it is without markers."""
        return text.replace(self._escaped, "").replace(self._marker, "")

    def find_problem(self) -> str | None:
        """Why this tokenizer and this template do not allow it; None: they do. Renders and
        tokenizes small conversations, marked and unmarked."""
        for probe in _PROBES:
            rule = self._rule_of(probe[0])
            texts = [text for text in rule.texts if text not in self.unprotected]
            hostile = _filled(probe, f"a{''.join(texts[:_NUM_PROBED])}b")
            plain = self._render(_filled(probe, "a b"))
            rendered, marked = (
                self._render(hostile),
                self._render(self.mark_messages(hostile)),
            )
            if plain is None or rendered is None or marked is None:
                continue  # the template takes no such conversation
            if self.without_marks(marked) != rendered:
                return (
                    "the chat template changes the text of messages by what it contains"
                )
            if self._guarded_ids(plain) != self._usual_ids(plain):
                return "the tokenizer matches special tokens in normalized text"
            if self._num_controls(marked) != self._num_controls(plain):
                return "the tokenizer finds control tokens in the text between special tokens"
        return None

    def _marked_message(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message, its members by the rule of its role, or by their own."""
        rule = self._rule_of(message)
        own_rules = dict.fromkeys(_STRICT_MEMBERS, self._strict)
        return {
            name: value
            if name == "role"
            else self._marked(value, own_rules.get(name, rule))
            for name, value in message.items()
        }

    def _rule_of(self, message: dict[str, Any]) -> "_Rule":
        return self._strict if message.get("role") in _FROM_OUTSIDE else self._lenient

    def _marked(self, value: Any, rule: "_Rule") -> Any:
        match value:
            case str():
                return rule.mark(value, self._marker)
            case list() | tuple():
                return [self._marked(item, rule) for item in value]
            case dict():
                return {
                    self._marked(name, rule): self._marked(item, rule)
                    for name, item in value.items()
                }
        return value

    def _find_unprotected(self) -> list[str]:
        """Of all control tokens, those that marked text becomes, or text that a normalizer changes:
        of another case, or in wide characters."""
        texts = {*self._strict.texts}
        unprotected = []
        for text in self._strict.texts:
            marked = self._strict.mark(text, self._marker)
            likes = {text.swapcase(), text.translate(_WIDE)} - texts
            is_other = any(
                self._is_control(self._tokenizer.library, like) for like in likes
            )
            if is_other or self._is_control(self._guarded, marked):
                unprotected.append(text)
        return unprotected

    def _is_control(self, library: tokenizers.Tokenizer, text: str) -> bool:
        return not self._ids.isdisjoint(
            library.encode(text, add_special_tokens=False).ids
        )

    def _has_own_tokens(self) -> bool:
        """Whether more turns have more control tokens."""
        one, three = (self._render(_filled(_PROBES[at], "a")) for at in (0, 2))
        if one is None or three is None:
            return True  # it is not known
        return self._num_controls(three) > self._num_controls(one)

    def _num_controls(self, prompt: str) -> int:
        return sum(token_id in self._ids for token_id in self._guarded_ids(prompt))

    def _usual_ids(self, prompt: str) -> list[int]:
        return list[int](
            self._tokenizer.library.encode(prompt, add_special_tokens=False).ids
        )

    def _guarded_ids(self, prompt: str) -> list[int]:
        return list[int](self._guarded.encode(prompt, add_special_tokens=False).ids)

    def _render(self, messages: Sequence[dict[str, Any]]) -> str | None:
        """None: the template refuses these messages."""
        try:
            return self._template.render(messages, self._tokenizer.special_tokens)
        except BatonError:
            return None


class _Rule:
    """Where texts are marked.

    Args:
        texts: the control tokens.
        others: tokens that stay tokens, such as `<table>` in some vocabularies. If they are given,
            every other character that a control token begins with is marked.
    """

    def __init__(
        self, texts: Iterable[str], *, others: Iterable[str] | None = None
    ) -> None:
        self.texts = sorted(texts)
        ways = [_pattern(self.texts)] if self.texts else []
        if others is not None:
            firsts = sorted({text[0] for text in self.texts})
            signs = [char for char in firsts if not (char.isalnum() or char.isspace())]
            if signs:
                kept = _pattern(text for text in others if text[0] in signs)
                ways.append(f"(?!{kept})[{re.escape(''.join(signs))}]")
        self._begin = re.compile("|".join(ways) or _NOTHING)

    def mark(self, text: str, marker: str) -> str:
        """The text with a marker behind each character where a control token may begin."""
        places = [0]
        found = self._begin.search(text)
        while found is not None:
            places.append(found.start() + 1)
            found = self._begin.search(text, found.start() + 1)
        if len(places) == 1:
            return text
        stops = [*places[1:], len(text)]
        return marker.join(text[a:b] for a, b in zip(places, stops, strict=True))


def _pattern(texts: Iterable[str]) -> str:
    """A regular expression for any of some texts, of which there may be thousands. Where a text
    begins with another the shorter is enough: only where they begin matters."""
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}
    return _of_tree(tree) if tree else _NOTHING


def _of_tree(node: dict[str, Any]) -> str:
    if "" in node:
        return ""
    ways = [re.escape(char) + _of_tree(child) for char, child in node.items()]
    return f"(?:{'|'.join(ways)})" if len(ways) > 1 else "".join(ways)


def _is_named(text: str, source: str) -> bool:
    """Whether a template names this tag, or the one that opens or closes with it."""
    pair = f"<{text[2:]}" if text.startswith("</") else f"</{text[1:]}"
    return _TAG.fullmatch(text) is not None and (text in source or pair in source)


def _is_divisible(text: str) -> bool:
    """Whether a marker can stand within a token, which is no blank."""
    return len(text.strip()) > 1


def _filled(value: Any, text: str) -> Any:
    """A probe with a text in the places for it."""
    match value:
        case "{}":
            return text
        case list():
            return [_filled(item, text) for item in value]
        case dict():
            return {name: _filled(item, text) for name, item in value.items()}
    return value
