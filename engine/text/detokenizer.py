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
_MAX_INCOMPLETE_BYTES = 3  # of a character, which has 4 at most
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def create_detokenizer(
    tokenizer: Tokenizer,
    prompt_ids: Sequence[int] = (),
    *,
    skip_special_tokens: bool = True,
    shown: Iterable[str] = (),
    echoes_prompt: bool = False,
) -> "ByteDetokenizer | WindowDetokenizer":
    """A fresh detokenizer for one sequence: `push` gives the text that a token completes, special
    tokens have none; `flush` what was held back, with U+FFFD for an incomplete character.

    The prompt's text and the generated text join to the text of all ids: where a vocabulary marks
    words by a leading space, the first generated word keeps it unless the text begins with it. A
    character whose first bytes end the prompt belongs to the generated text if that completes it.

    Args:
        skip_special_tokens: else they are text like any other.
        shown: special tokens that are text all the same.
        echoes_prompt: the text of `echo` goes before the generated text, which therefore begins
            with U+FFFD if it does not complete the prompt's last character.
    """
    shown_ids = {
        i: text
        for text in shown
        if (i := tokenizer.id_of(text)) in tokenizer.special_ids
    }
    special_ids = tokenizer.special_ids - shown_ids.keys()
    if not skip_special_tokens:
        special_ids = frozenset()
    if tokenizer.token_bytes is not None:
        return ByteDetokenizer(
            tokenizer.token_bytes, special_ids, prompt_ids, echoes_prompt=echoes_prompt
        )
    return WindowDetokenizer(
        decode=tokenizer.decode if skip_special_tokens else tokenizer.decode_all,
        byte_of=tokenizer.byte_of,
        special_ids=special_ids,
        prompt_ids=prompt_ids,
        shown=shown_ids,
        echoes_prompt=echoes_prompt,
    )


class ByteDetokenizer:
    """For byte-level vocabularies (GPT-2, Llama 3, Qwen, SmolLM2): a lookup and a UTF-8 decoder."""

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        special_ids: frozenset[int],
        prompt_ids: Sequence[int] = (),
        *,
        echoes_prompt: bool = False,
    ) -> None:
        self._token_bytes = token_bytes
        self._special_ids = special_ids
        self._echoes_prompt = echoes_prompt
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # The beginning of a character that ends the prompt, until the output continues it or not.
        self._from_prompt = _incomplete_end(self._last_bytes(prompt_ids))
        self._decoder.decode(self._from_prompt)

    def push(self, token_id: int) -> str:
        data = self._bytes_of(token_id)
        if self._from_prompt and data:
            return self._leave_prompt(data[:1]) + self._decoder.decode(data)
        return self._decoder.decode(data)

    def flush(self) -> str:
        if self._from_prompt:
            return self._leave_prompt(b"")
        return self._decoder.decode(b"", True)

    def echo(self, prompt_ids: Sequence[int]) -> tuple[str, list[int]]:
        """The text of the whole prompt that goes before the generated text, and the offset of each
        token in it, in characters."""
        fresh = ByteDetokenizer(self._token_bytes, self._special_ids)
        return _text_and_offsets(fresh.push, prompt_ids)

    def _bytes_of(self, token_id: int) -> bytes:
        if token_id in self._special_ids or token_id >= len(self._token_bytes):
            return b""
        return self._token_bytes[token_id]

    def _last_bytes(self, prompt_ids: Sequence[int]) -> bytes:
        data = b""
        for token_id in reversed(prompt_ids):
            data = self._bytes_of(token_id) + data
            if len(data) >= _MAX_INCOMPLETE_BYTES:
                break
        return data

    def _leave_prompt(self, next_byte: bytes) -> str:
        """The text of the prompt's incomplete character where `next_byte` does not continue it."""
        before, self._from_prompt = self._from_prompt, b""
        if _continues(before, next_byte):
            return ""
        self._decoder.reset()
        return REPLACEMENT if self._echoes_prompt else ""


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
        byte_of: Callable[[int], bytes | None],
        special_ids: frozenset[int],
        prompt_ids: Sequence[int] = (),
        shown: Mapping[int, str] = MappingProxyType({}),
        *,
        echoes_prompt: bool = False,
    ) -> None:
        self._shown = shown
        self._decode = decode
        self._byte_of = byte_of
        self._special_ids = special_ids
        self._echoes_prompt = echoes_prompt
        self._ids = _text_tail(prompt_ids, special_ids)
        # The beginning of a character that ends the prompt, until the output continues it or not.
        self._from_prompt = _incomplete_end(self._last_bytes())
        self._context_start = 0
        self._emitted = len(self._ids) - len(self._from_prompt)
        self._context_text = decode(self._ids[: self._emitted]) if self._emitted else ""

    def push(self, token_id: int) -> str:
        if token_id in self._special_ids:
            return ""  # skipped before decoding, as a decode of the whole sequence does
        if token_id in self._shown:  # a text begins anew behind it
            text = self.flush() + self._shown[token_id]
            self._ids, self._context_start, self._emitted, self._context_text = (
                [],
                0,
                0,
                "",
            )
            return text
        before = (
            self._leave_prompt(self._byte_of(token_id) or b"")
            if self._from_prompt
            else ""
        )
        self._ids.append(token_id)
        text = self._decode(self._ids[self._context_start :])
        if text.endswith(REPLACEMENT) and len(self._ids) - self._emitted < 8:
            return before  # perhaps the beginning of a character; none takes more than 4 bytes
        return before + self._emit(text)

    def flush(self) -> str:
        if self._from_prompt:
            return self._leave_prompt(b"")
        if self._emitted == len(self._ids):
            return ""
        return self._emit(self._decode(self._ids[self._context_start :]))

    def echo(self, prompt_ids: Sequence[int]) -> tuple[str, list[int]]:
        """See `ByteDetokenizer.echo`."""
        fresh = WindowDetokenizer(self._decode, self._byte_of, self._special_ids)
        num_complete = len(prompt_ids) - len(self._from_prompt)
        text, offsets = _text_and_offsets(fresh.push, prompt_ids[:num_complete])
        text += fresh.flush()
        return text, offsets + [len(text)] * len(self._from_prompt)

    def _last_bytes(self) -> bytes:
        """The bytes of the last ids as far as each is one byte."""
        data = b""
        for token_id in reversed(self._ids[-_MAX_INCOMPLETE_BYTES:]):
            byte = self._byte_of(token_id)
            if byte is None:
                break
            data = byte + data
        return data

    def _leave_prompt(self, next_byte: bytes) -> str:
        """See `ByteDetokenizer`. Decoders turn all of a row of bytes into U+FFFD where one of them
        is wrong, so the context of an output that stands alone is without the prompt's."""
        before, self._from_prompt = self._from_prompt, b""
        if _continues(before, next_byte):
            return ""
        if self._echoes_prompt:
            return self._emit(self._decode(self._ids[self._context_start :]))
        del self._ids[self._emitted :]
        return ""

    def _emit(self, text: str) -> str:
        if text.startswith(self._context_text):
            new = text[len(self._context_text) :]
        else:  # invalid bytes turned the context into U+FFFD as well: it stays as it was emitted
            new = self._decode(self._ids[self._emitted :])
        self._context_start, self._emitted = self._emitted, len(self._ids)
        self._context_text = self._decode(self._ids[self._context_start :])
        return new


def _incomplete_end(data: bytes) -> bytes:
    """The beginning of a character that `data` ends with; empty where all are complete."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    return decoder.getstate()[0]


def _continues(incomplete: bytes, next_byte: bytes) -> bool:
    """Whether the beginning of a character may be followed by `next_byte`, which may be empty."""
    try:
        codecs.getincrementaldecoder("utf-8")("strict").decode(incomplete + next_byte)
    except UnicodeDecodeError:
        return False
    return bool(next_byte)


def _text_and_offsets(
    push: Callable[[int], str], prompt_ids: Sequence[int]
) -> tuple[str, list[int]]:
    """The text that a detokenizer gives for some ids, and the offset of each in it."""
    parts: list[str] = []
    offsets: list[int] = []
    size = 0
    for token_id in prompt_ids:
        offsets.append(size)
        parts.append(push(token_id))
        size += len(parts[-1])
    return "".join(parts), offsets


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
