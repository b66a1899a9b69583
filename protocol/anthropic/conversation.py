"""Converts the conversation of a request to the Messages API to messages of a chat.

Each run of messages of one role is one turn, as in Anthropic's API. A turn of the user
becomes a message for each tool result, and then one message with the texts, if any.
Chat templates expect the results directly after the calls. A turn of the assistant
becomes one message with its texts, its calls and its reasoning.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from protocol.anthropic.blocks import (
    CacheControl,
    ContentBlock,
    InputMessage,
    TextBlock,
    Texts,
    ToolDefinition,
)
from protocol.openai.requests import refuse

MAX_BREAKPOINTS = 4  # as in Anthropic's API
# A line that Claude Code writes at the beginning of its system prompt. It is for
# Anthropic's billing, and differs in each request. With this line in the prompts, no
# two requests would share a cached prefix.
_BILLING_LINE = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")

Part = dict[str, Any]


def chat_messages(
    system: Texts | None,
    messages: Sequence[InputMessage],
    top_level: CacheControl | None,
) -> list[dict[str, Any]]:
    """Returns the messages of a chat with the same conversation.

    Args:
        top_level: The `cache_control` of the request, which applies to the last block.

    Raises:
        InvalidRequest: The last message calls a tool.
    """
    converted: list[dict[str, Any]] = []
    system_parts = _system_parts(system)
    if system_parts:
        converted.append({"role": "system", "content": system_parts})
    for role, group in groupby(messages, lambda message: message.role):
        turn = list(group)
        blocks = [block for message in turn for block in message.blocks]
        if role == "assistant":
            converted.append(_assistant_message(blocks))
        else:
            converted += _results(blocks)
            parts = _text_parts(blocks)
            if parts:
                converted.append({"role": role, "content": parts})
        converted[-1] |= marked(turn[-1].cache_control)
    converted[-1] |= marked(top_level)
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
    parts = (
        [_part(system)] if isinstance(system, str) else list(map(_text_part, system))
    )
    for part in parts:
        part["text"] = _BILLING_LINE.sub("", part["text"])
    return [part for part in parts if part["text"]]


def _part(text: str, control: CacheControl | None = None) -> Part:
    return {"type": "text", "text": text, **marked(control)}


def _text_part(block: TextBlock | ContentBlock) -> Part:
    return _part(block.text or "", block.cache_control)


def _text_parts(blocks: Sequence[ContentBlock]) -> list[Part]:
    return [_text_part(block) for block in blocks if block.type == "text"]


def _results(blocks: Sequence[ContentBlock]) -> Iterator[dict[str, Any]]:
    """Yields a message for each tool result.

    Chat templates do not distinguish failed results, so the text of a failed result
    begins with "Error: ".
    """
    for block in blocks:
        if block.type == "tool_result":
            content = block.content or ""
            if isinstance(content, str):
                parts = [_part(content)] if content else []
            else:
                parts = list(map(_text_part, content))
            if block.is_error:
                if not parts:
                    parts = [_part("")]
                parts[0]["text"] = "Error: " + parts[0]["text"]
            yield {
                "role": "tool",
                "content": parts,
                "tool_call_id": block.tool_use_id,
                **marked(block.cache_control),
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
        # Chat templates write calls after texts. Therefore the `cache_control` of a
        # call applies to the end of the message.
        for block in blocks:
            if block.type == "tool_use":
                message |= marked(block.cache_control)
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return message


def cache_ttls(
    tools: Sequence[ToolDefinition],
    system: Texts | None,
    messages: Sequence[InputMessage],
    top_level: CacheControl | None,
) -> tuple[str, ...]:
    """Returns the `ttl` of each `cache_control`, in the order of the prompt.

    A `cache_control` within the content of a tool result does not count.

    Args:
        top_level: The `cache_control` of the request, which applies to the last block.

    Raises:
        InvalidRequest: There are more than MAX_BREAKPOINTS `cache_control` members.
    """
    controls = [tool.cache_control for tool in tools]
    if system is not None and not isinstance(system, str):
        controls += [block.cache_control for block in system]
    for message in messages:
        controls += [block.cache_control for block in message.blocks]
        controls.append(message.cache_control)
    controls.append(top_level)
    ttls = tuple(control.ttl for control in controls if control is not None)
    if len(ttls) > MAX_BREAKPOINTS:
        refuse(
            "cache_control",
            f"is set at {len(ttls)} places, the limit is {MAX_BREAKPOINTS}; set it at "
            "the end of the parts that stay the same",
        )
    return ttls


def marked(control: CacheControl | None) -> dict[str, Any]:
    """Returns the `cache_control` of a part, message or tool of a chat, if any."""
    if control is None:
        return {}
    return {"cache_control": {"type": control.type, "ttl": control.ttl}}
