"""A call's prompts as token ids: tokenized off the event loop, or not at all.

Tokenizing takes milliseconds, which no stream may wait for and which the prefill server has just
spent. So a prefill server hands over a text's ids with the KV, and signs a digest of what
it had tokenized, and with what. A decode server that finds the same digest for its own copy of the
request takes the ids; with any other it tokenizes.

What cannot fit the model's context is refused before it is tokenized, as that takes a second for a
megabyte and hundreds of times a text's memory (token_bound.py). What a chat template writes is
looked at for that rather than the messages: it may leave some out, and write tools and variables as
well.
"""

import asyncio
import hashlib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec

from engine.http.limits import prompt_param, too_long
from engine.http.tools import with_tools
from engine.text.tokenizer import Tokenizer
from protocol.openai.chat import ChatRequest
from protocol.openai.completions import CompletionRequest
from protocol.openai.sampling import GenerationRequest

INLINE_CHARS = 2048  # longer texts are tokenized off the event loop
LONG_CHARS = 1 << 20  # longer texts are tokenized one at a time: each takes hundreds of MB
_HEAD_CHARS = 32  # that a template writes around a message

_T = TypeVar("_T")


def given_texts(parsed: GenerationRequest) -> list[str | None]:
    """Each prompt as the client wrote it; None where it is ids, or a chat's."""
    if not isinstance(parsed, CompletionRequest):
        return [None]
    return [prompt if isinstance(prompt, str) else None for prompt in parsed.prompts]


def text_digest(parsed: GenerationRequest, tokenizer: Tokenizer) -> str | None:
    """SHA-256 over all that the token ids of the one prompt follow from; None where the prompt is
    ids, or there are several."""
    if isinstance(parsed, ChatRequest):
        messages, options = _chat(parsed, tokenizer)
        given: list[Any] = ["chat", messages, options]
    else:
        texts = given_texts(parsed)
        if len(texts) != 1 or texts[0] is None:
            return None
        assert isinstance(parsed, CompletionRequest)
        given = ["text", texts[0], parsed.add_special_tokens]
    try:
        text = msgspec.json.encode([tokenizer.digest, *given])
    except UnicodeEncodeError:  # half a surrogate pair
        return None
    return hashlib.sha256(b"baton text\0" + text).hexdigest()


class TextEncoder:
    """Tokenizes the texts of one application, on one event loop: none holds up its streams, nor
    do several at once fill its memory."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._alone = asyncio.Lock()

    async def run(self, size: int, work: Callable[[], _T]) -> _T:
        """What `work` returns, which takes as much as tokenizing `size` characters does."""
        if size <= INLINE_CHARS:
            return work()
        if size <= LONG_CHARS:
            return await asyncio.to_thread(work)
        async with self._alone:
            return await asyncio.to_thread(work)

    async def tokenize(
        self, parsed: GenerationRequest, max_model_len: int, *, sure_to: int = INLINE_CHARS
    ) -> list[list[int]]:
        """The token ids of each prompt.

        Args:
            sure_to: a text of so many characters is tokenized, however many tokens it has.

        Raises:
            InvalidRequest: the chat template refuses the messages.
            ContextLengthExceeded: a longer text has more than `max_model_len` tokens for sure.
        """
        encode = partial(self._encode, parsed, max_model_len, sure_to)
        try:
            return await self.run(_size(parsed), partial(encode, LONG_CHARS))
        except _MoreThanThought as more:
            return await self.run(more.size, partial(encode, sys.maxsize))

    def _encode(
        self, parsed: GenerationRequest, max_model_len: int, sure_to: int, limit: int
    ) -> list[list[int]]:
        prompts: Sequence[str | list[int]]
        if isinstance(parsed, ChatRequest):
            messages, options = _chat(parsed, self._tokenizer)
            adds = options.pop("add_special_tokens")
            prompts = [self._tokenizer.render_chat(messages, **options)]
        else:
            assert isinstance(parsed, CompletionRequest)
            prompts, adds = parsed.prompts, parsed.add_special_tokens
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        for text in texts:
            if len(text) <= sure_to:
                continue
            if at_least := self._tokenizer.at_least(text, max_model_len + 1):
                raise too_long(at_least, max_model_len, prompt_param(parsed), "at least ")
        if (size := max(map(len, texts), default=0)) > limit:
            raise _MoreThanThought(size)
        return [
            self._tokenizer.encode(prompt, add_special_tokens=adds)
            if isinstance(prompt, str)
            else prompt
            for prompt in prompts
        ]


class _MoreThanThought(Exception):
    """A text is to be tokenized by itself, of `size` characters."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size = size


def _size(parsed: GenerationRequest) -> int:
    """Characters to tokenize; of a chat only whether they are few, all that a template may write
    included."""
    if not isinstance(parsed, ChatRequest):
        return min(sum(len(text or "") for text in given_texts(parsed)), LONG_CHARS)
    if parsed.tools or parsed.chat_template_kwargs:
        return LONG_CHARS
    turns = parsed.messages
    names = sum(len(turn.name or "") + len(turn.tool_call_id or "") for turn in turns)
    size = sum(len(turn.content) for turn in turns) + names + _HEAD_CHARS * len(turns)
    return LONG_CHARS if any(turn.tool_calls for turn in turns) else min(size, LONG_CHARS)


def _chat(parsed: ChatRequest, tokenizer: Tokenizer) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The messages, the keyword arguments of Tokenizer.render_chat, and `add_special_tokens`."""
    messages = [message.model_dump(exclude_none=True) for message in parsed.messages]
    messages, tools = with_tools(messages, parsed.toolset, tokenizer)
    adds = parsed.add_special_tokens
    return messages, {**parsed.template_options, "tools": tools, "add_special_tokens": adds}
