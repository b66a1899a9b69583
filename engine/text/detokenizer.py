"""Turns token ids into text while they arrive, and finds stop strings in the text.

A detokenizer turns ids into text and holds back bytes that may begin a UTF-8 character.
`StopFinder` cuts the text at a stop string and holds back text that may begin a stop
string. The text that `StopFinder` returns in total does not depend on the size of the
pieces in which text arrives. Both are pure (no I/O).
"""

import codecs
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType

from engine.text.tokenizer import Tokenizer

# Number of tokens at the prompt's end that are decoded together with the output. At
# most 3 of these tokens are bytes of an incomplete character. The other tokens are
# context, so that decoders keep a space at the start of the output.
_CONTEXT_TOKENS = 8
_MAX_INCOMPLETE_BYTES = 3  # a complete UTF-8 character has at most 4 bytes
# Ids without complete text are held back until their number reaches this limit, twice
# the maximum number of bytes in a character.
_MAX_HELD_IDS = 8
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def create_detokenizer(
    tokenizer: Tokenizer,
    prompt_ids: Sequence[int] = (),
    *,
    skip_special_tokens: bool = True,
    visible_tags: Iterable[str] = (),
    echoes_prompt: bool = False,
) -> "ByteDetokenizer | WindowDetokenizer":
    """Return a new detokenizer for one sequence.

    `push` returns the text that a token completes. `flush` returns the text held back,
    with U+FFFD for an incomplete character.

    The prompt's text followed by the generated text is the text of all ids. So in a
    vocabulary that marks words by a leading space, the first generated word keeps that
    space, unless no word precedes it. If the prompt ends within a character that the
    output completes, the character belongs to the generated text.

    Args:
        prompt_ids: the ids that precede the generated ids.
        skip_special_tokens: whether special tokens have no text. If False, they have
            text like other tokens.
        visible_tags: special tokens that have text even if special tokens are skipped.
        echoes_prompt: whether the client receives the text of `echo` before the
            generated text. If the prompt ends within a character that the output does
            not complete, the generated text then begins with U+FFFD.
    """
    visible_ids: dict[int, str] = {}
    for text in visible_tags:
        token_id = tokenizer.id_of(text)
        if token_id is not None and token_id in tokenizer.special_ids:
            visible_ids[token_id] = text
    special_ids = frozenset[int]()
    if skip_special_tokens:
        special_ids = tokenizer.special_ids - visible_ids.keys()
    if tokenizer.token_bytes is not None:
        return ByteDetokenizer(
            tokenizer.token_bytes, special_ids, prompt_ids, echoes_prompt=echoes_prompt
        )
    return WindowDetokenizer(
        decode=tokenizer.decode if skip_special_tokens else tokenizer.decode_all,
        byte_of=tokenizer.byte_of,
        special_ids=special_ids,
        prompt_ids=prompt_ids,
        visible_tags=visible_ids,
        echoes_prompt=echoes_prompt,
    )


class ByteDetokenizer:
    """Detokenizes byte-level vocabularies (GPT-2, Llama 3, Qwen, SmolLM2).

    A table gives the bytes of each token. An incremental UTF-8 decoder turns the bytes
    into text.

    Args:
        token_bytes: the bytes of each token id.
        special_ids: tokens that have no text.
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
        # The bytes of an incomplete character at the prompt's end. Empty once the
        # output's first byte has decided whether the output continues the character.
        self._incomplete_prompt_bytes = _incomplete_end(self._last_bytes(prompt_ids))
        self._decoder.decode(self._incomplete_prompt_bytes)

    def push(self, token_id: int) -> str:
        """Return the text that a token completes."""
        data = self._bytes_of(token_id)
        if self._incomplete_prompt_bytes and data:
            return self._resolve_prompt_end(data[:1]) + self._decoder.decode(data)
        return self._decoder.decode(data)

    def flush(self) -> str:
        """Return the text held back, with U+FFFD for an incomplete character."""
        if self._incomplete_prompt_bytes:
            return self._resolve_prompt_end(b"")
        return self._decoder.decode(b"", True)

    def echo(self, prompt_ids: Sequence[int]) -> tuple[str, list[int]]:
        """Return the prompt's text, and the offset in the text where each token begins.

        An incomplete character at the prompt's end is not part of the text.
        """
        fresh = ByteDetokenizer(self._token_bytes, self._special_ids)
        return _text_and_offsets(fresh.push, prompt_ids)

    def _bytes_of(self, token_id: int) -> bytes:
        if token_id in self._special_ids or token_id >= len(self._token_bytes):
            return b""
        return self._token_bytes[token_id]

    def _last_bytes(self, prompt_ids: Sequence[int]) -> bytes:
        """Return at least the last 3 bytes of the prompt, or all if there are fewer.

        These bytes include any incomplete character at the prompt's end.
        """
        data = b""
        for token_id in reversed(prompt_ids):
            data = self._bytes_of(token_id) + data
            if len(data) >= _MAX_INCOMPLETE_BYTES:
                break
        return data

    def _resolve_prompt_end(self, next_byte: bytes) -> str:
        """Keep or discard the incomplete character at the prompt's end.

        If `next_byte` does not continue the character, the decoder discards the
        character's bytes.

        Returns:
            U+FFFD for a discarded character, if the prompt is echoed; else "".
        """
        incomplete = self._incomplete_prompt_bytes
        self._incomplete_prompt_bytes = b""
        if _continues(incomplete, next_byte):
            return ""
        self._decoder.reset()
        return REPLACEMENT if self._echoes_prompt else ""


class WindowDetokenizer:
    """Detokenizes vocabularies that are not byte-level.

    This class decodes a window of ids with and without the new ids, and emits the
    difference. A token's text may depend on the tokens before it: decoders drop a space
    at the start of a text, and several byte tokens form one character. So the window
    begins with ids that were already emitted:

        ids:    ... | emitted, the context | not emitted yet |
                    ^_context_start        ^_num_emitted     ^len

    Args:
        decode: returns the text of ids.
        byte_of: returns the byte of a byte token; None for other tokens.
        special_ids: tokens that have no text.
        visible_tags: the texts of special tokens that have text, by id.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        byte_of: Callable[[int], bytes | None],
        special_ids: frozenset[int],
        prompt_ids: Sequence[int] = (),
        visible_tags: Mapping[int, str] = MappingProxyType({}),
        *,
        echoes_prompt: bool = False,
    ) -> None:
        self._visible_tags = visible_tags
        self._decode = decode
        self._byte_of = byte_of
        self._special_ids = special_ids
        self._echoes_prompt = echoes_prompt
        self._ids = _context_ids(prompt_ids, special_ids)
        # The bytes of an incomplete character at the prompt's end. Empty once the
        # output's first token has decided whether the output continues the character.
        self._incomplete_prompt_bytes = _incomplete_end(self._last_bytes())
        self._context_start = 0
        self._num_emitted = len(self._ids) - len(self._incomplete_prompt_bytes)
        self._context_text = (
            decode(self._ids[: self._num_emitted]) if self._num_emitted else ""
        )

    def push(self, token_id: int) -> str:
        """Return the text that a token completes."""
        if token_id in self._special_ids:
            # Decoding the complete sequence at once would also drop this id.
            return ""
        if token_id in self._visible_tags:
            text = self.flush() + self._visible_tags[token_id]
            # Decoders treat the text after a special token as the start of a text.
            self._ids = []
            self._context_start = 0
            self._num_emitted = 0
            self._context_text = ""
            return text
        from_prompt = ""
        if self._incomplete_prompt_bytes:
            from_prompt = self._resolve_prompt_end(self._byte_of(token_id) or b"")
        self._ids.append(token_id)
        end = len(self._ids)
        text = self._decode(self._ids[self._context_start :])
        if text.endswith(REPLACEMENT):
            # The text may end within a character, so it is held back. A few ids suffice
            # to complete the character, because it has at most 4 bytes.
            if end - self._num_emitted < _MAX_HELD_IDS:
                return from_prompt
            # The ids held back are invalid bytes, but the last of these bytes may begin
            # a character.
            end -= len(_incomplete_end(self._last_bytes()))
            text = self._decode(self._ids[self._context_start : end])
        return from_prompt + self._emit(text, end)

    def flush(self) -> str:
        """Return the text held back, with U+FFFD for an incomplete character."""
        if self._incomplete_prompt_bytes:
            return self._resolve_prompt_end(b"")
        if self._num_emitted == len(self._ids):
            return ""
        return self._emit(self._decode(self._ids[self._context_start :]))

    def echo(self, prompt_ids: Sequence[int]) -> tuple[str, list[int]]:
        """See `ByteDetokenizer.echo`."""
        fresh = WindowDetokenizer(self._decode, self._byte_of, self._special_ids)
        num_complete = len(prompt_ids) - len(self._incomplete_prompt_bytes)
        text, offsets = _text_and_offsets(fresh.push, prompt_ids[:num_complete])
        text += fresh.flush()
        return text, offsets + [len(text)] * len(self._incomplete_prompt_bytes)

    def _last_bytes(self) -> bytes:
        """Return the bytes of the byte tokens at the end of the ids, at most 3."""
        data = b""
        for token_id in reversed(self._ids[-_MAX_INCOMPLETE_BYTES:]):
            byte = self._byte_of(token_id)
            if byte is None:
                break
            data = byte + data
        return data

    def _resolve_prompt_end(self, next_byte: bytes) -> str:
        """Keep or discard the incomplete character at the prompt's end.

        If `next_byte` does not continue the character and the prompt is not echoed, the
        character's bytes are removed from the context. Otherwise they would spoil byte
        tokens that follow: decoders turn a whole run of byte tokens into U+FFFD if one
        byte of the run is invalid.

        Returns:
            The text of a discarded character, if the prompt is echoed; else "".
        """
        incomplete = self._incomplete_prompt_bytes
        self._incomplete_prompt_bytes = b""
        if _continues(incomplete, next_byte):
            return ""
        if self._echoes_prompt:
            return self._emit(self._decode(self._ids[self._context_start :]))
        del self._ids[self._num_emitted :]
        return ""

    def _emit(self, text: str, end: int | None = None) -> str:
        """Return the part of `text` that is not emitted yet, and move the window.

        Args:
            text: the text of the window's ids before position `end`.
            end: the ids before this position are emitted; None: all ids.
        """
        if end is None:
            end = len(self._ids)
        if text.startswith(self._context_text):
            new_text = text[len(self._context_text) :]
        else:
            # Invalid bytes among the new ids changed the context's text to U+FFFD. The
            # context was already emitted, so only the new ids are decoded.
            new_text = self._decode(self._ids[self._num_emitted : end])
        self._context_start = self._num_emitted
        self._num_emitted = end
        self._context_text = self._decode(self._ids[self._context_start : end])
        return new_text


def _incomplete_end(data: bytes) -> bytes:
    """Return the bytes of an incomplete UTF-8 character at the end of `data`."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    return decoder.getstate()[0]


def _continues(incomplete: bytes, next_byte: bytes) -> bool:
    """Whether `next_byte`, a byte or b"", continues an incomplete character."""
    try:
        codecs.getincrementaldecoder("utf-8")("strict").decode(incomplete + next_byte)
    except UnicodeDecodeError:
        return False
    return bool(next_byte)


def _text_and_offsets(
    push: Callable[[int], str], prompt_ids: Sequence[int]
) -> tuple[str, list[int]]:
    """Return the text of ids, and the offset of each id in the text.

    Args:
        push: the `push` of a new detokenizer.
    """
    parts: list[str] = []
    offsets: list[int] = []
    size = 0
    for token_id in prompt_ids:
        offsets.append(size)
        parts.append(push(token_id))
        size += len(parts[-1])
    return "".join(parts), offsets


def _context_ids(prompt_ids: Sequence[int], special_ids: frozenset[int]) -> list[int]:
    """Return the last ids of a prompt, on which the text of the next ids may depend.

    A special token and all ids before it are left out, because decoders start a new
    text after a special token.
    """
    tail: list[int] = []
    for token_id in reversed(prompt_ids[-_CONTEXT_TOKENS:]):
        if token_id in special_ids:
            break
        tail.insert(0, token_id)
    return tail


class StopFinder:
    """Cuts a text at the first complete stop string.

    The first stop string is the stop string that ends earliest. If several stop strings
    end at the same character, the longest is used. So the result does not depend on the
    pieces in which the text arrives. The time is proportional to the number of
    characters times the number of stop strings.

    Args:
        keeps_stop: whether the matched stop string stays in the text.

    Attributes:
        matched_stop: the stop string that ended the text, or None.
    """

    def __init__(self, stops: Iterable[str], *, keeps_stop: bool = False) -> None:
        self._stops = [(stop, _failure_function(stop)) for stop in stops]
        self._starts = {stop[0] for stop, _ in self._stops}
        # For each stop string, the length of its longest prefix that is a suffix of the
        # text so far.
        self._sizes = [0] * len(self._stops)
        self._keeps_stop = keeps_stop
        self._held = ""
        self.matched_stop: str | None = None

    def push(self, text: str) -> tuple[str, bool]:
        """Add text; return the text to emit, and whether a stop string is complete.

        Text that may begin a stop string is held back. Do not call this again after a
        stop string was complete.
        """
        if not self._held and not any(start in text for start in self._starts):
            return text, False
        sizes = self._sizes
        held = self._held
        for end, char in enumerate(text, 1 + len(held)):
            longest = ""
            for index, (stop, borders) in enumerate(self._stops):
                size = sizes[index]
                while size and stop[size] != char:
                    size = borders[size - 1]
                size += stop[size] == char
                sizes[index] = size
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
        """Return the text held back. No text follows to complete a stop string."""
        held = self._held
        self._held = ""
        return held


@lru_cache(256)
def _failure_function(text: str) -> list[int]:
    """Return the failure function of Knuth, Morris and Pratt for `text`.

    The value at i is the length of the longest proper prefix of text[: i + 1] that is
    also a suffix of text[: i + 1].
    """
    borders = [0]
    size = 0
    for char in text[1:]:
        while size and text[size] != char:
            size = borders[size - 1]
        size += text[size] == char
        borders.append(size)
    return borders


def partial_tag_length(text: str, tag: str) -> int:
    """Return the length of the longest incomplete `tag` at the end of `text`.

    A complete tag does not count.
    """
    sizes = range(min(len(tag) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(tag[:size])), 0)
