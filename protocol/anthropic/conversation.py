"""Converts the conversation of a request to the Messages API to messages of a chat.

Each run of messages of one role is one turn, as in Anthropic's API. A turn of the user
becomes a message for each tool result, and then one message with the texts, because
chat templates expect the results directly after the calls. A turn of the assistant
becomes one message with its texts, its calls and its reasoning.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from protocol import exact_json
from protocol.anthropic.blocks import (
    CacheControl,
    ContentBlock,
    InputMessage,
    Texts,
    ToolDefinition,
)
from protocol.messages import CacheBreakpoint
from protocol.openai.requests import refuse

MAX_BREAKPOINTS = 4  # as in Anthropic's API
# A line that Claude Code writes at the beginning of its system prompt. It is for
# Anthropic's billing, and differs in each request. With this line in the prompt, no
# request would find the prefix of an earlier one in a cache.
_BILLING_LINE = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")

Part = dict[str, Any]


def chat_messages(
    system: Texts | None, messages: Sequence[InputMessage]
) -> list[dict[str, Any]]:
    """Returns the messages of a chat with the same conversation.

    Raises:
        InvalidRequest: The last message calls a tool.
    """
    converted: list[dict[str, Any]] = []
    system_parts = _system_parts(system)
    if system_parts:
        converted.append({"role": "system", "content": system_parts})
    for role, turn in groupby(messages, lambda message: message.role):
        blocks = [block for message in turn for block in message.blocks]
        if role == "assistant":
            converted.append(_assistant_message(blocks))
        else:
            converted += _results(blocks)
            parts = _text_parts(blocks)
            if parts:
                converted.append({"role": role, "content": parts})
    if converted[-1].get("tool_calls"):
        refuse(
            f"messages[{len(messages) - 1}]",
            "has tool_use blocks without tool_result blocks in a message after it; "
            "send the results of the calls",
        )
    return converted


def _system_parts(system: Texts | None) -> list[Part]:
    if system is None:
        return []
    texts = [system] if isinstance(system, str) else [block.text for block in system]
    prompt_texts = [_BILLING_LINE.sub("", text) for text in texts]
    return [_part(text) for text in prompt_texts if text]


def _part(text: str) -> Part:
    return {"type": "text", "text": text}


def _text_parts(blocks: Sequence[ContentBlock]) -> list[Part]:
    return [_part(block.text or "") for block in blocks if block.type == "text"]


def _results(blocks: Sequence[ContentBlock]) -> Iterator[dict[str, Any]]:
    """Yields a message for each tool result.

    Chat templates have no member for a failure, so the text of a failure begins with
    "Error: ".
    """
    for block in blocks:
        if block.type == "tool_result":
            content = block.content or ""
            parts = [_part(text) for text in _texts(content)]
            if block.is_error:
                first = parts[0]["text"] if parts else ""
                parts[:1] = [_part(f"Error: {first}")]
            yield {
                "role": "tool",
                "content": parts,
                "tool_call_id": block.tool_use_id,
            }


def _assistant_message(blocks: Sequence[ContentBlock]) -> dict[str, Any]:
    calls = [
        {"id": block.id, "function": {"name": block.name, "arguments": block.input}}
        for block in blocks
        if block.type == "tool_use"
    ]
    thoughts = [block.thinking for block in blocks if block.thinking]
    parts = _text_parts(blocks)
    message: dict[str, Any] = {"role": "assistant", "content": parts}
    if calls:
        message["tool_calls"] = calls
        message["content"] = parts or None
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return message


def cache_breakpoints(
    tools: Sequence[ToolDefinition],
    system: Texts | None,
    messages: Sequence[InputMessage],
    top_level: CacheControl | None,
) -> tuple[CacheBreakpoint, ...]:
    """Returns the places of `cache_control` in the prompt, in order.

    Args:
        top_level: The `cache_control` of the request, which applies to the last block.

    Raises:
        InvalidRequest: There are too many places.
    """
    pieces = list(_pieces(tools, system, messages))
    if top_level is not None:
        pieces.append((0, top_level))
    num_breakpoints = sum(control is not None for _, control in pieces)
    if num_breakpoints == 0:
        return ()
    if num_breakpoints > MAX_BREAKPOINTS:
        refuse(
            "cache_control",
            f"is set at {num_breakpoints} places, the limit is {MAX_BREAKPOINTS}; set "
            "it at the end of the parts that stay the same",
        )
    total_chars = max(sum(num_chars for num_chars, _ in pieces), 1)
    breakpoints = []
    num_chars_before = 0
    for num_chars, control in pieces:
        num_chars_before += num_chars
        if control is not None:
            share = num_chars_before / total_chars
            breakpoints.append(CacheBreakpoint(control.ttl_s, share))
    return tuple(breakpoints)


def _pieces(
    tools: Sequence[ToolDefinition],
    system: Texts | None,
    messages: Sequence[InputMessage],
) -> Iterator[tuple[int, CacheControl | None]]:
    """Yields the number of characters and the `cache_control` of each part of a
    request. The parts are in the order in which chat templates usually write them.
    """
    for tool in tools:
        schema = exact_json.dumps(tool.input_schema)
        num_chars = len(tool.name) + len(tool.description or "") + len(schema)
        yield num_chars, tool.cache_control
    if isinstance(system, str):
        yield len(system), None
    else:
        for block in system or ():
            yield len(block.text), block.cache_control
    for message in messages:
        for part in message.blocks:
            yield _num_chars(part), part.cache_control
        yield 0, message.cache_control


def _num_chars(block: ContentBlock) -> int:
    num_chars = len(block.text or "") + len(block.thinking or "")
    if block.input is not None:
        num_chars += len(exact_json.dumps(block.input))
    return num_chars + sum(map(len, _texts(block.content or "")))


def _texts(content: Texts) -> list[str]:
    if isinstance(content, str):
        return [content] if content else []
    return [block.text for block in content]
