"""Prevents the text of messages from becoming control tokens.

In transformers, this is called split_special_tokens. For example, a message may contain
the text `<|im_end|>`. If the rendered chat template were tokenized as it is, this text
would end the user's turn. So a marker is put after the first character of each text
that could become a control token:

    message      Hi <|im_end|>  becomes  Hi <(marker)|im_end|>
    template     <|im_start|>user\\n...<|im_end|>  has no markers in its own tokens
    encode       finds special tokens in the marked text, then deletes the markers

A normalizer deletes the markers. It runs after special tokens have been found and
before all other steps of tokenizing.

So the template's own tokens are found as usual, and some of them absorb the spaces
around them as usual. The text between these tokens is tokenized in one piece, as if it
had no markers. A prompt without markers is tokenized as usual. The marker is random, so
no message contains it.

Control tokens are the special tokens, and other tokens that the chat template names.
For example, Qwen's `<tool_call>` is a control token, although it is not `special`. One
of two rules decides where a text is marked:

- The strict rule is for messages of users and tools, arguments of tool calls, and names
  and definitions of tools. A marker follows the first character of each complete
  control token. A marker also follows each sign (not a letter, digit or space) with
  which any control token begins. Only signs at which an added token that is not a
  control token begins get no marker. So a control token that begins with a sign cannot
  arise if a template removes a part of a message or joins two messages.
- The lenient rule is for system messages and the assistant's previous turns. A marker
  follows the first character of each complete control token. Tags that are not special,
  such as `</think>` and `<tool_call>`, are not marked and stay tokens. Templates search
  messages for these tags. In these messages, the model itself or the author of the
  system message wrote the tags.
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
# Matches tags such as <think> and [INST], but not words and not "```".
_TAG = re.compile(r"[^\w\s].*\w.*[^\w\s]", re.DOTALL)
# Matches tags that models write, but not <|user|>, which begins a turn.
_MODEL_TAG = re.compile(r"</?\w+>")
_MATCHES_NOTHING = r"(?!)"
# Maps ASCII to fullwidth characters, which the normalization NFKC turns into ASCII.
_FULLWIDTH = {code: code + 0xFEE0 for code in range(0x21, 0x7F)}
# Roles with untrusted text, which must not become control tokens.
_STRICT_ROLES = ("user", "tool")
# Members of a message that are marked by the strict rule in messages of every role.
_STRICT_MEMBERS = ("tool_calls", "name")
# Maximum number of control tokens that the self-test puts into each message.
_MAX_PROBED_TOKENS = 64
_TOOL_CALL = {
    "id": "a",
    "type": "function",
    "function": {"name": "f", "arguments": {"x": "{}"}},
}
# The conversations of the self-test. A text with control tokens replaces each "{}".
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
    """Return the splitter for a model's chats.

    Returns None if the model has no chat template. Also returns None, and logs why, if
    a self-test finds that the tokenizer or the template does not work with markers.
    """
    if tokenizer.chat_template is None:
        return None
    splitter = SpecialTokenSplitter(tokenizer)
    if problem := splitter.find_problem():
        log.warning(
            "The text of messages can become control tokens of this model: %s. Choose "
            "another --chat-template, or accept this with --no-split-special-tokens.",
            problem,
        )
        return None
    if splitter.unprotected:
        log.warning(
            "The text of messages can become these control tokens of this model: %s. "
            "The tokenizer finds them after normalizing text, or in its vocabulary. "
            "Remove them from untrusted messages.",
            " ".join(splitter.unprotected[:20]),
        )
    if not splitter.writes_control_tokens:
        log.info(
            "The chat template separates turns by ordinary text, without control "
            "tokens. So a message can imitate a turn of a different role."
        )
    return splitter


class SpecialTokenSplitter:
    """Marks messages, and tokenizes prompts that were rendered from marked messages.

    Threads may share a splitter.

    Attributes:
        unprotected: control tokens that text can become in spite of the markers. For
            example, a token is unprotected if it is also in the vocabulary of the
            tokenizer's model, or if the normalizer turns different text into the token.
        writes_control_tokens: whether the template writes control tokens around
            messages.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        assert tokenizer.chat_template is not None
        self._tokenizer = tokenizer
        self._template = tokenizer.chat_template
        letters = (secrets.choice(_MARKER_CHARS) for _ in range(_MARKER_LENGTH))
        self._marker = "".join(letters)
        # The spelling of the marker if the template writes JSON with ASCII escapes.
        self._escaped_marker = self._marker.encode("ascii", "backslashreplace").decode()
        added = tokenizer.added_tokens()
        special = {
            text
            for text, is_special in added.items()
            if is_special and _can_hold_marker(text)
        }
        named = {text for text in added if _is_named(text, self._template.source)}
        controls = special | named
        self._strict = _MarkingRule(controls, others=added.keys() - controls)
        model_tags = {text for text in named if _MODEL_TAG.fullmatch(text)}
        self._lenient = _MarkingRule(
            controls - (model_tags - special) - {*SPECIAL_TAGS}
        )
        self._control_ids = {tokenizer.id_of(text) for text in controls}
        # This copy finds special tokens in a marked text, then deletes the markers.
        self._marker_tokenizer = tokenizer.with_marker_deleted(
            self._marker, self._strict.texts
        )
        self.unprotected = self._find_unprotected()
        self.writes_control_tokens = self._has_control_tokens_in_turns()

    def mark_messages(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return copies of the messages, marked by the strict or the lenient rule."""
        return [self._mark_message(message) for message in messages]

    def mark_tools(self, tools: Iterable[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
        """Return copies of the tools' definitions, marked by the strict rule."""
        return tuple(self._mark(tool, self._strict) for tool in tools)

    def encode(self, prompt: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a rendered prompt.

        Marked text does not become control tokens. The markers are deleted.
        """
        if self._escaped_marker in prompt:  # the template wrote JSON with ASCII escapes
            prompt = prompt.replace(self._escaped_marker, self._marker)
        if self._marker not in prompt:
            return self._tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
        encoded = self._marker_tokenizer.encode_batch_fast(
            [prompt], add_special_tokens=add_special_tokens
        )
        return list[int](encoded[0].ids)

    def without_marks(self, text: str) -> str:
        """Return a rendered prompt, or an error message, without markers."""
        return text.replace(self._escaped_marker, "").replace(self._marker, "")

    def find_problem(self) -> str | None:
        """Test whether markers work with this tokenizer and template.

        The self-test renders and tokenizes the conversations in _PROBES, with and
        without markers.

        Returns:
            The reason why markers do not work; None if they work.
        """
        for probe in _PROBES:
            rule = self._rule_of(probe[0])
            texts = [text for text in rule.texts if text not in self.unprotected]
            hostile = _filled(probe, f"a{''.join(texts[:_MAX_PROBED_TOKENS])}b")
            plain = self._render(_filled(probe, "a b"))
            rendered = self._render(hostile)
            marked = self._render(self.mark_messages(hostile))
            if plain is None or rendered is None or marked is None:
                continue  # the template refuses this kind of conversation
            if self.without_marks(marked) != rendered:
                return (
                    "the chat template changes a message depending on the text of the "
                    "message"
                )
            if self._ids_without_markers(plain) != self._usual_ids(plain):
                return "the tokenizer matches special tokens in normalized text"
            if self._num_controls(marked) != self._num_controls(plain):
                return (
                    "the tokenizer finds control tokens in the text between special "
                    "tokens"
                )
        return None

    def _mark_message(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of the message with markers.

        The members in _STRICT_MEMBERS are marked by the strict rule, all other members
        by the rule for the message's role.
        """
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

    def _rule_of(self, message: dict[str, Any]) -> "_MarkingRule":
        return self._strict if message.get("role") in _STRICT_ROLES else self._lenient

    def _mark(self, value: Any, rule: "_MarkingRule") -> Any:
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
        """Return the control tokens that text can become in spite of the markers.

        The tokenizer may find a control token in marked text. Or the tokenizer's
        normalizer may change the case of text, or turn fullwidth characters into ASCII,
        and so create a control token.
        """
        texts = {*self._strict.texts}
        library = self._tokenizer.library
        unprotected = []
        for text in self._strict.texts:
            marked = self._strict.mark(text, self._marker)
            variants = {text.swapcase(), text.translate(_FULLWIDTH)} - texts
            has_variant = any(
                self._has_control_token(library, variant) for variant in variants
            )
            if has_variant or self._has_control_token(self._marker_tokenizer, marked):
                unprotected.append(text)
        return unprotected

    def _has_control_token(self, tokenizer: tokenizers.Tokenizer, text: str) -> bool:
        return not self._control_ids.isdisjoint(
            tokenizer.encode(text, add_special_tokens=False).ids
        )

    def _has_control_tokens_in_turns(self) -> bool:
        """Whether the template writes control tokens around messages.

        In this case, a prompt of three turns has more control tokens than a prompt of
        one turn.
        """
        one_turn = self._render(_filled(_PROBES[0], "a"))
        three_turns = self._render(_filled(_PROBES[2], "a"))
        if one_turn is None or three_turns is None:
            return True  # unknown; True keeps `create_splitter` from logging a message
        return self._num_controls(three_turns) > self._num_controls(one_turn)

    def _num_controls(self, prompt: str) -> int:
        ids = self._ids_without_markers(prompt)
        return sum(token_id in self._control_ids for token_id in ids)

    def _usual_ids(self, prompt: str) -> list[int]:
        return list[int](
            self._tokenizer.library.encode(prompt, add_special_tokens=False).ids
        )

    def _ids_without_markers(self, prompt: str) -> list[int]:
        return list[int](
            self._marker_tokenizer.encode(prompt, add_special_tokens=False).ids
        )

    def _render(self, messages: Sequence[dict[str, Any]]) -> str | None:
        """Return the rendered prompt; None if the template refuses the messages."""
        try:
            return self._template.render(messages, self._tokenizer.special_tokens)
        except BatonError:
            return None


class _MarkingRule:
    """Puts markers into a text, by the strict or the lenient rule.

    Args:
        texts: the control tokens.
        others: None for the lenient rule, which marks only complete control tokens. For
            the strict rule, the added tokens that are not control tokens, such as
            `<table>` in some vocabularies. The strict rule also marks each sign (not a
            letter, digit or space) with which any control token begins, unless one of
            `others` begins at that sign.
    """

    def __init__(
        self, texts: Iterable[str], *, others: Iterable[str] | None = None
    ) -> None:
        self.texts = sorted(texts)
        alternatives = [_pattern(self.texts)] if self.texts else []
        if others is not None:
            first_chars = sorted({text[0] for text in self.texts})
            signs = [
                char for char in first_chars if not (char.isalnum() or char.isspace())
            ]
            if signs:
                unmarked = _pattern(text for text in others if text[0] in signs)
                alternatives.append(f"(?!{unmarked})[{re.escape(''.join(signs))}]")
        self._begin = re.compile("|".join(alternatives) or _MATCHES_NOTHING)

    def mark(self, text: str, marker: str) -> str:
        """Return the text with a marker at each position that the rule selects.

        A marker is inserted after the first character of a possible control token.
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
    """Return a regular expression that matches where any of `texts` begins.

    There may be thousands of texts, so the expression is a tree of their common
    prefixes. A text that begins with another of the texts is left out, because the
    shorter text already matches there.
    """
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}
    return _tree_pattern(tree) if tree else _MATCHES_NOTHING


def _tree_pattern(node: dict[str, Any]) -> str:
    if "" in node:
        return ""
    branches = [re.escape(char) + _tree_pattern(child) for char, child in node.items()]
    return f"(?:{'|'.join(branches)})" if len(branches) > 1 else "".join(branches)


def _is_named(text: str, source: str) -> bool:
    """Whether `text` is a tag, and a template contains the tag or its counterpart.

    The counterpart is the closing tag of an opening tag, and vice versa.

    Args:
        source: the text of the template.
    """
    counterpart = f"<{text[2:]}" if text.startswith("</") else f"</{text[1:]}"
    is_in_source = text in source or counterpart in source
    return _TAG.fullmatch(text) is not None and is_in_source


def _can_hold_marker(text: str) -> bool:
    """Whether a token has two characters, so that a marker fits between them.

    White space around the token does not count.
    """
    return len(text.strip()) > 1


def _filled(value: Any, text: str) -> Any:
    """Return a conversation of _PROBES in which `text` replaces each "{}"."""
    match value:
        case "{}":
            return text
        case list():
            return [_filled(item, text) for item in value]
        case dict():
            return {name: _filled(item, text) for name, item in value.items()}
    return value
