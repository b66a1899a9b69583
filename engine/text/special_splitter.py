"""Keeps the text of messages from becoming control tokens.

This is what transformers calls split_special_tokens. A message may contain
`<|im_end|>`. Tokenized with the chat template around it, that text would end the turn.
So a marker is put after the first character of each text that could become a control
token:

    message      Hi <|im_end|>              mark     Hi <(marker)|im_end|>
    template     <|im_start|>user\\n...<|im_end|>     the template's own tokens stay
    encode       matches special tokens in the marked text, then deletes the markers

A normalizer deletes the markers; it runs after that match and before everything else.

So the template's own tokens are found where they were, with their rules for blanks
around them. The text between them is tokenized in one piece, as it is without this
module. A prompt without markers is tokenized as usual. The marker is random, so no
message contains it.

Control tokens are the special tokens, and other tokens that the chat template names,
such as Qwen's `<tool_call>`, which is not `special`. Two rules decide where text is
marked:

- Strict, for messages of users and tools, arguments of calls, and names and definitions
  of tools: after each character with which a control token begins, unless another token
  begins there. So no control token arises where a template removes a part of a message
  or joins two messages.
- Lenient, for system messages and an assistant's earlier turns: after the first
  character of each control token, except for tags such as `</think>` and `<tool_call>`
  that are not special. Templates look for these tags, and they stay tokens: the model
  wrote them, or they were written for the model.
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
# Matches tags such as <think> and [INST], but no word and no "```".
_TAG = re.compile(r"[^\w\s].*\w.*[^\w\s]", re.DOTALL)
# Matches tags that models write, but not <|user|>, which begins a turn.
_MODEL_TAG = re.compile(r"</?\w+>")
_MATCHES_NOTHING = r"(?!)"
# Fullwidth characters, which the normalization NFKC turns into ASCII.
_FULLWIDTH = {code: code + 0xFEE0 for code in range(0x21, 0x7F)}
_STRICT_ROLES = ("user", "tool")  # messages from outside contain no control token
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


def create_splitter(tokenizer: Tokenizer) -> "SpecialTokenSplitter | None":
    """Return the splitter of a model with a chat template.

    Returns None where the tokenizer or the template does not allow it, and logs why.
    """
    if tokenizer.chat_template is None:
        return None
    splitter = SpecialTokenSplitter(tokenizer)
    if problem := splitter.find_problem():
        log.warning(
            "The text of messages can become control tokens of this model: %s. Give "
            "another --chat-template, or confirm it with --no-split-special-tokens.",
            problem,
        )
        return None
    if splitter.unprotected:
        log.warning(
            "The text of messages can become these control tokens of this model, which "
            "its tokenizer matches in another way: %s.",
            " ".join(splitter.unprotected[:20]),
        )
    if not splitter.writes_control_tokens:
        log.info(
            "The chat template separates turns by ordinary text, without control "
            "tokens: a message can imitate a turn of another role."
        )
    return splitter


class SpecialTokenSplitter:
    """Marks messages and tokenizes prompts that were rendered from them.

    Threads may share it.

    Attributes:
        unprotected: control tokens that text can still become: the tokenizer's own
            model has them in its vocabulary, or its normalizer turns other text into
            them.
        writes_control_tokens: whether the template writes control tokens around
            messages.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        assert tokenizer.chat_template is not None
        self._tokenizer = tokenizer
        self._template = tokenizer.chat_template
        letters = (secrets.choice(_MARKER_CHARS) for _ in range(_MARKER_LENGTH))
        self._marker = "".join(letters)
        # The marker as JSON in ASCII spells it.
        self._escaped = self._marker.encode("ascii", "backslashreplace").decode()
        added = tokenizer.added_tokens()
        special = {
            text
            for text, is_special in added.items()
            if is_special and _is_divisible(text)
        }
        named = {text for text in added if _is_named(text, self._template.source)}
        controls = special | named
        self._strict = _Rule(controls, others=added.keys() - controls)
        model_tags = {text for text in named if _MODEL_TAG.fullmatch(text)}
        self._lenient = _Rule(controls - (model_tags - special) - {*SPECIAL_TAGS})
        self._ids = {tokenizer.id_of(text) for text in controls}
        self._guarded = tokenizer.with_marker_deleted(self._marker, self._strict.texts)
        self.unprotected = self._find_unprotected()
        self.writes_control_tokens = self._find_control_tokens()

    def mark_messages(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages with each spelling of a control token marked."""
        return [self._mark_message(message) for message in messages]

    def mark_tools(self, tools: Iterable[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
        """Return definitions of tools, marked by the strict rule."""
        return tuple(self._mark(tool, self._strict) for tool in tools)

    def encode(self, prompt: str, *, add_special_tokens: bool) -> list[int]:
        """Return the ids of a rendered prompt. Marked text becomes no control token."""
        if self._escaped in prompt:  # the template writes JSON in ASCII
            prompt = prompt.replace(self._escaped, self._marker)
        if self._marker not in prompt:
            return self._tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
        encoded = self._guarded.encode_batch_fast(
            [prompt], add_special_tokens=add_special_tokens
        )
        return list[int](encoded[0].ids)

    def without_marks(self, text: str) -> str:
        """Return a rendered prompt, or an error message, without its markers."""
        return text.replace(self._escaped, "").replace(self._marker, "")

    def find_problem(self) -> str | None:
        """Return why this tokenizer and template do not allow marks; None: they do.

        It renders and tokenizes small conversations, marked and unmarked.
        """
        for probe in _PROBES:
            rule = self._rule_of(probe[0])
            texts = [text for text in rule.texts if text not in self.unprotected]
            hostile = _filled(probe, f"a{''.join(texts[:_NUM_PROBED])}b")
            plain = self._render(_filled(probe, "a b"))
            rendered = self._render(hostile)
            marked = self._render(self.mark_messages(hostile))
            if plain is None or rendered is None or marked is None:
                continue  # the template takes no such conversation
            if self.without_marks(marked) != rendered:
                return (
                    "the chat template changes the text of messages by what it contains"
                )
            if self._guarded_ids(plain) != self._usual_ids(plain):
                return "the tokenizer matches special tokens in normalized text"
            if self._num_controls(marked) != self._num_controls(plain):
                return (
                    "the tokenizer finds control tokens in the text between special "
                    "tokens"
                )
        return None

    def _mark_message(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the message, each member marked by its own rule or by its role's."""
        rule = self._rule_of(message)
        marked: dict[str, Any] = {}
        for name, value in message.items():
            if name == "role":
                marked[name] = value
            elif name in _STRICT_MEMBERS:
                marked[name] = self._mark(value, self._strict)
            else:
                marked[name] = self._mark(value, rule)
        return marked

    def _rule_of(self, message: dict[str, Any]) -> "_Rule":
        return self._strict if message.get("role") in _STRICT_ROLES else self._lenient

    def _mark(self, value: Any, rule: "_Rule") -> Any:
        match value:
            case str():
                return rule.mark(value, self._marker)
            case list() | tuple():
                return [self._mark(item, rule) for item in value]
            case dict():
                return {
                    self._mark(name, rule): self._mark(item, rule)
                    for name, item in value.items()
                }
        return value

    def _find_unprotected(self) -> list[str]:
        """Return the control tokens that marked or differently spelled text becomes.

        A normalizer may change the case of text, or make fullwidth characters ASCII.
        """
        texts = {*self._strict.texts}
        library = self._tokenizer.library
        unprotected = []
        for text in self._strict.texts:
            marked = self._strict.mark(text, self._marker)
            variants = {text.swapcase(), text.translate(_FULLWIDTH)} - texts
            is_reached = any(self._is_control(library, variant) for variant in variants)
            if is_reached or self._is_control(self._guarded, marked):
                unprotected.append(text)
        return unprotected

    def _is_control(self, library: tokenizers.Tokenizer, text: str) -> bool:
        return not self._ids.isdisjoint(
            library.encode(text, add_special_tokens=False).ids
        )

    def _find_control_tokens(self) -> bool:
        """Whether a conversation of more turns has more control tokens."""
        one_turn = self._render(_filled(_PROBES[0], "a"))
        three_turns = self._render(_filled(_PROBES[2], "a"))
        if one_turn is None or three_turns is None:
            return True  # it cannot be found out, so nothing is logged
        return self._num_controls(three_turns) > self._num_controls(one_turn)

    def _num_controls(self, prompt: str) -> int:
        return sum(token_id in self._ids for token_id in self._guarded_ids(prompt))

    def _usual_ids(self, prompt: str) -> list[int]:
        return list[int](
            self._tokenizer.library.encode(prompt, add_special_tokens=False).ids
        )

    def _guarded_ids(self, prompt: str) -> list[int]:
        return list[int](self._guarded.encode(prompt, add_special_tokens=False).ids)

    def _render(self, messages: Sequence[dict[str, Any]]) -> str | None:
        """Return the prompt; None where the template refuses the messages."""
        try:
            return self._template.render(messages, self._tokenizer.special_tokens)
        except BatonError:
            return None


class _Rule:
    """Where texts are marked.

    Args:
        texts: the control tokens.
        others: tokens that stay tokens, such as `<table>` in some vocabularies. If they
            are given, every other character with which a control token begins is
            marked.
    """

    def __init__(
        self, texts: Iterable[str], *, others: Iterable[str] | None = None
    ) -> None:
        self.texts = sorted(texts)
        alternatives = [_pattern(self.texts)] if self.texts else []
        if others is not None:
            firsts = sorted({text[0] for text in self.texts})
            signs = [char for char in firsts if not (char.isalnum() or char.isspace())]
            if signs:
                unmarked = _pattern(text for text in others if text[0] in signs)
                alternatives.append(f"(?!{unmarked})[{re.escape(''.join(signs))}]")
        self._begin = re.compile("|".join(alternatives) or _MATCHES_NOTHING)

    def mark(self, text: str, marker: str) -> str:
        """Return the text with a marker wherever a control token may begin.

        The marker comes after the token's first character.
        """
        cuts = [0]
        match = self._begin.search(text)
        while match is not None:
            cuts.append(match.start() + 1)
            match = self._begin.search(text, match.start() + 1)
        if len(cuts) == 1:
            return text
        ends = [*cuts[1:], len(text)]
        return marker.join(text[a:b] for a, b in zip(cuts, ends, strict=True))


def _pattern(texts: Iterable[str]) -> str:
    """Return a regular expression for the beginning of any of these texts.

    There may be thousands of texts. Where a text begins with another, the shorter one
    suffices: only the position where they begin matters.
    """
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}
    return _of_tree(tree) if tree else _MATCHES_NOTHING


def _of_tree(node: dict[str, Any]) -> str:
    if "" in node:
        return ""
    branches = [re.escape(char) + _of_tree(child) for char, child in node.items()]
    return f"(?:{'|'.join(branches)})" if len(branches) > 1 else "".join(branches)


def _is_named(text: str, source: str) -> bool:
    """Whether a template names this tag, or its opening or closing counterpart."""
    pair = f"<{text[2:]}" if text.startswith("</") else f"</{text[1:]}"
    return _TAG.fullmatch(text) is not None and (text in source or pair in source)


def _is_divisible(text: str) -> bool:
    """Whether a marker can stand within a token, which must have two characters."""
    return len(text.strip()) > 1


def _filled(value: Any, text: str) -> Any:
    """Return a probe with a text in the places for it."""
    match value:
        case "{}":
            return text
        case list():
            return [_filled(item, text) for item in value]
        case dict():
            return {name: _filled(item, text) for name, item in value.items()}
    return value
