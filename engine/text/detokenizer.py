"""Turns token ids into text while they arrive, and finds stop strings in it.

There are two pure pieces. A detokenizer turns ids into text and holds back bytes that
may be the beginning of a UTF-8 character. `StopFinder` cuts the text before a stop
string and holds back text that may be the beginning of one. The output of both does not
depend on how the tokens or the text were cut into pieces.
"""

import codecs
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType

from engine.text.tokenizer import Tokenizer

_CONTEXT_TOKENS = 8  # of the prompt: more than the bytes of any character
_MAX_INCOMPLETE_BYTES = 3  # a character has at most 4 bytes
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def create_detokenizer(
    tokenizer: Tokenizer,
    prompt_ids: Sequence[int] = (),
    *,
    skip_special_tokens: bool = True,
    shown: Iterable[str] = (),
    echoes_prompt: bool = False,
) -> "ByteDetokenizer | WindowDetokenizer":
    """Return a new detokenizer for one sequence.

    `push` returns the text that a token completes; special tokens have no text. `flush`
    returns the text held back, with U+FFFD for an incomplete character.

    The prompt's text and the generated text join to the text of all ids. Where a
    vocabulary marks words by a leading space, the first generated word keeps its space,
    unless it begins the whole text. If the prompt ends within a character that the
    output completes, the character belongs to the generated text.

    Args:
        skip_special_tokens: if False, special tokens are text like any other token.
        shown: special tokens that are text even when special tokens are skipped.
        echoes_prompt: whether the text of `echo` precedes the generated text. The
            generated text then begins with U+FFFD if it does not complete the prompt's
            last character.
    """
    shown_ids: dict[int, str] = {}
    for text in shown:
        token_id = tokenizer.id_of(text)
        if token_id is not None and token_id in tokenizer.special_ids:
            shown_ids[token_id] = text
    special_ids = frozenset[int]()
    if skip_special_tokens:
        special_ids = tokenizer.special_ids - shown_ids.keys()
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
    """Detokenizes byte-level vocabularies (GPT-2, Llama 3, Qwen, SmolLM2).

    A token's text is a lookup of its bytes and an incremental UTF-8 decoder.
    """

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
        # The first bytes of a character that ends the prompt, until the output decides
        # whether it continues the character.
        self._from_prompt = _incomplete_end(self._last_bytes(prompt_ids))
        self._decoder.decode(self._from_prompt)

    def push(self, token_id: int) -> str:
        """Return the text that a token completes."""
        data = self._bytes_of(token_id)
        if self._from_prompt and data:
            return self._leave_prompt(data[:1]) + self._decoder.decode(data)
        return self._decoder.decode(data)

    def flush(self) -> str:
        """Return the text held back, with U+FFFD for an incomplete character."""
        if self._from_prompt:
            return self._leave_prompt(b"")
        return self._decoder.decode(b"", True)

    def echo(self, prompt_ids: Sequence[int]) -> tuple[str, list[int]]:
        """Return the prompt's text and each token's offset in it, in characters.

        The text is what precedes the generated text.
        """
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
        """Decide what becomes of the prompt's incomplete last character.

        Returns the character's text where `next_byte` does not continue it, else "".
        """
        incomplete = self._from_prompt
        self._from_prompt = b""
        if _continues(incomplete, next_byte):
            return ""
        self._decoder.reset()
        return REPLACEMENT if self._echoes_prompt else ""


class WindowDetokenizer:
    """Detokenizes other vocabularies: decodes a window twice, emits the difference.

    A token's text may depend on its neighbours: decoders drop a leading space at the
    start, and byte tokens join into characters. So the window begins at tokens whose
    text was already emitted:

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
        # The first bytes of a character that ends the prompt, until the output decides
        # whether it continues the character.
        self._from_prompt = _incomplete_end(self._last_bytes())
        self._context_start = 0
        self._emitted = len(self._ids) - len(self._from_prompt)
        self._context_text = decode(self._ids[: self._emitted]) if self._emitted else ""

    def push(self, token_id: int) -> str:
        """Return the text that a token completes."""
        if token_id in self._special_ids:
            return ""  # skipped before decoding, as a decode of the whole sequence does
        if token_id in self._shown:
            text = self.flush() + self._shown[token_id]
            # The text after a special token is decoded as the start of a text.
            self._ids = []
            self._context_start = 0
            self._emitted = 0
            self._context_text = ""
            return text
        from_prompt = ""
        if self._from_prompt:
            from_prompt = self._leave_prompt(self._byte_of(token_id) or b"")
        self._ids.append(token_id)
        text = self._decode(self._ids[self._context_start :])
        if text.endswith(REPLACEMENT) and len(self._ids) - self._emitted < 8:
            # It may be the beginning of a character. No character has more than 4
            # bytes.
            return from_prompt
        return from_prompt + self._emit(text)

    def flush(self) -> str:
        """Return the text held back, with U+FFFD for an incomplete character."""
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
        """Return the bytes of the last ids, as far back as each id is one byte."""
        data = b""
        for token_id in reversed(self._ids[-_MAX_INCOMPLETE_BYTES:]):
            byte = self._byte_of(token_id)
            if byte is None:
                break
            data = byte + data
        return data

    def _leave_prompt(self, next_byte: bytes) -> str:
        """Decide what becomes of the prompt's incomplete last character.

        Decoders turn a whole run of bytes into U+FFFD if one of them is wrong. So an
        output that does not echo the prompt drops the prompt's incomplete bytes from
        its context.
        """
        incomplete = self._from_prompt
        self._from_prompt = b""
        if _continues(incomplete, next_byte):
            return ""
        if self._echoes_prompt:
            return self._emit(self._decode(self._ids[self._context_start :]))
        del self._ids[self._emitted :]
        return ""

    def _emit(self, text: str) -> str:
        if text.startswith(self._context_text):
            new_text = text[len(self._context_text) :]
        else:
            # Invalid bytes turned the context into U+FFFD, too. Its text was already
            # emitted, so only the new ids are decoded.
            new_text = self._decode(self._ids[self._emitted :])
        self._context_start = self._emitted
        self._emitted = len(self._ids)
        self._context_text = self._decode(self._ids[self._context_start :])
        return new_text


def _incomplete_end(data: bytes) -> bytes:
    """Return the incomplete character that ends `data`; empty without one."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    return decoder.getstate()[0]


def _continues(incomplete: bytes, next_byte: bytes) -> bool:
    """Whether `next_byte`, which may be empty, continues an incomplete character."""
    try:
        codecs.getincrementaldecoder("utf-8")("strict").decode(incomplete + next_byte)
    except UnicodeDecodeError:
        return False
    return bool(next_byte)


def _text_and_offsets(
    push: Callable[[int], str], prompt_ids: Sequence[int]
) -> tuple[str, list[int]]:
    """Return the text that a detokenizer gives for ids, and each id's offset in it."""
    parts: list[str] = []
    offsets: list[int] = []
    size = 0
    for token_id in prompt_ids:
        offsets.append(size)
        parts.append(push(token_id))
        size += len(parts[-1])
    return "".join(parts), offsets


def _text_tail(prompt_ids: Sequence[int], special_ids: frozenset[int]) -> list[int]:
    """Return the last ids of a prompt that the text of its continuation may depend on.

    None of them precedes a special token, after which a text begins anew.
    """
    tail: list[int] = []
    for token_id in reversed(prompt_ids[-_CONTEXT_TOKENS:]):
        if token_id in special_ids:
            break
        tail.insert(0, token_id)
    return tail


class StopFinder:
    """Cuts a text at the first complete stop string.

    The first stop string is the one whose last character comes first, and the longest
    of these. So the answer does not depend on how the text arrives. Each stop string
    looks at each character once.

    Args:
        keeps_stop: whether the matched stop string belongs to the text.

    Attributes:
        matched_stop: the stop string that ended the text, or None.
    """

    def __init__(self, stops: Iterable[str], *, keeps_stop: bool = False) -> None:
        self._stops = [(stop, _borders(stop)) for stop in stops]
        self._starts = {stop[0] for stop, _ in self._stops}
        # Of each stop string, how many of its first characters the text ends with.
        self._sizes = [0] * len(self._stops)
        self._keeps_stop = keeps_stop
        self._held = ""
        self.matched_stop: str | None = None

    def push(self, text: str) -> tuple[str, bool]:
        """Return the text that is safe to emit, and whether a stop string ended it."""
        if not self._held and not any(start in text for start in self._starts):
            return text, False
        sizes = self._sizes
        held = self._held
        for end, char in enumerate(text, 1 + len(held)):
            longest = ""
            for at, (stop, borders) in enumerate(self._stops):
                size = sizes[at]
                while size and stop[size] != char:
                    size = borders[size - 1]
                size += stop[size] == char
                sizes[at] = size
                if size == len(stop) > len(longest):
                    longest = stop
            if longest:
                self.matched_stop = longest
                self._held = ""
                text = held + text
                if not self._keeps_stop:
                    end -= len(longest)
                return text[:end], True
        num_held = max(sizes)
        text = held + text
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held], False

    def flush(self) -> str:
        """Return the text held back, which turned out to be no stop string."""
        held = self._held
        self._held = ""
        return held


@lru_cache(256)
def _borders(text: str) -> list[int]:
    """Return the failure function of Knuth, Morris and Pratt for `text`.

    The value at i is the length of the longest shorter prefix of `text` with which
    text[: i + 1] ends, in characters.
    """
    borders = [0]
    size = 0
    for char in text[1:]:
        while size and text[size] != char:
            size = borders[size - 1]
        size += text[size] == char
        borders.append(size)
    return borders


def overlap(text: str, tag: str) -> int:
    """Return how many characters at the end of a text may begin an incomplete tag."""
    sizes = range(min(len(tag) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(tag[:size])), 0)
