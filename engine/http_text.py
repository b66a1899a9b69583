"""A call's prompts as token ids: tokenized off the event loop, or not at all.

A text of 2,000 tokens takes 5 to 10 ms, which no stream may wait for and which the prefill server
has just spent. So a prefill server hands over a text's ids with the KV, and signs a digest of what
it had tokenized, and with what. A decode server that finds the same digest for its own copy of the
request takes the ids; with any other it tokenizes.
"""

import asyncio
import hashlib
from typing import Any

import msgspec

from engine.http_tools import with_tools
from engine.tokenizer import Tokenizer
from protocol.openai import ChatRequest, CompletionRequest, GenerationRequest

INLINE_CHARS = 2048  # longer texts are tokenized off the event loop: this many take 1 ms
_HEAD_CHARS = 32  # that a template writes around a message


def num_chars(parsed: GenerationRequest) -> list[int]:
    """Characters of each prompt that is text."""
    if isinstance(parsed, ChatRequest):
        return [sum(len(message.content) for message in parsed.messages)]
    assert isinstance(parsed, CompletionRequest)
    return [len(prompt) for prompt in parsed.prompts if isinstance(prompt, str)]


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


async def tokenize(parsed: GenerationRequest, tokenizer: Tokenizer) -> list[list[int]]:
    """The token ids of each prompt.

    Raises:
        InvalidRequest: the chat template refuses the messages.
    """
    if _is_short(parsed):
        return _encode(parsed, tokenizer)
    return await asyncio.to_thread(_encode, parsed, tokenizer)


def _is_short(parsed: GenerationRequest) -> bool:
    """Whether the text, all that a template may write into it included, is tokenized in no time."""
    if not isinstance(parsed, ChatRequest):
        return sum(num_chars(parsed)) <= INLINE_CHARS
    if parsed.tools or parsed.chat_template_kwargs:
        return False
    turns = parsed.messages
    names = sum(len(turn.name or "") + len(turn.tool_call_id or "") for turn in turns)
    size = sum(num_chars(parsed)) + names + _HEAD_CHARS * len(turns)
    return size <= INLINE_CHARS and not any(turn.tool_calls for turn in turns)


def _encode(parsed: GenerationRequest, tokenizer: Tokenizer) -> list[list[int]]:
    if isinstance(parsed, ChatRequest):
        messages, options = _chat(parsed, tokenizer)
        return [tokenizer.encode_chat(messages, **options)]
    assert isinstance(parsed, CompletionRequest)
    adds = parsed.add_special_tokens
    return [
        tokenizer.encode(prompt, add_special_tokens=adds) if isinstance(prompt, str) else prompt
        for prompt in parsed.prompts
    ]


def _chat(parsed: ChatRequest, tokenizer: Tokenizer) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The messages, and the keyword arguments of Tokenizer.encode_chat."""
    messages = [message.model_dump(exclude_none=True) for message in parsed.messages]
    messages, tools = with_tools(messages, parsed.toolset, tokenizer)
    adds = parsed.add_special_tokens
    return messages, {**parsed.template_options, "tools": tools, "add_special_tokens": adds}
