"""Token ids to text while they arrive: UTF-8 safe, stop strings across token borders.

Two pure pieces. A detokenizer turns ids into text, holding back bytes that may be the beginning
of a character; `StopFinder` cuts the text before a stop string, holding back what may be the
beginning of one. The law of both: what they emit does not depend on how the tokens or the text
were cut into pieces.
"""

import codecs
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType

from engine.text.tokenizer import Tokenizer

_CONTEXT_TOKENS = 8  # of the prompt; more than the bytes of any character
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def create_detokenizer(
    tokenizer: Tokenizer,
    prompt_ids: Sequence[int] = (),
    *,
    skip_special_tokens: bool = True,
    shown: Iterable[str] = (),
) -> "ByteDetokenizer | WindowDetokenizer":
    """A fresh detokenizer for one sequence: `push` gives the text that a token completes, special
    tokens have none; `flush` what was held back, with U+FFFD for an incomplete character.

    The prompt's text and the generated text join to the text of all ids: where a vocabulary marks
    words by a leading space, the first generated word keeps it unless the text begins with it.

    Args:
        skip_special_tokens: else they are text like any other.
        shown: special tokens that are text all the same.
    """
    shown_ids = {i: text for text in shown if (i := tokenizer.id_of(text)) in tokenizer.special_ids}
    special_ids = tokenizer.special_ids - shown_ids.keys()
    if not skip_special_tokens:
        special_ids = frozenset()
    if tokenizer.token_bytes is not None:
        return ByteDetokenizer(tokenizer.token_bytes, special_ids)
    decode = tokenizer.decode if skip_special_tokens else tokenizer.decode_all
    return WindowDetokenizer(decode, special_ids, prompt_ids, shown_ids)


class ByteDetokenizer:
    """For byte-level vocabularies (GPT-2, Llama 3, Qwen, SmolLM2): a lookup and a UTF-8 decoder."""

    def __init__(self, token_bytes: Sequence[bytes], special_ids: frozenset[int]) -> None:
        self._token_bytes = token_bytes
        self._special_ids = special_ids
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token_id: int) -> str:
        if token_id in self._special_ids or token_id >= len(self._token_bytes):
            return ""
        return self._decode(self._token_bytes[token_id])

    def flush(self) -> str:
        return self._decode(b"", True)


class WindowDetokenizer:
    """For any other vocabulary: decodes a short window twice and emits the difference.

    A token's text may depend on its neighbours (a leading space is dropped at the start, byte
    tokens join into characters), so the window begins at tokens that are already emitted:

        ids:    ... | emitted, the context | not emitted yet |
                    ^_context_start        ^_emitted         ^len
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        special_ids: frozenset[int],
        prompt_ids: Sequence[int] = (),
        shown: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self._shown = shown
        self._decode = decode
        self._special_ids = special_ids
        self._ids = _text_tail(prompt_ids, special_ids)
        self._context_start = 0
        self._emitted = len(self._ids)
        self._context_text = decode(self._ids) if self._ids else ""

    def push(self, token_id: int) -> str:
        if token_id in self._special_ids:
            return ""  # skipped before decoding, as a decode of the whole sequence does
        if token_id in self._shown:  # a text begins anew behind it
            text = self.flush() + self._shown[token_id]
            self._ids, self._context_start, self._emitted, self._context_text = [], 0, 0, ""
            return text
        self._ids.append(token_id)
        text = self._decode(self._ids[self._context_start :])
        if text.endswith(REPLACEMENT) and len(self._ids) - self._emitted < 8:
            return ""  # perhaps the beginning of a character; none takes more than 4 bytes
        return self._emit(text)

    def flush(self) -> str:
        if self._emitted == len(self._ids):
            return ""
        return self._emit(self._decode(self._ids[self._context_start :]))

    def _emit(self, text: str) -> str:
        if text.startswith(self._context_text):
            new = text[len(self._context_text) :]
        else:  # invalid bytes turned the context into U+FFFD as well: it stays as it was emitted
            new = self._decode(self._ids[self._emitted :])
        self._context_start, self._emitted = self._emitted, len(self._ids)
        self._context_text = self._decode(self._ids[self._context_start :])
        return new


def _text_tail(prompt_ids: Sequence[int], special_ids: frozenset[int]) -> list[int]:
    """The last ids of a prompt that its continuation's text may depend on: none before a special
    token, after which a text begins anew."""
    tail: list[int] = []
    for token_id in reversed(prompt_ids[-_CONTEXT_TOKENS:]):
        if token_id in special_ids:
            break
        tail.insert(0, token_id)
    return tail


class StopFinder:
    """Cuts a text before the first stop string that is complete, or behind it.

    "First" is the one whose last character comes first, and of those the longest, so the answer
    is the same however the text arrives. Each character is looked at once for each of them.

    Args:
        keeps_stop: the stop string found is a part of the text.
    """

    def __init__(self, stops: Iterable[str], *, keeps_stop: bool = False) -> None:
        self._stops = [(stop, _borders(stop)) for stop in stops]
        self._starts = {stop[0] for stop, _ in self._stops}
        self._sizes = [0] * len(self._stops)  # what of each the text ends with, at most
        self._keeps_stop = keeps_stop
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> tuple[str, bool]:
        """The text that is safe to emit, and whether a stop string was found (then it is all)."""
        if not self._held and not any(start in text for start in self._starts):
            return text, False
        sizes, before = self._sizes, self._held
        for end, char in enumerate(text, 1 + len(before)):
            longest = ""
            for at, (stop, borders) in enumerate(self._stops):
                size = sizes[at]
                while size and stop[size] != char:
                    size = borders[size - 1]
                sizes[at] = size = size + (stop[size] == char)
                if size == len(stop) > len(longest):
                    longest = stop
            if longest:
                self.found = longest
                self._held, text = "", before + text
                return text[: end if self._keeps_stop else end - len(self.found)], True
        keep = max(sizes)
        text = before + text
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """What was held back and turned out to be no stop string."""
        held, self._held = self._held, ""
        return held


@lru_cache(256)
def _borders(text: str) -> list[int]:
    """The longest shorter beginning that each beginning of a text ends with, in characters."""
    found, size = [0], 0
    for char in text[1:]:
        while size and text[size] != char:
            size = found[size - 1]
        size += text[size] == char
        found.append(size)
    return found


def overlap(text: str, tag: str) -> int:
    """The longest end of a text that is a beginning of a tag, in characters."""
    sizes = range(min(len(tag) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(tag[:size])), 0)
