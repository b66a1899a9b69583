"""Refuses prompts that cannot fit the context, before they are validated and rendered.

Only prompts that certainly do not fit are refused. A prompt can have too many items:
each message, part of a message and tool call has at least one token. Or it can have too
many characters: no token has more characters than the vocabulary's longest token. The
same limits apply to the client's prediction of the answer (`prediction`).
"""

from collections.abc import Iterator
from typing import Any

from protocol.errors import ContextLengthExceeded

# The checks accept a prompt of at most this size even if the context is short. Such a
# prompt is quick to render, and tokenizing stops at twice the length of the context. An
# item is a message, a part of a message, a tool call or a tool.
MIN_ITEMS_LIMIT = 1024
MIN_CHARS_LIMIT = 1 << 22
# Maximum number of characters that Unicode normalization composes into one character.
# Some Greek letters, such as U+1F82, are composed of four characters.
_COMPOSED_CHARS = 4
_ITEM_FIELDS = (
    "messages",
    "input",
    "system",
    "tools",
)  # the fields of a body that have items
_PART_FIELDS = ("content", "tool_calls")  # the fields of a message that have items
_PREDICTION = "prediction"  # a member that has parts, like a message


def check_num_items(members: dict[str, Any], max_model_len: int) -> None:
    """Check how many messages, parts, tool calls and tools a body has.

    The members need not be valid. The check is quick enough for the event loop, so a
    body that is too long is refused without waiting for a thread.

    Raises:
        ContextLengthExceeded: a field has too many items. The error names the field.
    """
    max_items = _max_items(max_model_len)
    num_parts = 1 + _num_further_items(members.get(_PREDICTION))
    if num_parts > max_items:
        _refuse(_PREDICTION, f"{num_parts} parts", max_items, max_model_len)
    if _requests_truncation(members):
        return
    for name in _ITEM_FIELDS:
        items = members.get(name)
        if not isinstance(items, list):
            continue
        num_items = len(items)
        if num_items <= max_items:
            num_items += sum(map(_num_further_items, items))
        if num_items > max_items:
            unit = "messages, parts and tool calls" if name != "tools" else "tools"
            _refuse(name, f"{num_items} {unit}", max_items, max_model_len)


def check_num_chars(
    members: dict[str, Any], max_model_len: int, longest_token_chars: int
) -> None:
    """Check how many characters each prompt and the prediction have.

    Prompts are not checked if the client requests truncation.

    Args:
        longest_token_chars: the number of characters in the vocabulary's longest token.

    Raises:
        ContextLengthExceeded: a field has too many characters. The error names the
            field.
    """
    max_chars = max(
        _COMPOSED_CHARS * longest_token_chars * max_model_len, MIN_CHARS_LIMIT
    )
    lengths = [(_PREDICTION, sum(map(len, _texts(members.get(_PREDICTION)))))]
    if not _requests_truncation(members):
        lengths += _prompt_lengths(members, _max_items(max_model_len))
    for name, num_chars in lengths:
        if num_chars > max_chars:
            _refuse(name, f"{num_chars} characters", max_chars, max_model_len)


def _requests_truncation(members: dict[str, Any]) -> bool:
    """Whether the client requests that long prompts are truncated to fit."""
    return (
        members.get("truncate_prompt_tokens") is not None
        or members.get("truncation") == "auto"
    )


def _max_items(max_model_len: int) -> int:
    return max(max_model_len, MIN_ITEMS_LIMIT)


def _refuse(field: str, size: str, limit: int, max_model_len: int) -> None:
    raise ContextLengthExceeded(
        f"This model's maximum context length is {max_model_len} tokens and `{field}` "
        f"is too long: it has {size}, the limit is {limit}. Send less.",
        param=field,
    )


def _num_further_items(item: Any) -> int:
    """Return the number of a message's content parts and tool calls after the first.

    The first part and the first call are left out, because the caller counts the
    message itself as one item.
    """
    if not isinstance(item, dict):
        return 0
    lists = [item[name] for name in _PART_FIELDS if isinstance(item.get(name), list)]
    return sum(max(len(parts) - 1, 0) for parts in lists)


def _prompt_lengths(
    members: dict[str, Any], max_items: int
) -> Iterator[tuple[str, int]]:
    """Yield the field name and the number of characters of each prompt."""
    prompts = members.get("prompt")
    prompts = prompts if isinstance(prompts, list) else [prompts]
    # Validation accepts at most `max_items` prompts. A longer list can only be valid if
    # its elements are token ids, so it has no texts to count.
    for prompt in prompts[:max_items]:
        if isinstance(prompt, str):
            yield "prompt", len(prompt)
    for name in ("messages", "input", "system"):
        yield name, sum(map(len, _texts(members.get(name))))


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts of messages and of the parts of their contents."""
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            for name in ("content", "text"):
                if item.get(name):
                    yield from _texts(item[name])
